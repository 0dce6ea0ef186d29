"""Anchors, block labels and the attention of many blocks over one context at once.

Owns what a block may see in training: context strictly before its anchor, and its own rows (the anchor's target
state does not exist yet when the draft is served). The maths of a block is the draft's own; this file knows no
losses and no files.

Letters: B sequences, S context positions, K blocks per sequence, X = B*K, L block length, T = S + L, H query heads,
J kv heads, A width of queries and keys, W width of values, N taps, E target width, D draft width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import LayerConfig
from blockdraft.draft.attention import visible
from blockdraft.draft.model import Attend, DraftModel
from blockdraft.draft.norm import wide_dtype
from blockdraft.train.attend import attend_densely, attend_flexibly, flex_mask

__all__ = [
    "Blocks",
    "block_attention",
    "block_hidden",
    "block_masks",
    "sample_blocks",
    "step_generator",
    "written_mask",
]


@dataclass(frozen=True, slots=True)
class Blocks:
    """K blocks of each of B sequences.

    anchors_BK    position of each anchor
    ids_BKL       the block's true tokens, anchor first (0 where the sequence has ended)
    weights_BKL   1 where row l predicts a token that the target wrote, and so do all rows before it; row 0 is always 0
    """

    anchors_BK: Tensor
    ids_BKL: Tensor
    weights_BKL: Tensor

    @property
    def positions_BKL(self) -> Tensor:
        """Position of every row: the anchor's, and on."""
        return self.anchors_BK[..., None] + torch.arange(self.ids_BKL.shape[-1], device=self.anchors_BK.device)


def written_mask(prompt_len_B: Tensor, len_B: Tensor, num_positions: int) -> Tensor:
    """written_BS of sequences whose target wrote everything behind the prompt."""
    positions_S = torch.arange(num_positions, device=len_B.device)
    return (positions_S >= prompt_len_B[:, None]) & (positions_S < len_B[:, None])


def sample_blocks(
    ids_BS: Tensor,
    written_BS: Tensor,
    *,
    num_blocks: int,
    block_size: int,
    generators: Sequence[torch.Generator],
) -> Blocks:
    """Blocks at anchors drawn without regard to the block's end; rows past the target's own text have weight 0.

    An anchor is a token that the target wrote and that another one of its own follows. Where a sequence has fewer than
    `num_blocks` of them they repeat; one that has none gives blocks of weight 0. Each sequence has its own generator,
    which lies on the CPU.
    """
    num_positions = ids_BS.shape[1]
    may_start_BS = F.pad(written_BS[:, :-1] & written_BS[:, 1:], (0, 1)).cpu()
    rows = [
        _draw(may_start_S.nonzero()[:, 0], num_blocks, generator)
        for may_start_S, generator in zip(may_start_BS, generators, strict=True)
    ]
    anchors_BK = torch.stack(rows).to(ids_BS.device)
    positions_BKL = anchors_BK[..., None] + torch.arange(block_size, device=ids_BS.device)
    flat = positions_BKL.clamp_max(num_positions - 1).flatten(1)
    exists_BKL = positions_BKL < num_positions
    ids_BKL = ids_BS.gather(1, flat).view_as(positions_BKL).where(exists_BKL, 0)
    written_BKL = written_BS.gather(1, flat).view_as(positions_BKL) & exists_BKL
    weights_BKL = written_BKL.float().cumprod(-1)
    weights_BKL[..., 0] = 0
    return Blocks(anchors_BK, ids_BKL, weights_BKL)


def _draw(candidates: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` candidates in rising order, each as often as any other or once more; zeros where there are none."""
    if not len(candidates):
        return torch.zeros(count, dtype=torch.long)
    order = torch.randperm(len(candidates), generator=generator)
    return candidates[order.repeat(-(-count // len(order)))[:count]].sort().values


def step_generator(seed: int, step: int, place: int) -> torch.Generator:
    """Randomness of the sequence at `place` of a step: the same whichever process it falls to, and after a resume."""
    mixed = hashlib.blake2b(f"{seed} {step} {place}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "big"))


def block_hidden(model: DraftModel, embed_VE: Tensor, taps_BSNE: Tensor, blocks: Blocks) -> Tensor:
    """hidden_XLD of every block after the final norm, as serving would compute it; gradients flow.

    `embed_VE` is the target's input embedding. Taps at and past an anchor are never read for its block.
    """
    length = blocks.ids_BKL.shape[-1]
    context_BSD = model.fuse(taps_BSNE.to(model.dtype))
    positions_S = torch.arange(context_BSD.shape[1], device=context_BSD.device)
    context = [model.context_kv(i, context_BSD, positions_S) for i in range(model.config.num_layers)]
    anchor_ids_X = blocks.ids_BKL[..., 0].flatten()
    noise_XLD = model.noise(anchor_ids_X, length, lambda ids: F.embedding(ids, embed_VE))
    attend = block_attention(model.config.layers, context, blocks, model.config.softmax_scale)
    return model.block_forward(noise_XLD, blocks.positions_BKL.view(-1, length), attend)


def block_masks(layer: LayerConfig, blocks: Blocks, num_context: int) -> tuple[Tensor, Tensor]:
    """(to_context_BKLS, inside_LL): what each row of each block may see, True = visible."""
    device = blocks.anchors_BK.device
    rows_L = torch.arange(blocks.ids_BKL.shape[-1], device=device)
    key_S = torch.arange(num_context, device=device)
    before_anchor = key_S < blocks.anchors_BK[..., None, None]
    return before_anchor & visible(blocks.positions_BKL, key_S, layer), visible(rows_L, rows_L, layer)


def block_attention(
    layers: tuple[LayerConfig, ...], context: list[tuple[Tensor, Tensor]], blocks: Blocks, scale: float
) -> Attend:
    """The attention closure for training: every block sees its own sequence before its anchor, and itself.

    `context[i]` holds layer i's keys [B, S, J, A] and values [B, S, J, W] of the whole sequence. The closure takes
    q [X, L, H, A] and the blocks' own k [X, L, J, A] and v [X, L, J, W] and returns [X, L, H, W].
    """
    num_context, device = context[0][0].shape[1], context[0][0].device
    masks: dict[LayerConfig, Any]
    run: Callable[..., Tensor]
    if device.type == "cuda":
        length = blocks.ids_BKL.shape[-1]
        masks = {layer: flex_mask(layer, blocks.anchors_BK, length, num_context) for layer in set(layers)}
        run = attend_flexibly
    else:
        dtype = wide_dtype(context[0][0].dtype)
        masks = {layer: _additive(block_masks(layer, blocks, num_context), dtype) for layer in set(layers)}
        run = attend_densely

    def attend(index: int, q_XLHA: Tensor, k_XLJA: Tensor, v_XLJW: Tensor) -> Tensor:
        return run(q_XLHA, (k_XLJA, v_XLJW), context[index], masks[layers[index]], scale)

    return attend


def _additive(masks: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """mask_BKLT of [context | own block]: 0 where a key is seen, else minus infinity."""
    to_context_BKLS, inside_LL = masks
    seen_BKLT = torch.cat((to_context_BKLS, inside_LL.expand(*to_context_BKLS.shape[:2], -1, -1)), dim=-1)
    return torch.zeros(seen_BKLT.shape, dtype=dtype, device=seen_BKLT.device).masked_fill_(~seen_BKLT, -torch.inf)
