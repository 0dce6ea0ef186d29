"""Reading a text that is still arriving: what can be decided is decided, for the rest the reader waits.

Every reading method is a generator that yields where it needs more text and returns what it read. So a format is
written down as plain steps, and what is read does not depend on how the text was split. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, TypeVar

__all__ = ["SPACE", "Cursor", "MalformedCall", "Read", "json_members"]

_T = TypeVar("_T")
Read = Generator[None, None, _T]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
_STRING_CHARS = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPES = '"\\/bfnrtu'
_MAX_DEPTH = 200  # of nested JSON; the parsers of clients give up not far above


class MalformedCall(Exception):
    """What was read is not a call after all, or the text ended inside it."""


class Cursor:
    """The text so far, a position in it, and whether more may come."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.is_ended = False

    @property
    def at_end(self) -> bool:
        """Whether all text is read and no more will come."""
        return self.is_ended and self.pos == len(self.text)

    def forget(self) -> None:
        """Drop what lies before the position."""
        self.text, self.pos = self.text[self.pos :], 0

    def more(self) -> Read[bool]:
        """Wait for text; False where none will come."""
        if self.is_ended:
            return False
        yield
        return True

    def take(self, literal: str) -> Read[bool]:
        """Whether the text goes on with this; if so, it is read."""
        while True:
            there = self.text[self.pos : self.pos + len(literal)]
            if there == literal:
                self.pos += len(literal)
                return True
            if not literal.startswith(there) or not (yield from self.more()):
                return False

    def close(self, marker: str) -> Read[bool]:
        """`take`, and true as well where the text ends before the marker or inside it."""
        if (yield from self.take(marker)):
            return True
        if self.is_ended and marker.startswith(self.text[self.pos :]):
            self.pos = len(self.text)
            return True
        return False

    def need(self, literal: str) -> Read[None]:
        if not (yield from self.take(literal)):
            raise MalformedCall(f"{literal!r} expected")

    def spaces(self) -> Read[None]:
        while True:
            found = _SPACES.match(self.text, self.pos)
            assert found is not None
            self.pos = found.end()
            if self.pos < len(self.text) or not (yield from self.more()):
                return

    def until(self, marker: str) -> Read[str]:
        """The text before the marker, which is read too; MalformedCall where it never comes."""
        start = searched = self.pos
        while True:
            at = self.text.find(marker, searched)
            if at >= 0:
                self.pos = at + len(marker)
                return self.text[start:at]
            searched = max(start, len(self.text) - len(marker) + 1)
            if not (yield from self.more()):
                raise MalformedCall(f"{marker!r} expected")

    def word(self, allowed: re.Pattern[str]) -> Read[str]:
        """The longest run of allowed characters (a pattern of any number of one class); MalformedCall if empty."""
        start = self.pos
        while True:
            found = allowed.match(self.text, self.pos)
            assert found is not None
            self.pos = found.end()
            if self.pos < len(self.text) or not (yield from self.more()):
                break
        if self.pos == start:
            raise MalformedCall("a name expected")
        return self.text[start : self.pos]

    def value_until(self, closing: str, following: tuple[str, ...]) -> Read[str]:
        """Raw text up to the first closing marker after which, spaces aside, one of `following` stands (unread)."""
        start = self.pos
        while True:
            yield from self.until(closing)
            end = self.pos
            yield from self.spaces()
            after = self.pos
            for marker in following:
                if (yield from self.take(marker)):
                    self.pos = after
                    return self.text[start : end - len(closing)]
            self.pos = end

    # ---- JSON ----------------------------------------------------------------------------------------------------
    def json_object(self) -> Read[str]:
        """The text of one JSON object, exactly as written; MalformedCall at the first character that cannot be."""
        start = self.pos
        if not (yield from self._peek()) == "{":
            raise MalformedCall("an object expected")
        yield from self._json_value(0)
        return self.text[start : self.pos]

    def _peek(self) -> Read[str]:
        """The next character, "" at the end."""
        while self.pos == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.pos]

    def _next(self, allowed: str) -> Read[str]:
        """The next character that is no space, which must be one of these."""
        yield from self.spaces()
        char = yield from self._peek()
        if not char or char not in allowed:
            raise MalformedCall(f"one of {allowed!r} expected")
        self.pos += 1
        return char

    def _json_value(self, depth: int) -> Read[None]:
        if depth > _MAX_DEPTH:
            raise MalformedCall("nested too deeply")
        yield from self.spaces()
        char = yield from self._peek()
        if char == '"':
            yield from self._json_string()
        elif char == "{":
            self.pos += 1
            yield from self._json_items("}", depth, has_keys=True)
        elif char == "[":
            self.pos += 1
            yield from self._json_items("]", depth, has_keys=False)
        else:
            scalar = yield from self.word(_SCALAR_CHARS)
            if not _SCALAR.fullmatch(scalar):
                raise MalformedCall(f"{scalar!r} is no JSON value")

    def _json_items(self, closing: str, depth: int, *, has_keys: bool) -> Read[None]:
        yield from self.spaces()
        if (yield from self._peek()) == closing:
            self.pos += 1
            return
        while True:
            if has_keys:
                yield from self._next('"')
                self.pos -= 1
                yield from self._json_string()
                yield from self._next(":")
            yield from self._json_value(depth + 1)
            if (yield from self._next("," + closing)) == closing:
                return

    def _json_string(self) -> Read[None]:
        self.pos += 1
        while True:
            found = _STRING_CHARS.match(self.text, self.pos)
            assert found is not None
            self.pos = found.end()
            char = yield from self._peek()
            if char == "\\":
                self.pos += 1
                escape = yield from self._peek()
                if not escape or escape not in _ESCAPES:
                    raise MalformedCall("an escape in a string expected")
                self.pos += 1
                if escape == "u":
                    yield from self._hex_digits()
            elif char == '"':
                self.pos += 1
                return
            elif not char or char < " ":
                raise MalformedCall("a string does not end")

    def _hex_digits(self) -> Read[None]:
        for _ in range(4):
            digit = yield from self._peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                raise MalformedCall("four hex digits expected")
            self.pos += 1


def json_members(text: str) -> dict[str, str]:
    """Members of a JSON object that `json_object` read: each value's text as written; MalformedCall for a key twice."""
    try:
        return _members(text)
    except ValueError as error:  # a number of more digits than Python reads
        raise MalformedCall(str(error)) from error


def _members(text: str) -> dict[str, str]:
    decoder = json.JSONDecoder()
    members: dict[str, str] = {}
    pos = _after_spaces(text, 1)
    while text[pos] != "}":
        key: Any
        key, pos = decoder.raw_decode(text, pos)
        pos = _after_spaces(text, _after_spaces(text, pos) + 1)
        _, end = decoder.raw_decode(text, pos)
        if key in members:
            raise MalformedCall(f"{key!r} is given twice")
        members[key] = text[pos:end]
        pos = _after_spaces(text, end)
        if text[pos] == ",":
            pos = _after_spaces(text, pos + 1)
    return members


def _after_spaces(text: str, pos: int) -> int:
    found = _SPACES.match(text, pos)
    assert found is not None
    return found.end()
