"""Tables A and B: acceptance by data set and width, and every other thing that is called so."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.bench import estimates as est
from blockdraft.bench.identities import examine
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.table import Cell, Column, Figure, Series, Table
from blockdraft.bench.tables.grouping import (
    COMMITTED,
    LENGTH,
    PER_REQUEST,
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

__all__ = ["lengths", "matrix", "other_names"]


def lengths(records: Sequence[RequestRecord]) -> list[Table]:
    """Table A: acceptance length by data set and width; one table for each sampling and load."""
    return [_lengths(setting, members) for setting, members in by_setting(speculating(records)).items()]


def _lengths(setting: str, records: Sequence[RequestRecord]) -> Table:
    modes = list(grouped(records, mode_of))
    columns = [Column("dataset", "data set"), Column("prompts", "prompts", "independent ones")]
    columns += [Column(mode, mode, est.FORMULAS["pooled"], 3, least=1.0) for mode in modes]
    rows: list[dict[str, Cell]] = []
    for dataset, members in grouped(records, lambda r: r.dataset).items():
        by_mode = grouped(members, mode_of)
        row: dict[str, Cell] = {"dataset": dataset, "prompts": num_prompts(members)}
        rows.append(row | {mode: est.acceptance_length(by_mode.get(mode, [])) for mode in modes})
    series = [
        Series(mode, tuple((str(row["dataset"]), row[mode]) for row in rows if isinstance(row[mode], Interval)))  # type: ignore[misc]
        for mode in modes
    ]
    return Table(
        name="A",
        title=f"Acceptance length by data set and width ({setting})",
        columns=tuple(columns),
        rows=tuple(rows),
        verdict=examine(records),
        notes=(
            "tokens per step, the target's own included; 95 % intervals, prompts being independent",
            "widths count rows of the block: the anchor and the proposals",
        ),
        figure=Figure(
            "bars", f"{LENGTH} ({setting})", "data set", "tokens per step", tuple(series), base=1.0, least=1.0
        ),
    )


def other_names(records: Sequence[RequestRecord]) -> list[Table]:
    """What else is called acceptance length, and the rate, of the same requests."""
    tables = []
    for setting, members in by_setting(speculating(records)).items():
        rows = []
        for dataset, of_set in grouped(members, lambda r: r.dataset).items():
            for mode, of_mode in grouped(of_set, mode_of).items():
                rows.append({"dataset": dataset, "mode": mode, **acceptance_cells(of_mode)})
        tables.append(
            Table(
                name="names",
                title=f"Everything that is called {LENGTH} ({setting})",
                columns=(
                    Column("dataset", "data set"),
                    Column("mode", "width"),
                    POOLED,
                    PER_REQUEST,
                    COMMITTED,
                    RATE,
                    Column("steps", "steps", "sum S"),
                    Column("clipped", "cut away", "tokens that a stop or limit cut off the last step"),
                ),
                rows=tuple(rows),
                verdict=examine(members),
                notes=(
                    "pooled: what the workload costs; per request: what the typical request sees; committed: without "
                    "tokens that were cut away at the end of a text",
                ),
            )
        )
    return tables


# ---- B ---------------------------------------------------------------------------------------------------------------
def matrix(records: Sequence[RequestRecord]) -> list[Table]:
    """Table B, one for each setting and width: the data sets, all of them together, and their mean."""
    tables = []
    for setting, members in by_setting(speculating(records)).items():
        for mode, of_mode in grouped(members, mode_of).items():
            tables.append(_matrix(f"{mode}, {setting}", of_mode))
    return tables


def _matrix(setting: str, records: Sequence[RequestRecord]) -> Table:
    by_set = grouped(records, lambda r: r.dataset)
    rows = [{"dataset": dataset, **_matrix_cells(members)} for dataset, members in by_set.items()]
    if len(rows) > 1:
        means: dict[str, Cell] = {
            key: est.macro_mean([row[key] for row in rows])  # type: ignore[misc]
            for key in ("pooled", "proposal", "committed", "per_request")
        }
        rows.append({"dataset": "all, counters summed", **_matrix_cells(records)})
        rows.append({"dataset": "mean of the sets", **means})
    columns = (
        Column("dataset", "data set"),
        Column("pooled", "acc_len", est.FORMULAS["pooled"], 3, least=1.0),
        RATE,
        Column("prompts", "prompts", "independent ones"),
        Column("requests", "requests", "every turn and sample is one"),
        Column("truncated", "truncated", "ended by the length limit"),
        Column("output", "mean out tok", "sum C / requests", 0, least=0.0),
        COMMITTED,
        PER_REQUEST,
        Column("correct", "correct", "share of scored requests", 0, "%"),
        Column("failed", "failed", "requests that broke, or took no step: not counted"),
    )
    return Table(
        name="B",
        title=f"Matrix of data sets ({setting})",
        columns=columns,
        rows=tuple(rows),
        verdict=examine(records),
        notes=(_depth_note(records),),
        figure=Figure(
            "bars",
            f"{LENGTH} ({setting})",
            "data set",
            "tokens per step",
            (
                Series(
                    "pooled", tuple((str(r["dataset"]), r["pooled"]) for r in rows if isinstance(r["pooled"], Interval))
                ),
            ),
            base=1.0,
            least=1.0,
        ),
    )


def _matrix_cells(records: Sequence[RequestRecord]) -> dict[str, Cell]:
    known, whole = est.speculated(records), est.counted(records)
    cells = acceptance_cells(known)
    return {
        **{key: cells[key] for key in ("pooled", "proposal", "committed", "per_request")},
        "prompts": num_prompts(whole),
        "requests": len(whole),
        "truncated": truncated(whole),
        "output": mean_output(whole),
        "correct": score(whole, "correct"),
        "failed": len(records) - len(known),
    }


def _depth_note(records: Sequence[RequestRecord]) -> str:
    """Whether acc_len = 1 + k * proposal acceptance is an identity here."""
    known = est.speculated(records)
    steps = sum(r.counts.num_steps or 0 for r in known)
    depths = {r.counts.max_draft_tokens for r in known}
    proposed = sum(r.counts.num_draft_tokens or 0 for r in known)
    if len(depths) == 1 and (k := next(iter(depths))) is not None:
        if proposed == k * steps:
            return f"every step proposes {k}: acc_len = 1 + {k} x proposal acceptance on every row"
        return (
            f"{proposed / max(steps, 1):.2f} of at most {k} proposals a step (blocks end at the length limit), so that "
            f"acc_len is a little below 1 + {k} x proposal acceptance"
        )
    return "the number of proposals a step is not the same in all requests"
