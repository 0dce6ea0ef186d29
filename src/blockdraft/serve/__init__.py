"""An OpenAI-compatible server around one engine.

`create_app` makes the application of a loaded engine; `ServerSettings` is what it may do. Needs the extra `serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockdraft.errors import UnavailableError
from blockdraft.serve.settings import ServerSettings

if TYPE_CHECKING:
    from blockdraft.serve.app import create_app

__all__ = ["ServerSettings", "create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module 'blockdraft.serve' has no attribute {name!r}")
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnavailableError(
            f"the server needs {error.name}, which is not installed: pip install 'blockdraft[serve]'"
        ) from None
    from blockdraft.serve.app import create_app

    return create_app
