"""Checkpoints under TorchSpec's training names, read and written.

Owns: its keys and names, and what it cannot say. The fields are resolved as for z-lab. In its configs
`num_target_layers` is the number of taps where `target_num_hidden_layers` gives the layers of the target, and the
layers of the target otherwise. Its exports for serving are of the z-lab dialect, and so are SpecForge's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.formats._layout import Layout
from blockdraft.formats._zlab_config import config_from_dict as resolve
from blockdraft.formats._zlab_config import config_to_dict as spell
from blockdraft.formats._zlab_tensors import canonical_name

__all__ = ["LAYOUT", "config_from_dict", "config_to_dict"]

_LABEL = "a TorchSpec checkpoint"
_MODEL_TYPES = {"dflash": "dflash", "dflash2": "qwen3_dflash2"}
_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}


def _detect(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    if raw.get("architectures") == ["K3DSparkModel"]:
        return False  # the same names, in a class of its own
    has_depth = raw.get("target_num_hidden_layers") is not None
    has_type = raw.get("model_type") in _MODEL_TYPES.values()
    return has_depth or has_type or any(name.startswith("context_proj.") for name in names)


def config_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    """The one meaning of a TorchSpec config.json."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config is a {type(raw).__name__}: it must be an object")
    flat = {key: value for key, value in raw.items() if key not in ("target_num_hidden_layers", "_torchspec_version")}
    if flat.get("model_type") not in (None, "qwen3", *_MODEL_TYPES.values()):
        supported = ", ".join(_MODEL_TYPES.values())
        raise ConfigError(f"model_type is {flat['model_type']!r}: supported in {_LABEL} are qwen3, {supported}")
    flat["model_type"] = "qwen3"
    nest = raw.get("dflash_config")
    taps = raw.get("target_layer_ids")
    if isinstance(nest, Mapping) and nest.get("target_layer_ids") is not None:
        taps = nest["target_layer_ids"]
    count = len(taps) if isinstance(taps, list) else None
    depth, stated = raw.get("target_num_hidden_layers"), raw.get("num_target_layers")
    if depth is None and stated is not None and stated == count:
        raise ConfigError(
            f"num_target_layers is {stated}, the number of taps: target_num_hidden_layers is missing, give the number "
            "of layers of the target"
        )
    if depth is not None:
        if stated is not None and stated not in (count, depth):
            raise ConfigError(
                f"num_target_layers is {stated!r}: beside target_num_hidden_layers {depth!r} it is the number of taps"
                + (f", {count}" if count is not None else "")
            )
        flat["num_target_layers"] = depth
    return resolve(flat, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


def config_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The keys of a config. Raises ConfigError for what a TorchSpec checkpoint cannot express."""
    _check_expressible(config)
    raw = spell(config, dtype=dtype)
    raw["model_type"] = _MODEL_TYPES[config.family]
    raw["num_target_layers"] = config.num_taps
    raw["target_num_hidden_layers"] = config.num_target_layers
    raw["target_hidden_size"] = config.target_hidden_size
    return raw


def _check_expressible(config: DraftConfig) -> None:
    missing = None
    is_latent = isinstance(config.attention, MlaConfig)
    if config.family not in _MODEL_TYPES:
        missing = f"a {config.family} draft"
    elif config.attention.has_bias:
        missing = "biases in attention (attention_bias)"
    elif config.has_tap_norms:
        missing = "a norm for each tap (fc_norm)"
    elif not is_latent and config.rope.kind != "default":
        missing = f"stretched positions (rope_type {config.rope.kind!r}) on grouped-query attention"
    elif config.family == "dflash2":
        if config.target_hidden_size != config.hidden_size:
            missing = f"taps of another width than its own (target_hidden_size {config.target_hidden_size})"
    elif is_latent:
        missing = "latent attention (attention_mode 'mla') in a dflash draft, only in dflash2"
    elif any(layer.window is not None or layer.is_causal for layer in config.layers):
        missing = "sliding or causal layers in a dflash draft, only in dflash2"
    else:
        for name, neutral in (
            ("input_embedding_scale", 1.0),
            ("output_multiplier", 1.0),
            ("final_logit_softcapping", None),
        ):
            if getattr(config, name) != neutral:
                missing = f"{name} {getattr(config, name)!r} in a dflash draft, only in dflash2"
    if missing is not None:
        raise ConfigError(f"{_LABEL} cannot express {missing}")


def _canonical_name(name: str) -> str:
    """Training names, and the names that its exports give to the same tensors."""
    name = canonical_name(name)
    for canonical, training in _NAMES.items():
        if name.startswith(training):
            return canonical + name.removeprefix(training)
    return name


def _stored_name(name: str) -> str:
    for canonical, training in _NAMES.items():
        if name.startswith(canonical):
            return training + name.removeprefix(canonical)
    return name


LAYOUT = Layout(
    name="torchspec",
    label=_LABEL,
    detect=_detect,
    config_from_dict=config_from_dict,
    config_to_dict=config_to_dict,
    canonical_name=_canonical_name,
    stored_name=_stored_name,
    own=frozenset({"embed_tokens.weight", "lm_head.weight"}),
)
