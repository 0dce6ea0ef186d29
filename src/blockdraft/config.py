"""What every drafter hyper-parameter means, once, and whether a draft fits a target.

Owns: `DraftConfig` and its parts (frozen, validated), `TargetFacts`, the pairing rules.
Must not know: torch, files, the spelling of any checkpoint dialect of a draft.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.errors import ConfigError, PairError

Family = Literal["dflash", "dflash2"]
Verdict = Literal["pass", "fail", "unknown"]


def require_int(name: str, value: object, *, least: int = 1) -> int:
    """The value itself if it is an integer (a bool is not one) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}: it must be an integer of at least {least}")
    if value < least:
        raise ConfigError(f"{name} is {value}: it must be at least {least}")
    return value


def require_float(name: str, value: object, *, above: float | None = 0.0) -> float:
    """The value as a float if it is a finite number greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}: it must be a number")
    if not -sys.float_info.max <= value <= sys.float_info.max:
        raise ConfigError(f"{name} is {value}: it must be finite")
    if above is not None and value <= above:
        raise ConfigError(f"{name} is {value}: it must be greater than {above:g}")
    return float(value)


def require_bool(name: str, value: object) -> bool:
    """The value itself if it is true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}: it must be true or false")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaConfig:
    """Grouped-query attention: H query heads share K key-value heads of width A."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool

    def __post_init__(self) -> None:
        require_int("num_attention_heads", self.num_heads)
        require_int("num_key_value_heads", self.num_kv_heads)
        require_int("head_dim", self.head_dim, least=2)
        require_bool("attention_bias", self.has_bias)
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads is {self.num_heads}: it must be a multiple of "
                f"num_key_value_heads, {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}: rotary positions need an even number")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What a row of the block may see in one layer. `window` None means full attention."""

    is_causal: bool
    window: int | None

    def __post_init__(self) -> None:
        require_bool("is_causal", self.is_causal)
        if self.window is not None:
            require_int("sliding_window", self.window)


_ROPE_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
}
# The two numbers that the YaRN method itself fixes.
_ROPE_DEFAULTS: Mapping[str, Mapping[str, float]] = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. `params` holds the other numbers of `kind` as sorted (name, number) pairs.

    A mapping may be given for `params`; it is stored as pairs, so that the value is hashable.
    """

    theta: float
    kind: str = "default"
    params: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", require_float("rope_theta", self.theta, above=1.0))
        if not isinstance(self.kind, str) or self.kind not in _ROPE_REQUIRED:
            raise ConfigError(f"rope_type is {self.kind!r}: supported are {', '.join(_ROPE_REQUIRED)}")
        required = _ROPE_REQUIRED[self.kind]
        allowed = required + _ROPE_OPTIONAL.get(self.kind, ())
        numbers = {**_ROPE_DEFAULTS.get(self.kind, {}), **dict(self.params)}
        for name, number in numbers.items():
            if name not in allowed:
                takes = ", ".join(allowed) or "no further numbers"
                raise ConfigError(f"rope parameter {name} is unknown for rope_type {self.kind}: it takes {takes}")
            above = None if name.startswith("mscale") else 0.0
            numbers[name] = require_float(f"rope parameter {name}", number, above=above)
        missing = [name for name in required if name not in numbers]
        if missing:
            raise ConfigError(f"rope_type {self.kind} needs {', '.join(missing)}: add it to rope_parameters")
        object.__setattr__(self, "params", tuple(sorted(numbers.items())))

    @property
    def numbers(self) -> dict[str, float]:
        """The parameters as a fresh dictionary."""
        return dict(self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """The dynamic block convolution: taps over preceding rows, channels that share a kernel."""

    kernel_size: int
    group_size: int

    def __post_init__(self) -> None:
        require_int("conv_kernel_size", self.kernel_size)
        require_int("conv_group_size", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """The candidate selector: codebook rank and number of candidates per proposal."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        require_int("selector_rank", self.rank)
        require_int("selector_top_k", self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """One drafter. `conv` and `selector` are both given (DFlash 2) or both absent (DFlash)."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention: GqaConfig
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
            "num_target_layers",
            "target_hidden_size",
        ):
            require_int(name, getattr(self, name))
        for name in ("rms_norm_eps", "input_embedding_scale", "output_multiplier"):
            object.__setattr__(self, name, require_float(name, getattr(self, name)))
        if self.final_logit_softcapping is not None:
            cap = require_float("final_logit_softcapping", self.final_logit_softcapping)
            object.__setattr__(self, "final_logit_softcapping", cap)
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("num_hidden_layers is 0: a draft needs at least one layer")
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        require_int("block_size", self.block_size, least=2)
        if self.block_size > self.max_position_embeddings:
            raise ConfigError(
                f"block_size is {self.block_size}: it must not exceed max_position_embeddings, "
                f"{self.max_position_embeddings}"
            )
        require_int("mask_token_id", self.mask_token_id, least=0)
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(f"mask_token_id is {self.mask_token_id}: it must be below vocab_size, {self.vocab_size}")
        _check_taps(self.target_layer_ids, self.num_target_layers)
        self._check_parts()

    def _check_parts(self) -> None:
        if (self.conv is None) != (self.selector is None):
            here, gone = ("conv", "selector") if self.selector is None else ("selector", "conv")
            raise ConfigError(
                f"{here} settings are given and {gone} settings are not: DFlash 2 needs both, DFlash needs neither"
            )
        if self.conv is not None and self.hidden_size % self.conv.group_size:
            raise ConfigError(
                f"conv_group_size is {self.conv.group_size}: it must divide hidden_size, {self.hidden_size}"
            )
        if self.selector is not None and self.selector.top_k > self.vocab_size:
            raise ConfigError(
                f"selector_top_k is {self.selector.top_k}: it must not exceed vocab_size, {self.vocab_size}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def family(self) -> Family:
        return "dflash" if self.conv is None else "dflash2"

    @property
    def max_window(self) -> int | None:
        """The widest window, None if any layer sees the whole context."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None


def _check_taps(taps: tuple[int, ...], num_target_layers: int) -> None:
    if not taps:
        raise ConfigError("target_layer_ids is empty: list the target layers that the draft reads")
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int):
            raise ConfigError(f"target_layer_ids holds {tap!r}: every entry must be an integer")
        if tap < 0:
            raise ConfigError(f"target_layer_ids holds {tap}: negative ids are not allowed, the first layer is 0")
        if tap >= num_target_layers:
            raise ConfigError(
                f"target_layer_ids holds {tap}: too big for num_target_layers {num_target_layers}, "
                f"the last layer is {num_target_layers - 1}"
            )
    for index, tap in enumerate(taps):
        if tap in taps[:index]:
            raise ConfigError(f"target_layer_ids {list(taps)} holds {tap} twice: duplicates are not allowed")
        if index and tap < taps[index - 1]:
            raise ConfigError(
                f"target_layer_ids {list(taps)} must rise: {tap} follows {taps[index - 1]}; "
                "the order is the order of fc's columns, so it cannot be sorted here"
            )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RECURRENT_MODEL_TYPES = _words(
    "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text kimi_linear "
    "kimi_k3 glm5_next glm5_next_text falcon_h1 falcon_mamba lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl mamba "
    "mamba2 jamba bamba zamba zamba2 zaya1 granitemoehybrid nemotron_h nemotron_h_omni olmo_hybrid rwkv "
    "xlstm recurrent_gemma bailing_hybrid minimax plamo2"
)
# Layer types whose cache holds one entry per position (or nothing at all); every other name counts as state.
_POSITIONAL_LAYER_TYPES = _words(
    "full_attention attention sliding_attention chunked_attention indexed_attention global_attention "
    "local_attention moe mlp dense sparse"
)
_TEXT_KEYS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a draft must know of a target. `vocab_size` counts rows of the input embedding."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int
    is_recurrent: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TargetFacts:
        """The facts in a Hugging Face config.json, also of a model whose text part is nested."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"the target's config is a {type(config).__name__}: it must be an object")
        if "dflash_config" in config or "DFlash" in str(config.get("architectures")):
            raise ConfigError("this config describes a draft: give the model that it drafts for as --target")
        text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), config)
        if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
            raise ConfigError("the target is an encoder-decoder model: a target must be a causal language model")
        model_type = text.get("model_type") or config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError("model_type is missing from the target's config: give a Hugging Face config.json")
        is_recurrent = _is_recurrent(text) or str(config.get("model_type")) in _RECURRENT_MODEL_TYPES
        end = text.get("eos_token_id") if text.get("eos_token_id") is not None else config.get("eos_token_id")
        pad = text.get("pad_token_id") if text.get("pad_token_id") is not None else config.get("pad_token_id")
        return cls(
            model_type=model_type,
            vocab_size=_target_int(text, model_type, "vocab_size"),
            hidden_size=_target_int(text, model_type, "hidden_size", "n_embd", "d_model"),
            num_layers=_target_int(text, model_type, "num_hidden_layers", "n_layer", "num_layers"),
            max_length=_target_int(
                text, model_type, "max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"
            ),
            is_recurrent=is_recurrent,
            eos_token_ids=token_ids("eos_token_id", end),
            pad_token_id=next(iter(token_ids("pad_token_id", pad)), None),
        )


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """The ids of a config entry that is null, one id or a list of ids; negative ids mean "none"."""
    if value is None:
        return ()
    entries: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise ConfigError(f"{name} is {value!r}: it must be a token id, a list of them or null")
    return tuple(entry for entry in entries if isinstance(entry, int) and entry >= 0)


def _is_recurrent(text: Mapping[str, Any]) -> bool:
    if str(text.get("model_type")) in _RECURRENT_MODEL_TYPES:
        return True
    if text.get("linear_attn_config") or text.get("hybrid_override_pattern"):
        return True
    for key in ("layer_types", "layers_block_type", "block_types"):
        kinds = text.get(key)
        if isinstance(kinds, list) and any(str(kind) not in _POSITIONAL_LAYER_TYPES for kind in kinds):
            return True
    return False


def _target_int(text: Mapping[str, Any], model_type: str, *names: str) -> int:
    for name in names:
        if text.get(name) is not None:
            return require_int(f"the target's {name}", text[name])
    raise ConfigError(
        f"{names[0]} is missing from the config of the target ({model_type}): write it there, or save "
        "the config again with every field that its class fills in"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """One rule of the pairing and how it came out."""

    name: str
    verdict: Verdict
    detail: str


def _equal(name: str, what: str, draft: int, target: int) -> PairRule:
    if draft == target:
        return PairRule(name=name, verdict="pass", detail=f"{what} {draft}")
    return PairRule(name=name, verdict="fail", detail=f"{what}: the draft is made for {draft}, the target has {target}")


def pairing_rules(
    draft: DraftConfig,
    target: TargetFacts,
    *,
    allow_mask_is_eos: bool = False,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
) -> list[PairRule]:
    """Every rule of the pairing, in a fixed order; "unknown" is what a config alone cannot settle.

    `allow_mask_is_eos` is the explicit consent to a mask id that also ends or pads a text.
    `has_own_embedding`, `has_own_head`: the draft's checkpoint carries its own.
    """
    vocabulary = _equal("vocabulary_rows", "vocabulary rows", draft.vocab_size, target.vocab_size)
    if vocabulary.verdict == "fail" and draft.family == "dflash" and has_own_head:
        detail = vocabulary.detail + "; the draft has a head of its own, whether its ids agree cannot be told"
        vocabulary = PairRule(name=vocabulary.name, verdict="unknown", detail=detail)
    width = _equal("draft_width", "width of embedding and head", draft.hidden_size, target.hidden_size)
    if width.verdict == "fail" and has_own_embedding and has_own_head:
        width = PairRule(name=width.name, verdict="pass", detail="the draft has its own embedding and head")
    return [
        vocabulary,
        _equal("hidden_size", "width of the taps", draft.target_hidden_size, target.hidden_size),
        width,
        _equal("num_target_layers", "target layers", draft.num_target_layers, target.num_layers),
        _taps_rule(draft, target),
        _mask_row_rule(draft, target),
        _mask_role_rule(draft, target, allow_mask_is_eos),
        _length_rule(draft, target),
        _recurrent_rule(target),
    ]


def _taps_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    beyond = [tap for tap in draft.target_layer_ids if tap >= target.num_layers]
    if beyond:
        detail = f"taps {beyond} do not exist: the target's last layer is {target.num_layers - 1}"
        return PairRule(name="target_layer_ids", verdict="fail", detail=detail)
    return PairRule(name="target_layer_ids", verdict="pass", detail=f"taps {list(draft.target_layer_ids)}")


def _mask_row_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    inside = draft.mask_token_id < target.vocab_size
    detail = f"mask id {draft.mask_token_id} of {target.vocab_size} embedding rows"
    return PairRule(name="mask_token_row", verdict="pass" if inside else "fail", detail=detail)


def _mask_role_rule(draft: DraftConfig, target: TargetFacts, allowed: bool) -> PairRule:
    name, mask = "mask_token_role", draft.mask_token_id
    roles = ["end of text"] if mask in target.eos_token_ids else []
    roles += ["padding"] if mask == target.pad_token_id else []
    if roles and allowed:
        detail = f"mask id {mask} is also the target's {' and '.join(roles)} id, allowed explicitly"
        return PairRule(name=name, verdict="pass", detail=detail)
    if roles:
        detail = (
            f"mask id {mask} is the target's {' and '.join(roles)} id; if that is meant, allow it (--allow-mask-is-eos)"
        )
        return PairRule(name=name, verdict="fail", detail=detail)
    if not target.eos_token_ids and target.pad_token_id is None:
        detail = "the target's config names neither an end nor a pad id"
        return PairRule(name=name, verdict="unknown", detail=detail)
    return PairRule(name=name, verdict="pass", detail=f"mask id {mask} has no other role")


def _length_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    short, long = draft.max_position_embeddings, target.max_length
    if short >= long:
        return PairRule(name="max_length", verdict="pass", detail=f"draft {short}, target {long} positions")
    detail = f"draft {short}, target {long} positions: nothing is known of proposals beyond {short}"
    return PairRule(name="max_length", verdict="unknown", detail=detail)


def _recurrent_rule(target: TargetFacts) -> PairRule:
    if not target.is_recurrent:
        return PairRule(name="recurrent_state", verdict="pass", detail=f"{target.model_type} keeps no recurrent state")
    detail = f"{target.model_type} keeps recurrent state, which this version cannot roll back exactly"
    return PairRule(name="recurrent_state", verdict="fail", detail=detail)


def check_pair(
    draft: DraftConfig,
    target: TargetFacts,
    *,
    allow_mask_is_eos: bool = False,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
) -> None:
    """Raise one PairError that lists every failed rule; rules that cannot be told do not fail."""
    rules = pairing_rules(
        draft,
        target,
        allow_mask_is_eos=allow_mask_is_eos,
        has_own_embedding=has_own_embedding,
        has_own_head=has_own_head,
    )
    failed = [f"{rule.name}: {rule.detail}" for rule in rules if rule.verdict == "fail"]
    if failed:
        raise PairError(f"this draft does not fit this target ({target.model_type}): " + "; ".join(failed))
