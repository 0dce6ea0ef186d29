"""Grouped-query attention: H query heads share K key-value heads. Knows config only.

Letters: L rows, D draft width, H query heads, K kv heads, A head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from blockdraft.config import GqaConfig
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotation, rotate

__all__ = ["GroupedQueryAttention"]


class GroupedQueryAttention(nn.Module):
    """The projections of one layer; `absorbed` makes no difference, keys and values are kept as they are."""

    def __init__(self, shape: GqaConfig, width: int, eps: float) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * shape.head_dim, bias=shape.has_bias)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, width, bias=shape.has_bias)
        self.q_norm = RMSNorm(shape.head_dim, eps)
        self.k_norm = RMSNorm(shape.head_dim, eps)

    def query(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> Tensor:
        """q_LHA of block rows."""
        q_LHA = self.q_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q_LHA), rotation)

    def key_value(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> tuple[Tensor, Tensor]:
        """(k_LKA, v_LKA) of context features or of block rows."""
        k_LKA = self.k_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        v_LKA = self.v_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k_LKA), rotation), v_LKA

    def output(self, out_LHA: Tensor, *, absorbed: bool) -> Tensor:
        """x_LD of what the heads gathered."""
        x_LD: Tensor = self.o_proj(out_LHA.flatten(-2))
        return x_LD
