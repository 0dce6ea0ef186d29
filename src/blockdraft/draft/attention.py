"""Grouped-query attention of a block over [committed context, block].

Owns the projections, the visibility rule and the attention of one row. The context enters only as keys and
values made from the fused taps; the block's own keys and values are joined to them for one call and stored
nowhere. Knows config only: not where keys and values are kept, not how many rows a caller serves.

Letters: B rows, C newly committed positions, L block length, S context positions at hand, D draft width, H
query heads, K kv heads, A head width, P = H / K query heads per kv head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import DraftConfig, LayerConfig
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotation, rotate

__all__ = ["Attention", "attend_row", "visible"]


class Attention(nn.Module):
    """The projections of one layer. The same key and value weights read the context and the block."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        shape, width = config.attention, config.hidden_size
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * shape.head_dim, bias=shape.has_bias)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * shape.head_dim, bias=shape.has_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, width, bias=shape.has_bias)
        self.q_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, config.rms_norm_eps)

    def query(self, x_LD: Tensor, rotation: Rotation) -> Tensor:
        """q_LHA of the rows of ``x_LD``; any leading axes."""
        q_LHA = self.q_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(q_LHA), rotation)

    def key_value(self, x_LD: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """(k_LKA, v_LKA) of context features or of block rows; any leading axes."""
        k_LKA = self.k_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        v_LKA = self.v_proj(x_LD).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k_LKA), rotation), v_LKA


def visible(query_positions_L: Tensor, key_positions_S: Tensor, layer: LayerConfig) -> Tensor:
    """Whether query row i may see key j, bool [..., L, S]: the one visibility rule, context and block
    alike.
    """
    back = query_positions_L[..., :, None] - key_positions_S[..., None, :]
    if layer.is_causal:
        seen = back >= 0
        return seen if layer.window is None else seen & (back < layer.window)
    if layer.window is None:
        return torch.ones_like(back, dtype=torch.bool)
    return back.abs() < layer.window


@lru_cache(maxsize=16)
def _row_mask(layer: LayerConfig, num_context: int, length: int, groups: int, device: torch.device) -> Tensor | None:
    """Mask [P*L, S+L] of a block right after ``num_context`` kept positions; None where everything is
    visible.
    """
    if not layer.is_causal and (layer.window is None or num_context + length <= layer.window):
        return None
    positions = torch.arange(-num_context, length, device=device)
    return visible(positions[num_context:], positions, layer).repeat(groups, 1)


def attend_row(
    q_LHA: Tensor, k_LKA: Tensor, v_LKA: Tensor, context_KSA: tuple[Tensor, Tensor], layer: LayerConfig
) -> Tensor:
    """out_LHA of one block that stands directly behind its context (the last S committed positions)."""
    length, num_heads, width = q_LHA.shape
    num_kv_heads = k_LKA.shape[1]
    groups = num_heads // num_kv_heads
    keys, values = context_KSA
    k_KTA = torch.cat((keys, k_LKA.transpose(0, 1)), dim=1)
    v_KTA = torch.cat((values, v_LKA.transpose(0, 1)), dim=1)
    # The query heads of one kv head become rows, so that keys are read once and never repeated.
    q_KPLA = q_LHA.view(length, num_kv_heads, groups, width).permute(1, 2, 0, 3)
    mask = _row_mask(layer, keys.shape[1], length, groups, q_LHA.device)
    out = F.scaled_dot_product_attention(
        q_KPLA.reshape(1, num_kv_heads, groups * length, width), k_KTA[None], v_KTA[None], attn_mask=mask
    )
    out_LHA = out.view(num_kv_heads, groups, length, width).permute(2, 0, 1, 3)
    return out_LHA.reshape(length, num_heads, width)
