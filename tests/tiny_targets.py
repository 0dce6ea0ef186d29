"""Tiny random targets for tests: one builder per family, float64, seconds on one thread."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 61

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TWO_KINDS = ["sliding_attention", "full_attention"] * 2

ATTENTION_ONLY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"sliding_window": 9, "use_sliding_window": True, "layer_types": _TWO_KINDS},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 9, "layer_types": _TWO_KINDS, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        "sliding_window": 9,
        "layer_types": _TWO_KINDS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "phi3": {"sliding_window": None},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "head_dim": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
}

# Families whose own code rounds attention weights or router scores to float32, whatever the model's dtype.
ROUNDS_TO_FLOAT32 = {"deepseek_v3", "gemma2", "gpt_oss"}


def tiny_config(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**_COMMON, **ATTENTION_ONLY.get(family, {}), **changes})


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model whose logits are far from flat, in evaluation mode."""
    torch.manual_seed(seed)
    config = tiny_config(family, **changes)
    config._experts_implementation = "eager"  # the grouped products know no float64
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
