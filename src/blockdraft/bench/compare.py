"""Two runs of the same prompts compared: drafters, widths or engines.

Owns what may be paired and how several comparisons are judged together. The difference, its interval and the number of
prompts that would settle it are those of stats.py and comparison.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.bench import estimates as est
from blockdraft.bench.identities import examine
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.speed import paired_speed_up
from blockdraft.bench.table import Cell, Column, Table
from blockdraft.bench.tables.grouping import grouped
from blockdraft.comparison import prompts_to_settle
from blockdraft.errors import RequestError
from blockdraft.stats import Interval, critical_value, paired_difference

__all__ = ["Side", "compare", "holm", "p_value", "paired_length_difference"]

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two: its name, and records of one setting."""

    name: str
    records: Sequence[RequestRecord]


def compare(first: Side, second: Side, *, about: str) -> Table:
    """Second minus first: a row for each data set that both have, then all of them together. `about` is the setting.

    Only prompts that both sides answered in full are compared. Verdicts are Holm's over all sets. Raises
    RequestError where no prompt is on both sides, or the sampling differs.
    """
    samplings = {record.sampling for side in (first, second) for record in side.records}
    if len(samplings) > 1:
        raise RequestError(f"the two runs differ in sampling ({', '.join(sorted(samplings))}); compare like with like")
    ones, twos = _shared(first.records, second.records)
    if not ones:
        raise RequestError("no prompt was answered in full by both runs; measure the same data sets and prompts")
    pairs = [(name, members, _of_set(twos, name)) for name, members in grouped(ones, lambda r: r.dataset).items()]
    rows = [_row(name, one, two) for name, one, two in pairs]
    verdicts = holm([row["difference"] if isinstance(row["difference"], Interval) else None for row in rows])
    for row, verdict in zip(rows, verdicts, strict=True):
        row["verdict"] = verdict
    if len(rows) > 1:
        whole = _row("all, counters summed", ones, twos)
        rows.append(whole | {"verdict": holm([whole["difference"]])[0]})  # type: ignore[list-item]
    return Table(
        name="compare",
        title=f"{second.name} against {first.name}, same prompts ({about})",
        columns=_columns(first.name, second.name),
        rows=tuple(rows),
        verdict=examine([*ones, *twos]),
        notes=(
            f"difference: {second.name} minus {first.name}, paired by prompt, {LEVEL:.0%} interval",
            "the verdict of a set takes all sets into account (Holm); to settle: prompts at which a difference of this "
            "size leaves out 0 nine times of ten",
            *_dropped(first, second, ones, twos),
        ),
        facts={"first": first.name, "second": second.name},
    )


def _columns(first: str, second: str) -> tuple[Column, ...]:
    return (
        Column("dataset", "data set"),
        Column("prompts", "prompts"),
        Column("first", first, est.FORMULAS["pooled"], 3, least=1.0),
        Column("second", second, est.FORMULAS["pooled"], 3, least=1.0),
        Column("difference", "difference", "second minus first, paired", 3),
        Column("verdict", "verdict"),
        Column("settle", "to settle", "prompts"),
        Column("speed", "times as fast", "rate of users, second / first, paired", 2),
        Column("same", "same text", "requests with equal output", 0, "%"),
    )


def _of_set(records: Sequence[RequestRecord], dataset: str) -> list[RequestRecord]:
    return [record for record in records if record.dataset == dataset]


def _row(name: str, ones: Sequence[RequestRecord], twos: Sequence[RequestRecord]) -> dict[str, Cell]:
    difference = paired_length_difference(ones, twos)
    outputs = {_request_key(r): r.output_sha256 for r in ones}
    same = [outputs[key] == r.output_sha256 for r in twos if (key := _request_key(r)) in outputs and r.output_sha256]
    return {
        "dataset": name,
        "prompts": len({est.cluster_of(record) for record in ones}),
        "first": est.acceptance_length(ones),
        "second": est.acceptance_length(twos),
        "difference": difference,
        "settle": None if difference is None else prompts_to_settle(difference),
        "speed": paired_speed_up(twos, ones),
        "same": sum(same) / len(same) if same else None,
    }


def paired_length_difference(
    first: Sequence[RequestRecord], second: Sequence[RequestRecord], *, level: float = LEVEL
) -> Interval | None:
    """Pooled acceptance length of second minus first; both must have the same prompts."""
    ones, twos = est.speculated(first), est.speculated(second)
    if not ones or not twos:
        return None
    return paired_difference(
        [record.counts.stats() for record in ones],
        [record.counts.stats() for record in twos],
        first_clusters=[est.cluster_of(record) for record in ones],
        second_clusters=[est.cluster_of(record) for record in twos],
        level=level,
    )


# ---- what may be paired ----------------------------------------------------------------------------------------------
def _shared(
    first: Sequence[RequestRecord], second: Sequence[RequestRecord]
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """The records of prompts that both sides speculated on in full."""
    good = _good_clusters(first) & _good_clusters(second)
    return tuple([r for r in est.speculated(side) if est.cluster_of(r) in good] for side in (first, second))  # type: ignore[return-value]


def _good_clusters(records: Sequence[RequestRecord]) -> set[tuple[str, str]]:
    """Prompts with a step, and without a request that broke."""
    return {est.cluster_of(r) for r in est.speculated(records)} - {est.cluster_of(r) for r in records if not r.is_whole}


def _dropped(first: Side, second: Side, ones: Sequence[RequestRecord], twos: Sequence[RequestRecord]) -> list[str]:
    kept = {est.cluster_of(r) for r in ones}
    notes = []
    for side in (first, second):
        gone = len({est.cluster_of(r) for r in side.records} - kept)
        if gone:
            notes.append(f"{gone} prompts of {side.name} are not compared: the other run lacks them, or one broke")
    return notes


def _request_key(record: RequestRecord) -> tuple[str, str, int, int]:
    return record.dataset, record.prompt_id, record.sample, record.turn


# ---- several comparisons ---------------------------------------------------------------------------------------------
def p_value(difference: Interval) -> float | None:
    """Two-sided: 1 - the largest level at which the interval leaves out 0. None where it has no bounds."""
    if difference.high is None or difference.low is None:
        return None
    half = 0.5 * (difference.high - difference.low)
    if half == 0.0:
        return 1.0 if difference.estimate == 0.0 else 0.0
    n = difference.num_clusters
    wanted = abs(difference.estimate) / half * critical_value(difference.level, n)
    low, high = 0.0, 1.0  # levels: the quantile rises with them
    for _ in range(50):
        middle = 0.5 * (low + high)
        if not 0.0 < middle < 1.0:
            break
        low, high = (middle, high) if critical_value(middle, n) < wanted else (low, middle)
    return 1.0 - low


def holm(differences: Sequence[Interval | None], *, level: float = LEVEL) -> list[str]:
    """ "higher", "lower" or "not settled" for each, wrong anywhere with a probability of at most 1 - level.

    Holm: the smallest p is compared with alpha / m, the next with alpha / (m - 1), until one is too large.
    """
    known = {i: p for i, d in enumerate(differences) if d is not None and (p := p_value(d)) is not None}
    verdicts = ["not settled"] * len(differences)
    for rank, i in enumerate(sorted(known, key=lambda i: known[i])):
        if known[i] > (1.0 - level) / (len(known) - rank):
            break
        difference = differences[i]
        assert difference is not None
        verdicts[i] = "higher" if difference.estimate > 0 else "lower"
    return verdicts
