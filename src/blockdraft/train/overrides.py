"""From words on a command line to a recipe: a ready recipe by its name or a file by its path, and key=value changes.

Owns the names of the ready recipes and the reading of a change. What a setting may be is the recipe's own.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from blockdraft.config import RopeConfig
from blockdraft.errors import ConfigError, shown
from blockdraft.train.recipe import Recipe, read_toml, recipe_from_dict

__all__ = ["ResolvedRecipe", "apply_overrides", "ready_recipes", "recipe_path", "resolve_recipe"]

_READY = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe as it will run. `changes` has a line for each setting that is not the file's own."""

    name: str
    recipe: Recipe
    changes: tuple[str, ...]

    def to_toml(self) -> str:
        """The recipe file of the run; what was changed stands above it."""
        lines = [f"# {self.name}", *(f"# changed: {change}" for change in self.changes), ""]
        return "\n".join(lines) + self.recipe.to_toml()


def ready_recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in _READY.glob("*.toml"))


def recipe_path(name: str | Path) -> Path:
    """The file of a ready recipe, or the path itself: whatever ends in .toml or holds a folder separator is a path."""
    text = str(name)
    is_path = isinstance(name, Path) or text.endswith(".toml") or any(s in text for s in (os.sep, os.altsep) if s)
    if is_path:
        return Path(text).expanduser()
    if text not in ready_recipes():
        near = difflib.get_close_matches(text, ready_recipes(), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"no ready recipe {shown(text)}; {hint}there are {', '.join(ready_recipes())}, and any other is named by "
            "the path of its .toml file"
        )
    return _READY / f"{text}.toml"


def resolve_recipe(name: str | Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """The recipe of that name or path, changed by `overrides` (key.sub=value)."""
    path = recipe_path(name)
    raw = read_toml(path)
    changed, changes = apply_overrides(raw, overrides)
    where = f"{path.name} with {' '.join(shown(text, 40) for text in overrides)}" if overrides else path.name
    recipe = recipe_from_dict(changed, where=where)
    return ResolvedRecipe(name=str(name), recipe=recipe, changes=tuple(changes))


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the tables of a recipe with every key=value put in, one line about each change). `raw` is left as it is."""
    result = _copied(raw)
    changes: list[str] = []
    hints = dict(_settings(Recipe, ""))
    seen: set[str] = set()
    for text in overrides:
        key, equals, word = text.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"{shown(text)} is not a change; write key=value, such as optim.num_steps=2000")
        hint = _hint_of(key, hints)
        if any(f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for other in seen):
            raise ConfigError(f"{key} is changed twice; give one value")
        seen.add(key)
        value = _value_of(word.strip(), hint)
        *tables, name = key.split(".")
        place = result
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {table} is not a table in the recipe, but {place!r}")
        old = f"was {place[name]!r}" if name in place else "was not there"
        place[name] = value
        changes.append(f"{key} = {value!r}, {old}")
    return result, changes


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return [_copied(entry) for entry in value] if isinstance(value, list) else value


def _settings(kind: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names of every setting and table of a recipe, with their types."""
    for name, hint in get_type_hints(kind).items():
        inner = get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        yield prefix + name, inner
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _settings(inner, f"{prefix}{name}.")


def _hint_of(key: str, hints: Mapping[str, Any]) -> Any:
    if key in hints:
        return hints[key]
    table, _, last = key.rpartition(".")
    if hints.get(table) is RopeConfig:
        return float  # which further numbers there are depends on its kind
    same_end = [name for name in hints if name.rpartition(".")[2] == last]
    near = same_end or difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(near[:3])}?" if near else f"tables are {', '.join(_tables(hints))}"
    raise ConfigError(f"a recipe has no setting {shown(key)}; {hint}")


def _tables(hints: Mapping[str, Any]) -> list[str]:
    return [name for name, hint in hints.items() if "." not in name and is_dataclass(hint)]


def _value_of(word: str, hint: Any) -> Any:
    """A value in TOML's own spelling; what is none, and any bare word where text belongs, is taken as text."""
    is_quoted = word[:1] in ("'", '"')
    if hint is str and not is_quoted:
        return word
    try:
        parsed = tomllib.loads(f"value = {word}")
    except tomllib.TOMLDecodeError:
        return word
    return parsed["value"] if list(parsed) == ["value"] else word
