"""The adaptive width: its choice against enumeration, its results against every fixed width on simulated machines."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace

import pytest

from blockdraft.engine.adaptive import AdaptiveWidth
from blockdraft.engine.costs import CostModel, StepCosts, StepSample, fit
from blockdraft.engine.expected import AcceptanceRecord, Ease
from blockdraft.engine.times import StepTimes
from blockdraft.errors import CheckpointError
from width_kit import (
    BAD,
    CHAT,
    COPY,
    GSM8K,
    WIDTH,
    FixedPolicy,
    Machine,
    SimRow,
    cpu_machine,
    gpu_machine,
    measured_costs,
    samples_of,
    simulate,
)


# ---- costs -----------------------------------------------------------------------------------------------------------
def step_of(rows: int, width: int, machine: Machine) -> tuple[StepSample, float]:
    """A step and its true seconds."""
    drafting, proposals = (rows, rows * (width - 1)) if width > 1 else (0, 0)
    sample = StepSample(
        num_rows=rows,
        num_scored=rows * width,
        num_passes=min(drafting, 1),
        num_drafting=drafting,
        num_proposals=proposals,
        num_injected=2 * drafting,
        score_s=0.0,
        other_s=0.0,
    )
    seconds = machine.score(rows, rows * width) + machine.other(rows) + machine.inject_position_s * 2 * drafting
    return sample, seconds + (machine.propose(drafting, proposals) if drafting else 0.0)


@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine()], ids=lambda m: m.name)
def test_a_fit_predicts_steps_that_it_has_not_seen(machine):
    model = fit(samples_of(machine, noise=0.03, most_scored=256), context_s=0.0)
    assert model.error is not None and 0.0 < model.error < 0.06
    for rows, width in [(1, 3), (1, 6), (2, 4), (3, 1), (6, 3), (12, 1), (12, 4), (24, 2)]:
        sample, truth = step_of(rows, width, machine)
        assert model.step_s(sample) == pytest.approx(truth, rel=0.08), (rows, width)


def test_a_fit_has_no_term_below_zero_and_no_falling_curve():
    source = random.Random(3)
    for _ in range(20):
        samples = [replace(s, score_s=s.score_s * source.uniform(0.5, 2)) for s in samples_of(cpu_machine(), noise=0.5)]
        model = fit(samples, leave_out=False)
        seconds = [model.curve_s(m) for m in range(1, 400)]
        assert seconds == sorted(seconds) and seconds[-1] > seconds[63]
        assert CostModel.from_json({**model.to_json()}) == model


def test_costs_follow_a_machine_that_is_not_what_was_measured():
    machine, costs = cpu_machine(), measured_costs(cpu_machine())

    def seconds(rows: int, width: int) -> float:
        return 2.0 * step_of(rows, width, machine)[1] * (1.3 if width > 1 else 1.0)

    source = random.Random(0)
    for _ in range(150):
        rows, width = source.choice([(4, 1), (4, 4)])
        sample, _ = step_of(rows, width, machine)
        spent = seconds(rows, width) * math.exp(source.gauss(0, 0.05)) * (10 if source.random() < 0.03 else 1)
        share = 0.2 if width > 1 else 0.0
        costs.observe(replace(sample, score_s=(1 - share) * spent, other_s=0.0, propose_s=share * spent))
    prices = costs.draft_prices(4, 12)
    table = costs.table(4, 28)
    drafting = prices.pass_s + 4 * prices.row_s + 12 * prices.position_s
    assert costs.level * table[0] == pytest.approx(seconds(4, 1), rel=0.08)
    assert costs.level * (table[12] + drafting) == pytest.approx(seconds(4, 4), rel=0.08)


def test_a_damaged_table_is_refused():
    raw = measured_costs(cpu_machine()).model.to_json()
    for change in (
        {"other_s": -1.0},
        {"other_s": "much"},
        {"other_s": float("nan")},
        {"knots": []},
        {"knots": [[2, 1.0], [1, 2.0]]},
        {"knots": [[1, 2.0], [2, 1.0]]},
        {"extra": 1},
    ):
        with pytest.raises(CheckpointError, match="cost table"):
            CostModel.from_json({**raw, **change})


# ---- estimates -------------------------------------------------------------------------------------------------------
def test_estimates_find_the_requests_own_acceptance():
    record, source = AcceptanceRecord(7, GSM8K), random.Random(1)
    easy, hard = Ease(), Ease()
    for _ in range(150):
        for ease, truth in ((easy, 0.9), (hard, 0.3)):
            accepted = 0
            while accepted < 7 and source.random() < truth:
                accepted += 1
            record.observe(ease, 7, accepted)
        record.refresh()
    assert record.survival(easy)[0] == pytest.approx(0.9, abs=0.07)
    assert record.survival(easy)[3] == pytest.approx(0.9**4, abs=0.15)
    assert record.survival(hard)[0] == pytest.approx(0.3, abs=0.1)


def test_an_untried_position_follows_those_that_were_tried():
    record, ease = AcceptanceRecord(7, GSM8K), Ease()
    for _ in range(40):
        record.observe(ease, 2, 2)
        record.refresh()
    assert record.shares[6] > 0.8 > GSM8K[6]


def test_what_was_not_reached_or_not_proposed_is_no_evidence():
    record = AcceptanceRecord(7, GSM8K)
    for _ in range(10):
        record.observe(Ease(), 3, 3)
    assert record.num_trials == 30
    record.observe(Ease(), 7, 2)
    assert record.num_trials == 33


# ---- the choice ------------------------------------------------------------------------------------------------------
def truth_rate(widths, survivals, costs: StepCosts, rows) -> float:
    """Predicted tokens per second of a width vector, term by term."""
    model, n = costs.model, len(rows)
    drafting = [w for w in widths if w > 1]
    seconds = model.score_s(n, sum(widths)) + model.rest_s(n, sum(widths))
    seconds += model.propose_s(min(len(drafting), 1), len(drafting), sum(drafting) - len(drafting))
    pending = [row.num_pending for row, w in zip(rows, widths, strict=True) if w > 1]
    seconds += (model.inject_s + model.inject_position_s * sum(pending) / 32) if drafting else 0.0
    return (n + sum(sum(s[: w - 1]) for w, s in zip(widths, survivals, strict=True))) / seconds


@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine()], ids=lambda m: m.name)
def test_no_width_vector_is_better_than_the_chosen_one(machine):
    costs = StepCosts(fit(samples_of(machine, noise=0.0, most_scored=256), context_s=0.0, leave_out=False))
    source, shares = random.Random(5), []
    for _ in range(25):
        n, most = source.choice([(1, 8), (2, 8), (3, 6), (4, 4)])
        policy = AdaptiveWidth(costs, num_positions=7, prior=GSM8K)
        rows = [SimRow(GSM8K, 100) for _ in range(n)]
        for row in rows:
            row.ids, row.num_pending = [], source.choice([0, 3, 200])
            policy._state(row).survival = list(
                itertools.accumulate((source.uniform(0.2, 0.95) for _ in range(7)), lambda a, b: a * b)
            )
        survivals = [policy._state(row).survival for row in rows]
        policy._is_on = True  # no margin
        for _ in range(12):
            chosen = policy.choose(rows, [most] * n)  # the next choice knows the rate of the last
        best = max(
            truth_rate(widths, survivals, costs, rows) for widths in itertools.product(range(1, most + 1), repeat=n)
        )
        shares.append(truth_rate(chosen, survivals, costs, rows) / best)
    assert min(shares) > 0.97 and sum(shares) / len(shares) > 0.996  # what a row pays once comes in lumps


def test_rows_of_fixed_width_keep_it():
    policy = AdaptiveWidth(measured_costs(cpu_machine()), num_positions=7, prior=BAD)
    rows = [SimRow(GSM8K, 100, fixed=i % 2 == 0) for i in range(4)]
    for _ in range(30):
        widths = policy.choose(rows, [6, 8, 3, 1])
        assert widths[0] == 6 and widths[2] == 3 and widths[3] == 1
        policy.record(rows, widths, [0] * 4, StepTimes(score_s=0.1, propose_s=0.02, num_rows=4, num_scored=sum(widths)))
    assert policy.explain(rows[0]).reason == "its width is fixed"


def test_nothing_to_choose():
    policy = AdaptiveWidth(measured_costs(cpu_machine()), num_positions=7)
    assert policy.choose([], []) == []
    policy.record([], [], [], StepTimes(prefill_s=0.1, num_prefilled=5))
    row = SimRow(GSM8K, 1)
    assert policy.choose([row], [1]) == [1]


def test_a_choice_for_32_rows_takes_microseconds():
    policy = AdaptiveWidth(measured_costs(gpu_machine(), most_scored=256), num_positions=7, prior=GSM8K)
    rows = [SimRow(GSM8K, 1000) for _ in range(32)]
    times = StepTimes(score_s=0.02, propose_s=0.003, num_rows=32, num_scored=100)
    spent = []
    for _ in range(60):
        started = time.process_time()
        widths = policy.choose(rows, [8] * 32)
        spent.append(time.process_time() - started)
        for row, width in zip(rows, widths, strict=True):
            row.stats.num_draft_tokens += width - 1
        policy.record(rows, widths, [min(1, w - 1) for w in widths], times)
    assert min(spent) < 200e-6


# ---- against fixed widths --------------------------------------------------------------------------------------------
WORKLOADS = {"gsm8k": (GSM8K, 0.4), "chat": (CHAT, 0.5), "copy": (COPY, 0.3), "bad": (BAD, 0.0)}


def adaptive(machine: Machine, seed: int = 0) -> AdaptiveWidth:
    costs = measured_costs(machine, seed=seed, most_scored=64 if machine.name == "cpu" else 256)
    return AdaptiveWidth(costs, num_positions=WIDTH - 1, prior=GSM8K)


@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine()], ids=lambda m: m.name)
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32])
def test_adaptive_is_near_the_best_width_and_never_below_plain(machine, name, num_rows):
    shares, spread = WORKLOADS[name]
    run = {"num_rows": num_rows, "num_tokens": max(700, 250 * num_rows), "shares": shares, "spread": spread}
    plain = simulate(FixedPolicy(1), machine, **run).rate
    policy = adaptive(machine)
    found = simulate(policy, machine, **run)
    assert found.rate >= 0.98 * plain
    best = max(plain, *(simulate(FixedPolicy(w), machine, **run).rate for w in (3, 5, 8)))
    if best > 1.15 * plain:  # where speculation pays little, probes cannot be had for it at once
        assert found.rate >= 0.95 * best
    report = policy.report()
    assert report.probe_share < 0.01
    assert report.expected_tok_per_s == pytest.approx(report.measured_tok_per_s, rel=0.12)


@pytest.mark.parametrize("machine", [cpu_machine(), gpu_machine()], ids=lambda m: m.name)
def test_over_many_requests_it_comes_within_3_percent_of_the_best_width(machine):
    ratios = []
    for seed in range(3):
        run = {"num_rows": 2, "num_tokens": 2000, "shares": GSM8K, "seed": seed}
        best = max(simulate(FixedPolicy(w), machine, **run).rate for w in (1, 3, 4, 5, 6, 8))
        ratios.append(simulate(adaptive(machine, seed), machine, **run).rate / best)
    assert sum(ratios) / len(ratios) >= 0.97


def test_it_finds_a_workload_that_became_good_and_leaves_one_that_became_bad():
    machine = cpu_machine()
    for first, then in ((BAD, COPY), (COPY, BAD)):
        policy = adaptive(machine)
        run = {"num_rows": 1, "num_tokens": 4000, "shares": lambda t, a=first, b=then: a if t < 2000 else b}
        found = simulate(policy, machine, **run, spread=0.0)
        plain = simulate(FixedPolicy(1), machine, **run, spread=0.0)
        wide = simulate(FixedPolicy(8), machine, **run, spread=0.0)
        assert found.rate > 1.25 * plain.rate and found.rate > 1.02 * wide.rate


def test_a_table_that_is_wrong_is_corrected():
    """Drafting twice as dear and scoring 1.5 times as dear in the width as measured: plain is right, not the table."""
    machine = cpu_machine()
    policy = adaptive(machine)
    worse = replace(
        machine,
        score=lambda n, m: machine.score(n, m) + 0.5 * (machine.score(n, m) - machine.score(n, n)),
        propose=lambda n, g: 2.5 * machine.propose(n, g),
    )
    run = {"num_rows": 4, "num_tokens": 6000, "shares": CHAT, "spread": 0.3}
    assert simulate(policy, worse, **run).rate >= 0.98 * simulate(FixedPolicy(1), worse, **run).rate


def test_a_shared_machine_does_not_mislead_it():
    source = random.Random(9)
    slow = [source.choice([1.0, 1.0, 1.0, 3.0, 8.0]) if step % 200 > 120 else 1.0 for step in range(20000)]
    run = {"num_rows": 1, "num_tokens": 1500, "shares": GSM8K, "slowdown": lambda step: slow[step]}
    policy = adaptive(cpu_machine())
    found = simulate(policy, cpu_machine(), **run)
    tokens_per_step = found.tokens / found.num_steps
    assert tokens_per_step > 2.0  # it went on speculating
    assert policy.report().probe_share < 0.01


def test_cut_proposals_are_not_counted_as_refused():
    policy = adaptive(cpu_machine())
    row = SimRow(GSM8K, 100)
    policy.choose([row], [8])
    row.stats.num_draft_tokens += 2  # the block was cut to two proposals, and both stood
    policy.record([row], [8], [2], StepTimes(score_s=0.05, propose_s=0.01, num_rows=1, num_scored=3))
    assert policy.acceptance.num_trials == 2


def test_it_says_why():
    policy = adaptive(cpu_machine())
    assert policy.report().reason == "no step yet"
    simulate(policy, cpu_machine(), num_rows=1, num_tokens=600, shares=BAD, spread=0.0)
    report = policy.report()
    assert report.reason.startswith("plain: ") and "tok/s" in report.reason
    assert sum(report.widths.values()) == report.num_steps
    policy = adaptive(cpu_machine())
    simulate(policy, cpu_machine(), num_rows=1, num_tokens=600, shares=COPY)
    assert policy.report().reason.startswith("speculates: ")
