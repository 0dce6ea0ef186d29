"""Asking a config.json of a dialect for its keys: unknown ones are refused, missing ones are named.

Knows no dialect.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from blockdraft.errors import ConfigError

__all__ = ["Neutral", "known_only", "neutral_only", "object_of", "off", "requires", "stated_or_of_target", "words"]

Neutral = tuple[Callable[[object], bool], str]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def known_only(where: str, place: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for the first key that is not known, with the nearest that is."""
    for key in place:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {key!r} {where}: the nearest known name is {near!r}")


def off(*values: object) -> Neutral:
    """A setting that must be absent, null or one of `values`."""
    text = " or ".join([*(repr(value) for value in values), "absent"])

    def is_off(given: object) -> bool:
        return given is None or any(given == value and type(given) is type(value) for value in values)

    return is_off, text


def neutral_only(place: Mapping[str, Any], neutral: Mapping[str, Neutral]) -> None:
    """Raise ConfigError for a setting that changes the maths and is not at the value that switches it off."""
    for name, (is_off, allowed) in neutral.items():
        if not is_off(place.get(name)):
            raise ConfigError(f"{name} is {place[name]!r}: supported is {allowed}")


def object_of(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under a key. Raises ConfigError if it is missing or something else."""
    value = requires(raw, name, "it holds the settings of the draft's layers")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}: it must be an object")
    return value


def requires(raw: Mapping[str, Any], name: str, hint: str) -> Any:
    """The value of a key. Raises ConfigError if it is missing or null."""
    if raw.get(name) is None:
        raise ConfigError(f"{name} is missing: {hint}")
    return raw[name]


def stated_or_of_target(raw: Mapping[str, Any], name: str, of_target: int | None, label: str) -> Any:
    """What the file states, otherwise what its target has. Raises ConfigError if neither is known."""
    if raw.get(name) is not None:
        return raw[name]
    if of_target is None:
        raise ConfigError(f"{name} is missing: {label} does not state it, give the target that it is for (--target)")
    return of_target
