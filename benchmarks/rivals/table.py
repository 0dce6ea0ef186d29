"""The table of rivals for the README, and its figure, from results/rivals.json alone.

python -m benchmarks.rivals.table                       print the table
python -m benchmarks.rivals.table --figure FILE.svg     draw the figure
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import session
from benchmarks.markdown import SET_NAMES, interval, read, table
from benchmarks.rivals.figure import drawn
from benchmarks.rivals.modes import LOOKUP, PLAIN, V1, V2
from blockdraft.errors import ConfigError

BEGIN, END = "<!-- rivals:begin -->", "<!-- rivals:end -->"
RESULT = "rivals.json"
_HOW = {PLAIN: "plain", LOOKUP: "prompt lookup", V1: "DFlash 1 drafter", V2: "DFlash 2 drafter"}


def block(results: Path) -> str:
    """Everything between the marks, marks excluded."""
    result = _result(results)
    parts = [_speeds(result), _ratios(result)]
    if result["not_run"]:
        lines = [f"- {name}: {why}" for name, why in result["not_run"].items()]
        parts.append("\n".join(["Not run:", "", *lines]))
    return "\n\n".join(parts)


def _result(results: Path) -> dict[str, Any]:
    result = read(results / RESULT)
    if not result:
        raise ConfigError(f"{results / RESULT} is not there; run python -m benchmarks.rivals --data DIR first")
    return result


def _speeds(result: Mapping[str, Any]) -> str:
    sets = list(result["num_prompts"])
    rows = []
    for mode in result["modes"].values():
        row = [mode["rival"], mode["precision"], _HOW[mode["how"]]]
        for name in sets:
            length = "1" if mode["how"] == PLAIN else f"{mode[name]['tokens_a_step']['estimate']:.2f}"
            row += [f"{mode[name]['decode_tok_per_s']:.1f}", length]
        rows.append(row)
    heads = ["", "precision", "proposals"]
    for name in sets:
        heads += [f"{SET_NAMES[name]}, tok/s", "tokens a step"]
    counts = ", ".join(f"{count} of {SET_NAMES[name]}" for name, count in result["num_prompts"].items())
    title = f"One request at a time, {result['num_tokens_each']} tokens each, prompts: {counts}; medians"
    return table(title, heads, rows, result)


def _ratios(result: Mapping[str, Any]) -> str:
    sets = list(result["num_prompts"])
    rows = [
        [f"{ratio['ours']}", f"{ratio['other']}", *(interval(ratio[name]["decode"]) for name in sets)]
        for ratio in result["ratios"]
    ]
    heads = ["this", "over that", *(SET_NAMES[name] for name in sets)]
    return table("Decode tokens per second, ratio by prompt, median [95 %]", heads, rows, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.figure is None:
        print(block(options.results))
    else:
        options.figure.write_text(drawn(_result(options.results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    session.finish(main)
