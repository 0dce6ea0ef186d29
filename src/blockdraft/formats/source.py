"""Where a checkpoint is: a local folder, or a hub id that is fetched once into the hub's own cache.

Knows no file's content.
"""

from __future__ import annotations

import re
from pathlib import Path

from blockdraft.errors import CheckpointError, UnavailableError

__all__ = ["locate"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ("*.json", "*.safetensors", "mask_embedding.pt", "*.jinja", "*.model")


def locate(source: str | Path, *, what: str, config_only: bool = False) -> Path:
    """The folder (or the config.json) that `source` names. `what` is "draft" or "target", for the message.

    Raises CheckpointError for a path that is not there and UnavailableError for a hub id that cannot be fetched.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"{what} {source}: no such folder, and not a hub id (owner/name); check the path")
    from huggingface_hub import snapshot_download

    try:
        wanted = ["config.json"] if config_only else list(_WANTED)
        return Path(snapshot_download(str(source), allow_patterns=wanted))
    except Exception as error:  # the hub client has no common base for "not there", "no network" and "not allowed"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnavailableError(
            f"{what} {source}: no such folder, and the hub gave nothing ({type(error).__name__}: {reason[:160]}); "
            "check the id and the network, or give a local folder"
        ) from None
