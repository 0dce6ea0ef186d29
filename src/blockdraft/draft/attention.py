"""What every attention of a draft has in common: the visibility rule, and one block over [context, block].

Owns the rule, the attention of one row, and the protocol that grouped-query attention (`gqa`) and latent
attention (`mla`) follow. The context enters only as keys and values made from the fused taps; the block's own
are joined to them for one call and stored nowhere. Knows config only: not where keys and values are kept, not
how many rows a caller serves.

Letters: C newly committed positions, L block length, S context positions at hand, D draft width, H query
heads, K kv heads, A width of queries and keys, W width of values, P = H / K query heads per kv head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from blockdraft.config import LayerConfig
from blockdraft.draft.rope import Rotation

__all__ = ["Attention", "attend_row", "visible"]


class Attention(Protocol):
    """The projections of one layer. The same key and value weights read the context and the block.

    An attention may have a second form, `absorbed`, of the same function: the one whose keys and values are
    small enough to keep. The draft's cache holds that form, training uses the other. Any leading axes.
    """

    def query(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> Tensor:
        """q_LHA of block rows."""
        ...

    def key_value(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> tuple[Tensor, Tensor]:
        """(k_LKA, v_LKW) of context features or of block rows."""
        ...

    def output(self, out_LHW: Tensor, *, absorbed: bool) -> Tensor:
        """x_LD of what the heads gathered."""
        ...


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
    q_LHA: Tensor,
    k_LKA: Tensor,
    v_LKW: Tensor,
    context_KS: tuple[Tensor, Tensor],
    layer: LayerConfig,
    scale: float,
) -> Tensor:
    """out_LHW of one block that stands directly behind its context, (k_KSA, v_KSW) of the last S committed
    positions.
    """
    length, num_heads, width = q_LHA.shape
    num_kv_heads = k_LKA.shape[1]
    groups = num_heads // num_kv_heads
    keys, values = context_KS
    k_KTA = torch.cat((keys, k_LKA.transpose(0, 1)), dim=1)
    v_KTW = torch.cat((values, v_LKW.transpose(0, 1)), dim=1)
    # The query heads of one kv head become rows, so that keys are read once and never repeated.
    q_KPLA = q_LHA.view(length, num_kv_heads, groups, width).permute(1, 2, 0, 3)
    mask = _row_mask(layer, keys.shape[1], length, groups, q_LHA.device)
    out = F.scaled_dot_product_attention(
        q_KPLA.reshape(1, num_kv_heads, groups * length, width),
        k_KTA[None],
        v_KTW[None],
        attn_mask=mask,
        scale=scale,
    )
    out_LKPW = out.view(num_kv_heads, groups, length, -1).permute(2, 0, 1, 3)
    return out_LKPW.reshape(length, num_heads, -1)
