"""Does the adaptive width pay, and can it do harm? Plain, fixed widths and adaptive, side by side, by batch.

  python -m benchmarks.adaptive --data DIR                                  timed: wants a quiet machine
  python -m benchmarks.adaptive --data DIR --batches 1,8 --sets gsm8k       a part of it

One process. A cell is a set of prompts, a batch size and a drafter: the built-in one, or one of the same shape with
random weights. In a cell every mode serves the same requests, in rotated order, --repeats times; ratios are those of
runs of the same repeat. Only steps count in which the whole batch decodes and nothing else is done: at the ends of a
run fewer rows are left, and other ones in every mode. Every adaptive run begins with a fresh policy that knows the
measured costs and what the draft's record says, and nothing of the text. The set `copy` asks for text of the prompt
again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import common, session
from benchmarks.worth_it import rotated
from blockdraft import stats as st
from blockdraft.errors import ConfigError

if TYPE_CHECKING:
    from blockdraft.engine import Engine
    from blockdraft.engine.row import RunningRow
    from blockdraft.engine.times import StepTimes
    from blockdraft.engine.width import WidthPolicy

RESULT = "adaptive.json"
BATCHES = [1, 2, 4, 8, 16, 32]
WIDTHS = [3, 5, 8]
SETS = ("gsm8k", "mtbench", "copy")
DRAFTS = ("own", "random")
LEAST_REQUESTS, ROUNDS = 6, 2  # requests of a cell: so many, and so many for each row of the batch
ADAPTIVE = "adaptive"
RANDOM_SEED = 7
COPY = "Repeat the following text word for word, and nothing else.\n\n{}"


def main() -> int:
    parser = session.parser(__doc__)
    parser.add_argument("--batches", type=session.widths, default=BATCHES)
    parser.add_argument("--widths", type=session.widths, default=WIDTHS)
    parser.add_argument("--sets", type=_words(SETS), default=list(SETS))
    parser.add_argument("--drafts", type=_words(DRAFTS), default=list(DRAFTS))
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    if options.part != (1, 1):
        raise ConfigError("runs are paired in one process; --part is for measurements without a clock")
    return measure(options)


def _words(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        if unknown := [word for word in words if word not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(allowed)}")
        return words

    return parse


def measure(options: argparse.Namespace) -> int:
    settings = session.settings(options) | {"repeats": options.repeats, "widths": options.widths}
    work = common.Work.open(options.work / f"adaptive.{options.dtype}.jsonl", settings, session.run_facts(options))
    cells = [(s, d, b) for d in options.drafts for s in options.sets for b in options.batches]
    todo = [cell for cell in cells if _key(*cell) not in work.records]
    bench = _Bench(options) if todo else None
    for number, (name, draft, batch) in enumerate(todo, start=1):
        assert bench is not None
        work.append(*_key(name, draft, batch), bench.cell(name, draft, batch))
        session.note(f"{number} of {len(todo)} cells: {name}, {draft}, batch {batch}")
    entries = [_entry(options, work.records[_key(*cell)], *cell) for cell in cells]
    result = {
        "what": "decoding with fixed widths and with the adaptive one, against plain decoding by the same engine",
        "formulas": {
            "tok_per_s": "tokens committed in steps in which all rows of the batch decode and no prompt is fed / "
            "seconds of these steps",
            "ratio": "tok_per_s of the mode / that of plain in the same repeat; median, and all of them",
            "of_best_fixed": "median ratio of adaptive / the highest median ratio of plain and the fixed widths",
        },
        "settings": settings,
        "runs": work.runs,
        "cells": entries,
    }
    common.write_json(options.results / RESULT, result)
    return 0


def _key(name: str, draft: str, batch: int) -> tuple[str, str]:
    return f"{name}-{batch}", draft


def prompts_of(options: argparse.Namespace, name: str, batch: int) -> list[common.Prompt]:
    count = max(ROUNDS * batch, LEAST_REQUESTS)
    count = min(count, options.limit or count)
    if name != "copy":
        return common.load_prompts(options.data, name, count)
    source = common.load_prompts(options.data, "gsm8k", count + 1)
    texts = [prompt.text.removesuffix(common.BOXED) for prompt in source]
    pairs = pairwise(texts)
    return [common.Prompt(f"copy-{i}", COPY.format("\n".join(pair))) for i, pair in enumerate(pairs)]


class _Bench:
    """The pair, its random twin, and the measured costs."""

    def __init__(self, options: argparse.Namespace) -> None:
        from blockdraft.engine.cost_probe import cost_key, stored_costs
        from blockdraft.engine.tune import known_acceptance
        from blockdraft.targets import default_cache_dir

        self.options = options
        engine = session.load_engine(options, max_rows=max(options.batches))
        assert engine.draft is not None
        self.engines = {"own": engine, "random": _with_random_draft(engine)}
        folder = session.draft_folder(options)
        self.prior = known_acceptance(folder)
        key = cost_key(
            engine.target,
            engine.draft,
            target_folder=session.target_folder(options),
            draft_folder=folder,
            max_rows=engine.max_rows,
            options={},
        )
        self.costs = stored_costs(
            key, engine.target, engine.draft, max_rows=engine.max_rows, cache_dir=default_cache_dir()
        )

    def cell(self, name: str, draft: str, batch: int) -> dict[str, Any]:
        """The runs of every mode, and the load of the machine before and after."""
        engine, prompts = self.engines[draft], prompts_of(self.options, name, batch)
        modes = [common.PLAIN, ADAPTIVE, *map(common.mode_name, self.options.widths)]
        before = session.load_average()
        self._run(engine, prompts[:1], 1, modes[-1])  # warm
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
        for repeat in range(self.options.repeats):
            for mode in rotated(modes, repeat):
                runs[mode].append(self._run(engine, prompts, batch, mode))
        plain_text = runs[common.PLAIN][0]["ids"]
        for run in (run for of_mode in runs.values() for run in of_mode):
            ids = run.pop("ids")
            run["num_texts_differ"] = sum(a != b for a, b in zip(ids, plain_text, strict=True))
        return {
            "runs": runs,
            "prompts_sha256": common.prompts_digest(prompts),
            "num_requests": len(prompts),
            "costs": self.costs.to_json(),
            "load_average": [before, session.load_average()],
        }

    def _run(self, engine: Engine, prompts: Sequence[common.Prompt], batch: int, mode: str) -> dict[str, Any]:
        from blockdraft.engine import Request
        from blockdraft.engine.adaptive import AdaptiveWidth
        from blockdraft.engine.costs import StepCosts
        from blockdraft.engine.width import FixedWidth

        assert engine.tokenizer is not None and engine.draft is not None
        width = int(mode[1:]) if mode.startswith("w") else None
        policy = AdaptiveWidth(StepCosts(self.costs), num_positions=engine.draft.config.max_width - 1, prior=self.prior)
        watch = _Watch(policy if mode == ADAPTIVE else FixedWidth(), batch)
        engine.width_policy = watch
        engine.max_rows = batch
        asked = [
            Request(
                prompt_ids=engine.tokenizer.chat_ids(
                    [{"role": "user", "content": prompt.text}], add_generation_prompt=True
                ),
                max_new_tokens=self.options.max_new_tokens,
                speculate=mode != common.PLAIN,
                width=width,
            )
            for prompt in prompts
        ]
        done = engine.run(asked)
        return {
            "ids": [list(one.token_ids) for one in done],
            "stats": [one.stats.to_json() for one in done],
            "num_tokens": watch.num_tokens,
            "seconds": watch.seconds,
            "num_steps": watch.num_steps,
            "policy": asdict(policy.report()) if mode == ADAPTIVE else None,
        }


class _Watch:
    """A policy that counts what the steps of full batches gave, and leaves the choice to another."""

    def __init__(self, policy: WidthPolicy, batch: int) -> None:
        self.choose, self.offers, self._policy, self._batch = policy.choose, policy.offers, policy, batch
        self.num_tokens, self.seconds, self.num_steps = 0, 0.0, 0

    def record(
        self, rows: Sequence[RunningRow], widths: Sequence[int], num_accepted: Sequence[int], times: StepTimes
    ) -> None:
        self._policy.record(rows, widths, num_accepted, times)
        if len(rows) == self._batch and not times.num_prefilled:
            self.num_tokens += sum(num_accepted) + len(rows)
            self.seconds += times.total_s
            self.num_steps += 1


def _with_random_draft(engine: Engine) -> Engine:
    """An engine on the same target whose draft has the same shape and random weights."""
    import torch

    from blockdraft.draft import DraftModel
    from blockdraft.engine import Engine as MakeEngine

    own = engine.draft
    assert own is not None
    with torch.random.fork_rng():
        torch.manual_seed(RANDOM_SEED)
        draft = DraftModel(
            own.config,
            has_embedding=own.own_embedding is not None,
            has_head=own.own_head is not None,
            has_mask_embedding=own.mask_embedding is not None,
        )
    draft = draft.to(dtype=own.dtype, device=own.device).eval().requires_grad_(False)
    if own.device.type == "cpu":
        draft.pack_()
    return MakeEngine(engine.target, draft, tokenizer=engine.tokenizer, max_rows=engine.max_rows)


# ---- results ---------------------------------------------------------------------------------------------------------
def _entry(options: argparse.Namespace, record: Mapping[str, Any], name: str, draft: str, batch: int) -> dict[str, Any]:
    rates = {mode: [_rate(run) for run in runs] for mode, runs in record["runs"].items()}
    modes: dict[str, Any] = {}
    for mode, runs in record["runs"].items():
        stats = [st.RequestStats.from_json(one) for run in runs for one in run["stats"]]
        ratios = [a / b for a, b in zip(rates[mode], rates[common.PLAIN], strict=True)]
        modes[mode] = {
            "tok_per_s": median(rates[mode]),
            "ratio": median(ratios),
            "ratios": ratios,
            "pooled_acceptance_length": st.pooled_acceptance_length(stats),
            "num_texts_differ": max(run["num_texts_differ"] for run in runs),
        }
        if mode == ADAPTIVE:
            modes[mode]["policy"] = [run["policy"] for run in runs]
    best = max((m for m in modes if m != ADAPTIVE), key=lambda mode: modes[mode]["ratio"])
    found = {
        "set": name,
        "draft": draft,
        "batch": batch,
        "num_requests": record["num_requests"],
        "load_average": record["load_average"],
        "modes": modes,
        "best_fixed": best,
        "of_best_fixed": modes[ADAPTIVE]["ratio"] / modes[best]["ratio"],
    }
    shown = ", ".join(f"{mode} {entry['ratio']:.2f}" for mode, entry in modes.items())
    print(f"{name} {draft} batch {batch}: {shown}; adaptive of best {found['of_best_fixed']:.3f}")
    return found


def _rate(run: Mapping[str, Any]) -> float:
    if not run["seconds"]:
        raise ConfigError(
            "no step of a run had the whole batch in it: give it more --max-new-tokens, or a larger --limit"
        )
    return float(run["num_tokens"] / run["seconds"])


if __name__ == "__main__":
    session.finish(main)
