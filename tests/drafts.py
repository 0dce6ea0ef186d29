"""Draft configs and checkpoints for tests: published shapes, tiny ones, random ones."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from blockdraft.config import (
    AttentionConfig,
    ConvConfig,
    DraftConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    RopeConfig,
    SelectorConfig,
)
from blockdraft.formats import zlab

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published import K3_FIVE_LAYERS, K3_SIX_LAYERS, K31, KIMI_V1, QWEN_V2  # noqa: F401

QWEN_V1: dict[str, Any] = {
    **QWEN_V2,
    "architectures": ["DFlashDraftModel"],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
del QWEN_V1["is_causal"]
TINY_V2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-06,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "num_target_layers": 6,
    "eos_token_id": 2,
    "dflash_config": {
        "block_size": 4,
        "mask_token_id": 60,
        "target_layer_ids": [1, 4],
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 4,
        "selector_top_k": 4,
    },
}
TINY_V1: dict[str, Any] = {
    **TINY_V2,
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"block_size": 4, "mask_token_id": 60, "target_layer_ids": [1, 4]},
}
TINY_MLA: dict[str, Any] = {
    **{key: value for key, value in TINY_V2.items() if key not in ("num_key_value_heads", "head_dim")},
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "dflash_config": {**TINY_V2["dflash_config"], "attention_mode": "mla"},
}


def edited(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with changed keys; `nest_x` addresses dflash_config.x, the value `...` removes a key."""
    result = copy.deepcopy(raw)
    for key, value in changes.items():
        place = result["dflash_config"] if key.startswith("nest_") else result
        name = key.removeprefix("nest_")
        if value is ...:
            place.pop(name, None)
        else:
            place[name] = value
    return result


def random_tensors(
    config: DraftConfig, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, own: bool = False
) -> dict[str, torch.Tensor]:
    """Random tensors of every expected name, with `own` also of every optional one."""
    generator = torch.Generator().manual_seed(seed)
    shapes = zlab.expected_tensors(config)
    if own:
        shapes |= zlab.optional_tensors(config)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def checkpoint(raw: dict[str, Any], *, own: bool = False, dtype: torch.dtype = torch.bfloat16) -> zlab.Checkpoint:
    """A random checkpoint of a config."""
    config = zlab.config_from_dict(raw)
    return zlab.Checkpoint(config=config, tensors=random_tensors(config, own=own, dtype=dtype))


_POSITIVE = st.floats(min_value=1e-3, max_value=1e3)


@st.composite
def ropes(draw: st.DrawFn) -> RopeConfig:
    theta = draw(st.floats(min_value=1.5, max_value=1e7))
    kind = draw(st.sampled_from(["default", "linear", "yarn", "llama3"]))
    params = {name: draw(_POSITIVE) for name in ("factor",) if kind != "default"}
    if kind in ("yarn", "llama3"):
        params["original_max_position_embeddings"] = draw(st.integers(1, 10**6))
    if kind == "llama3":
        params |= {"low_freq_factor": draw(_POSITIVE), "high_freq_factor": draw(_POSITIVE)}
    if kind == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
        params |= {name: draw(_POSITIVE) for name in names if draw(st.booleans())}
    return RopeConfig(theta=theta, kind=kind, params=tuple(params.items()))


@st.composite
def attentions(draw: st.DrawFn) -> AttentionConfig:
    small = st.integers(1, 3)
    if draw(st.booleans()):
        return MlaConfig(
            num_heads=draw(small),
            q_lora_rank=draw(st.none() | small),
            kv_lora_rank=draw(small),
            qk_nope_head_dim=draw(small),
            qk_rope_head_dim=2 * draw(small),
            v_head_dim=draw(small),
            has_bias=draw(st.booleans()),
        )
    kv_heads = draw(small)
    return GqaConfig(
        num_heads=kv_heads * draw(small),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(small),
        has_bias=draw(st.booleans()),
    )


@st.composite
def draft_configs(draw: st.DrawFn) -> DraftConfig:
    """Every config that the z-lab layout can express, at tiny sizes."""
    group = draw(st.sampled_from([1, 2, 4]))
    width = group * draw(st.integers(1, 4))
    vocab = draw(st.integers(4, 40))
    window = draw(st.none() | st.integers(1, 64))
    slides = [window is not None and draw(st.booleans()) for _ in range(draw(st.integers(1, 3)))]
    causal = draw(st.none() | st.booleans())
    num_target_layers = draw(st.integers(1, 70))
    taps = draw(st.sets(st.integers(0, num_target_layers - 1), min_size=1, max_size=4))
    is_v2 = draw(st.booleans())
    block_size = draw(st.integers(2, 16))
    return DraftConfig(
        hidden_size=width,
        intermediate_size=draw(st.integers(1, 8)),
        vocab_size=vocab,
        rms_norm_eps=draw(st.floats(min_value=1e-8, max_value=1e-2)),
        max_position_embeddings=draw(st.integers(block_size, 10**6)),
        attention=draw(attentions()),
        layers=tuple(
            LayerConfig(is_causal=slide if causal is None else causal, window=window if slide else None)
            for slide in slides
        ),
        rope=draw(ropes()),
        block_size=block_size,
        mask_token_id=draw(st.integers(0, vocab - 1)),
        target_layer_ids=tuple(sorted(taps)),
        num_target_layers=num_target_layers,
        target_hidden_size=draw(st.just(width) | st.integers(1, 9)),
        conv=ConvConfig(kernel_size=draw(st.integers(1, 3)), group_size=group) if is_v2 else None,
        selector=SelectorConfig(rank=draw(st.integers(1, 4)), top_k=draw(st.integers(1, vocab))) if is_v2 else None,
        input_embedding_scale=draw(st.just(1.0) | _POSITIVE),
        output_multiplier=draw(st.just(1.0) | _POSITIVE),
        final_logit_softcapping=draw(st.none() | _POSITIVE),
        has_tap_norms=draw(st.booleans()),
        tap_stream=draw(st.sampled_from([None, "attn_res"])),
    )
