"""A chat with tools as a prompt: messages as the family's template wants them, and tools where a template has none.

Owns the differences of templates in what goes in; rendering itself is the tokenizer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.errors import RequestError
from blockdraft.text.messages import check_chat_messages, json_arguments
from blockdraft.text.sections.formats import ReplyFormat
from blockdraft.text.sections.values import parameters_of
from blockdraft.text.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "chat_prompt", "render_tools"]

_INTRODUCTION = (
    "You can call tools. They are listed here, one JSON object on each line:\n<tools>\n{tools}\n</tools>\n"
    "To call a tool, write its name and its arguments as one JSON object between two tags, like this:\n"
    '<tool_call>\n{{"name": "tool name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
    "You get what it returns between <tool_response> and </tool_response>."
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat: its ids, and its text with special tokens, which ReplyParser and tool_grammar want to see."""

    ids: tuple[int, ...]
    text: str


def chat_prompt(
    tokenizer: Tokenizer,
    reply_format: ReplyFormat,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> ChatPrompt:
    """The prompt of a chat, with tools where there are any; RequestError where the target cannot have them."""
    checked = check_chat_messages(messages)
    parameters_of(tools)
    has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in checked)
    if (tools or has_calls) and not reply_format.has_tools:
        raise RequestError(
            f"this target's replies ({reply_format.name!r}) have no tool calls: send no tools, or choose how calls "
            "are written with --reply-format hermes"
        )
    if not reply_format.has_reasoning and any("reasoning_content" in message for message in checked):
        raise RequestError(f"this target's replies ({reply_format.name!r}) have no reasoning: send content only")
    template = tokenizer.chat_template or ""
    lacks_tools = bool(tools) and not re.search(r"\btools\b", template)
    if lacks_tools or (has_calls and "tool_calls" not in template):
        if reply_format.name != "hermes":
            raise RequestError(
                f"this target's chat template has no {'tools' if lacks_tools else 'tool calls'}: send none, put a "
                "chat_template.jinja that has them into its folder, or choose --reply-format hermes, which writes them "
                "into the messages"
            )
        checked = render_tools(checked, tools)
    elif tools:
        template_kwargs["tools"] = [_complete(tool) for tool in tools]
    made = [_for_template(message, reply_format) for message in checked]
    ids = tokenizer.chat_ids(made, add_generation_prompt=add_generation_prompt, **template_kwargs)
    return ChatPrompt(tuple(ids), tokenizer.decode(ids, skip_special_tokens=False))


def _complete(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that templates take for granted."""
    function = {"description": "", **tool["function"]}
    function["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    made: dict[str, Any] = json.loads(json.dumps({"type": "function", **tool, "function": function}))
    return made


def _for_template(message: dict[str, Any], reply_format: ReplyFormat) -> dict[str, Any]:
    """A checked message as the family's template reads it."""
    made = dict(message)
    if "reasoning_content" in made:
        made[reply_format.reasoning_key] = made.pop("reasoning_content")
    if "tool_calls" not in made:
        return made
    if made["content"] is None and not reply_format.calls_have_null_content:
        made["content"] = ""
    made["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _arguments(call, reply_format)}}
        for call in made["tool_calls"]
    ]
    return made


def _arguments(call: Mapping[str, Any], reply_format: ReplyFormat) -> object:
    given = call["function"]["arguments"]
    if not reply_format.arguments_are_text:
        return json_arguments(given, "arguments")
    return given if isinstance(given, str) and given.strip() else json.dumps(given or {}, ensure_ascii=False)


def render_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked messages of a chat with tools as plain ones, for a template that knows no tools ("hermes").

    The tools go to the end of the system message (a new one where there is none), calls into the assistant's content,
    and what tools returned into a user's message, several in a row into one.
    """
    made: list[dict[str, Any]] = []
    was_tool = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_tool:
                made[-1]["content"] += "\n" + text
            else:
                made.append({"role": "user", "content": text})
        else:
            made.append({"role": message["role"], "content": _with_calls(message)})
        was_tool = is_tool
    if not tools:
        return made
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=listed)
    if made[0]["role"] == "system":
        made[0]["content"] = f"{made[0]['content']}\n\n{text}".lstrip()
    else:
        made.insert(0, {"role": "system", "content": text})
    return made


def _with_calls(message: Mapping[str, Any]) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        written = {"name": function["name"], "arguments": json_arguments(function["arguments"], "arguments")}
        parts.append(f"<tool_call>\n{json.dumps(written, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(parts)
