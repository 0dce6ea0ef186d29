"""Runs of the training's own evaluator, kept prompt by prompt: the evaluation can be killed, and goes on.

Owns the records of replayed steps and the way back to the evaluator's result. What the numbers mean is
blockdraft.train.evaluate's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks import common, session
from blockdraft import stats as st
from blockdraft.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from blockdraft.config import DraftConfig
    from blockdraft.targets import Target
    from blockdraft.text import Tokenizer
    from blockdraft.train.evaluate import EvalResult, EvaluatedText

RANK_BOUNDS = (1, 2, 4, 8, 16, 64, 256, 1024)  # a gold id's place among the draft's logits, 0 is the largest


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=8, help="width of the served block (default 8)")
    parser.add_argument("--max-rows", type=int, default=16, help="rows of an engine step")


def load_target_for(options: argparse.Namespace, config: DraftConfig) -> tuple[Target, Tokenizer]:
    """The options' target with the taps that a draft reads, and its tokenizer."""
    import torch

    from blockdraft.engine.load import DTYPES
    from blockdraft.targets import load_target
    from blockdraft.text import load_tokenizer

    torch.set_num_threads(options.threads)
    folder = session.target_folder(options)
    target = load_target(
        folder,
        tap_layer_ids=config.target_layer_ids,
        dtype=DTYPES[options.dtype],
        device=options.device,
        tap_stream=config.tap_stream or "prefix",
    )
    return target, load_tokenizer(folder)


def evaluate(
    options: argparse.Namespace,
    work: common.Work,
    mode: str,
    prompts: Sequence[common.Prompt],
    target: Target,
    tokenizer: Tokenizer,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
) -> None:
    """Evaluate a draft on every prompt that has no record in this mode, `--max-rows` prompts at a time."""
    from blockdraft.train.evaluate import Evaluator

    todo = [prompt for prompt in prompts if (prompt.id, mode) not in work.records]
    for start in range(0, len(todo), options.max_rows):
        part = todo[start : start + options.max_rows]
        ids = [tokenizer.chat_ids([{"role": "user", "content": p.text}], add_generation_prompt=True) for p in part]
        evaluator = Evaluator(
            target,
            config,
            ids,
            width=options.width,
            max_new_tokens=options.max_new_tokens,
            max_rows=options.max_rows,
        )
        found = evaluator.run_weights(tensors)
        for prompt, text in zip(part, found.texts, strict=True):
            work.append(prompt.id, mode, record_of(text))
        print(f"\r{mode}: {start + len(part)} of {len(todo)} prompts", end="", file=sys.stderr, flush=True)
    if todo:
        print(file=sys.stderr)


# ---- records ---------------------------------------------------------------------------------------------------------
def record_of(text: EvaluatedText) -> dict[str, Any]:
    """A text as JSON; a step is [anchor, proposals, accepted, emitted, ranks, picked (0 or 1)]."""
    steps = [
        [
            s.served.anchor,
            s.served.num_draft,
            s.served.num_accepted,
            s.served.num_emitted,
            [*s.ranks],
            [*map(int, s.picked)],
        ]
        for s in text.steps
    ]
    return {
        "ids": list(text.token_ids),
        "finish": text.finish_reason,
        "stats": text.stats.to_json(),
        "steps": steps,
    }


def text_of(record: Mapping[str, Any]) -> EvaluatedText:
    """The way back from `record_of`."""
    from blockdraft.train.evaluate import EvaluatedText
    from blockdraft.train.replay import ReplayedStep, ServedStep

    steps = tuple(
        ReplayedStep(
            ServedStep(anchor=anchor, num_draft=draft, num_accepted=accepted, num_emitted=emitted),
            tuple(ranks),
            tuple(map(bool, picked)),
        )
        for anchor, draft, accepted, emitted, ranks, picked in record["steps"]
    )
    return EvaluatedText(
        token_ids=tuple(record["ids"]),
        finish_reason=record["finish"],
        stats=st.RequestStats.from_json(record["stats"]),
        steps=steps,
    )


def result_of(options: argparse.Namespace, records: Sequence[Mapping[str, Any]], config: DraftConfig) -> EvalResult:
    """The evaluator's result over these records, wherever and whenever they were made."""
    from blockdraft.train.evaluate import LIST_SIZE_WITHOUT_SELECTOR, EvalResult

    list_size = LIST_SIZE_WITHOUT_SELECTOR if config.selector is None else config.selector.top_k
    return EvalResult(
        width=options.width,
        max_new_tokens=options.max_new_tokens,
        list_size=min(list_size, config.vocab_size),
        texts=tuple(map(text_of, records)),
        serve_s=0.0,
        replay_s=0.0,
    )


def shown(result: EvalResult) -> dict[str, Any]:
    """The result without prompts and without times, which a run in parts does not have."""
    left_out = ("prompts", "formulas", "serve_s", "replay_s")
    return {key: value for key, value in result.to_json().items() if key not in left_out}


def formulas() -> dict[str, str]:
    from blockdraft.train.evaluate import FORMULAS

    return dict(FORMULAS)


def rank_histograms(result: EvalResult) -> list[dict[str, Any]]:
    """By position: where the gold id stood when the walk failed there, as numbers of steps by rank."""
    histograms: list[dict[str, Any]] = []
    labels = _rank_labels()
    for text in result.texts:
        for step in text.steps:
            at = step.walk_accepted
            if at >= len(step.ranks):
                continue
            while len(histograms) <= at:
                histograms.append({"position": len(histograms) + 1, "steps_by_rank": dict.fromkeys(labels, 0)})
            histograms[at]["steps_by_rank"][labels[_rank_bin(step.ranks[at])]] += 1
    return histograms


def _rank_bin(rank: int) -> int:
    return sum(rank >= bound for bound in RANK_BOUNDS)


def _rank_labels() -> list[str]:
    """The ranks of each bin: 0, 1, 2-3 and so on, and from the last bound on."""
    bounds = (0, *RANK_BOUNDS)
    spans = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(bounds)]
    return [*spans, f"{bounds[-1]}-"]


def print_line(name: str, result: EvalResult) -> None:
    found = result.summary()
    if found["acceptance_length"] is None:
        raise ConfigError(f"{name}: no text took a step; ask for more tokens")
    gain = found["selector_gain"]["estimate"]
    print(
        f"{name}: walk {found['acceptance_length']['estimate']:.3f}, base {found['base_acceptance_length']:.3f}, "
        f"oracle {found['oracle_acceptance_length']:.3f}, selector {gain:+.3f}; blocks lost to misses "
        f"{found['miss_rate']:.0%}, to rank errors {found['misrank_rate']:.0%}"
    )
