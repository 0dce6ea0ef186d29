"""A grammar under which a reply must call a tool: `tool_choice` "required" or a named function.

Owns how each syntax's calls look as a grammar, written as the family's template writes them. Reasoning stays free
where the format has it, and so does Kimi K3's response. Arguments written as JSON keep to the whole schema of the
tool; those written as plain text keep to names, required ones and types, and are free text where the type is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdraft.errors import RequestError, shown
from blockdraft.text.grammar import Grammar, json_rule
from blockdraft.text.sections.formats import DSML, ReplyFormat, Syntax
from blockdraft.text.sections.values import parameters_of, value_types
from blockdraft.text.tokenizer import Tokenizer

__all__ = ["tool_grammar"]

_NAME = re.compile(r"[\w.\-]+")
_KEY = re.compile(r'[^<>\n"]+')
_ANY = "/(.|\\n)*/"
_BEGIN = "<\uff5ctool\u2581{}\u2581begin\uff5c>"
_END = "<\uff5ctool\u2581{}\u2581end\uff5c>"
_XTML_CALL = '<|open|>call tool="{}" index="'
_SEP = "<\uff5ctool\u2581sep\uff5c>"


def tool_grammar(
    reply_format: ReplyFormat,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    tokenizer: Tokenizer,
    parallel: bool = True,
    prompt_text: str = "",
) -> Grammar:
    """Replies that call one of the tools, or the tool that `choice` names; several times with `parallel`.

    `choice`: "required" or a tool's name. `tokenizer` tells which markers are special tokens; `prompt_text`, the
    rendered prompt with its special tokens, whether the reply begins inside reasoning. RequestError where the format
    has no calls, a name is unknown or cannot be written, or a schema cannot be kept to.
    """
    if not reply_format.has_tools:
        raise RequestError(f"reply format {reply_format.name!r} has no tool calls; choose another one, such as hermes")
    parameters = parameters_of(tools)
    if choice != "required":
        if choice not in parameters:
            raise RequestError(f"tool_choice names {shown(choice)}, the tools are {', '.join(map(repr, parameters))}")
        parameters = {choice: parameters[choice]}
    for name in parameters:
        if not _NAME.fullmatch(name):
            raise RequestError(f"tool name {shown(name)} given; letters, digits, '_', '-' and '.' are allowed")
    writer = _Writer(reply_format, tokenizer, parallel)
    return Grammar.lark(writer.grammar(parameters, prompt_text))


class _Writer:
    """One grammar being written: its rules, and which texts are special tokens."""

    def __init__(self, reply_format: ReplyFormat, tokenizer: Tokenizer, parallel: bool) -> None:
        self.format = reply_format
        self._parallel = parallel
        self._special = {
            text: tokenizer.special_id_of[text]
            for text in reply_format.visible_tokens
            if text in tokenizer.special_id_of
        }
        self._rules: list[str] = []
        self._num_rules = 0

    def grammar(self, parameters: Mapping[str, Mapping[str, Any]], prompt_text: str) -> str:
        calls = _LAYOUTS[self.format.syntax](self, parameters)
        start = f"start: {self._before(prompt_text)} {calls}"
        return "\n".join([start, *self._rules]) + "\n"

    # ---- parts -------------------------------------------------------------------------------------------------------
    def spell(self, text: str) -> str:
        """A fixed text: strings, and special tokens by their ids."""
        if not text:
            return ""
        if not self._special:
            return json.dumps(text, ensure_ascii=False)
        pattern = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a new rule."""
        name = f"r{self._num_rules}"
        self._num_rules += 1
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def text_until(self, marker: str) -> str:
        """Free text up to a marker, the marker included."""
        first = min((at for text in self._special if (at := marker.find(text)) >= 0), default=None)
        if first is None:
            return self.rule(_ANY, f"[suffix={json.dumps(marker, ensure_ascii=False)}]")
        # A special token ends free text by itself, wherever the text before it fits.
        before = "".join(f"\\x{{{ord(char):X}}}" for char in marker[:first])
        free = self.rule(_ANY[:-1] + before + "/")
        return f"{free} {self.spell(marker[first:])}"

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        return self.rule(json_rule(schema))

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Arguments as one JSON object."""
        return self.json({"type": "object", **schema})

    def around(self, before: str, middle: str, after: str) -> str:
        """A part between two fixed texts."""
        return " ".join(filter(None, (self.spell(before), middle, self.spell(after))))

    def several(self, call: str, between: str) -> str:
        # gpt-oss ends its turn with a call
        is_single = not self._parallel or self.format.syntax == "harmony"
        return call if is_single else f"{call} ({self.spell(between)} {call})*"

    def one_of(self, calls: Sequence[str]) -> str:
        return self.rule(" | ".join(calls))

    def _before(self, prompt_text: str) -> str:
        """What may come before the calls: reasoning, where it is open or may still be opened."""
        reasoning = self.format.reasoning
        if reasoning is None or self.format.syntax in ("xtml", "harmony"):
            return self._channels_before(prompt_text)
        opening, closing = reasoning
        gap = self.rule("/[\\n]{1,2}/")
        rest = f"{self.text_until(closing)} {gap}?"
        if self.format.is_reasoning_open(prompt_text):
            return rest
        if prompt_text.rstrip().endswith(closing):
            return ""
        return f"({self.spell(opening)} {rest})?"

    def _channels_before(self, prompt_text: str) -> str:
        if self.format.syntax == "harmony":
            thinking = f"{self.spell('<|channel|>analysis<|message|>')} {self.text_until('<|end|>')}"
            return f"({thinking} {self.spell('<|start|>assistant')})?"
        if self.format.syntax != "xtml":
            return ""
        response = self.text_until("<|close|>response<|sep|>")
        if prompt_text.rstrip().endswith("<|open|>response<|sep|>"):
            return response
        response = f"{self.spell('<|open|>response<|sep|>')} {response}"
        thinking = self.text_until("<|close|>think<|sep|>")
        if self.format.is_reasoning_open(prompt_text):
            return f"{thinking} {response}"
        return f"({self.spell('<|open|>think<|sep|>')} {thinking})? {response}"

    def written(self, name: str, schema: Mapping[str, Any], item: Callable[[str, str, str], tuple[str, str]]) -> str:
        """Arguments one after another in the schema's order. `item` gives what stands around an argument, from its
        name, its type as far as there is one ("" where not), and whether it is text ("true", "false")."""
        properties = dict(schema.get("properties") or {})
        required = list(schema.get("required") or ())
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        parts = []
        for key in [*properties, *(key for key in required if key not in properties)]:
            if not _KEY.fullmatch(key):
                raise RequestError(f"argument {shown(key)} of tool {name!r} cannot be written in this reply format")
            own = properties.get(key, True)
            types = value_types(own, schema)
            is_text = types is not None and "string" in types
            kind = "string" if is_text else next(iter(types)) if types is not None and len(types) == 1 else ""
            before, after = item(key, kind, str(is_text).lower())
            choices = own.get("enum") if isinstance(own, Mapping) and is_text else None
            if choices is not None and all(isinstance(text, str) and text for text in choices):
                value = f"({' | '.join(self.spell(text) for text in choices)}) {self.spell(after)}"
            elif is_text:
                value = self.text_until(after)
            else:
                value = f"{self.json({**own, **shared} if isinstance(own, Mapping) else own)} {self.spell(after)}"
            part = f"{self.spell(before)} {value}"
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts)


Parameters = Mapping[str, Mapping[str, Any]]
Layout = Callable[[_Writer, Parameters], str]
Item = Callable[[str, str, str], tuple[str, str]]


# ---- layouts: how the template writes a call and several of them -----------------------------------------------------
def _json_calls(before: str, after: str, between: str, frame: tuple[str, str] = ("", "")) -> Layout:
    """Calls whose arguments are one JSON object; `{}` in `before` is the tool's name."""

    def layout(writer: _Writer, parameters: Parameters) -> str:
        call = writer.one_of(
            [
                writer.around(before.replace("{}", name), writer.arguments(schema), after)
                for name, schema in parameters.items()
            ]
        )
        return writer.around(frame[0], writer.several(call, between), frame[1])

    return layout


def _kimi_section(writer: _Writer, parameters: Parameters) -> str:
    number = writer.rule("/[0-9]{1,4}/")
    call = writer.one_of(
        [
            f"{writer.spell(f'<|tool_call_begin|>functions.{name}:')} {number} "
            + writer.around("<|tool_call_argument_begin|>", writer.arguments(schema), "<|tool_call_end|>")
            for name, schema in parameters.items()
        ]
    )
    return writer.around("<|tool_calls_section_begin|>", writer.several(call, ""), "<|tool_calls_section_end|>")


def _written_calls(before: str, item: Item, after: str, between: str, frame: tuple[str, str] = ("", "")) -> Layout:
    """Calls whose arguments are written one by one; `{}` in `before` is the tool's name."""

    def layout(writer: _Writer, parameters: Parameters) -> str:
        call = writer.one_of(
            [
                writer.around(before.replace("{}", name), writer.written(name, schema, item), after)
                for name, schema in parameters.items()
            ]
        )
        return writer.around(frame[0], writer.several(call, between), frame[1])

    return layout


def _xtml(writer: _Writer, parameters: Parameters) -> str:
    number = writer.rule("/[1-9][0-9]?/")
    call = writer.one_of(
        [
            f"{writer.spell(_XTML_CALL.replace('{}', name))} {number} "
            + writer.around('"<|sep|>', writer.written(name, schema, _xtml_item), "<|close|>call<|sep|>")
            for name, schema in parameters.items()
        ]
    )
    calls = writer.several(call, "")
    return writer.around("<|open|>tools<|sep|>", calls, "<|close|>tools<|sep|><|close|>message<|sep|>")


def _xtml_item(key: str, kind: str, is_text: str) -> tuple[str, str]:
    kind = {"integer": "number", "": "object"}.get(kind, kind)
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>', "<|close|>argument<|sep|>"


def _function_item(key: str, kind: str, is_text: str) -> tuple[str, str]:
    return f"<parameter={key}>\n", "\n</parameter>\n"


def _arg_item(key: str, kind: str, is_text: str) -> tuple[str, str]:
    return f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"


def _dsml_item(key: str, kind: str, is_text: str) -> tuple[str, str]:
    return f'<{DSML}parameter name="{key}" string="{is_text}">', f"</{DSML}parameter>\n"


def _dsml(writer: _Writer, parameters: Parameters) -> str:
    start = writer.format.call_start
    frame = (f"{start}\n", start.replace("<", "</"))
    return _written_calls(f'<{DSML}invoke name="{{}}">\n', _dsml_item, f"</{DSML}invoke>\n", "", frame)(
        writer, parameters
    )


_SECTION = (_BEGIN.format("calls"), _END.format("calls"))
_LAYOUTS: Mapping[Syntax, Layout] = {
    "json_tag": _json_calls('<tool_call>\n{"name": "{}", "arguments": ', "}\n</tool_call>", "\n"),
    "function_tag": _written_calls("<tool_call>\n<function={}>\n", _function_item, "</function>\n</tool_call>", "\n"),
    "arg_tag": _written_calls("<tool_call>{}\n", _arg_item, "</tool_call>", "\n"),
    "kimi_section": _kimi_section,
    "xtml": _xtml,
    "json_reply": _json_calls('{"name": "{}", "parameters": ', "}", "; "),
    "mistral_list": _json_calls('{"name": "{}", "arguments": ', "}", ", ", ("[TOOL_CALLS] [", "]")),
    "mistral_args": _json_calls("[TOOL_CALLS]{}[ARGS]", "", ""),
    "deepseek_fenced": _json_calls(
        f"{_BEGIN.format('call')}function{_SEP}{{}}\n```json\n", f"\n```{_END.format('call')}", "\n", _SECTION
    ),
    "deepseek": _json_calls(f"{_BEGIN.format('call')}{{}}{_SEP}", _END.format("call"), "", _SECTION),
    "dsml": _dsml,
    "harmony": _json_calls("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "", ""),
}
