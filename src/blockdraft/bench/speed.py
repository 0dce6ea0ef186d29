"""How fast: rates of users, of the whole system, and how much faster than the same system without speculation.

Owns times. A user's rate is sum (C - 1) / sum (end - first token); throughput counts only while as many conversations
are in flight as the load asks for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev

from blockdraft.bench.estimates import cluster_of, clustered_ratio, counted, mean_of
from blockdraft.bench.record import PROCESS_TAG, ROUND_TAG, RequestRecord
from blockdraft.stats import Interval, critical_value, ratio_interval

__all__ = [
    "Window",
    "break_even_length",
    "first_token_s",
    "paired_speed_up",
    "steady_windows",
    "step_time_s",
    "throughput",
    "user_rate",
]


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


def first_token_s(records: Iterable[RequestRecord]) -> Interval | None:
    """Mean seconds to the first token, queue included."""
    known = [r for r in counted(records) if r.first_token_s is not None and not r.is_replay]
    return mean_of(known, lambda r: r.first_token_s or 0.0)


def paired_speed_up(
    fast: Iterable[RequestRecord], slow: Iterable[RequestRecord], *, level: float = 0.95
) -> Interval | None:
    """The rate of users in `fast` over that in `slow`, on the prompts that both have. None without any."""
    return _paired_ratio(timed(fast), timed(slow), _step_tokens, _decode_s, level=level)


def break_even_length(fast: Iterable[RequestRecord], slow: Iterable[RequestRecord]) -> Interval | None:
    """Step time in `fast` over that in `slow`: the acceptance length at which both are equally fast."""
    known = [[r for r in timed(side) if r.counts.num_steps] for side in (fast, slow)]
    return _paired_ratio(known[0], known[1], _decode_s, lambda r: r.counts.num_steps or 0, level=0.95)


def _paired_ratio(
    ones: Sequence[RequestRecord],
    zeros: Sequence[RequestRecord],
    upper: Callable[[RequestRecord], float],
    lower: Callable[[RequestRecord], float],
    *,
    level: float,
) -> Interval | None:
    """R = (sum U_1 / sum L_1) / (sum U_0 / sum L_0) over the prompts that both have.

    exp(log R +- quantile * sd(g) / sqrt(n)) with the influence of prompt i on log R,
    g_i = (U_1i / mean U_1 - L_1i / mean L_1) - (U_0i / mean U_0 - L_0i / mean L_0).
    """
    sides = [_sums(side, upper, lower) for side in (ones, zeros)]
    shared = [key for key in sides[0] if key in sides[1]]
    n = len(shared)
    totals = [[sum(side[key][j] for key in shared) for j in (0, 1)] for side in sides]
    if n == 0 or not all(value > 0 for pair in totals for value in pair):
        return None
    log_ratio = math.log(totals[0][0] / totals[0][1]) - math.log(totals[1][0] / totals[1][1])
    if n < 2:
        return Interval(math.exp(log_ratio), None, None, level, n)

    def influence(key: Hashable) -> float:
        one, zero = (side[key] for side in sides)
        return n * (one[0] / totals[0][0] - one[1] / totals[0][1] - zero[0] / totals[1][0] + zero[1] / totals[1][1])

    half = critical_value(level, n) * stdev(influence(key) for key in shared) / math.sqrt(n)
    return Interval(math.exp(log_ratio), math.exp(log_ratio - half), math.exp(log_ratio + half), level, n)


@dataclass(frozen=True, slots=True)
class Window:
    """While at least as many conversations ran as asked for: seconds, and tokens emitted in them."""

    seconds: float
    tokens: float


def throughput(records: Sequence[RequestRecord]) -> Interval | None:
    """Tokens per second of the whole system while its load was full; rounds are what is independent here.

    None for an open loop, and where the prompts were fewer than the conversations asked for.
    """
    windows = steady_windows(records)
    return ratio_interval([w.tokens for w in windows], [w.seconds for w in windows])


def steady_windows(records: Sequence[RequestRecord]) -> list[Window]:
    """The steady parts of closed loops, of each data set and round: from its first full moment to its last.

    A request's tokens are spread evenly from its first token to its end.
    """
    rounds: dict[object, list[RequestRecord]] = defaultdict(list)
    for record in counted(records):
        origin = (record.dataset, record.load, record.tags.get(ROUND_TAG), record.tags.get(PROCESS_TAG))
        rounds[origin].append(record)  # what counts its seconds from one and the same moment
    windows = []
    for members in rounds.values():
        kind, _, wanted = members[0].load.partition(":")
        if kind != "closed":
            continue
        begin, end = _full(members, int(wanted))
        if end > begin:
            windows.append(Window(end - begin, sum(_tokens_within(record, begin, end) for record in members)))
    return windows


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


def _sums(
    records: Sequence[RequestRecord],
    upper: Callable[[RequestRecord], float],
    lower: Callable[[RequestRecord], float],
) -> dict[Hashable, list[float]]:
    sums: dict[Hashable, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        entry = sums[cluster_of(record)]
        entry[0] += upper(record)
        entry[1] += lower(record)
    return dict(sums)


def _step_tokens(record: RequestRecord) -> float:
    return max(record.counts.num_emitted_tokens - 1, 0)


def _decode_s(record: RequestRecord) -> float:
    return 0.0 if record.first_token_s is None else max(record.total_s - record.first_token_s, 0.0)
