"""Checks of single values: the value itself comes back, or one line says what was wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from blockdraft.errors import ConfigError


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


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """The ids of a config entry that is null, one id or a list of ids; negative ids mean "none"."""
    if value is None:
        return ()
    entries: Sequence[object] = value if isinstance(value, list | tuple) else [value]
    for entry in entries:
        if isinstance(entry, bool) or not isinstance(entry, int):
            raise ConfigError(f"{name} is {value!r}: it must be a token id, a list of them or null")
    return tuple(entry for entry in entries if isinstance(entry, int) and entry >= 0)
