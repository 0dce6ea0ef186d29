"""Targets with recurrent, convolution or indexer state: rolled back, they are as if never fed the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.config import PROVEN_RECURRENT_MODEL_TYPES
from blockdraft.errors import PairError
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.hf_cache import RowCache
from blockdraft.targets.recurrent import Undo
from blockdraft.targets.selftest import Findings, examine
from tiny_hybrids import RECURRENT, SPARSE, TRIED, relative, rounds, tapped, tiny_hybrid
from tiny_targets import random_ids

LIMIT = 1e-5
_models: dict[str, Any] = {}


def target_of(family: str) -> HFTarget:
    if family not in _models:
        _models[family] = tiny_hybrid(family)
    return tapped(_models[family])


@pytest.fixture(params=[*RECURRENT, *SPARSE])
def target(request: pytest.FixtureRequest) -> Any:
    made = target_of(request.param)
    yield made
    made.close()


@pytest.fixture(params=["qwen3_next", "falcon_h1", "lfm2", "deepseek_v32"])
def one_of_a_kind(request: pytest.FixtureRequest) -> Any:
    made = target_of(request.param)
    yield made
    made.close()


def fresh(target: HFTarget, ids: Tensor) -> Tensor:
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return scored.logits_TV


def test_rounds_of_random_acceptance(target: HFTarget) -> None:
    assert rounds(target, 15) <= LIMIT


@pytest.mark.parametrize("family", TRIED)
def test_families_that_only_the_self_test_knows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    target = HFTarget(tiny_hybrid(family), (1, 3))
    assert target._mixers is not None and len(list(tmp_path.rglob("*.json"))) == 1
    assert rounds(target, 12) <= LIMIT
    target.close()


def test_every_proven_family_is_tried_here() -> None:
    wrapped = {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm5_next"}  # the same text model inside a multimodal one
    elsewhere = {"kimi_k3"}  # not of transformers, has tests of its own
    assert set(RECURRENT) | wrapped | elsewhere == PROVEN_RECURRENT_MODEL_TYPES


def test_the_mixers_alone_are_run_again(one_of_a_kind: HFTarget) -> None:
    mixers = one_of_a_kind._mixers
    assert (mixers is None) == (one_of_a_kind.facts.model_type in SPARSE)
    if mixers is not None:
        assert mixers.can_repeat and 0 < len(mixers.modules) <= 2 * len(one_of_a_kind._layers)


@pytest.mark.parametrize("num_prompt", [0, 2, 20])
def test_every_length_to_keep(one_of_a_kind: HFTarget, num_prompt: int) -> None:
    target, prompt, block, more = one_of_a_kind, random_ids(num_prompt, 1), random_ids(7, 2), random_ids(3, 3)
    for keep in (0, 1, 3, 6, 7):
        row = target.new_row()
        if num_prompt:
            target.forward([prompt], [row], num_logits=0)
        target.forward([block], [row])
        target.rollback([row], [keep])
        [scored] = target.forward([more], [row])
        expected = fresh(target, torch.cat([prompt, block[:keep], more]))[-3:]
        assert relative(scored.logits_TV, expected) <= LIMIT


@pytest.mark.parametrize("steps", [[20], [30, 11], [32, 31, 2], [0], [33]])
def test_right_after_prefill_and_several_times(one_of_a_kind: HFTarget, steps: list[int]) -> None:
    target, prompt, more = one_of_a_kind, random_ids(33, 1), random_ids(4, 2)
    row = target.new_row()
    target.forward([prompt], [row], num_logits=1)
    for keep in steps:
        target.rollback([row], [keep])
    for _ in range(2):
        [scored] = target.forward([more], [row])
        assert relative(scored.logits_TV, fresh(target, torch.cat([prompt[: steps[-1]], more]))[-4:]) <= LIMIT
        target.rollback([row], [0])


def test_a_prefill_of_more_positions_than_are_noted(one_of_a_kind: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.targets.recurrent._MAX_RECORDED", 20)
    target, prompt, more = one_of_a_kind, random_ids(50, 1), random_ids(4, 2)
    for keep in (0, 1, 23, 49):
        row = target.new_row()
        target.forward([random_ids(12, 3)], [row], num_logits=0)
        target.forward([prompt], [row], num_logits=1)
        assert row.undo is None or not row.undo._calls  # type: ignore[attr-defined]
        target.rollback([row], [keep])
        [scored] = target.forward([more], [row])
        assert (
            relative(scored.logits_TV, fresh(target, torch.cat([random_ids(12, 3), prompt[:keep], more]))[-4:]) <= LIMIT
        )


def test_rows_do_not_disturb_each_other(one_of_a_kind: HFTarget) -> None:
    target = one_of_a_kind
    texts = [random_ids(n, n) for n in (3, 17, 31)]
    rows = [target.new_row() for _ in texts]
    target.forward(texts, rows, num_logits=1)
    blocks = [random_ids(n, 50 + n) for n in (4, 1, 6)]
    target.forward(blocks, rows)
    target.rollback(rows, [2, 0, 6])
    target.free(rows[1])
    target.forward([random_ids(5, 9)], [target.new_row()])
    for index in (2, 0):
        [scored] = target.forward([random_ids(3, 70)], [rows[index]])
        text = torch.cat([texts[index], blocks[index][: (2, 0, 6)[index]], random_ids(3, 70)])
        assert relative(scored.logits_TV, fresh(target, text)[-3:]) <= LIMIT


def test_a_forward_that_fails_leaves_every_row_as_it_was(one_of_a_kind: HFTarget) -> None:
    target = one_of_a_kind
    ids = [random_ids(20, 1), random_ids(25, 2), random_ids(9, 3)]
    rows = [target.new_row() for _ in ids]
    target.forward(ids, rows)
    target.rollback(rows, [11, 25, 4])  # two of them with work put off
    ids = [ids[0][:11], ids[1], ids[2][:4]]
    for failing in range(1, 8):  # in the first row's replay, its forward, the second row's, ...
        calls = 0

        def fail(*_: Any, failing: int = failing) -> None:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise KeyboardInterrupt

        modules = [target._layers[2]] if target._mixers is None else target._mixers.modules
        handles = [module.register_forward_hook(fail) for module in modules[-2:]]
        try:
            target.forward([random_ids(4, 4), random_ids(7, 5), random_ids(2, 6)], rows)
            target.rollback(rows, [0, 0, 0])
        except KeyboardInterrupt:
            pass
        for handle in handles:
            handle.remove()
        assert [row.num_positions for row in rows] == [11, 25, 4]
    more = [random_ids(3, 7), random_ids(3, 8), random_ids(3, 9)]
    for text, last, one in zip(ids, more, target.forward(more, rows), strict=True):
        assert relative(one.logits_TV, fresh(target, torch.cat([text, last]))[-3:]) <= LIMIT


def test_one_copy_of_the_states_whatever_the_width(one_of_a_kind: HFTarget) -> None:
    target, row = one_of_a_kind, one_of_a_kind.new_row()
    target.forward([random_ids(30)], [row])
    target.forward([random_ids(8)], [row])
    undo, cache = row.undo, row.cache  # type: ignore[attr-defined]
    if undo is None:
        return
    states = [x for layer in cache.states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    copies = [x for copy in undo._copies for x in copy.tensors.values()]
    assert sum(x.nbytes for x in copies if x is not None) == sum(x.nbytes for x in states if x is not None) > 0
    assert row.num_bytes == cache.num_bytes + undo.num_bytes
    target.free(row)
    assert row.num_bytes == 0


def test_nothing_is_run_again_where_all_is_kept_or_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of("falcon_h1")
    runs: list[int] = []
    handle = target._mixers.modules[0].register_forward_pre_hook(  # type: ignore[union-attr]
        lambda _m, args, kwargs: runs.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    )
    row = target.new_row()
    for kept in ([8], [5, 3], [0]):
        target.forward([random_ids(8)], [row])
        for keep in kept:
            target.rollback([row], [keep])
    target.forward([random_ids(2)], [row])
    assert runs == [8, 8, 3, 8, 2]
    handle.remove()
    target.close()


def test_two_targets_on_one_model_keep_apart() -> None:
    one, two = target_of("qwen3_next"), target_of("qwen3_next")
    rows = [one.new_row(), two.new_row()]
    for target, row in zip((one, two), rows, strict=True):
        target.forward([random_ids(9)], [row])
        target.rollback([row], [4])
    model = _models["qwen3_next"]
    for target, row in zip((one, two), rows, strict=True):
        [scored] = target.forward([random_ids(3, 2)], [row])
        assert relative(scored.logits_TV, fresh(target, torch.cat([random_ids(9)[:4], random_ids(3, 2)]))[-3:]) <= LIMIT
        target.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2", "deepseek_v32"])
def test_loaded_and_packed_it_computes_the_same(family: str, tmp_path: Path) -> None:
    model = tiny_hybrid(family, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    plain, packed = HFTarget(model, (1, 3)), load_target(tmp_path, tap_layer_ids=(1, 3))
    assert isinstance(packed, HFTarget) and packed.facts == plain.facts
    assert relative(fresh(packed, random_ids(40)), fresh(plain, random_ids(40))) <= LIMIT
    assert rounds(packed, 8) <= LIMIT
    plain.close()


# ---- the self-test ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No family is known to be exact; the cache folder is empty."""
    monkeypatch.setattr("blockdraft.targets.selftest.PROVEN_RECURRENT_MODEL_TYPES", frozenset())
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_an_unknown_family_is_examined_once(family: str, unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hybrid(family)
    HFTarget(model, (1,)).close()
    [note] = unknown.rglob("*.json")
    said = json.loads(note.read_text())
    assert said["model_type"] == family and said["error"] <= LIMIT < 0.01 < said["contrast"]
    monkeypatch.setattr("blockdraft.targets.selftest.examine", lambda _target: pytest.fail("examined again"))
    HFTarget(model, (1,)).close()


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_a_rollback_that_does_nothing_does_not_pass(
    family: str, unknown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Undo, "settle", lambda _undo: None)
    with pytest.raises(PairError, match=rf"'{family}'.*came back off by"):
        HFTarget(tiny_hybrid(family))
    assert not list(unknown.rglob("*.json"))


def test_a_replay_of_one_position_too_many_does_not_pass(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.targets.recurrent._cut", lambda given, keep, _num: _longer(given, keep + 1))
    with pytest.raises(PairError, match="came back off by"):
        HFTarget(tiny_hybrid("falcon_h1"))


def _longer(given: Any, count: int) -> Any:
    return given[:, :count] if isinstance(given, Tensor) and given.dim() > 1 else given


def test_an_attention_layer_that_is_not_cropped_does_not_pass(unknown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCache, "shorten", lambda _cache, _length: None)
    with pytest.raises(PairError, match="came back off by"):
        HFTarget(tiny_hybrid("lfm2"))


def test_half_precision_is_judged_by_its_own_rounding() -> None:
    target = HFTarget(tiny_hybrid("qwen3_next", dtype=torch.bfloat16))
    assert examine(target).fault(target.dtype) is None
    target.close()
    rounding = Findings(error=0.03, noise=0.01, contrast=0.8)
    assert rounding.fault(torch.bfloat16) is None
    assert "fed in pieces" in str(rounding.fault(torch.float32))
    assert "came back off by" in str(Findings(error=0.05, noise=0.01, contrast=0.8).fault(torch.bfloat16))
    assert "too flat" in str(Findings(error=0.03, noise=0.01, contrast=0.1).fault(torch.bfloat16))
