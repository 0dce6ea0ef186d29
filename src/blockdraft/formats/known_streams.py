"""Which stream of its target a published draft reads, where its config does not say.

Owns what is known of drafts for Kimi K3 by their hub ids, and on what ground. Knows no file's content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockdraft.config import TapStream

__all__ = ["KNOWN_STREAMS", "KnownStream", "hub_id_of", "known_stream"]

_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class KnownStream:
    """`is_inferred`: nobody says it, an engine that serves the draft merely behaves so; it is not acted upon."""

    stream: TapStream
    ground: str
    is_inferred: bool = False


KNOWN_STREAMS: Mapping[str, KnownStream] = {
    "Inferact/Kimi-K3-DSpark": KnownStream("prefix", "vLLM serves it with its default, the prefix stream"),
    "modal-labs/Kimi-K3-DFlash": KnownStream("attn_res", "vLLM PR 50487 added the mixture for it"),
    "lightseekorg/kimi-k3-dflash2": KnownStream(
        "prefix", "TokenSpeed reads a file that is silent so", is_inferred=True
    ),
    "RadixArk/Kimi-K3.1-Dflash2-Preview": KnownStream(
        "attn_res", "SpecForge and SGLang capture the mixture", is_inferred=True
    ),
}


def hub_id_of(source: str | Path) -> str | None:
    """The hub id that `source` is, or that a folder of the hub's cache was fetched from; None for any other folder."""
    for part in Path(source).parts:
        if match := _CACHED.fullmatch(part):
            return f"{match[1]}/{match[2]}"
    name = str(source)
    return name if _HUB_ID.fullmatch(name) and not Path(name).exists() else None


def known_stream(source: str | Path) -> KnownStream | None:
    """What is known of a draft, named by its hub id or its folder in the hub's cache."""
    name = hub_id_of(source)
    return None if name is None else {key.lower(): known for key, known in KNOWN_STREAMS.items()}.get(name.lower())
