"""The routed experts of one layer: three stacks of matrices, as they are or in MXFP4.

MXFP4 is 4-bit floats (sign, two bits of exponent, one of mantissa), two to a byte with the first in the low half, and
for every 32 of a row a scale that is a power of two, stored as its exponent + 127. Reading it is exact. Packed experts
stay packed in memory; a matrix is unpacked when a token goes to its expert.

Letters: X experts, O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import MXFP4_GROUP

__all__ = ["MATRICES", "Experts", "unpacked"]

MATRICES = ("w1", "w2", "w3")  # gate, down, up
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int, intermediate_size: int, *, is_packed: bool) -> None:
        super().__init__()
        self.is_packed = is_packed
        for name in MATRICES:
            rows, columns = (width, intermediate_size) if name == "w2" else (intermediate_size, width)
            if is_packed:
                for part, share in (("packed", 2), ("scale", MXFP4_GROUP)):
                    stack = torch.zeros((num_experts, rows, columns // share), dtype=torch.uint8)
                    self.register_parameter(f"{name}_{part}", nn.Parameter(stack, requires_grad=False))
            else:
                stack = torch.randn(num_experts, rows, columns) * columns**-0.5
                self.register_parameter(name, nn.Parameter(stack))

    def matrix(self, name: str, expert: int, dtype: torch.dtype) -> Tensor:
        """[O, I] of one expert."""
        if not self.is_packed:
            plain_XOI: Tensor = getattr(self, name)
            return plain_XOI[expert]
        return unpacked(getattr(self, f"{name}_packed")[expert], getattr(self, f"{name}_scale")[expert], dtype)


def unpacked(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] of MXFP4 bytes [O, I / 2] and scales [O, I / 32]."""
    values = torch.tensor((*_MAGNITUDES, *(-m for m in _MAGNITUDES)), dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    factors = torch.exp2(scale.to(torch.float32) - _SCALE_BIAS).repeat_interleave(MXFP4_GROUP, dim=-1)
    return (values[codes] * factors).to(dtype)
