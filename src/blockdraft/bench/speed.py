"""How fast: rates of users, of the whole system, and how much faster than the same system without speculation.

Owns times. A user's rate is sum (C - 1) / sum (end - first token); throughput counts only while as many conversations
are in flight as the load asks for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, stdev

from blockdraft.bench.estimates import cluster_of, clustered_ratio, counted
from blockdraft.bench.record import ROUND_TAG, RequestRecord
from blockdraft.stats import Interval, critical_value

__all__ = ["Window", "first_token_median_s", "paired_speed_up", "steady_window", "step_time_s", "user_rate"]


def timed(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests whose first token has a time and was not the last."""
    return [r for r in counted(records) if r.first_token_s is not None and _decode_s(r) > 0 and not r.is_replay]


def user_rate(records: Iterable[RequestRecord]) -> Interval | None:
    """Tokens per second that one user sees after the first token: sum (C - 1) / sum (end - first token)."""
    return clustered_ratio(timed(records), _step_tokens, _decode_s)


def step_time_s(records: Iterable[RequestRecord]) -> Interval | None:
    """Seconds of a step at this load: sum (end - first token) / sum S."""
    known = [r for r in timed(records) if r.counts.num_steps]
    return clustered_ratio(known, _decode_s, lambda r: r.counts.num_steps or 0)


def first_token_median_s(records: Iterable[RequestRecord]) -> float | None:
    """Median time to the first token, queue included."""
    times = [r.first_token_s for r in counted(records) if r.first_token_s is not None]
    return median(times) if times else None


def paired_speed_up(
    fast: Iterable[RequestRecord], slow: Iterable[RequestRecord], *, level: float = 0.95
) -> Interval | None:
    """The rate of users in `fast` over that in `slow`, on the prompts that both have.

    R = (sum C_1 / sum T_1) / (sum C_0 / sum T_0); exp(log R +- quantile * sd(g) / sqrt(n)) with the influence of prompt
    i on log R, g_i = (C_1i / mean C_1 - T_1i / mean T_1) - (C_0i / mean C_0 - T_0i / mean T_0). None without pairs.
    """
    sides = [_sums(timed(side)) for side in (fast, slow)]
    shared = [key for key in sides[0] if key in sides[1]]
    n = len(shared)
    if n == 0:
        return None
    totals = [[sum(side[key][j] for key in shared) for j in (0, 1)] for side in sides]
    if not all(value > 0 for pair in totals for value in pair):
        return None
    log_ratio = math.log(totals[0][0] / totals[0][1]) - math.log(totals[1][0] / totals[1][1])
    if n < 2:
        return Interval(math.exp(log_ratio), None, None, level, n)

    def influence(key: Hashable) -> float:
        one, two = (side[key] for side in sides)
        return n * (one[0] / totals[0][0] - one[1] / totals[0][1] - two[0] / totals[1][0] + two[1] / totals[1][1])

    half = critical_value(level, n) * stdev(influence(key) for key in shared) / math.sqrt(n)
    return Interval(math.exp(log_ratio), math.exp(log_ratio - half), math.exp(log_ratio + half), level, n)


@dataclass(frozen=True, slots=True)
class Window:
    """While exactly as many conversations ran as asked for: seconds, and tokens emitted in them, over all rounds."""

    seconds: float
    tokens: float

    @property
    def tok_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


def steady_window(records: Sequence[RequestRecord]) -> Window:
    """The steady part of a closed loop, round by round: from its first full moment to its last.

    A request's tokens are spread evenly from its first token to its end. Empty for an open loop, and where the prompts
    were fewer than the conversations asked for.
    """
    rounds: dict[object, list[RequestRecord]] = defaultdict(list)
    for record in counted(records):
        rounds[record.tags.get(ROUND_TAG, 0)].append(record)
    seconds = tokens = 0.0
    for members in rounds.values():
        wanted = members[0].load.partition(":")
        if wanted[0] != "closed":
            continue
        begin, end = _full(members, int(wanted[2]))
        if end <= begin:
            continue
        seconds += end - begin
        tokens += sum(_tokens_within(record, begin, end) for record in members)
    return Window(seconds, tokens)


def _full(records: Sequence[RequestRecord], count: int) -> tuple[float, float]:
    """The first and the last moment at which `count` requests are in flight; (0, 0) without one."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.sent_s + r.total_s, -1) for r in records])
    now, begin, end = 0, math.inf, 0.0
    for at, change in changes:
        if now >= count and change < 0:
            end = max(end, at)
        now += change
        if now >= count:
            begin = min(begin, at)
    return (begin, end) if begin < end else (0.0, 0.0)


def _tokens_within(record: RequestRecord, begin: float, end: float) -> float:
    if record.first_token_s is None:
        return 0.0
    first, last = record.sent_s + record.first_token_s, record.sent_s + record.total_s
    found = 1.0 if begin <= first <= end and record.counts.num_emitted_tokens else 0.0
    if last > first:
        share = max(min(last, end) - max(first, begin), 0.0) / (last - first)
        found += share * _step_tokens(record)
    return found


def _sums(records: Sequence[RequestRecord]) -> dict[Hashable, list[float]]:
    sums: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        entry = sums[cluster_of(record)]
        entry[0] += _step_tokens(record)
        entry[1] += _decode_s(record)
    return dict(sums)


def _step_tokens(record: RequestRecord) -> float:
    return max(record.counts.num_emitted_tokens - 1, 0)


def _decode_s(record: RequestRecord) -> float:
    return 0.0 if record.first_token_s is None else max(record.total_s - record.first_token_s, 0.0)
