"""The fast path's own promises; what it shares with every target is in test_targets_hf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.errors import RequestError, UnavailableError
from blockdraft.packed import can_multiply_int8
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.fused import FusedTarget
from blockdraft.targets.fused.attention import capacity
from blockdraft.targets.fused.weights import Norm
from tiny_targets import random_ids, tiny_model

TAPS = (0, 2, 3)


needs_int8 = pytest.mark.skipif(not can_multiply_int8(), reason="no exact 8-bit products on this machine")


def make(
    *, dtype: torch.dtype = torch.float64, pack: bool = False, weights: Any = None, **changes: object
) -> FusedTarget:
    model = tiny_model("llama", **changes).to(dtype)
    return FusedTarget(model, HFTarget(model).facts, TAPS, pack=pack, weights=weights)


def fresh(target: FusedTarget, ids: Tensor) -> Tensor:
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return scored.logits_TV


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [None, 0, 1, 20, 27])
def test_a_copy_of_a_row_goes_its_own_way(length: int | None) -> None:
    target = make()
    ids, more, other = random_ids(27, 1), random_ids(5, 2), random_ids(9, 3)
    row = target.new_row()
    target.forward([ids[:20]], [row])
    target.forward([ids[20:]], [row])
    assert target.can_truncate
    made = target.copy(row, length)
    kept = 27 if length is None else length
    assert (row.num_positions, made.num_positions) == (27, kept)
    target.rollback([made], [0])
    with pytest.raises(ValueError, match="cannot keep 1"):
        target.rollback([made], [1])
    [a, b] = target.forward([more, other], [made, row])
    same(a.logits_TV, fresh(target, torch.cat([ids[:kept], more]))[kept:])
    same(b.logits_TV, fresh(target, torch.cat([ids, other]))[27:])
    target.rollback([made, row], [2, 4])
    target.free(row)
    [a] = target.forward([other], [made])
    same(a.logits_TV, fresh(target, torch.cat([ids[:kept], more[:2], other]))[kept + 2 :])


def test_what_cannot_be_copied_is_named() -> None:
    target = make()
    row = target.new_row()
    target.forward([random_ids(3)], [row])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot copy {length} positions: the row has 3"):
            target.copy(row, length)
    with pytest.raises(ValueError, match="another target"):
        make().copy(row)
    target.free(row)
    with pytest.raises(ValueError, match="freed"):
        target.copy(row)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_packed_weights_and_half_precision_are_off_by_rounding_only(dtype: torch.dtype, limit: float) -> None:
    exact, packed = make(), make(dtype=dtype, pack=True)
    texts, more = [random_ids(n, n) for n in (40, 3, 17)], [random_ids(n, 50 + n) for n in (1, 8, 1)]
    rows = [packed.new_row() for _ in texts]
    packed.forward(texts, rows, num_logits=0)
    for text, end, one in zip(texts, more, packed.forward(more, rows), strict=True):
        want = fresh(exact, torch.cat([text, end]))[-len(end) :]
        assert one.logits_TV.dtype == dtype
        assert float((one.logits_TV.double() - want).norm() / want.norm()) < limit


def test_rows_of_all_lengths_in_one_forward_in_any_order() -> None:
    """One position, blocks, a prompt's first chunk and a later one: each path of attention beside the others."""
    target = make(max_position_embeddings=256)
    before, lengths = [5, 0, 60, 0, 1, 33, 9], [1, 40, 50, 8, 1, 33, 8]
    texts = [random_ids(n + m, n + m) for n, m in zip(before, lengths, strict=True)]
    rows = [target.new_row() for _ in texts]
    for row, text, n in zip(rows, texts, before, strict=True):
        if n:
            target.forward([text[:n]], [row])
    ends = [text[n:] for text, n in zip(texts, before, strict=True)]
    for text, m, one in zip(texts, lengths, target.forward(ends, rows, num_logits=4), strict=True):
        same(one.logits_TV, fresh(target, text)[-min(m, 4) :])
        assert one.taps_TNE.shape[0] == m
    assert [row.num_positions for row in rows] == [len(text) for text in texts]


def test_a_row_holds_what_the_formula_says() -> None:
    target = make(max_position_embeddings=4096)
    row, per_position = target.new_row(), 4 * 2 * 2 * 8 * 8  # layers, keys and values, kv heads, width, float64
    assert row.num_bytes == 0
    target.forward([random_ids(3000)], [row], num_logits=0)
    assert row.num_bytes == per_position * capacity(3000) <= per_position * 3000 * 1.07
    room = row.num_bytes
    for step in range(40):
        target.forward([random_ids(7, step)], [row], num_logits=0)
        at = row.num_positions
        assert row.num_bytes == (per_position * capacity(3189) if at > capacity(3000) else room)
    assert at > capacity(3000) == 3187
    assert target.copy(row, 100).num_bytes == per_position * capacity(100) == per_position * 164
    target.free(row)
    assert row.num_bytes == 0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_is_the_root_mean_square_also_of_lopsided_rows(scale: float) -> None:
    x = torch.randn(5, 33, dtype=torch.float64) * scale
    x[1] += 30 * scale
    x[2, 4] = 1e3 * scale
    weight = torch.randn(33, dtype=torch.float64)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x_low, weight_low = x.to(dtype), weight.to(dtype)
        want = F.rms_norm(x_low.double(), (33,), weight_low.double(), 1e-5)
        got = Norm(weight_low, 1e-5)(x_low)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)


# ---- 8-bit weights ---------------------------------------------------------------------------------------------------
def rounded_model() -> Any:
    """The tiny model with every matrix that is multiplied on the grid of its rows; the embedding as it is."""
    model = tiny_model("llama", attention_bias=True).float()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                step = module.weight.abs().amax(dim=1, keepdim=True) / 127
                module.weight.copy_((module.weight / step).round() * step)
    return model


@needs_int8
def test_int8_is_the_model_of_the_rounded_weights_and_says_how_far_it_is() -> None:
    plain = tiny_model("llama", attention_bias=True).float()
    target = FusedTarget(plain, HFTarget(plain).facts, TAPS, pack=False, weights="int8")
    ids = random_ids(40)
    row = target.new_row()
    got = torch.cat([target.forward([part], [row])[0].logits_TV for part in ids.split([17, 1, 8, 14])])
    want = rounded_model()(input_ids=ids[None]).logits[0].detach()
    torch.testing.assert_close(got, want, atol=2e-3 * float(want.abs().max()), rtol=0)
    exact = plain(input_ids=ids[None]).logits[0].detach()
    error = float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
    assert 1e-3 < error < 0.1  # another model, by a little
    torch.testing.assert_close(target.embed(ids), plain.get_input_embeddings().weight[ids].detach())


@needs_int8
def test_int8_weights_are_asked_for_by_name_or_refused(tmp_path: Path) -> None:
    tiny_model("llama").float().save_pretrained(tmp_path / "llama")
    tiny_model("mistral").float().save_pretrained(tmp_path / "mistral")
    ids = random_ids(9)

    def logits(**options: Any) -> Tensor:
        target: Any = load_target(tmp_path / "llama", dtype=torch.float32, **options)
        return fresh(target, ids)

    plain, int8 = logits(), logits(weights="int8")
    assert not torch.equal(plain, int8)
    torch.testing.assert_close(int8, plain, atol=0.05 * float(plain.abs().max()), rtol=0)
    with pytest.raises(RequestError, match="weights is 'int4'; allowed is \"int8\""):
        logits(weights="int4")
    with pytest.raises(UnavailableError, match="fused=False was given"):
        logits(weights="int8", fused=False)
    with pytest.raises(UnavailableError, match="'mistral' has none"):
        load_target(tmp_path / "mistral", weights="int8")
