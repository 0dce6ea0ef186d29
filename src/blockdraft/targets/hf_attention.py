"""Attention backends of transformers that know passes of many rows, and one for the few queries of a step on the CPU.

In a pass of many rows (``hf_rows.py``) each row attends over its own keys; otherwise a backend does what the one that
it stands for does. With grouped queries the stock backend repeats keys and values for every query head on each call, or
takes a slow grouped kernel on the CPU. The one of ours puts the query heads of one kv head below each other as rows of
one product, so keys and values are read where they lie. Any call it was not made for goes to the stock backend. Must
not know taps or requests.

Shapes: B rows, T positions, H query heads, K kv heads, A head width, S cached positions and the new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from .hf_rows import masks_of_rows, running

__all__ = ["can_part_rows", "part_rows_", "use_grouped_attention_"]

_NAME = "blockdraft_grouped"
_BY_ROW = {"sdpa": "blockdraft_sdpa", "eager": "blockdraft_eager"}
_MAX_QUERIES = 32  # beyond it (prefill) the stock kernel is as good
Attention = Callable[..., tuple[Tensor, Tensor | None]]


def can_part_rows(model: Any) -> bool:
    """Whether the model can be given a backend that knows passes of many rows, or has one."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    is_stock = name in _BY_ROW and name == model.config._attn_implementation
    return name == _NAME or name in _BY_ROW.values() or (is_stock and not _knows_backends_by_name(model))


def part_rows_(model: Any) -> Callable[[], None] | None:
    """Give the model such a backend in place of its own; the result puts that back. None: nothing was changed."""
    name = model.config._attn_implementation
    if name not in _BY_ROW or not can_part_rows(model):
        return None
    for stock, attention, masks in (("sdpa", sdpa_attention_forward, sdpa_mask), ("eager", _eager, eager_mask)):
        AttentionInterface.register(_BY_ROW[stock], _by_row(attention))
        AttentionMaskInterface.register(_BY_ROW[stock], masks_of_rows(masks))
    model.set_attn_implementation(_BY_ROW[name])
    return lambda: model.set_attn_implementation(name)


def _knows_backends_by_name(model: Any) -> bool:
    """Sparse families give their choice of positions as a mask to two backends only, whose names they look for."""
    return "indexed_attention" in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def _by_row(attention: Attention) -> Attention:
    """The backend, but for each row apart in a pass of many."""

    def attend(
        module: nn.Module, query_BHTA: Tensor, keys: Any, values: Any, mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        joint = running()
        if joint is None or joint.is_inside:
            return attention(module, query_BHTA, keys, values, mask, *args, **kwargs)
        return joint.attend(attention, module, query_BHTA, keys, values, mask, *args, **kwargs)

    return attend


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """The plain products that each family's own file spells out."""
    attention: Attention = sys.modules[type(module).__module__].eager_attention_forward
    return attention(module, *args, **kwargs)


def use_grouped_attention_(model: Any) -> bool:
    """Whether the model uses this backend from now on: a model with attention of its own keeps it."""
    config = model.config.get_text_config(decoder=True)
    is_stock = config._attn_implementation == "sdpa" == model.config._attn_implementation
    if not is_stock or _knows_backends_by_name(model) or not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(_NAME, _by_row(_grouped_attention))
    AttentionMaskInterface.register(_NAME, masks_of_rows(sdpa_mask))
    model.set_attn_implementation(_NAME)
    return True


def _grouped_attention(
    module: nn.Module,
    query_BHTA: Tensor,
    key_BKSA: Tensor,
    value_BKSA: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    num_heads, num_queries = query_BHTA.shape[1:3]
    num_kv_heads = key_BKSA.shape[1]
    unusual = dropout or any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "is_causal"))
    is_shared_mask = attention_mask is None or attention_mask.shape[1] == 1
    is_causal_prefill = attention_mask is None and num_queries > 1
    if num_heads == num_kv_heads or num_queries > _MAX_QUERIES or not is_shared_mask or is_causal_prefill or unusual:
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module,
            query_BHTA,
            key_BKSA,
            value_BKSA,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return result
    num_rows, width = query_BHTA.shape[0], query_BHTA.shape[3]
    group = num_heads // num_kv_heads
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, group, 1)
    found = scaled_dot_product_attention(
        query_BHTA.reshape(num_rows, num_kv_heads, group * num_queries, width),
        key_BKSA,
        value_BKSA,
        attn_mask=attention_mask,
        scale=scaling,
    )
    found_BHTA = found.reshape(num_rows, num_heads, num_queries, value_BKSA.shape[3])
    return found_BHTA.transpose(1, 2).contiguous(), None
