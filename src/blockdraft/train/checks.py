"""Bounds that several sections of a recipe share, each one clear line; a setting that has no effect is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockdraft.config import require_float
from blockdraft.errors import ConfigError

__all__ = ["require_fraction", "require_no_effect", "require_not_negative", "require_one_of"]


def require_fraction(name: str, value: Any) -> float:
    """The value as a float from 0 to 1."""
    number = require_float(name, value, above=None)
    if not 0 <= number <= 1:
        raise ConfigError(f"{name} is {number:g}; it must be from 0 to 1")
    return number


def require_not_negative(name: str, value: Any) -> float:
    """The value as a float of at least 0."""
    number = require_float(name, value, above=None)
    if number < 0:
        raise ConfigError(f"{name} is {number:g}; it must not be negative")
    return number


def require_one_of(name: str, value: str, *allowed: str) -> str:
    """The value itself if it is one of the allowed words."""
    if value not in allowed:
        words = ", ".join(f'"{word}"' for word in allowed[:-1])
        raise ConfigError(f'{name} is {value!r}; allowed are {words} and "{allowed[-1]}"')
    return value


def require_no_effect(given: Mapping[str, Any], idle: Mapping[str, Any], *, because: str) -> None:
    """Nothing, where every setting that cannot take effect holds its idle value; else an error that says why."""
    for name, value in given.items():
        if value != idle[name]:
            shown = list(value) if isinstance(value, tuple) else value
            empty = list(idle[name]) if isinstance(idle[name], tuple) else idle[name]
            raise ConfigError(f"{name} is {shown!r} and has no effect, because {because}; write {empty!r}")
