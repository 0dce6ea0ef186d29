"""Table C: long contexts, acceptance beside retrieval."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.bench import estimates as est
from blockdraft.bench.identities import examine
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.table import Cell, Column, Figure, Series, Table
from blockdraft.bench.tables.grouping import (
    LENGTH,
    POOLED,
    RATE,
    acceptance_cells,
    by_setting,
    grouped,
    mean_output,
    mode_of,
    num_prompts,
    score,
    speculating,
    truncated,
)
from blockdraft.stats import Interval

__all__ = ["long_context"]


def long_context(records: Sequence[RequestRecord]) -> list[Table]:
    """Table C: by length of the context and arm, acceptance beside retrieval."""
    found = [record for record in speculating(records) if "length" in record.tags]
    tables = []
    for setting, members in by_setting(found).items():
        for mode, of_mode in grouped(members, mode_of).items():
            tables.append(_long_context(f"{mode}, {setting}", of_mode))
    return tables


def _long_context(setting: str, records: Sequence[RequestRecord]) -> Table:
    rows: list[dict[str, Cell]] = []
    lines: dict[str, list[tuple[str, Interval]]] = {}
    for arm, of_arm in grouped(records, lambda r: str(r.tags.get("arm", "short"))).items():
        for length, members in grouped(of_arm, lambda r: str(r.tags["length"])).items():
            cells = acceptance_cells(members)
            row: dict[str, Cell] = {
                "length": shown_length(int(length)),
                "arm": arm,
                **{key: cells[key] for key in ("pooled", "proposal", "steps")},
                "exact": score(members, "exact") if arm == "short" else None,
                "contains": score(members, "contains"),
                "prompts": num_prompts(est.counted(members)),
                "truncated": truncated(members),
                "output": mean_output(members),
                "prompt_tokens": est.mean_of(est.counted(members), lambda r: r.num_prompt_tokens or 0),
            }
            rows.append(row)
            if isinstance(row["pooled"], Interval):
                lines.setdefault(arm, []).append((str(row["length"]), row["pooled"]))
    columns = (
        Column("length", "context"),
        Column("arm", "answer"),
        POOLED,
        RATE,
        Column("steps", "steps", "sum S"),
        Column("exact", "exact match", "the reply, trimmed, is the number", 0, "%"),
        Column("contains", "contains", "the number occurs in the reply", 0, "%"),
        Column("prompts", "contexts"),
        Column("truncated", "truncated", "ended by the length limit"),
        Column("output", "mean out tok", "sum C / requests", 0, least=0.0),
        Column("prompt_tokens", "mean prompt tok", "", 0, least=0.0),
    )
    return Table(
        name="C",
        title=f"Long contexts: multi-key retrieval over natural paragraphs ({setting})",
        columns=columns,
        rows=tuple(rows),
        verdict=examine(records),
        notes=(
            "a short answer takes a handful of steps, so that its acceptance is mostly that of the last, cut step: "
            "read the long arm for acceptance and the short one for retrieval",
        ),
        figure=Figure(
            "lines",
            f"{LENGTH} by context ({setting})",
            "context",
            "tokens per step",
            tuple(Series(f"{arm} answers", tuple(points)) for arm, points in lines.items()),
            base=1.0,
            least=1.0,
        ),
    )


def shown_length(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
