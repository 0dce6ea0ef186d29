"""The dynamic block convolution: its formula, its identity start, its edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdraft.config import ConvConfig, LayerConfig
from blockdraft.draft.conv import BlockConv, convolve
from test_draft_cache import LAYOUTS, filled, make_model, make_noise, make_taps

WIDTH, GROUP = 24, 8


def make_conv(taps: int) -> BlockConv:
    torch.manual_seed(taps)
    conv = BlockConv(WIDTH, ConvConfig(kernel_size=taps, group_size=GROUP)).double().requires_grad_(False)
    for parameter in conv.parameters():
        parameter.normal_()
    return conv


def by_loop(conv: BlockConv, u: Tensor, x: Tensor, side: int) -> Tensor:
    dynamic = (u @ conv.kernel_projection.weight.T).view(*u.shape[:2], 2, conv.kernel_size, WIDTH // GROUP)
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for c in range(WIDTH):
                for tap in range(conv.kernel_size):
                    if t - tap >= 0:
                        kernel = conv.base_kernel[side, tap, c] + dynamic[b, t, side, tap, c // GROUP]
                        out[b, t, c] += kernel * x[b, t - tap, c]
    return out


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_formula(taps: int, length: int) -> None:
    conv = make_conv(taps)
    u, x = torch.randn(2, 2, length, WIDTH, dtype=torch.float64)
    for side, kernel in enumerate(conv.kernels(u)):
        torch.testing.assert_close(convolve(x, kernel), by_loop(conv, u, x, side), atol=1e-12, rtol=1e-12)


def test_length_one_uses_tap_zero_only() -> None:
    conv = make_conv(3)
    u, x = torch.randn(2, 1, 1, WIDTH, dtype=torch.float64)
    before, _ = conv.kernels(u)
    changed = conv.base_kernel.clone()
    changed[:, 1:] = 1e6
    conv.base_kernel.copy_(changed)
    assert torch.equal(convolve(x, before), convolve(x, conv.kernels(u)[0]))
    dynamic = (u @ conv.kernel_projection.weight.T).view(2, 3, -1)[0, 0].repeat_interleave(GROUP)
    torch.testing.assert_close(convolve(x, before)[0, 0], (conv.base_kernel[0, 0] + dynamic) * x[0, 0])


def test_identity_start() -> None:
    conv = make_conv(2)
    conv.reset_to_identity()
    u, x = torch.randn(2, 3, 5, WIDTH, dtype=torch.float64)
    for kernel in conv.kernels(u):
        assert torch.equal(convolve(x, kernel), x)


def test_rows_never_reach_another_block_or_back_in_time() -> None:
    conv = make_conv(2)
    u, x = torch.randn(2, 3, 4, WIDTH, dtype=torch.float64)
    base = convolve(x, conv.kernels(u)[0])
    moved = x.clone()
    moved[1, 2] += 1.0
    change = (convolve(moved, conv.kernels(u)[0]) - base).abs().amax(-1) > 0
    assert change.nonzero().tolist() == [[1, 2], [1, 3]]


@pytest.mark.parametrize("name", ["full", "default mix"])
def test_identity_convolutions_are_v1(name: str) -> None:
    """DFlash 2 with identity convolutions has exactly the hidden rows of DFlash with the same weights."""
    second, first = make_model(LAYOUTS[name]), make_model(LAYOUTS[name], is_v2=False)
    for module in second.modules():
        if isinstance(module, BlockConv):
            module.reset_to_identity()
    kept = {k: v for k, v in second.state_dict().items() if "_conv." not in k and "candidate_selector" not in k}
    first.load_state_dict(kept, strict=True)
    taps, noise = make_taps(9), make_noise(1, 8)
    hidden = [model(noise, [filled(model, taps, [9])]) for model in (first, second)]
    torch.testing.assert_close(hidden[0], hidden[1], atol=1e-13, rtol=1e-13)


def test_gradients() -> None:
    conv = make_conv(2).requires_grad_(True)
    u, x = (torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(
        lambda u, x: convolve(convolve(u, conv.kernels(u)[0]) * x, conv.kernels(u)[1]), (u, x)
    )


def test_block_of_one_row_runs() -> None:
    model = make_model([LayerConfig(is_causal=False, window=None)])
    assert model(make_noise(1, 1), [filled(model, make_taps(3), [3])]).shape == (1, 1, 32)
