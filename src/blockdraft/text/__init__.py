"""Everything about words: tokenizer, chat template, streamed detokenising, stop strings, grammars, prompt files.

Owns the way from messages to token ids and from committed ids to text that may be shown. Knows no models, no
requests and no HTTP.
"""

from __future__ import annotations

from blockdraft.text.grammar import Grammar, json_rule
from blockdraft.text.matcher import CompiledGrammar, Matcher, compile_grammar, why_no_grammars
from blockdraft.text.prompts import Prompt, check_messages, parse_chat_jsonl
from blockdraft.text.stream import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    Scan,
    StopScanner,
    StreamDecoder,
    check_stop,
    token_bytes,
)
from blockdraft.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "MAX_STOP_CHARS",
    "MAX_STOP_STRINGS",
    "CompiledGrammar",
    "Grammar",
    "Matcher",
    "Prompt",
    "Scan",
    "StopScanner",
    "StreamDecoder",
    "Tokenizer",
    "check_messages",
    "check_stop",
    "compile_grammar",
    "json_rule",
    "load_tokenizer",
    "parse_chat_jsonl",
    "token_bytes",
    "why_no_grammars",
]
