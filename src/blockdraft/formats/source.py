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
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern})/([\w.-]+\.gguf)")
_CONFIGS = ("config.json", "generation_config.json")
_WANTED = (
    "*.json",
    "*.safetensors",
    "mask_embedding.pt",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
_CODE = "*.py"


def locate(source: str | Path, *, what: str, config_only: bool = False, with_code: bool = False) -> Path:
    """The folder (or the file) that `source` names. `what` is "draft" or "target", for the message.

    `with_code`: of a hub id, the Python files too. One GGUF of a hub id is named owner/name/FILE.gguf.

    Raises CheckpointError for a path that is not there and UnavailableError for a hub id that cannot be fetched.
    """
    name = str(source)
    if not name.strip():
        raise CheckpointError(f"{what} is given as {name!r}; name a folder or a hub id (owner/name)")
    # os.path and not pathlib: a prompt in the place of a path is too long a name, which pathlib raises for.
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        return path
    file = _HUB_FILE.fullmatch(name)
    if file is None and not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"{what} {shown(name)}: no such folder, and not a hub id (owner/name); check the path")
    from huggingface_hub import hf_hub_download, snapshot_download

    wanted = list(_CONFIGS if config_only else _WANTED) + ([_CODE] if with_code else [])
    try:
        if file is not None:
            return Path(hf_hub_download(file[1], file[2]))
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's client has no common base for "not there" and "not allowed"
        reason = " ".join(str(error).split()) or "no reason given"
        raise UnavailableError(
            f"{what} {shown(name)}: no such folder, and the hub gave nothing ({type(error).__name__}: "
            f"{reason[:160]}); check the id and the network, or give a local folder"
        ) from None
