"""Tiny random models with vision around a language model, and the language model alone as transformers builds it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tiny_hybrids import RECURRENT
from tiny_targets import _COMMON, ATTENTION_ONLY

_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {**_TOWER, "image_size": 28, "patch_size": 14}
_QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

# By model type: the text part's own type, its settings, those of the vision part, those of the whole.
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("llama", {}, {**_IMAGE, "projection_dim": 16, "model_type": "clip_vision_model"}, {}),
    "gemma3": ("gemma3_text", ATTENTION_ONLY["gemma3_text"], _IMAGE, {"mm_tokens_per_image": 4}),
    "mistral3": ("mistral", ATTENTION_ONLY["mistral"], {**_IMAGE, "model_type": "pixtral"}, {}),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": _MROPE}, {**_QWEN, "deepstack_visual_indexes": [0]}, {}),
    "qwen3_5": (
        "qwen3_5_text",
        {**RECURRENT["qwen3_5_text"], "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        _QWEN,
        {},
    ),
    "lfm2_vl": ("lfm2", RECURRENT["lfm2"], {**_IMAGE, "model_type": "siglip2_vision_model"}, {}),
}


def vision_model(name: str) -> Any:
    """The whole model, float64, in evaluation mode."""
    text_type, text, vision, whole = WRAPPERS[name]
    parts = {"text_config": {**_COMMON, **text, "model_type": text_type}, "vision_config": vision}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **parts, **whole)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def text_model(name: str, whole: Any) -> Any:
    """The text part as a model of its own, with the same weights. None where transformers has no such class."""
    config = whole.config.get_text_config(decoder=True)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    alone = AutoModelForCausalLM.from_config(config).double().eval()
    alone.get_decoder().load_state_dict(whole.get_decoder().state_dict())
    alone.get_output_embeddings().weight = whole.get_output_embeddings().weight
    return alone
