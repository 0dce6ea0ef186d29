"""How likely the proposals of a request are to stand: a running estimate, pure arithmetic over few numbers.

Owns the estimate. On the log-odds scale a proposal stands, given that those before it did, by the sum of four numbers:
what was expected of its position, how far the whole engine is from that, how far this position is, and how much easier
than the others this request's text is. Each of the last three has a variance, and every proposal that is decided moves
each of them by its share of it: an easy first position says something about the fifth, which is rarely reached, and a
request that survives to the fifth is known to be easy, so that it does not make the fifth look good for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

__all__ = ["PRIOR_ACCEPTANCE", "AcceptanceRecord", "Ease"]

PRIOR_ACCEPTANCE = 0.5  # of a draft that nobody has measured
# Variances, log-odds: at first (and at most), and by how much they grow again, since texts and workloads change.
REQUEST_SPREAD, REQUEST_WANDER = 0.3, 0.004  # a step of the request
ENGINE_SPREAD, ENGINE_WANDER = 1.0, 0.0005  # a step of any request
POSITION_SPREAD, POSITION_WANDER = 0.15, 0.0005  # a proposal at the position
_MOST = 6.0  # log-odds of an average request: an estimate never becomes certain


class Ease:
    """One request: how much easier than the average it is, log-odds, and the variance of that."""

    __slots__ = ("mean", "variance")

    def __init__(self) -> None:
        self.mean, self.variance = 0.0, REQUEST_SPREAD


class AcceptanceRecord:
    """Acceptance by position over all requests of an engine, 1 to `num_positions`, and that of one request given it.

    `prior` is the conditional acceptance by position that is expected before anything was seen; its last number holds
    for the positions beyond it.
    """

    def __init__(self, num_positions: int, prior: Sequence[float] | None = None) -> None:
        given = list(prior) if prior else [PRIOR_ACCEPTANCE]
        self._prior = [_log_odds(given[min(k, len(given) - 1)]) for k in range(num_positions)]
        self._shift, self._shift_variance = 0.0, ENGINE_SPREAD
        self._own, self._own_variance = [0.0] * num_positions, [POSITION_SPREAD] * num_positions
        self._odds = list(self._prior)
        self.num_trials = 0

    @property
    def shares(self) -> list[float]:
        """Conditional acceptance by position of the average request."""
        return [_probability(odds) for odds in self._odds]

    def survival(self, ease: Ease | None = None) -> list[float]:
        """P(at least k proposals stand) for k = 1, 2, ... of a request; of the average one without `ease`."""
        mean = 0.0 if ease is None else ease.mean
        exp = math.exp
        return list(accumulate([1.0 / (1.0 + exp(-odds - mean)) for odds in self._odds], mul))

    def observe(self, ease: Ease, num_proposed: int, num_accepted: int) -> None:
        """A step of a request: the first `num_accepted` of `num_proposed` stood; what follows was not reached.

        `survival` knows of it after the next `refresh`, once for all requests of a step.
        """
        ease.variance = min(ease.variance + REQUEST_WANDER, REQUEST_SPREAD)
        self._shift_variance = min(self._shift_variance + ENGINE_WANDER, ENGINE_SPREAD)
        for k in range(min(num_accepted + 1, num_proposed)):
            expected = _probability(self._prior[k] + self._shift + self._own[k] + ease.mean)
            own_variance = min(self._own_variance[k] + POSITION_WANDER, POSITION_SPREAD)
            information = expected * (1.0 - expected)
            share = 1.0 / (1.0 + information * (ease.variance + self._shift_variance + own_variance))
            surprise = share * ((1.0 if k < num_accepted else 0.0) - expected)
            ease.mean += ease.variance * surprise
            self._shift = min(max(self._shift + self._shift_variance * surprise, -_MOST), _MOST)
            self._own[k] += own_variance * surprise
            share *= information
            ease.variance -= ease.variance**2 * share
            self._shift_variance -= self._shift_variance**2 * share
            self._own_variance[k] = own_variance - own_variance**2 * share
            self.num_trials += 1

    def refresh(self) -> None:
        """Let what was observed count."""
        shift = self._shift
        self._odds = [
            min(max(prior + shift + own, -_MOST), _MOST) for prior, own in zip(self._prior, self._own, strict=True)
        ]


def _log_odds(probability: float) -> float:
    probability = min(max(probability, 0.002), 0.998)
    return math.log(probability / (1.0 - probability))


def _probability(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
