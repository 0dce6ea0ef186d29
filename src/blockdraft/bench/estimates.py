"""From records to estimates with intervals: which sums are divided, and what is independent.

Owns the grouping: all turns and samples of a prompt are one cluster, and a request that took no step or broke does not
count. The estimators themselves are those of stats.py; every ratio here is one of its ratios of cluster sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean

from blockdraft.bench.record import RequestRecord
from blockdraft.stats import Interval, RequestStats, critical_value, pooled_acceptance_length_interval, ratio_interval

__all__ = [
    "FORMULAS",
    "acceptance_length",
    "clustered_ratio",
    "committed_length",
    "conditional",
    "counted",
    "macro_mean",
    "mean_of",
    "per_request_length",
    "proposal_acceptance",
    "speculated",
    "step_ratio",
    "survival",
]

FORMULAS = {
    "pooled": "1 + sum A / sum S",
    "per_request": "mean of 1 + A / S over requests",
    "committed": "sum (C - 1) / sum S",
    "proposal": "sum A / sum P",
    "survival": "steps that accepted >= i / steps that proposed >= i",
    "conditional": "steps that accepted >= i / steps that proposed >= i and accepted >= i - 1",
}


def counted(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests that ended by themselves or by their limit."""
    return [record for record in records if record.is_whole]


def speculated(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Of these, those whose steps and proposals are known, and that took a step."""
    return [record for record in counted(records) if record.counts.has_acceptance]


def cluster_of(record: RequestRecord) -> tuple[str, str]:
    return record.dataset, record.cluster_id


def clustered_ratio(
    records: Sequence[RequestRecord],
    numerator: Callable[[RequestRecord], float],
    denominator: Callable[[RequestRecord], float],
    *,
    level: float = 0.95,
) -> Interval | None:
    """sum of numerators / sum of denominators, prompts being independent. None where the denominator is 0."""
    sums: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        entry = sums[cluster_of(record)]
        entry[0] += numerator(record)
        entry[1] += denominator(record)
    return ratio_interval([a for a, _ in sums.values()], [s for _, s in sums.values()], level=level)


def mean_of(records: Sequence[RequestRecord], value: Callable[[RequestRecord], float]) -> Interval | None:
    """The mean over requests. None without any."""
    return clustered_ratio(records, value, lambda _: 1.0)


# ---- acceptance ------------------------------------------------------------------------------------------------------
def acceptance_length(records: Iterable[RequestRecord], *, level: float = 0.95) -> Interval | None:
    """Pooled: 1 + sum A / sum S."""
    known = speculated(records)
    stats = [record.counts.stats() for record in known]
    return pooled_acceptance_length_interval(stats, clusters=[cluster_of(record) for record in known], level=level)


def committed_length(records: Iterable[RequestRecord]) -> Interval | None:
    """sum (C - 1) / sum S: clipped tokens do not count."""
    return clustered_ratio(speculated(records), lambda r: r.counts.stats().num_step_tokens, _num_steps)


def per_request_length(records: Iterable[RequestRecord]) -> Interval | None:
    """Mean of 1 + A / S over requests."""
    return mean_of(speculated(records), lambda r: 1.0 + _num_accepted(r) / _num_steps(r))


def proposal_acceptance(records: Iterable[RequestRecord]) -> Interval | None:
    """sum A / sum P."""
    return clustered_ratio(speculated(records), _num_accepted, lambda r: r.counts.num_draft_tokens or 0)


def survival(records: Iterable[RequestRecord]) -> list[Interval | None]:
    """For i = 1, 2, ...: steps that accepted >= i / steps that proposed >= i. Empty where positions are not known."""
    return _by_position(records, lambda stats, i: _tail(stats.drafted_histogram, i))


def conditional(records: Iterable[RequestRecord]) -> list[Interval | None]:
    """For i = 1, 2, ...: of the steps that proposed i and accepted i - 1, those that accepted i."""

    def reached(stats: RequestStats, i: int) -> int:
        full = stats.full_histogram
        return _tail(stats.accepted_histogram, i - 1) - (full[i - 1] if i - 1 < len(full) else 0)

    return _by_position(records, reached)


def _by_position(records: Iterable[RequestRecord], below: Callable[[RequestStats, int], int]) -> list[Interval | None]:
    known = speculated(records)
    if not known or not all(record.counts.has_positions for record in known):
        return []
    stats = {id(record): record.counts.stats() for record in known}
    most = max(len(one.drafted_histogram) for one in stats.values())
    return [
        clustered_ratio(
            known,
            lambda r, i=i: _tail(stats[id(r)].accepted_histogram, i),  # type: ignore[misc]
            lambda r, i=i: below(stats[id(r)], i),  # type: ignore[misc]
        )
        for i in range(1, most)
    ]


def step_ratio(
    records: Iterable[RequestRecord], is_in: Callable[[RequestRecord, int], bool]
) -> tuple[Interval | None, int, int]:
    """(acceptance length of some steps, their number, requests that have any).

    `is_in(record, position)` says whether a step belongs to them; its position is that of the first token it commits,
    counted from 0, the prefill's own token being 0. Records that do not tell single steps do not count.
    """
    pairs: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    num_steps = num_requests = 0
    for record in speculated(records):
        if record.counts.per_step_accepted is None:
            continue
        position, mine = 1, 0
        for accepted in record.counts.per_step_accepted:
            if is_in(record, position):
                entry = pairs[cluster_of(record)]
                entry[0] += accepted
                entry[1] += 1
                mine += 1
            position += accepted + 1
        num_steps += mine
        num_requests += mine > 0
    found = ratio_interval([a for a, _ in pairs.values()], [s for _, s in pairs.values()])
    return (None if found is None else found.shifted(1.0)), num_steps, num_requests


def macro_mean(intervals: Sequence[Interval | None]) -> Interval | None:
    """The mean over data sets, each with the same weight; errors add in squares, t for the smallest of the sets.

    None if one of them is None. Its population is these very sets.
    """
    known = [interval for interval in intervals if interval is not None]
    if not known or len(known) < len(intervals):
        return None
    mean, level = fmean(interval.estimate for interval in known), known[0].level
    least = min(interval.num_clusters for interval in known)
    errors = []
    for interval in known:
        if interval.high is None or interval.low is None:
            return Interval(mean, None, None, level, least)
        errors.append((interval.high - interval.low) / 2.0 / critical_value(interval.level, interval.num_clusters))
    half = critical_value(level, least) * math.sqrt(sum(error**2 for error in errors)) / len(known)
    return Interval(mean, mean - half, mean + half, level, least)


def _num_accepted(record: RequestRecord) -> float:
    return record.counts.num_accepted_draft_tokens or 0


def _num_steps(record: RequestRecord) -> float:
    return record.counts.num_steps or 0


def _tail(histogram: Sequence[int], start: int) -> int:
    return sum(histogram[start:])
