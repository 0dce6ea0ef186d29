"""8-bit weights: the layer of the rounded weights, whatever stands beside a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockdraft.packed import Int8Linear, can_multiply_int8

pytestmark = pytest.mark.skipif(not can_multiply_int8(), reason="no exact 8-bit products on this machine")


def made(num_inputs: int = 96, num_outputs: int = 40, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(num_inputs, num_outputs, bias=bias).requires_grad_(False)


def rounded(linear: nn.Linear) -> Tensor:
    """The weights on a grid of 255 steps for each output, written again, in float64."""
    rows = []
    for row in linear.weight.double():
        step = float(row.abs().max()) / 127 or 1.0
        rows.append(torch.tensor([round(float(x) / step) * step for x in row], dtype=torch.float64))
    return torch.stack(rows)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(1, 96), (8, 96), (2, 3, 96), (70, 96), (0, 96)])
def test_the_result_is_that_of_the_rounded_weights(
    bias: bool, dtype: torch.dtype, limit: float, shape: tuple[int, ...]
) -> None:
    linear = made(bias=bias)
    x = torch.randn(shape).to(dtype)
    if shape[0] > 1:
        x[1, ..., 5] = 300.0  # one large number in a row
    want = x.double() @ rounded(linear).T + (linear.bias.double() if bias else 0.0)
    got = Int8Linear(linear.to(dtype) if dtype == torch.float32 else linear)(x)
    assert got.dtype == dtype and got.shape == want.shape
    size = x.double().abs().amax(-1, keepdim=True).clamp_min(1) if len(x) else 1.0
    assert bool(((got.double() - want).abs() <= limit * size).all())


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    layer = Int8Linear(made(576, 100))
    x = torch.randn(300, 576)
    x[7] *= 1e4
    together = layer(x)
    for start, end in ((0, 1), (5, 9), (7, 8), (0, 64), (100, 300)):
        assert torch.equal(layer(x[start:end]), together[start:end])


def test_rows_of_zeros_and_broken_rows() -> None:
    layer = Int8Linear(made(bias=False))
    x = torch.randn(4, 96)
    clean = layer(x)
    x[1] = 0.0
    x[2, 3] = float("nan")
    x[3, 3] = float("inf")
    got = layer(x)
    assert torch.equal(got[0], clean[0]) and bool((got[1] == 0).all())
    assert bool(got[2].isnan().all()) and bool(got[3].isnan().all())
    linear = made()
    linear.weight[3] = 0.0
    assert bool((Int8Linear(linear)(torch.randn(2, 96))[:, 3] == 0).all())


def test_what_is_done_to_the_result() -> None:
    layer = Int8Linear(made())
    x, other = torch.randn(5, 96), torch.randn(5, 40)
    torch.testing.assert_close(layer.plus(x, other), layer(x) + other)
    torch.testing.assert_close(layer.times(x, other), layer(x) * other)
    torch.testing.assert_close(layer.silu(x), nn.functional.silu(layer(x)))
