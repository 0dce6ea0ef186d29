"""How the families that are served with block drafters write reasoning and tool calls, and which one a target uses.

One explicit table, REPLY_FORMATS; `find_reply_format` compares a target's chat template with its signs (its special
tokens, where it ships no template) and refuses to choose where none fits or several do. `docs/replies.md` shows it.

Sources of the forms (facts of published chat templates and format descriptions):
    hermes         Nous Research, Hermes 2 Pro and Hermes 3 model cards (2024); Qwen2.5 chat template (2024-09)
    qwen3          Qwen3 chat template (2025-04); Hermes 4 chat template (2025-08)
    qwen3-coder    Qwen3-Coder chat template (2025-07)
    qwen3.5        Qwen3.5 chat template (2026-02)
    kimi-k2        Kimi K2 tool-call guidance (2025-07); Kimi-K2-Thinking chat template (2025-11)
    kimi-k3        Kimi K3 XTML as its llama.cpp template (2026-07) and vLLM's parser reference describe it
    glm-4.5        GLM-4.5 chat template (2025-07), GLM-4.7 and GLM-5 (the same without line breaks)
    llama3         Llama 3.1 model card, prompt formats (2024-07)
    mistral        Mistral Small 3.1 chat template (2025-03)
    mistral-args   Devstral Small 2 and Ministral 3 chat templates (2025-12)
    deepseek-v3    DeepSeek V3 (2024-12) and R1 (2025-01) chat templates
    deepseek-v3.1  DeepSeek V3.1 chat template (2025-08)
    deepseek-v3.2  DeepSeek V3.2 prompt encoding (2025-12): DSML
    deepseek-v4    DeepSeek V4 prompt encoding as vLLM's parser reference describes it (2026)
    gpt-oss        OpenAI, harmony response format (2025-08)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from blockdraft.errors import RequestError
from blockdraft.text.tokenizer import Tokenizer

__all__ = ["DSML", "REPLY_FORMATS", "ReplyFormat", "Syntax", "find_reply_format", "reply_format"]

Syntax = Literal[
    "none",
    "json_tag",
    "function_tag",
    "arg_tag",
    "kimi_section",
    "xtml",
    "json_reply",
    "mistral_list",
    "mistral_args",
    "deepseek_fenced",
    "deepseek",
    "dsml",
    "harmony",
]

DSML = "\uff5cDSML\uff5c"
_DEEPSEEK_MARKERS = tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("calls\u2581begin", "calls\u2581end"))
_DEEPSEEK_CALL = tuple(f"<\uff5ctool\u2581{name}\uff5c>" for name in ("call\u2581begin", "call\u2581end", "sep"))
_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """How a family writes reasoning and tool calls."""

    name: str
    families: str
    """Who uses it, for people."""
    syntax: Syntax
    call_start: str = ""
    """What begins a call, or a section of calls, in the text; "" where the whole reply has a form of its own."""
    reasoning: tuple[str, str] | None = None
    """What opens and closes the reasoning. It is looked for at the start of the reply only."""
    signs: tuple[str, ...] = ()
    """Texts that a template of the family holds, all of them."""
    absent: tuple[str, ...] = ()
    """Texts that it does not hold, none of them."""
    arguments_are_text: bool = False
    """Whether the template wants the arguments of earlier calls as JSON text, not as an object."""
    calls_have_null_content: bool = False
    """Whether the template tells a message of calls alone by its content being null."""
    reasoning_key: str = "reasoning_content"
    """Under which name the template looks for the reasoning of earlier messages."""
    visible_tokens: tuple[str, ...] = ()
    """Texts that must be shown in the text to be parsed, where they are special tokens of the target."""

    @property
    def has_tools(self) -> bool:
        return self.syntax != "none"

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None

    def fits(self, template: str) -> bool:
        """Whether a chat template holds its signs."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.absent)

    def is_reasoning_open(self, prompt_text: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, because its template opens it for the target."""
        return self.reasoning is not None and prompt_text.rstrip().endswith(self.reasoning[0])


_OTHER_TAGS = ("<function=", "<arg_key>", "<tool_calls>", "<use_mcp_tool>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_ALL = (
    ReplyFormat(
        name="plain",
        families="templates without tools and reasoning (SmolLM2, Llama 3, Gemma 2)",
        syntax="none",
        absent=("tools", "tool_call", "think", "THINK", "<|channel|>", "<|open|>", DSML),
    ),
    ReplyFormat(
        name="think",
        families="templates with reasoning between think tags and no tools",
        syntax="none",
        reasoning=_THINK,
        signs=("</think>",),
        absent=("tools", "tool_call", "tool\u2581call", DSML),
        visible_tokens=_THINK,
    ),
    ReplyFormat(
        name="hermes",
        families="Hermes 2 and 3, Qwen2.5, Qwen3 instruct templates without reasoning",
        syntax="json_tag",
        call_start="<tool_call>",
        signs=("<tool_call>", "arguments"),
        absent=(*_OTHER_TAGS, "think>"),
        visible_tokens=_TOOL_TAGS,
    ),
    ReplyFormat(
        name="qwen3",
        families="Qwen3, QwQ, Hermes 4",
        syntax="json_tag",
        call_start="<tool_call>",
        reasoning=_THINK,
        signs=("<tool_call>", "arguments", "think>"),
        absent=_OTHER_TAGS,
        visible_tokens=(*_THINK, *_TOOL_TAGS),
    ),
    ReplyFormat(
        name="qwen3-coder",
        families="Qwen3-Coder",
        syntax="function_tag",
        call_start="<tool_call>",
        signs=("<tool_call>", "<function=", "<parameter="),
        absent=("think>",),
        visible_tokens=_TOOL_TAGS,
    ),
    ReplyFormat(
        name="qwen3.5",
        families="Qwen3.5 and later",
        syntax="function_tag",
        call_start="<tool_call>",
        reasoning=_THINK,
        signs=("<tool_call>", "<function=", "<parameter=", "think>"),
        visible_tokens=(*_THINK, *_TOOL_TAGS),
    ),
    ReplyFormat(
        name="kimi-k2",
        families="Kimi K2, Kimi-K2-Thinking, Kimi-Linear",
        syntax="kimi_section",
        call_start="<|tool_calls_section_begin|>",
        reasoning=_THINK,
        signs=("<|tool_calls_section_begin|>",),
        visible_tokens=(
            *_THINK,
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    ReplyFormat(
        name="kimi-k3",
        families="Kimi K3",
        syntax="xtml",
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        signs=("<|open|>", "<|close|>", "<|sep|>"),
        visible_tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    ReplyFormat(
        name="glm-4.5",
        families="GLM-4.5 to GLM-5",
        syntax="arg_tag",
        call_start="<tool_call>",
        reasoning=_THINK,
        signs=("<tool_call>", "<arg_key>", "<arg_value>"),
        visible_tokens=(*_THINK, *_TOOL_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    ReplyFormat(
        name="llama3",
        families="Llama 3.1 to 3.3",
        syntax="json_reply",
        signs=("<|start_header_id|>", "ipython", "parameters"),
        absent=("<tool_call>", "<TOOLCALL>", "<function="),
        visible_tokens=("<|python_tag|>",),
    ),
    ReplyFormat(
        name="mistral",
        families="Mistral 7B v0.3 to Mistral Small 3.1",
        syntax="mistral_list",
        call_start="[TOOL_CALLS]",
        signs=("[TOOL_CALLS]",),
        absent=("[ARGS]",),
        visible_tokens=("[TOOL_CALLS]",),
    ),
    ReplyFormat(
        name="mistral-args",
        families="Mistral Small 3.2, Magistral, Devstral Small 2, Ministral 3",
        syntax="mistral_args",
        call_start="[TOOL_CALLS]",
        reasoning=("[THINK]", "[/THINK]"),
        signs=("[TOOL_CALLS]", "[ARGS]"),
        visible_tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    ReplyFormat(
        name="deepseek-v3",
        families="DeepSeek V3, R1 and its distillations",
        syntax="deepseek_fenced",
        calls_have_null_content=True,
        call_start=_DEEPSEEK_MARKERS[0],
        reasoning=_THINK,
        signs=(_DEEPSEEK_MARKERS[0], "```json"),
        arguments_are_text=True,
        visible_tokens=(*_THINK, *_DEEPSEEK_MARKERS, *_DEEPSEEK_CALL),
    ),
    ReplyFormat(
        name="deepseek-v3.1",
        families="DeepSeek V3.1",
        syntax="deepseek",
        calls_have_null_content=True,
        call_start=_DEEPSEEK_MARKERS[0],
        reasoning=_THINK,
        signs=(_DEEPSEEK_MARKERS[0],),
        absent=("```json",),
        arguments_are_text=True,
        visible_tokens=(*_THINK, *_DEEPSEEK_MARKERS, *_DEEPSEEK_CALL),
    ),
    ReplyFormat(
        name="deepseek-v3.2",
        families="DeepSeek V3.2",
        syntax="dsml",
        call_start=f"<{DSML}function_calls>",
        reasoning=_THINK,
        signs=(DSML, "function_calls"),
        arguments_are_text=True,
        visible_tokens=(*_THINK, DSML),
    ),
    ReplyFormat(
        name="deepseek-v4",
        families="DeepSeek V4",
        syntax="dsml",
        call_start=f"<{DSML}tool_calls>",
        reasoning=_THINK,
        signs=(DSML, "tool_calls>"),
        absent=("function_calls",),
        arguments_are_text=True,
        visible_tokens=(*_THINK, DSML),
    ),
    ReplyFormat(
        name="gpt-oss",
        families="gpt-oss",
        syntax="harmony",
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        signs=("<|channel|>", "<|message|>"),
        reasoning_key="thinking",
        visible_tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    ),
)
REPLY_FORMATS: Mapping[str, ReplyFormat] = MappingProxyType({item.name: item for item in _ALL})
"""Every known format by the name that `--reply-format` takes."""


def reply_format(name: str) -> ReplyFormat:
    """The format of this name, or RequestError."""
    found = REPLY_FORMATS.get(name)
    if found is None:
        raise RequestError(f"reply format {name!r} given, allowed are {', '.join(REPLY_FORMATS)}")
    return found


def find_reply_format(tokenizer: Tokenizer) -> ReplyFormat:
    """The one format that a target's chat template shows; RequestError where none or several do.

    A target without a chat template is judged by its special tokens; "plain" where they say nothing.
    """
    template = tokenizer.chat_template
    if template is None:
        # Special tokens alone do not tell V3.2's DSML from V4's, so both are named then.
        text = " ".join(tokenizer.special_id_of)
        if DSML in text:
            raise _undecided(["deepseek-v3.2", "deepseek-v4"], "special tokens fit")
        found = [item for item in _ALL if item.signs and item.syntax in ("xtml", "harmony") and item.fits(text)]
        return found[0] if found else REPLY_FORMATS["plain"]
    found = [item for item in _ALL if item.fits(template)]
    if not found:
        raise RequestError(
            "this target's chat template fits no known reply format: name the one it uses with --reply-format "
            f"(plain takes replies as they are): {', '.join(REPLY_FORMATS)}"
        )
    if len(found) > 1:
        raise _undecided([item.name for item in found], "chat template fits")
    return found[0]


def _undecided(names: list[str], what: str) -> RequestError:
    return RequestError(
        f"this target's {what} several reply formats, {', '.join(names)}: name the one it uses with --reply-format"
    )
