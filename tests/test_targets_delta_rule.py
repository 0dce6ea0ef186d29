"""Gated DeltaNet and Kimi delta attention are taken back by their recurrence alone, which says what the modules say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from blockdraft.errors import PairError
from blockdraft.targets import HFTarget, delta_rule
from blockdraft.targets.delta_rule import KNOWN, DeltaMixer, Gates, brought_forward
from blockdraft.targets.recurrent import _DeltaCall
from blockdraft.targets.selftest import examine
from tiny_hybrids import RECURRENT, relative, rounds, tiny_hybrid
from tiny_targets import random_ids

LIMIT = 1e-5
DELTA = [
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "qwen4_exp_text",
    "kimi_linear",
    "glm5_next_text",
    "bailing_hybrid",
]
_models: dict[str, Any] = {}


def model_of(family: str) -> Any:
    if family not in _models:
        _models[family] = tiny_hybrid(family)
    return _models[family]


@pytest.fixture(params=DELTA)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[HFTarget, HFTarget]]:
    """(by the recurrence, by the modules) on one model."""
    fast = HFTarget(model_of(request.param))
    with mock.patch.dict(KNOWN, clear=True):
        slow = HFTarget(model_of(request.param))
    yield fast, slow
    fast.close()
    slow.close()


def deltas(target: HFTarget) -> int:
    assert target._mixers is not None
    return len(target._mixers.deltas)


def states(row: Any) -> list[Tensor]:
    with torch.inference_mode():
        row.undo.settle()
    held = [x for layer in row.cache.states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    return [x for x in held if x is not None]


def fresh(target: HFTarget, ids: Tensor) -> Tensor:
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return scored.logits_TV


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("length", [1, 7, 16, 45])
def test_the_recurrence_is_the_loop_over_positions(width: int, length: int) -> None:
    make = torch.Generator().manual_seed(length)
    draw = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64)  # noqa: E731
    state, values, betas = draw(3, 6, 5), draw(3, length, 5), 2 * draw(3, length, 1).sigmoid()
    keys = torch.nn.functional.normalize(draw(3, length, 6), dim=-1)
    decays = -20 * draw(3, length, width).sigmoid()
    found, wanted = brought_forward(state, keys, values, decays, betas), state
    for t in range(length):
        wanted = wanted * decays[:, t, :, None].exp()
        key = keys[:, t, :, None]
        wanted = wanted + key * (betas[:, t, :, None] * (values[:, t, None] - key.mT @ wanted))
    assert relative(found, wanted) < 1e-13


@pytest.mark.parametrize("family", [*RECURRENT, "lara_mini"])
def test_who_is_taken_back_this_way(family: str) -> None:
    target = HFTarget(model_of(family))
    assert deltas(target) == (3 if family in DELTA else 2 if family == "lara_mini" else 0)
    target.close()


@pytest.mark.parametrize("num_prompt", [0, 1, 20])
def test_both_ways_lead_to_the_same_states(both: tuple[HFTarget, HFTarget], num_prompt: int) -> None:
    rows = [target.new_row() for target in both]
    for target, row in zip(both, rows, strict=True):
        if num_prompt:
            target.forward([random_ids(num_prompt, 1)], [row], num_logits=0)
        target.forward([random_ids(19, 2)], [row])  # longer than a chunk and the kernel
    for keep in (19, 18, 17, 8, 3, 1, 0):
        for target, row in zip(both, rows, strict=True):
            target.rollback([row], [keep])
        found, wanted = map(states, rows)
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            assert (one - other).abs().max() <= LIMIT * other.abs().max()


@pytest.mark.parametrize("family", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_many_rounds(family: str) -> None:
    target = HFTarget(model_of(family), (1, 3))
    assert rounds(target, 60, seed=3) <= LIMIT
    target.close()


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear"])
def test_no_module_is_run_again(family: str) -> None:
    target = HFTarget(model_of(family))
    assert target._mixers is not None
    runs: list[int] = []
    handles = [m.register_forward_hook(lambda *_: runs.append(1)) for m in target._mixers.modules]
    row = target.new_row()
    for kept in ([8], [5, 3], [0]):
        target.forward([random_ids(8)], [row])
        for keep in kept:
            target.rollback([row], [keep])
    [scored] = target.forward([random_ids(2)], [row])
    assert len(runs) == 4 * 3
    assert (
        relative(scored.logits_TV, fresh(target, torch.cat([random_ids(8), random_ids(8)[:3], random_ids(2)]))[-2:])
        <= LIMIT
    )
    for handle in handles:
        handle.remove()
    target.close()


def test_interrupted_it_starts_again_from_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = HFTarget(model_of("qwen3_next")), 0
    real = brought_forward

    def failing(*args: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(*args)

    row = target.new_row()
    target.forward([random_ids(12)], [row])
    target.forward([random_ids(8, 1)], [row])
    target.rollback([row], [5])
    monkeypatch.setattr(delta_rule, "brought_forward", failing)
    with pytest.raises(KeyboardInterrupt):
        target.forward([random_ids(3, 2)], [row])
    assert row.num_positions == 17
    [scored] = target.forward([random_ids(3, 2)], [row])
    wanted = fresh(target, torch.cat([random_ids(12), random_ids(8, 1)[:5], random_ids(3, 2)]))[-3:]
    assert relative(scored.logits_TV, wanted) <= LIMIT
    target.close()


def test_only_forwards_of_rows_are_noted() -> None:
    """Whoever else runs the model meets nothing, and no hook stays when the target is closed."""
    model = model_of("kimi_linear")
    alone = model(input_ids=random_ids(9)[None], cache=DynamicCache(config=model.config)).logits
    target = HFTarget(model)
    row: Any = target.new_row()
    target.forward([random_ids(6)], [row])
    noted = row.undo.num_bytes
    beside = model(input_ids=random_ids(9)[None], cache=DynamicCache(config=model.config)).logits
    assert torch.equal(alone, beside) and row.undo.num_bytes == noted and row.cache.inputs is None
    target.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_bytes_are_counted() -> None:
    target = HFTarget(model_of("qwen3_next"))
    row: Any = target.new_row()
    target.forward([random_ids(6)], [row])
    calls = row.undo._calls
    assert len(calls) == 3 and all(isinstance(call, _DeltaCall) for call in calls)
    channels, gates = 8 * (2 + 2 + 4), 4 + 4
    assert row.undo.num_bytes == 3 * 6 * (channels + gates) * 8  # nothing was there to copy
    target.close()


def test_half_precision() -> None:
    target = HFTarget(tiny_hybrid("kimi_linear", dtype=torch.bfloat16))
    assert deltas(target) == 3 and examine(target).fault(target.dtype) is None
    target.close()


# ---- when it is not what the table says ------------------------------------------------------------------------------


def _other_gates(module: Any, b_1TH: Tensor, a_1TH: Tensor) -> tuple[Tensor, Tensor]:
    decays, betas = delta_rule._apart(module, b_1TH, a_1TH)
    return decays * 1.01, betas


@pytest.mark.parametrize(
    "gates",
    [
        Gates(("in_proj_b", "in_proj_a"), _other_gates),
        Gates(("in_proj_a", "in_proj_b"), delta_rule._apart),
        Gates(("in_proj_b",), delta_rule._apart),
        Gates(("in_proj_b", "gone"), delta_rule._apart),
    ],
    ids=["arithmetic", "order", "too few", "no such part"],
)
def test_a_module_that_says_otherwise_is_run_again(gates: Gates) -> None:
    with mock.patch.dict(KNOWN, {"Qwen3_5GatedDeltaNet": gates}):
        target = HFTarget(model_of("qwen3_5_text"))
    assert deltas(target) == 0
    assert rounds(target, 6) <= LIMIT
    target.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model_of("qwen3_5_text").modules())


def test_a_class_of_that_name_from_elsewhere_is_none() -> None:
    other = type("Qwen3_5GatedDeltaNet", (torch.nn.Module,), {})
    assert DeltaMixer.of(other()) is None
    assert DeltaMixer.of(model_of("qwen3_5_text").model.layers[0].linear_attn) is not None


def test_one_position_too_few_does_not_pass_the_self_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr("blockdraft.targets.selftest.PROVEN_RECURRENT_MODEL_TYPES", frozenset())
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path))
    real = _DeltaCall.repeat
    monkeypatch.setattr(
        _DeltaCall, "repeat", lambda call, keep, fed: real(call, keep if keep == fed else max(keep - 1, 1), fed)
    )
    with pytest.raises(PairError, match="came back off by"):
        HFTarget(model_of("qwen3_next"))
