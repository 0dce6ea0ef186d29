"""The result as a table in a document, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import markdown
from benchmarks.table import split

BEGIN, END = "<!-- hybrids:begin -->", "<!-- hybrids:end -->"
_NAMES = {"qwen3_5": "Qwen3.5", "kimi_k3": "Kimi K3"}
_HEADS = (
    "target",
    "drafter",
    "same text",
    "ties",
    "failures",
    "tokens compared",
    "acceptance length",
    "without texts that end in a loop",
)


def block(found: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    rows = [_row(pair, found["targets"][pair["target"]]) for pair in found["pairs"]]
    width = found["pairs"][0]["served"]["width"]
    title = f"Greedy text of trained tiny targets, with a trained drafter (width {width}) and without"
    return markdown.table(title, _HEADS, rows, found) + "\n\n" + "\n".join(_references(found))


def _row(pair: Mapping[str, Any], target: Mapping[str, Any]) -> list[Any]:
    served, draft = pair["served"], pair["draft"]
    stream = "" if pair["tap_stream"] == "plain" else f", `{pair['tap_stream']}`"
    without = served["acceptance_without_loops"]
    return [
        f"{_NAMES[pair['target']]}, {target['size']['num_layers']} layers",
        f"{draft['kind']}, {draft['attention']}{stream}",
        f"{served['num_identical']} of {served['num_prompts']}",
        served["num_ties"],
        served["num_failures"],
        f"{served['num_tokens_compared']:,}",
        markdown.interval(served["acceptance"]["pooled_acceptance_length"]),
        f"{markdown.interval(without['pooled_acceptance_length'])} ({without['num_requests']} texts)"
        if without
        else "none",
    ]


def _references(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for pair in found["pairs"]:
        if (seen := pair.get("reference")) is not None:
            where = f", the first time at token {seen['positions'][0] + 1}" if seen["positions"] else ""
            lines.append(
                f"The reference recipe, given blocks of which as much is right, changes the text of "
                f"{seen['num_failures']} of {seen['num_prompts']} prompts on {_NAMES[pair['target']]}{where}."
            )
    return lines


def written(text: str, found: Mapping[str, Any]) -> str:
    """The text of a document with everything between its marks made anew."""
    before, _, after = split(text, BEGIN, END)
    return f"{before}\n{block(found)}\n{after}"
