"""Exports against what the engines' loaders read: key by key and tensor by tensor, as their files had it.

The readers below are written from what the loaders of SGLang 0.5.23, vLLM 0.32 and TokenSpeed (f4d8ec6e) do with a
draft's config.json; they share nothing with the package. SGLang and TokenSpeed skip a tensor whose name they do not
know, so a wrong name would not fail there: it would only lose acceptance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from blockdraft import formats
from blockdraft.config import DraftConfig
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from drafts import TINY_V1, TINY_V2, checkpoint, edited

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "use_sliding_window": True}
SCALED = {"nest_output_multiplier": 0.5, "nest_final_logit_softcapping": 9.0}
DRAFTS = {
    "v1": TINY_V1,
    "v1-sliding": edited(TINY_V1, **SLIDING),
    "v1-causal": edited(TINY_V1, **SLIDING, is_causal=True),
    "v2": TINY_V2,
    "v2-sliding": edited(TINY_V2, **SLIDING, is_causal=False),
    "v2-scaled": edited(TINY_V2, **SCALED),
}
LAYER = re.compile(r"layers\.\d+\.(.+)")
# What one layer and the rest of a DFlash model hold in all three engines, stacked tensors taken apart.
LAYER_V1 = {
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
LAYER_V2 = LAYER_V1 | {
    f"{side}.{part}" for side in ("attention_conv", "mlp_conv") for part in ("base_kernel", "kernel_projection.weight")
}
GLOBAL_V1 = {"fc.weight", "hidden_norm.weight", "norm.weight"}
GLOBAL_V2 = GLOBAL_V1 | {  # the codebooks are bare parameters in every one of them
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
}


def exported(name: str, folder: Path, dialect: str) -> tuple[DraftConfig, dict[str, Any], set[str]]:
    """Meaning, config.json and tensor names of an export."""
    given = checkpoint(DRAFTS[name])
    formats.write(folder / "out", given, dialect=dialect)
    raw = json.loads((folder / "out" / "config.json").read_text())
    with safe_open(str(folder / "out" / "model.safetensors"), "pt") as file:
        names = set(file.keys())
    return given.config, raw, names


def meaning(config: DraftConfig) -> dict[str, Any]:
    """What a reader has to come to."""
    return {
        "block_size": config.block_size,
        "mask": config.mask_token_id,
        "taps": list(config.target_layer_ids),
        "causal": [layer.is_causal for layer in config.layers],
        "windows": [layer.window for layer in config.layers],
        "conv": None if config.conv is None else (config.conv.kernel_size, config.conv.group_size),
        "selector": None if config.selector is None else (config.selector.rank, config.selector.top_k),
        "multiplier": config.output_multiplier,
        "cap": config.final_logit_softcapping,
        "theta": config.rope.theta,
    }


def _pair(nest: dict[str, Any], first: str, second: str) -> tuple[int, int] | None:
    return (nest[first], nest[second]) if nest.get(first) else None


def _layers(raw: dict[str, Any], window: Any, causal: Any) -> dict[str, Any]:
    kinds = [kind == "sliding_attention" for kind in raw["layer_types"]]
    return {
        "windows": [window if slides else None for slides in kinds],
        "causal": [bool(causal) if causal is not None else slides for slides in kinds],
    }


def sglang(raw: dict[str, Any]) -> dict[str, Any]:
    """Nested before top for block, mask and taps; convolution, selector and scales nested only; is_causal on top."""
    nest = raw["dflash_config"]
    return {
        "block_size": nest.get("block_size", raw.get("block_size")),
        "mask": nest.get("mask_token_id", raw.get("mask_token_id")),
        "taps": nest.get("target_layer_ids", raw.get("target_layer_ids")),
        **_layers(raw, raw["sliding_window"], raw.get("is_causal")),
        "conv": _pair(nest, "conv_kernel_size", "conv_group_size"),
        "selector": _pair(nest, "selector_rank", "selector_top_k"),
        "multiplier": nest.get("output_multiplier", 1.0),
        "cap": nest.get("final_logit_softcapping"),
        "theta": raw["rope_parameters"]["rope_theta"],
    }


def vllm(raw: dict[str, Any]) -> dict[str, Any]:
    """Taps nested and one higher; the window nested by another name, then on top; causality top, then nested."""
    nest = raw["dflash_config"]
    causal = raw.get("is_causal")
    return {
        "block_size": raw.get("block_size", nest.get("block_size")),  # its user gives it, `launch` from the file
        "mask": nest.get("mask_token_id", raw.get("mask_token_id")),
        "taps": [one - 1 for one in [tap + 1 for tap in nest["target_layer_ids"]]],
        **_layers(
            raw, nest.get("swa_window_size", raw["sliding_window"]), nest.get("causal") if causal is None else causal
        ),
        "conv": _pair(nest, "conv_kernel_size", "conv_group_size"),
        "selector": _pair(nest, "selector_rank", "selector_top_k"),
        "multiplier": nest.get("output_multiplier", 1.0),
        "cap": nest.get("final_logit_softcapping"),
        "theta": raw["rope_parameters"]["rope_theta"],
    }


def tokenspeed(raw: dict[str, Any]) -> dict[str, Any]:
    """As SGLang, but that its August build knows no causality; rope_parameters before rope_theta."""
    return sglang(raw)


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "sglang": sglang,
    "vllm": vllm,
    "tokenspeed": tokenspeed,
}


@pytest.mark.parametrize("engine", READERS)
@pytest.mark.parametrize("name", DRAFTS)
def test_an_engine_reads_what_the_draft_means(name: str, engine: str, tmp_path: Path) -> None:
    config, raw, _ = exported(name, tmp_path, "z-lab")
    assert READERS[engine](raw) == meaning(config)
    assert raw["architectures"] == ["DFlash2DraftModel" if config.conv else "DFlashDraftModel"]
    assert raw["model_type"] == "qwen3" and raw["num_target_layers"] == config.num_target_layers


@pytest.mark.parametrize("name", DRAFTS)
def test_every_tensor_has_the_name_that_the_loaders_know(name: str, tmp_path: Path) -> None:
    config, _, names = exported(name, tmp_path, "z-lab")
    layers = LAYER_V2 if config.conv else LAYER_V1
    found = {match[1] for one in names if (match := LAYER.fullmatch(one))}
    assert found == layers
    assert {one for one in names if not LAYER.fullmatch(one)} == (GLOBAL_V2 if config.conv else GLOBAL_V1)
    assert len(names) == config.num_layers * len(layers) + len(GLOBAL_V2 if config.conv else GLOBAL_V1)


@pytest.mark.parametrize("name", [name for name in DRAFTS if name != "v2-scaled"])
def test_vllm_reads_the_speculators_export(name: str, tmp_path: Path) -> None:
    """0.32: nested layer config, flat keys beside it, ids one higher, and the first proposal method's count."""
    if name == "v1-causal":  # a full layer that is causal: its one flag speaks of sliding layers alone
        with pytest.raises(ConfigError, match="causal"):
            exported(name, tmp_path, "speculators")
        return
    config, raw, names = exported(name, tmp_path, "speculators")
    method = raw["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == config.num_proposals
    assert "name_or_path" in raw["speculators_config"]["verifier"]
    assert raw["speculators_model_type"] == config.family
    assert [tap - 1 for tap in raw["aux_hidden_state_layer_ids"]] == list(config.target_layer_ids)
    assert raw["mask_token_id"] == config.mask_token_id and raw["sample_from_anchor"] is False
    causal = not raw.get("sliding_window_non_causal", True)
    assert all(layer.is_causal == causal for layer in config.layers if layer.window is not None)
    inner = raw["transformer_layer_config"]
    assert inner["num_hidden_layers"] == config.num_layers and inner["vocab_size"] == config.vocab_size
    kept = {
        key: raw[key]
        for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if key in raw
    }
    parts = meaning(config)
    assert (_pair(kept, "conv_kernel_size", "conv_group_size"), _pair(kept, "selector_rank", "selector_top_k")) == (
        parts["conv"],
        parts["selector"],
    )
    assert names == set(zlab.expected_tensors(config))
