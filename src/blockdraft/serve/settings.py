"""What a server may do: names, keys, limits, times.

Owns every default of the server and the bounds of each setting. Knows no HTTP and no engine.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from blockdraft.errors import ConfigError, shown

__all__ = ["BUILTIN_MODEL_NAME", "LOOPBACK_HOSTS", "ServerSettings"]

BUILTIN_MODEL_NAME = "smollm2-135m"
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_SECONDS = ("request_timeout_s", "body_timeout_s", "stall_timeout_s", "drain_timeout_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Settings of one server. Sizes are bytes, times seconds, lengths tokens."""

    model_name: str = BUILTIN_MODEL_NAME
    """What `model` must be in a request."""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Any of them opens the API; without one it is open to whoever reaches the port."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages a browser lets call this server ("*": all); none by default."""
    allowed_hosts: tuple[str, ...] = ()
    """Names that a request's Host may have, without the port; none given: any."""
    max_body_bytes: int = 4 * 2**20
    max_queue: int = 256
    """Choices that may wait beyond the engine's rows; one more is refused with 429."""
    max_n: int = 16
    """Choices of one prompt."""
    max_prompts: int = 64
    """Prompts of one call of /v1/completions."""
    max_tokens: int | None = None
    """Most new tokens of a choice; None: what the target's window leaves."""
    default_max_tokens: int = 1024
    """New tokens of a chat choice whose request names no limit (less where the window leaves less)."""
    max_connections: int = 1024
    request_timeout_s: float = 600.0
    """From the request's arrival to its last token."""
    body_timeout_s: float = 30.0
    """Until the whole body has arrived."""
    stall_timeout_s: float = 60.0
    """How long a client may leave a stream unread once its buffers are full."""
    drain_timeout_s: float = 30.0
    """What running requests get after SIGTERM before they are ended with an error."""
    reply_format: str | None = None
    """Name of the way in which the target writes reasoning and tool calls; None: found from its template."""
    has_page: bool = True
    """Whether / is the playground page."""
    has_access_log: bool = True
    """Whether every request is a line on the log `blockdraft.access`."""

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str) or not self.model_name.strip() or len(self.model_name) > 256:
            raise ConfigError(f"model_name is {shown(self.model_name)}; give a text of 1 to 256 characters")
        for name in ("max_body_bytes", "max_n", "max_prompts", "default_max_tokens", "max_connections"):
            _whole(name, getattr(self, name), least=1)
        _whole("max_queue", self.max_queue, least=0)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, least=1)
        for name in _SECONDS:
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and name != "drain_timeout_s"):
                raise ConfigError(f"{name} is {value!r}; give seconds above 0")
        for name in ("api_keys", "cors_origins", "allowed_hosts"):
            _texts(name, getattr(self, name))
        for key in self.api_keys:
            if len(key) < 8 or not key.isascii() or any(char.isspace() for char in key):
                raise ConfigError("an API key is shorter than 8 characters, not ASCII, or holds blanks; use a long one")
        for name in ("has_page", "has_access_log"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is true or false")


def _whole(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name} is {value!r}; give a whole number of at least {least}")


def _texts(name: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(isinstance(item, str) and item for item in values):
        raise ConfigError(f"{name} is {type(values).__name__}; give a tuple of texts that are not empty")
