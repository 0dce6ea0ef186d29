"""How unlikely a finding would be by chance, and what a test of this size would have seen.

Owns the distribution functions, the goodness-of-fit statistics, the correction for many tests and the computation of
power. Plain numbers; knows no torch, no model and no request.

Statistics are twice a log-likelihood ratio throughout (G, or the signed root of a tilted sum): far out in the tail,
where a threshold shared by many tests lies, they keep their level much better than sums of squared residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_MIN_EXPECTED = 5.0


# ---- distribution functions ------------------------------------------------------------------------------------------
def chi_square_sf(x: float, degrees: float) -> float:
    """P(X >= x), X chi-square with `degrees`: the regularised upper incomplete gamma function Q(degrees/2, x/2)."""
    if x <= 0.0:
        return 1.0
    if math.isinf(x):
        return 0.0
    a, y = 0.5 * degrees, 0.5 * x
    scale = math.exp(a * math.log(y) - y - math.lgamma(a))
    if y < a + 1.0:  # series of the lower function
        term = total = 1.0 / a
        count = a
        while abs(term) > 1e-17 * abs(total):
            count += 1.0
            term *= y / count
            total += term
        return min(1.0, max(0.0, 1.0 - total * scale))
    tiny = 1e-300  # continued fraction of the upper one, by Lentz
    b = y + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    h = d
    for i in range(1, 10_000):
        factor = -i * (i - a)
        b += 2.0
        d = 1.0 / (factor * d + b or tiny)
        c = b + factor / c or tiny
        h *= d * c
        if abs(d * c - 1.0) < 1e-15:
            break
    return min(1.0, scale * h)


def chi_square_quantile(tail: float, degrees: float) -> float:
    """x with P(X >= x) = tail."""
    low, high = 0.0, degrees + 10.0
    while chi_square_sf(high, degrees) > tail:
        high *= 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if chi_square_sf(middle, degrees) > tail else (low, middle)
    return 0.5 * (low + high)


def shifted_chi_square_sf(x: float, degrees: float, shift: float) -> float:
    """P(X >= x), X noncentral chi-square with noncentrality `shift`: a Poisson(shift/2) mixture of central ones.

    Each central tail follows from the one of two degrees less: Q(a + 1, y) = Q(a, y) + y^a e^-y / Gamma(a + 1).
    """
    mean, y = 0.5 * shift, 0.5 * x
    if mean == 0.0 or x <= 0.0:
        return chi_square_sf(x, degrees)
    reach = 8.0 * math.sqrt(mean) + 20.0
    first, last = max(0, math.floor(mean - reach)), math.ceil(mean + reach)
    a = 0.5 * degrees + first
    tail = chi_square_sf(x, 2.0 * a)
    weight = math.exp(first * math.log(mean) - mean - math.lgamma(first + 1.0))
    step = math.exp(a * math.log(y) - y - math.lgamma(a + 1.0))
    total = 0.0
    for j in range(first, last + 1):
        total += weight * tail
        weight *= mean / (j + 1.0)
        tail = min(1.0, tail + step)
        a += 1.0
        step *= y / a
    return min(1.0, total)


def two_sided(z: float) -> float:
    """P(|N(0, 1)| >= |z|)."""
    return math.erfc(abs(z) / math.sqrt(2.0))


def binomial_tail(count: int, num_trials: int, rate: float) -> float:
    """P(Binomial(num_trials, rate) >= count)."""
    if count <= 0:
        return 1.0
    if rate <= 0.0:
        return 0.0
    log_choose = math.lgamma(num_trials + 1)
    total = 0.0
    for k in range(count, num_trials + 1):
        term = log_choose - math.lgamma(k + 1) - math.lgamma(num_trials - k + 1)
        term = math.exp(term + k * math.log(rate) + (num_trials - k) * math.log1p(-rate))
        total += term
        if k > num_trials * rate and term < 1e-17 * total:
            break
    return min(1.0, total)


# ---- goodness of fit -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Fit:
    """How counts fit a law: the statistic is chi-square with `degrees` if they come from it."""

    statistic: float
    degrees: int
    num: int

    @property
    def p_value(self) -> float:
        return 1.0 if self.degrees == 0 else chi_square_sf(self.statistic, self.degrees)

    def __add__(self, other: Fit) -> Fit:
        """Both tables in one test; they have to be independent."""
        return Fit(self.statistic + other.statistic, self.degrees + other.degrees, self.num + other.num)


def g_fit(observed: Sequence[int], expected: Sequence[float]) -> Fit:
    """G of counts against expectations of the same sum, with Williams' correction; rare cells are pooled.

    Cells expected less than five times go into one; where that one stays below five, it joins the rarest of the others.
    """
    assert len(observed) == len(expected)
    num = sum(observed)
    cells = sorted(((e, o) for o, e in zip(observed, expected, strict=True)), reverse=True)
    kept = [(e, o) for e, o in cells if e >= _MIN_EXPECTED]
    rest = (sum(e for e, _ in cells[len(kept) :]), sum(o for _, o in cells[len(kept) :]))
    if rest[0] >= _MIN_EXPECTED or not kept:
        kept.append(rest)
    else:
        kept[-1] = (kept[-1][0] + rest[0], kept[-1][1] + rest[1])
    if len(kept) < 2 or num == 0:
        return Fit(0.0, 0, num)
    g = 2.0 * sum(o * math.log(o / e) for e, o in kept if o > 0)
    degrees = len(kept) - 1
    correction = 1.0 + (sum(num / e for e, _ in kept) - 1.0) / (6.0 * num * degrees)
    return Fit(max(g, 0.0) / correction, degrees, num)


def uniform_fit(values: Sequence[float]) -> Fit:
    """G of numbers of [0, 1) against the uniform law, in at most ten equal cells of at least ten each."""
    num_cells = min(10, len(values) // 10)
    if num_cells < 2:
        return Fit(0.0, 0, len(values))
    counts = [0] * num_cells
    for value in values:
        counts[min(int(value * num_cells), num_cells - 1)] += 1
    return g_fit(counts, [len(values) / num_cells] * num_cells)


def tilted_root(total: float, cumulants: Sequence[tuple[float, float]]) -> float:
    """sqrt(2 sup_s (s * total - K(s))) over the (s, K(s)) given: about |N(0, 1)| if K is the log-mgf of the total."""
    return math.sqrt(2.0 * max(0.0, *(s * total - k for s, k in cumulants)))


def bernoulli_root(probs: Sequence[float], hits: Sequence[bool], weights: Sequence[float] | None = None) -> float:
    """Signed root of the likelihood ratio of independent events of these probabilities; about N(0, 1).

    Looks at the weighted number of hits (weights 1 if not given): each event's log-odds are tilted by s times its
    weight, and s is the one that makes the number that was seen the expected one.
    """
    assert all(0.0 < p < 1.0 for p in probs) and len(probs) == len(hits)
    weight = [1.0] * len(probs) if weights is None else list(weights)
    seen = math.fsum(w for w, hit in zip(weight, hits, strict=True) if hit)
    largest = max((abs(w) for w in weight), default=0.0)
    if largest == 0.0:
        return 0.0
    events = [(p, w) for p, w in zip(probs, weight, strict=True) if w != 0.0]

    def expected(s: float) -> float:
        return math.fsum(w / (1.0 + (1.0 - p) / p * math.exp(-s * w)) for p, w in events)

    low, high = -40.0 / largest, 40.0 / largest
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expected(middle) < seen else (low, middle)
    s = 0.5 * (low + high)
    rate = s * seen - math.fsum(math.log1p(p * math.expm1(s * w)) for p, w in events)
    return math.copysign(math.sqrt(2.0 * max(0.0, rate)), s)


# ---- many tests ------------------------------------------------------------------------------------------------------
def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of the tests fail if the chance of any false alarm is to stay below alpha (Holm's step-down rule)."""
    fails = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > alpha / (len(p_values) - rank):
            break
        fails[index] = True
    return fails


def either(fit: float, impossible: float) -> float:
    """One p-value of two tests: nearly all of the level for the first, the rest for what should never happen."""
    return min(1.0, fit / 0.99, impossible / 0.01)


# ---- power -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sight:
    """What a chi-square test of `num` draws could see: a total variation, or, with `sd`, the shift of a mean.

    `what` names that mean, in words with its unit; `sd` is the standard deviation of one draw.
    """

    num: int
    degrees: int
    sd: float = 0.0
    what: str = ""

    def _noncentrality(self, size: float) -> float:
        """Of a deviation of that size.

        Of all deviations of total variation `size` over the cells compared the one is taken that is hardest to see: it
        moves one half of the mass up and the other down, in proportion. Its noncentrality is 4 n size^2.
        """
        return self.num * (2.0 * size) ** 2 if self.sd == 0.0 else self.num * (size / self.sd) ** 2

    def power(self, size: float, alpha: float) -> float:
        """Chance to fail, at level alpha, a system that is off by `size`."""
        return shifted_chi_square_sf(chi_square_quantile(alpha, self.degrees), self.degrees, self._noncentrality(size))

    def least(self, alpha: float, power: float) -> float | None:
        """The smallest size that is seen with this power; None if no size is (a total variation ends at 1)."""
        edge = chi_square_quantile(alpha, self.degrees)
        low, high = 0.0, 1.0
        while shifted_chi_square_sf(edge, self.degrees, self._noncentrality(high)) < power:
            if self.sd == 0.0:
                return None
            low, high = high, 2.0 * high
        for _ in range(30):
            middle = 0.5 * (low + high)
            is_seen = shifted_chi_square_sf(edge, self.degrees, self._noncentrality(middle)) >= power
            low, high = (low, middle) if is_seen else (middle, high)
        return high

    def words(self, least: float | None, alpha: float, power: float) -> str:
        """The sentence of the report; `least` is what `least` gave for the same level and power."""
        if least is None:
            return f"too few draws ({self.num}) to see any deviation with probability {power:g}"
        if self.sd > 0.0:
            return f"would have seen {self.what} off by {least:.3g} with probability {power:g}"
        return (
            f"would have seen a total variation of {least:.3g} with probability {power:g} "
            f"(of 0.05 with probability {self.power(0.05, alpha):.2g})"
        )


def rate_seen(num_cases: int, power: float = 0.9) -> float:
    """The rate of a fault that strikes cases by itself, and is seen at once in `num_cases` with this power."""
    return 1.0 if num_cases == 0 else 1.0 - (1.0 - power) ** (1.0 / num_cases)
