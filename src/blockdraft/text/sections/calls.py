"""How each syntax writes calls: one reader per syntax, from the marker that begins a call or a section of calls.

A reader hands over each call when it is complete, so that nothing has to be taken back; it raises MalformedCall where
the text is no call, and what it has not handed over is then the text's. Knows no target and no reply as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from blockdraft.text.sections.cursor import Cursor, MalformedCall, Read, json_members
from blockdraft.text.sections.formats import DSML, Syntax
from blockdraft.text.sections.values import typed_value

__all__ = ["READERS", "Calls", "read_json_reply", "read_xtml_tools"]

_NAME = re.compile(r"[\w.\-]*")
_ARG_NAME = re.compile(r"[^<>\n]*")
_ATTRIBUTE = re.compile(r'[^"<>]*')
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<plain>[\w.\-]+)(?P<number>:\d+)?")
_KIMI_CHARS = re.compile(r"[\w.\-: \n]*")


@dataclass(slots=True)
class Calls:
    """Where the readers hand over calls, and what they must know of the request's tools."""

    cursor: Cursor
    hand_over: Callable[[str, str, str | None], None]
    """Takes a call's name, its arguments as JSON text, and the id that the model gave it."""
    parameters: Mapping[str, Mapping[str, Any]]
    """JSON schema of the arguments by the tool's name."""
    num_handed_over: int = 0
    settled: int = field(default=0)
    """Position up to which the text belongs to calls that were handed over."""

    def done(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Hand over a call that ends at the cursor's position."""
        self.hand_over(name, arguments, call_id)
        self.num_handed_over += 1
        self.settled = self.cursor.pos

    def typed(self, name: str, written: Mapping[str, str]) -> str:
        """Arguments written as plain text, as a JSON object that fits the tool's schema."""
        schema = self.parameters.get(name, {})
        return _dumps({key: typed_value(text, schema, key) for key, text in written.items()})


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _named_call(text: str, *keys: str) -> tuple[str, str, str | None]:
    """Name, arguments and id of a call written as one JSON object; arguments stand under one of `keys`."""
    members = json_members(text)
    name = json.loads(members.get("name", "null"))
    present = [key for key in keys if key in members]
    if not isinstance(name, str) or not name or len(present) > 1 or not {"name", "id", "type", *keys} >= set(members):
        raise MalformedCall("an object with name and arguments expected")
    arguments = members[present[0]] if present else "{}"
    if not arguments.startswith("{"):
        raise MalformedCall("arguments must be an object")
    call_id = json.loads(members.get("id", "null"))
    return name, arguments, call_id if isinstance(call_id, str) and call_id else None


def _add(written: dict[str, str], key: str, value: str) -> None:
    if not key or key in written:
        raise MalformedCall(f"argument {key!r} has no name or is given twice")
    written[key] = value


# ---- one call between tags -------------------------------------------------------------------------------------------
def _json_tag(calls: Calls) -> Read[None]:
    """<tool_call> {"name": ..., "arguments": {...}} </tool_call>"""
    cursor = calls.cursor
    yield from cursor.need("<tool_call>")
    yield from cursor.spaces()
    name, arguments, _ = _named_call((yield from cursor.json_object()), "arguments")
    yield from cursor.spaces()
    if not (yield from cursor.close("</tool_call>")):
        raise MalformedCall("text after the call's object")
    calls.done(name, arguments)


def _function_tag(calls: Calls) -> Read[None]:
    """<tool_call><function=NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>"""
    cursor = calls.cursor
    yield from cursor.need("<tool_call>")
    yield from cursor.spaces()
    yield from cursor.need("<function=")
    name = yield from cursor.word(_NAME)
    yield from cursor.need(">")
    written: dict[str, str] = {}
    while True:
        yield from cursor.spaces()
        if (yield from cursor.take("</function>")):
            break
        yield from cursor.need("<parameter=")
        key = yield from cursor.word(_ARG_NAME)
        yield from cursor.need(">")
        value = yield from cursor.value_until("</parameter>", ("<parameter=", "</function>"))
        _add(written, key, value.removeprefix("\n").removesuffix("\n"))
    yield from cursor.spaces()
    if not (yield from cursor.close("</tool_call>")):
        raise MalformedCall("text after the function")
    calls.done(name, calls.typed(name, written))


def _arg_tag(calls: Calls) -> Read[None]:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>"""
    cursor = calls.cursor
    yield from cursor.need("<tool_call>")
    yield from cursor.spaces()
    name = yield from cursor.word(_NAME)
    written: dict[str, str] = {}
    while True:
        yield from cursor.spaces()
        if (yield from cursor.take("</tool_call>")):
            break
        yield from cursor.need("<arg_key>")
        key = yield from cursor.word(_ARG_NAME)
        yield from cursor.need("</arg_key>")
        yield from cursor.spaces()
        yield from cursor.need("<arg_value>")
        value = yield from cursor.value_until("</arg_value>", ("<arg_key>", "</tool_call>"))
        _add(written, key.strip(), value)
    calls.done(name, calls.typed(name, written))


# ---- a section of calls ----------------------------------------------------------------------------------------------
def _kimi_section(calls: Calls) -> Read[None]:
    """<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{...}..."""
    cursor = calls.cursor
    yield from cursor.need("<|tool_calls_section_begin|>")
    while True:
        yield from cursor.spaces()
        if calls.num_handed_over and (yield from cursor.close("<|tool_calls_section_end|>")):
            return
        yield from cursor.need("<|tool_call_begin|>")
        head = (yield from cursor.word(_KIMI_CHARS)).strip()
        found = _KIMI_ID.fullmatch(head)
        if found is None:
            raise MalformedCall("functions.name:number expected")
        yield from cursor.need("<|tool_call_argument_begin|>")
        yield from cursor.spaces()
        arguments = yield from cursor.json_object()
        yield from cursor.spaces()
        if not (yield from cursor.close("<|tool_call_end|>")):
            raise MalformedCall("text after the arguments")
        calls.done(found["plain"], arguments, head if found["number"] else None)


def _deepseek_fenced(calls: Calls) -> Read[None]:
    """Each call is its type, a separator, the name, and a fenced JSON object."""
    yield from _deepseek_section(calls, is_fenced=True)


def _deepseek(calls: Calls) -> Read[None]:
    """Each call is its name, a separator and a JSON object."""
    yield from _deepseek_section(calls, is_fenced=False)


def _deepseek_section(calls: Calls, *, is_fenced: bool) -> Read[None]:
    cursor = calls.cursor
    yield from cursor.need("<｜tool▁calls▁begin｜>")
    while True:
        yield from cursor.spaces()
        if calls.num_handed_over and (yield from cursor.close("<｜tool▁calls▁end｜>")):
            return
        yield from cursor.need("<｜tool▁call▁begin｜>")
        if is_fenced:
            yield from cursor.need("function<｜tool▁sep｜>")
        name = yield from cursor.word(_NAME)
        if is_fenced:
            yield from cursor.spaces()
            yield from cursor.need("```json")
        else:
            yield from cursor.need("<｜tool▁sep｜>")
        yield from cursor.spaces()
        arguments = yield from cursor.json_object()
        yield from cursor.spaces()
        if is_fenced:
            yield from cursor.need("```")
            yield from cursor.spaces()
        if not (yield from cursor.close("<｜tool▁call▁end｜>")):
            raise MalformedCall("text after the arguments")
        calls.done(name, arguments)


def _dsml(calls: Calls) -> Read[None]:
    """A section of invocations whose parameters say themselves whether they are text or JSON."""
    cursor = calls.cursor
    yield from cursor.need(f"<{DSML}")
    is_old = yield from cursor.take("function_calls>")
    if not is_old:
        yield from cursor.need("tool_calls>")
    while True:
        yield from cursor.spaces()
        if calls.num_handed_over and (
            yield from cursor.close(f"</{DSML}{'function_calls' if is_old else 'tool_calls'}>")
        ):
            return
        yield from cursor.need(f'<{DSML}invoke name="')
        name = yield from cursor.word(_NAME)
        yield from cursor.need('">')
        written: dict[str, str] = {}
        while True:
            yield from cursor.spaces()
            if (yield from cursor.take(f"</{DSML}invoke>")):
                break
            yield from cursor.need(f'<{DSML}parameter name="')
            key = yield from cursor.word(_ATTRIBUTE)
            yield from cursor.need('" string="')
            is_text = yield from cursor.take("true")
            if not is_text:
                yield from cursor.need("false")
            yield from cursor.need('">')
            value = yield from cursor.value_until(
                f"</{DSML}parameter>", (f"<{DSML}parameter name=", f"</{DSML}invoke>")
            )
            _add(written, key, _dumps(value) if is_text else _checked_json(value))
        calls.done(name, _object(written))


def _checked_json(text: str) -> str:
    """A JSON value as it was written; MalformedCall if it is none."""
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCall(f"{text[:40]!r} is no JSON value") from error
    return text.strip()


def _refuse_constant(word: str) -> None:
    raise ValueError(word)


def _object(members: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{_dumps(key)}: {text}" for key, text in members.items()) + "}"


# ---- Mistral ---------------------------------------------------------------------------------------------------------
def _mistral_list(calls: Calls) -> Read[None]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]"""
    cursor = calls.cursor
    yield from cursor.need("[TOOL_CALLS]")
    yield from cursor.spaces()
    yield from cursor.need("[")
    while True:
        yield from cursor.spaces()
        call = _named_call((yield from cursor.json_object()), "arguments")
        yield from cursor.spaces()
        is_last = yield from cursor.close("]")
        if not is_last:
            yield from cursor.need(",")
        calls.done(*call)
        if is_last:
            return


def _mistral_args(calls: Calls) -> Read[None]:
    """[TOOL_CALLS]NAME[ARGS]{...}, with [CALL_ID]ID before [ARGS] in some versions"""
    cursor = calls.cursor
    yield from cursor.need("[TOOL_CALLS]")
    yield from cursor.spaces()
    name = yield from cursor.word(_NAME)
    call_id = None
    if (yield from cursor.take("[CALL_ID]")):
        call_id = yield from cursor.word(_NAME)
    yield from cursor.need("[ARGS]")
    yield from cursor.spaces()
    arguments = yield from cursor.json_object()
    calls.done(name, arguments, call_id)


# ---- replies of a form of their own ----------------------------------------------------------------------------------
def read_json_reply(calls: Calls) -> Read[None]:
    """The whole reply: {"name": ..., "parameters": {...}}, several with semicolons between them (Llama 3)."""
    cursor = calls.cursor
    yield from cursor.take("<|python_tag|>")
    while True:
        yield from cursor.spaces()
        name, arguments, _ = _named_call((yield from cursor.json_object()), "parameters", "arguments")
        if calls.parameters and name not in calls.parameters:
            raise MalformedCall(f"no tool is named {name!r}")
        yield from cursor.spaces()
        goes_on = yield from cursor.take(";")
        if not goes_on and not cursor.at_end:
            raise MalformedCall("text after the call")
        calls.done(name, arguments)
        if not goes_on:
            return
        yield from cursor.spaces()
        if cursor.at_end:
            return


def read_xtml_tools(calls: Calls) -> Read[None]:
    """Kimi K3's tools channel, from its opening tag to its closing tag."""
    cursor = calls.cursor
    yield from cursor.need("<|open|>tools<|sep|>")
    while True:
        yield from cursor.spaces()
        if calls.num_handed_over and (yield from cursor.close("<|close|>tools<|sep|>")):
            return
        yield from cursor.need("<|open|>call")
        attributes = yield from _attributes(calls)
        if not attributes.get("tool"):
            raise MalformedCall("a call without the tool's name")
        written: dict[str, str] = {}
        while True:
            yield from cursor.spaces()
            if (yield from cursor.take("<|close|>call<|sep|>")):
                break
            yield from cursor.need("<|open|>argument")
            argument = yield from _attributes(calls)
            value = yield from cursor.value_until("<|close|>argument<|sep|>", ("<|open|>argument", "<|close|>call"))
            is_text = argument.get("type") == "string"
            _add(written, argument.get("key", ""), _dumps(value) if is_text else _checked_json(value))
        calls.done(attributes["tool"], _object(written))


def _attributes(calls: Calls) -> Read[dict[str, str]]:
    """Attributes of a tag up to its <|sep|>, unescaped."""
    cursor = calls.cursor
    found: dict[str, str] = {}
    while not (yield from cursor.take("<|sep|>")):
        yield from cursor.need(" ")
        key = yield from cursor.word(_NAME)
        yield from cursor.need('="')
        value = "" if (yield from cursor.take('"')) else (yield from cursor.until('"'))
        found[key] = value.replace("&quot;", '"').replace("&amp;", "&")
    return found


READERS: Mapping[Syntax, Callable[[Calls], Read[None]]] = {
    "json_tag": _json_tag,
    "function_tag": _function_tag,
    "arg_tag": _arg_tag,
    "kimi_section": _kimi_section,
    "deepseek_fenced": _deepseek_fenced,
    "deepseek": _deepseek,
    "dsml": _dsml,
    "mistral_list": _mistral_list,
    "mistral_args": _mistral_args,
}
