"""Estimators against a script that knows only a list of steps; intervals and comparisons by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from blockdraft.comparison import prompts_to_settle, unpaired_difference
from blockdraft.stats import (
    Interval,
    RequestStats,
    committed_acceptance_length,
    conditional_acceptance_by_position,
    decode_tok_per_s,
    mean_acceptance_length,
    output_tok_per_s,
    paired_difference,
    pooled_acceptance_length,
    pooled_acceptance_length_interval,
    proposal_acceptance_rate,
    ratio_interval,
    survival_by_position,
)

# ---- every estimator by hand -----------------------------------------------------------------------------------------
# (drafted, accepted, emitted) of every step, by request. a: two full blocks, a miss, a plain step. b: a stop in its
# last block cuts 3 of 5 committed tokens. c: the length limit narrows the last blocks and cuts nothing. d: ends with
# the first token. e: a stop is the first token of its only step, so that everything else of it is cut.
SCRIPT = {
    "a": [(7, 7, 8), (7, 7, 8), (7, 0, 1), (0, 0, 1)],
    "b": [(7, 2, 3), (7, 5, 6), (7, 4, 2)],
    "c": [(7, 1, 2), (3, 3, 4), (1, 0, 1), (0, 0, 1)],
    "d": [],
    "e": [(7, 6, 1)],
}
PREFILL_S, STEP_S = 0.25, 0.125


def counted(steps: list[tuple[int, int, int]]) -> RequestStats:
    request = RequestStats()
    request.add_prefill(seconds=PREFILL_S)
    for drafted, accepted, emitted in steps:
        request.add_step(num_draft=drafted, num_accepted=accepted, num_emitted=emitted, seconds=STEP_S)
    request.check()
    return request


def test_every_estimator_equals_a_script_over_the_steps() -> None:
    requests = [counted(steps) for steps in SCRIPT.values()]
    steps = [step for some in SCRIPT.values() for step in some]
    num_steps = sum(1 for _ in steps)
    accepted = sum(a for _, a, _ in steps)
    assert (num_steps, accepted) == (12, 35)
    assert pooled_acceptance_length(requests) == pytest.approx(1 + 35 / 12)
    emitted_by_steps = sum(e for _, _, e in steps)
    assert emitted_by_steps == 38 and committed_acceptance_length(requests) == pytest.approx(38 / 12)
    with_steps = [some for some in SCRIPT.values() if some]
    by_request = [1 + sum(a for _, a, _ in some) / len(some) for some in with_steps]
    assert by_request == [4.5, 1 + 11 / 3, 2.0, 7.0]
    assert mean_acceptance_length(requests) == pytest.approx(sum(by_request) / 4)
    assert proposal_acceptance_rate(requests) == pytest.approx(35 / sum(d for d, _, _ in steps))
    assert decode_tok_per_s(requests) == pytest.approx(38 / (12 * STEP_S))
    assert output_tok_per_s(requests) == pytest.approx((38 + 5) / (12 * STEP_S + 5 * PREFILL_S))
    survival, conditional = [], []
    for i in range(1, 8):
        offered = [a for d, a, _ in steps if d >= i]
        reached = [a for a in offered if a >= i - 1]
        survival.append(sum(a >= i for a in offered) / len(offered))
        conditional.append(sum(a >= i for a in reached) / len(reached))
    assert survival_by_position(requests) == pytest.approx(survival)
    assert conditional_acceptance_by_position(requests) == pytest.approx(conditional)
    clipped = [r.num_clipped_tokens for r in requests]
    assert clipped == [0, 3, 0, 0, 6]
    for request, some in zip(requests, SCRIPT.values(), strict=True):  # 1 + S + A - C is what was cut
        assert 1 + len(some) + sum(a for _, a, _ in some) - request.num_emitted_tokens == request.num_clipped_tokens
    got = pooled_acceptance_length_interval(requests)
    sums = [(sum(a for _, a, _ in some), len(some)) for some in SCRIPT.values()]
    squares = sum((a - 35 / 12 * s) ** 2 for a, s in sums)
    half = scipy_stats.t.ppf(0.975, 4) * math.sqrt(5 / 4 * squares) / 12
    assert got is not None and got.low is not None
    assert (got.low, got.high) == (pytest.approx(1 + 35 / 12 - half), pytest.approx(1 + 35 / 12 + half))


# ---- simulation ------------------------------------------------------------------------------------------------------
def accepted_counts(source: np.random.Generator, conditional: np.ndarray, num_steps: int) -> np.ndarray:
    """Accepted of 7 proposals, [requests, steps]: each stands with its request's probability after the one before."""
    return np.minimum(source.geometric(1 - conditional[:, None], (len(conditional), num_steps)) - 1, 7)


def test_coverage_of_the_clustered_interval_and_of_the_naive_one() -> None:
    """80 prompts, acceptance .80 +- .08 between them: clustered 95 % intervals cover 93 to 97 %, naive below 60."""
    source = np.random.default_rng(20)
    population = np.clip(source.normal(0.8, 0.08, 400_000), 0.05, 0.98)
    truth = sum(float((population**j).mean()) for j in range(1, 8))
    num_runs, covered, naive = 1500, 0, 0
    for _ in range(num_runs):
        counts = accepted_counts(source, np.clip(source.normal(0.8, 0.08, 80), 0.05, 0.98), 60)
        got = ratio_interval(counts.sum(1).tolist(), [60] * 80)
        assert got is not None and got.low is not None and got.high is not None
        covered += got.low <= truth <= got.high
        naive += abs(counts.mean() - truth) <= 1.96 * counts.std(ddof=1) / math.sqrt(counts.size)
    assert 0.93 <= covered / num_runs <= 0.97 and naive / num_runs < 0.6, (covered / num_runs, naive / num_runs)


def pooled(counts: np.ndarray) -> list[RequestStats]:
    return [RequestStats(num_steps=counts.shape[1], num_accepted_draft_tokens=int(a)) for a in counts.sum(1)]


NUM_STEPS = 240  # a thousand tokens: two turns


def both_drafts(
    source: np.random.Generator, num_prompts: int, shift: float
) -> tuple[list[RequestStats], list[RequestStats]]:
    """Two drafts on the same prompts, whose difficulty they share with a correlation of .95."""
    shared = source.normal(0.0, 1.0, num_prompts)
    own = source.normal(0.0, 1.0, (2, num_prompts))
    difficulty = math.sqrt(0.95) * shared + math.sqrt(0.05) * own
    chances = np.clip(0.8 + 0.08 * difficulty + np.array([[0.0], [shift]]), 0.05, 0.98)
    return pooled(accepted_counts(source, chances[0], NUM_STEPS)), pooled(
        accepted_counts(source, chances[1], NUM_STEPS)
    )


def leaves_out_zero(interval: Interval | None) -> bool:
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low > 0.0 or interval.high < 0.0


def test_pairing_turns_a_hopeless_comparison_into_a_fair_one() -> None:
    """80 prompts, a difference of about .087: unpaired never sees it, paired in about half of the runs or more."""
    source = np.random.default_rng(21)
    names = list(range(80))
    seen, ratios, differences = np.zeros(2), [], []
    for _ in range(150):
        first, second = both_drafts(source, 80, 0.0072)
        paired = paired_difference(first, second, first_clusters=names, second_clusters=names)
        unpaired = unpaired_difference(first, second)
        seen += leaves_out_zero(paired), leaves_out_zero(unpaired)
        assert paired is not None and unpaired is not None and paired.estimate == pytest.approx(unpaired.estimate)
        ratios.append((unpaired.high - unpaired.low) / (paired.high - paired.low))  # type: ignore[operator]
        differences.append(paired.estimate)
    assert np.mean(differences) == pytest.approx(0.087, abs=0.01)
    assert seen[0] / 150 > 0.4 and seen[1] / 150 < 0.05, seen / 150
    assert 2.5 <= np.mean(ratios) <= 4.2


def test_no_difference_is_found_where_there_is_none() -> None:
    source = np.random.default_rng(22)
    names = list(range(60))
    seen = 0
    for _ in range(300):
        first, second = both_drafts(source, 60, 0.0)
        seen += leaves_out_zero(paired_difference(first, second, first_clusters=names, second_clusters=names))
    assert 0.02 <= seen / 300 <= 0.085


def test_as_many_prompts_as_were_said_settle_it() -> None:
    """The number is worked out from one large run; runs of that many prompts then see the difference 9 times of 10."""
    source = np.random.default_rng(23)
    first, second = both_drafts(source, 8000, 0.012)
    names = list(range(8000))
    large = paired_difference(first, second, first_clusters=names, second_clusters=names)
    assert large is not None
    n = prompts_to_settle(large)
    assert n is not None and 30 < n < 200
    seen = 0
    for _ in range(200):
        one, two = both_drafts(source, n, 0.012)
        seen += leaves_out_zero(
            paired_difference(one, two, first_clusters=list(range(n)), second_clusters=list(range(n)))
        )
    assert 0.83 <= seen / 200 <= 0.96, (n, seen / 200)


def test_prompts_to_settle_by_hand_and_its_edges() -> None:
    half = 1.959964 * 0.4 / math.sqrt(100)
    n = prompts_to_settle(Interval(0.05, 0.05 - half, 0.05 + half, 0.95, 100))
    assert n == math.ceil(((1.959964 + 1.281552) * 0.4 / 0.05) ** 2)
    few = Interval(
        1.0, 1.0 - 2.7764 / math.sqrt(5), 1.0 + 2.7764 / math.sqrt(5), 0.95, 5
    )  # deviation 1, t with 4 degrees
    n = prompts_to_settle(few)
    assert n is not None and n == min(
        k for k in range(2, 60) if (scipy_stats.t.ppf(0.975, k - 1) + 1.281552) / math.sqrt(k) <= 1.0
    )
    assert prompts_to_settle(Interval(0.0, -1.0, 1.0, 0.95, 10)) is None
    assert prompts_to_settle(Interval(0.3, None, None, 0.95, 1)) is None
    assert unpaired_difference([RequestStats()], [counted(SCRIPT["a"])]) is None
    single = unpaired_difference([counted(SCRIPT["a"])], [counted(SCRIPT["b"])])
    assert single is not None and single.low is None and single.estimate == pytest.approx(11 / 3 - 3.5)
