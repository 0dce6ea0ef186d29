"""The grouped dynamic block convolution of DFlash 2. Knows config only.

A kernel is a learned base plus a part computed from the sublayer's normed input. Taps reach back inside the
block only: row 0 (the anchor) sees zeros, the context never enters.

Letters: B rows, L block length, D draft width, W taps (tap 0 = the row itself), U channel groups, Y
channels per group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.config import ConvConfig

__all__ = ["BlockConv", "convolve"]

_SIDES = 2  # before the sublayer, after it


class BlockConv(nn.Module):
    """One sublayer's pair of convolutions; both kernels come from the same input."""

    def __init__(self, width: int, conv: ConvConfig) -> None:
        super().__init__()
        self.kernel_size = conv.kernel_size
        self.group_size = conv.group_size
        self.base_kernel = nn.Parameter(torch.zeros(_SIDES, conv.kernel_size, width))
        num_kernels = _SIDES * conv.kernel_size * (width // conv.group_size)
        self.kernel_projection = nn.Linear(width, num_kernels, bias=False)

    def reset_to_identity(self) -> None:
        """Make both sides pass their input through."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def kernels(self, u_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels of both sides, each [B, L, W, U, Y], from the normed input of the sublayer."""
        dynamic = torch.unflatten(self.kernel_projection(u_BLD), -1, (_SIDES, self.kernel_size, -1, 1))
        base = torch.unflatten(self.base_kernel, -1, (-1, self.group_size)).to(dynamic.dtype)
        before, after = (dynamic + base).unbind(2)
        return before, after


def convolve(x_BLD: Tensor, kernel_BLWUY: Tensor) -> Tensor:
    """``x_BLD`` convolved inside each block: row t reads rows t, t-1, ... t-W+1 that exist."""
    x_BLUY = torch.unflatten(x_BLD, -1, kernel_BLWUY.shape[-2:])
    length = x_BLD.shape[1]
    taps = kernel_BLWUY.unbind(2)
    out = taps[0] * x_BLUY
    for back, tap_BLUY in enumerate(taps[1:length], start=1):
        out[:, back:].addcmul_(tap_BLUY[:, back:], x_BLUY[:, :-back])
    return out.flatten(-2)
