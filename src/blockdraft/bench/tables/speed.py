"""Speed against the same system without speculation, by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blockdraft.bench import estimates as est
from blockdraft.bench import speed
from blockdraft.bench.identities import examine
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.table import Cell, Column, Figure, Series, Table
from blockdraft.bench.tables.grouping import POOLED, grouped, mode_of, num_prompts, shown_load
from blockdraft.stats import Interval

__all__ = ["speed_ups"]


def speed_ups(records: Sequence[RequestRecord]) -> list[Table]:
    """Speed against the same system without speculation, at the same load, on the same prompts."""
    timed = [record for record in records if not record.is_replay]
    tables = []
    for sampling, members in grouped(timed, lambda r: r.sampling).items():
        if not any(not record.speculation for record in members):
            continue
        rows: list[Mapping[str, Cell]] = []
        lines: dict[str, list[tuple[str, Interval]]] = {}
        by_set = grouped(members, lambda r: r.dataset)
        whole = {"all": members} if len(by_set) > 1 else {}
        for dataset, of_set in (by_set | whole).items():
            for load, of_load in grouped(of_set, lambda r: r.load).items():
                for row in _speed_rows(of_load):
                    rows.append({"dataset": dataset, "load": shown_load(load), **row})
                    gain = row["speed_up"]
                    if isinstance(gain, Interval) and dataset == ("all" if whole else dataset):
                        lines.setdefault(str(row["mode"]), []).append((shown_load(load), gain))
        tables.append(_speed_table(sampling, members, rows, lines))
    return tables


def _speed_rows(records: Sequence[RequestRecord]) -> list[dict[str, Cell]]:
    by_mode = grouped(records, mode_of)
    plain = by_mode.get("off", [])
    rows: list[dict[str, Cell]] = []
    for mode, members in by_mode.items():
        is_on = mode != "off"
        rows.append(
            {
                "mode": mode,
                "speed_up": speed.paired_speed_up(members, plain) if is_on else None,
                "user": speed.user_rate(members),
                "throughput": speed.throughput(members),
                "first": speed.first_token_s(members),
                "step": _in_ms(speed.step_time_s(members)),
                "pooled": est.acceptance_length(members) if is_on else None,
                "even": speed.break_even_length(members, plain) if is_on else None,
                "prompts": num_prompts(est.counted(members)),
            }
        )
    return rows


def _in_ms(seconds: Interval | None) -> Interval | None:
    if seconds is None:
        return None
    low, high = (None if bound is None else 1000.0 * bound for bound in (seconds.low, seconds.high))
    return replace(seconds, estimate=1000.0 * seconds.estimate, low=low, high=high)


def _speed_table(
    sampling: str,
    records: Sequence[RequestRecord],
    rows: Sequence[Mapping[str, Cell]],
    lines: Mapping[str, list[tuple[str, Interval]]],
) -> Table:
    columns = (
        Column("dataset", "data set"),
        Column("load", "load"),
        Column("mode", "width"),
        Column("speed_up", "speed-up", "rate of users / that without speculation, same prompts, same load", 2),
        Column("user", "tok/s a user", "sum (C - 1) / sum (end - first token)", 1, least=0.0),
        Column("throughput", "tok/s in all", "while the load is full, by round; - where it never was", 1, least=0.0),
        Column("first", "first token s", "mean, queue included", 3, least=0.0),
        Column("step", "step ms", "sum (end - first token) / sum S", 1, least=0.0),
        POOLED,
        Column("even", "break-even", "acceptance length at which both are equally fast: step time / that without", 2),
        Column("prompts", "prompts"),
    )
    return Table(
        name="speed",
        title=f"Speed against the same system without speculation ({sampling})",
        columns=columns,
        rows=tuple(rows),
        verdict=examine(records),
        notes=(
            "paired by prompt; rounds alternate between settings, so that a change of the machine touches all alike",
            "intervals are about prompts (throughput: rounds), not about what changes from one start to the next",
        ),
        figure=Figure(
            "lines",
            f"speed-up by load ({sampling})",
            "load",
            "times as fast",
            tuple(Series(mode, tuple(points)) for mode, points in lines.items()),
            base=1.0,
        ),
    )
