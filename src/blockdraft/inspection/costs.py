"""What a draft weighs and what one of its steps costs: exact counts for one row, from the config alone.

Must not know: torch, weights, how a draft computes, how a report looks.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.formats import zlab

REFERENCE_CONTEXT = 4096
BF16_BYTES = 2
_QUANT_GROUP = 32  # weights that share one 16-bit scale in the quantised sizes
_OWN_PARTS = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", zlab.MASK_EMBEDDING: "embedding"}
_PARTS = (
    "fuse", "attention", "mlp", "norms", "convolutions", "injection", "codes", "selector", "markov", "confidence",
    "embedding", "head",
)  # fmt: skip
_PART_OF_PREFIX = {
    "fc.": "fuse",
    "fc_norm.": "fuse",
    "candidate_selector.": "selector",
    "markov_head.": "markov",
    "confidence_head.": "confidence",
    "injection.": "injection",
    "transfer_codes": "codes",
}


def count_parameters(config: DraftConfig, own: Collection[str] = ()) -> dict[str, int]:
    """Parameters of the draft by part, and `total`; what it borrows from the target is not counted.

    `own` names the optional tensors that its checkpoint carries: an embedding, a head, a mask embedding.
    """
    parts = dict.fromkeys(_PARTS, 0)
    for name, shape in all_tensors(config, own).items():
        parts[_part(name)] += math.prod(shape)
    return {**parts, "total": sum(parts.values())}


def all_tensors(config: DraftConfig, own: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of the checkpoint; the ids of a reduced vocabulary are none."""
    optional = zlab.optional_tensors(config)
    shapes = zlab.expected_tensors(config) | {name: optional[name] for name in own}
    return {name: shape for name, shape in shapes.items() if name != zlab.HEAD_IDS}


def _part(name: str) -> str:
    if name in _OWN_PARTS:
        return _OWN_PARTS[name]
    for prefix, part in _PART_OF_PREFIX.items():
        if name.startswith(prefix):
            return part
    if "_conv." in name:
        return "convolutions"
    if "norm" in name:
        return "norms"
    return "attention" if ".self_attn." in name else "mlp"


def file_sizes(config: DraftConfig, own: Collection[str]) -> dict[str, int]:
    """Bytes of the weights in bf16, and with matrices in 8 or 4 bits and one bf16 scale per 32 weights."""
    shapes = all_tensors(config, own).values()
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    others = sum(math.prod(shape) for shape in shapes if len(shape) != 2)
    sizes = {"bf16": BF16_BYTES * (matrices + others)}
    for bits in (8, 4):
        scales = math.ceil(matrices / _QUANT_GROUP) * BF16_BYTES
        sizes[f"{bits}_bit"] = math.ceil(matrices * bits / 8) + scales + BF16_BYTES * others
    return sizes


def step_cost(config: DraftConfig) -> dict[str, Any]:
    """Cache bytes, weight bytes read and FLOPs of one drafting step, one row, weights and cache in bf16.

    FLOPs count a multiply and an add as two. `flops.total` assumes `reference_context` cached positions in a
    full layer (the window in a sliding one), and injects `block_size` positions: the step after a fully
    accepted block.
    """
    block, attention = config.block_size, config.attention
    width, vocab, head_rows = config.hidden_size, config.vocab_size, config.num_head_rows
    parts = count_parameters(config)
    layer_params = sum(parts[name] for name in ("attention", "mlp", "norms", "convolutions", "injection")) - 2 * width
    rank = config.selector.rank if config.selector else 0
    top_k = config.selector.top_k if config.selector else 0
    proposals = config.num_proposals
    markov = config.markov.rank if config.markov else 0
    context = min(REFERENCE_CONTEXT, config.max_position_embeddings)
    visible = sum(min(context, layer.window or context) + block for layer in config.layers)
    flops = {
        "inject_per_position": 2 * parts["fuse"] + config.num_layers * 2 * width * attention.num_cached,
        "block": 2 * block * layer_params,
        "attention": 2 * block * visible * attention.num_heads * _attention_width(config),
        "head": 2 * proposals * head_rows * width,
        "selector": proposals * (2 * width * rank + top_k * top_k * 2 * rank),
        "markov": proposals * 2 * vocab * markov,
        "rescore": proposals * _rescore_flops(config),
    }
    flops["total"] = block * flops["inject_per_position"] + sum(
        flops[name] for name in ("block", "attention", "head", "selector", "markov", "rescore")
    )
    cache = BF16_BYTES * attention.num_cached * config.num_layers
    window = config.max_window
    return {
        "cache_bytes_per_token": cache,
        "max_cache_bytes": cache_bytes(config, config.max_position_embeddings),
        "is_cache_bounded": window is not None,
        "tap_bytes_per_token": BF16_BYTES * config.num_taps * config.target_hidden_size,
        "weight_bytes_per_step": BF16_BYTES * (layer_params + parts["fuse"] + rank * width),
        "codebook_bytes_per_step": BF16_BYTES * proposals * top_k * 2 * rank,
        "markov_bytes_per_step": BF16_BYTES * proposals * vocab * markov,
        "head_bytes_per_step": BF16_BYTES * head_rows * width,
        "flops": flops,
        "reference_context": context,
    }


def _rescore_flops(config: DraftConfig) -> int:
    """One row of DSpine scored again: its message from the token before, and the head's rows of its candidates."""
    if config.injection is None:
        return 0
    rank, size, width = config.injection.transfer_rank, config.injection.message_size, config.hidden_size
    return 2 * (2 * rank * size + size * width + config.injection.top_k * width)


def _attention_width(config: DraftConfig) -> int:
    """Numbers that one query of one head multiplies per position: with the key, then with the value."""
    attention = config.attention
    if isinstance(attention, MlaConfig):
        return attention.num_cached + attention.kv_lora_rank
    return 2 * attention.head_dim


def cache_bytes(config: DraftConfig, length: int) -> int:
    """Bytes of one row's cache in bf16 at `length` committed positions; sliding layers keep a window."""
    per_layer = BF16_BYTES * config.attention.num_cached
    return sum(per_layer * min(length, layer.window or length) for layer in config.layers)
