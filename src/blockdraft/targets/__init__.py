"""Targets: everything that is asked of the large model. The only place that touches transformers models.

Importing this package loads no torch; the names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract import Row, Scored, Target
    from .hf import HFTarget
    from .loading import load_target
    from .smollm2 import default_cache_dir, ensure_target

__all__ = ["HFTarget", "Row", "Scored", "Target", "default_cache_dir", "ensure_target", "load_target"]

_HOME = {
    "Row": "contract",
    "Scored": "contract",
    "Target": "contract",
    "HFTarget": "hf",
    "load_target": "loading",
    "default_cache_dir": "smollm2",
    "ensure_target": "smollm2",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME[name]}", __name__), name)
