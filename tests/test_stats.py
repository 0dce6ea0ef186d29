"""Counters and their identities, every ratio by hand, intervals by simulation."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from blockdraft.errors import ConfigError
from blockdraft.stats import (
    EngineStats,
    RequestStats,
    bootstrap_ratio_interval,
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
    t_quantile,
)


def made(*steps: tuple[int, int, int], prefill_s: float = 0.5, step_s: float = 0.25) -> RequestStats:
    """Stats of a request with steps (drafted, accepted, emitted)."""
    request = RequestStats()
    request.add_prefill(seconds=prefill_s)
    for num_draft, num_accepted, num_emitted in steps:
        request.add_step(num_draft=num_draft, num_accepted=num_accepted, num_emitted=num_emitted, seconds=step_s)
    request.check()
    return request


ONE = made((3, 3, 4), (3, 0, 1), (2, 2, 3), (0, 0, 1))  # shortened last blocks, the very last a plain step
TWO = made((3, 1, 2), (3, 2, 1))  # a stop clips two tokens of the second step


def test_counters_by_hand() -> None:
    assert ONE.to_json() == {
        "num_steps": 4,
        "num_draft_tokens": 8,
        "num_accepted_draft_tokens": 5,
        "accepted_histogram": [2, 0, 1, 1],
        "drafted_histogram": [1, 0, 1, 2],
        "full_histogram": [1, 0, 1, 1],
        "num_emitted_tokens": 10,
        "num_clipped_tokens": 0,
        "num_cached_prompt_tokens": 0,
        "prefill_s": 0.5,
        "decode_s": 1.0,
    }
    assert (TWO.num_emitted_tokens, TWO.num_clipped_tokens, TWO.num_step_tokens) == (4, 2, 3)
    assert ONE.num_plain_steps == 1 and TWO.num_plain_steps == 0 and RequestStats().num_plain_steps == 0


def test_every_ratio_by_hand() -> None:
    both = [ONE, TWO]
    assert pooled_acceptance_length(both) == pytest.approx(1 + 8 / 6)
    assert committed_acceptance_length(both) == pytest.approx((9 + 3) / 6)
    assert mean_acceptance_length(both) == pytest.approx(((1 + 5 / 4) + (1 + 3 / 2)) / 2)
    assert proposal_acceptance_rate(both) == pytest.approx(8 / 14)
    assert decode_tok_per_s(both) == pytest.approx(12 / 1.5)
    assert output_tok_per_s(both) == pytest.approx(14 / 2.5)
    # position 1: proposed in 5 steps, reached in the same, accepted in 4
    # position 2: proposed in 5, reached in 4, accepted in 3
    # position 3: proposed in 4, reached in 2 (the full step of two proposals ends before it), accepted in 1
    assert survival_by_position(both) == pytest.approx([4 / 5, 3 / 5, 1 / 4])
    assert conditional_acceptance_by_position(both) == pytest.approx([4 / 5, 3 / 4, 1 / 2])


def test_published_log_line() -> None:
    """172 accepted of 357 drafted at 7 a step: 51 steps, 4.373, 48.18 %."""
    request = RequestStats(num_steps=51, num_draft_tokens=357, num_accepted_draft_tokens=172)
    assert pooled_acceptance_length([request]) == pytest.approx(4.373, abs=5e-4)
    assert proposal_acceptance_rate([request]) == pytest.approx(0.4818, abs=5e-5)


def test_nothing_counted_gives_none() -> None:
    for requests in ([], [RequestStats()], [made(prefill_s=0.0)]):
        for ratio in (pooled_acceptance_length, committed_acceptance_length, mean_acceptance_length):
            assert ratio(requests) is None
        assert proposal_acceptance_rate(requests) is None and decode_tok_per_s(requests) is None
        assert output_tok_per_s(requests) is None and survival_by_position(requests) == []
        assert pooled_acceptance_length_interval(requests) is None
    assert conditional_acceptance_by_position([made((2, 0, 1))]) == [0.0, None]


STEP = st.integers(0, 5).flatmap(
    lambda drafted: st.integers(0, drafted).flatmap(
        lambda accepted: st.tuples(st.just(drafted), st.just(accepted), st.integers(0, accepted + 1))
    )
)


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(st.lists(STEP, max_size=6).map(lambda steps: (steps, made(*steps))), max_size=4))
def test_identities_round_trip_and_positions(
    requests: list[tuple[list[tuple[int, int, int]], RequestStats]],
) -> None:
    for _, request in requests:
        assert RequestStats.from_json(json.loads(json.dumps(request.to_json()))) == request
    steps = [step for some, _ in requests for step in some]
    all_stats = [request for _, request in requests]
    conditional = conditional_acceptance_by_position(all_stats)
    for i, (survival, condition) in enumerate(zip(survival_by_position(all_stats), conditional, strict=True), 1):
        proposed = [accepted for drafted, accepted, _ in steps if drafted >= i]
        reached = [accepted for accepted in proposed if accepted >= i - 1]
        assert survival == pytest.approx(sum(a >= i for a in proposed) / len(proposed))
        assert condition == (pytest.approx(sum(a >= i for a in reached) / len(reached)) if reached else None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_steps", 5),
        ("num_draft_tokens", 9),
        ("num_accepted_draft_tokens", 4),
        ("accepted_histogram", (1, 1, 1, 1)),
        ("drafted_histogram", (0, 1, 1, 2)),
        ("full_histogram", (1, 1, 1, 1)),
        ("full_histogram", (0, 0, 1, 1)),
        ("num_emitted_tokens", 11),
        ("num_clipped_tokens", 1),
        ("decode_s", -1.0),
    ],
)
def test_check_finds_a_wrong_counter(field: str, value: object) -> None:
    request = RequestStats.from_json(ONE.to_json())
    setattr(request, field, value)
    with pytest.raises(AssertionError):
        request.check()
    with pytest.raises(ConfigError) as error:
        RequestStats.from_json(request.to_json())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_steps": True}, "num_steps"),
        ({"num_steps": 4.0}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"decode_s": math.nan}, "decode_s"),
        ({"decode_s": "1"}, "decode_s"),
        ({"accepted_histogram": [2, 0, 1, 1.0]}, "accepted_histogram"),
        ({"accepted_histogram": "2011"}, "accepted_histogram"),
        ({"acceptance": 3}, "acceptance"),
    ],
)
def test_from_json_is_strict(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RequestStats.from_json({**ONE.to_json(), **change})


def test_from_json_names_a_missing_field_and_another_kind() -> None:
    raw = ONE.to_json()
    del raw["decode_s"]
    with pytest.raises(ConfigError, match="decode_s"):
        RequestStats.from_json(raw)
    with pytest.raises(ConfigError, match="list"):
        RequestStats.from_json([raw])


def test_impossible_steps_are_our_faults() -> None:
    for wrong in ((1, 2, 1), (2, 1, 3), (2, -1, 0)):
        with pytest.raises(AssertionError):
            made(wrong)


# ------------------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 29, 49])
def test_t_quantile_equals_scipy(degrees: int) -> None:
    for probability in (0.025, 0.3, 0.5, 0.9, 0.975, 0.9995):
        want = scipy_stats.t.ppf(probability, degrees)
        assert t_quantile(probability, degrees) == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_ratio_interval_by_hand() -> None:
    got = ratio_interval([2, 4, 9], [1, 2, 3], level=0.95)
    # r = 15/6 = 2.5, residuals -.5, -1, 1.5, SE = sqrt(3/2 * 3.5) / 6, t(2) = 4.30265
    half = 4.302652729911275 * math.sqrt(1.5 * 3.5) / 6
    assert got is not None and got.estimate == 2.5
    assert got.low == pytest.approx(2.5 - half) and got.high == pytest.approx(2.5 + half)
    wide = ratio_interval([2, 4, 9] * 17, [1, 2, 3] * 17)
    assert wide is not None and wide.high is not None
    assert wide.high - 2.5 == pytest.approx(1.959964 * math.sqrt(51 / 50 * 17 * 3.5) / (17 * 6), rel=1e-6)
    single = ratio_interval([2], [1])
    assert single is not None and (single.estimate, single.low, single.high) == (2.0, None, None)
    assert ratio_interval([0, 0], [0, 0]) is None


def test_requests_of_one_prompt_are_one_cluster() -> None:
    requests = [ONE, TWO, ONE, ONE]
    got = pooled_acceptance_length_interval(requests, clusters=["a", "b", "a", "b"])
    want = ratio_interval([10, 8], [8, 6])
    assert got is not None and want is not None and got == want.shifted(1.0) and got.num_clusters == 2
    assert got.estimate == pytest.approx(pooled_acceptance_length(requests))


def simulated(source: np.random.Generator, conditional: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """Accepted proposals of every step of width 8, [requests, steps], -1 beyond a request's own steps."""
    accepted = np.minimum(source.geometric(1 - conditional[:, None], (len(conditional), num_steps.max())) - 1, 7)
    return np.where(np.arange(num_steps.max()) < num_steps[:, None], accepted, -1)


def test_clustered_interval_covers_where_the_per_step_one_does_not() -> None:
    source = np.random.default_rng(12)
    population = np.clip(source.normal(0.8, 0.08, 400_000), 0.05, 0.98)
    truth = sum((population**j).mean() for j in range(1, 8))
    num_runs, hits = 500, np.zeros(2)
    for _ in range(num_runs):
        conditional = np.clip(source.normal(0.8, 0.08, 40), 0.05, 0.98)
        accepted = simulated(source, conditional, source.integers(60, 180, 40))
        is_step = accepted >= 0
        clustered = ratio_interval((accepted * is_step).sum(1).tolist(), is_step.sum(1).tolist())
        assert clustered is not None and clustered.low is not None and clustered.high is not None
        hits[0] += clustered.low <= truth <= clustered.high
        flat = accepted[is_step]
        hits[1] += abs(flat.mean() - truth) <= 1.96 * flat.std(ddof=1) / math.sqrt(len(flat))
    clustered_coverage, naive_coverage = hits / num_runs
    assert 0.92 <= clustered_coverage <= 0.98 and naive_coverage < 0.6, (clustered_coverage, naive_coverage)


def test_bootstrap_agrees_with_the_linearised_interval_and_repeats() -> None:
    source = np.random.default_rng(3)
    steps = source.integers(20, 60, 120)
    accepted = (steps * np.clip(source.normal(3, 0.6, 120), 0, 7)).tolist()
    one, two = (bootstrap_ratio_interval(accepted, steps.tolist(), seed=5) for _ in range(2))
    linear = ratio_interval(accepted, steps.tolist())
    assert one == two and one is not None and linear is not None
    assert one.low == pytest.approx(linear.low, abs=0.03) and one.high == pytest.approx(linear.high, abs=0.03)
    assert bootstrap_ratio_interval([1], [0], seed=0) is None
    assert bootstrap_ratio_interval([1, 0], [1, 0], seed=0).low == 1.0  # type: ignore[union-attr]


def counted(accepted: np.ndarray) -> RequestStats:
    return made(*((7, int(a), int(a) + 1) for a in accepted if a >= 0))


def test_paired_difference_is_far_narrower_than_two_intervals() -> None:
    source = np.random.default_rng(8)
    conditional = np.clip(source.normal(0.8, 0.08, 60), 0.05, 0.95)
    steps = source.integers(80, 160, 60)
    first = [counted(row) for row in simulated(source, conditional, steps)]
    second = [counted(row) for row in simulated(source, conditional + 0.02, steps)]
    names = list(range(60))
    got = paired_difference(first, second[::-1], first_clusters=names, second_clusters=names[::-1])
    assert got is not None and got.low is not None and got.high is not None
    lengths = pooled_acceptance_length(first), pooled_acceptance_length(second)
    assert lengths[0] is not None and lengths[1] is not None
    assert got.estimate == pytest.approx(lengths[1] - lengths[0])
    assert got.low > 0.0
    alone = [pooled_acceptance_length_interval(some) for some in (first, second)]
    widths = [x.high - x.low for x in alone if x is not None and x.high is not None and x.low is not None]
    assert got.high - got.low < 0.6 * math.hypot(*widths)
    same = paired_difference(first, first, first_clusters=names, second_clusters=names)
    assert same is not None and (same.estimate, same.low, same.high) == (0.0, 0.0, 0.0)


def test_paired_difference_by_hand_and_unpaired_prompts() -> None:
    first, second = [made((3, 1, 2)), made((3, 2, 3))], [made((3, 2, 3)), made((3, 2, 3))]
    got = paired_difference(first, second, first_clusters="ab", second_clusters="ab")
    # r_1 = 1.5, r_2 = 2, g = (+.5, -.5), sd = sqrt(.5), SE = .5, t(1) = 12.7062
    assert got is not None and got.estimate == 0.5 and got.high == pytest.approx(0.5 + 0.5 * 12.706204736)
    with pytest.raises(ConfigError, match="'c'"):
        paired_difference(first, second, first_clusters="ab", second_clusters="ac")
    assert paired_difference([RequestStats()], [ONE], first_clusters="a", second_clusters="a") is None


def test_stats_need_no_torch() -> None:
    code = "import sys, blockdraft.stats; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- an engine -----------------------------------------------------------------------------------------------------
def test_an_engines_counters_are_sums_of_its_steps_and_requests() -> None:
    from types import SimpleNamespace

    stats = EngineStats()
    assert stats.overhead_share is None and stats.mean_rows is None
    phases = {"propose_s": 1.0, "score_s": 4.0, "accept_s": 0.25, "commit_s": 0.25, "prefill_s": 2.0}
    for _ in range(2):
        stats.add_step(SimpleNamespace(**phases, num_rows=3, num_scored=12, num_prefilled=5))
    stats.other_s += 1.0
    for reason, emitted in (("stop", 4), ("length", 3), ("cancelled", 2), ("error", 1)):
        stats.add_request(RequestStats(num_emitted_tokens=emitted), reason)
    assert (stats.num_steps, stats.num_rows, stats.num_scored, stats.num_prefilled) == (2, 6, 24, 10)
    assert (stats.num_finished, stats.num_cancelled, stats.num_failed, stats.num_emitted_tokens) == (2, 1, 1, 10)
    assert stats.total_s == 16.0 and stats.mean_rows == 3.0 and stats.overhead_share == 2.0 / 16.0
    assert json.loads(json.dumps(stats.to_json()))["overhead_share"] == 0.125


def test_records_of_before_prefixes_were_kept_are_read() -> None:
    old = ONE.to_json()
    del old["num_cached_prompt_tokens"]
    assert RequestStats.from_json(old) == ONE
