"""What every number means: counters of a request, the ratios made of them, their intervals, their JSON.

Owns the only definition of each statistic. Must not know torch, requests, models or files.

Letters in formulas, per request i: S steps, P proposals, A accepted proposals, C emitted tokens (the first
comes from the prefill, not from a step). Sums run over requests, or over clusters of requests of one prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist, fmean, stdev
from typing import Protocol

from blockdraft.errors import ConfigError

_MAX_T_CLUSTERS = 50  # up to so many clusters the interval uses Student's t, beyond it the normal law
_SECONDS = ("prefill_s", "decode_s")
_HISTOGRAMS = ("accepted_histogram", "drafted_histogram", "full_histogram")


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """Counters of one request. A step commits its accepted proposals and one token of the target's own."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_histogram: tuple[int, ...] = ()
    """Steps by number of accepted proposals."""
    drafted_histogram: tuple[int, ...] = ()
    """Steps by number of proposals; index 0 holds the plain steps."""
    full_histogram: tuple[int, ...] = ()
    """Steps whose proposals were all accepted, by their number; plain steps are among them."""
    num_emitted_tokens: int = 0
    num_clipped_tokens: int = 0
    """Committed, but cut away by a stop or a length limit."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens whose states were kept from an earlier request, hence not fed again."""
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def num_plain_steps(self) -> int:
        """Steps without proposals."""
        return self.drafted_histogram[0] if self.drafted_histogram else 0

    @property
    def num_step_tokens(self) -> int:
        """max(C - 1, 0): emitted tokens that steps made."""
        return max(self.num_emitted_tokens - 1, 0)

    def add_prefill(self, *, seconds: float, num_emitted: int = 1) -> None:
        """Counts the prefill and its one token, emitted (1) or clipped (0)."""
        assert num_emitted in (0, 1)
        self.prefill_s += seconds
        self.num_emitted_tokens += num_emitted
        self.num_clipped_tokens += 1 - num_emitted

    def add_step(self, *, num_draft: int, num_accepted: int, num_emitted: int, seconds: float = 0.0) -> None:
        """Counts one step; of its num_accepted + 1 committed tokens those beyond num_emitted are clipped."""
        assert 0 <= num_accepted <= num_draft, f"{num_accepted} accepted of {num_draft}"
        assert 0 <= num_emitted <= num_accepted + 1, f"{num_emitted} emitted of {num_accepted + 1} committed"
        self.num_steps += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_draft_tokens += num_accepted
        self.accepted_histogram = _counted(self.accepted_histogram, num_accepted)
        self.drafted_histogram = _counted(self.drafted_histogram, num_draft)
        if num_accepted == num_draft:
            self.full_histogram = _counted(self.full_histogram, num_draft)
        self.num_emitted_tokens += num_emitted
        self.num_clipped_tokens += num_accepted + 1 - num_emitted
        self.decode_s += seconds

    def check(self) -> None:
        """Nothing; an AssertionError names the first identity between the counters that does not hold."""
        accepted, drafted, full = self.accepted_histogram, self.drafted_histogram, self.full_histogram
        counts = (self.num_steps, self.num_emitted_tokens, self.num_clipped_tokens, self.num_cached_prompt_tokens)
        assert min(counts) >= 0, "a negative count"
        assert min((*accepted, *drafted, *full), default=0) >= 0, "a negative histogram entry"
        assert sum(accepted) == self.num_steps, "sum(accepted_histogram) != num_steps"
        assert sum(drafted) == self.num_steps, "sum(drafted_histogram) != num_steps"
        assert _weighted(accepted) == self.num_accepted_draft_tokens, "accepted_histogram != num_accepted_draft_tokens"
        assert _weighted(drafted) == self.num_draft_tokens, "drafted_histogram != num_draft_tokens"
        assert self.num_accepted_draft_tokens <= self.num_draft_tokens, "more accepted than drafted"
        for i in range(max(len(accepted), len(drafted), len(full))):
            assert _tail(accepted, i) <= _tail(drafted, i), f"more steps accepted {i} than proposed {i}"
            assert _at(full, i) <= min(_at(accepted, i), _at(drafted, i)), f"too many full steps of {i}"
        assert self.num_plain_steps == _at(full, 0), "a plain step is a full step of 0"
        committed = self.num_emitted_tokens + self.num_clipped_tokens
        if self.num_steps > 0:
            expected = 1 + self.num_accepted_draft_tokens + self.num_steps
            assert committed == expected, f"emitted + clipped is {committed}, 1 + accepted + steps is {expected}"
        else:
            assert committed <= 1, f"{committed} tokens without a step"
        assert min(self.prefill_s, self.decode_s) >= 0.0, "negative time"

    def to_json(self) -> dict[str, object]:
        """A dictionary that json can write; `from_json` gives the equal object back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if name in _HISTOGRAMS else value for name, value in values.items()}

    @classmethod
    def from_json(cls, raw: object) -> RequestStats:
        """The stats that `to_json` wrote; a ConfigError for unknown, missing or contradicting fields."""
        names = [f.name for f in fields(cls)]
        if not isinstance(raw, Mapping):
            raise ConfigError(f"request stats are a {type(raw).__name__}; they must be an object with {names}")
        raw = {"num_cached_prompt_tokens": 0, **raw}  # of before prefixes were kept
        wrong = sorted(str(key) for key in set(raw) ^ set(names))
        if wrong:
            raise ConfigError(f"request stats: unknown or missing fields {wrong}; they must be exactly {names}")
        values: dict[str, object] = {}
        for name in names:
            value = raw[name]
            if name in _HISTOGRAMS:
                is_fine = isinstance(value, (list, tuple)) and all(_is_count(x) for x in value)
                values[name] = tuple(value) if is_fine else value
            elif name in _SECONDS:
                is_fine = type(value) in (int, float) and math.isfinite(value) and value >= 0
            else:
                is_fine = _is_count(value)
            if not is_fine:
                raise ConfigError(f"request stats: {name} is {value!r}; counts are integers and seconds numbers, >= 0")
            values.setdefault(name, value)
        stats = cls(**values)  # type: ignore[arg-type]
        try:
            stats.check()
        except AssertionError as error:
            raise ConfigError(f"request stats contradict themselves: {error}; write them again") from None
        return stats


class PhaseTimes(Protocol):
    """Seconds of one step's phases, and what they were spent on."""

    propose_s: float
    score_s: float
    accept_s: float
    commit_s: float
    prefill_s: float
    num_rows: int
    num_scored: int
    num_prefilled: int


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """What one engine did since it was made, and what it holds now.

    Seconds of phases are sums over steps; a forward that scored blocks and fed prompts is shared out by positions.
    """

    num_steps: int = 0
    num_rows: int = 0
    """Rows that scored a block, summed over steps."""
    num_scored: int = 0
    """Positions of their blocks."""
    num_prefilled: int = 0
    """Positions of prompts that were fed."""
    num_cached_prompt_tokens: int = 0
    """Positions of prompts that were not, since their states were kept."""
    num_emitted_tokens: int = 0
    propose_s: float = 0.0
    score_s: float = 0.0
    accept_s: float = 0.0
    commit_s: float = 0.0
    prefill_s: float = 0.0
    other_s: float = 0.0
    """Of steps, outside these phases: admission, widths, completions, kept prefixes."""
    num_finished: int = 0
    """Requests that ended by a stop or their length."""
    num_cancelled: int = 0
    num_failed: int = 0
    num_waiting: int = 0
    num_running: int = 0
    target_bytes: int = 0
    """Held by the states of running rows in the target."""
    draft_bytes: int = 0
    """Held by their contexts in the draft, taps on their way to it included."""
    prefix_bytes: int = 0
    """Held by kept prefixes, of both."""
    reserved_bytes: int = 0
    """Set aside for running rows; 0 where the engine has no limit."""
    num_prefixes: int = 0
    num_prefix_lookups: int = 0
    num_prefix_hits: int = 0

    def add_step(self, times: PhaseTimes) -> None:
        """Counts one step."""
        self.num_steps += 1
        self.num_rows += times.num_rows
        self.num_scored += times.num_scored
        self.num_prefilled += times.num_prefilled
        self.propose_s += times.propose_s
        self.score_s += times.score_s
        self.accept_s += times.accept_s
        self.commit_s += times.commit_s
        self.prefill_s += times.prefill_s

    def add_request(self, request: RequestStats, finish_reason: str) -> None:
        """Counts one request that ended."""
        self.num_emitted_tokens += request.num_emitted_tokens
        if finish_reason == "cancelled":
            self.num_cancelled += 1
        elif finish_reason == "error":
            self.num_failed += 1
        else:
            self.num_finished += 1

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        phases = self.propose_s + self.score_s + self.accept_s + self.commit_s + self.prefill_s
        return phases + self.other_s

    @property
    def mean_rows(self) -> float | None:
        """Rows of a mean step. None without steps."""
        return _ratio(self.num_rows, self.num_steps)

    @property
    def overhead_share(self) -> float | None:
        """Share of the time outside proposing, scoring and prefill. None without time."""
        return _ratio(self.accept_s + self.commit_s + self.other_s, self.total_s)

    def to_json(self) -> dict[str, object]:
        """A dictionary that json can write, the ratios included."""
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**values, "total_s": self.total_s, "mean_rows": self.mean_rows, "overhead_share": self.overhead_share}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _at(histogram: Sequence[int], index: int) -> int:
    return histogram[index] if index < len(histogram) else 0


def _tail(histogram: Sequence[int], start: int) -> int:
    return sum(histogram[start:])


def _weighted(histogram: Sequence[int]) -> int:
    return sum(index * count for index, count in enumerate(histogram))


def _counted(histogram: tuple[int, ...], index: int) -> tuple[int, ...]:
    counts = list(histogram) + [0] * (index + 1 - len(histogram))
    counts[index] += 1
    return tuple(counts)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


# ------------------------------------------------------------------------------- ratios over many requests


def pooled_acceptance_length(requests: Sequence[RequestStats]) -> float | None:
    """1 + sum A / sum S: committed tokens per step of the whole workload. None without steps."""
    ratio = _ratio(sum(r.num_accepted_draft_tokens for r in requests), sum(r.num_steps for r in requests))
    return None if ratio is None else 1.0 + ratio


def committed_acceptance_length(requests: Sequence[RequestStats]) -> float | None:
    """sum max(C - 1, 0) / sum S: emitted tokens per step, clipped ones not counted. None without steps."""
    return _ratio(sum(r.num_step_tokens for r in requests), sum(r.num_steps for r in requests))


def mean_acceptance_length(requests: Sequence[RequestStats]) -> float | None:
    """(1/n) sum (1 + A_i / S_i) over the n requests that took a step: the typical one. None if none did."""
    lengths = [1.0 + r.num_accepted_draft_tokens / r.num_steps for r in requests if r.num_steps > 0]
    return fmean(lengths) if lengths else None


def proposal_acceptance_rate(requests: Sequence[RequestStats]) -> float | None:
    """sum A / sum P: share of the proposals that were accepted. None without proposals."""
    accepted = sum(r.num_accepted_draft_tokens for r in requests)
    return _ratio(accepted, sum(r.num_draft_tokens for r in requests))


def decode_tok_per_s(requests: Sequence[RequestStats]) -> float | None:
    """sum max(C - 1, 0) / sum decode_s: tokens of steps per second of steps. None without time."""
    return _ratio(sum(r.num_step_tokens for r in requests), sum(r.decode_s for r in requests))


def output_tok_per_s(requests: Sequence[RequestStats]) -> float | None:
    """sum C / sum (prefill_s + decode_s): emitted tokens per second of the whole time. None without time."""
    seconds = sum(r.prefill_s + r.decode_s for r in requests)
    return _ratio(sum(r.num_emitted_tokens for r in requests), seconds)


def survival_by_position(requests: Sequence[RequestStats]) -> list[float]:
    """For i = 1, 2, ...: steps that accepted >= i / steps that proposed >= i."""
    width = max((len(r.drafted_histogram) for r in requests), default=0)
    result = []
    for i in range(1, width):
        proposed = sum(_tail(r.drafted_histogram, i) for r in requests)
        result.append(sum(_tail(r.accepted_histogram, i) for r in requests) / proposed)
    return result


def conditional_acceptance_by_position(requests: Sequence[RequestStats]) -> list[float | None]:
    """For i = 1, 2, ...: steps that accepted >= i / steps that accepted >= i-1 and proposed >= i.

    The denominator is (steps that accepted >= i-1) - (steps that accepted all of just i-1 proposals).
    None where no step came that far.
    """
    width = max((len(r.drafted_histogram) for r in requests), default=0)
    result: list[float | None] = []
    for i in range(1, width):
        reached = sum(_tail(r.accepted_histogram, i - 1) - _at(r.full_histogram, i - 1) for r in requests)
        result.append(_ratio(sum(_tail(r.accepted_histogram, i) for r in requests), reached))
    return result


# ------------------------------------------------------------------------------------------------ intervals


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its two-sided interval; the bounds are None for fewer than two clusters."""

    estimate: float
    low: float | None
    high: float | None
    level: float
    num_clusters: int

    def shifted(self, offset: float) -> Interval:
        """The interval of estimate + offset."""
        low = None if self.low is None else self.low + offset
        high = None if self.high is None else self.high + offset
        return Interval(self.estimate + offset, low, high, self.level, self.num_clusters)


def t_quantile(probability: float, degrees: int) -> float:
    """x with P(t_v <= x) = probability, v = degrees, by bisection of the finite series for whole v.

    With a = atan(x / sqrt(v)): P(|t| <= x) = sin a (1 + 1/2 cos^2 a + 1*3/(2*4) cos^4 a + ...) for even v
    and 2/pi (a + sin a (cos a + 2/3 cos^3 a + 2*4/(3*5) cos^5 a + ...)) for odd v, up to cos^(v-2).
    """
    assert 0.0 < probability < 1.0 and degrees >= 1
    if probability < 0.5:
        return -t_quantile(1.0 - probability, degrees)
    low, high = 0.0, 0.5 * math.pi
    for _ in range(100):
        middle = 0.5 * (low + high)
        if _t_central_mass(middle, degrees) < 2.0 * probability - 1.0:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(0.5 * (low + high))


def _t_central_mass(angle: float, degrees: int) -> float:
    """P(|t_degrees| <= sqrt(degrees) * tan(angle))."""
    is_odd = degrees % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    series = 0.0
    for power in range(1 if is_odd else 0, degrees - 1, 2):
        series += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    mass = math.sin(angle) * series
    return 2.0 / math.pi * (angle + mass) if is_odd else mass


def critical_value(level: float, num_clusters: int) -> float:
    """Two-sided quantile: Student's t with n-1 degrees for n <= 50 clusters, the normal law's beyond."""
    assert 0.0 < level < 1.0
    probability = 0.5 * (1.0 + level)
    if num_clusters <= _MAX_T_CLUSTERS:
        return t_quantile(probability, num_clusters - 1)
    return NormalDist().inv_cdf(probability)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, level: float = 0.95
) -> Interval | None:
    """r = sum A / sum S over n clusters, +- quantile * sqrt(n/(n-1) * sum d_i^2) / sum S, d_i = A_i - r S_i.

    The Taylor-linearised interval of a ratio; Student's t quantile for n <= 50. None if sum S = 0.
    Any statistic that is a ratio of sums takes it, e.g. with A = steps that accepted >= i.
    """
    assert len(numerators) == len(denominators)
    total, n = sum(denominators), len(numerators)
    if total <= 0:
        return None
    ratio = sum(numerators) / total
    if n < 2:
        return Interval(ratio, None, None, level, n)
    squares = sum((a - ratio * s) ** 2 for a, s in zip(numerators, denominators, strict=True))
    half = critical_value(level, n) * math.sqrt(n / (n - 1) * squares) / total
    return Interval(ratio, ratio - half, ratio + half, level, n)


def bootstrap_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int,
    level: float = 0.95,
    num_draws: int = 2000,
) -> Interval | None:
    """r = sum A / sum S, percentile interval of `num_draws` resamplings of clusters. None if sum S = 0."""
    assert len(numerators) == len(denominators) and num_draws >= 100
    total, n = sum(denominators), len(numerators)
    if total <= 0:
        return None
    ratio = sum(numerators) / total
    if n < 2:
        return Interval(ratio, None, None, level, n)
    source = random.Random(seed)
    draws: list[float] = []
    while len(draws) < num_draws:
        picked = source.choices(range(n), k=n)
        below = sum(denominators[i] for i in picked)
        if below > 0:
            draws.append(sum(numerators[i] for i in picked) / below)
    draws.sort()
    tail = 0.5 * (1.0 - level)
    low, high = draws[math.floor(tail * num_draws)], draws[math.ceil((1.0 - tail) * num_draws) - 1]
    return Interval(ratio, low, high, level, n)


def pooled_acceptance_length_interval(
    requests: Sequence[RequestStats], *, clusters: Sequence[Hashable] | None = None, level: float = 0.95
) -> Interval | None:
    """1 + `ratio_interval` of A over S; `clusters` names the prompt of each request (None: all different)."""
    accepted, steps = _cluster_sums(requests, clusters)
    interval = ratio_interval(list(accepted.values()), list(steps.values()), level=level)
    return None if interval is None else interval.shifted(1.0)


def paired_difference(
    first: Sequence[RequestStats],
    second: Sequence[RequestStats],
    *,
    first_clusters: Sequence[Hashable],
    second_clusters: Sequence[Hashable],
    level: float = 0.95,
) -> Interval | None:
    """Pooled acceptance length of `second` minus that of `first`, two drafts on the same prompts.

    r_2 - r_1, +- quantile * sd(g) / sqrt(n), with the influence of prompt i
    g_i = (A_2i - r_2 S_2i) / mean S_2 - (A_1i - r_1 S_1i) / mean S_1. A prompt may have several requests
    (seeds). None if one side took no steps; both sides must name the same prompts.
    """
    a_1, s_1 = _cluster_sums(first, first_clusters)
    a_2, s_2 = _cluster_sums(second, second_clusters)
    if set(a_1) != set(a_2):
        odd = sorted(str(key) for key in set(a_1) ^ set(a_2))
        raise ConfigError(f"prompts {odd[:3]} are in one of the two runs only; pair runs of the same prompts")
    n, total_1, total_2 = len(a_1), sum(s_1.values()), sum(s_2.values())
    if total_1 == 0 or total_2 == 0:
        return None
    r_1, r_2 = sum(a_1.values()) / total_1, sum(a_2.values()) / total_2
    if n < 2:
        return Interval(r_2 - r_1, None, None, level, n)
    influences = [(a_2[k] - r_2 * s_2[k]) / (total_2 / n) - (a_1[k] - r_1 * s_1[k]) / (total_1 / n) for k in a_1]
    half = critical_value(level, n) * stdev(influences) / math.sqrt(n)
    return Interval(r_2 - r_1, r_2 - r_1 - half, r_2 - r_1 + half, level, n)


def _cluster_sums(
    requests: Sequence[RequestStats], clusters: Sequence[Hashable] | None
) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
    """Accepted proposals and steps, summed by cluster."""
    keys: Sequence[Hashable] = range(len(requests)) if clusters is None else clusters
    assert len(keys) == len(requests), f"{len(keys)} cluster names for {len(requests)} requests"
    accepted: dict[Hashable, int] = {}
    steps: dict[Hashable, int] = {}
    for key, request in zip(keys, requests, strict=True):
        accepted[key] = accepted.get(key, 0) + request.num_accepted_draft_tokens
        steps[key] = steps.get(key, 0) + request.num_steps
    return accepted, steps
