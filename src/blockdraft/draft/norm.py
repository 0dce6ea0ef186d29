"""Root-mean-square norm in the Qwen3 convention. Knows nothing beyond torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["RMSNorm", "wide_dtype"]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which norms and rotary angles of a model in ``dtype`` are computed: at least
    float32.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """Normalise the last axis in wide precision, go back to the input's precision, then multiply by the
    weight.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        shape = self.weight.shape
        wide = wide_dtype(x.dtype)
        if x.dtype == wide and self.weight.dtype == wide:
            return F.rms_norm(x, shape, self.weight, self.eps)
        return self.weight * F.rms_norm(x.to(wide), shape, None, self.eps).to(x.dtype)
