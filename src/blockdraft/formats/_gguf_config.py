"""The keys of llama.cpp's architecture `dflash` and the config that they mean, both ways.

Owns: the keys, what llama.cpp cannot run. Numbers are 32 bit there and the target's number of layers has no key, so
the config also stands under `blockdraft.config`, which llama.cpp skips; reading fails if the two disagree. A file
without that key, from llama.cpp's own converter, is read from the keys alone. Must not know: files, tensors.

Taps count the layers that have run, as in speculators.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from blockdraft.config import DraftConfig, GqaConfig, MlaConfig, RopeConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.formats._keys import known_only, requires, stated_or_of_target, words
from blockdraft.formats._safetensors import parse_json
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY, STAND_ALONE
from blockdraft.formats._zlab_config import config_from_dict as resolve
from blockdraft.formats._zlab_config import config_to_dict as spell

__all__ = ["ARCHITECTURE", "FILE_TYPES", "LABEL", "config_from_dict", "config_to_dict", "json_object", "rope_stretches"]

ARCHITECTURE = "dflash"
LABEL = "a GGUF draft"
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}  # llama.cpp's numbers of "all F32", "mostly F16", ...
_MASK_ID = "tokenizer.ggml.mask_token_id"
_CONFIG = "blockdraft.config"
_YARN_FIXED = {"beta_fast": 32.0, "beta_slow": 1.0}

_KEYS = words(
    "context_length embedding_length block_count feed_forward_length vocab_size attention.head_count "
    "attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon "
    "attention.causal attention.sliding_window attention.sliding_window_pattern rope.freq_base "
    "rope.dimension_count rope.dimension_sections rope.scaling.type rope.scaling.factor "
    "rope.scaling.original_context_length rope.scaling.finetuned block_size target_layers conv_kernel_size "
    "conv_group_size selector_rank selector_top_k embedding_scale logit_scale final_logit_softcapping hidden_act"
)
_KNOWN = frozenset(f"{ARCHITECTURE}.{key}" for key in _KEYS)
# Keys that the config does not settle and that are checked, or mean nothing, by themselves.
_BESIDE = frozenset(
    f"{ARCHITECTURE}.{key}" for key in ("rope.dimension_sections", "rope.scaling.finetuned", "hidden_act")
)


# ---- config to keys --------------------------------------------------------------------------------------------------
def config_to_dict(config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """The keys of a config. Raises ConfigError for what llama.cpp cannot run."""
    _check_expressible(config)
    attention = config.attention
    assert isinstance(attention, GqaConfig)
    windows = [layer.window for layer in config.layers]
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": attention.num_kv_heads,
        "attention.key_length": attention.head_dim,
        "attention.value_length": attention.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.causal": config.layers[0].is_causal,
        **_rope_to_keys(config.rope, attention.head_dim),
        "block_size": config.block_size,
        "target_layers": [tap + 1 for tap in config.target_layer_ids],
    }
    if any(window is not None for window in windows):
        keys["attention.sliding_window"] = next(window for window in windows if window is not None)
        keys["attention.sliding_window_pattern"] = [window is not None for window in windows]
    if config.conv is not None and config.selector is not None:
        keys |= {"conv_kernel_size": config.conv.kernel_size, "conv_group_size": config.conv.group_size}
        keys |= {"selector_rank": config.selector.rank, "selector_top_k": config.selector.top_k}
    if config.input_embedding_scale != 1.0:
        keys["embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        keys["logit_scale"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = config.final_logit_softcapping
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.file_type": FILE_TYPES.get(dtype, 0),
        **{f"{ARCHITECTURE}.{key}": value for key, value in keys.items()},
        _MASK_ID: config.mask_token_id,
        _CONFIG: json.dumps(spell(config, dtype=dtype), allow_nan=False),
    }


def _rope_to_keys(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.freq_base": rope.theta, "rope.dimension_count": head_dim}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.numbers["factor"]}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = int(rope.numbers["original_max_position_embeddings"])
    return keys


def _check_expressible(config: DraftConfig) -> None:
    missing = _missing_part(config) or _missing_layer(config) or _missing_rope(config.rope)
    if missing is not None:
        raise ConfigError(f"{LABEL} cannot express {missing}")


def _missing_part(config: DraftConfig) -> str | None:
    """A part of the draft that llama.cpp's architecture does not have, None if it has all."""
    if config.family not in ("dflash", "dflash2"):
        return f"a {config.family} draft, only dflash and dflash2"
    if isinstance(config.attention, MlaConfig):
        return "latent attention (attention_mode 'mla')"
    if config.attention.has_bias:
        return "biases in attention (attention_bias)"
    if config.has_tap_norms:
        return "a norm for each tap (fc_norm)"
    if config.tap_stream in ("attn_res", "mean"):
        return f"taps of another stream (aux_hidden_stream {config.tap_stream!r})"
    if config.target_hidden_size != config.hidden_size:
        return f"taps of another width than its own (target_hidden_size {config.target_hidden_size})"
    if config.target_layer_ids[-1] == config.num_target_layers - 1:
        return f"a tap on the last target layer, {config.target_layer_ids[-1]}: it taps the input of a next layer"
    top_k = 0 if config.selector is None else config.selector.top_k
    if top_k * (top_k + 1) > config.hidden_size:
        return f"selector_top_k {top_k} at hidden_size {config.hidden_size}: it needs {top_k} * {top_k + 1} channels"
    return None


def _missing_layer(config: DraftConfig) -> str | None:
    """Which layers llama.cpp's two settings for all of them, causality and window, cannot say."""
    if len({layer.is_causal for layer in config.layers}) > 1:
        return "layers of which some are causal: it has one setting for all of them (is_causal)"
    windows = sorted({layer.window for layer in config.layers if layer.window is not None})
    if len(windows) > 1:
        return f"windows {windows} that differ between layers"
    if windows and not config.layers[0].is_causal and windows[0] < config.block_size:
        return f"a window of {windows[0]} in a bidirectional block of {config.block_size}: it sees all rows after one"
    return None


def _missing_rope(rope: RopeConfig) -> str | None:
    if rope.kind != "yarn":
        return None
    numbers = rope.numbers
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if name in numbers:
            return f"{name} of a YaRN rope: it follows from the factor there"
    for name, fixed in _YARN_FIXED.items():
        if numbers[name] != fixed:
            return f"{name} {numbers[name]} of a YaRN rope: it is {fixed} there"
    if not numbers["original_max_position_embeddings"].is_integer():
        return "original_max_position_embeddings that is no whole number"
    return None


# ---- keys to config --------------------------------------------------------------------------------------------------
def config_from_dict(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    """The one meaning of the keys of a file, lists of the tokenizer left out (its tokens: how many they are).

    `target` settles how many layers it has, which a file of llama.cpp's converter does not state.
    """
    architecture = raw.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ConfigError(f"general.architecture is {architecture!r}: a draft has {ARCHITECTURE!r}; {STAND_ALONE}")
    own = {key: value for key, value in raw.items() if key.startswith(f"{ARCHITECTURE}.")}
    known_only("in a GGUF draft", own, _KNOWN)
    _check_neutral(own)
    tokens = raw.get("tokenizer.ggml.tokens")
    if tokens is not None and own.get("dflash.vocab_size", tokens) != tokens:
        raise ConfigError(f"dflash.vocab_size is {own['dflash.vocab_size']} and the tokenizer has {tokens} tokens")
    flat = _flat(raw, target) if raw.get(_CONFIG) is None else json_object(_CONFIG, raw[_CONFIG])
    for name, key in (("eos_token_id", "eos_token_id"), ("pad_token_id", "padding_token_id")):
        if raw.get(f"tokenizer.ggml.{key}") is not None:
            flat[name] = raw[f"tokenizer.ggml.{key}"]
    config = resolve(flat, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)
    _check_agreement(config, raw)
    return config


def _check_neutral(own: Mapping[str, Any]) -> None:
    if own.get("dflash.hidden_act", "silu") != "silu":
        raise ConfigError(f"dflash.hidden_act is {own['dflash.hidden_act']!r}: supported is 'silu'")
    head = own.get("dflash.attention.key_length")
    sections = own.get("dflash.rope.dimension_sections")
    if sections is not None and (not isinstance(head, int) or list(sections) != [head // 2, 0, 0, 0]):
        raise ConfigError(f"dflash.rope.dimension_sections is {sections}: supported is one section of half a head")


def json_object(key: str, text: Any) -> dict[str, Any]:
    """The object in the JSON text of a key. Raises ConfigError for anything else."""
    try:
        value = parse_json(text)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key} is not the JSON of an object: {error}") from error
    return value


def _check_agreement(config: DraftConfig, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError where the file's keys, which llama.cpp reads, are not those of the config beside them."""
    wanted = config_to_dict(config)
    if raw.get(_CONFIG) is None:
        return
    for key in sorted({_MASK_ID, *(key for key in {*wanted, *raw} if key in _KNOWN)} - _BESIDE):
        if not _same(wanted.get(key), raw.get(key)):
            raise ConfigError(
                f"{key} is {raw.get(key)!r}, and {wanted.get(key)!r} follows from {_CONFIG}: write the file anew"
            )


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return _narrow(left) == _narrow(right)
    return bool(left == right)


def _narrow(value: float) -> float:
    """The value as a 32-bit number, infinite where it is too big for one."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def _shortest(value: Any) -> Any:
    """The shortest decimal number that is this 32-bit one: 1e-06 and not 9.99999997e-07."""
    if not isinstance(value, float):
        return value
    return next((short for digits in range(1, 10) if _narrow(short := float(f"{value:.{digits}g}")) == value), value)


def _flat(raw: Mapping[str, Any], target: TargetFacts | None) -> dict[str, Any]:
    """The settings in z-lab's spelling, from the keys that llama.cpp's converter writes."""

    def get(key: str, default: Any = None) -> Any:
        return _shortest(raw.get(f"{ARCHITECTURE}.{key}", default))

    def need(key: str) -> Any:
        return _shortest(requires(raw, f"{ARCHITECTURE}.{key}", "llama.cpp's converter writes it"))

    is_v2 = get("selector_top_k") is not None
    layers, window = need("block_count"), get("attention.sliding_window") or None
    heads = need("attention.head_count")
    head_dim = get("attention.key_length") or need("embedding_length") // heads
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(f"value_length and rope.dimension_count must be key_length, {head_dim}")
    pattern = need("attention.sliding_window_pattern") if window else [False] * layers
    nest = {"block_size": need("block_size"), "mask_token_id": raw.get(_MASK_ID)}
    taps = raw.get(f"{ARCHITECTURE}.target_layers")
    if taps is not None:
        nest["target_layer_ids"] = [tap - 1 for tap in taps]
    if is_v2:
        nest |= {key: need(key) for key in words("conv_kernel_size conv_group_size selector_rank selector_top_k")}
    scales = {
        "input_embedding_scale": get("embedding_scale"),
        "output_multiplier": get("logit_scale"),
        "final_logit_softcapping": get("final_logit_softcapping"),
    }
    nest |= {name: value for name, value in scales.items() if value is not None}
    vocab_size = get("vocab_size") or requires(raw, "tokenizer.ggml.tokens", "the draft's vocabulary is its target's")
    return {
        "architectures": [CLASS_OF_FAMILY["dflash2" if is_v2 else "dflash"]],
        "model_type": "qwen3",
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "max_position_embeddings": need("context_length"),
        "rope_parameters": _rope_from_keys(get),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in pattern],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_causal": get("attention.causal", False),
        "num_target_layers": stated_or_of_target(
            {}, "num_target_layers", None if target is None else target.num_layers, LABEL
        ),
        "dflash_config": nest,
    }


def _rope_from_keys(get: Callable[..., Any]) -> dict[str, Any]:
    kind, factor = get("rope.scaling.type", "none"), get("rope.scaling.factor", 1.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10000.0)}
    if kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    elif kind == "linear" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("none", "linear"):
        raise ConfigError(f"dflash.rope.scaling.type is {kind!r}: supported are none, linear and yarn")
    return {name: value for name, value in rope.items() if value is not None}


def rope_stretches(config: DraftConfig) -> list[float]:
    """By what each pair of a Llama 3 rope turns slower than without it: rope_freqs of the file."""
    numbers, size = config.rope.numbers, config.attention.rope_dim
    slow, fast, factor = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"]
    found = []
    for pair in range(size // 2):
        turns = numbers["original_max_position_embeddings"] * config.rope.theta ** (-2 * pair / size) / (2 * math.pi)
        kept = min(max((turns - slow) / (fast - slow), 0.0), 1.0)
        found.append(1.0 / (kept + (1.0 - kept) / factor))
    return found
