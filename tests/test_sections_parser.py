"""Replies of every family taken apart: the same for every split, and nothing of the text is ever lost."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.errors import RequestError
from blockdraft.text.sections import REPLY_FORMATS, ReplyParser, ToolCallEnd, ToolCallStart
from sections_kit import NOW, PLAIN, WITH_REASONING, WITH_TOOLS, Call, joined, parse, write_calls, write_reply

TWO: list[Call] = [
    ("get_weather", {"city": 'Köln "<tool_call>" 👩‍👩‍👧', "days": 3, "metric": True, "hours": [1, 2]}),
    ("now", {}),
]
# Text that is hard on a parser: parts of markers, whole ones, JSON, spaces, characters of several bytes.
HARD = [
    *sorted({token for item in REPLY_FORMATS.values() for token in item.visible_tokens}),
    *("<", "<tool", "</think", "<|", "{", "}", "[", "]", '"', "\\", "\n", " ", "é", "👩‍👩‍👧", ";", ",", ":"),
    *("get_weather", '{"name": "now", "arguments": {}}', '{"name": "now", "parameters": {}}', "functions.now:0"),
    *("<function=now>", "</function>", "<parameter=x>", "</parameter>", "assistant", "tools", "commentary to="),
    *("analysis", "response", "think", "```json", "function", "final", "message", "call"),
]
QUICK = settings(max_examples=25, deadline=None)


def cut(data: st.DataObject, text: str) -> list[str]:
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    edges = [0, *points, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


# ---------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_are_read_as_written(name: str) -> None:
    content = "" if name == "llama3" else "Let me look."
    parsed = parse(name, write_reply(name, "", content, TWO))
    assert parsed.calls == TWO
    assert (parsed.content, parsed.reasoning) == (content, "")


@pytest.mark.parametrize("name", WITH_REASONING)
def test_reasoning_is_told_from_content(name: str) -> None:
    reply = write_reply(name, "It is <b>so</b>.\n\nYes.", "The answer: 4", [])
    assert parse(name, reply).reasoning == "It is <b>so</b>.\n\nYes."
    assert parse(name, reply, has_tools=False).content == "The answer: 4"


@pytest.mark.parametrize("name", [name for name in WITH_REASONING if name != "gpt-oss"])
def test_reasoning_that_the_prompt_opened(name: str) -> None:
    opening, closing = REPLY_FORMATS[name].reasoning or ("", "")
    after = "<|open|>response<|sep|>" if name == "kimi-k3" else "\n\n"
    parsed = parse(name, f"so it is{closing}{after}Yes", prompt=f"Hi{opening}\n")
    assert (parsed.reasoning, parsed.content) == ("so it is", "Yes")
    assert parse(name, "only thoughts", prompt=opening).reasoning == "only thoughts"
    closed = parse(name, "Yes", prompt=f"{opening}\n\n{closing}\n\n")
    assert (closed.reasoning, closed.content) == ("", "Yes")


@pytest.mark.parametrize("name", [*WITH_TOOLS, "plain", "think"])
def test_an_ordinary_answer_is_handed_on_unchanged(name: str) -> None:
    if name == "gpt-oss":
        pytest.skip("every message of gpt-oss has a header")
    text = '  Use <b>, {"a": [1]} and 2 < 3.\n\n'
    assert parse(name, text).content == text


def test_text_before_between_and_after_calls() -> None:
    one, other = write_calls("qwen3", TWO[:1]), write_calls("qwen3", TWO[1:])
    parsed = parse("qwen3", f"First\n{one}\nthen\n\n{other}\nlast \n")
    assert parsed.calls == TWO
    assert parsed.content == "First\nthen\nlast \n"
    assert parse("qwen3", f"{one}\n\nlast").content == "last"
    assert parse("qwen3", f"First\n{one}\n\n").content == "First"


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_marker_inside_an_argument(name: str) -> None:
    inner = 'x </tool_call> <tool_call> </think> [TOOL_CALLS] ``` <|tool_call_end|> \\ "q" </parameter> z'
    if name == "glm-4.5":
        inner += " </arg_value> y"
    calls: list[Call] = [("get_weather", {"city": inner})]
    assert parse(name, write_reply(name, "", "", calls)).calls == calls


def test_without_tools_markers_are_content() -> None:
    text = write_calls("qwen3", TWO)
    assert parse("qwen3", text, has_tools=False).content == text


def test_values_that_come_as_text_take_the_type_of_the_schema() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "$defs": {"mode": {"enum": ["fast", "slow"]}},
        "properties": {
            "text": {"type": "string"},
            "maybe": {"type": ["string", "null"]},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "mode": {"$ref": "#/$defs/mode"},
            "free": {},
        },
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    written = {"text": "5", "maybe": "null", "count": "7", "ratio": "2", "flag": "True", "mode": "fast", "free": "[1]"}
    expected = {"text": "5", "maybe": None, "count": 7, "ratio": 2, "flag": True, "mode": "fast", "free": [1]}
    for name in ("qwen3.5", "glm-4.5"):
        calls: list[Call] = [("f", dict(written))]
        assert parse(name, write_calls(name, calls), tools=tools).calls == [("f", expected)]
    for word in ("1e999", "NaN", "9" * 5000, "[" * 5000):
        written = {"ratio": word, "free": word}
        assert parse("qwen3.5", write_calls("qwen3.5", [("f", written)]), tools=tools).calls == [("f", written)]
    # What is not of the type stays text: whoever checks the arguments says so.
    assert parse("qwen3.5", write_calls("qwen3.5", [("f", {"count": "many"})]), tools=tools).calls == [
        ("f", {"count": "many"})
    ]


# ------------------------------------------------------------------------------------------ what is no call


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_unfinished_call_is_content(name: str) -> None:
    whole = write_calls(name, TWO[:1])
    cut_off = whole[: whole.index("days")]
    parsed = parse(name, cut_off)
    assert parsed.calls == []
    assert parsed.content == cut_off


@pytest.mark.parametrize("name", [n for n in WITH_TOOLS if n not in ("hermes", "qwen3", "qwen3-coder", "qwen3.5")])
def test_a_good_call_stands_when_the_next_is_unfinished(name: str) -> None:
    whole = write_calls(name, [TWO[1], TWO[0]])
    parsed = parse(name, whole[: whole.index("days")])
    assert parsed.calls == TWO[1:]
    assert "get_weather" in parsed.content


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "now", "arguments": {}',
        '{"name": "now", "arguments": []}',
        '{"name": "now", "arguments": {"a": 1}, "extra": 1}',
        '{"name": "now", "arguments": {"a": NaN}}',
        '{"name": "now", "arguments": {"a": 01}}',
        '{"name": "now", "arguments": {"a": 1,}}',
        '{"name": "now", "arguments": {"a": "line\nbreak"}}',
        '{"name": "now", "arguments": {}} {}',
        '{"name": "", "arguments": {}}',
        '{"name": "now", "name": "now"}',
        '{"name": 5}',
        "now()",
        "",
        '{"name": "now", "arguments": {"n": ' + "9" * 5000 + "}}",
        '{"name": "now", "arguments": {"n": ' + "[" * 300 + "]" * 300 + "}}",
    ],
)
def test_a_malformed_call_is_content_as_it_was_written(body: str) -> None:
    text = f"Look: <tool_call>{body}</tool_call> done"
    assert parse("hermes", text).content == text
    good = write_calls("hermes", TWO[1:])
    parsed = parse("hermes", text + good)
    assert (parsed.content, parsed.calls) == (text, TWO[1:])


def test_a_tag_in_passing_is_told_at_once() -> None:
    parser = ReplyParser(REPLY_FORMATS["hermes"], PLAIN, has_tools=True, prompt_text="")
    assert joined(parser.feed("The <tool_call> tag is")).content == "The <tool_call> tag is"


def test_a_call_is_handed_over_when_it_is_complete() -> None:
    parser = ReplyParser(REPLY_FORMATS["kimi-k2"], PLAIN, has_tools=True, prompt_text="")
    one, end, _ = write_calls("kimi-k2", TWO[1:]).partition("<|tool_call_end|>")
    assert parser.feed(one) == []
    kinds = [type(delta) for delta in parser.feed(end)]
    assert (kinds[0], kinds[-1]) == (ToolCallStart, ToolCallEnd)


def test_values_that_say_they_are_json_must_be() -> None:
    for value, is_call in (("1e2", True), (' {"a": [1]} ', True), ("NaN", False), ("{", False)):
        text = '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>argument key="a &amp; b" '
        text += f'type="number"<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        assert [list(call[1]) for call in parse("kimi-k3", text).calls] == ([["a & b"]] if is_call else [])
        assert parse("kimi-k3", text).content == ("" if is_call else text)


def test_an_answer_in_json_is_no_call_of_llama() -> None:
    text = '{"name": "Ada", "parameters": {}}'
    assert parse("llama3", text).content == text
    assert parse("llama3", '<|python_tag|>{"name": "now", "parameters": {}}').calls == [("now", {})]
    assert parse("llama3", '{"name": "now", "parameters": {}} is a call').calls == []


def test_harmony_messages_in_other_orders() -> None:
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    )
    parsed = parse("gpt-oss", text)
    assert (parsed.reasoning, parsed.calls) == ("One.\nTwo.", [("now", {})])
    final = parse("gpt-oss", "<|channel|>final<|message|>Done <|return|>")
    assert final.content == "Done "
    other = "<|channel|>commentary to=browser.search<|message|>{}"
    assert parse("gpt-oss", other + "<|call|>").content == other


def test_formats_of_plain_arguments_need_the_tools() -> None:
    for name in ("qwen3.5", "qwen3-coder", "glm-4.5"):
        with pytest.raises(RequestError, match="give the request's tools"):
            ReplyParser(REPLY_FORMATS[name], PLAIN, has_tools=True, prompt_text="")


# ------------------------------------------------------------------------------------------------------ ids


def test_ids_have_the_form_of_the_family() -> None:
    calls: list[Call] = [("now", {}), ("now", {})]
    assert parse("kimi-k2", write_calls("kimi-k2", calls, first_number=4)).ids == ["functions.now:4", "functions.now:5"]
    repeated = write_calls("kimi-k2", calls).replace("now:1", "now:0")
    assert parse("kimi-k2", repeated).ids == ["functions.now:0", "functions.now:1"]
    for name, form in (("hermes", "call_[0-9a-f]{24}"), ("mistral", "[0-9a-z]{9}")):
        ids = parse(name, write_reply(name, "", "", calls), prompt="a").ids
        assert all(re.fullmatch(form, item) for item in ids)
        assert ids == parse(name, write_reply(name, "", "", calls), prompt="a").ids
        assert not set(ids) & set(parse(name, write_reply(name, "", "", calls), prompt="b").ids)
    text = '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abcdefghi"}]'
    assert parse("mistral", text).ids == ["abcdefghi"]


def test_ids_can_be_given() -> None:
    ids = iter(["a", "b"])
    parser = ReplyParser(REPLY_FORMATS["hermes"], PLAIN, has_tools=True, prompt_text="", tools=[NOW], ids=ids)
    deltas = parser.feed(write_calls("hermes", TWO)) + parser.finish()
    assert [delta.id for delta in deltas if isinstance(delta, ToolCallStart)] == ["a", "b"]


# --------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("name", list(REPLY_FORMATS))
@QUICK
@given(data=st.data())
def test_the_split_does_not_matter(name: str, data: st.DataObject) -> None:
    """Good replies, cut off anywhere, with hard text around them: fed in any pieces they give the same."""
    hard = st.lists(st.sampled_from(HARD), max_size=6).map("".join)
    text = data.draw(hard)
    if name in WITH_TOOLS:
        reasoning = "thoughts" if name in WITH_REASONING and data.draw(st.booleans()) else ""
        text = data.draw(hard | st.just("")) + write_reply(name, reasoning, data.draw(hard), TWO) + text
        text = text[: data.draw(st.integers(len(text) // 2, len(text)))]
    prompt = data.draw(st.sampled_from(["", *(REPLY_FORMATS[name].reasoning or ())]))
    whole = parse(name, text, prompt=prompt)
    assert parse(name, cut(data, text), prompt=prompt) == whole


@pytest.mark.parametrize("name", [*WITH_TOOLS, "think"])
@QUICK
@given(parts=st.lists(st.sampled_from(HARD), max_size=14))
def test_nothing_is_lost(name: str, parts: list[str]) -> None:
    """Every character of a reply is in its deltas, but for spaces and the words of markers."""
    text = "".join(parts)
    parsed = parse(name, text)
    shown = parsed.reasoning + parsed.content
    if not parsed.calls:
        kept = "".join(shown.split())
        # What is missing must be markers of reasoning, channels or messages, in order.
        assert is_subsequence(kept, "".join(text.split()))
        if name in ("mistral", "llama3", "hermes"):
            assert shown == text


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(char in rest for char in part)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_long_reply_takes_time_in_proportion(name: str) -> None:
    """A character at a time, a long argument costs about as much per character as a short one."""

    def seconds(size: int) -> float:
        text = write_reply(name, "", "", [("get_weather", {"city": "x < y " * size})])
        start = time.process_time()
        parse(name, list(text))
        return time.process_time() - start

    seconds(100)
    assert seconds(8000) < 40 * max(seconds(1000), 0.01)
