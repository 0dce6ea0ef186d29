"""Small files and checksums: written whole or not at all, whatever moment a process is killed at."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from blockdraft.errors import CheckpointError

__all__ = ["file_sha256", "write_text_atomically"]

_HASH_BYTES = 1 << 22


def write_text_atomically(path: Path, text: str) -> None:
    """Write a small file so that a kill at any moment leaves the old one or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written ({error}); free some space, then run again") from None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
