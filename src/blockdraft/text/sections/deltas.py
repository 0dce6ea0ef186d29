"""What a reply consists of, piece by piece: reasoning, content and tool calls; and the ids of calls.

Knows no format and no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

__all__ = [
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "call_ids",
    "short_call_ids",
]

_SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the reply's calls from 0; `id` is unique in the reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; all of a call joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete."""

    index: int


Delta = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def call_ids(seed: str) -> Iterator[str]:
    """Ids of one reply's calls, "call_" and 24 hex digits: the same for the same seed, unlike those of any other."""
    return (f"call_{_digest(seed, number)[:24]}" for number in count())


def short_call_ids(seed: str) -> Iterator[str]:
    """The same in the nine letters and digits that Mistral's templates demand."""
    return (_digest(seed, number)[:_SHORT_ID_CHARS] for number in count())


def _digest(seed: str, number: int) -> str:
    return hashlib.sha256(f"{number}\n{seed}".encode(errors="surrogatepass")).hexdigest()
