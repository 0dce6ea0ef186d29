"""How a result looks in Markdown: a table with its title above and where it was measured below."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SET_NAMES = {
    "gsm8k": "GSM8K test",
    "mbpp": "MBPP",
    "mtbench": "MT-Bench, first turns",
    "humaneval": "HumanEval",
    "chat": "chat, written by the target",
}


def read(path: Path) -> dict[str, Any]:
    """The result in a file; empty where there is none."""
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def interval(found: Mapping[str, Any] | None) -> str:
    """An estimate with its interval."""
    if found is None:
        return "none"
    if found["low"] is None:
        return f"{found['estimate']:.2f}"
    return f"{found['estimate']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def table(title: str, heads: Sequence[Any], rows: Iterable[Sequence[Any]], entry: Mapping[str, Any]) -> str:
    """`entry` holds the settings and the runs that the line below is made of."""
    lines = [f"**{title}**", "", _row(heads), _row(["---"] * len(heads)), *map(_row, rows), "", provenance(entry)]
    return "\n".join(lines)


def threads(entry: Mapping[str, Any]) -> str:
    count = entry["settings"]["threads"]
    return f"{count} thread{'' if count == 1 else 's'}"


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def provenance(entry: Mapping[str, Any]) -> str:
    """One line: of several runs the last one's machine, and every commit."""
    run, settings = entry["runs"][-1], entry["settings"]
    machine, versions = run["machine"], run["versions"]
    commits = dict.fromkeys(f"{(r['commit'] or 'unknown')[:10]}{'+' if r['is_dirty'] else ''}" for r in entry["runs"])
    chip = machine["cpu"] if settings["device"] == "cpu" else machine["gpu"]
    return (
        f"<sub>{chip}, {machine['cores']} cores, {threads(entry)} per process, "
        f"{machine['ram_gib']} GiB, {machine['os']}, Python {versions['python']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, {settings['dtype']}, up to {settings['max_new_tokens']} tokens, "
        f"{run['date_utc'][:10]}, commit {', '.join(commits)}</sub>"
    )
