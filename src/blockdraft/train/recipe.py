"""The recipe: every number of a training run, in one strict typed TOML file.

Owns names, types and bounds. An unknown key is an error that names the nearest known one; there is no hidden default:
each field stands in the file.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blockdraft.config import (
    ConvConfig,
    DraftConfig,
    GqaConfig,
    LayerConfig,
    RopeConfig,
    SelectorConfig,
    TargetFacts,
    require_bool,
    require_float,
    require_int,
)
from blockdraft.errors import ConfigError

__all__ = [
    "DraftRecipe",
    "LossRecipe",
    "OptimRecipe",
    "Recipe",
    "differing_keys",
    "read_recipe",
    "recipe_from_dict",
]

_V2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """Shape of the draft; widths that must equal the target's are taken from the target.

    The four numbers of convolution and selector are all 0 for a DFlash draft, all above 0 for a DFlash 2 draft.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    is_causal: bool
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            require_int(f"draft.{name}", getattr(self, name))
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError(
                f"draft.num_heads {self.num_heads}, num_kv_heads {self.num_kv_heads}, head_dim {self.head_dim}: "
                "num_heads must be a multiple of num_kv_heads, and head_dim even"
            )
        require_float("draft.rms_norm_eps", self.rms_norm_eps)
        require_float("draft.rope_theta", self.rope_theta)
        require_int("draft.block_size", self.block_size, least=2)
        require_int("draft.mask_token_id", self.mask_token_id, least=0)
        require_bool("draft.is_causal", self.is_causal)
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        taps = self.target_layer_ids
        for tap in taps:
            require_int("an entry of draft.target_layer_ids", tap, least=0)
        if not taps or list(taps) != sorted(set(taps)):
            raise ConfigError(f"draft.target_layer_ids is {list(taps)}; list at least one layer, each once, rising")
        sizes = {name: require_int(f"draft.{name}", getattr(self, name), least=0) for name in _V2_FIELDS}
        if 0 < sum(size > 0 for size in sizes.values()) < len(sizes):
            zero = ", ".join(name for name, size in sizes.items() if not size)
            given = ", ".join(name for name, size in sizes.items() if size)
            raise ConfigError(
                f"draft: {given} given while {zero} is 0; convolution and selector come together (DFlash 2), "
                "or all four are 0 (DFlash)"
            )

    def config(self, target: TargetFacts) -> DraftConfig:
        """The full draft configuration for this target."""
        if self.mask_token_id in target.eos_token_ids:
            raise ConfigError(
                f"draft.mask_token_id is {self.mask_token_id}, an end id of the target; "
                "choose a control id that ordinary text never contains"
            )
        is_v2 = self.conv_kernel_size > 0
        return DraftConfig(
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=target.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=target.max_length,
            attention=GqaConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                has_bias=False,
            ),
            layers=(LayerConfig(is_causal=self.is_causal, window=None),) * self.num_layers,
            rope=RopeConfig(theta=self.rope_theta, kind="default", params=()),
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            conv=ConvConfig(kernel_size=self.conv_kernel_size, group_size=self.conv_group_size) if is_v2 else None,
            selector=SelectorConfig(rank=self.selector_rank, top_k=self.selector_top_k) if is_v2 else None,
            input_embedding_scale=1.0,
            output_multiplier=1.0,
            final_logit_softcapping=None,
        )


@dataclass(frozen=True, kw_only=True)
class LossRecipe:
    """`weighting` is "dpace" (smoothing `dpace_smoothing`) or "decay" (`decay_gamma`)."""

    weighting: str
    dpace_smoothing: float
    decay_gamma: float
    selector_weight: float
    selector_start_step: int
    num_random_head_rows: int

    def __post_init__(self) -> None:
        if self.weighting not in ("dpace", "decay"):
            raise ConfigError(f'loss.weighting is {self.weighting!r}; allowed are "dpace" and "decay"')
        _fraction("loss.dpace_smoothing", self.dpace_smoothing)
        require_float("loss.decay_gamma", self.decay_gamma)
        _not_negative("loss.selector_weight", self.selector_weight)
        require_int("loss.selector_start_step", self.selector_start_step, least=0)
        require_int("loss.num_random_head_rows", self.num_random_head_rows, least=0)


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """AdamW with linear warm-up, a constant stretch and a linear decay (WSD); fp32 master weights."""

    num_steps: int
    sequences_per_step: int
    blocks_per_sequence: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    warmup_fraction: float
    decay_fraction: float
    final_lr_fraction: float
    autocast: str

    def __post_init__(self) -> None:
        if self.autocast not in ("none", "bfloat16"):
            raise ConfigError(f'optim.autocast is {self.autocast!r}; allowed are "none" and "bfloat16"')
        for name in ("num_steps", "sequences_per_step", "blocks_per_sequence"):
            require_int(f"optim.{name}", getattr(self, name))
        require_float("optim.learning_rate", self.learning_rate)
        require_float("optim.max_grad_norm", self.max_grad_norm)
        _not_negative("optim.weight_decay", self.weight_decay)
        for name in ("beta1", "beta2"):
            if _fraction(f"optim.{name}", getattr(self, name)) == 1.0:
                raise ConfigError(f"optim.{name} is 1.0; it must be below 1")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            _fraction(f"optim.{name}", getattr(self, name))
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ConfigError(
                f"optim.warmup_fraction {self.warmup_fraction:g} + decay_fraction {self.decay_fraction:g} "
                "is above 1; lower one of them"
            )

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        warmup = max(1, round(self.warmup_fraction * self.num_steps))
        decay = max(1, round(self.decay_fraction * self.num_steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        left = self.num_steps - step
        if left >= decay:
            return self.learning_rate
        return self.learning_rate * (self.final_lr_fraction + (1 - self.final_lr_fraction) * left / decay)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `save_every_steps` bounds what a crash can lose."""

    seed: int
    max_length: int
    save_every_steps: int
    draft: DraftRecipe
    loss: LossRecipe
    optim: OptimRecipe

    def __post_init__(self) -> None:
        require_int("seed", self.seed, least=0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2^63")
        require_int("max_length", self.max_length, least=4)
        require_int("save_every_steps", self.save_every_steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries; `recipe_from_dict` is the way back."""
        return asdict(self)

    def to_toml(self) -> str:
        """The text of a recipe file that reads back as this recipe."""
        tables = {name: value for name, value in self.to_dict().items() if isinstance(value, dict)}
        lines = [_toml_line(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in tables]
        for name, table in tables.items():
            lines += ["", f"[{name}]", *(_toml_line(key, value) for key, value in table.items())]
        return "\n".join(lines) + "\n"


_SECTIONS = {"draft": DraftRecipe, "loss": LossRecipe, "optim": OptimRecipe}


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file. Raises ConfigError for anything unknown, missing or of another type."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe; name a TOML file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    return recipe_from_dict(raw, where=path.name)


def recipe_from_dict(raw: Mapping[str, Any], *, where: str) -> Recipe:
    """The recipe in nested dictionaries; `where` names their source in a message."""
    recipe = _build(Recipe, raw, where)
    assert isinstance(recipe, Recipe)
    return recipe


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the settings that two recipe dictionaries do not share."""
    found = []
    for key in sorted({*one, *other}):
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found += differing_keys(mine, theirs, f"{prefix}{key}.")
        elif _plain(mine) != _plain(theirs):
            found.append(prefix + key)
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _toml_line(name: str, value: Any) -> str:
    """One setting as TOML; JSON writes booleans, numbers, strings and flat lists in the same way."""
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


def _fraction(name: str, value: Any) -> float:
    number = require_float(name, value, above=None)
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {number:g}; it must be from 0 to 1")
    return number


def _not_negative(name: str, value: Any) -> None:
    if require_float(name, value, above=None) < 0:
        raise ConfigError(f"{name} is {value:g}; it must not be negative")


def _build(kind: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    names = {field.name: field for field in fields(kind)}
    section = next((f"{name}." for name, owner in _SECTIONS.items() if owner is kind), "")
    for key in raw:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"{where}: unknown key {section}{key}{hint}")
    values = {}
    for name, field in names.items():
        if name not in raw:
            raise ConfigError(f"{where}: {section}{name} is missing; every number of a recipe is written down")
        values[name] = _value(name, str(field.type), raw[name], where)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _value(name: str, kind: str, value: Any, where: str) -> Any:
    if name in _SECTIONS:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: [{name}] is a table of settings, not {value!r}")
        return _build(_SECTIONS[name], value, where)
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise ConfigError(f"{where}: {name} is a list of whole numbers, not {value!r}")
        return tuple(value)
    allowed: tuple[type, ...] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[kind]
    if type(value) not in allowed:
        raise ConfigError(f"{where}: {name} is a {kind}, not {value!r}")
    try:
        return float(value) if kind == "float" else value
    except OverflowError:
        raise ConfigError(f"{where}: {name} has {len(str(value))} digits; it is too large") from None
