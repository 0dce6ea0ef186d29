"""Drafts in the layout of transformers' own DFlash assistant, read and written.

Owns: its keys and names, and what it cannot say. The fields are resolved as for z-lab. Its sliding_window is the
greatest distance at which a position is still seen, one less than the width of the window. It states neither the
target's vocabulary nor its number of layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig, TargetFacts, require_int
from blockdraft.errors import ConfigError
from blockdraft.formats._keys import Neutral, known_only, neutral_only, off, requires, stated_or_of_target, words
from blockdraft.formats._layout import Layout
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY
from blockdraft.formats._zlab_config import config_from_dict as resolve
from blockdraft.formats._zlab_config import config_to_dict as spell
from blockdraft.formats._zlab_keys import IRRELEVANT

__all__ = ["LAYOUT", "config_from_dict", "config_to_dict"]

_LABEL = "a transformers assistant"
_MODEL_TYPE, _CLASS = "muse_glimmer_assistant", "MuseGlimmerAssistantModel"
# Keys that say the same in z-lab's spelling.
_SHARED = words(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
    "max_position_embeddings hidden_act layer_types rope_parameters rope_theta rope_scaling eos_token_id pad_token_id"
)
_DRAFT_KEYS = ("block_size", "mask_token_id", "target_layer_ids")
_NEUTRAL: Mapping[str, Neutral] = {
    "attention_bias": off(False),
    "is_causal": off(False),
    "use_sliding_window": off(True),
    "quantization_config": off(),
}
_KNOWN = (
    _SHARED
    | frozenset(_DRAFT_KEYS)
    | frozenset(_NEUTRAL)
    | {"architectures", "model_type", "sliding_window", "vocab_size", "num_target_layers"}
    | IRRELEVANT
)
_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_CANONICAL = {stored: name for name, stored in _NAMES.items()}


def _detect(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return raw.get("model_type") == _MODEL_TYPE or raw.get("architectures") == [_CLASS]


def config_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    """The one meaning of an assistant's config.json; `target` settles vocab_size and num_target_layers, which the
    files of transformers do not state.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config is a {type(raw).__name__}: it must be an object")
    if raw.get("model_type") != _MODEL_TYPE or raw.get("architectures") not in (None, [_CLASS]):
        raise ConfigError(
            f"model_type is {raw.get('model_type')!r} and architectures {raw.get('architectures')!r}: {_LABEL} has "
            f"model_type {_MODEL_TYPE!r} and the class {_CLASS}"
        )
    known_only("in an assistant's config", raw, _KNOWN)
    neutral_only(raw, _NEUTRAL)
    types = requires(raw, "layer_types", "say of each layer whether it slides; there is no default")
    flat = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    flat["architectures"], flat["model_type"] = [CLASS_OF_FAMILY["dflash"]], "qwen3"
    flat["is_causal"] = False
    flat["use_sliding_window"] = isinstance(types, list) and "sliding_attention" in types
    if flat["use_sliding_window"]:
        distance = requires(raw, "sliding_window", "a layer slides, give the distance at which it still sees")
        flat["sliding_window"] = require_int("sliding_window", distance) + 1
    flat["vocab_size"] = stated_or_of_target(raw, "vocab_size", None if target is None else target.vocab_size, _LABEL)
    flat["num_target_layers"] = stated_or_of_target(
        raw, "num_target_layers", None if target is None else target.num_layers, _LABEL
    )
    flat["dflash_config"] = {key: raw[key] for key in _DRAFT_KEYS if raw.get(key) is not None}
    return resolve(flat, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


def config_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The keys of a config. Raises ConfigError for what the assistant of transformers cannot express."""
    _check_expressible(config)
    flat = spell(config, dtype=dtype)
    raw: dict[str, Any] = {"architectures": [_CLASS], "model_type": _MODEL_TYPE, "dtype": dtype}
    raw |= {key: value for key, value in flat.items() if key in _SHARED}
    raw |= {key: flat["dflash_config"][key] for key in _DRAFT_KEYS}
    raw |= {"vocab_size": config.vocab_size, "num_target_layers": config.num_target_layers}
    # The class fills in ids of its own model for keys that are absent.
    raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
    if config.max_window is not None or any(layer.window for layer in config.layers):
        raw["sliding_window"] = flat["sliding_window"] - 1
    return raw


def _check_expressible(config: DraftConfig) -> None:
    missing = None
    if config.family != "dflash":
        missing = f"a {config.family} draft, only dflash"
    elif isinstance(config.attention, MlaConfig):
        missing = "latent attention (attention_mode 'mla')"
    elif config.attention.has_bias:
        missing = "biases in attention (attention_bias)"
    elif any(layer.is_causal for layer in config.layers):
        missing = "a causal layer, all of its layers are bidirectional"
    elif any(layer.window == 1 for layer in config.layers):
        missing = "a window of 1, which it would take for none"
    elif config.target_hidden_size != config.hidden_size:
        missing = f"taps of another width than its own (target_hidden_size {config.target_hidden_size})"
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


def _canonical_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name in _NAMES:  # it would not be found there by transformers, so it does not count as the tensor here
        return f"{name} outside of encoder"
    return _CANONICAL.get(name, name)


LAYOUT = Layout(
    name="transformers",
    label=_LABEL,
    detect=_detect,
    config_from_dict=config_from_dict,
    config_to_dict=config_to_dict,
    canonical_name=_canonical_name,
    stored_name=lambda name: _NAMES.get(name, name),
    own=frozenset(),
)
