"""POST /v1/chat/completions: messages to a prompt, and the choices of its answer.

Owns what is special to chat: roles and content parts, template settings, messages with logprobs. How reasoning and
tool calls are written in a target's text is text.sections' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.engine import TokenEvent
from blockdraft.serve.answers import Choice
from blockdraft.serve.errors import bad_request
from blockdraft.serve.spelling import Speller
from blockdraft.serve.wire import AssistantMessage, ChatRequest, Message, NamedToolChoice, TextPart, ToolMessage
from blockdraft.text import Grammar, Tokenizer
from blockdraft.text.sections import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyFormat,
    ReplyParser,
    ToolCallArguments,
    ToolCallStart,
    tool_grammar,
)

__all__ = [
    "NAMES",
    "ChatChoice",
    "check_chat",
    "forced_calls",
    "num_logprobs",
    "offered_tools",
    "plain_messages",
    "template_settings",
]

NAMES = ("chat.completion", "chat.completion.chunk")
# what a template is given by the server, or could be used to replace the template by another one
_RESERVED = frozenset(
    {
        "messages",
        "tokenizer",
        "reply_format",
        "conversations",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)


def check_chat(fields: ChatRequest) -> None:
    """Nothing; an error for fields that contradict each other."""
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        raise bad_request(
            f"max_tokens is {fields.max_tokens} and max_completion_tokens {fields.max_completion_tokens}; give one",
            param="max_completion_tokens",
        )
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_request("top_logprobs needs logprobs true", param="top_logprobs")
    if fields.tools is None:
        if fields.tool_choice not in (None, "none"):
            raise bad_request("tool_choice needs tools", param="tool_choice")
        if fields.parallel_tool_calls is not None:
            raise bad_request("parallel_tool_calls has no effect without tools", param="parallel_tool_calls")
    elif not is_forced(fields) and any(tool.function.strict for tool in fields.tools):
        raise bad_request(
            'strict is kept to where a call must come: set tool_choice to "required" or to a tool, or leave strict out',
            param="tools",
            code="unsupported_parameter",
        )


def is_forced(fields: ChatRequest) -> bool:
    """Whether the answer must call a tool."""
    return fields.tool_choice == "required" or isinstance(fields.tool_choice, NamedToolChoice)


def offered_tools(fields: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the target is shown, in OpenAI's form: none of them where it must not call one."""
    if fields.tools is None or fields.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in fields.tools]


def forced_calls(
    fields: ChatRequest, tools: Sequence[Mapping[str, Any]], prompt_text: str, form: ReplyFormat, tokenizer: Tokenizer
) -> Grammar | None:
    """The grammar of an answer that must call a tool; None where it need not."""
    if not is_forced(fields):
        return None
    choice = fields.tool_choice
    return tool_grammar(
        form,
        tools,
        choice.function.name if isinstance(choice, NamedToolChoice) else "required",
        tokenizer=tokenizer,
        parallel=fields.parallel_tool_calls is not False and choice == "required",
        prompt_text=prompt_text,
    )


def num_logprobs(fields: ChatRequest) -> int | None:
    return (fields.top_logprobs or 0) if fields.logprobs else None


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates take them: content parts joined, a developer is a system."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        made: dict[str, Any] = {"role": role, "content": _text(message.content)}
        if isinstance(message, AssistantMessage):
            if message.reasoning_content is not None:
                made["reasoning_content"] = message.reasoning_content
            if message.tool_calls:
                made["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        elif isinstance(message, ToolMessage):
            made["tool_call_id"] = message.tool_call_id
        plain.append(made)
    return plain


def _text(content: str | list[TextPart] | None) -> str | None:
    if content is None:
        return None
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_settings(fields: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the chat template gets beside the messages: chat_template_kwargs and reasoning_effort."""
    settings = dict(fields.chat_template_kwargs or {})
    for name in settings:
        if name in _RESERVED or name in tokenizer.special_tokens:
            raise bad_request(f"{name} is not a switch of a template; leave it out", param="chat_template_kwargs")
    if fields.reasoning_effort is not None:
        if settings.get("reasoning_effort", fields.reasoning_effort) != fields.reasoning_effort:
            raise bad_request("reasoning_effort is given twice, with two values", param="reasoning_effort")
        settings["reasoning_effort"] = fields.reasoning_effort
    return settings


class ChatChoice(Choice):
    """A choice of a chat. `parser` None: all text is content. `max_calls`: further tool calls are left out."""

    def __init__(
        self,
        index: int,
        fields: ChatRequest,
        stop_ids: frozenset[int],
        speller: Speller,
        parser: ReplyParser | None,
    ) -> None:
        super().__init__(index, fields, stop_ids)
        self._speller = speller
        self._parser = parser
        self._num_top = num_logprobs(fields)
        self._max_calls = 1 if fields.parallel_tool_calls is False else None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._has_begun = False

    def _piece(self, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        text = "".join(event.text or "" for event in events)
        delta = self._delta(self._read(text))
        entries = None if self._num_top is None else self._entries(events)
        if not delta and entries is None:
            return None
        return {"delta": delta, "logprobs": None if entries is None else {"content": entries, "refusal": None}}

    def _read(self, text: str) -> list[Delta]:
        if not text:
            return []
        return [ContentDelta(text)] if self._parser is None else self._parser.feed(text)

    def _delta(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        made: dict[str, Any] = {} if self._has_begun else {"role": "assistant", "content": ""}
        self._has_begun = True
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
                made["content"] = made.get("content", "") + delta.text
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
                made["reasoning_content"] = made.get("reasoning_content", "") + delta.text
            elif self._max_calls is None or delta.index < self._max_calls:
                made.setdefault("tool_calls", []).extend(self._call_pieces(delta))
        return made

    def _call_pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """A call as it grows: its head, then its arguments."""
        if isinstance(delta, ToolCallStart):
            function = {"name": delta.name, "arguments": ""}
            self._calls.append({"id": delta.id, "type": "function", "function": function})
            return [{"index": delta.index, "id": delta.id, "type": "function", "function": dict(function)}]
        if isinstance(delta, ToolCallArguments):
            self._calls[delta.index]["function"]["arguments"] += delta.text
            return [{"index": delta.index, "function": {"arguments": delta.text}}]
        return []

    def _entries(self, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        num_top = self._num_top or 0
        fresh = [self._speller.chat_entry(e.logprobs, num_top=num_top) for e in events if e.logprobs is not None]
        self._logprobs.extend(fresh)
        return fresh

    def _rest(self) -> dict[str, Any] | None:
        delta = {} if self._parser is None else self._delta(self._parser.finish())
        return {"delta": delta, "logprobs": None} if delta else None

    def _reason(self) -> str:
        reason = super()._reason()
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _empty_piece(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _whole(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._parser is not None:
            message["reasoning_content"] = "".join(self._reasoning) or None
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._num_top is None else {"content": self._logprobs, "refusal": None}
        return {"message": message, "logprobs": logprobs}
