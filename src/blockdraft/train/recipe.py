"""The recipe: every number of a training run, in one strict typed TOML file.

Owns names, types and bounds. An unknown key is an error that names the nearest known one; there is no hidden default:
each field stands in the file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blockdraft.config import ConvConfig, DraftConfig, GqaConfig, LayerConfig, RopeConfig, SelectorConfig, TargetFacts
from blockdraft.errors import ConfigError

__all__ = ["DraftRecipe", "LossRecipe", "OptimRecipe", "Recipe", "read_recipe"]


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """Shape of the draft; widths that must equal the target's are taken from the target."""

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

    def config(self, target: TargetFacts) -> DraftConfig:
        """The full draft configuration for this target. conv_kernel_size = 0 makes a DFlash v1 draft."""
        is_v2 = self.conv_kernel_size > 0
        return DraftConfig(
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=target.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=target.max_length,
            attention=GqaConfig(
                num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, has_bias=False
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
            if getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} is {getattr(self, name)}; it must be at least 1")

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


_SECTIONS = {"draft": DraftRecipe, "loss": LossRecipe, "optim": OptimRecipe}


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file. Raises ConfigError for anything unknown, missing or of another type."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe; name a TOML file")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None
    return _build(Recipe, raw, path.name)


def _build(kind: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    names = {field.name: field for field in fields(kind)}
    for key in raw:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
            raise ConfigError(f"{where}: unknown key {key}{hint}")
    values = {}
    for name, field in names.items():
        if name not in raw:
            raise ConfigError(f"{where}: {name} is missing; every number of a recipe is written down")
        values[name] = _value(name, str(field.type), raw[name], where)
    return kind(**values)


def _value(name: str, kind: str, value: Any, where: str) -> Any:
    if name in _SECTIONS:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: [{name}] is a table of settings, not {value!r}")
        return _build(_SECTIONS[name], value, f"{where} [{name}]")
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise ConfigError(f"{where}: {name} is a list of whole numbers, not {value!r}")
        return tuple(value)
    allowed: tuple[type, ...] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}[kind]
    if type(value) not in allowed:
        raise ConfigError(f"{where}: {name} is a {kind}, not {value!r}")
    return float(value) if kind == "float" else value
