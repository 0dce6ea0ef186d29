"""Messages of a chat with tools, checked: what assistants called, what tools answered, what was thought before.

Owns the form of those messages (OpenAI's). Plain ones are checked by prompts.py. Knows no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.errors import RequestError, shown
from blockdraft.text.prompts import check_messages, check_unicode, refuse_unknown

__all__ = ["check_chat_messages", "json_arguments"]

_REASONING_KEYS = ("reasoning_content", "thinking")


def check_chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as plain objects, or RequestError naming the message.

    Beside role and content: `tool_calls` (content may then be null) and `reasoning_content` of an assistant (gpt-oss's
    template calls it `thinking`), and messages of the role tool with the `tool_call_id` of a call before them.
    Arguments stay as they were given, JSON text or an object.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        check_messages(messages)
    checked: list[dict[str, Any]] = []
    known_ids: set[str] = set()
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool":
            checked.append(_tool_message(message, name, known_ids))
        elif role == "assistant" and ({"tool_calls", *_REASONING_KEYS} & set(message)):
            checked.append(_assistant_message(message, name, known_ids))
        else:
            try:
                checked += check_messages([message])
            except RequestError as error:
                raise RequestError(str(error).replace("messages[0]", name, 1)) from None
    return checked


def json_arguments(given: object, what: str) -> dict[str, Any]:
    """A call's arguments as an object, from that or from its JSON text."""
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise RequestError(f"{what} must be a JSON object, it is {shown(given)}")
    return dict(value)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{what} must be text, not {type(value).__name__}")
    check_unicode(value, what)
    return value


def _tool_message(message: Mapping[str, Any], name: str, known_ids: set[str]) -> dict[str, Any]:
    refuse_unknown(message, ("role", "content", "tool_call_id", "name"), name)
    call_id = message.get("tool_call_id")
    if not isinstance(call_id, str) or call_id not in known_ids:
        raise RequestError(f"{name}: tool_call_id {shown(call_id)} is the id of no call in the messages before it")
    made = {"role": "tool", "tool_call_id": call_id, "content": _text(message.get("content"), f"{name}: content")}
    if message.get("name") is not None:
        made["name"] = _text(message["name"], f"{name}: name")
    return made


def _assistant_message(message: Mapping[str, Any], name: str, known_ids: set[str]) -> dict[str, Any]:
    refuse_unknown(message, ("role", "content", "tool_calls", *_REASONING_KEYS), name)
    calls = message.get("tool_calls")
    if calls is not None and (isinstance(calls, str | Mapping) or not isinstance(calls, Sequence) or not calls):
        raise RequestError(f"{name}: tool_calls must be a list of at least one call; leave it out where there is none")
    made: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if made["content"] is not None or not calls:
        _text(made["content"], f"{name}: content")
    for key in _REASONING_KEYS:
        if message.get(key) is not None:
            made[key] = _text(message[key], f"{name}: {key}")
    if calls is None:
        return made
    made["tool_calls"] = [_call(call, f"{name}.tool_calls[{at}]", known_ids) for at, call in enumerate(calls)]
    return made


def _call(call: object, name: str, known_ids: set[str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{name} must be an object with id, type and function")
    refuse_unknown(call, ("id", "type", "function", "index"), name)
    refuse_unknown(function, ("name", "arguments"), f"{name}.function")
    if call.get("type", "function") != "function":
        raise RequestError(f"{name}: type {shown(call['type'])} given, allowed is function")
    call_id, tool = _text(call.get("id"), f"{name}: id"), _text(function.get("name"), f"{name}: the function's name")
    if not tool or not call_id or call_id in known_ids:
        raise RequestError(f"{name}: id and name must not be empty, and an id is given once ({shown(call_id)})")
    arguments = function.get("arguments", "{}")
    json_arguments(arguments, f"{name}: arguments")
    if isinstance(arguments, str):
        check_unicode(arguments, f"{name}: arguments")
    known_ids.add(call_id)
    return {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
