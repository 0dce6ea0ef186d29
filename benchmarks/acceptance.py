"""How many tokens does a step commit, over five sets of prompts, greedy and sampled?

First 200 GSM8K test questions, 100 MBPP tasks (sanitized, none of its training split), 80 first turns of MT-Bench, 60
HumanEval stubs, 100 prompts that the target made up (chat_prompts.json); 256 new tokens through the engine, many rows a
step, at every width of --widths, greedily and at temperature 1, top-p .95 (one seed for each prompt). Counters only: it
may run on a busy machine, and in parts (--part 1/2 and --part 2/2, then --merge). A killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import common, session
from blockdraft.errors import ConfigError

if TYPE_CHECKING:
    from blockdraft.engine import Completion, Engine

SETS = {"gsm8k": 200, "mbpp": 100, "mtbench": 80, "humaneval": 60, "chat": 100}
SAMPLINGS: dict[str, dict[str, float]] = {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95}}
SEED = 7000
RESULT = "acceptance.json"


def mode_of(sampling: str, width: int) -> str:
    return f"{sampling}.{common.mode_name(width)}"


def main() -> int:
    parser = session.parser(__doc__)
    parser.add_argument("--widths", type=session.widths, default=[8, 5], help="default 8,5")
    parser.add_argument("--sets", default=",".join(SETS), help=f"default {','.join(SETS)}")
    parser.add_argument("--samplings", default=",".join(SAMPLINGS), help="default greedy,sampled")
    parser.add_argument("--max-rows", type=int, default=24, help="rows of an engine step")
    parser.add_argument("--merge", action="store_true", help="no runs: report what the parts recorded")
    options = parser.parse_args()
    names, samplings = _chosen("--sets", options.sets, SETS), _chosen("--samplings", options.samplings, SAMPLINGS)
    prompts = [
        prompt
        for name in names
        for prompt in common.load_prompts(options.data, name, min(SETS[name], options.limit or SETS[name]))
    ]
    settings = session.settings(options) | {"sampling": {name: SAMPLINGS[name] for name in SAMPLINGS}, "seed": SEED}
    stem = f"served.{settings['draft']['sha256']}.{options.dtype}.part"
    if not options.merge:
        part, of = options.part
        work = common.Work.open(options.work / f"{stem}-{part}-of-{of}.jsonl", settings, session.run_facts(options))
        _measure(options, work, prompts, samplings)
        if of > 1:
            return 0
    work = common.merge(options.work.glob(f"{stem}-*.jsonl"))
    assert work.settings is not None
    common.check_settings({**settings, "threads": work.settings["threads"]}, work.settings, "the work files")
    modes = [mode_of(sampling, width) for sampling in samplings for width in options.widths]
    work.require((prompt.id, mode) for prompt in prompts for mode in modes)
    result = summary(work, prompts, samplings, options.widths)
    result["draft_file_sha256"] = session.draft_digest(options)
    common.write_json(options.results / RESULT, result)
    for row in result["rows"]:
        length = row["acceptance"]["pooled_acceptance_length"]
        print(f"{row['set']} {row['sampling']} width {row['width']}: {_shown(length)} over {row['num_prompts']}")
    return 0


def _chosen(option: str, given: str, known: Mapping[str, Any]) -> list[str]:
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{option} names {unknown[0]!r}; there are {', '.join(known)}")
    return names


# ---- running -------------------------------------------------------------------------------------------------------
def _measure(
    options: argparse.Namespace, work: common.Work, prompts: Sequence[common.Prompt], samplings: Sequence[str]
) -> None:
    """Run and record what has no record yet, one mode after the other, many rows at once."""
    mine = common.part_of(prompts, options.part)
    modes = [(sampling, width) for sampling in samplings for width in options.widths]
    todo = {mode: [p for p in mine if (p.id, mode_of(*mode)) not in work.records] for mode in modes}
    if not any(todo.values()):
        return
    engine = session.load_engine(options, max_rows=options.max_rows)
    for (sampling, width), left in todo.items():
        session.note(f"{mode_of(sampling, width)}: {len(left)} prompts to run")
        run_mode(engine, work, left, sampling, width, options.max_new_tokens)


def run_mode(
    engine: Engine,
    work: common.Work,
    prompts: Sequence[common.Prompt],
    sampling: str,
    width: int,
    max_new_tokens: int,
) -> None:
    """All prompts in one mode as one batch; each completion is on disk before the next step of the engine."""
    from blockdraft.accept import SamplingParams
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    tickets = {}
    for prompt in prompts:
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": prompt.text}], add_generation_prompt=True)
        params = SamplingParams(**SAMPLINGS[sampling])
        seed = None if params.is_greedy else seed_of(prompt)
        tickets[prompt.id] = engine.submit(
            Request(
                prompt_ids=ids,
                max_new_tokens=max_new_tokens,
                sampling=params,
                seed=seed,
                speculate=True,
                width=width,
            )
        )
    while tickets:
        engine.step()
        for name, ticket in list(tickets.items()):
            if ticket.completion is not None:
                work.append(name, mode_of(sampling, width), record_of(name, ticket.completion))
                del tickets[name]
        print(f"\r{len(tickets)} left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def seed_of(prompt: common.Prompt) -> int:
    """The seed of a sampled run: of the prompt's name, so that it stays whatever else is run."""
    return int.from_bytes(hashlib.sha256(f"{SEED}:{prompt.id}".encode()).digest()[:4])


def record_of(name: str, completion: Completion) -> dict[str, Any]:
    if not completion.speculation.enabled:
        raise ConfigError(f"{name}: speculation stopped: {completion.speculation.reason}; shorten the run")
    return {
        "ids": list(completion.token_ids),
        "finish": completion.finish_reason,
        "stats": completion.stats.to_json(),
    }


# ---- the result ----------------------------------------------------------------------------------------------------
def summary(
    work: common.Work, prompts: Sequence[common.Prompt], samplings: Sequence[str], widths: Sequence[int]
) -> dict[str, Any]:
    """One row per set, sampling and width; greedy rows also say whether the widths gave the same texts."""
    by_set = {name: [p for p in prompts if p.set == name] for name in dict.fromkeys(p.set for p in prompts)}
    rows = [
        _row(work, name, members, sampling, width, widths[0])
        for sampling in samplings
        for width in widths
        for name, members in by_set.items()
    ]
    assert work.settings is not None
    return {
        "what": "acceptance of served text by set of prompts, sampling and width",
        "loop": f"the last {common.LOOP_TOKENS} tokens repeat with a period of at most {common.LOOP_PERIODS[-1]}",
        "pair": {name: work.settings[name] for name in ("draft", "target")},
        "settings": work.settings,
        "prompts_sha256": {name: common.prompts_digest(members) for name, members in by_set.items()},
        "runs": work.runs,
        "rows": rows,
    }


def _row(
    work: common.Work, name: str, prompts: Sequence[common.Prompt], sampling: str, width: int, first_width: int
) -> dict[str, Any]:
    records = [work.records[p.id, mode_of(sampling, width)] for p in prompts]
    without = [record for record in records if not common.loops(record["ids"])]
    row: dict[str, Any] = {"set": name, "sampling": sampling, "width": width, "num_prompts": len(prompts)}
    if sampling == "greedy":
        first = [work.records[p.id, mode_of(sampling, first_width)] for p in prompts]
        row["num_texts_as_at_first_width"] = sum(a["ids"] == b["ids"] for a, b in zip(records, first, strict=True))
    row["num_loops"] = len(records) - len(without)
    row["acceptance"] = common.acceptance_summary(records)
    row["acceptance_without_loops"] = common.acceptance_summary(without) if without else None
    return row


def _shown(length: Mapping[str, Any] | None) -> str:
    if length is None:
        return "no steps"
    if length["low"] is None:
        return f"{length['estimate']:.3f}"
    return f"{length['estimate']:.3f} [{length['low']:.3f}, {length['high']:.3f}]"


if __name__ == "__main__":
    session.finish(main)
