"""The config.json of z-lab drafts and of DSpark and DSpine, which share its keys: one strict resolver, and its inverse.

Owns: what the fields mean together, and defaults. Must not know: tensors, weight files, maths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.config import (
    ConvConfig,
    DraftConfig,
    Family,
    LayerConfig,
    MlaConfig,
    RopeConfig,
    SelectorConfig,
    require_bool,
    require_float,
    require_int,
    token_ids,
)
from blockdraft.errors import ConfigError
from blockdraft.formats._zlab_attention import attention_from_fields, attention_to_dict
from blockdraft.formats._zlab_fields import Fields, same
from blockdraft.formats._zlab_heads import heads_from_fields, injection_to_dict, spark_to_dict
from blockdraft.formats._zlab_keys import is_on, is_one

CLASS_OF_FAMILY: Mapping[str, str] = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "dspine": "DSpineDraftModel",
}
_FAMILY_OF_CLASS: Mapping[str, Family] = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DSpineDraftModel": "dspine",
}
# Classes whose layers are others than the ones here.
_OTHER_CLASSES = {
    "Gemma4DSparkModel": "its layers have norms before and behind each sublayer and an unscaled softmax",
    "DeepseekV4DSparkModel": "its layers are those of DeepSeek-V4",
}
_MAX_LAYERS = 1000
STAND_ALONE = "this is a stand-alone model, not a draft: pass it as --target"


def config_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
) -> DraftConfig:
    """The one meaning of a z-lab config.json; anything missing, unknown or contradictory is a ConfigError.

    `fc_shape` is the shape of fc.weight if it is known: it makes the message about missing taps exact.
    `allow_mask_is_eos`: consent to a mask id that is also the end or pad id.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config is a {type(raw).__name__}: it must be an object")
    declared = _declared_class(raw)
    family = _FAMILY_OF_CLASS[declared]
    fields = Fields(raw)
    if raw.get("model_type") not in (None, "qwen3"):
        raise ConfigError(f"model_type is {raw['model_type']!r}: a {declared} has model_type 'qwen3'")
    if raw.get("hidden_act") not in (None, "silu"):
        raise ConfigError(f"hidden_act is {raw['hidden_act']!r}: supported is 'silu'")
    hidden_size = require_int("hidden_size", fields.require_top("hidden_size"))
    vocab_size = require_int("vocab_size", fields.require_top("vocab_size"))
    num_layers = require_int("num_hidden_layers", fields.require_top("num_hidden_layers"))
    if num_layers > _MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {num_layers}: a draft of more than {_MAX_LAYERS} layers is a mistake")
    target_hidden_size = fields.pick("target_hidden_size")
    if target_hidden_size is None:
        target_hidden_size = hidden_size
    draft_vocab_size = fields.pick("draft_vocab_size")
    if draft_vocab_size is not None and draft_vocab_size != vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {draft_vocab_size!r}: supported is the full vocabulary, vocab_size {vocab_size}"
        )
    conv, selector = _parts(fields, declared)
    heads = heads_from_fields(fields, family)
    config = DraftConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.require_top("intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=fields.require_top("rms_norm_eps"),
        max_position_embeddings=fields.require_top("max_position_embeddings"),
        attention=attention_from_fields(fields, hidden_size, num_layers),
        layers=_layers(fields, num_layers, is_causal=family == "dspine"),
        rope=_rope(raw),
        block_size=fields.require(
            "block_size", "it counts the rows of the block, anchor included; there is no default"
        ),
        mask_token_id=fields.require("mask_token_id", "give the id of the mask token; there is no default"),
        target_layer_ids=_taps(fields, target_hidden_size, fc_shape),
        num_target_layers=fields.require("num_target_layers", "give the number of layers of the target"),
        target_hidden_size=target_hidden_size,
        conv=conv,
        selector=selector,
        input_embedding_scale=_or(fields.pick("input_embedding_scale"), 1.0),
        output_multiplier=_or(fields.pick("output_multiplier"), 1.0),
        final_logit_softcapping=_softcap(fields.pick("final_logit_softcapping")),
        has_tap_norms=_or(fields.pick("fc_norm"), False),
        tap_stream=fields.pick("aux_hidden_stream"),
        predicts_from_anchor=heads.predicts_from_anchor,
        markov=heads.markov,
        confidence=heads.confidence,
        injection=heads.injection,
    )
    if not allow_mask_is_eos:
        _check_mask_role(raw, config.mask_token_id)
    return config


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _declared_class(raw: Mapping[str, Any]) -> str:
    names: Any = raw.get("architectures")
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise ConfigError(f"architectures is {names!r}: it must be a list of class names")
    known = [name for name in names or [] if name in _FAMILY_OF_CLASS]
    if len(known) == 1 and names is not None and len(names) == 1:
        return str(known[0])
    supported = ", ".join(_FAMILY_OF_CLASS)
    if not names:
        if not any(key in raw for key in ("dflash_config", "target_layer_ids", "block_size", "mask_token_id")):
            raise ConfigError(f"architectures is missing and there is no dflash_config: {STAND_ALONE}")
        if "dspine_config" in raw:
            raise ConfigError(f"architectures is missing: by its fields [{CLASS_OF_FAMILY['dspine']!r}] would fit")
        has_parts = any("conv_" in key or "selector_" in key for key in [*raw, *(raw.get("dflash_config") or {})])
        fits = CLASS_OF_FAMILY["dflash2" if has_parts else "dflash"]
        raise ConfigError(f"architectures is missing: by its fields [{fits!r}] would fit")
    text = ", ".join(names)
    for name in names:
        if name in _OTHER_CLASSES:
            raise ConfigError(f"architectures is {text}: not supported, {_OTHER_CLASSES[name]}")
    if "dflash_config" not in raw and all(not _is_draft_class(name) for name in names):
        raise ConfigError(f"architectures is {text}: {STAND_ALONE}")
    raise ConfigError(f"architectures is {text}: supported is exactly one of {supported}")


def _is_draft_class(name: str) -> bool:
    return any(word in name for word in ("DFlash", "DSpark", "DSpine", "Assistant", "Draft", "Eagle"))


def _parts(fields: Fields, declared: str) -> tuple[ConvConfig | None, SelectorConfig | None]:
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    found = {name: fields.pick(name) for name in names}
    given = [name for name in names if found[name] is not None]
    is_v2 = declared == CLASS_OF_FAMILY["dflash2"]
    if not is_v2 and given:
        raise ConfigError(
            f"architectures says {declared} but {', '.join(given)} "
            f"{'is' if len(given) == 1 else 'are'} given: DFlash2DraftModel would fit"
        )
    if not is_v2:
        return None, None
    if not given:
        raise ConfigError(
            "architectures says DFlash2DraftModel but there are no convolution and selector fields: "
            "DFlashDraftModel would fit"
        )
    missing = [name for name in names if found[name] is None]
    if missing:
        raise ConfigError(f"DFlash2DraftModel needs {', '.join(missing)}: there is no default")
    return (
        ConvConfig(kernel_size=found["conv_kernel_size"], group_size=found["conv_group_size"]),
        SelectorConfig(rank=found["selector_rank"], top_k=found["selector_top_k"]),
    )


def _layers(fields: Fields, num_layers: int, *, is_causal: bool) -> tuple[LayerConfig, ...]:
    """`is_causal`: the class itself makes every layer causal where the file says nothing."""
    types = fields.top.get("layer_types")
    is_on = fields.pick("use_sliding_window", "use_swa")
    if is_on is not None:
        require_bool("use_sliding_window", is_on)
    window = fields.pick("sliding_window", "swa_window_size")
    if window is not None:
        require_int("sliding_window", window)
    causal = fields.pick("is_causal", "causal")
    if causal is not None:
        require_bool("is_causal", causal)
    elif is_causal:
        causal = True
    if types is None:
        if fields.nest.get("use_swa") is True:
            types = ["sliding_attention"] * num_layers
        elif is_on:
            raise ConfigError("use_sliding_window is true and layer_types is missing: say which layers slide")
        else:
            types = ["full_attention"] * num_layers
    elif not isinstance(types, list) or len(types) != num_layers:
        raise ConfigError(f"layer_types is {types!r}: it must list one type for each of {num_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(f"layer_types holds {kind!r}: supported are full_attention and sliding_attention")
    slides = [kind == "sliding_attention" for kind in types]
    if fields.nest.get("use_swa") is True and not any(slides):
        slides = [True] * num_layers
    _check_window(any(slides), is_on, window)
    return tuple(
        LayerConfig(is_causal=slide if causal is None else causal, window=window if slide else None) for slide in slides
    )


def _check_window(any_slides: bool, is_on: bool | None, window: int | None) -> None:
    if any_slides and window is None:
        raise ConfigError("a layer slides and sliding_window is missing: give the width of the window")
    if any_slides and not is_on:
        state = "false" if is_on is False else "missing"
        raise ConfigError(f"a layer slides and use_sliding_window is {state}: readers disagree, set it to true")
    if not any_slides and is_on:
        raise ConfigError("use_sliding_window is true and no layer in layer_types slides: make them agree")
    if not any_slides and window is not None and is_on is None:
        raise ConfigError(
            f"sliding_window is {window} and no layer slides: it cannot take effect, "
            "set use_sliding_window to false or name the sliding layers in layer_types"
        )


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    params = _rope_params("rope_parameters", raw.get("rope_parameters"))
    scaling = _rope_params("rope_scaling", raw.get("rope_scaling"))
    if params and scaling:
        for name in sorted((set(params) & set(scaling)) - {"rope_theta"}):
            if not same(params[name], scaling[name]):
                raise ConfigError(
                    f"rope_parameters and rope_scaling differ in {name}: {params[name]!r} against {scaling[name]!r}"
                )
        kinds = [set(place) - {"rope_theta"} for place in (params, scaling)]
        if kinds[0] and kinds[1] and kinds[0] != kinds[1]:
            odd = ", ".join(sorted(kinds[0] ^ kinds[1]))
            raise ConfigError(f"rope_parameters and rope_scaling differ in {odd}: keep one of the two")
    places = {
        "rope_theta": raw.get("rope_theta"),
        "rope_parameters.rope_theta": params.get("rope_theta"),
        "rope_scaling.rope_theta": scaling.get("rope_theta"),
    }
    found = [(name, value) for name, value in places.items() if value is not None]
    if not found:
        raise ConfigError("rope_theta is missing: give it at top level or in rope_parameters; there is no default")
    for name, value in found[1:]:
        if not same(found[0][1], value):
            raise ConfigError(f"rope_theta is given twice and differs: {found[0][1]!r} against {value!r} in {name}")
    merged = {**scaling, **params}
    merged.pop("rope_theta", None)
    kind = merged.pop("rope_type", "default" if not merged else None)
    if kind is None:
        raise ConfigError(
            f"rope_type is missing and {', '.join(sorted(merged))} is given: say which type it belongs to"
        )
    return RopeConfig(theta=found[0][1], kind=kind, params=tuple(merged.items()))


def _rope_params(where: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}: it must be an object")
    params = {str(key): entry for key, entry in value.items() if entry is not None}
    if any(isinstance(entry, Mapping) for entry in params.values()):
        raise ConfigError(f"{where} gives one set of numbers per layer type: supported is one for all layers")
    if "type" in params:
        alias = params.pop("type")
        if params.setdefault("rope_type", alias) != alias:
            raise ConfigError(f"{where} has type {alias!r} and rope_type {params['rope_type']!r}: keep one")
    if not is_one(params.get("partial_rotary_factor")):
        raise ConfigError(
            f"partial_rotary_factor is {params['partial_rotary_factor']!r} in {where}: supported is 1, "
            "every dimension of a head is rotated"
        )
    params.pop("partial_rotary_factor", None)
    if not is_on(params.get("truncate")):
        raise ConfigError(f"truncate is {params['truncate']!r} in {where}: supported is true")
    params.pop("truncate", None)
    return params


def _taps(fields: Fields, width: Any, fc_shape: tuple[int, ...] | None) -> tuple[int, ...]:
    taps = fields.pick("target_layer_ids")
    if taps is None:
        expects = ""
        width = require_int("target_hidden_size", width)
        if fc_shape is not None and len(fc_shape) == 2 and fc_shape[1] % width == 0:
            expects = f"; fc expects {fc_shape[1] // width} taps (fc.weight is {list(fc_shape)})"
        raise ConfigError(
            "target_layer_ids is missing: list the target layers that the draft was trained on, "
            f"none is guessed{expects}"
        )
    if not isinstance(taps, list):
        raise ConfigError(f"target_layer_ids is {taps!r}: it must be a list of layer ids")
    return tuple(taps)


def _softcap(value: Any) -> float | None:
    if value is None:
        return None
    cap = require_float("final_logit_softcapping", value, above=None)
    return cap if cap > 0 else None


def _check_mask_role(raw: Mapping[str, Any], mask: int) -> None:
    for name in ("eos_token_id", "pad_token_id"):
        if mask in token_ids(name, raw.get(name)):
            raise ConfigError(
                f"mask_token_id is {mask}, which is also {name}: give another mask id, or allow it "
                "explicitly (--allow-mask-is-eos)"
            )


def config_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The published layout of a config. Raises ConfigError for what the layout cannot express."""
    if config.draft_vocab_size is not None:
        raise ConfigError(
            f"the z-lab layout cannot express a reduced draft vocabulary (draft_vocab_size {config.draft_vocab_size} "
            f"of {config.vocab_size})"
        )
    window, causal = _common_layer(config)
    rope = config.rope
    raw: dict[str, Any] = {
        "architectures": [CLASS_OF_FAMILY[config.family]],
        "model_type": "qwen3",
        "dtype": dtype,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        **attention_to_dict(config.attention),
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.numbers},
        "rope_theta": rope.theta,
        "layer_types": ["sliding_attention" if layer.window else "full_attention" for layer in config.layers],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": config.num_layers,
        "is_causal": causal,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "dflash_config": draft_fields(config),
    }
    if config.injection is not None:
        raw["dspine_config"] = injection_to_dict(config.injection)
    if config.has_tap_norms or isinstance(config.attention, MlaConfig):
        raw["fc_norm"] = config.has_tap_norms
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    return raw


def _common_layer(config: DraftConfig) -> tuple[int | None, bool | None]:
    """The one window and the one causality of the layout; causality None follows the windows."""
    windows = {layer.window for layer in config.layers if layer.window is not None}
    if len(windows) > 1:
        raise ConfigError(f"windows {sorted(windows)} differ: the z-lab layout has one sliding_window")
    causal = {layer.is_causal for layer in config.layers}
    if len(causal) > 1 and any(layer.is_causal != (layer.window is not None) for layer in config.layers):
        raise ConfigError("is_causal differs between layers, and not as windows do: the z-lab layout has one")
    return next(iter(windows), None), next(iter(causal)) if len(causal) == 1 else None


def draft_fields(config: DraftConfig) -> dict[str, Any]:
    """The fields of the draft itself, which stand in `dflash_config`."""
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if isinstance(config.attention, MlaConfig):
        nested["attention_mode"] = "mla"
    if config.tap_stream is not None:
        nested["aux_hidden_stream"] = config.tap_stream
    if config.conv is not None and config.selector is not None:
        nested["conv_kernel_size"] = config.conv.kernel_size
        nested["conv_group_size"] = config.conv.group_size
        nested["selector_rank"] = config.selector.rank
        nested["selector_top_k"] = config.selector.top_k
    if config.family == "dspark":
        nested |= {"projector_type": "dspark", **spark_to_dict(config)}
    if config.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        nested["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    return nested
