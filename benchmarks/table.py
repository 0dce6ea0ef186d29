"""The tables of the README, made of results/*.json and nothing else.

python -m benchmarks.table                      print them
python -m benchmarks.table --write README.md    put them between the marks
python -m benchmarks.table --check README.md    exit 1 if the README says anything else
python -m benchmarks.table --card FOLDER        the model card of a drafter, from its run.json and acceptance.json

A file has marks for the blocks "results", "training" (benchmarks.training_table) and "rivals" (benchmarks.rivals),
or for some of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import session
from benchmarks.markdown import SET_NAMES, interval, read, table, threads
from blockdraft.errors import ConfigError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def block(results: Path) -> str:
    """Everything between the marks of the results, marks excluded."""
    lossless, worth_it = read(results / "lossless.json"), read(results / "worth_it.json")
    served = read(results / "acceptance.json")
    parts = []
    pairs = []
    if served:
        parts += [served_table(served), _by_position(served)]
        pairs.append(served["pair"])
    if lossless:
        parts.append(_lossless(lossless))
        pairs.append({name: lossless["settings"][name] for name in ("draft", "target")})
    if worth_it:
        parts += [_acceptance(dtype, entry) for dtype, entry in worth_it.get("acceptance", {}).items()]
        parts += [_speed(dtype, entry) for dtype, entry in worth_it.get("speed", {}).items()]
        pairs.append(worth_it["pair"])
    if not parts:
        raise ConfigError("no results to show; run the measurements first")
    if any(pair != pairs[0] for pair in pairs):
        raise ConfigError("the results are of different pairs; measure again those that are not of the drafter shown")
    names = pairs[0]
    sampling = "greedy where nothing else is said" if served else "greedy"
    head = f"Draft `{names['draft']['name']}`, target `{names['target']['name']}`, {sampling}."
    return "\n\n".join([head, *parts])


# ---- tables --------------------------------------------------------------------------------------------------------
def served_table(
    result: Mapping[str, Any], title: str = "Acceptance length as served, pooled 1 + ΣA/ΣS [95 %, by prompt]"
) -> str:
    """Acceptance by set of prompts: one column for every sampling and width."""
    modes = list(dict.fromkeys((row["sampling"], row["width"]) for row in result["rows"]))
    found = {(row["set"], row["sampling"], row["width"]): row for row in result["rows"]}
    rows = []
    for name in dict.fromkeys(row["set"] for row in result["rows"]):
        of_set = [found[name, *mode] for mode in modes]
        lengths = [interval(row["acceptance"]["pooled_acceptance_length"]) for row in of_set]
        first = of_set[0]
        rows.append(
            [
                SET_NAMES[name],
                first["num_prompts"],
                f"{first['acceptance']['mean_output_tokens']:.0f}",
                *lengths,
                _without_loops(first),
            ]
        )
    heads = ["prompts", "number", "mean tokens", *(_mode_name(result, *mode) for mode in modes)]
    heads.append(f"{_mode_name(result, *modes[0])}, without texts that end in a loop")
    return table(title, heads, rows, result)


def _without_loops(row: Mapping[str, Any]) -> str:
    without = row["acceptance_without_loops"]
    length = "none" if without is None else interval(without["pooled_acceptance_length"])
    return f"{length} ({row['num_prompts'] - row['num_loops']})"


def _by_position(result: Mapping[str, Any]) -> str:
    """Conditional acceptance by position, for the widest greedy runs."""
    width = max(row["width"] for row in result["rows"])
    greedy = [row for row in result["rows"] if row["width"] == width and row["sampling"] == "greedy"]
    rows = [
        [SET_NAMES[row["set"]], *map(_percent, row["acceptance"]["conditional_acceptance_by_position"])]
        for row in greedy
    ]
    columns = max((len(row) - 1 for row in rows), default=0)
    rows = [row + [""] * (columns + 1 - len(row)) for row in rows]
    title = f"Accepted at each position, given that all before it were, %; width {width}, greedy"
    return table(title, ["prompts", *range(1, columns + 1)], rows, result)


def _mode_name(result: Mapping[str, Any], sampling: str, width: int) -> str:
    params = result["settings"]["sampling"][sampling]
    words = f"T={params['temperature']:g}, top-p {params['top_p']:g}" if params else "greedy"
    return f"width {width}, {words}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"


def _lossless(result: Mapping[str, Any]) -> str:
    rows = [
        [
            SET_NAMES[entry["set"]],
            entry["width"],
            f"{entry['num_identical']} of {entry['num_prompts']}",
            entry["num_ties"],
            entry["num_failures"],
            f"{entry['num_tokens_compared']:,}",
            interval(entry["acceptance"]["pooled_acceptance_length"]),
        ]
        for entry in result["comparisons"]
    ]
    heads = ["prompts", "width", "same text", "ties", "failures", "tokens compared", "1 + ΣA/ΣS [95 %]"]
    return table("Text with the draft against plain text of the same engine", heads, rows, result)


def _acceptance(dtype: str, entry: Mapping[str, Any]) -> str:
    rows = []
    for width, found in entry["widths"].items():
        rows.append(
            [
                width,
                found["num_requests"],
                f"{found['mean_output_tokens']:.0f}",
                interval(found["pooled_acceptance_length"]),
                f"{found['committed_acceptance_length']:.2f}",
                f"{found['mean_acceptance_length']:.2f}",
                " ".join(f"{100 * share:.0f}" for share in found["survival_by_position"]),
            ]
        )
    heads = ["width", "prompts", "mean tokens", "pooled 1 + ΣA/ΣS [95 %]", "committed Σ(C-1)/ΣS"]
    heads += ["per-request mean 1 + A/S", "position accepted, %"]
    return table(f"Acceptance, {SET_NAMES[entry['set']]}, {dtype}", heads, rows, entry)


def _speed(dtype: str, entry: Mapping[str, Any]) -> str:
    rows = []
    for name, found in entry["modes"].items():
        row = [name.replace("w", "width "), f"{found['decode_tok_per_s']:.1f}", f"{found['ms_per_step']:.1f}"]
        if "median_ratio" in found:
            row += [f"{found[key]:.2f}" for key in ("break_even_acceptance_length", "pooled_acceptance_length")]
            row += [interval(found["median_ratio"]), f"{found['total_ratio']:.2f}"]
            row += [interval(found["median_ratio_with_prefill"]), str(found["num_prompts_text_differs"])]
        else:
            row += ["1", "1", "1", "1", "1", ""]
        rows.append(row)
    heads = ["mode", "decode tok/s", "ms per step", "break-even", "1 + ΣA/ΣS", "speed-up, median [95 %]"]
    heads += ["of totals", "with prefill [95 %]", "texts that differ"]
    count = len(next(iter(entry["modes"].values()))["decode_tok_per_s_by_prompt"])
    title = f"Speed, {count} prompts of {SET_NAMES[entry['set']]}, {dtype}, {threads(entry)}"
    return table(title, heads, rows, entry)


# ---- the README ----------------------------------------------------------------------------------------------------
def split(text: str, begin: str = BEGIN, end: str = END) -> tuple[str, str, str]:
    """What is before the block, the block, and what is after it."""
    before, found_begin, rest = text.partition(begin)
    shown, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ConfigError(f"the file has no {begin} ... {end}; put the marks where the tables belong")
    return before + begin, shown.strip("\n"), end + after


def written(text: str, results: Path) -> str:
    """The text of a file with everything between its marks made anew."""
    from benchmarks import training_table
    from benchmarks.rivals import table as rivals_table

    blocks = {(one.BEGIN, one.END): one.block for one in (training_table, rivals_table)} | {(BEGIN, END): block}
    given = [marks for marks in blocks if marks[0] in text] or [(BEGIN, END)]
    for marks in given:
        before, _, after = split(text, *marks)
        text = f"{before}\n{blocks[marks](results)}\n{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    action = session.add_document(parser)
    action.add_argument("--card", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.write or options.check:
        return session.show(options, lambda text: written(text, options.results), "table")
    if options.card:
        from blockdraft.train.card import write_card

        print(write_card(options.card, [options.results / "acceptance.json"]))
    else:
        print(block(options.results))
    return 0


if __name__ == "__main__":
    session.finish(main)
