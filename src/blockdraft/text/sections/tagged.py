"""Replies with reasoning first, then content with calls in it; and Llama 3's, which are calls altogether or none.

Spaces beside a marker belong to the marker, but for those between a call and content that goes on after it;
everything else is handed on as it was written.
"""

from __future__ import annotations

from blockdraft.text.sections.calls import READERS, read_json_reply
from blockdraft.text.sections.cursor import Read
from blockdraft.text.sections.reading import Reading

__all__ = ["read_tagged"]


def read_tagged(reading: Reading) -> Read[None]:
    """The reply, from its start to its end."""
    was_reasoning = yield from _read_reasoning(reading)
    if reading.format.syntax == "json_reply" and reading.has_tools:
        yield from _read_calls_only(reading)
    yield from _read_content(reading, must_strip=was_reasoning or reading.num_calls > 0)


def _read_reasoning(reading: Reading) -> Read[bool]:
    """The reasoning at the start of the reply, if there is any; whether there was."""
    if reading.format.reasoning is None:
        return False
    opening, closing = reading.format.reasoning
    cursor = reading.cursor
    yield from cursor.spaces()
    if not (yield from cursor.take(opening)) and not reading.format.is_reasoning_open(reading.prompt_text):
        cursor.pos = 0  # the spaces are the answer's
        return False
    yield from cursor.spaces()
    ends: tuple[str, ...] = (closing,)
    if reading.format.syntax == "kimi_section" and reading.has_tools:
        ends = (closing, reading.format.call_start)  # a section of calls ends the reasoning too
    yield from reading.stream(reading.reasoning, ends, holds_spaces=True)
    yield from cursor.take(closing)
    return True


def _read_content(reading: Reading, must_strip: bool) -> Read[None]:
    """Content with calls in it, to the end. `must_strip`: spaces at its start belong to a marker before it."""
    cursor, marker = reading.cursor, reading.format.call_start
    reader = READERS.get(reading.format.syntax) if reading.has_tools else None
    if must_strip:
        yield from cursor.spaces()
    if reader is None:
        yield from reading.stream(reading.content, (), holds_spaces=False)
        return
    is_after_call = must_strip
    while True:
        num_before = reading.num_content_chars
        spaces = yield from reading.stream(reading.content, (marker,), holds_spaces=True)
        if cursor.at_end:
            if not is_after_call or reading.num_content_chars > num_before:
                reading.content(spaces)
            return
        is_after_call = yield from reading.try_calls(reader, marker, spaces)
        if is_after_call and not reading.num_content_chars:
            yield from cursor.spaces()


def _read_calls_only(reading: Reading) -> Read[None]:
    cursor = reading.cursor
    yield from cursor.spaces()
    yield from reading.try_calls(read_json_reply, "", cursor.text[: cursor.pos])
