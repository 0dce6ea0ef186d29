"""Checkpoints of the speculators dialect: nested layer settings, taps counted from one, read and written.

Owns: its keys and what it cannot say. What the fields mean together is resolved as for z-lab, whose tensor names
it shares. A tap's id here is the number of target layers that have run, z-lab's is the layer's index: one less;
the last layer has no id. A reduced vocabulary (d2t, t2d) is read for DFlash, whose proposals have a fixed law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig, TargetFacts, require_bool, require_int
from blockdraft.errors import ConfigError
from blockdraft.formats._keys import (
    Neutral,
    known_only,
    neutral_only,
    object_of,
    off,
    requires,
    stated_or_of_target,
    words,
)
from blockdraft.formats._layout import Layout
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY
from blockdraft.formats._zlab_config import config_from_dict as resolve
from blockdraft.formats._zlab_config import config_to_dict as spell
from blockdraft.formats._zlab_keys import IRRELEVANT
from blockdraft.formats._zlab_tensors import HEAD_IDS, canonical_name

__all__ = ["LAYOUT", "config_from_dict", "config_to_dict"]

_LABEL = "a speculators checkpoint"
_ALGORITHMS = ("dflash", "dflash2", "dspark")
_PART_KEYS = words(
    "conv_kernel_size conv_group_size selector_rank selector_top_k sample_from_anchor markov_rank markov_head_type "
    "enable_confidence_head confidence_head_with_markov"
)
# Names of classes that stand for an algorithm: of the model that was saved, and of its config's default.
_CLASSES = {
    "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    "dflash2": ("DFlash2DraftModel", "DFlash2Speculator"),
    "dspark": ("DSparkDraftModel", "DSparkSpeculator"),
}
_LAYER_KEYS = words(
    "model_type architectures hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps vocab_size max_position_embeddings attention_bias hidden_act "
    "layer_types rope_theta rope_parameters rope_scaling sliding_window use_sliding_window mlp_bias"
)
# The keys of a layer that say the same in z-lab's spelling.
_SHARED = _LAYER_KEYS - {"model_type", "architectures"}
_TRAINING = words(
    "max_anchors pure_draft_prefix_len emb_dim gru_hidden_dim lambda_base_start lambda_base_decay_ratio auf "
    "num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size "
    "moe_experts_implementation"
)
_NEUTRAL: Mapping[str, Neutral] = {
    "projector_type": off("dflash"),
    "shift_label": off(False),
    "draft_ffn_type": off("dense"),
    "quantization_config": off(),
    "input_embedding_scale": off(1, 1.0),
    "output_multiplier": off(1, 1.0),
    "final_logit_softcapping": off(0, 0.0),
}
_TOP_KEYS = (
    words(
        "architectures speculators_model_type speculators_version speculators_config transformer_layer_config "
        "draft_vocab_size block_size target_hidden_size aux_hidden_state_layer_ids mask_token_id "
        "sliding_window_non_causal num_target_layers"
    )
    | _PART_KEYS
    | frozenset(_NEUTRAL)
    | _TRAINING
    | IRRELEVANT
)
_METHOD_KEYS = words("proposal_type speculative_tokens verifier_accept_k accept_tolerance")


def _detect(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return any(key in raw for key in ("speculators_model_type", "speculators_config", "transformer_layer_config"))


def config_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    """The one meaning of a speculators config.json. The file names its target but not how many layers it has:
    `target` settles that, unless the file gives num_target_layers.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config is a {type(raw).__name__}: it must be an object")
    algorithm = _algorithm(raw)
    known_only("in a speculators config", raw, _TOP_KEYS)
    neutral_only(raw, _NEUTRAL)
    layer = object_of(raw, "transformer_layer_config")
    known_only("in transformer_layer_config", layer, _LAYER_KEYS | IRRELEVANT)
    neutral_only(layer, {"mlp_bias": off(False)})
    if layer.get("model_type") not in (None, "qwen3", "llama"):
        raise ConfigError(
            f"model_type is {layer['model_type']!r} in transformer_layer_config: supported are 'qwen3' and 'llama', "
            "whose layers are those of Qwen3 in a draft"
        )
    num_target_layers = stated_or_of_target(
        raw, "num_target_layers", None if target is None else target.num_layers, _LABEL
    )
    from_anchor = raw.get("sample_from_anchor", algorithm == "dspark")  # the default of each algorithm's config class
    least = 1 if from_anchor is True else 2
    block_size = require_int("block_size", requires(raw, "block_size", "it is the width of the block"), least=least)
    _check_proposals(raw, algorithm, block_size if from_anchor is True else block_size - 1)
    reduced = _reduced_vocabulary(raw, layer)
    flat = _flat(raw, layer, algorithm)
    flat["num_target_layers"] = require_int("num_target_layers", num_target_layers)
    hidden = raw.get("target_hidden_size") or layer.get("hidden_size")
    taps = _taps(raw, flat["num_target_layers"], hidden, fc_shape)
    nest = {"block_size": block_size, "mask_token_id": raw.get("mask_token_id"), "target_layer_ids": taps}
    flat["dflash_config"] = {**nest, **{key: raw[key] for key in sorted(_PART_KEYS) if raw.get(key) is not None}}
    return dataclasses.replace(resolve(flat, allow_mask_is_eos=allow_mask_is_eos), draft_vocab_size=reduced)


def _algorithm(raw: Mapping[str, Any]) -> str:
    algorithm = requires(raw, "speculators_model_type", "it names the kind of draft")
    if algorithm not in _ALGORITHMS:
        raise ConfigError(f"speculators_model_type is {algorithm!r}: supported are {' and '.join(_ALGORITHMS)}")
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _CLASSES[algorithm]:
        fits = " or ".join(_CLASSES[algorithm])
        raise ConfigError(f"architectures is {names!r}: a draft of speculators_model_type {algorithm!r} is a {fits}")
    return str(algorithm)


def _check_proposals(raw: Mapping[str, Any], algorithm: str, most: int) -> None:
    given = raw.get("speculators_config")
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculators_config is {given!r}: it must be an object")
    known = ("algorithm", "proposal_methods", "default_proposal_method", "verifier")
    known_only("in speculators_config", given, known)
    if given.get("algorithm") not in (None, algorithm):
        raise ConfigError(
            f"speculators_config.algorithm is {given['algorithm']!r} and speculators_model_type {algorithm!r}: "
            "make them equal"
        )
    methods = given.get("proposal_methods") or []
    if not isinstance(methods, list) or not all(isinstance(method, Mapping) for method in methods):
        raise ConfigError(f"proposal_methods is {methods!r}: it must be a list of objects")
    for method in methods:
        known_only("in proposal_methods", method, _METHOD_KEYS)
        count = method.get("speculative_tokens")
        if count is not None and require_int("speculative_tokens", count) > most:
            raise ConfigError(f"speculative_tokens is {count}: this block_size proposes at most {most}")


def _reduced_vocabulary(raw: Mapping[str, Any], layer: Mapping[str, Any]) -> int | None:
    """How many ids the head has, None for all."""
    given = raw.get("draft_vocab_size")
    return None if given is None or given == layer.get("vocab_size") else require_int("draft_vocab_size", given)


def _flat(raw: Mapping[str, Any], layer: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """The layer's settings in z-lab's spelling: a full layer is bidirectional, a sliding one as the file says."""
    flat = {key: value for key, value in layer.items() if key in _SHARED or key.endswith("_token_id")}
    flat.pop("mlp_bias", None)
    for key in ("eos_token_id", "pad_token_id"):
        if raw.get(key) is not None:
            flat[key] = raw[key]
    flat["architectures"], flat["model_type"] = [CLASS_OF_FAMILY[algorithm]], "qwen3"
    if raw.get("target_hidden_size") is not None:
        flat["target_hidden_size"] = raw["target_hidden_size"]
    types = layer.get("layer_types")
    slides = isinstance(types, list) and "sliding_attention" in types
    if layer.get("use_sliding_window") is None:
        flat["use_sliding_window"] = slides
    free = raw.get("sliding_window_non_causal")
    if free is not None:
        require_bool("sliding_window_non_causal", free)
    if (algorithm == "dflash2") if free is None else free:  # the default of each algorithm's config class
        flat["is_causal"] = False
    return flat


def _taps(raw: Mapping[str, Any], num_target_layers: int, hidden: Any, fc_shape: tuple[int, ...] | None) -> list[int]:
    name = "aux_hidden_state_layer_ids"
    ids = raw.get(name)
    if ids is None:
        expects = ""
        if fc_shape is not None and len(fc_shape) == 2 and isinstance(hidden, int) and hidden > 0:
            expects = f"; fc expects {fc_shape[1] // hidden} taps (fc.weight is {list(fc_shape)})"
        raise ConfigError(f"{name} is missing: list the taps, one more than the target layer's index each{expects}")
    if not isinstance(ids, list) or any(isinstance(tap, bool) or not isinstance(tap, int) for tap in ids):
        raise ConfigError(f"{name} is {ids!r}: it must be a list of integers")
    if ids != sorted(set(ids)):
        raise ConfigError(f"{name} is {ids!r}: the ids must rise, none twice; their order is that of fc's columns")
    beyond = [tap for tap in ids if not 1 <= tap < num_target_layers]
    if beyond:
        raise ConfigError(
            f"{name} holds {beyond[0]}: a tap is at least 1 (after the first layer) and below num_target_layers, "
            f"{num_target_layers}; the embedding and the last layer cannot be tapped"
        )
    return [tap - 1 for tap in ids]


def config_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The keys of a config. Raises ConfigError for what a speculators file cannot express."""
    _check_expressible(config)
    flat = spell(dataclasses.replace(config, draft_vocab_size=None), dtype=dtype)
    nest = flat.pop("dflash_config")
    algorithm = config.family
    layer = {"model_type": "qwen3", **{key: value for key, value in flat.items() if key in _SHARED}}
    slides = [layer for layer in config.layers if layer.window is not None]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_proposals,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    raw: dict[str, Any] = {
        "architectures": [_CLASSES[algorithm][0]],
        "speculators_model_type": algorithm,
        "dtype": dtype,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size if config.target_hidden_size != config.hidden_size else None,
        "draft_vocab_size": config.num_head_rows,
        "sample_from_anchor": config.predicts_from_anchor,
        "sliding_window_non_causal": not slides[0].is_causal if slides else algorithm == "dflash2",
        "tie_word_embeddings": False,
        **{key: value for key, value in {**flat, **nest}.items() if key in _PART_KEYS},
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": layer,
    }
    return raw


def _check_expressible(config: DraftConfig) -> None:
    missing = None
    if config.family not in _ALGORITHMS:
        missing = f"a {config.family} draft"
    elif isinstance(config.attention, MlaConfig):
        missing = "latent attention (attention_mode 'mla')"
    elif config.target_layer_ids[-1] == config.num_target_layers - 1:
        missing = f"a tap on the last target layer, {config.target_layer_ids[-1]}"
    elif any(layer.is_causal and layer.window is None for layer in config.layers):
        missing = "a causal layer with full attention"
    elif len({layer.is_causal for layer in config.layers if layer.window is not None}) > 1:
        missing = "sliding layers of which some are causal"
    elif config.has_tap_norms:
        missing = "a norm for each tap (fc_norm)"
    elif config.tap_stream in ("attn_res", "mean"):
        missing = f"taps of another stream (aux_hidden_stream {config.tap_stream!r})"
    else:
        for name, neutral in (
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("final_logit_softcapping", None),
        ):
            if getattr(config, name) != neutral:
                missing = f"{name} {getattr(config, name)!r}"
    if missing is not None:
        raise ConfigError(f"{_LABEL} cannot express {missing}")


LAYOUT = Layout(
    name="speculators",
    label=_LABEL,
    detect=_detect,
    config_from_dict=config_from_dict,
    config_to_dict=config_to_dict,
    canonical_name=canonical_name,
    stored_name=lambda name: name,
    own=frozenset({"embed_tokens.weight", "lm_head.weight", HEAD_IDS}),
)
