"""What all readers of replies share: where deltas go, text that streams up to a marker, calls that may turn out none.

Owns what is held back of streaming text. Knows no format's markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blockdraft.text.sections.calls import Calls
from blockdraft.text.sections.cursor import SPACE, Cursor, MalformedCall, Read
from blockdraft.text.sections.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from blockdraft.text.sections.formats import ReplyFormat
from blockdraft.text.sections.values import parameters_of
from blockdraft.text.stream import overlap

__all__ = ["Reading"]


class Reading:
    """One reply being read: the text so far, and the deltas that nobody has fetched yet."""

    def __init__(
        self,
        reply_format: ReplyFormat,
        *,
        has_tools: bool,
        prompt_text: str,
        tools: Sequence[Mapping[str, Any]],
        ids: Iterator[str],
    ) -> None:
        self.format = reply_format
        self.has_tools = has_tools and reply_format.has_tools
        self.prompt_text = prompt_text
        self.cursor = Cursor()
        self.deltas: list[Delta] = []
        self.num_calls = 0
        self.num_content_chars = 0
        self._calls = Calls(self.cursor, self._call, parameters_of(tools))
        self._ids = ids
        self._used_ids: set[str] = set()

    def content(self, text: str) -> None:
        if text:
            self.num_content_chars += len(text)
            self.deltas.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            self.deltas.append(ReasoningDelta(text))

    def _call(self, name: str, arguments: str, call_id: str | None) -> None:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if call_id is None or call_id in self._used_ids:
            call_id = self._new_id(name)
        self._used_ids.add(call_id)
        self.deltas.append(ToolCallStart(index, call_id, name))
        self.deltas.append(ToolCallArguments(index, arguments))
        self.deltas.append(ToolCallEnd(index))

    def _new_id(self, name: str) -> str:
        ids = self._ids
        if self.format.syntax == "kimi_section":
            ids = (f"functions.{name}:{number}" for number in range(len(self._used_ids) + 1))
        return next(call_id for call_id in ids if call_id not in self._used_ids)

    def try_calls(self, read: Callable[[Calls], Read[None]], marker: str, before: str) -> Read[bool]:
        """Calls from the cursor's position, which begin with `marker`; False where some of that is no call.

        Then the position is behind the last call that is one, or, where there is none, behind the marker: `before`
        (the spaces in front) and the marker are handed on as content, and so must be what follows.
        """
        cursor, calls = self.cursor, self._calls
        cursor.forget()
        calls.settled = calls.num_handed_over = 0
        try:
            yield from read(calls)
        except MalformedCall:
            cursor.pos = calls.settled
            if not calls.num_handed_over:
                cursor.pos = len(marker)
                self.content(before + marker)
            return False
        return True

    def stream(self, hand_on: Callable[[str], None], ends: tuple[str, ...], *, holds_spaces: bool) -> Read[str]:
        """Hand on text up to the first of `ends`, which is left unread, or to the end of the reply.

        Returns the spaces before that place, which are not handed on (without `holds_spaces` they are).
        """
        cursor = self.cursor
        while True:
            text = cursor.text
            found = [at for end in ends if (at := text.find(end, cursor.pos)) >= 0]
            is_last = bool(found) or cursor.is_ended
            stop = min(found, default=len(text))
            if not is_last:
                stop -= max((overlap(text[cursor.pos :], end) for end in ends), default=0)
            certain = text[cursor.pos : stop]
            shown = certain.rstrip(SPACE) if holds_spaces else certain
            hand_on(shown)
            if is_last:
                cursor.pos = stop
                return certain[len(shown) :]
            cursor.pos += len(shown)
            cursor.forget()
            yield
