"""Acceptance by position in the block and in the output; thinking and answers apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from blockdraft.bench import estimates as est
from blockdraft.bench.identities import examine
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.table import Cell, Column, Figure, Series, Table
from blockdraft.bench.tables.grouping import POOLED, by_setting, grouped, mode_of, speculating
from blockdraft.stats import Interval

__all__ = ["OUTPUT_BOUNDS", "block_positions", "output_positions", "sections"]

OUTPUT_BOUNDS = (0, 64, 256, 1024, 4096, 16384)


def block_positions(records: Sequence[RequestRecord]) -> list[Table]:
    """Survival by position in the block, for each setting: a row for each data set and width."""
    tables = []
    for setting, members in by_setting(speculating(records)).items():
        found = []
        for dataset, of_set in grouped(members, lambda r: r.dataset).items():
            for mode, of_mode in grouped(of_set, mode_of).items():
                if shares := est.survival(of_mode):
                    found.append((dataset, mode, shares, est.conditional(of_mode)))
        if not found:
            continue
        most = max(len(shares) for _, _, shares, _ in found)
        positions = [Column(f"S{i}", str(i), est.FORMULAS["survival"], 1, "%") for i in range(1, most + 1)]
        rows = []
        for dataset, mode, shares, given in found:
            for kind, values in (("at least", shares), ("given those before", given)):
                row: dict[str, Cell] = {"dataset": dataset, "mode": mode, "kind": kind}
                rows.append(row | {f"S{i}": share for i, share in enumerate(values, start=1)})
        lines = tuple(
            Series(
                f"{dataset}, {mode}",
                tuple((str(i), share) for i, share in enumerate(shares, start=1) if share is not None),
            )
            for dataset, mode, shares, _ in found
        )
        tables.append(
            Table(
                name="positions",
                title=f"Accepted by position in the block ({setting})",
                columns=(
                    Column("dataset", "data set"),
                    Column("mode", "width"),
                    Column("kind", "share of"),
                    *positions,
                ),
                rows=tuple(rows),
                verdict=examine(members),
                notes=(
                    f"at least: {est.FORMULAS['survival']}",
                    f"given those before: {est.FORMULAS['conditional']}; comparable between widths",
                    "an interval around 0 or 100 % has no width here: few steps came that far",
                ),
                figure=Figure(
                    "lines", f"survival ({setting})", "position in the block", "accepted", lines, is_share=True
                ),
            )
        )
    return tables


def output_positions(records: Sequence[RequestRecord], bounds: Sequence[int] = OUTPUT_BOUNDS) -> list[Table]:
    """Acceptance length by position in the output: all data sets, and each alone."""
    limits = list(pairwise([*bounds, 1 << 60]))

    def cells(members: Sequence[RequestRecord]) -> list[tuple[str, Interval | None, int, int]]:
        found = []
        for low, high in limits:
            length, steps, requests = est.step_ratio(members, lambda _, at, low=low, high=high: low <= at < high)  # type: ignore[misc]
            if steps:
                found.append((f"{low:,}-{high - 1:,}" if high < 1 << 60 else f"{low:,}-", length, steps, requests))
        return found

    return _step_tables(
        records,
        cells,
        name="output",
        title="Acceptance length by position in the output",
        notes=("a step stands where the first token it commits stands", "later rows hold longer texts only"),
    )


def sections(records: Sequence[RequestRecord]) -> list[Table]:
    """Acceptance length of thinking and of answers; empty where no text has a thinking section."""
    known = [record for record in speculating(records) if record.num_thinking_tokens is not None]

    def cells(members: Sequence[RequestRecord]) -> list[tuple[str, Interval | None, int, int]]:
        found = []
        for name, is_thinking in (("thinking", True), ("answer", False)):
            length, steps, requests = est.step_ratio(
                members,
                lambda r, at, side=is_thinking: (at < (r.num_thinking_tokens or 0)) is side,  # type: ignore[misc]
            )
            if steps:
                found.append((name, length, steps, requests))
        return found

    return _step_tables(known, cells, name="sections", title="Acceptance length of thinking and of answers", notes=())


def _step_tables(
    records: Sequence[RequestRecord],
    cells: Callable[[Sequence[RequestRecord]], list[tuple[str, Interval | None, int, int]]],
    *,
    name: str,
    title: str,
    notes: Sequence[str],
) -> list[Table]:
    tables = []
    for setting, members in by_setting(speculating(records)).items():
        rows: list[Mapping[str, Cell]] = []
        for mode, of_mode in grouped(members, mode_of).items():
            by_set = grouped(of_mode, lambda r: r.dataset)
            whole = {"all": of_mode} if len(by_set) > 1 else {}
            for dataset, some in (by_set | whole).items():
                rows += [
                    {"dataset": dataset, "mode": mode, "where": w, "pooled": x, "steps": s, "requests": n}
                    for w, x, s, n in cells(some)
                ]
        if rows:
            tables.append(
                Table(
                    name=name,
                    title=f"{title} ({setting})",
                    columns=(
                        Column("dataset", "data set"),
                        Column("mode", "width"),
                        Column("where", "tokens" if name == "output" else "section"),
                        POOLED,
                        Column("steps", "steps", "sum S"),
                        Column("requests", "requests", "that have a step there"),
                    ),
                    rows=tuple(rows),
                    verdict=examine(members),
                    notes=tuple(notes),
                )
            )
    return tables
