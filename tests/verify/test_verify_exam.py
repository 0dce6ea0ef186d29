"""The exam itself is examined: it passes the correct system, and fails seven broken ones for the right reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from verify_kit import BROKEN, EOS, PROMPTS, SAMPLING, VOCAB, TableTarget, examined, judging, pair, written_anew

import blockdraft.accept as core
from blockdraft.engine import Request
from blockdraft.verify import EngineSystem
from blockdraft.verify.greedy import Judge, check_batches, check_greedy
from blockdraft.verify.repeatable import check_seeds


@pytest.mark.parametrize("seed", range(20))
def test_a_correct_system_passes(seed: int) -> None:
    report = examined(EngineSystem(pair(seed)), seed=seed)
    assert report.has_passed, report.reasons
    assert len([check for check in report.checks if check.outcome == "not run"]) <= 1  # bonuses may be rare


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_system_fails_for_its_reason(name: str) -> None:
    broken = BROKEN[name]
    report = examined(broken.make(1), seed=1)
    found = report.check(broken.check)
    assert not report.has_passed and found.outcome == "failed"
    assert found.reason is not None and broken.reason in found.reason
    assert any(broken.reason in reason for reason in report.reasons)
    # what works by itself is not blamed
    assert report.check("plain greedy text").outcome == report.check("batch invariance").outcome == "passed"


def test_the_bent_rule_with_nothing_bent_passes() -> None:
    assert examined(EngineSystem(pair(3), decide=judging(written_anew())), seed=3).has_passed


def test_reports_say_what_they_would_have_seen() -> None:
    report = examined(EngineSystem(pair(0)))
    raw = json.loads(json.dumps(report.to_json()))
    assert raw["passed"] is True and raw["false_alarm_rate"] == 1e-3
    tokens = next(check for check in raw["checks"] if check["name"].startswith("tokens of free texts"))
    assert 0.0 < tokens["figures"]["least_seen"] < 0.2
    assert 0.0 < tokens["figures"]["power_at_variation_0.05"] < 1.0
    assert f"{tokens['figures']['least_seen']:.3g} with probability 0.9" in tokens["power"]
    num_tests = sum("p_value" in check["figures"] for check in raw["checks"])
    assert tokens["figures"]["level"] == pytest.approx(1e-3 / num_tests)
    text = report.to_text()
    assert "PASSED" in text and all(check["name"] in text for check in raw["checks"])
    failed = examined(BROKEN["residual from p"].make(1), seed=1)
    assert "FAILED" in failed.to_text() and failed.reasons[0] in failed.to_text()


def test_a_trace_holds_what_the_steps_decided() -> None:
    system = EngineSystem(pair(2))
    request = Request(prompt_ids=PROMPTS[0], max_new_tokens=9, sampling=SAMPLING, seed=5, speculate=True, width=4)
    [done] = system.run([request])
    [trace] = system.trace([request])
    text = trace.ids[len(PROMPTS[0]) :]
    assert tuple(text[: len(done.token_ids)]) == done.token_ids
    assert sum(step.num_accepted for step in trace.steps) == done.stats.num_accepted_draft_tokens
    assert len(trace.steps) == done.stats.num_steps
    start = len(PROMPTS[0]) + 1
    for step in trace.steps:
        assert step.start == start and step.committed == tuple(trace.ids[start : start + len(step.committed)])
        start += len(step.committed)
    forced = [replace(request, seed=n) for n in range(6)]
    traces = system.trace(forced, first_ids=[4] * 6, num_steps=1)
    assert {one.first_id for one in traces} == {4} and {len(one.steps) for one in traces} == {1}
    assert system.engine.num_running == system.engine.num_waiting == 0


# ---- the deterministic checks see what they are for ------------------------------------------------------------------
def judge_of(system: EngineSystem, margin: float = 1e-9) -> Judge:
    return Judge("the target's own pass over the whole text", system.logits, margin)


def test_greedy_text_that_leaves_the_target_is_found_and_a_tie_is_told_from_it() -> None:
    def second_best(rows, proposals, logits):  # type: ignore[no-untyped-def]
        decisions = honest(rows, proposals, logits)
        for index, row in enumerate(rows):
            if proposals[index] is not None and len(row.ids) > 9:
                last = logits[index][decisions[index].num_accepted].topk(2).indices[1]
                decisions[index] = replace(decisions[index], ids=[*decisions[index].ids[:-1], int(last)])
        return decisions

    engine = pair(4)
    honest = engine.decide
    system = EngineSystem(engine, decide=second_best)
    checks, plain = check_greedy(system, PROMPTS, [5], 24, judge_of(system))
    assert [check.outcome for check in checks] == ["passed", "failed"]
    assert checks[1].reason == "greedy text with the draft is not the target's own"
    assert checks[1].figures["divergences"][0]["margin"] > 1e-9
    assert check_batches(system, PROMPTS, 24, plain, judge_of(system)).outcome == "failed"
    forgiving = check_greedy(system, PROMPTS, [5], 24, judge_of(system, margin=100.0))[0]
    assert "part at ties" in forgiving[1].finding and forgiving[1].outcome == "passed"


def test_plain_text_is_held_against_the_judge() -> None:
    system, other = EngineSystem(pair(5)), EngineSystem(pair(6))
    checks, _ = check_greedy(system, PROMPTS, [], 12, judge_of(other))
    assert (
        checks[0].outcome == "failed"
        and checks[0].reason == "plain greedy text is not the target's most likely continuation"
    )


@pytest.mark.parametrize("fault", ["ignored", "counted on", "by place"])
def test_seeds_that_do_not_hold_are_found(fault: str) -> None:
    calls = iter(range(10_000))

    def decide(rows, proposals, logits):  # type: ignore[no-untyped-def]
        for index, row in enumerate(rows):
            state = {"ignored": 1, "counted on": next(calls), "by place": index}[fault]
            row.accept_generator.manual_seed(1000 * state + len(row.ids))
            row.draft_generator.manual_seed(1000 * state + len(row.ids))
        return honest(rows, proposals, logits)

    engine = pair(7)
    honest = engine.decide
    found = check_seeds(EngineSystem(engine, decide=decide), PROMPTS[:1], 12, num_seeds=4, seed=0, is_exact=True)
    reason = {
        "ignored": "different seeds give the same text",
        "counted on": "the same seed gave another text",
        "by place": "depends on the requests beside it",
    }[fault]
    assert found.outcome == "failed" and found.reason is not None and reason in found.reason


def test_the_table_pair_is_what_it_says() -> None:
    target = TableTarget(torch.eye(VOCAB, dtype=torch.float64))
    row = target.new_row()
    target.forward([torch.tensor([1, 2, 3])], [row])
    target.rollback([row], [1])
    assert row.num_positions == 1 and target.facts.eos_token_ids == (EOS,)
    assert core.SamplingParams(temperature=1.0, top_p=0.8) == SAMPLING
