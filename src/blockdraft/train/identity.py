"""Which target is this: hashes of its weights, tokenizer and chat template, so that text of another one is noticed.

Owns what is hashed. Knows no corpus and loads no model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from blockdraft.formats._safetensors import list_entries
from blockdraft.text import Tokenizer

__all__ = ["TargetIdentity", "identify", "text_sha256"]

SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """What makes a target this target. `chat_template_sha256` is "" where there is no template."""

    name: str
    weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str


def identify(name: str, folder: Path, tokenizer: Tokenizer) -> TargetIdentity:
    """The identity of the target in `folder`; `name` is what a reader is told."""
    template = tokenizer.chat_template
    return TargetIdentity(
        name=name,
        weights_sha256=_weights_sha256(folder),
        tokenizer_sha256=tokenizer.sha256,
        chat_template_sha256="" if template is None else text_sha256(template),
    )


def text_sha256(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _weights_sha256(folder: Path) -> str:
    """Hash of every tensor's name, dtype and shape, and of small samples all over the files.

    Reading whole weights would take minutes for a large target; training changes every part of them.
    """
    entries = sorted(list_entries(folder), key=lambda entry: entry.name)
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape}\n".encode())
    for file in sorted({entry.file for entry in entries}):
        size = file.stat().st_size
        with file.open("rb") as stream:
            for sample in range(SAMPLES_PER_FILE):
                stream.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES_PER_FILE - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
