"""Two drafts, widths or engines compared: the difference, and how many prompts would settle it.

Builds on the counters and intervals of stats.py; the paired difference of the same prompts is there. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

from blockdraft.stats import Interval, RequestStats, critical_value, pooled_acceptance_length_interval

__all__ = ["prompts_to_settle", "unpaired_difference"]


def unpaired_difference(
    first: Sequence[RequestStats],
    second: Sequence[RequestStats],
    *,
    first_clusters: Sequence[Hashable] | None = None,
    second_clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
) -> Interval | None:
    """Pooled acceptance length of `second` minus that of `first`, on prompts that have nothing to do with each other.

    r_2 - r_1, +- quantile * sqrt(SE_1^2 + SE_2^2) with the errors of `ratio_interval`, Student's t for the smaller of
    the two numbers of clusters. For the same prompts `paired_difference` is far narrower. None if one side took no
    steps.
    """
    one = pooled_acceptance_length_interval(first, clusters=first_clusters, level=level)
    two = pooled_acceptance_length_interval(second, clusters=second_clusters, level=level)
    if one is None or two is None:
        return None
    n = min(one.num_clusters, two.num_clusters)
    errors = [_standard_error(side) for side in (one, two)]
    difference = two.estimate - one.estimate
    if errors[0] is None or errors[1] is None:
        return Interval(difference, None, None, level, n)
    half = critical_value(level, n) * math.hypot(errors[0], errors[1])
    return Interval(difference, difference - half, difference + half, level, n)


def prompts_to_settle(difference: Interval, *, power: float = 0.9) -> int | None:
    """How many prompts would settle a difference of this size: its interval then leaves out 0 with this probability.

    The smallest n >= 2 with (quantile_n + z_power) * sd / sqrt(n) <= |difference|, where sd is the deviation of one
    prompt's influence, taken from the interval. None where the interval has no bounds or the difference is 0.
    """
    assert 0.0 < power < 1.0
    error = _standard_error(difference)
    if error is None or difference.estimate == 0.0:
        return None
    deviation = error * math.sqrt(difference.num_clusters)
    extra = NormalDist().inv_cdf(power)

    def is_enough(n: int) -> bool:
        return (critical_value(difference.level, n) + extra) * deviation <= abs(difference.estimate) * math.sqrt(n)

    low, high = 1, 2  # the quantile falls with n, so that whatever is enough stays enough
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _standard_error(interval: Interval) -> float | None:
    """What a symmetric interval of `critical_value` quantiles was made of."""
    if interval.high is None or interval.low is None:
        return None
    return 0.5 * (interval.high - interval.low) / critical_value(interval.level, interval.num_clusters)
