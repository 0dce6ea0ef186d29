"""Anchors, block labels and the attention of many blocks over one context at once.

Owns what a block may see in training: context strictly before its anchor, and its own rows (the anchor's target
state does not exist yet when the draft is served). The maths of a block is the draft's own; this file knows no
losses and no files.

Letters: B sequences, S context positions, K blocks per sequence, X = B*K, L block length, H query heads, J kv heads,
P = H / J query heads per kv head, A width of queries and keys, W width of values, N taps, E target width, D draft
width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import LayerConfig
from blockdraft.draft.attention import visible
from blockdraft.draft.model import Attend, DraftModel
from blockdraft.draft.norm import wide_dtype

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
    q [X, L, H, A] and the blocks' own k [X, L, J, A] and v [X, L, J, W] and returns [X, L, H, W]. The X*X
    block-by-block part is never built.
    """
    num_context = context[0][0].shape[1]
    masks = {layer: _additive(block_masks(layer, blocks, num_context)) for layer in set(layers)}

    def attend(index: int, q_XLHA: Tensor, k_XLJA: Tensor, v_XLJW: Tensor) -> Tensor:
        return _attend(q_XLHA, k_XLJA, v_XLJW, context[index], masks[layers[index]], scale)

    return attend


def _additive(masks: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    to_context, inside = (torch.zeros(seen.shape).masked_fill(~seen, -torch.inf) for seen in masks)
    return to_context, inside


def _attend(
    q_XLHA: Tensor,
    k_XLJA: Tensor,
    v_XLJW: Tensor,
    context_BSJ: tuple[Tensor, Tensor],
    masks: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """softmax over [context | own block] of every row; both masks are additive and every row sees itself."""
    keys_BSJA, values_BSJW = context_BSJ
    context_mask_BKLS, inside_mask_LL = masks
    num_rows, num_blocks, length, num_context = context_mask_BKLS.shape
    num_heads, width = q_XLHA.shape[-2:]
    num_kv = k_XLJA.shape[-2]
    group = num_heads // num_kv
    q_BJKLPA = q_XLHA.view(num_rows, num_blocks, length, num_kv, group, width).permute(0, 3, 1, 2, 4, 5)
    k_BKLJA = k_XLJA.view(num_rows, num_blocks, length, num_kv, width)
    v_BKLJW = v_XLJW.view(num_rows, num_blocks, length, num_kv, -1)
    # The query heads of one kv head become rows: keys are read once and never repeated.
    of_sequence = (num_rows, num_kv, num_blocks * length * group)
    of_block = (num_rows, num_kv, num_blocks, length * group)
    shape = q_BJKLPA.shape[:-1]
    wide = wide_dtype(q_XLHA.dtype)

    to_context = q_BJKLPA.reshape(*of_sequence, width) @ keys_BSJA.permute(0, 2, 3, 1)
    to_context = to_context.view(*shape, num_context).to(wide) * scale
    to_context = to_context + context_mask_BKLS[:, None, :, :, None]
    inside = q_BJKLPA.reshape(*of_block, width) @ k_BKLJA.permute(0, 3, 1, 4, 2)
    inside = inside.view(*shape, length).to(wide) * scale
    inside = inside + inside_mask_LL[:, None]
    probs = torch.softmax(torch.cat([to_context, inside], -1), -1).to(values_BSJW.dtype)
    context_probs, inside_probs = probs.split([num_context, length], -1)

    out = context_probs.reshape(*of_sequence, num_context) @ values_BSJW.transpose(1, 2)
    own = inside_probs.reshape(*of_block, length) @ v_BKLJW.permute(0, 3, 1, 2, 4)
    out_BJKLPW = out.view(*shape, -1) + own.view(*shape, -1)
    return out_BJKLPW.permute(0, 2, 3, 1, 4, 5).reshape(num_rows * num_blocks, length, num_heads, -1)
