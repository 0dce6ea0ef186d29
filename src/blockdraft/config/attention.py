"""Attention of a draft: its two kinds, what a row may see in a layer, rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.config.checks import require_bool, require_float, require_int
from blockdraft.errors import ConfigError


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

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that turn with the position."""
        return self.head_dim

    @property
    def num_cached(self) -> int:
        """Numbers that the draft keeps per committed position and layer."""
        return 2 * self.num_kv_heads * self.head_dim

    def softmax_scale(self, rope: RopeConfig) -> float:
        """What scores are multiplied by; a stretched rope changes nothing here."""
        return self.head_dim**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention: keys and values of all heads are made from one latent per position.

    `q_lora_rank` None: one query projection instead of a low-rank pair. `has_bias` concerns q_a_proj,
    kv_a_proj_with_mqa and o_proj, as in the DeepSeek models; the others never have one.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    has_bias: bool

    def __post_init__(self) -> None:
        require_int("num_attention_heads", self.num_heads)
        if self.q_lora_rank is not None:
            require_int("q_lora_rank", self.q_lora_rank)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            require_int(name, getattr(self, name))
        require_int("qk_rope_head_dim", self.qk_rope_head_dim, least=2)
        require_bool("attention_bias", self.has_bias)
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}: rotary positions need an even number")

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key: the part without positions, then the rotated part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that turn with the position."""
        return self.qk_rope_head_dim

    @property
    def num_cached(self) -> int:
        """Numbers that the draft keeps per committed position and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def softmax_scale(self, rope: RopeConfig) -> float:
        """What scores are multiplied by; YaRN's magnitude enters squared, for query and key."""
        return self.qk_head_dim**-0.5 * rope.magnitude(rope.numbers.get("mscale_all_dim", 0.0)) ** 2


AttentionConfig = GqaConfig | MlaConfig


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

    def magnitude(self, scale: float) -> float:
        """YaRN's magnitude, which grows with the factor; 1 for every other kind."""
        if self.kind != "yarn" or self.numbers["factor"] <= 1.0:
            return 1.0
        return 0.1 * scale * math.log(self.numbers["factor"]) + 1.0
