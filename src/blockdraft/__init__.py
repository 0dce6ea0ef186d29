"""Block drafters for speculative decoding.

Owns the public surface: a table of names and the modules that hold them. A name is imported when it is first
asked for, so that importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockdraft.errors import (
    BlockdraftError,
    CheckpointError,
    ConfigError,
    PairError,
    RequestError,
    UnavailableError,
)

if TYPE_CHECKING:
    from blockdraft.accept import SamplingParams
    from blockdraft.config import DraftConfig
    from blockdraft.draft import DraftModel
    from blockdraft.engine import Completion, Engine, Request
    from blockdraft.engine.load import load

__version__ = "0.1.0"

_MODULE_OF = {
    "Completion": "blockdraft.engine",
    "DraftConfig": "blockdraft.config",
    "DraftModel": "blockdraft.draft",
    "Engine": "blockdraft.engine",
    "Request": "blockdraft.engine",
    "SamplingParams": "blockdraft.accept",
    "load": "blockdraft.engine",
}

__all__ = [
    "BlockdraftError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DraftConfig",
    "DraftModel",
    "Engine",
    "PairError",
    "Request",
    "RequestError",
    "SamplingParams",
    "UnavailableError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'blockdraft' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
