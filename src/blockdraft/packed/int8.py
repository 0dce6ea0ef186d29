"""Linear layers with weights of 8 bits, one scale for each output: half the bytes of bfloat16, a quarter of float32.

Only the weights are rounded. What they are multiplied by goes in as two whole numbers of 8 bits, a coarse one and the
rest of it, under one scale for each row: about 15 bits. The products are summed as integers, so that a row's result
does not depend on the rows beside it, to the last bit.

Letters: F rows, K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from blockdraft.packed.linear import Separately

__all__ = ["Int8Linear", "can_multiply_int8"]

_MOST = 127
_REST = 2 * _MOST  # the coarse number is off by at most 1/2


class Int8Linear(Separately):
    """A stand-in for one ``nn.Linear`` on the CPU, without gradients."""

    def __init__(self, linear: nn.Linear) -> None:
        weight_NK = linear.weight.detach().float()
        largest_N = weight_NK.abs().amax(dim=1)
        self.scale_N = torch.where(largest_N > 0, largest_N, 1.0) / _MOST
        whole_NK = (weight_NK / self.scale_N[:, None]).round().to(torch.int8)
        self._zero_N = torch.zeros(weight_NK.shape[0], dtype=torch.int32)
        self._packed = torch.ops.onednn.qlinear_prepack(whole_NK, None)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        x_FK = x.flatten(0, -2) if x.dim() > 2 else x
        if x_FK.shape[0] == 0:
            return x.new_empty((*x.shape[:-1], len(self.scale_N)))
        largest_F1 = torch.linalg.vector_norm(x_FK, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
        both_2FK = torch.empty((2, *x_FK.shape))
        # a row of zeros stays one; NaN and infinity make the whole row NaN, by its scale
        scaled_FK = x_FK * (_MOST / largest_F1.clamp_min(torch.finfo(torch.float32).tiny))
        torch.round(scaled_FK, out=both_2FK[0])
        torch.sub(scaled_FK, both_2FK[0], out=both_2FK[1]).mul_(_REST).round_()
        y_2FN = self._multiply(both_2FK.to(torch.int8).flatten(0, 1)).unflatten(0, (2, -1))
        y_FN = torch.add(y_2FN[0], y_2FN[1], alpha=1 / _REST).mul_(largest_F1 / _MOST).to(x.dtype)
        if self.bias is not None:
            y_FN += self.bias
        return y_FN.unflatten(0, x.shape[:-1]) if x.dim() > 2 else y_FN

    def _multiply(self, whole_FK: Tensor) -> Tensor:
        """float32 [F, N] of whole numbers, times the scales of the outputs."""
        y_FN: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole_FK, 1.0, 0, self._packed, self.scale_N, self._zero_N, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y_FN


@cache
def can_multiply_int8() -> bool:
    """Whether this build and CPU sum products of 8-bit numbers exactly; without VNNI some saturate on the way."""
    try:
        layer = nn.Linear(256, 16, bias=False)
        signs = torch.ones(256)
        signs[::3] = -1
        with torch.no_grad():
            layer.weight.copy_(_MOST * signs)
        whole_FK = torch.stack((signs, -signs, torch.ones(256))).mul(_MOST).to(torch.int8)
        want_FN = whole_FK.double() @ layer.weight.detach().double().T
        return torch.equal(Int8Linear(layer)._multiply(whole_FK).double(), want_FN)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
