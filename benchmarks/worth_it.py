"""Is speculation worth it? Acceptance on 100 GSM8K test prompts, and speed against plain decoding on 20 of them.

  python -m benchmarks.worth_it acceptance --data DIR    counters only: may run on a busy machine, and in parts
  python -m benchmarks.worth_it speed --data DIR         timed: wants a quiet machine

Speed: one process; each prompt runs in every mode, in rotated order, --repeats times. Decode time excludes the
prefill; ratios that include it are given beside. Each dtype gets an entry of its own in results/worth_it.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import common, session
from blockdraft import stats as st
from blockdraft.errors import ConfigError

NUM_PROMPTS = {"acceptance": 100, "speed": 20}
WIDTHS = {"acceptance": [8], "speed": [4, 5, 8]}
WARM_UP_TOKENS = 32
RESULT = "worth_it.json"


def main() -> int:
    parser = session.parser(__doc__)
    parser.add_argument("stage", choices=list(NUM_PROMPTS))
    parser.add_argument("--widths", type=session.widths, help="default 8 (acceptance); 4,5,8 (speed)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each prompt and mode")
    parser.add_argument("--merge", action="store_true", help="no runs: report what the parts recorded")
    parser.add_argument(
        "--reuse", type=Path, nargs="*", default=[], metavar="FILE", help="work files of lossless to take runs from"
    )
    options = parser.parse_args()
    if options.stage == "speed" and (options.part != (1, 1) or options.reuse):
        raise ConfigError("speed runs are paired in one process; --part and --reuse are for acceptance")
    options.widths = options.widths or WIDTHS[options.stage]
    count = NUM_PROMPTS[options.stage]
    prompts = common.load_prompts(options.data, "gsm8k", min(count, options.limit or count))
    return (_acceptance if options.stage == "acceptance" else _speed)(options, prompts)


# ---- acceptance ----------------------------------------------------------------------------------------------------
def _acceptance(options: argparse.Namespace, prompts: Sequence[common.Prompt]) -> int:
    settings = session.settings(options)
    reused = _reused(options, settings)
    stem = f"acceptance.{options.dtype}.part"
    if not options.merge:
        part, of = options.part
        path = options.work / f"{stem}-{part}-of-{of}.jsonl"
        work = common.Work.open(path, settings, session.run_facts(options))
        common.generate_all(
            work,
            common.part_of(prompts, options.part),
            options.widths,
            options.max_new_tokens,
            lambda: session.load_engine(options),
            skip=reused.records,
        )
        if of > 1:
            return 0
    paths = list(options.work.glob(f"{stem}-*.jsonl"))
    work = common.merge(paths) if paths or not reused.records else common.Work(settings=reused.settings)
    assert work.settings is not None
    common.check_settings({**settings, "threads": work.settings["threads"]}, work.settings, "the work files")
    work.records = reused.records | work.records
    modes = {width: common.mode_name(width) for width in options.widths}
    work.require((prompt.id, mode) for prompt in prompts for mode in modes.values())
    entry: dict[str, Any] = {
        "set": "gsm8k",
        "settings": work.settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "runs": reused.runs + work.runs,
        "num_reused": sum((p.id, mode) in reused.records for p in prompts for mode in modes.values()),
        "widths": {
            str(width): common.acceptance_summary([work.records[p.id, mode] for p in prompts])
            for width, mode in modes.items()
        },
    }
    _store(options, "acceptance", entry)
    for width, found in entry["widths"].items():
        length = found["pooled_acceptance_length"]
        print(f"width {width}: {length['estimate']:.3f} [{length['low']}, {length['high']}] over {len(prompts)}")
    return 0


def _reused(options: argparse.Namespace, settings: Mapping[str, Any]) -> common.Work:
    """Runs of the same pair, dtype and length limit that another measurement recorded; threads may differ."""
    if not options.reuse:
        return common.Work()
    work = common.merge(options.reuse)
    assert work.settings is not None
    common.check_settings({**settings, "threads": work.settings["threads"]}, work.settings, "--reuse")
    return work


# ---- speed ---------------------------------------------------------------------------------------------------------
def rotated(modes: Sequence[Any], by: int) -> list[Any]:
    """The modes, starting with another one each time, so that none always runs first."""
    return [modes[(index + by) % len(modes)] for index in range(len(modes))]


def _speed(options: argparse.Namespace, prompts: Sequence[common.Prompt]) -> int:
    settings = session.settings(options) | {"repeats": options.repeats, "widths": options.widths}
    path = options.work / f"speed.{options.dtype}.jsonl"
    work = common.Work.open(path, settings, session.run_facts(options))
    todo = [(at, p) for at, p in enumerate(prompts) if (p.id, "speed") not in work.records]
    if todo and options.merge:
        raise ConfigError(f"{len(todo)} of {len(prompts)} prompts have no record; run without --merge")
    modes = [None, *options.widths]
    engine = session.load_engine(options) if todo else None
    for number, (at, prompt) in enumerate(todo):
        assert engine is not None
        if number == 0:
            for width in modes:
                common.generate(engine, prompt, width, WARM_UP_TOKENS)
        runs: dict[str, list[dict[str, Any]]] = {common.mode_name(width): [] for width in modes}
        before = session.load_average()
        for repeat in range(options.repeats):
            for width in rotated(modes, at + repeat):
                run = common.generate(engine, prompt, width, options.max_new_tokens)
                runs[common.mode_name(width)].append(run)
        plain_ids = runs[common.PLAIN][0]["ids"]
        for run in (run for of_mode in runs.values() for run in of_mode):
            run["is_plain_text"] = run.pop("ids") == plain_ids
            del run["prompt_ids"]
        work.append(prompt.id, "speed", {"runs": runs, "load_average": [before, session.load_average()]})
        session.note(f"{number + 1} of {len(todo)} prompts")
    records = [work.records[prompt.id, "speed"] for prompt in prompts]
    entry: dict[str, Any] = {
        "set": "gsm8k",
        "settings": settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "runs": work.runs,
        "timing": "decode_s excludes the prefill; *_with_prefill includes it; warm-up runs are not counted",
        "highest_load_average": max((x for r in records for x in r["load_average"] if x is not None), default=None),
        "modes": speed_summary([record["runs"] for record in records]),
    }
    _store(options, "speed", entry)
    print(json.dumps(entry["modes"], indent=1))
    return 0


def speed_summary(prompts: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """Per mode: tok/s, time of a step, and ratios to plain. `prompts[i][mode]` are the runs of prompt i.

    ratio_i = median over repeats of the mode's tok/s / that of plain; `median_ratio` is the median over prompts with
    its bootstrap interval; `total_ratio` divides the totals, all tokens over all seconds.
    """
    names = list(prompts[0])
    stats = {
        name: [[st.RequestStats.from_json(run["stats"]) for run in runs[name]] for runs in prompts] for name in names
    }
    every = {name: [one for of_prompt in stats[name] for one in of_prompt] for name in names}
    summary: dict[str, Any] = {}
    for name in names:
        requests = every[name]
        ms_per_step = 1e3 * sum(r.decode_s for r in requests) / sum(r.num_steps for r in requests)
        summary[name] = {
            "decode_tok_per_s": st.decode_tok_per_s(requests),
            "tok_per_s_with_prefill": st.output_tok_per_s(requests),
            "ms_per_step": ms_per_step,
            "decode_tok_per_s_by_prompt": _by_prompt(stats[name], st.decode_tok_per_s),
            "repeat_spread": _spread(stats[name]),
        }
        if name == common.PLAIN:
            continue
        plain = summary[common.PLAIN]
        for key, rate in (("", st.decode_tok_per_s), ("_with_prefill", st.output_tok_per_s)):
            pairs = zip(_by_prompt(stats[name], rate), _by_prompt(stats[common.PLAIN], rate), strict=True)
            ratios = [mode / base for mode, base in pairs]
            summary[name][f"median_ratio{key}"] = common.median_interval(ratios)
            summary[name][f"num_prompts_faster{key}"] = sum(ratio > 1 for ratio in ratios)
            total, base = rate(requests), rate(every[common.PLAIN])
            assert total is not None and base is not None
            summary[name][f"total_ratio{key}"] = total / base
        summary[name] |= {
            "pooled_acceptance_length": st.pooled_acceptance_length(requests),
            "break_even_acceptance_length": ms_per_step / plain["ms_per_step"],
            "num_prompts_text_differs": sum(not all(r["is_plain_text"] for r in runs[name]) for runs in prompts),
        }
    return summary


def _by_prompt(stats: Sequence[Sequence[st.RequestStats]], rate: Any) -> list[float]:
    """Median over the repeats of each prompt."""
    return [median(rate([one]) or 0.0 for one in of_prompt) for of_prompt in stats]


def _spread(stats: Sequence[Sequence[st.RequestStats]]) -> float:
    """Mean over prompts of (slowest - fastest) / median decode time of the repeats: how quiet it was."""
    times = [[one.decode_s for one in of_prompt] for of_prompt in stats]
    return fmean((max(t) - min(t)) / median(t) for t in times)


def _store(options: argparse.Namespace, stage: str, entry: dict[str, Any]) -> None:
    """Put the entry of this stage and dtype into the result; entries of another pair are dropped."""
    path = options.results / RESULT
    result = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    pair = {name: entry["settings"][name] for name in ("draft", "target")}
    if result.get("pair") != pair:
        result = {"what": "acceptance and speed of greedy decoding against plain", "pair": pair}
    result.setdefault(stage, {})[options.dtype] = entry
    common.write_json(path, result)


if __name__ == "__main__":
    session.finish(main)
