"""The exam's probabilities against scipy and simulation, its law of sampling against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from blockdraft.accept import SamplingParams, target_distribution
from blockdraft.verify.chance import (
    Sight,
    bernoulli_root,
    binomial_tail,
    chi_square_quantile,
    chi_square_sf,
    either,
    g_fit,
    holm,
    rate_seen,
    shifted_chi_square_sf,
    tilted_root,
    uniform_fit,
)
from blockdraft.verify.evidence import TILTS
from blockdraft.verify.law import places, sampling_law


@pytest.mark.parametrize("degrees", [1, 2, 5, 9, 40, 300])
def test_chi_square_equals_scipy(degrees: int) -> None:
    for x in (0.0, 0.3, 1.0, 5.0, 20.0, 90.0, 700.0):
        assert chi_square_sf(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-8, abs=1e-290)
        for shift in (0.5, 7.0, 120.0):
            want = stats.ncx2.sf(x, degrees, shift)
            assert shifted_chi_square_sf(x, degrees, shift) == pytest.approx(want, rel=1e-5, abs=1e-12)
    for tail in (0.5, 1e-3, 1e-9):
        assert chi_square_quantile(tail, degrees) == pytest.approx(stats.chi2.isf(tail, degrees), rel=1e-9)


def test_binomial_tail_equals_scipy() -> None:
    for count, num, rate in itertools.product((0, 1, 3, 40), (40, 2000), (1e-4, 0.02, 0.5)):
        assert binomial_tail(count, num, rate) == pytest.approx(
            stats.binom.sf(count - 1, num, rate), rel=1e-7, abs=1e-300
        )
    assert binomial_tail(2, 10, 0.0) == 0.0 and binomial_tail(0, 0, 0.1) == 1.0


def test_g_by_hand_with_pooling() -> None:
    fit = g_fit([30, 50, 20], [40.0, 40.0, 20.0])
    g = 2 * (30 * math.log(30 / 40) + 50 * math.log(50 / 40))
    correction = 1 + (100 / 40 + 100 / 40 + 100 / 20 - 1) / (6 * 100 * 2)
    assert fit.statistic == pytest.approx(g / correction) and (fit.degrees, fit.num) == (2, 100)
    pooled = g_fit([30, 50, 9, 8, 3], [40.0, 40.0, 10.0, 6.0, 4.0])
    assert pooled.degrees == 3 and pooled == g_fit([30, 50, 9, 11], [40.0, 40.0, 10.0, 10.0])
    assert g_fit([5, 1], [5.5, 0.5]).degrees == 0 and g_fit([], []).p_value == 1.0
    assert (fit + pooled).degrees == 5
    assert uniform_fit([0.5] * 19).degrees == 0 and uniform_fit([i / 100 for i in range(100)]).statistic == 0.0


def test_g_keeps_its_level_in_the_tail_where_pearson_does_not() -> None:
    """Level 1e-3 with cells expected only five times: fewer than 1.6e-3 false alarms in 20,000 tables."""
    source = np.random.default_rng(1)
    law = np.array([0.5, 0.25, 0.1, 0.05, 0.05, 0.05])
    counts = source.multinomial(100, law, 20_000)
    expected = (100 * law).tolist()
    seen = {tuple(row): n for row, n in zip(*np.unique(counts, axis=0, return_counts=True), strict=True)}
    alarms = sum(n for row, n in seen.items() if g_fit([int(x) for x in row], expected).p_value < 1e-3)
    pearson = (((counts - expected) ** 2 / expected).sum(1) > stats.chi2.isf(1e-3, 5)).sum()
    assert alarms / 20_000 < 1.6e-3 < pearson / 20_000, (alarms, pearson)


def test_the_power_stated_is_the_power_there_is() -> None:
    """Ten cells, half of them up and half down: what `Sight` calls the hardest deviation, at several sizes."""
    source = np.random.default_rng(2)
    for num, size, alpha in ((400, 0.15, 1e-3), (1500, 0.08, 1e-4), (1500, 0.05, 1e-3)):
        law = np.full(10, 0.1) * np.repeat([1 + 2 * size, 1 - 2 * size], 5)
        assert 0.5 * np.abs(law - 0.1).sum() == pytest.approx(size)
        hits = sum(g_fit(row.tolist(), [num / 10] * 10).p_value < alpha for row in source.multinomial(num, law, 1000))
        assert hits / 1000 == pytest.approx(Sight(num, 9).power(size, alpha), abs=0.06)
        uneven = np.full(10, 0.1)
        uneven[0], uneven[1:] = 0.1 + size, (0.9 - size) / 9  # as large, but easier to see
        easy = sum(g_fit(row.tolist(), [num / 10] * 10).p_value < alpha for row in source.multinomial(num, uneven, 300))
        assert easy / 300 > hits / 1000
    sight = Sight(1500, 9)
    least = sight.least(1e-3, 0.9)
    assert least is not None and sight.power(least, 1e-3) == pytest.approx(0.9, abs=1e-6)
    assert Sight(3, 9).least(1e-4, 0.9) is None and "too few" in Sight(3, 9).words(None, 1e-4, 0.9)
    assert "of 0.05 with probability" in sight.words(least, 1e-3, 0.9)
    mean = Sight(100, 1, 2.0, "the mean")
    z = stats.norm.isf(0.5e-3) + stats.norm.ppf(0.9)
    assert mean.least(1e-3, 0.9) == pytest.approx(0.2 * z, rel=1e-4) and "the mean off by 0.9" in mean.words(
        0.9, 1e-3, 0.9
    )
    assert rate_seen(100) == pytest.approx(1 - 0.1**0.01) and rate_seen(0) == 1.0


def test_bernoulli_root_is_normal_for_unequal_chances_and_weights() -> None:
    source = np.random.default_rng(3)
    probs = source.uniform(0.03, 0.97, 60)
    weights = source.uniform(-0.5, 0.5, 60)
    for given in (None, weights.tolist()):
        roots = [bernoulli_root(probs.tolist(), (source.random(60) < probs).tolist(), given) for _ in range(300)]
        assert stats.kstest(roots, "norm").pvalue > 1e-3
    assert bernoulli_root([0.5, 0.25], [True, True]) == pytest.approx(math.sqrt(-2 * math.log(0.125)), rel=1e-6)
    assert bernoulli_root([0.5, 0.25], [False, False]) == pytest.approx(-math.sqrt(-2 * math.log(0.375)), rel=1e-6)
    assert bernoulli_root([0.5], [True], [0.0]) == 0.0


def test_surprise_minus_entropy_is_about_normal() -> None:
    source = np.random.default_rng(4)
    law = source.dirichlet(np.full(6, 0.7), 80)
    surprise = -np.log(law)
    entropy = (law * surprise).sum(1)
    cumulants = [(s, float((np.log((law * np.exp(s * surprise)).sum(1)) - s * entropy).sum())) for s in TILTS]
    draws = (law.cumsum(1)[None] < source.random((600, 80, 1))).sum(-1)
    totals = (surprise[np.arange(80), draws] - entropy).sum(1)
    roots = np.array([tilted_root(float(x), cumulants) for x in totals])
    assert abs((roots > 1.96).mean() - 0.05) < 0.03 and roots.max() < 4.5
    assert tilted_root(float((surprise.min(1) - entropy).sum()), cumulants) > 6.0  # argmax everywhere


def test_holm_and_either() -> None:
    assert holm([0.2, 0.0004, 0.011, 0.013], 0.05) == [False, True, True, True]
    assert holm([0.03, 0.04], 0.05) == [False, False] and holm([], 0.1) == []
    assert either(0.5, 1.0) == pytest.approx(0.5 / 0.99) and either(0.5, 1e-6) == pytest.approx(1e-4)


# ---- the law of sampling ---------------------------------------------------------------------------------------------
def test_the_second_opinion_on_the_law_agrees_with_acceptance() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(6, 40, generator=generator, dtype=torch.float64) * 2
    logits_TV[0, :20] = 1.0  # equal ones at every edge
    settings = itertools.product((0.7, 1.0), (None, 1, 5, 40), (1.0, 0.9, 0.3), (0.0, 0.1))
    for temperature, top_k, top_p, min_p in [*settings, (0.0, None, 1.0, 0.0)]:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        want = target_distribution(logits_TV, params, history=[0], num_prompt=1, proposals=[0] * 5)
        assert torch.allclose(sampling_law(logits_TV, params), want, atol=1e-12)
        wide = sampling_law(logits_TV, params, slack=1e-3)
        assert bool(((wide > 0) >= (want > 0)).all())


def test_slack_lets_in_what_rounding_might_and_nothing_else() -> None:
    law_V = torch.tensor([0.5, 0.3999, 0.0601, 0.04], dtype=torch.float64)
    params = SamplingParams(temperature=1.0, top_p=0.8995)
    assert (sampling_law(law_V.log()[None], params)[0] > 0).tolist() == [True, True, False, False]
    assert (sampling_law(law_V.log()[None], params, slack=1e-3)[0] > 0).tolist() == [True, True, True, False]


def test_places_are_uniform_for_draws_and_only_for_them() -> None:
    source = np.random.default_rng(5)
    law = torch.tensor(source.dirichlet(np.full(5, 0.5), 1500))
    law[:, 4] = 0.0
    law[:200, :4] = 0.25  # equal ones
    law /= law.sum(1, keepdim=True)
    draws = [int(source.choice(5, p=row)) for row in law.numpy()]
    noise = source.random(1500).tolist()
    at = places(law, draws, noise)
    assert None not in at and stats.kstest([x for x in at if x is not None], "uniform").pvalue > 1e-3
    best = [x for x in places(law, law.argmax(1).tolist(), noise) if x is not None]
    assert stats.kstest(best, "uniform").pvalue < 1e-9
    assert places(law, [4] * 1500, noise) == [None] * 1500
    by_hand = places(torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64), [2], [0.5])
    assert by_hand == pytest.approx([0.5 + 0.5 * 0.3])
