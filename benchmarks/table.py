"""The tables of the README, made of results/*.json and nothing else.

python -m benchmarks.table                      print them
python -m benchmarks.table --write README.md    put them between the marks
python -m benchmarks.table --check README.md    exit 1 if the README says anything else
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import session
from blockdraft.errors import ConfigError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
SET_NAMES = {"gsm8k": "GSM8K test", "mtbench": "MT-Bench, first turns"}


def block(results: Path) -> str:
    """Everything between the marks, marks excluded."""
    lossless, worth_it = _read(results / "lossless.json"), _read(results / "worth_it.json")
    parts = []
    pairs = []
    if lossless:
        parts.append(_lossless(lossless))
        pairs.append({name: lossless["settings"][name] for name in ("draft", "target")})
    if worth_it:
        parts += [_acceptance(dtype, entry) for dtype, entry in worth_it.get("acceptance", {}).items()]
        parts += [_speed(dtype, entry) for dtype, entry in worth_it.get("speed", {}).items()]
        pairs.append(worth_it["pair"])
    if not parts:
        raise ConfigError("no results to show; run the measurements first")
    if pairs[0] != pairs[-1]:
        raise ConfigError("lossless.json and worth_it.json are of different pairs; measure one of them again")
    names = pairs[0]
    head = f"Draft `{names['draft']['name']}`, target `{names['target']['name']}`, greedy."
    return "\n\n".join([head, *parts])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


# ---- tables --------------------------------------------------------------------------------------------------------
def _lossless(result: Mapping[str, Any]) -> str:
    rows = [
        [
            SET_NAMES[entry["set"]],
            entry["width"],
            f"{entry['num_identical']} of {entry['num_prompts']}",
            entry["num_ties"],
            entry["num_failures"],
            f"{entry['num_tokens_compared']:,}",
            _interval(entry["acceptance"]["pooled_acceptance_length"]),
        ]
        for entry in result["comparisons"]
    ]
    heads = ["prompts", "width", "same text", "ties", "failures", "tokens compared", "1 + ΣA/ΣS [95 %]"]
    return _table("Text with the draft against plain text of the same engine", heads, rows, result)


def _acceptance(dtype: str, entry: Mapping[str, Any]) -> str:
    rows = []
    for width, found in entry["widths"].items():
        rows.append(
            [
                width,
                found["num_requests"],
                f"{found['mean_output_tokens']:.0f}",
                _interval(found["pooled_acceptance_length"]),
                f"{found['committed_acceptance_length']:.2f}",
                f"{found['mean_acceptance_length']:.2f}",
                " ".join(f"{100 * share:.0f}" for share in found["survival_by_position"]),
            ]
        )
    heads = ["width", "prompts", "mean tokens", "pooled 1 + ΣA/ΣS [95 %]", "committed Σ(C-1)/ΣS"]
    heads += ["per-request mean 1 + A/S", "position accepted, %"]
    return _table(f"Acceptance, {SET_NAMES[entry['set']]}, {dtype}", heads, rows, entry)


def _speed(dtype: str, entry: Mapping[str, Any]) -> str:
    rows = []
    for name, found in entry["modes"].items():
        row = [name.replace("w", "width "), f"{found['decode_tok_per_s']:.1f}", f"{found['ms_per_step']:.1f}"]
        if "median_ratio" in found:
            row += [f"{found[key]:.2f}" for key in ("break_even_acceptance_length", "pooled_acceptance_length")]
            row += [_interval(found["median_ratio"]), f"{found['total_ratio']:.2f}"]
            row += [_interval(found["median_ratio_with_prefill"]), str(found["num_prompts_text_differs"])]
        else:
            row += ["1", "1", "1", "1", "1", ""]
        rows.append(row)
    heads = ["mode", "decode tok/s", "ms per step", "break-even", "1 + ΣA/ΣS", "speed-up, median [95 %]"]
    heads += ["of totals", "with prefill [95 %]", "texts that differ"]
    count = len(next(iter(entry["modes"].values()))["decode_tok_per_s_by_prompt"])
    title = f"Speed, {count} prompts of {SET_NAMES[entry['set']]}, {dtype}, {_threads(entry)}"
    return _table(title, heads, rows, entry)


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    if found["low"] is None:
        return f"{found['estimate']:.2f}"
    return f"{found['estimate']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], entry: Mapping[str, Any]) -> str:
    lines = [f"**{title}**", "", _row(heads), _row(["---"] * len(heads)), *map(_row, rows), "", _where(entry)]
    return "\n".join(lines)


def _threads(entry: Mapping[str, Any]) -> str:
    count = entry["settings"]["threads"]
    return f"{count} thread{'' if count == 1 else 's'}"


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _where(entry: Mapping[str, Any]) -> str:
    """One line of provenance; of several runs the last one's machine, and every commit."""
    run, settings = entry["runs"][-1], entry["settings"]
    machine, versions = run["machine"], run["versions"]
    commits = dict.fromkeys(f"{(r['commit'] or 'unknown')[:10]}{'+' if r['is_dirty'] else ''}" for r in entry["runs"])
    chip = machine["cpu"] if settings["device"] == "cpu" else machine["gpu"]
    return (
        f"<sub>{chip}, {machine['cores']} cores, {_threads(entry)} per process, "
        f"{machine['ram_gib']} GiB, {machine['os']}, Python {versions['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {settings['dtype']}, up to {settings['max_new_tokens']} tokens, "
        f"{run['date_utc'][:10]}, commit {', '.join(commits)}</sub>"
    )


# ---- the README ----------------------------------------------------------------------------------------------------
def split(text: str) -> tuple[str, str, str]:
    """What is before the block, the block, and what is after it."""
    before, begin, rest = text.partition(BEGIN)
    shown, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no {BEGIN} ... {END}; put the marks where the tables belong")
    return before + begin, shown.strip("\n"), end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args()
    made = block(options.results)
    if options.write:
        before, _, after = split(options.write.read_text("utf-8"))
        options.write.write_text(f"{before}\n{made}\n{after}", encoding="utf-8")
    elif options.check:
        if split(options.check.read_text("utf-8"))[1] != made:
            print(f"{options.check.name} does not show the results; run python -m benchmarks.table --write")
            return 1
    else:
        print(made)
    return 0


if __name__ == "__main__":
    session.finish(main)
