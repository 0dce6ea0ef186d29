"""A reply taken apart while it arrives: reasoning, content and tool calls, in the form of one format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blockdraft.errors import RequestError
from blockdraft.text.sections.channels import read_harmony, read_xtml
from blockdraft.text.sections.cursor import Read
from blockdraft.text.sections.deltas import Delta, call_ids, short_call_ids
from blockdraft.text.sections.formats import ReplyFormat, Syntax
from blockdraft.text.sections.reading import Reading
from blockdraft.text.sections.tagged import read_tagged
from blockdraft.text.tokenizer import Tokenizer

__all__ = ["ReplyParser"]

_NEED_SCHEMAS = ("function_tag", "arg_tag")
_SHORT_IDS = ("mistral_list", "mistral_args")
_CHANNELS: Mapping[Syntax, Callable[[Reading], Read[None]]] = {"xtml": read_xtml, "harmony": read_harmony}


class ReplyParser:
    """One reply's text, fed in any pieces, as deltas that joined do not depend on the pieces.

    A call is handed over when it is complete, so nobody gets half a call; one that is malformed or unfinished becomes
    content as it was written. A call of a tool that was not offered is handed over all the same, but for Llama 3's,
    which only the tools' names tell from an answer in JSON.
    """

    def __init__(
        self,
        reply_format: ReplyFormat,
        tokenizer: Tokenizer,
        *,
        has_tools: bool,
        prompt_text: str,
        tools: Sequence[Mapping[str, Any]] = (),
        ids: Iterator[str] | None = None,
    ) -> None:
        """`has_tools`: whether calls are looked for. `prompt_text`: the rendered prompt, special tokens included: its
        template may have opened the reasoning. `tools`: the request's, in OpenAI's form; formats that write arguments
        as plain text need their schemas. `ids`: for calls whose ids the format leaves to us, each other than all
        before; by default made of the prompt. `tokenizer` is the target's; markers are looked for in the text alone, so
        special tokens among them must be visible in it (`ReplyFormat.visible_tokens`).
        """
        if has_tools and reply_format.syntax in _NEED_SCHEMAS and not tools:
            raise RequestError(
                f"reply format {reply_format.name!r} writes arguments as plain text: give the request's tools, "
                "whose schemas say what they are"
            )
        if ids is None:
            make_ids = short_call_ids if reply_format.syntax in _SHORT_IDS else call_ids
            ids = make_ids(prompt_text)
        self._reading = Reading(reply_format, has_tools=has_tools, prompt_text=prompt_text, tools=tools, ids=ids)
        self._steps = _CHANNELS.get(reply_format.syntax, read_tagged)(self._reading)
        self._is_done = False

    def feed(self, text: str) -> list[Delta]:
        """What this text settles."""
        assert not self._reading.cursor.is_ended, "the reply has ended"
        self._reading.cursor.text += text
        return self._advance()

    def finish(self) -> list[Delta]:
        """End of the reply: everything that was held back."""
        self._reading.cursor.is_ended = True
        return self._advance()

    def _advance(self) -> list[Delta]:
        if not self._is_done:
            self._is_done = next(self._steps, True) is True
        deltas, self._reading.deltas = self._reading.deltas, []
        return deltas
