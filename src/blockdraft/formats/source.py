"""Where a checkpoint is: a local folder, or a hub id that is fetched once into the hub's own cache.

Knows no file's content.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from blockdraft.errors import CheckpointError, UnavailableError, shown

__all__ = ["locate"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIGS = ("config.json", "generation_config.json")
_WANTED = ("*.json", "*.safetensors", "mask_embedding.pt", "*.jinja", "*.model")


def locate(source: str | Path, *, what: str, config_only: bool = False) -> Path:
    """The folder (or the config.json) that `source` names. `what` is "draft" or "target", for the message.

    Raises CheckpointError for a path that is not there and UnavailableError for a hub id that cannot be fetched.
    """
    name = str(source)
    if not name.strip():
        raise CheckpointError(f"{what} is given as {name!r}; name a folder or a hub id (owner/name)")
    # os.path and not pathlib: a prompt in the place of a path is too long a name, which pathlib raises for.
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        return path
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{what} {shown(name)}: no such folder, and not a hub id (owner/name); check the path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_CONFIGS if config_only else _WANTED)))
    except Exception as error:  # the hub's client has no common base for "not there" and "not allowed"
        reason = " ".join(str(error).split()) or "no reason given"
        raise UnavailableError(
            f"{what} {shown(name)}: no such folder, and the hub gave nothing ({type(error).__name__}: "
            f"{reason[:160]}); check the id and the network, or give a local folder"
        ) from None
