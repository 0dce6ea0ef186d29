"""Replies as each family writes them, written out by hand beside what they mean; and ways to feed them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from blockdraft.text import Tokenizer
from blockdraft.text.sections import (
    REPLY_FORMATS,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyParser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "hours": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]

Call = tuple[str, dict[str, Any]]


def byte_tokenizer(special: Sequence[str] = (), template: str | None = None, added: Sequence[str] = ()) -> Tokenizer:
    """One id per byte, then the special tokens, then added ones that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens(list(added))
    return Tokenizer(backend=backend, chat_template=template)


PLAIN = byte_tokenizer()


@dataclass
class Parsed:
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)


def joined(deltas: Sequence[Delta]) -> Parsed:
    """The deltas of a whole reply put together; fails where their order makes no sense."""
    parsed = Parsed()
    arguments: dict[int, str] = {}
    ended: set[int] = set()
    names: list[str] = []
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            assert delta.text
            parsed.reasoning += delta.text
        elif isinstance(delta, ContentDelta):
            assert delta.text
            parsed.content += delta.text
        elif isinstance(delta, ToolCallStart):
            assert delta.index == len(names)
            names.append(delta.name)
            parsed.ids.append(delta.id)
            arguments[delta.index] = ""
        elif isinstance(delta, ToolCallArguments):
            assert delta.index not in ended
            arguments[delta.index] += delta.text
        else:
            assert isinstance(delta, ToolCallEnd)
            ended.add(delta.index)
    assert ended == set(range(len(names)))
    assert len(set(parsed.ids)) == len(parsed.ids)
    for index, name in enumerate(names):
        value = json.loads(arguments[index])
        assert isinstance(value, dict)
        parsed.calls.append((name, value))
    return parsed


def parse(
    name: str,
    pieces: Sequence[str] | str,
    *,
    prompt: str = "",
    has_tools: bool = True,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> Parsed:
    parser = ReplyParser(REPLY_FORMATS[name], PLAIN, has_tools=has_tools, prompt_text=prompt, tools=tools)
    deltas: list[Delta] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        deltas += parser.feed(piece)
    return joined(deltas + parser.finish())


def xml_value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_calls(name: str, calls: Sequence[Call], first_number: int = 0) -> str:
    """Calls as the family's template writes them, in plain Python."""
    dumped = [(tool, json.dumps(arguments, ensure_ascii=False), arguments) for tool, arguments in calls]
    if name in ("hermes", "qwen3"):
        return "\n".join(f'<tool_call>\n{{"name": "{t}", "arguments": {d}}}\n</tool_call>' for t, d, _ in dumped)
    if name in ("qwen3-coder", "qwen3.5"):
        return "\n".join(
            f"<tool_call>\n<function={t}>\n"
            + "".join(f"<parameter={k}>\n{xml_value(v)}\n</parameter>\n" for k, v in a.items())
            + "</function>\n</tool_call>"
            for t, _, a in dumped
        )
    if name == "glm-4.5":
        return "\n".join(
            f"<tool_call>{t}\n"
            + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{xml_value(v)}</arg_value>\n" for k, v in a.items())
            + "</tool_call>"
            for t, _, a in dumped
        )
    if name == "kimi-k2":
        body = "".join(
            f"<|tool_call_begin|>functions.{t}:{first_number + n}<|tool_call_argument_begin|>{d}<|tool_call_end|>"
            for n, (t, d, _) in enumerate(dumped)
        )
        return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
    if name == "kimi-k3":
        kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
        body = "".join(
            f'<|open|>call tool="{t}" index="{n}"<|sep|>'
            + "".join(
                f'<|open|>argument key="{k}" type="{kinds.get(type(v), "null")}"<|sep|>{xml_value(v)}'
                "<|close|>argument<|sep|>"
                for k, v in a.items()
            )
            + "<|close|>call<|sep|>"
            for n, (t, _, a) in enumerate(dumped, start=1)
        )
        return f"<|open|>tools<|sep|>{body}<|close|>tools<|sep|>"
    if name == "llama3":
        return "; ".join(f'{{"name": "{t}", "parameters": {d}}}' for t, d, _ in dumped)
    if name == "mistral":
        return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{t}", "arguments": {d}}}' for t, d, _ in dumped) + "]"
    if name == "mistral-args":
        return "".join(f"[TOOL_CALLS]{t}[ARGS]{d}" for t, d, _ in dumped)
    if name == "deepseek-v3":
        body = "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{t}\n```json\n{d}\n```<｜tool▁call▁end｜>"
            for t, d, _ in dumped
        )
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
    if name == "deepseek-v3.1":
        body = "".join(f"<｜tool▁call▁begin｜>{t}<｜tool▁sep｜>{d}<｜tool▁call▁end｜>" for t, d, _ in dumped)
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"
    if name in ("deepseek-v3.2", "deepseek-v4"):
        wrapper = "function_calls" if name == "deepseek-v3.2" else "tool_calls"
        body = "".join(
            f'<｜DSML｜invoke name="{t}">\n'
            + "".join(
                f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{xml_value(v)}'
                "</｜DSML｜parameter>\n"
                for k, v in a.items()
            )
            + "</｜DSML｜invoke>\n"
            for t, _, a in dumped
        )
        return f"<｜DSML｜{wrapper}>\n{body}</｜DSML｜{wrapper}>"
    assert name == "gpt-oss"
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{t} <|constrain|>json<|message|>{d}<|call|>" for t, d, _ in dumped
    )


def write_reply(name: str, reasoning: str, content: str, calls: Sequence[Call]) -> str:
    """A whole reply as the family writes it; the prompt has opened nothing."""
    if name == "gpt-oss":
        parts = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        parts += [f"<|channel|>commentary<|message|>{content}<|end|>"] if content else []
        parts += [write_calls(name, calls)] if calls else []
        return "<|start|>assistant".join(parts)
    if name == "kimi-k3":
        text = f"<|open|>think<|sep|>{reasoning}<|close|>think<|sep|>" if reasoning else ""
        text += f"<|open|>response<|sep|>{content}<|close|>response<|sep|>"
        return text + (write_calls(name, calls) if calls else "") + "<|close|>message<|sep|>"
    text = ""
    if reasoning:
        opening, closing = REPLY_FORMATS[name].reasoning or ("", "")
        text = f"{opening}\n{reasoning}\n{closing}\n\n"
    return text + content + ("\n" + write_calls(name, calls) if calls else "")


WITH_TOOLS = [name for name, item in REPLY_FORMATS.items() if item.has_tools]
WITH_REASONING = [name for name, item in REPLY_FORMATS.items() if item.has_reasoning]
