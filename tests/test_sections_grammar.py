"""tool_choice as a grammar: what the family writes passes, what is no call does not, and what passes is read back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockdraft.errors import RequestError
from blockdraft.text import Tokenizer
from blockdraft.text.matcher import compile_grammar
from blockdraft.text.sections import REPLY_FORMATS, tool_grammar
from sections_kit import PLAIN, TOOLS, WITH_TOOLS, Call, byte_tokenizer, parse, write_calls, write_reply

CALLS: list[Call] = [
    ("get_weather", {"city": "Köln </x> <b", "days": 3, "metric": True, "hours": [1, 2]}),
    ("now", {}),
]


def tokenizer_of(name: str, is_special: bool) -> Tokenizer:
    return byte_tokenizer(special=REPLY_FORMATS[name].visible_tokens) if is_special else PLAIN


def follow(name: str, tokenizer: Tokenizer, text: str, *, choice: str = "required", **kwargs: Any) -> tuple[str, bool]:
    """The part of the text that the grammar lets pass, and whether it may end after it."""
    grammar = tool_grammar(REPLY_FORMATS[name], TOOLS, choice, tokenizer=tokenizer, **kwargs)
    matcher = compile_grammar(grammar, tokenizer).matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    for index, token_id in enumerate(ids):
        if not (int(matcher.mask().bits[token_id // 32]) >> (token_id % 32)) & 1:
            return tokenizer.decode(ids[:index], skip_special_tokens=False), False
        matcher.consume(token_id)
    return text, matcher.mask().may_end


def reply(name: str, calls: list[Call], reasoning: str = "") -> str:
    text = write_reply(name, reasoning, "", calls).removesuffix("<|call|>")
    return text.replace("\n\n\n", "\n\n").lstrip()


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_the_family_writes_passes(name: str, is_special: bool) -> None:
    calls = CALLS[:1] if name == "gpt-oss" else CALLS
    reasoning = "because\n<b>" if REPLY_FORMATS[name].has_reasoning else ""
    tokenizer = tokenizer_of(name, is_special)
    for text in {reply(name, calls, reasoning), reply(name, calls)}:
        assert follow(name, tokenizer, text) == (text, True)
        assert parse(name, text).calls == calls


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_answer_without_a_call_does_not_pass(name: str) -> None:
    passed, may_end = follow(name, tokenizer_of(name, True), "Hello, no call here.")
    assert not may_end
    assert len(passed) < len("Hello")


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if REPLY_FORMATS[name].has_reasoning])
def test_reasoning_that_the_prompt_opened_comes_first(name: str) -> None:
    if name == "gpt-oss":
        pytest.skip("no prompt of gpt-oss opens a channel")
    opening, closing = REPLY_FORMATS[name].reasoning or ("", "")
    rest = reply(name, CALLS)
    text = f"hm{closing}{rest}" if name == "kimi-k3" else f"hm{closing}\n\n{rest}"
    for is_special in (True, False):
        tokenizer = tokenizer_of(name, is_special)
        assert follow(name, tokenizer, text, prompt_text=f"Hi{opening}\n") == (text, True)
    assert parse(name, text, prompt=opening).calls == CALLS
    if name != "kimi-k3":
        assert follow(name, PLAIN, rest, prompt_text=f"{opening}\n\n{closing}\n\n") == (rest, True)


def test_a_named_tool_is_the_only_one() -> None:
    now, weather = reply("qwen3", CALLS[1:]), reply("qwen3", CALLS[:1])
    assert follow("qwen3", PLAIN, now, choice="now") == (now, True)
    assert follow("qwen3", PLAIN, weather, choice="now")[1] is False
    assert follow("qwen3", PLAIN, weather, choice="get_weather", parallel=False) == (weather, True)
    both = reply("qwen3", CALLS)
    assert follow("qwen3", PLAIN, both, parallel=False)[1] is False


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_arguments_keep_to_names_and_types(name: str) -> None:
    tokenizer = tokenizer_of(name, True)
    for arguments in ({"days": 3}, {"city": "a", "days": "three"}, {"city": "a", "days": True}):
        text = reply(name, [("get_weather", arguments)])
        assert follow(name, tokenizer, text) != (text, True), arguments


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_whatever_a_grammar_lets_pass_is_read_as_calls(name: str) -> None:
    """Texts drawn byte by byte from the masks, most of them odd: each is calls of known tools and nothing else."""
    tokenizer = tokenizer_of(name, True)
    schema = {
        "type": "object",
        "properties": {"mode": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["mode", "count"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "set", "parameters": schema}}]
    prompt = "" if REPLY_FORMATS[name].syntax in ("xtml", "harmony") else (REPLY_FORMATS[name].reasoning or ("", ""))[1]
    grammar = tool_grammar(REPLY_FORMATS[name], tools, "set", tokenizer=tokenizer, parallel=False, prompt_text=prompt)
    compiled = compile_grammar(grammar, tokenizer)
    rng = random.Random(7)
    num_done = 0
    for _ in range(6):
        matcher, ids = compiled.matcher(), []
        while len(ids) < 600:
            mask = matcher.mask()
            if mask.may_end:
                break
            allowed = [i for i in range(tokenizer.vocab_size) if (int(mask.bits[i // 32]) >> (i % 32)) & 1]
            specials = [i for i in allowed if i >= 256]
            # Spaces and free text could go on for ever; a marker is taken where there is one.
            ids.append(rng.choice(specials or [i for i in allowed if tokenizer.decode([i]).strip()] or allowed))
            matcher.consume(ids[-1])
        if not matcher.mask().may_end:
            continue
        num_done += 1
        parsed = parse(name, tokenizer.decode(ids, skip_special_tokens=False), prompt=prompt, tools=tools)
        assert [call for call, _ in parsed.calls] == ["set"]
        assert parsed.calls[0][1]["mode"] in ("a", "b")
        assert 0 <= parsed.calls[0][1]["count"] <= 99
    assert num_done


def test_what_cannot_be_forced_is_refused() -> None:
    with pytest.raises(RequestError, match="'plain' has no tool calls"):
        tool_grammar(REPLY_FORMATS["plain"], TOOLS, "required", tokenizer=PLAIN)
    with pytest.raises(RequestError, match="names 'later', the tools are 'get_weather', 'now'"):
        tool_grammar(REPLY_FORMATS["qwen3"], TOOLS, "later", tokenizer=PLAIN)
    odd = [{"type": "function", "function": {"name": "a b"}}]
    with pytest.raises(RequestError, match="tool name 'a b'"):
        tool_grammar(REPLY_FORMATS["qwen3"], odd, "required", tokenizer=PLAIN)
    unkept = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64"}}}
    odd = [{"type": "function", "function": {"name": "f", "parameters": unkept}}]
    with pytest.raises(RequestError, match="contentEncoding"):
        tool_grammar(REPLY_FORMATS["qwen3"], odd, "required", tokenizer=PLAIN)
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a>b": {}}}}}]
    with pytest.raises(RequestError, match="'a>b' of tool 'f' cannot be written"):
        tool_grammar(REPLY_FORMATS["qwen3.5"], odd, "required", tokenizer=PLAIN)


def test_a_choice_of_texts_and_a_reference() -> None:
    schema = {
        "type": "object",
        "$defs": {"pair": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
        "properties": {"unit": {"type": "string", "enum": ["C", "F"]}, "at": {"$ref": "#/$defs/pair"}},
        "required": ["unit"],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    grammar = tool_grammar(REPLY_FORMATS["qwen3-coder"], tools, "f", tokenizer=PLAIN)
    compiled = compile_grammar(grammar, PLAIN)
    for arguments, passes in (({"unit": "C", "at": [1, 2]}, True), ({"unit": "K"}, False), ({"unit": "F"}, True)):
        matcher = compiled.matcher()
        ids = PLAIN.encode(write_calls("qwen3-coder", [("f", arguments)]), add_special_tokens=False)
        is_allowed = True
        for token_id in ids:
            is_allowed = bool((int(matcher.mask().bits[token_id // 32]) >> (token_id % 32)) & 1)
            if not is_allowed:
                break
            matcher.consume(token_id)
        assert is_allowed == passes
