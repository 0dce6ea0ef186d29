"""The block "training" of a file: where acceptance is lost, what training brings, what a step costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.markdown import SET_NAMES, interval, read, table
from blockdraft.errors import ConfigError

BEGIN, END = "<!-- training:begin -->", "<!-- training:end -->"


def block(results: Path) -> str:
    """Everything between the marks, marks excluded."""
    from benchmarks.table import served_table

    names = ("recipe_acceptance", "where", "scaling", "training")
    recipe, where, scaling, training = (read(results / f"{name}.json") for name in names)
    parts = []
    if recipe:
        title = "The drafter of the ready recipe alone: acceptance length, pooled 1 + ΣA/ΣS [95 %, by prompt]"
        parts.append(served_table(recipe, title))
    if where:
        parts += [_where(where), _by_position(where)]
    if scaling:
        parts += [_points(scaling), _point_positions(scaling), *_differences(scaling)]
    if training:
        parts += _training(training)
    if not parts:
        raise ConfigError("no results of training to show; run benchmarks.where, .scaling or .training first")
    return "\n\n".join(parts)


# ---- where the loss is -----------------------------------------------------------------------------------------------
def _where(result: Mapping[str, Any]) -> str:
    rows = []
    for name, found in result["sets"].items():
        rows.append(
            [
                SET_NAMES[name],
                found["num_prompts"],
                interval(found["acceptance_length"]),
                f"{found['base_acceptance_length']:.2f}",
                interval(found["selector_gain"]),
                f"{found['oracle_acceptance_length']:.2f}",
                *(_percent(found[key]) for key in ("full_rate", "miss_rate", "misrank_rate")),
            ]
        )
    size = next(iter(result["sets"].values()))["list_size"]
    heads = ["prompts", "number", "walk [95 %]", "largest logit", "selector's gain [95 %]", f"best of {size} a slot"]
    heads += ["blocks accepted whole, %", "lost: token not in the list, %", "lost: another picked, %"]
    title = f"Where acceptance is lost, width {result['settings']['width']}, greedy"
    return table(title, heads, rows, result)


def _by_position(result: Mapping[str, Any]) -> str:
    """At each position, of the blocks right up to it: picked right, not in the list, another picked."""
    rows = []
    for name, found in result["sets"].items():
        for key, words in (("picked", "right"), ("missed", "not in the list"), ("misranked", "another picked")):
            shares = [_percent(at[key] / at["reached"]) if at["reached"] else "" for at in found["positions"]]
            rows.append([SET_NAMES[name], words, *shares])
    columns = max(len(row) for row in rows)
    heads = ["prompts", "the walk", *range(1, columns - 1)]
    return table("By position, of the blocks that were right before it, %", heads, _padded(rows, columns), result)


# ---- what training brings --------------------------------------------------------------------------------------------
def _points(result: Mapping[str, Any]) -> str:
    names = list(result["points"][0]["sets"])
    rows = []
    for point in result["points"]:
        row = [point["run"], point["draft"]["kind"], point["step"], _count(point["proposals_trained"])]
        row.append(_count(point["answer_tokens"]))
        for name in names:
            found = point["sets"][name]
            row += [interval(found["acceptance_length"]), f"{found['oracle_acceptance_length']:.2f}"]
        rows.append(row)
    heads = ["run", "draft", "steps", "proposals trained", "tokens of text"]
    for name in names:
        heads += [f"{SET_NAMES[name]} [95 %]", "best of its lists"]
    return table("Acceptance length against training, greedy", heads, rows, result)


def _point_positions(result: Mapping[str, Any]) -> str:
    """Conditional acceptance by position for the last state of each run."""
    last = {point["run"]: point for point in result["points"]}
    rows = [
        [run, SET_NAMES[name], *(_percent(share) for share in found["conditional_acceptance"])]
        for run, point in last.items()
        for name, found in point["sets"].items()
    ]
    columns = max(len(row) for row in rows)
    title = "Accepted at each position, given that all before it were, %; last state of each run"
    return table(title, ["run", "prompts", *range(1, columns - 1)], _padded(rows, columns), result)


def _differences(result: Mapping[str, Any]) -> list[str]:
    rows = [
        [f"{found['second'].partition('.')[0]} - {found['first'].partition('.')[0]}", SET_NAMES[name], interval(gain)]
        for found in result["differences"]
        for name, gain in found["sets"].items()
    ]
    heads = ["run@step", "prompts", "difference [95 %]"]
    return [table("Acceptance length, paired by prompt", heads, rows, result)] if rows else []


# ---- what a step costs -----------------------------------------------------------------------------------------------
def _training(result: Mapping[str, Any]) -> list[str]:
    stages, parts = result["stages"], []
    if "throughput" in stages:
        rows = [
            [
                name,
                found["num_blocks"],
                f"{found['blocks_per_s']:.1f}",
                f"{found['step_s']:.2f}",
                f"{found['peak_bytes'] / 2**20:,.0f}",
                f"{found['step_bytes'] / 2**20:,.0f}",
            ]
            for name, found in stages["throughput"]["phases"].items()
        ]
        heads = ["head", "blocks a step", "blocks/s", "s a step", "peak memory, MiB", "of it during steps, MiB"]
        parts.append(
            _step_table(f"A training step of `{result['settings']['recipe']}`", heads, rows, result, "throughput")
        )
    if "profile" in stages:
        rows = [
            [name, f"{1e3 * found['seconds']:.0f}", _percent(found["share"])]
            for name, found in stages["profile"]["parts"].items()
        ]
        title = "Where the time of a step goes, forward and backward"
        parts.append(_step_table(title, ["part", "ms", "%"], rows, result, "profile"))
    if "growth" in stages:
        names = {"max_length": "positions of the sequences", "blocks_per_sequence": "slots of the blocks"}
        rows = [
            [
                names[found["vocabulary_times"]],
                f"{found['bytes_beyond_the_sum'] / 2**20:,.0f}",
                f"{found['bytes_of_one_float_each'] / 2**20:,.0f}",
            ]
            for found in stages["growth"]["together"]
        ]
        heads = ["vocabulary times", "memory beyond the sum of both, MiB", "one float32 for each would be, MiB"]
        parts.append(_step_table("What grows with the vocabulary and something else", heads, rows, result, "growth"))
    return parts


def _step_table(title: str, heads: list[Any], rows: list[list[Any]], result: Mapping[str, Any], stage: str) -> str:
    settings = {**result["settings"], "device": "cpu", "dtype": f"autocast {result['recipe']['optim']['autocast']}"}
    settings["max_new_tokens"] = result["recipe"]["text"]["max_new_tokens"]
    return table(title, heads, rows, {"settings": settings, "runs": [result["stages"][stage]["run"]]})


def _padded(rows: list[list[Any]], columns: int) -> list[list[Any]]:
    return [row + [""] * (columns - len(row)) for row in rows]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
