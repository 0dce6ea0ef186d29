"""Attention on the CPU for the few query rows of a decoding step, as an attention backend of transformers.

With grouped queries the stock backend repeats keys and values for every query head on each call, or takes a
slow grouped kernel. Here the query heads of one kv head stand below each other as rows of one product, so
keys and values are read where they lie. Any call it was not made for goes to the stock backend. Must not know
rows or taps.

Shapes: B rows, T positions, H query heads, K kv heads, A head width, S cached positions and the new ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

__all__ = ["use_grouped_attention_"]

_NAME = "blockdraft_grouped"
_MAX_QUERIES = 32  # beyond it (prefill) the stock kernel is as good


def use_grouped_attention_(model: Any) -> bool:
    """Whether the model uses this backend from now on: a model with attention of its own keeps it."""
    config = model.config.get_text_config(decoder=True)
    is_stock = config._attn_implementation == "sdpa" == model.config._attn_implementation
    # Sparse families give their choice of positions as a mask to the backends that they know by name only.
    is_stock = is_stock and "indexed_attention" not in (getattr(config, "layer_types", None) or ())
    if not is_stock or not getattr(model, "_supports_attention_backend", False):
        return False
    AttentionInterface.register(_NAME, _grouped_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
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
