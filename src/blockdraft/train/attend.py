"""Attention of many blocks over one context, in two forms that are one function.

Dense, for the CPU: scores over [context | own block] in one buffer, worked on in place, with a gradient of its own.
Flexible, for GPUs: torch's flex attention over [context | all blocks], whose compiled kernel skips what a block may
not see. Knows no model; what may be seen is given.

Letters: B sequences, S context positions, K blocks per sequence, X = B*K, L block length, T = S + L, H query heads,
J kv heads, P = H / J query heads per kv head, A width of queries and keys, W width of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import LayerConfig
from blockdraft.draft.norm import wide_dtype

__all__ = ["attend_densely", "attend_flexibly", "flex_mask"]


def attend_densely(
    q_XLHA: Tensor,
    own_XLJ: tuple[Tensor, Tensor],
    context_BSJ: tuple[Tensor, Tensor],
    mask_BKLT: Tensor,
    scale: float,
) -> Tensor:
    """out_XLHW: softmax over [context | own block] of every row. The mask is additive and every row sees itself."""
    tensors: tuple[Tensor, ...] = (q_XLHA, *context_BSJ, *own_XLJ)
    kind = q_XLHA.device.type
    if torch.is_autocast_enabled(kind):
        tensors = tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)
    out: Tensor = _Dense.apply(*tensors, mask_BKLT, scale)
    return out


class _Dense(torch.autograd.Function):
    """Works on [B, J, K, L, P, .]: the query heads of one kv head become rows, so that keys are never repeated."""

    @staticmethod
    def forward(
        ctx: Any,
        q_XLHA: Tensor,
        keys_BSJA: Tensor,
        values_BSJW: Tensor,
        k_XLJA: Tensor,
        v_XLJW: Tensor,
        mask_BKLT: Tensor,
        scale: float,
    ) -> Tensor:
        num_rows, num_kv, num_context = keys_BSJA.shape[0], keys_BSJA.shape[2], keys_BSJA.shape[1]
        q, k, v = (_split(tensor, num_rows, num_kv) for tensor in (q_XLHA * scale, k_XLJA, v_XLJW))
        keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (keys_BSJA, values_BSJW))
        with torch.autocast(q.device.type, enabled=False):
            scores = q.new_empty(*q.shape[:-1], mask_BKLT.shape[-1], dtype=wide_dtype(q.dtype))
            _multiply(_of_sequence(q), keys.mT, _of_sequence(scores[..., :num_context]))
            _of_block(scores[..., num_context:]).copy_(_of_block(q) @ _of_block(k).mT)
            scores.add_(mask_BKLT[:, None, :, :, None])
            probs = torch.softmax(scores, -1).to(q.dtype)
            del scores
            out = q.new_empty(*q.shape[:-1], values.shape[-1])
            torch.bmm(_of_sequence(probs[..., :num_context]), values, out=_of_sequence(out))
            _of_block(out).baddbmm_(_of_block(probs[..., num_context:]), _of_block(v))
        ctx.save_for_backward(q, keys, values, k, v, probs, out)
        ctx.scale = scale
        return _joined(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, k, v, probs, out = ctx.saved_tensors
        num_rows, num_kv, num_context = q.shape[0], q.shape[1], keys.shape[1]
        g = _split(grads[0], num_rows, num_kv)
        with torch.autocast(q.device.type, enabled=False):
            wrong = torch.empty_like(probs, dtype=wide_dtype(q.dtype))
            _multiply(_of_sequence(g), values.mT, _of_sequence(wrong[..., :num_context]))
            _of_block(wrong[..., num_context:]).copy_(_of_block(g) @ _of_block(v).mT)
            wrong.sub_((g * out).sum(-1, keepdim=True, dtype=wrong.dtype)).mul_(probs)
            wrong = wrong.to(q.dtype)
            to_context, to_own = _of_sequence(wrong[..., :num_context]), _of_block(wrong[..., num_context:])
            of_q = torch.empty_like(q)
            torch.bmm(to_context, keys, out=_of_sequence(of_q))
            _of_block(of_q).baddbmm_(to_own, _of_block(k))
            of_context = (
                to_context.mT @ _of_sequence(q),
                _of_sequence(probs[..., :num_context]).mT @ _of_sequence(g),
            )
            of_own = (to_own.mT @ _of_block(q), _of_block(probs[..., num_context:]).mT @ _of_block(g))
        return (
            _joined(of_q) * ctx.scale,
            *(tensor.unflatten(0, (num_rows, num_kv)).transpose(1, 2) for tensor in of_context),
            *(_joined(tensor.view_as(own)) for tensor, own in zip(of_own, (k, v), strict=True)),
            None,
            None,
        )


def _split(x_XLHA: Tensor, num_rows: int, num_kv: int) -> Tensor:
    """[B, J, K, L, P, A], contiguous."""
    x_BKLJPA = x_XLHA.unflatten(2, (num_kv, -1)).unflatten(0, (num_rows, -1))
    return x_BKLJPA.permute(0, 3, 1, 2, 4, 5).contiguous()


def _joined(x: Tensor) -> Tensor:
    """[X, L, H, A] of [B, J, K, L, P, A]."""
    return x.permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(0, 1)


def _of_sequence(x: Tensor) -> Tensor:
    """[B*J, K*L*P, A], a view."""
    return x.flatten(2, 4).flatten(0, 1)


def _of_block(x: Tensor) -> Tensor:
    """[B*J*K, L*P, A], a view."""
    return x.flatten(3, 4).flatten(0, 2)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """The batched product into a part of a buffer, which may be wider in precision."""
    if out.dtype == left.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(left @ right)


# ---- flexible --------------------------------------------------------------------------------------------------------
def flex_mask(layer: LayerConfig, anchors_BK: Tensor, length: int, num_context: int) -> Any:
    """What each row of each block may see among [context | all blocks], as flex attention wants it."""
    from torch.nn.attention.flex_attention import create_block_mask

    num_blocks, device = anchors_BK.shape[1], anchors_BK.device
    border = torch.tensor(num_context, device=device)  # a tensor, since a number would be compiled in

    def may_see(b: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        block, slot = row // length, row % length
        anchor = anchors_BK[b, block]
        own = key - border
        is_context = key < border
        position = torch.where(is_context, key, anchor + own % length)
        back = anchor + slot - position
        seen = torch.where(is_context, key < anchor, own // length == block)
        if layer.window is not None:
            seen = seen & (back.abs() < layer.window)
        return seen & (back >= 0) if layer.is_causal else seen

    size = (anchors_BK.shape[0], None, num_blocks * length, num_context + num_blocks * length)
    build = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    return build(may_see, *size, device=device)


def attend_flexibly(
    q_XLHA: Tensor,
    own_XLJ: tuple[Tensor, Tensor],
    context_BSJ: tuple[Tensor, Tensor],
    mask: Any,
    scale: float,
) -> Tensor:
    """out_XLHW; `mask` is a `flex_mask`."""
    from torch.nn.attention.flex_attention import flex_attention

    num_rows, (length, num_heads) = context_BSJ[0].shape[0], q_XLHA.shape[1:3]
    q = q_XLHA.unflatten(0, (num_rows, -1)).flatten(1, 2)
    k, v = (
        torch.cat((of_context, own.unflatten(0, (num_rows, -1)).flatten(1, 2)), dim=1)
        for of_context, own in zip(context_BSJ, own_XLJ, strict=True)
    )
    kind = q.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype
    q, k, v = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
    run: Callable[..., Tensor] = _compiled(flex_attention) if kind == "cuda" else flex_attention  # type: ignore[assignment]
    out = run(q, k, v, block_mask=mask, scale=scale, enable_gqa=num_heads != k.shape[1])
    return out.transpose(1, 2).unflatten(1, (-1, length)).flatten(0, 1)


@lru_cache(maxsize=4)
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all shapes: the longest sequence of a step changes from step to step."""
    return torch.compile(function, dynamic=True)
