"""Checkpoints of DSpark under the names that its engines know: DeepSpec's for Qwen3, and the one for Kimi K3.

Owns: the two classes, how their keys map to z-lab's, and what they cannot say. Fields are resolved as for z-lab,
which also has a class of its own for DSpark (SpecForge's). Must not know: maths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from blockdraft.config import DraftConfig, GqaConfig, MlaConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.formats._layout import Layout
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY
from blockdraft.formats._zlab_config import config_from_dict as resolve
from blockdraft.formats._zlab_config import config_to_dict as spell
from blockdraft.formats._zlab_tensors import canonical_name

__all__ = ["DEEPSPEC", "KIMI"]

_QWEN_CLASS, _KIMI_CLASS = "Qwen3DSparkModel", "K3DSparkModel"
_KIMI_MODEL_TYPE = "k3_dspark"
_NAMES = {"fc.": "context_proj.", "hidden_norm.": "context_norm.", "norm.": "final_norm."}
_OWN = frozenset({"embed_tokens.weight", "lm_head.weight"})


def _declares(raw: Mapping[str, Any], name: str) -> bool:
    return raw.get("architectures") == [name]


# ---- Qwen3: every field at top level -----------------------------------------------------------------------------
def _qwen_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    return resolve(raw, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


def _qwen_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    label = DEEPSPEC.label
    _check_family(config, label)
    if not isinstance(config.attention, GqaConfig):
        raise ConfigError(f"{label} cannot express latent attention (attention_mode 'mla'), {KIMI.label} can")
    raw = _flat(config, dtype)
    raw["architectures"] = [_QWEN_CLASS]
    return raw


# ---- Kimi K3: latent attention by class, training names --------------------------------------------------------------
def _kimi_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config is a {type(raw).__name__}: it must be an object")
    if raw.get("model_type") not in (None, _KIMI_MODEL_TYPE):
        raise ConfigError(f"model_type is {raw['model_type']!r}: a {_KIMI_CLASS} has {_KIMI_MODEL_TYPE!r}")
    flat = {key: value for key, value in raw.items() if key not in ("target_num_hidden_layers", "_torchspec_version")}
    flat["architectures"], flat["model_type"] = [CLASS_OF_FAMILY["dspark"]], "qwen3"
    if flat.setdefault("attention_mode", "mla") != "mla":
        raise ConfigError(f"attention_mode is {flat['attention_mode']!r}: a {_KIMI_CLASS} has latent attention, 'mla'")
    taps, stated, depth = (
        raw.get(key) for key in ("target_layer_ids", "num_target_layers", "target_num_hidden_layers")
    )
    if depth is None:
        raise ConfigError("target_num_hidden_layers is missing: give the number of layers of the target")
    if stated is not None and isinstance(taps, list) and stated != len(taps):
        raise ConfigError(f"num_target_layers is {stated!r}: here it counts the taps, and there are {len(taps)}")
    flat["num_target_layers"] = depth
    if raw.get("block_size") is None:
        raise ConfigError(
            "block_size is missing: engines take it from their command line for this class; give the number of rows "
            "that the draft was trained with (--block-size), or write it into config.json"
        )
    return resolve(flat, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


def _kimi_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    label = KIMI.label
    _check_family(config, label)
    if not isinstance(config.attention, MlaConfig):
        raise ConfigError(f"{label} cannot express grouped-query attention, {DEEPSPEC.label} can")
    raw = _flat(config, dtype)
    raw["architectures"], raw["model_type"] = [_KIMI_CLASS], _KIMI_MODEL_TYPE
    del raw["attention_mode"]
    raw["num_target_layers"], raw["target_num_hidden_layers"] = config.num_taps, config.num_target_layers
    raw["target_hidden_size"] = config.target_hidden_size
    return raw


def _check_family(config: DraftConfig, label: str) -> None:
    if config.family != "dspark":
        raise ConfigError(f"{label} cannot express a {config.family} draft")


def _flat(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """z-lab's keys with those of the draft at top level."""
    raw = spell(config, dtype=dtype)
    raw |= raw.pop("dflash_config")
    del raw["projector_type"]
    return raw


def _kimi_canonical(name: str) -> str:
    name = canonical_name(name)
    for canonical, training in _NAMES.items():
        if name.startswith(training):
            return canonical + name.removeprefix(training)
    return name


def _kimi_stored(name: str) -> str:
    for canonical, training in _NAMES.items():
        if name.startswith(canonical):
            return training + name.removeprefix(canonical)
    return name


def _detect_qwen(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return _declares(raw, _QWEN_CLASS)


def _detect_kimi(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return _declares(raw, _KIMI_CLASS)


DEEPSPEC = Layout(
    name="deepspec",
    label="a DeepSpec checkpoint",
    detect=_detect_qwen,
    config_from_dict=_qwen_from_dict,
    config_to_dict=_qwen_to_dict,
    canonical_name=canonical_name,
    stored_name=lambda name: name,
    own=_OWN,
)
KIMI = Layout(
    name="k3-dspark",
    label="a K3DSparkModel checkpoint",
    detect=_detect_kimi,
    config_from_dict=_kimi_from_dict,
    config_to_dict=_kimi_to_dict,
    canonical_name=_kimi_canonical,
    stored_name=_kimi_stored,
    own=_OWN,
)
