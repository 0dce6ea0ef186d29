"""Replies that consist of channels: Kimi K3's tags around think, response and tools, and gpt-oss's messages.

What stands outside a channel, or in one that cannot be understood, becomes content as it was written.
"""

from __future__ import annotations

import re

from blockdraft.text.sections.calls import Calls, read_xtml_tools
from blockdraft.text.sections.cursor import MalformedCall, Read
from blockdraft.text.sections.reading import Reading

__all__ = ["read_harmony", "read_xtml"]

_TAGS = ("<|open|>", "<|close|>")
_TOOLS = "<|open|>tools<|sep|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADER_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>")
_HEADER_TEXT = re.compile(r"[^<\n]*")
_CHANNEL = re.compile(r"<\|channel\|>\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


# ---- Kimi K3 ---------------------------------------------------------------------------------------------------------
def read_xtml(reading: Reading) -> Read[None]:
    """The reply, from its start (often inside a channel that the prompt opened) to its end."""
    cursor, prompt = reading.cursor, reading.prompt_text.rstrip()
    for name in ("think", "response"):
        if prompt.endswith(f"<|open|>{name}<|sep|>"):
            yield from _read_channel(reading, name)
    while True:
        before = cursor.pos
        yield from cursor.spaces()
        if cursor.at_end:
            return
        spaces = cursor.text[before : cursor.pos]
        if (yield from cursor.take("<|open|>think<|sep|>")):
            yield from _read_channel(reading, "think")
        elif (yield from cursor.take("<|open|>response<|sep|>")):
            yield from _read_channel(reading, "response")
        elif (yield from cursor.close("<|close|>message<|sep|>")):
            pass
        elif reading.has_tools and (yield from cursor.take(_TOOLS)):
            cursor.pos -= len(_TOOLS)
            yield from reading.try_calls(read_xtml_tools, _TOOLS, spaces)
        else:
            reading.content(spaces)
            yield from _read_stray(reading)


def _read_channel(reading: Reading, name: str) -> Read[None]:
    hand_on = reading.reasoning if name == "think" else reading.content
    closing = f"<|close|>{name}<|sep|>"
    yield from reading.stream(hand_on, (closing,), holds_spaces=False)
    yield from reading.cursor.take(closing)


def _read_stray(reading: Reading) -> Read[None]:
    """Text up to the next tag, which may begin with one that says nothing here."""
    for tag in _TAGS:
        if (yield from reading.cursor.take(tag)):
            reading.content(tag)
            break
    yield from reading.stream(reading.content, _TAGS, holds_spaces=False)


# ---- gpt-oss ---------------------------------------------------------------------------------------------------------
def read_harmony(reading: Reading) -> Read[None]:
    """The reply, a row of messages with a header each: analysis is reasoning, what goes to functions is a call.

    A message after another of the same kind begins a new line.
    """
    cursor = reading.cursor
    last = ""
    while True:
        cursor.forget()
        yield from cursor.spaces()
        if cursor.at_end:
            return
        cursor.pos = 0
        try:
            header = yield from _read_header(reading)
        except MalformedCall:
            cursor.pos = 0
            if (yield from cursor.take("<|start|>")):
                reading.content("<|start|>")
            yield from reading.stream(reading.content, ("<|start|>",), holds_spaces=False)
            continue
        found = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            yield from _read_harmony_call(reading, recipient[1], header)
        else:
            kind = "reasoning" if found is not None and found[1] == "analysis" else "content"
            hand_on = reading.reasoning if kind == "reasoning" else reading.content
            if kind == last:
                hand_on("\n")
            last = kind
            yield from reading.stream(hand_on, _ENDS, holds_spaces=False)
        yield from _take_end(reading)


def _read_header(reading: Reading) -> Read[str]:
    """A message's header up to <|message|>, which is read; MalformedCall where there is none."""
    cursor = reading.cursor
    yield from cursor.spaces()
    start = cursor.pos
    while not (yield from cursor.take("<|message|>")):
        for marker in _HEADER_MARKERS:
            if (yield from cursor.take(marker)):
                break
        else:
            yield from cursor.word(_HEADER_TEXT)
    header = cursor.text[start : cursor.pos]
    if "<|channel|>" not in header and not header.startswith("<|start|>"):
        raise MalformedCall("a channel expected")
    return header


def _read_harmony_call(reading: Reading, recipient: str, header: str) -> Read[None]:
    """A message to a function; as it was written, header included, where it is no call of one."""
    name = recipient.removeprefix("functions.")

    def read(calls: Calls) -> Read[None]:
        if name == recipient or not reading.has_tools:
            raise MalformedCall("no function is called")
        cursor = calls.cursor
        yield from cursor.spaces()
        arguments = yield from cursor.json_object()
        yield from cursor.spaces()
        start = cursor.pos
        for end in _ENDS:
            if (yield from cursor.close(end)):
                break
        else:
            raise MalformedCall("text after the arguments")
        if end == "<|start|>" and not cursor.at_end:
            cursor.pos = start  # it begins the next message
        calls.done(name, arguments)

    if not (yield from reading.try_calls(read, "", header)):
        yield from reading.stream(reading.content, _ENDS, holds_spaces=False)


def _take_end(reading: Reading) -> Read[None]:
    for end in _ENDS[:3]:
        if (yield from reading.cursor.take(end)):
            return
