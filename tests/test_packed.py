"""Packed linear layers: same numbers as nn.Linear, honest state, no silent gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blockdraft.packed import PackedLinear, can_pack, pack_linears_

pytestmark = pytest.mark.skipif(not can_pack(nn.Linear(2, 2)), reason="this torch build has no oneDNN")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.again = self.first
        self.blocks = nn.ModuleList([nn.Linear(64, 33, bias=False), nn.Sequential(nn.Linear(33, 5), nn.ReLU())])
        self.wide = nn.Linear(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "shape", [(96,), (1, 96), (8, 96), (2, 3, 96), (0, 96), (17, 96), (64, 96), (70, 96), (2, 0, 96)]
)
def test_same_result(bias: bool, dtype: torch.dtype, limit: float, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias).to(dtype)
    if not can_pack(linear):
        pytest.skip("no bfloat16 kernels on this machine")
    packed = PackedLinear(linear, rows_hint=8)
    x = torch.randn(shape, dtype=dtype)
    with torch.no_grad():
        want, got = linear(x), packed(x)
    assert got.shape == want.shape and got.dtype == dtype
    torch.testing.assert_close(got, want, atol=limit, rtol=limit)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_what_is_done_to_the_product(bias: bool, dtype: torch.dtype, limit: float, rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias).to(dtype)
    if not can_pack(linear):
        pytest.skip("no bfloat16 kernels on this machine")
    packed = PackedLinear(linear, rows_hint=8)
    x, other = torch.randn(rows, 2 * 96).to(dtype)[:, :96], torch.randn(rows, 40).to(dtype)
    kept = other.clone()
    with torch.no_grad():
        plain = linear.double()(x.double())
        for got, want in (
            (packed.plus(x, other), plain + other.double()),
            (packed.times(x, other), plain * other.double()),
            (packed.silu(x), nn.functional.silu(plain)),
        ):
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit)
    assert torch.equal(other, kept)


def test_non_contiguous_input() -> None:
    linear = nn.Linear(24, 10)
    packed = PackedLinear(linear, rows_hint=8)
    x = torch.randn(24, 7).t()
    part = torch.randn(4, 5, 40)[:, 1:4, 3:27]
    with torch.no_grad():
        torch.testing.assert_close(packed(x), linear(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed(part), linear(part), atol=1e-5, rtol=1e-5)


def test_walk_counts_shares_and_leaves_alone() -> None:
    module = Shared()
    weight = module.first.weight.detach().clone()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert pack_linears_(module) == 3
    assert isinstance(module.first, PackedLinear) and module.first is module.again
    assert type(module.wide) is nn.Linear
    assert torch.equal(module.first.weight, weight)
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert pack_linears_(module) == 0


def test_misuse_is_loud() -> None:
    module = nn.Sequential(nn.Linear(8, 8))
    state = module.state_dict()
    pack_linears_(module)
    with pytest.raises(RuntimeError, match="no gradient"):
        module(torch.randn(2, 8, requires_grad=True))
    with pytest.raises(RuntimeError, match="then pack"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match="then pack"):
        module.to(torch.bfloat16)
    module.to(torch.float32)
