"""The whole examination of a pair: which checks, on which prompts, at which sizes, in which order.

Owns the budgets, the exam's own prompts and the rate of false alarms. Knows no command line.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockdraft.accept import SamplingParams
from blockdraft.draft import DraftModel
from blockdraft.engine import Engine
from blockdraft.errors import RequestError
from blockdraft.text import Tokenizer
from blockdraft.verify.cuts import check_cuts
from blockdraft.verify.draft_reference import check_draft
from blockdraft.verify.greedy import Judge, check_batches, check_greedy
from blockdraft.verify.lossless import SampledBudget, examine_sampling
from blockdraft.verify.parity import check_draft_cache, check_rollback, check_target
from blockdraft.verify.reference import Reference
from blockdraft.verify.repeatable import check_seeds
from blockdraft.verify.report import Check, Report, Trial, settled
from blockdraft.verify.system import EngineSystem, System

__all__ = ["ALPHA", "BUDGETS", "Budget", "exam_prompts", "examine_pair", "examine_system"]

ALPHA = 1e-3  # chance of any false alarm in one examination
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    "A shop sells pens at 3 for 2 dollars. How much do 12 pens cost? Think step by step.",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "Translate into German: The weather was fine, so we walked along the river.",
    "List five things to check before a long drive.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Sizes of an examination. `about` says how long it takes, and where that was measured."""

    name: str
    about: str
    num_prompts: int
    greedy_tokens: int
    num_widths: int
    num_seeds: int
    seed_tokens: int
    num_stops: int
    sampled: SampledBudget
    samplings: tuple[tuple[str, SamplingParams], ...]


_PRODUCTION = ("T 1, top-p 0.95", SamplingParams(temperature=1.0, top_p=0.95))
BUDGETS: Mapping[str, Budget] = {
    "quick": Budget(
        name="quick",
        about="about 3 minutes of one CPU core for the built-in pair (measured), judge included",
        num_prompts=4,
        greedy_tokens=48,
        num_widths=1,
        num_seeds=4,
        seed_tokens=24,
        num_stops=6,
        sampled=SampledBudget(num_texts=32, text_tokens=32, num_contexts=2, num_per_context=100),
        samplings=(_PRODUCTION,),
    ),
    "thorough": Budget(
        name="thorough",
        about="about an hour of one CPU core for the built-in pair (reckoned from the quick one)",
        num_prompts=8,
        greedy_tokens=128,
        num_widths=3,
        num_seeds=16,
        seed_tokens=48,
        num_stops=16,
        sampled=SampledBudget(num_texts=128, text_tokens=48, num_contexts=4, num_per_context=250),
        samplings=(
            _PRODUCTION,
            ("T 1", SamplingParams(temperature=1.0)),
            ("T 0.7, top-k 20, min-p 0.02", SamplingParams(temperature=0.7, top_k=20, min_p=0.02)),
        ),
    ),
}

Progress = Callable[[str, float], None]


def exam_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Ids of the exam's own prompts as chats; as plain text where the tokenizer has no chat template."""
    prompts = []
    for text in PROMPTS[:count]:
        if tokenizer.chat_template is not None:
            prompts.append(tokenizer.chat_ids([{"role": "user", "content": text}], add_generation_prompt=True))
        else:
            prompts.append(tokenizer.encode(text, add_special_tokens=True))
    return prompts


def examine_pair(
    engine: Engine,
    *,
    reference: Reference | str,
    draft_folder: Path | None,
    budget: Budget,
    prompts: Sequence[Sequence[int]],
    subject: Mapping[str, Any],
    seed: int,
    checks: Sequence[Check] = (),
    on_progress: Progress = lambda line, share: None,
) -> Report:
    """The report on an engine with a draft. `reference` is the independent reading of its target, or why there is none.

    `draft_folder` is where the draft was read from, for the reference implementation to read it too; None leaves that
    comparison out. `checks` were made before and stand first in the report.
    """
    started = time.monotonic()
    system, target, draft = EngineSystem(engine), engine.target, engine.draft
    on_progress("target and draft by themselves", 0.0)
    judge = _judge(system, prompts, reference, target.dtype.itemsize)
    made = [*checks]
    if isinstance(reference, str):
        made.append(Check(name="target parity", outcome="not run", finding="", reason=reference))
    else:
        made.append(check_target(system, prompts, judge, target.dtype.itemsize))
    made.append(check_rollback(target, seed))
    if isinstance(draft, DraftModel):
        made.append(check_draft_cache(target, draft, prompts[0], seed))
        if draft_folder is not None:
            made.append(check_draft(target, draft, draft_folder, prompts[0]))
    report = examine_system(
        system,
        prompts,
        judge=judge,
        budget=budget,
        itemsize=target.dtype.itemsize,
        seed=seed,
        subject=subject,
        on_progress=on_progress,
    )
    return replace(report, checks=(*made, *report.checks), seconds=time.monotonic() - started)


def _judge(system: System, prompts: Sequence[Sequence[int]], reference: Reference | str, itemsize: int) -> Judge:
    longest = max(prompts, key=len)
    if isinstance(reference, str):
        return Judge.measured("the target's own pass over the whole text", system.logits, system, longest, itemsize)
    return Judge.measured("transformers in float64", reference.logits, system, longest, itemsize)


def examine_system(
    system: System,
    prompts: Sequence[Sequence[int]],
    *,
    judge: Judge,
    budget: Budget,
    itemsize: int,
    seed: int,
    subject: Mapping[str, Any],
    on_progress: Progress = lambda line, share: None,
) -> Report:
    """The checks of a pair at work: greedy identity, batches, seeds, cuts, and the losslessness exam.

    `itemsize`: bytes of the number format that the system computes in.
    """
    started = time.monotonic()
    _check_room(system, prompts, budget)
    source = random.Random(seed)
    on_progress("greedy text", 0.05)
    checks, plain = check_greedy(system, prompts, _widths(system, budget), budget.greedy_tokens, judge)
    checks.append(check_batches(system, prompts, budget.greedy_tokens, plain, judge))
    on_progress("seeds, stops and lengths", 0.2)
    checks.append(
        check_seeds(
            system,
            prompts,
            budget.seed_tokens,
            num_seeds=budget.num_seeds,
            seed=source.getrandbits(60),
            is_exact=itemsize >= 4,
        )
    )
    checks.append(check_cuts(system, prompts[0], seed=source.getrandbits(60), num_stops=budget.num_stops))
    trials: list[Trial] = []
    for index, (name, sampling) in enumerate(budget.samplings):
        done, part = 0.3 + 0.7 * index / len(budget.samplings), 0.7 / len(budget.samplings)
        found = examine_sampling(
            system,
            prompts,
            sampling,
            budget.sampled,
            seed=source.getrandbits(60),
            slack=1e-4 if itemsize >= 4 else 2e-2,
            on_progress=lambda share, name=name, done=done, part=part: on_progress(  # type: ignore[misc]
                f"sampled text, {name}", done + part * share
            ),
        )
        trials.extend(replace(trial, name=f"{trial.name} ({name})") for trial in found)
    return Report(
        subject=subject,
        budget=budget.name,
        alpha=ALPHA,
        checks=(*checks, *settled(trials, ALPHA)),
        seconds=time.monotonic() - started,
    )


def _widths(system: System, budget: Budget) -> list[int]:
    """The widest block, then narrower ones, evenly spaced down to 2."""
    most = system.max_width
    count = min(budget.num_widths, most - 1)
    return [most] if count == 1 else sorted({2 + (most - 2) * i // (count - 1) for i in range(count)}, reverse=True)


def _check_room(system: System, prompts: Sequence[Sequence[int]], budget: Budget) -> None:
    most = max(budget.greedy_tokens, budget.sampled.text_tokens, budget.seed_tokens, 2 * system.max_width + 2)
    longest = max(map(len, prompts)) + most
    if longest > system.facts.max_length:
        raise RequestError(
            f"the {budget.name} examination needs {longest} positions and the target has {system.facts.max_length}; "
            "use --quick, or a target with more"
        )
