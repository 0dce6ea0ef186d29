"""`serve.toml`: the same settings as the flags, strict. An unknown key is an error with the nearest name.

Owns which setting stands in which table, what is loaded and where the server listens. Its defaults are written here and
in settings.py, once.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.errors import ConfigError, shown
from blockdraft.serve.settings import BUILTIN_MODEL_NAME, LOOPBACK_HOSTS, ServerSettings
from blockdraft.text.prompts import hint

__all__ = ["KEYS_VARIABLE", "LaunchSettings", "read_config", "resolve"]

KEYS_VARIABLE = "BLOCKDRAFT_API_KEYS"


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSettings:
    """What a server process loads and where it listens; the loading ones as `blockdraft.load` takes them."""

    draft: str | None = None
    target: str | None = None
    speculation: str = "required"
    dtype: str = "float32"
    draft_dtype: str | None = None
    device: str = "cpu"
    device_map: str | None = None
    quantize: str | None = None
    weights: str | None = None
    block_size: int | None = None
    tap_stream: str | None = None
    trust_remote_code: bool = False
    allow_mask_is_eos: bool = False
    width: str | None = None
    """"auto": the fastest at every moment; None: the trained one."""
    max_rows: int = 16
    memory_limit_mib: int | None = None
    prefix_cache_mib: int = 0
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    """One key a line; lines that begin with # are comments."""

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


_PAIR = (
    "draft target speculation dtype draft_dtype device device_map quantize weights block_size tap_stream "
    "trust_remote_code allow_mask_is_eos"
)
_TABLES: Mapping[str, tuple[str, ...]] = {
    "pair": tuple(_PAIR.split()),
    "engine": ("width", "max_rows", "memory_limit_mib", "prefix_cache_mib", "threads"),
    "listen": ("host", "port", "api_key_file"),
    "server": tuple(item.name for item in dataclasses.fields(ServerSettings) if item.name != "api_keys"),
}
_TYPES: Mapping[str, str] = {
    item.name: str(item.type) for kind in (LaunchSettings, ServerSettings) for item in dataclasses.fields(kind)
}


def read_config(path: Path) -> dict[str, Any]:
    """The settings of a TOML file by name."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
    found: dict[str, Any] = {}
    for table, values in content.items():
        if table not in _TABLES:
            raise ConfigError(
                f"{path.name}: unknown table {shown(table)}; there are {', '.join(_TABLES)}{hint(table, _TABLES)}"
            )
        if not isinstance(values, dict):
            raise ConfigError(f"{path.name}: {table} is not a table; write [{table}] above its settings")
        for key, value in values.items():
            if key not in _TABLES[table]:
                raise ConfigError(f"{path.name}: unknown key {table}.{key}{_hint(key, table)}")
            found[key] = _typed(f"{path.name}: {table}.{key}", value, _TYPES[key])
    return found


def _hint(key: str, table: str) -> str:
    elsewhere = [name for name, keys in _TABLES.items() if key in keys]
    return f"; it belongs to [{elsewhere[0]}]" if elsewhere else hint(key, _TABLES[table])


def _typed(where: str, value: object, kind: str) -> Any:
    """The value, if it is what the setting's annotation says."""
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} is {shown(value)}; give a list of texts")
        return tuple(value)
    if "float" in kind and type(value) in (int, float):
        return value
    if type(value).__name__ not in kind.split(" | "):
        raise ConfigError(f"{where} is {shown(value)}; it must be {kind.removesuffix(' | None')}")
    return value


def resolve(config: Path | None, given: Mapping[str, Any]) -> tuple[LaunchSettings, ServerSettings]:
    """Settings of file and flags: a flag (anything but None) goes before the file, that before the default."""
    found = {} if config is None else read_config(config)
    found.update({name: value for name, value in given.items() if value is not None})
    launch_names = {item.name for item in dataclasses.fields(LaunchSettings)}
    launch = LaunchSettings(**{name: value for name, value in found.items() if name in launch_names})
    _check(launch)
    rest = {name: value for name, value in found.items() if name not in launch_names}
    rest["api_keys"] = _api_keys(launch)
    if launch.is_loopback:  # a page elsewhere may point a name of its own at this machine
        rest["allowed_hosts"] = (*LOOPBACK_HOSTS, *rest.get("allowed_hosts", ()))
    rest.setdefault("model_name", _model_name(launch))
    return launch, ServerSettings(**rest)


def _check(launch: LaunchSettings) -> None:
    for name in ("max_rows", "memory_limit_mib", "threads"):
        value = getattr(launch, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give a whole number of at least 1")
    if launch.prefix_cache_mib < 0:
        raise ConfigError(f"prefix_cache_mib is {launch.prefix_cache_mib}; give 0 or more")
    if not 0 <= launch.port <= 65535:
        raise ConfigError(f"port is {launch.port}; give 0 (a free one) to 65535")
    if launch.width not in (None, "auto"):
        raise ConfigError(f"width is {shown(launch.width)}; auto, or leave it out: a request names a number")
    if launch.width and launch.speculation == "off":
        raise ConfigError("width is auto and speculation off; drop one of the two")


def _api_keys(launch: LaunchSettings) -> tuple[str, ...]:
    """Keys of the environment and of the file, each once."""
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    if launch.api_key_file is not None:
        try:
            lines = Path(launch.api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {launch.api_key_file} cannot be read: {error}") from None
        of_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not of_file:
            raise ConfigError(f"api_key_file {launch.api_key_file} holds no key, so that the server would be open")
        keys.extend(of_file)
    return tuple(dict.fromkeys(keys))


def _model_name(launch: LaunchSettings) -> str:
    """What clients call the model when nobody says: a hub id as it is, a folder by its name."""
    if launch.target is None:
        return BUILTIN_MODEL_NAME
    return Path(launch.target).resolve().name if Path(launch.target).exists() else launch.target
