"""Sections of a reply: which format a target writes reasoning and tool calls in, reading it, forcing it, asking for it.

Owns everything about tools and reasoning that depends on the family. Knows no requests, no models and no HTTP.
"""

from __future__ import annotations

from blockdraft.text.sections.asking import ChatPrompt, chat_prompt, render_tools
from blockdraft.text.sections.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    call_ids,
    short_call_ids,
)
from blockdraft.text.sections.forcing import tool_grammar
from blockdraft.text.sections.formats import REPLY_FORMATS, ReplyFormat, find_reply_format, reply_format
from blockdraft.text.sections.parser import ReplyParser

__all__ = [
    "REPLY_FORMATS",
    "ChatPrompt",
    "ContentDelta",
    "Delta",
    "ReasoningDelta",
    "ReplyFormat",
    "ReplyParser",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "call_ids",
    "chat_prompt",
    "find_reply_format",
    "render_tools",
    "reply_format",
    "short_call_ids",
    "tool_grammar",
]
