"""What may be asked: chat messages and prompt files, checked before anything else sees them.

Knows no tokenizer and no models.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.errors import RequestError

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file: exactly one of a raw text and a conversation."""

    line: int
    text: str | None
    messages: tuple[dict[str, str], ...] | None

    def as_messages(self) -> list[dict[str, str]]:
        """The conversation; a raw text becomes one user message."""
        if self.messages is not None:
            return [dict(message) for message in self.messages]
        assert self.text is not None
        return [{"role": "user", "content": self.text}]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The conversation as plain role and content, or RequestError naming the message."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of objects, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty: give at least one user message")
    plain = []
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{name} must be an object with role and content, not {type(message).__name__}")
        refuse_unknown(message, ("role", "content"), name)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise RequestError(f"{name}: role {role!r} given, allowed are {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise RequestError(f"{name}: content must be text, not {type(content).__name__}")
        if role == "user" and not content.strip():
            raise RequestError(f"{name}: the user message is empty")
        check_unicode(content, f"{name}: content")
        plain.append({"role": str(role), "content": content})
    return plain


def parse_chat_jsonl(lines: Iterable[str]) -> list[Prompt]:
    """Prompts of a JSONL file: {"prompt": text} or {"messages": [...]} on every line that is not blank."""
    prompts = [_parse_line(line, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise RequestError('the prompt file is empty: give one {"prompt": ...} or {"messages": [...]} per line')
    return prompts


def _parse_line(line: str, number: int) -> Prompt:
    where = f"line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from error
    except RecursionError:
        raise RequestError(f"{where} is not valid JSON: it is nested too deeply") from None
    if not isinstance(entry, dict):
        raise RequestError(f"{where} must be a JSON object, it is a {type(entry).__name__}")
    refuse_unknown(entry, ("prompt", "messages"), where)
    if len(entry) != 1:
        raise RequestError(f'{where} must hold either "prompt" or "messages", it holds {len(entry)} of them')
    if "messages" in entry:
        try:
            return Prompt(number, None, tuple(check_messages(entry["messages"])))
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
    text = entry["prompt"]
    if not isinstance(text, str):
        raise RequestError(f"{where}: prompt must be text, not {type(text).__name__}")
    if not text.strip():
        raise RequestError(f"{where}: the prompt is empty")
    check_unicode(text, f"{where}: prompt")
    return Prompt(number, text, None)


def refuse_unknown(entry: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in entry:
        if key not in allowed:
            raise RequestError(f"{where}: unknown key {key!r}, allowed are {', '.join(allowed)}{hint(key, allowed)}")


def hint(name: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} has half of a surrogate pair at character {error.start}") from None
