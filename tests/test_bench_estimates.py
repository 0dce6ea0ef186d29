"""Every figure of the tables against a script that knows only lists of steps; intervals of clusters by simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from scipy import stats as scipy_stats

from blockdraft.bench import estimates as est
from blockdraft.bench.compare import Side, compare, holm, p_value
from blockdraft.bench.record import PROCESS_TAG, ROUND_TAG, Counts, RequestRecord
from blockdraft.bench.speed import (
    break_even_length,
    paired_speed_up,
    steady_windows,
    step_time_s,
    throughput,
    user_rate,
)
from blockdraft.bench.tables import lengths, matrix, output_positions, sections, speed_ups
from blockdraft.errors import RequestError
from blockdraft.stats import Interval
from test_bench_record import changed, record

# (drafted, accepted) of every step, and the tokens that were emitted: a clipped last step, a stop inside a block, a
# plain last step, a request that only had its first token, and two turns of one prompt.
SCRIPT = {
    ("gsm8k", "a", 0): ([(7, 7), (7, 2), (3, 3)], 16),
    ("gsm8k", "b", 0): ([(7, 4), (7, 5)], 1 + 5 + 3),  # the stop stands third of the last step's six tokens
    ("gsm8k", "c", 0): ([(7, 0), (0, 0)], 3),
    ("mtbench", "d", 0): ([(7, 1), (7, 6), (7, 0)], 11),
    ("mtbench", "d", 1): ([(7, 3)], 2),  # cut after the first of its four
    ("mtbench", "e", 0): ([], 1),
}
A = {key: sum(a for _, a in steps) for key, (steps, _) in SCRIPT.items()}
S = {key: len(steps) for key, (steps, _) in SCRIPT.items()}
P = {key: sum(d for d, _ in steps) for key, (steps, _) in SCRIPT.items()}
C = {key: emitted for key, (_, emitted) in SCRIPT.items()}
TOOK = [key for key in SCRIPT if S[key]]


def scripted() -> list[RequestRecord]:
    return [
        record(steps, emitted, prompt=prompt, dataset=dataset, turn=turn, max_new_tokens=16)
        for (dataset, prompt, turn), (steps, emitted) in SCRIPT.items()
    ]


def hand_interval(numerators: list[float], denominators: list[float]) -> tuple[float, float]:
    """(ratio, half width) over clusters, by the textbook."""
    n, total = len(numerators), sum(denominators)
    r = sum(numerators) / total
    spread = sum((a - r * s) ** 2 for a, s in zip(numerators, denominators, strict=True))
    return r, scipy_stats.t.ppf(0.975, n - 1) * math.sqrt(n / (n - 1) * spread) / total


def check(
    got: Interval | None, numerators: dict[str, float], denominators: dict[str, float], shift: float = 0.0
) -> None:
    r, half = hand_interval(list(numerators.values()), list(denominators.values()))
    assert got is not None and got.low is not None and got.high is not None
    assert got.estimate == pytest.approx(r + shift)
    assert (got.low, got.high) == (pytest.approx(r + shift - half), pytest.approx(r + shift + half))


def by_prompt(values: dict[tuple[str, str, int], float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (_, prompt, _), value in values.items():
        sums[prompt] = sums.get(prompt, 0.0) + value
    return sums


def test_every_estimator_equals_the_hand_computed_one() -> None:
    records = scripted()
    took = {key: float(S[key]) for key in TOOK}
    check(est.acceptance_length(records), by_prompt({k: A[k] for k in TOOK}), by_prompt(took), 1.0)
    check(est.committed_length(records), by_prompt({k: C[k] - 1 for k in TOOK}), by_prompt(took))
    check(est.proposal_acceptance(records), by_prompt({k: A[k] for k in TOOK}), by_prompt({k: P[k] for k in TOOK}))
    each = {k: 1 + A[k] / S[k] for k in TOOK}
    check(est.per_request_length(records), by_prompt(each), by_prompt(dict.fromkeys(TOOK, 1.0)))
    assert est.per_request_length(records).estimate == pytest.approx(fmean(each.values()))  # type: ignore[union-attr]
    assert est.acceptance_length(records).estimate == pytest.approx(1 + 31 / 11)  # type: ignore[union-attr]
    assert est.committed_length(records).estimate == pytest.approx((15 + 8 + 2 + 10 + 1) / 11)  # type: ignore[union-attr]
    steps = {k: SCRIPT[k][0] for k in TOOK}
    for i, (share, given) in enumerate(zip(est.survival(records), est.conditional(records), strict=True), start=1):
        stood = by_prompt({k: sum(a >= i for _, a in v) for k, v in steps.items()})
        check(share, stood, by_prompt({k: sum(d >= i for d, _ in v) for k, v in steps.items()}))
        reached = by_prompt({k: sum(d >= i and a >= i - 1 for d, a in v) for k, v in steps.items()})
        check(given, stood, reached)


def test_tables_hold_the_hand_computed_numbers() -> None:
    [one] = matrix(scripted())
    assert one.holds
    gsm8k, mtbench, whole, mean = one.rows
    assert [row["dataset"] for row in one.rows] == ["gsm8k", "mtbench", "all, counters summed", "mean of the sets"]
    assert gsm8k["pooled"].estimate == pytest.approx(1 + 21 / 7)  # type: ignore[union-attr]
    assert mtbench["pooled"].estimate == pytest.approx(1 + 10 / 4)  # type: ignore[union-attr]
    assert whole["pooled"].estimate == pytest.approx(1 + 31 / 11)  # type: ignore[union-attr]
    assert mean["pooled"].estimate == pytest.approx((4.0 + 3.5) / 2)  # type: ignore[union-attr]
    assert (mtbench["prompts"], mtbench["requests"], mtbench["failed"], whole["failed"]) == (2, 3, 1, 1)
    assert mtbench["output"].estimate == pytest.approx(14 / 3)  # type: ignore[union-attr]
    truncated = [replace(r, finish_reason="length") if r.prompt_id == "a" else r for r in scripted()]
    assert matrix(truncated)[0].rows[0]["truncated"] == 1


def test_a_fixed_depth_is_an_identity_of_the_matrix() -> None:
    one = matrix([record([(7, 3), (7, 0)], prompt="a"), record([(7, 7)], prompt="b")])[0]
    row = one.rows[0]
    assert row["pooled"].estimate == pytest.approx(1 + 7 * row["proposal"].estimate)  # type: ignore[union-attr]
    assert "1 + 7 x" in one.notes[0]


def test_requests_that_broke_do_not_count() -> None:
    broken = record([(7, 0)] * 30, prompt="z", dataset="gsm8k", finish_reason="error", error="x")
    assert est.acceptance_length([*scripted(), broken]) == est.acceptance_length(scripted())


def test_macro_mean_by_hand() -> None:
    one, two = Interval(3.0, 2.8, 3.2, 0.95, 200), Interval(2.0, 1.6, 2.4, 0.95, 60)
    got = est.macro_mean([one, two])
    assert got is not None and got.high is not None
    assert got.estimate == 2.5 and got.high - 2.5 == pytest.approx(math.hypot(0.2, 0.4) / 2, rel=1e-6)
    assert est.macro_mean([one, None]) is None and est.macro_mean([]) is None


def test_positions_in_the_output_and_sections_by_hand() -> None:
    """Steps of one request begin at tokens 1, 9 and 12; of another at 1 and 6."""
    one = record([(7, 7), (7, 2), (3, 3)], prompt="a", num_thinking_tokens=9)
    two = record([(7, 4), (7, 5)], prompt="b", num_thinking_tokens=2)
    [table] = output_positions([one, two], bounds=(0, 8, 12))
    assert [(row["where"], row["pooled"].estimate, row["steps"], row["requests"]) for row in table.rows] == [  # type: ignore[union-attr]
        ("0-7", pytest.approx(1 + 16 / 3), 3, 2),
        ("8-11", pytest.approx(3.0), 1, 1),
        ("12-", pytest.approx(4.0), 1, 1),
    ]
    [table] = sections([one, two])
    assert [(row["where"], row["pooled"].estimate, row["steps"]) for row in table.rows] == [  # type: ignore[union-attr]
        ("thinking", pytest.approx(1 + (7 + 4) / 2), 2),
        ("answer", pytest.approx(1 + (2 + 3 + 5) / 3), 3),
    ]
    assert sections(scripted()) == []


# ---- simulation ------------------------------------------------------------------------------------------------------
def sums_record(prompt: int, turn: int, steps: int, accepted: int) -> RequestRecord:
    counts = Counts(
        num_steps=steps, num_draft_tokens=7 * steps, num_accepted_draft_tokens=accepted, num_emitted_tokens=1
    )
    return record([], prompt=f"p{prompt}", turn=turn, counts=counts)


def test_turns_of_a_prompt_are_one_cluster_or_the_interval_is_too_narrow() -> None:
    """60 prompts of three turns, acceptance .80 +- .08 between prompts: by prompt 93 to 97 %, the others not."""
    source = np.random.default_rng(31)
    population = np.clip(source.normal(0.8, 0.08, 400_000), 0.05, 0.98)
    truth = 1 + sum(float((population**j).mean()) for j in range(1, 8))
    num_runs, hits = 1000, np.zeros(3)
    for _ in range(num_runs):
        chances = np.clip(source.normal(0.8, 0.08, 60), 0.05, 0.98)
        counts = np.minimum(source.geometric(1 - chances[:, None, None], (60, 3, 40)) - 1, 7)
        sums = counts.sum(2)
        for way, rows in enumerate((sums.sum(1), sums.reshape(-1))):
            got = est.ratio_interval(rows.tolist(), [40 * sums.size // len(rows)] * len(rows))
            assert got is not None and got.low is not None and got.high is not None
            hits[way] += got.low <= truth - 1 <= got.high
        half = 1.96 * counts.std(ddof=1) / math.sqrt(counts.size)
        hits[2] += abs(counts.mean() - (truth - 1)) <= half
    by_prompt_, by_request, by_step = hits / num_runs
    assert 0.93 <= by_prompt_ <= 0.97 and by_request < 0.80 and by_step < 0.60, hits / num_runs
    records = [sums_record(i, t, 40, int(sums[i, t])) for i in range(60) for t in range(3)]
    got = est.acceptance_length(records)
    want = est.ratio_interval(sums.sum(1).tolist(), [120] * 60)
    assert got is not None and want is not None and got == want.shifted(1.0)


def timed(prompt: int, tokens: int, seconds: float, *, is_on: bool) -> RequestRecord:
    counts = Counts(
        num_steps=None, num_draft_tokens=None, num_accepted_draft_tokens=None, num_emitted_tokens=tokens + 1
    )
    changes = {"counts": counts, "first_token_s": 0.5, "total_s": 0.5 + seconds, "speculation": is_on}
    return record([], prompt=f"p{prompt}", width=8 if is_on else None, **{k: v for k, v in changes.items() if k != "x"})


def test_the_interval_of_a_speed_up_covers_and_pairing_narrows_it() -> None:
    """40 prompts; a prompt's speed-up varies by 20 %, as does its length; the truth is the ratio of all rates."""
    source = np.random.default_rng(32)
    sizes = source.lognormal(5.0, 0.6, 200_000)
    gains = 2.0 * np.exp(source.normal(0.0, 0.2, 200_000))
    truth = sizes.sum() / (sizes / gains).sum()
    covered = 0
    for _ in range(400):
        tokens = source.lognormal(5.0, 0.6, 40)
        gain = 2.0 * np.exp(source.normal(0.0, 0.2, 40))
        slow = [timed(i, int(c), c / 20.0, is_on=False) for i, c in enumerate(tokens)]
        fast = [timed(i, int(c), c / 20.0 / g, is_on=True) for i, (c, g) in enumerate(zip(tokens, gain, strict=True))]
        got = paired_speed_up(fast, slow)
        assert got is not None and got.low is not None and got.high is not None
        covered += got.low <= truth <= got.high
    assert 0.92 <= covered / 400 <= 0.975, covered / 400


def test_speeds_by_hand() -> None:
    slow = [timed(0, 10, 1.0, is_on=False), timed(1, 30, 2.0, is_on=False)]
    fast = [timed(0, 10, 0.5, is_on=True), timed(1, 30, 1.5, is_on=True), timed(2, 99, 1.0, is_on=True)]
    got = paired_speed_up(fast, slow)
    assert got is not None and got.estimate == pytest.approx((40 / 2.0) / (40 / 3.0)) and got.num_clusters == 2
    assert user_rate(slow).estimate == pytest.approx(40 / 3.0)  # type: ignore[union-attr]
    # influences on log R: (10/20 - .5/1 - 10/20 + 1/1.5) and its negative
    g = 10 / 20 - 0.5 / 1.0 - 10 / 20 + 1 / 1.5
    half = scipy_stats.t.ppf(0.975, 1) * math.sqrt(2 * g**2) / math.sqrt(2)
    assert got.high == pytest.approx(1.5 * math.exp(half))
    assert paired_speed_up(fast, []) is None
    stepped = [changed(one, num_steps=5) for one in slow]
    assert step_time_s(stepped).estimate == pytest.approx(3.0 / 10)  # type: ignore[union-attr]
    even = break_even_length([changed(one, num_steps=2) for one in fast[:2]], stepped)
    assert even is not None and even.estimate == pytest.approx((2.0 / 4) / (3.0 / 10)) and even.low is not None


def test_throughput_counts_only_while_the_load_is_full() -> None:
    def at(prompt: int, sent: float, first: float, total: float, tokens: int, round_: int = 0) -> RequestRecord:
        one = timed(prompt, tokens - 1, 1.0, is_on=True)
        times = {"sent_s": sent, "first_token_s": first, "total_s": total}
        return replace(one, **times, load="closed:2", tags={ROUND_TAG: round_})

    # two in flight from 1 to 5; 0 emits at 0.5 and 9 tokens until 5, 1 emits at 2 and 8 until 6
    records = [at(0, 0.0, 0.5, 5.0, 10), at(1, 1.0, 1.0, 5.0, 9)]
    [window] = steady_windows(records)
    assert window.seconds == pytest.approx(4.0)
    assert window.tokens == pytest.approx(9 * 4.0 / 4.5 + 1 + 8 * 3 / 4)
    both = throughput([*records, *(replace(r, tags={ROUND_TAG: 1}) for r in records)])
    assert both is not None and both.estimate == pytest.approx(window.tokens / 4.0) and both.num_clusters == 2
    # a data set or a process of its own has a clock of its own
    for change in ({"dataset": "other"}, {"tags": {PROCESS_TAG: 2}}):
        more = throughput([*records, *(replace(r, **change) for r in records)])
        assert more is not None and more.estimate == pytest.approx(window.tokens / 4.0)
    assert throughput(records[:1]) is None
    assert throughput([replace(r, load="open:2") for r in records]) is None


def test_the_speed_table_compares_like_with_like() -> None:
    slow = [timed(i, 10 + i, 1.0 + 0.1 * i, is_on=False) for i in range(5)]
    fast = [timed(i, 10 + i, 0.5 + 0.06 * i, is_on=True) for i in range(5)]
    other = [replace(r, load="closed:4", total_s=r.total_s + 9) for r in slow]
    [table] = speed_ups([*slow, *fast, *other])
    rows = {(row["load"], row["mode"]): row for row in table.rows}
    assert rows["1 in flight", "width 8"]["speed_up"].estimate > 1.5  # type: ignore[union-attr]
    assert rows["1 in flight", "off"]["speed_up"] is None
    assert ("4 in flight", "width 8") not in rows
    assert speed_ups(fast) == []


# ---- comparisons -----------------------------------------------------------------------------------------------------
def test_holm_by_hand_and_p_values() -> None:
    def interval(z: float, n: int = 100) -> Interval:
        return Interval(z, z - 1.959964, z + 1.959964, 0.95, n)

    assert p_value(interval(1.959964)) == pytest.approx(0.05, abs=1e-6)
    assert p_value(interval(-2.575829)) == pytest.approx(0.01, abs=1e-6)
    assert p_value(Interval(1.0, None, None, 0.95, 1)) is None
    few = scipy_stats.t.ppf(0.975, 9)
    assert p_value(Interval(2.0, 2 - few, 2 + few, 0.95, 10)) == pytest.approx(2 * scipy_stats.t.sf(2.0, 9), abs=1e-6)
    # p = .01, .04, .03: .01 <= .05/3; .03 > .05/2, so that the two others are not settled
    found = holm([interval(2.575829), interval(2.053749), interval(-2.170090)])
    assert found == ["higher", "not settled", "not settled"]
    assert holm([interval(-2.6), None]) == ["lower", "not settled"]


def test_holm_is_wrong_anywhere_in_one_run_of_twenty() -> None:
    source = np.random.default_rng(33)
    wrong = [0, 0]
    for _ in range(1000):
        values = source.normal(size=8)
        intervals = [Interval(float(v), float(v) - 1.959964, float(v) + 1.959964, 0.95, 1000) for v in values]
        wrong[0] += any(verdict != "not settled" for verdict in holm(intervals))
        wrong[1] += any(abs(values) > 1.959964)
    assert 0.035 <= wrong[0] / 1000 <= 0.065 and wrong[1] / 1000 > 0.25, wrong


def test_a_comparison_pairs_what_both_have() -> None:
    first = scripted()
    second = [replace(record([(7, 7)] * 2, prompt=r.prompt_id, dataset=r.dataset, turn=r.turn)) for r in first]
    second.append(record([(7, 1)], prompt="only here", dataset="gsm8k"))
    table = compare(Side("one", first), Side("two", second), about="x")
    rows = {row["dataset"]: row for row in table.rows}
    assert rows["gsm8k"]["prompts"] == 3
    assert rows["gsm8k"]["difference"].estimate == pytest.approx(8.0 - 4.0)  # type: ignore[union-attr]
    assert any("2 prompts of two" in note for note in table.notes)
    same = compare(Side("one", first), Side("again", first), about="x").rows[0]
    assert same["difference"].estimate == 0.0 and same["verdict"] == "not settled" and same["settle"] is None  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="no prompt"):
        compare(Side("one", first), Side("two", second[-1:]), about="x")
    with pytest.raises(RequestError, match="sampling"):
        compare(Side("one", first), Side("two", [replace(r, sampling="production") for r in first]), about="x")


def test_a_table_of_impossible_counters_is_refused() -> None:
    [table] = lengths([changed(r, num_draft_tokens=8 * (r.counts.num_steps or 0)) for r in scripted()])
    assert not table.holds and table.to_json()["rows"] == [] and "P <= k S" in table.refusal()[1]
