"""Anchors, block labels and the attention of many blocks over one context at once.

Owns what a block may see in training: context strictly before its anchor, and its own rows (spec: the anchor's
target hidden state does not exist yet when the draft is served). The maths of a block is the draft's.

Letters: B sequences, S context positions, K blocks per sequence, L block length, H query heads, J kv heads, A head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.config import LayerConfig

__all__ = ["Blocks", "block_attention", "sample_blocks", "visible"]


@dataclass(frozen=True, slots=True)
class Blocks:
    """K blocks of each of B sequences.

    anchors_BK    position of each anchor
    ids_BKL       the block's true tokens, anchor first (0 where the sequence has ended)
    weights_BKL   1 where row l predicts a token that the target wrote, else 0; row 0 is always 0
    """

    anchors_BK: Tensor
    ids_BKL: Tensor
    weights_BKL: Tensor

    @property
    def positions_BKL(self) -> Tensor:
        return self.anchors_BK[..., None] + torch.arange(self.ids_BKL.shape[-1])


def sample_blocks(
    ids_BS: Tensor, prompt_len_B: Tensor, len_B: Tensor, *, num_blocks: int, block_size: int, generator: torch.Generator
) -> Blocks:
    """Blocks at anchors drawn without regard to the block's end; labels past the sequence have weight 0.

    An anchor is a token that the target wrote and that is not the sequence's last one. Where a sequence has fewer
    than `num_blocks` anchors they repeat.
    """
    num_rows, num_positions = ids_BS.shape
    anchors_BK = torch.empty(num_rows, num_blocks, dtype=torch.long)
    for row in range(num_rows):
        first, last = int(prompt_len_B[row]), int(len_B[row]) - 2
        count = last - first + 1
        order = torch.randperm(count, generator=generator)
        picked = order.repeat(-(-num_blocks // count))[:num_blocks]
        anchors_BK[row] = picked.sort().values + first
    positions_BKL = anchors_BK[..., None] + torch.arange(block_size)
    exists_BKL = positions_BKL < len_B[:, None, None]
    flat = positions_BKL.clamp_max(num_positions - 1).view(num_rows, -1)
    ids_BKL = ids_BS.gather(1, flat).view_as(positions_BKL).where(exists_BKL, 0)
    weights_BKL = exists_BKL.float()
    weights_BKL[..., 0] = 0
    return Blocks(anchors_BK, ids_BKL, weights_BKL)


def visible(query_positions: Tensor, key_positions: Tensor, layer: LayerConfig) -> Tensor:
    """Whether a key at its position may be seen from a query at its position, in one draft layer (broadcasting)."""
    distance = query_positions - key_positions
    seen = torch.ones_like(distance, dtype=torch.bool)
    if layer.is_causal:
        seen &= distance >= 0
    if layer.window is not None:
        seen &= distance < layer.window
        if not layer.is_causal:
            seen &= -distance < layer.window
    return seen


def block_attention(
    layers: tuple[LayerConfig, ...], context: list[tuple[Tensor, Tensor]], blocks: Blocks, scale: float
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """The attention closure for training: every block sees its own sequence's context before its anchor, and itself.

    `context[i]` holds layer i's keys and values [B, S, J, A] of the whole sequence. The closure takes q [B*K, L, H, A]
    and the block's own k, v [B*K, L, J, A] and returns [B*K, L, H, A]. The (B*K)^2 block-by-block part is never built.
    """
    num_rows, num_blocks, length = blocks.ids_BKL.shape
    query_BKL = blocks.positions_BKL
    masks: dict[LayerConfig, tuple[Tensor, Tensor]] = {}

    def mask_of(layer: LayerConfig, num_context: int) -> tuple[Tensor, Tensor]:
        if layer not in masks:
            key_S = torch.arange(num_context)
            before_anchor = key_S < blocks.anchors_BK[..., None, None]
            to_context_BKLS = before_anchor & visible(query_BKL[..., None], key_S, layer)
            inside_LL = visible(torch.arange(length)[:, None], torch.arange(length), layer)
            masks[layer] = (
                torch.zeros(to_context_BKLS.shape).masked_fill(~to_context_BKLS, -torch.inf),
                torch.zeros(length, length).masked_fill(~inside_LL, -torch.inf),
            )
        return masks[layer]

    def attend(index: int, q_XLHA: Tensor, k_XLJA: Tensor, v_XLJA: Tensor) -> Tensor:
        keys_BSJA, values_BSJA = context[index]
        num_heads, width = q_XLHA.shape[-2:]
        num_kv = k_XLJA.shape[-2]
        group = num_heads // num_kv
        context_mask_BKLS, inside_mask_LL = mask_of(layers[index], keys_BSJA.shape[1])
        q = q_XLHA.view(num_rows, num_blocks, length, num_kv, group, width)
        k = k_XLJA.view(num_rows, num_blocks, length, num_kv, width)
        v = v_XLJA.view(num_rows, num_blocks, length, num_kv, width)
        q_ctx = q.permute(0, 3, 1, 2, 4, 5).reshape(num_rows, num_kv, num_blocks * length * group, width)
        ctx_scores = q_ctx @ keys_BSJA.permute(0, 2, 3, 1)
        ctx_scores = ctx_scores.view(num_rows, num_kv, num_blocks, length, group, -1).float() * scale
        ctx_scores = ctx_scores + context_mask_BKLS[:, None, :, :, None]
        q_blk = q.permute(0, 3, 1, 2, 4, 5).reshape(num_rows, num_kv, num_blocks, length * group, width)
        blk_scores = q_blk @ k.permute(0, 3, 1, 4, 2)
        blk_scores = blk_scores.view(num_rows, num_kv, num_blocks, length, group, length).float() * scale
        blk_scores = blk_scores + inside_mask_LL[:, None]
        probs = torch.softmax(torch.cat([ctx_scores, blk_scores], -1), -1).to(values_BSJA.dtype)
        ctx_probs, blk_probs = probs.split([ctx_scores.shape[-1], length], -1)
        out = ctx_probs.reshape(num_rows, num_kv, num_blocks * length * group, -1) @ values_BSJA.transpose(1, 2)
        out = out.view(num_rows, num_kv, num_blocks, length, group, width)
        own = blk_probs.reshape(num_rows, num_kv, num_blocks, length * group, length) @ v.permute(0, 3, 1, 2, 4)
        out = out + own.view_as(out)
        return out.permute(0, 2, 3, 1, 4, 5).reshape(num_rows * num_blocks, length, num_heads, width)

    return attend
