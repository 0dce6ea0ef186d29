"""Which format a target uses, and chats with tools as prompts, on small templates that stand for the families' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.engine import Request
from blockdraft.errors import RequestError
from blockdraft.text import StopScanner, StreamDecoder, Tokenizer
from blockdraft.text.messages import check_chat_messages
from blockdraft.text.sections import REPLY_FORMATS, chat_prompt, find_reply_format, render_tools, reply_format
from sections_kit import TOOLS, WEATHER, byte_tokenizer, parse

DOCS = Path(__file__).resolve().parents[1] / "docs" / "replies.md"

# A conversation as a template of each family writes it, cut down to what a call and its result need.
HEAD = "{%- if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>"
TAIL = (
    "{{ m.content if m.content is not none else '' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
JSON_TAG = '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
FUNCTION_TAG = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "think": "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>') | last }}{% endfor %}",
    "hermes": HEAD + EACH + JSON_TAG + TAIL,
    "qwen3": HEAD + THINK + EACH + JSON_TAG + TAIL,
    "qwen3-coder": HEAD + EACH + FUNCTION_TAG + TAIL,
    "qwen3.5": HEAD + THINK + EACH + FUNCTION_TAG + TAIL,
    "kimi-k2": HEAD
    + "{% if m.tool_calls %}<|tool_calls_section_begin|>"
    + EACH
    + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    + "<|tool_calls_section_end|>{% endif %}"
    + TAIL,
    "kimi-k3": HEAD
    + "{% if m.tool_calls %}<|open|>tools<|sep|>"
    + EACH
    + '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>{% for k, v in f.arguments | items %}'
    + '<|open|>argument key="{{ k }}" type="{{ "string" if v is string else "number" }}"<|sep|>{{ v }}'
    + "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}<|close|>tools<|sep|>{% endif %}"
    + TAIL,
    "glm-4.5": HEAD
    + EACH
    + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    + "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    + TAIL,
    "llama3": HEAD
    + EACH
    + '<|start_header_id|>{{ "ipython" }}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}'
    + TAIL,
    "mistral": HEAD
    + "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    + '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{% endif %}'
    + TAIL,
    "mistral-args": HEAD + EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}" + TAIL,
    "deepseek-v3": HEAD
    + "{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    + EACH
    + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments + '' }}\n```<｜tool▁call▁end｜>"
    + "{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    + TAIL,
    "deepseek-v3.1": HEAD
    + "{% if m.content is none %}<｜tool▁calls▁begin｜>"
    + EACH
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments + '' }}<｜tool▁call▁end｜>{% endfor %}"
    + "<｜tool▁calls▁end｜>{% endif %}"
    + TAIL,
    "deepseek-v3.2": HEAD + "{% if m.tool_calls %}<｜DSML｜function_calls>{% endif %}" + TAIL,
    "deepseek-v4": HEAD + "{% if m.tool_calls %}<｜DSML｜tool_calls>{% endif %}" + TAIL,
    "gpt-oss": HEAD
    + "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    + EACH
    + "<|channel|>commentary to=functions.{{ f.name }} json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}"
    + TAIL,
}
CALL = {
    "id": "functions.get_weather:0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Köln", "days": 3}'},
}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "rain"},
]


# -------------------------------------------------------------------------------------------- which format


@pytest.mark.parametrize("name", list(REPLY_FORMATS))
def test_a_template_shows_its_format(name: str) -> None:
    assert find_reply_format(byte_tokenizer(template=TEMPLATES[name])).name == name


def test_special_tokens_decide_where_there_is_no_template() -> None:
    assert find_reply_format(byte_tokenizer(special=["<|open|>", "<|close|>", "<|sep|>"])).name == "kimi-k3"
    assert find_reply_format(byte_tokenizer(special=["[TOOL_CALLS]", "<eos>"])).name == "plain"
    with pytest.raises(RequestError, match=r"several reply formats, deepseek-v3\.2, deepseek-v4: .*--reply-format"):
        find_reply_format(byte_tokenizer(special=["｜DSML｜"]))


def test_nothing_is_guessed() -> None:
    both = byte_tokenizer(template=TEMPLATES["qwen3"] + TEMPLATES["kimi-k2"])
    with pytest.raises(RequestError, match="fits several reply formats, qwen3, kimi-k2"):
        find_reply_format(both)
    for unknown in ("{{ tools }}<toolcall>", "{{ '<seed:think>' }}", HEAD + "<tool_calls>[]</tool_calls>" + TAIL):
        with pytest.raises(RequestError, match=r"fits no known reply format: .*--reply-format.*hermes"):
            find_reply_format(byte_tokenizer(template=unknown))
    assert reply_format("hermes") is REPLY_FORMATS["hermes"]
    with pytest.raises(RequestError, match="'qwen' given, allowed are plain"):
        reply_format("qwen")


def test_the_docs_show_the_table() -> None:
    rows = [line for line in DOCS.read_text("utf-8").splitlines() if line.startswith("| `")]
    assert rows == [table_row(name) for name in REPLY_FORMATS]


def table_row(name: str) -> str:
    item = REPLY_FORMATS[name]
    tools = {"json_reply": "the reply is JSON", "xtml": "`<|open|>tools<|sep|>`", "harmony": "`to=functions.name`"}
    opening = f"`{item.reasoning[0]}`" if item.reasoning else "–"
    calls = "–" if not item.has_tools else tools.get(item.syntax, f"`{item.call_start}`")
    return f"| `{name}` | {item.families} | {escaped(opening)} | {escaped(calls)} |"


def escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


# ---------------------------------------------------------------------------------------- chats as prompts


@pytest.mark.parametrize("name", [n for n, item in REPLY_FORMATS.items() if item.has_tools and item.syntax != "dsml"])
def test_earlier_calls_go_through_the_template_and_are_what_the_parser_reads(name: str) -> None:
    """Arguments are an object or text as the template wants them: either way the call comes out as it was."""
    tokenizer = byte_tokenizer(template=TEMPLATES[name])
    as_object = {**CALL, "function": {**CALL["function"], "arguments": json.loads(CALL["function"]["arguments"])}}
    for call in (CALL, as_object):
        chat = [CHAT[0], {**CHAT[1], "tool_calls": [call]}, CHAT[2]]
        prompt = chat_prompt(tokenizer, REPLY_FORMATS[name], chat, TOOLS)
        assert prompt.text == tokenizer.decode(prompt.ids)
        assert prompt.text.startswith("[[{") and "rain" in prompt.text
        _, _, written = prompt.text.partition("<assistant>")
        written = written.partition("<tool>")[0].removeprefix("<|start_header_id|>ipython")
        assert parse(name, written).calls == [("get_weather", {"city": "Köln", "days": 3})]


def test_tools_are_given_with_what_templates_take_for_granted() -> None:
    template = "{% for t in tools %}{{ t.type }} {{ t.function.description + '' }}{{ t.function.parameters.type }};"
    tokenizer = byte_tokenizer(template=template + "{% endfor %}{# <tool_call> #}")
    prompt = chat_prompt(tokenizer, REPLY_FORMATS["hermes"], CHAT[:1], [WEATHER, {"function": {"name": "now"}}])
    assert prompt.text == "function Weather of a cityobject;function object;"


def test_reasoning_goes_in_under_the_template_s_own_name() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "a", "reasoning_content": "HM"}, CHAT[0]]
    for name in ("qwen3", "gpt-oss"):
        assert "HM" in chat_prompt(byte_tokenizer(template=TEMPLATES[name]), REPLY_FORMATS[name], chat).text
    with pytest.raises(RequestError, match=r"replies \('hermes'\) have no reasoning"):
        chat_prompt(byte_tokenizer(template=TEMPLATES["hermes"]), REPLY_FORMATS["hermes"], chat)


def test_a_template_without_tools() -> None:
    tokenizer = byte_tokenizer(template=TEMPLATES["plain"])
    with pytest.raises(RequestError, match=r"\('plain'\) have no tool calls: .*--reply-format hermes"):
        chat_prompt(tokenizer, REPLY_FORMATS["plain"], CHAT[:1], TOOLS)
    with pytest.raises(RequestError, match=r"chat template has no tools: .*--reply-format hermes"):
        chat_prompt(tokenizer, REPLY_FORMATS["qwen3"], CHAT[:1], TOOLS)
    with pytest.raises(RequestError, match="chat template has no tool calls"):
        chat_prompt(tokenizer, REPLY_FORMATS["qwen3"], CHAT)
    text = chat_prompt(tokenizer, REPLY_FORMATS["hermes"], CHAT, TOOLS).text
    assert json.dumps(WEATHER) in text
    assert "<user><tool_response>\nrain\n</tool_response>" in text
    _, _, written = text.partition("<assistant>")
    assert parse("hermes", written.partition("<user>")[0]).calls == [("get_weather", {"city": "Köln", "days": 3})]


def test_tools_join_the_system_message_and_results_join_one_message() -> None:
    calls = [CALL, {**CALL, "id": "b"}]
    chat = [
        {"role": "system", "content": "Be brief."},
        CHAT[0],
        {"role": "assistant", "content": "Wait.", "tool_calls": calls},
        CHAT[2],
        {**CHAT[2], "tool_call_id": "b", "content": "sun"},
    ]
    made = render_tools(check_chat_messages(chat), TOOLS)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\nYou can call tools.")
    assert made[2]["content"].startswith("Wait.\n<tool_call>")
    assert made[3]["content"].count("<tool_response>") == 2
    assert [message["role"] for message in render_tools(check_chat_messages(CHAT[:1]), TOOLS)] == ["system", "user"]


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (2, {"tool_call_id": "x"}, "messages[2]: tool_call_id 'x' is the id of no call"),
        (2, {"content": None}, "messages[2]: content must be text, not NoneType"),
        (2, {"extra": 1}, "messages[2]: unknown key 'extra'"),
        (1, {"tool_calls": []}, "messages[1]: tool_calls must be a list of at least one call"),
        (1, {"tool_calls": ["x"]}, "messages[1].tool_calls[0] must be an object"),
        (1, {"tool_calls": [CALL, CALL]}, "messages[1].tool_calls[1]: id and name must not be empty, and an id is"),
        (1, {"tool_calls": [{**CALL, "type": "custom"}]}, "type 'custom' given, allowed is function"),
        (1, {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}, "arguments is not valid JSON"),
        (1, {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}, "must be a JSON object"),
        (1, {"reasoning_content": 5}, "messages[1]: reasoning_content must be text, not int"),
        (0, {"role": "robot"}, "messages[0]: role 'robot' given"),
        (0, {"content": "\ud800"}, "messages[0]: content has half of a surrogate pair"),
    ],
)
def test_bad_messages_are_named(at: int, change: dict[str, Any], message: str) -> None:
    chat = [{**item, **change} if index == at else item for index, item in enumerate(CHAT)]
    with pytest.raises(RequestError) as raised:
        check_chat_messages(chat)
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------- special tokens


def test_visible_special_tokens_are_written_out_and_others_are_not() -> None:
    tokenizer = byte_tokenizer(special=["[TOOL_CALLS]", "<eos>"])
    ids = [256, *tokenizer.encode("né", False), 257, 256]
    decoder = StreamDecoder(tokenizer, visible_special_tokens=("[TOOL_CALLS]", "[ARGS]"))
    assert "".join(decoder.feed([token_id]) for token_id in ids) + decoder.flush() == "[TOOL_CALLS]né[TOOL_CALLS]"
    assert StreamDecoder(tokenizer).feed(ids) == "né"
    scan = StopScanner(tokenizer, ["né["], visible_special_tokens=("[TOOL_CALLS]",)).feed(ids)
    assert (scan.text, scan.stop) == ("[TOOL_CALLS]", "né[")


def test_a_tokenizer_in_python_shows_them_too() -> None:
    class Python:
        all_special_tokens = ("<|open|>", "<|end|>")
        all_special_ids = (256, 257)

        def decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
            texts = dict(zip(self.all_special_ids, self.all_special_tokens, strict=True))
            kept = [i for i in ids if i < 256 or not skip_special_tokens]
            return b"".join(texts[i].encode() if i > 255 else bytes([i]) for i in kept).decode("utf-8", "replace")

    decoder = StreamDecoder(Tokenizer(backend=None, auto=Python()), visible_special_tokens=("<|open|>",))
    pieces = [decoder.feed([token_id]) for token_id in (256, *"é".encode(), 257, 65)]
    assert "".join(pieces) + decoder.flush() == "<|open|>éA"


def test_a_request_names_them_as_texts() -> None:
    assert Request(prompt_ids=[1], max_new_tokens=1, visible_special_tokens=("<a>",)).visible_special_tokens == ("<a>",)
    with pytest.raises(RequestError, match="give a tuple of the tokens' texts"):
        Request(prompt_ids=[1], max_new_tokens=1, visible_special_tokens=["<a>"])  # type: ignore[arg-type]
