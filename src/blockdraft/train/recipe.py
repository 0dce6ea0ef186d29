"""The recipe: every number of a training run, in one strict typed TOML file.

Owns the file: reading, writing, and what depends on two sections. An unknown key is an error that names the nearest
known one; there is no hidden default: each field stands in the file.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from blockdraft.config import RopeConfig, TargetFacts, require_int
from blockdraft.errors import ConfigError
from blockdraft.train.checks import require_no_effect
from blockdraft.train.draft_recipe import DraftRecipe, GqaRecipe, MlaRecipe
from blockdraft.train.sections import (
    EvaluationRecipe,
    HubRecipe,
    LossRecipe,
    OptimRecipe,
    PromptsRecipe,
    TargetRecipe,
    TextRecipe,
)

__all__ = [
    "DraftRecipe",
    "EvaluationRecipe",
    "GqaRecipe",
    "HubRecipe",
    "LossRecipe",
    "MlaRecipe",
    "OptimRecipe",
    "PromptsRecipe",
    "Recipe",
    "TargetRecipe",
    "TextRecipe",
    "differing_keys",
    "read_recipe",
    "read_toml",
    "recipe_from_dict",
]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run. `save_every_steps` bounds what a crash can lose."""

    seed: int
    max_length: int
    save_every_steps: int
    target: TargetRecipe
    prompts: PromptsRecipe
    text: TextRecipe
    draft: DraftRecipe
    loss: LossRecipe
    optim: OptimRecipe
    evaluation: EvaluationRecipe

    def __post_init__(self) -> None:
        require_int("seed", self.seed, least=0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2^63")
        require_int("max_length", self.max_length, least=4)
        require_int("save_every_steps", self.save_every_steps)
        if self.text.max_new_tokens >= self.max_length:
            raise ConfigError(
                f"text.max_new_tokens is {self.text.max_new_tokens}; it must be below max_length, {self.max_length}, "
                "which holds prompt and answer"
            )
        if self.draft.block_size > self.max_length:
            raise ConfigError(f"draft.block_size is {self.draft.block_size}; max_length is only {self.max_length}")
        self._check_selector()
        if self.loss.kind == "kl" and self.draft.tap_stream in ("prefix", "mean"):
            way_out = ", or train on that stream" if self.draft.tap_stream == "prefix" else ""
            that = 'of the stream "attn_res"' if self.draft.tap_stream == "prefix" else "no mean of its streams"
            raise ConfigError(
                f'loss.kind is "kl" and draft.tap_stream is "{self.draft.tap_stream}"; a teacher needs what the final '
                f"norm reads, and that is {that}: set loss.kind=ce{way_out}"
            )
        if self.evaluation.num_prompts > self.prompts.held_out:
            raise ConfigError(
                f"evaluation.num_prompts is {self.evaluation.num_prompts}; prompts.held_out keeps only "
                f"{self.prompts.held_out} out of training"
            )
        if self.evaluation.width > self.draft.block_size:
            raise ConfigError(
                f"evaluation.width is {self.evaluation.width}; it must not exceed draft.block_size, "
                f"{self.draft.block_size}"
            )
        if self.target.facts is not None:
            self.draft.config(self.target.facts)

    def _check_selector(self) -> None:
        loss = self.loss
        if not self.draft.has_selector:
            given = {"loss.selector_weight": loss.selector_weight}
            require_no_effect(given, {"loss.selector_weight": 0.0}, because="a DFlash draft has no selector")
        elif loss.selector_weight and loss.selector_start_step >= self.optim.num_steps:
            raise ConfigError(
                f"loss.selector_start_step is {loss.selector_start_step}, and the run has {self.optim.num_steps} "
                "steps; the selector would never be trained: start it earlier, or set loss.selector_weight to 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries; `recipe_from_dict` is the way back."""
        return _plain_dict(self)

    def to_toml(self) -> str:
        """The text of a recipe file that reads back as this recipe."""
        return "\n".join(_toml_table(self.to_dict(), "")) + "\n"


def read_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file. Raises ConfigError for anything unknown, missing or of another type."""
    return recipe_from_dict(read_toml(path), where=path.name)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a recipe file, not looked into."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe; name a TOML file")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML ({error})") from None


def recipe_from_dict(raw: Mapping[str, Any], *, where: str) -> Recipe:
    """The recipe in nested dictionaries; `where` names their source in a message."""
    recipe = _build(Recipe, raw, "", where)
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


# ---- out -------------------------------------------------------------------------------------------------------------
def _plain_dict(section: Any) -> dict[str, Any]:
    """A section as a file spells it: absent tables left out, no pad id as -1, rotary numbers beside their kind."""
    if isinstance(section, RopeConfig):
        return {"theta": section.theta, "kind": section.kind, **section.numbers}
    found: dict[str, Any] = {}
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(section, TargetFacts) and field.name == "pad_token_id":
            value = -1 if value is None else value
        if is_dataclass(value):
            found[field.name] = _plain_dict(value)
        elif isinstance(value, tuple) and any(is_dataclass(entry) for entry in value):
            found[field.name] = tuple(_plain_dict(entry) for entry in value)
        elif value is not None and not (field.name == "hub" and not value):
            found[field.name] = value
    return found


def _toml_table(table: Mapping[str, Any], prefix: str) -> list[str]:
    """The lines of a table: its settings, then the tables in it under their dotted names."""
    lines, inner = [], []
    for name, value in table.items():
        if isinstance(value, Mapping):
            inner += ["", f"[{prefix}{name}]", *_toml_table(value, f"{prefix}{name}.")]
        elif isinstance(value, tuple) and value and isinstance(value[0], Mapping):
            for entry in value:
                inner += ["", f"[[{prefix}{name}]]", *_toml_table(entry, f"{prefix}{name}.")]
        else:
            lines.append(f"{name} = {_toml_value(value)}")
    return lines + inner


def _toml_value(value: Any) -> str:
    """JSON writes booleans, finite numbers, strings and flat lists as TOML does, but for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- in --------------------------------------------------------------------------------------------------------------
def _build(kind: type[Any], raw: Any, section: str, where: str) -> Any:
    """A section of type `kind` from its table; `section` is its dotted name with a dot behind, "" for the whole."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: [{section[:-1]}] is a table of settings, not {raw!r}")
    if kind is RopeConfig:
        return _build_rope(raw, section, where)
    hints = get_type_hints(kind)
    for key in raw:
        _require_known(key, list(hints), section, where)
    values = {}
    for name, hint in hints.items():
        if name in raw:
            values[name] = _value(section + name, hint, raw[name], where)
        elif not _is_optional(kind, name):
            raise ConfigError(f"{where}: {section}{name} is missing; every number of a recipe is written down")
    if kind is TargetFacts:
        values = _facts_values(values, section, where)
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _require_known(key: str, names: list[str], section: str, where: str) -> None:
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
        raise ConfigError(f"{where}: unknown key {section}{key}{hint}")


def _is_optional(kind: type[Any], name: str) -> bool:
    """Only whole tables may be absent."""
    return name in {TargetRecipe: ("facts",), PromptsRecipe: ("hub",), DraftRecipe: ("gqa", "mla")}.get(kind, ())


def _value(name: str, hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = get_args(hint)[0]
    if get_origin(hint) is tuple:
        return _entries(name, get_args(hint)[0], value, where)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, f"{name}.", where)
    allowed = (int, float) if hint is float else (hint,)
    short = name.rpartition(".")[2]
    if type(value) not in allowed:
        raise ConfigError(f"{where}: {name} is a {hint.__name__}, not {value!r}")
    try:
        return float(value) if hint is float else value
    except OverflowError:
        raise ConfigError(f"{where}: {short} has {len(str(value))} digits; it is too large") from None


def _entries(name: str, hint: type[Any], value: Any, where: str) -> tuple[Any, ...]:
    words = {int: "whole numbers", str: "strings"}.get(hint, f"tables, each under [[{name}]]")
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: {name} is a list of {words}, not {value!r}")
    if is_dataclass(hint):
        return tuple(_build(hint, entry, f"{name}.", where) for entry in value)
    if not all(type(entry) is hint for entry in value):
        raise ConfigError(f"{where}: {name} is a list of {words}, not {value!r}")
    return tuple(value)


def _build_rope(raw: Mapping[str, Any], section: str, where: str) -> RopeConfig:
    numbers = dict(raw)
    for name, hint in (("theta", float), ("kind", str)):
        if name not in raw:
            raise ConfigError(f"{where}: {section}{name} is missing; every number of a recipe is written down")
        numbers[name] = _value(section + name, hint, raw[name], where)
    for name, value in raw.items():
        if name not in ("theta", "kind"):
            numbers[name] = _value(section + name, float, value, where)
    theta, kind = numbers.pop("theta"), numbers.pop("kind")
    try:
        return RopeConfig(theta=theta, kind=kind, params=tuple(numbers.items()))
    except ConfigError as error:
        raise ConfigError(f"{where}: {section[:-1]}: {error}") from None


def _facts_values(values: dict[str, Any], section: str, where: str) -> dict[str, Any]:
    try:
        for name in ("vocab_size", "hidden_size", "num_layers", "max_length"):
            require_int(f"{section}{name}", values[name])
        for token in values["eos_token_ids"]:
            require_int(f"an entry of {section}eos_token_ids", token, least=0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    pad = values["pad_token_id"]
    return {**values, "pad_token_id": None if pad < 0 else pad}
