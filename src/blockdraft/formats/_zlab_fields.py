"""The two places of a field in a z-lab config.json, and the one way to ask them. Knows keys, not what they mean."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from blockdraft.errors import ConfigError
from blockdraft.formats._zlab_keys import KNOWN_NESTED, KNOWN_TOP, NEUTRAL

__all__ = ["Fields", "same"]


class Fields:
    """The two places of a config, and the one way to ask them for a field."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        nest = raw.get("dflash_config")
        if nest is not None and not isinstance(nest, Mapping):
            raise ConfigError(f"dflash_config is {nest!r}: it must be an object")
        self.top: Mapping[str, Any] = raw
        self.nest: Mapping[str, Any] = nest or {}
        self._refuse_unknown("at top level", self.top, KNOWN_TOP)
        self._refuse_unknown("in dflash_config", self.nest, KNOWN_NESTED)
        for place in (self.nest, self.top):
            for name, (is_neutral, allowed) in NEUTRAL.items():
                if not is_neutral(place.get(name)):
                    raise ConfigError(f"{name} is {place[name]!r}: supported is {allowed}")

    @staticmethod
    def _refuse_unknown(where: str, place: Mapping[str, Any], known: frozenset[str]) -> None:
        for key in place:
            if key not in known:
                near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)[0]
                raise ConfigError(f"unknown key {key!r} {where}: the nearest known name is {near!r}")

    def pick(self, name: str, *aliases: str) -> Any:
        """The value of a field, None if it is nowhere; every place that gives one must give the same.

        `aliases` are other spellings, which count inside dflash_config only.
        """
        found = [(f"dflash_config.{key}", self.nest.get(key)) for key in (name, *aliases)]
        found = [(where, value) for where, value in [*found, (name, self.top.get(name))] if value is not None]
        for where, value in found[1:]:
            if not same(found[0][1], value):
                raise ConfigError(
                    f"{name} is given twice and differs: {found[0][0]} is {found[0][1]!r}, "
                    f"{where} is {value!r}; make them equal or keep one"
                )
        return found[0][1] if found else None

    def require(self, name: str, hint: str) -> Any:
        value = self.pick(name)
        if value is None:
            raise ConfigError(f"{name} is missing: {hint}")
        return value

    def has(self, name: str) -> bool:
        """Whether a place has the key at all, be it with null."""
        return name in self.nest or name in self.top

    def require_top(self, name: str) -> Any:
        if self.top.get(name) is None:
            raise ConfigError(f"{name} is missing: the config must give it at top level")
        return self.top[name]


def same(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)
