"""Tiny random targets with recurrent, convolution or indexer state, and rounds of random acceptance over them."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from blockdraft.targets import HFTarget
from tiny_targets import VOCAB, random_ids, tiny_config

_LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_TURNS = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONV = {"layer_types": ["conv", "full_attention"] * 2}
_GDN: dict[str, Any] = {
    **_LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_KDA = {"linear_head_dim": 8, "linear_num_heads": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_SSM = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
_DSA = {
    **_MLA,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 16,
    "index_head_dim": 8,
    "index_n_heads": 32,  # few heads give many scores of exactly zero, and the choice among equals is anybody's
    "first_k_dense_replace": 1,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_GDN, **_MOE},
    "qwen3_5_text": _GDN,
    "qwen3_5_moe_text": {**_GDN, **_MOE},
    "olmo_hybrid": _GDN,
    "kimi_linear": {**_MLA, **_KDA, **_LINEAR, "q_lora_rank": None, "num_local_experts": 4, "n_shared_experts": 1},
    "bailing_hybrid": {
        **_MLA,
        **_KDA,
        **_LINEAR,
        "num_experts": 4,
        "num_shared_experts": 1,
        "num_group": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "qwen4_exp_text": {
        **_GDN,
        **_MOE,
        "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
        "head_dim": 16,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 1,
        "split_ngram_parts": 1,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    },
    "glm5_next_text": {
        **_DSA,
        **_KDA,
        "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
        "qk_rope_head_dim": 0,
        "n_shared_experts": 1,
        "index_kpool": 4,
        "hc_mult": 2,
    },
    "falcon_h1": {**_SSM, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "granitemoehybrid": {
        **_SSM,
        **_TURNS,
        "mamba_n_heads": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "lfm3": _CONV,
    "zaya": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 16},
}
_INKLING = {
    "unpadded_vocab_size": VOCAB,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 9,
    "sliding_window": 9,
    "d_rel": 4,
    "rel_extent": 32,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_layers_per_attn_res_block": 2,
    "log_scaling_n_floor": 16,
}
# Not on the package's list: what the self-test at load finds decides.
TRIED: dict[str, dict[str, Any]] = {
    "inkling_text": {**_INKLING, "n_shared_experts": 1, "layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING,
    "minimax_m3_vl_text": {  # keys of blocks in a cache layer of its own class
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "lara_mini": {
        **_GDN,
        **_MOE,
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        "sliding_window": 9,
    },
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "use_mamba_kernels": False,
        "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
}
FLOAT32_ONLY = {"inkling2_text", "inkling2_loop_text"}  # parts of them are in float32 whatever the model is
SPARSE: dict[str, dict[str, Any]] = {"deepseek_v32": _DSA, "glm_moe_dsa": _DSA}
# Their own forward gives other logits when it is fed in pieces: no rollback could make that right.
BROKEN: dict[str, dict[str, Any]] = {
    "bamba": {**_SSM, "mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "zamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
}
# No cache of transformers reaches their states.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_heads": 4, "head_dim": 8, "num_blocks": 4},
    "minimax": {**_TURNS, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 16},
}


def tiny_hybrid(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, std: float = 0.08) -> Any:
    """A random model in evaluation mode. The usual weights are so small that a difference of rounding stays one."""
    torch.manual_seed(seed)
    changes = {**RECURRENT, **TRIED, **SPARSE, **BROKEN, **ELSEWHERE}[family]
    config = tiny_config(family, **{"max_position_embeddings": 2048, **changes})
    config._experts_implementation = "eager"  # the grouped products know no float64
    if family == "glm5_next_text":
        model: Any = _glm5_next(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(std=std)
    return model.to(torch.float32 if family in FLOAT32_ONLY else dtype).eval()


def _glm5_next(text: Any) -> Any:
    """The family has no class for its text alone."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    vision = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Glm5NextConfig(text_config=text.to_dict(), vision_config=vision)
    config._experts_implementation = config.text_config._experts_implementation = "eager"
    return Glm5NextForConditionalGeneration(config)


def tapped(model: Any, taps: tuple[int, ...] = (1, 3)) -> HFTarget:
    """A target whose taps are the one thing that they can be in this family."""
    is_parallel = model.config.model_type.startswith("qwen4_exp")
    return HFTarget(model, taps, tap_stream="mean" if is_parallel else "prefix")


def rounds(target: HFTarget, count: int, *, width: int = 6, num_prompt: int = 9, seed: int = 0) -> float:
    """The worst |logit difference| (or tap difference) of ``count`` blocks of random acceptance against one forward
    over the text that was kept in the end, relative to the largest logit (or tap)."""
    draw = random.Random(seed)
    row = target.new_row()
    ids, found = [random_ids(num_prompt, seed)], []
    found += target.forward([ids[0]], [row])
    for step in range(count):
        fed = draw.choice([1, width, width, width])
        block, keep = random_ids(fed, 1000 * seed + step + 1), draw.randrange(fed + 1)
        [scored] = target.forward([block], [row])
        target.rollback([row], [keep])
        ids.append(block[:keep])
        found.append(type(scored)(scored.logits_TV[:keep], scored.taps_TNE[:keep]))
    target.free(row)
    whole = target.new_row()
    [expected] = target.forward([torch.cat(ids)], [whole])
    target.free(whole)
    worst = relative(torch.cat([one.logits_TV for one in found]), expected.logits_TV)
    if target.tap_layer_ids:
        worst = max(worst, relative(torch.cat([one.taps_TNE for one in found]), expected.taps_TNE))
    return worst


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())
