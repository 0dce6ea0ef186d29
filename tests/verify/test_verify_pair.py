"""A whole pair from disk through the command line, and the checks of its halves: each sees what it is for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft import load
from blockdraft.engine import Engine
from blockdraft.errors import UnavailableError
from blockdraft.verify import BUDGETS, exam_prompts
from blockdraft.verify import exam as exam_module
from blockdraft.verify.draft_reference import check_draft
from blockdraft.verify.greedy import Judge
from blockdraft.verify.lossless import SampledBudget
from blockdraft.verify.parity import check_draft_cache, check_rollback, check_target
from blockdraft.verify.reference import Reference, float64_model, load_reference
from blockdraft.verify.system import EngineSystem
from tiny_pair import TinyPair, changed_copy, run_cli

SMALL = replace(
    BUDGETS["quick"],
    num_prompts=2,
    greedy_tokens=16,
    num_seeds=2,
    seed_tokens=8,
    num_stops=2,
    sampled=SampledBudget(num_texts=10, text_tokens=16, num_contexts=1, num_per_context=40),
)


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exam_module.BUDGETS, "quick", SMALL)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(tiny_pair: TinyPair) -> Engine:
    return load(tiny_pair.draft, tiny_pair.target)


# ---- the command -----------------------------------------------------------------------------------------------------
def test_a_good_pair_passes(tiny_pair: TinyPair, tmp_path: Path, small_budget: None) -> None:
    ran = run_cli("verify", *tiny_pair.arguments, "--seed", "3", "--out", tmp_path / "report.json")
    assert ran.code == 0, ran.out
    assert "PASSED" in ran.out and "FAIL" not in ran.out and "would have seen a total variation of" in ran.out
    assert "quick examination" in ran.err and "sampled text" in ran.err
    report = json.loads((tmp_path / "report.json").read_text("utf-8"))
    assert report["passed"] is True and report["reasons"] == [] and report["false_alarm_rate"] == 1e-3
    checks = {check["name"]: check for check in report["checks"]}
    for name in ("compatibility", "target parity", "rollback", "draft context", "plain greedy text", "seeds"):
        assert checks[name]["outcome"] == "passed", checks[name]
    assert checks["greedy identity, width 5"]["outcome"] == checks["stops and lengths"]["outcome"] == "passed"
    assert checks["target parity"]["figures"]["error"] < 1e-4
    assert any(name.startswith("surprise equals entropy") for name in checks)


def test_json_and_no_reference(tiny_pair: TinyPair, small_budget: None) -> None:
    ran = run_cli("verify", *tiny_pair.arguments, "--no-reference", "--json")
    report = json.loads(ran.out)
    assert ran.code == 0 and report["passed"] is True
    parity = next(check for check in report["checks"] if check["name"] == "target parity")
    assert (parity["outcome"], parity["reason"]) == ("not run", "--no-reference was given")
    assert "the target's own pass" in next(c["finding"] for c in report["checks"] if c["name"] == "plain greedy text")


def test_a_pair_that_does_not_fit_fails_and_is_not_loaded(tiny_pair: TinyPair, tmp_path: Path) -> None:
    draft = changed_copy(tiny_pair.draft, tmp_path / "draft", num_target_layers=9)
    ran = run_cli("verify", draft, "--target", tiny_pair.target)
    assert ran.code == 1 and "FAIL  compatibility" in ran.out and "does not fit the target" in ran.out
    assert "target parity" not in ran.out and "layers" in ran.out


def test_bad_input_is_refused_in_one_line(tiny_pair: TinyPair, tmp_path: Path) -> None:
    pair = tiny_pair.arguments
    assert "give one of them" in run_cli("verify", *pair, "--quick", "--thorough").refusal
    assert "needs its target" in run_cli("verify", tiny_pair.draft).refusal
    assert "needs its draft" in run_cli("verify", "--target", tiny_pair.target).refusal
    assert "DRAFT is about a pair" in run_cli("verify", *pair, "--url", "http://localhost:8000").refusal
    assert "name it with --url" in run_cli("verify", *pair, "--engine", "vllm").refusal
    assert "--seed is -1" in run_cli("verify", *pair, "--seed", "-1").refusal
    assert "nowhere" in run_cli("verify", tmp_path / "nowhere", "--target", tiny_pair.target).refusal
    assert "float8" in run_cli("verify", *pair, "--dtype", "float8").refusal


def test_prompts_that_do_not_fit_are_refused(tiny_pair: TinyPair, engine: Engine) -> None:
    from blockdraft.errors import RequestError

    prompts = exam_prompts(engine.tokenizer, 8)  # type: ignore[arg-type]
    assert len(prompts) == 8 and len({tuple(p) for p in prompts}) == 8
    budget = replace(SMALL, greedy_tokens=250)
    with pytest.raises(RequestError, match=r"needs .* positions and the target has 256"):
        exam_module.examine_system(
            EngineSystem(engine),
            prompts,
            judge=None,
            budget=budget,
            itemsize=4,
            seed=0,
            subject={},  # type: ignore[arg-type]
        )


# ---- the halves ------------------------------------------------------------------------------------------------------
def test_target_parity_sees_a_changed_weight(tiny_pair: TinyPair, engine: Engine) -> None:
    system, prompts = EngineSystem(engine), exam_prompts(engine.tokenizer, 2)  # type: ignore[arg-type]
    model: Any = float64_model(tiny_pair.target)
    honest = Judge.measured("transformers", Reference(model).logits, system, prompts[0], 4)
    assert check_target(system, prompts, honest, 4).outcome == "passed" and honest.margin == 1e-4
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.3
    found = check_target(system, prompts, honest, 4)
    assert found.outcome == "failed" and found.reason == "the target's logits are not those of transformers"
    changed = Judge.measured("transformers", Reference(model).logits, system, prompts[0], 4)
    assert changed.margin <= 1e-2  # another model is not taken for rounding


def test_a_reference_that_cannot_be_had_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "of_another_world"}')
    with pytest.raises(UnavailableError, match="no reading of its own"):
        load_reference(tmp_path)


def test_rollback_sees_a_position_that_was_lost(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load(tiny_pair.draft, tiny_pair.target).target
    assert check_rollback(target, seed=1).outcome == "passed"
    honest = target.rollback
    monkeypatch.setattr(target, "rollback", lambda rows, keep: honest(rows, [max(k - 1, 0) for k in keep]))
    found = check_rollback(target, seed=1)
    assert found.outcome == "failed" and found.reason is not None and "does not take positions back" in found.reason


def test_draft_context_sees_positions_that_came_in_wrong(tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target)
    draft: Any = engine.draft
    prompt = list(range(5, 40))
    assert check_draft_cache(engine.target, draft, prompt, 0).outcome == "passed"
    honest = draft.inject_rows
    monkeypatch.setattr(
        draft, "inject_rows", lambda taps, caches: honest([0.9 * t if len(t) < 5 else t for t in taps], caches)
    )
    lost = check_draft_cache(engine.target, draft, prompt, 0)
    assert lost.outcome == "passed"  # the norm takes out a factor
    monkeypatch.setattr(
        draft, "inject_rows", lambda taps, caches: honest([t.flip(0) if len(t) < 5 else t for t in taps], caches)
    )
    lost = check_draft_cache(engine.target, draft, prompt, 0)
    assert lost.outcome == "failed" and lost.reason == "the draft's context depends on how its positions came in"


def test_draft_parity_with_the_published_package(tiny_pair: TinyPair, engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("dflash", reason="the upstream wheel is a development dependency: dflash==0.1.0")
    draft: Any = engine.draft
    prompt = list(range(5, 40))
    found = check_draft(engine.target, draft, tiny_pair.draft, prompt)
    assert found.outcome == "passed" and found.figures["error"] < 1e-5
    other = changed_copy(tiny_pair.draft, tmp_path / "other", rms_norm_eps=0.3)
    assert check_draft(engine.target, draft, other, prompt).outcome == "failed"
    unknown = changed_copy(tiny_pair.draft, tmp_path / "unknown", architectures=["EagleDraftModel"])
    assert check_draft(engine.target, draft, unknown, prompt).outcome == "not run"
