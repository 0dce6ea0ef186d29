"""The API of the server over real HTTP, on a tiny random pair: answers, streams, numbers, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockdraft import SamplingParams
from blockdraft.engine import Request, load
from blockdraft.serve.asked import choice_seed
from serve_kit import MODEL, Running, chat_body, running, text_body
from tiny_pair import TinyPair

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair) -> Iterator[Running]:
    engine = load(tiny_pair.draft, tiny_pair.target, max_rows=8)
    with running(engine, max_prompts=4, max_n=4, max_tokens=200) as made:
        yield made


@pytest.fixture(scope="module")
def twin(tiny_pair: TinyPair) -> Any:
    """The same pair in this process: what the server must say."""
    return load(tiny_pair.draft, tiny_pair.target, max_rows=1)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(part["delta"].get("content", "") if "delta" in part else part["text"] for part in parts)


# ------------------------------------------------------------------------------------------------------- equal texts


@pytest.mark.parametrize("number", range(6))
def test_streamed_is_whole_is_in_process(server: Running, twin: Any, number: int) -> None:
    prompt = ["the quick", "a block of proposals", "日本語 🦊", "café naïve", "system user", "the"][number]
    fields = {"temperature": [0, 0.9][number % 2], "seed": 7 + number, "max_tokens": 20, "ignore_eos": True}
    whole = server.complete(prompt, **fields)
    chunks = server.stream(TEXT, text_body(prompt, **fields))
    ids = twin.tokenizer.encode(prompt, True)
    sampling = SamplingParams(temperature=fields["temperature"])
    [own] = twin.run(
        [Request(prompt_ids=ids, max_new_tokens=20, sampling=sampling, seed=7 + number, stop_ids=frozenset())]
    )
    assert whole["choices"][0]["text"] == joined(chunks) == own.text
    assert whole["usage"]["completion_tokens"] == len(own.token_ids) == 20
    assert whole["metrics"]["counters"]["num_steps"] == own.stats.num_steps


def test_requests_at_once_have_their_own_texts(server: Running) -> None:
    def ask(number: int) -> tuple[str, str]:
        fields = {"seed": number, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
        prompt = "the lazy dog " * (1 + number % 5)
        if number % 2:
            return "whole", server.complete(prompt, **fields)["choices"][0]["text"]
        return "streamed", joined(server.stream(TEXT, text_body(prompt, **fields)))

    alone = [ask(number)[1] for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = [text for _, text in pool.map(ask, range(16))]
    assert together == alone


def test_speculation_changes_nothing_but_the_steps(server: Running) -> None:
    answers = {
        key: server.complete("over the", max_tokens=40, ignore_eos=True, speculation=speculation)
        for key, speculation in {
            "default": None,
            "on": {"enabled": True},
            "off": {"enabled": False},
            "narrow": {"width": 2},
        }.items()
    }
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 1
    metrics = {key: answer["metrics"] for key, answer in answers.items()}
    assert metrics["off"]["speculative_decoding"] is None
    assert metrics["off"]["speculation"] == {
        "enabled": False,
        "width": None,
        "reason": "the request asked for plain decoding",
    }
    assert metrics["on"]["speculation"]["enabled"] is True
    assert metrics["narrow"]["speculative_decoding"]["num_spec_tokens"] == 1
    assert metrics["default"]["speculative_decoding"]["num_spec_tokens"] == 4


def test_choices_have_seeds_of_their_own(server: Running) -> None:
    fields = {"temperature": 1.2, "seed": 11, "max_tokens": 16, "ignore_eos": True}
    three = server.complete("the fox", n=3, **fields)["choices"]
    assert [choice["index"] for choice in three] == [0, 1, 2]
    assert len({choice["text"] for choice in three}) == 3
    alone = [
        server.complete("the fox", **{**fields, "seed": choice_seed(11, index)})["choices"][0]["text"]
        for index in range(3)
    ]
    assert [choice["text"] for choice in three] == alone
    chunks = server.stream(TEXT, text_body("the fox", n=3, **fields))
    assert [joined(chunks, index) for index in range(3)] == alone


def test_several_prompts_as_texts_and_as_ids(server: Running, twin: Any) -> None:
    prompts = ["the quick brown", "lazy"]
    ids = [twin.tokenizer.encode(prompt, True) for prompt in prompts]
    alone = [server.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    for given in (prompts, ids):
        both = server.complete(given)
        assert [choice["text"] for choice in both["choices"]] == alone
        assert both["usage"]["prompt_tokens"] == sum(map(len, ids))
        assert both["metrics"] is None
    assert server.complete(ids[0])["choices"][0]["text"] == alone[0]
    echoed = server.complete(prompts, echo=True)
    assert [choice["text"] for choice in echoed["choices"]] == [p + t for p, t in zip(prompts, alone, strict=True)]


def test_stop_strings_end_the_text_wherever_they_lie(server: Running) -> None:
    free = server.complete("a block of", max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    for start in range(0, len(free) - 3, 5):
        stop = free[start : start + 3]
        body = text_body("a block of", max_tokens=60, ignore_eos=True, stop=[stop, "never seen"])
        whole = server.post(TEXT, body).json()["choices"][0]
        assert whole["text"] == free[: free.index(stop)]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
        assert joined(server.stream(TEXT, body)) == whole["text"]


def test_stop_ids_and_least_lengths(server: Running) -> None:
    tokens = server.complete("the", max_tokens=12, ignore_eos=True, speculation={"tokens": True})["choices"][0][
        "tokens"
    ]
    third = tokens[2]["id"]
    cut = server.complete("the", stop_token_ids=[third], ignore_eos=True)["choices"][0]
    first = next(number for number, token in enumerate(tokens) if token["id"] == third)
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", third)
    late = server.complete("the", stop_token_ids=[third], ignore_eos=True, min_tokens=first + 2)
    assert late["usage"]["completion_tokens"] > first + 1


# ------------------------------------------------------------------------------------------------ tokens and numbers


def test_tokens_say_how_they_were_won(server: Running) -> None:
    body = chat_body(max_tokens=20, ignore_eos=True, speculation={"tokens": True}, logprobs=True, top_logprobs=2)
    chunks = server.stream(CHAT, body)
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("tokens", [])]
    assert len(streamed) == 20
    assert streamed[0]["kind"] == "first" and streamed[0]["step"] == 0 and streamed[0]["width"] is None
    assert [token["step"] for token in streamed] == sorted(token["step"] for token in streamed)
    assert all(2 <= token["width"] <= 5 or token["step"] == streamed[-1]["step"] for token in streamed[1:])
    assert "".join(token["text"] for token in streamed) == joined(chunks)
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert len({token["step"] for token in choice.get("tokens", [])}) <= 1
    last = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]][-1]
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    whole = server.post(CHAT, body).json()["choices"][0]
    assert whole["tokens"] == streamed
    entries = [e for c in chunks for x in c["choices"] if x["logprobs"] for e in x["logprobs"]["content"]]
    assert whole["logprobs"]["content"] == entries and len(entries) == 20
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    greedy = [entry["top_logprobs"][0]["token"] for entry in entries]
    assert greedy == [entry["token"] for entry in entries]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == joined(chunks)


def test_completions_logprobs_and_offsets(server: Running) -> None:
    choice = server.complete("the", logprobs=3, max_tokens=16, ignore_eos=True)["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {16}
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert all(offset <= len(choice["text"]) for offset in logprobs["text_offset"])
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def test_numbers_hold_together(server: Running) -> None:
    body = text_body(max_tokens=30, ignore_eos=True, return_meta_info=True, return_spec_tokens_details=True)
    answer = server.post(TEXT, body).json()
    spec, counters = answer["metrics"]["speculative_decoding"], answer["metrics"]["counters"]
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    weighted = sum(n * count for n, count in enumerate(spec["acceptance_histogram"]))
    assert weighted == spec["num_accepted_draft_tokens"] == counters["num_accepted_draft_tokens"]
    by_length = spec["acceptance_histogram_by_draft_length"]
    assert sum(map(sum, by_length.values())) == spec["num_spec_steps"]
    assert sum(int(n) * sum(counts) for n, counts in by_length.items()) == spec["num_draft_tokens"]
    info = answer["meta_info"]
    assert info["completion_tokens"] == answer["usage"]["completion_tokens"] == 30
    steps, accepted = info["spec_verify_ct"], info["spec_num_correct_drafts"]
    assert 0 <= 1 + steps + accepted - 30 <= 4
    assert info["spec_accept_length"] == pytest.approx(30 / steps)
    assert answer["sglext"]["spec_tokens_details"]["spec_verify_ct"] == steps
    timing = answer["metrics"]["timing"]
    assert timing["queue_s"] >= 0 and timing["prefill_s"] > 0 and timing["tokens_per_s"] > 0
    streamed = server.stream(TEXT, {**body, "stream_options": {"include_usage": True}})
    assert streamed[-1]["choices"] == [] and streamed[-1]["usage"] == answer["usage"]
    assert streamed[-1]["metrics"]["speculative_decoding"] == spec
    assert streamed[-1]["meta_info"]["spec_verify_ct"] == steps
    assert all(chunk["usage"] is None for chunk in streamed[:-1])


def test_prometheus_counts_what_answers_say(server: Running) -> None:
    def value(name: str) -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"blockdraft:{name}{{"))

    names = {
        "spec_decode_num_drafts_total": "num_spec_steps",
        "spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "spec_decode_num_accepted_tokens_total": "num_accepted_draft_tokens",
        "spec_decode_num_accepted_tokens_per_pos_total": "num_accepted_draft_tokens",
    }
    before = {name: value(name) for name in names}
    tokens = value("generation_tokens_total")
    spec = [server.complete(max_tokens=n)["metrics"]["speculative_decoding"] for n in (9, 17)]
    for name, key in names.items():
        assert value(name) - before[name] == sum(each[key] for each in spec)
    assert value("generation_tokens_total") - tokens == 26
    assert value("num_requests_running") == 0 and value("num_requests_waiting") == 0


def test_every_counter_is_documented(server: Running) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "server.md").read_text("utf-8")
    lines = server.http.get("/metrics").text.splitlines()
    names = {line.split()[2].removeprefix("blockdraft:") for line in lines if line.startswith("# TYPE blockdraft:")}
    assert len(names) > 20
    assert [name for name in sorted(names) if not name.endswith("_created") and name not in text] == []


# ------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("fields", "is_fine"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"choice": ["fox", "dog"]}}, lambda text: text in ("fox", "dog")),
        ({"guided_regex": "[a-c]{3,5}"}, lambda text: 3 <= len(text) <= 5 and set(text) <= set("abc")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "point",
                        "strict": True,
                        "schema": {
                            "type": "object",
                            "properties": {"x": {"enum": [1, 2]}, "y": {"type": "boolean"}},
                            "required": ["x", "y"],
                            "additionalProperties": False,
                        },
                    },
                }
            },
            lambda text: set(json.loads(text)) == {"x", "y"},
        ),
    ],
)
def test_answers_keep_their_form(server: Running, fields: dict[str, Any], is_fine: Any) -> None:
    # a random target would go on inside an object for ever: the end of one is made likely
    fields = {**fields, "max_tokens": 150, "temperature": 0.8, "seed": 3}
    on = server.chat(**fields, speculation={"enabled": True})
    if on["choices"][0]["finish_reason"] == "stop":
        assert is_fine(on["choices"][0]["message"]["content"])
    else:
        assert "json_object" in str(fields)
    assert joined(server.stream(CHAT, chat_body(**fields))) == on["choices"][0]["message"]["content"]


# ---------------------------------------------------------------------------------------------------------- refusals

ERRORS: list[tuple[str, dict[str, Any], int, str, str | None]] = [
    (CHAT, {}, 400, "missing_required_parameter", "model"),
    (CHAT, chat_body(model="other"), 404, "model_not_found", "model"),
    (CHAT, chat_body(max_token=3), 400, "unknown_parameter", "max_token"),
    (CHAT, chat_body(speculation={"with": 3}), 400, "unknown_parameter", "speculation.with"),
    (CHAT, chat_body(audio={"voice": "x"}), 400, "unsupported_parameter", "audio"),
    (CHAT, chat_body(metadata={"a": "b"}), 400, "unsupported_parameter", "metadata"),
    (CHAT, chat_body(store=True), 400, "unsupported_parameter", "store"),
    (CHAT, chat_body(service_tier="flex"), 400, "invalid_type", "service_tier"),
    (CHAT, chat_body(parallel_tool_calls=True), 400, "invalid_value", "parallel_tool_calls"),
    (CHAT, chat_body(temperature="hot"), 400, "invalid_type", "temperature"),
    (CHAT, chat_body(temperature=True), 400, "invalid_type", "temperature"),
    (CHAT, chat_body(max_tokens=1.5), 400, "invalid_type", "max_tokens"),
    (CHAT, chat_body(max_tokens=0), 400, "invalid_type", "max_tokens"),
    (CHAT, chat_body(n=5), 400, "invalid_value", "n"),
    (CHAT, chat_body(top_p=0), 400, "invalid_type", "top_p"),
    (CHAT, chat_body(top_logprobs=3), 400, "invalid_value", "top_logprobs"),
    (CHAT, chat_body(max_completion_tokens=5), 400, "invalid_value", "max_completion_tokens"),
    (CHAT, chat_body(max_tokens=250), 400, "invalid_value", "max_tokens"),
    (CHAT, chat_body("word " * 300), 400, "context_length_exceeded", "messages"),
    (CHAT, chat_body("dog " * 60, max_tokens=190), 400, "context_length_exceeded", "messages"),
    (CHAT, chat_body(messages=[]), 400, "invalid_type", "messages"),
    (CHAT, chat_body(messages=[{"role": "user"}]), 400, "missing_required_parameter", "messages[0].content"),
    (CHAT, chat_body(messages=[{"role": "boss", "content": "x"}]), 400, "invalid_type", "messages[0]"),
    (CHAT, chat_body(messages=[{"role": "user", "content": 5}]), 400, "invalid_type", "messages[0].content"),
    (
        CHAT,
        chat_body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "unsupported_parameter",
        "messages[0].content[0].type",
    ),
    (CHAT, chat_body(chat_template_kwargs={"messages": []}), 400, "invalid_value", "chat_template_kwargs"),
    (CHAT, chat_body(chat_template_kwargs={"thinking": True}), 400, "invalid_value", None),
    (CHAT, chat_body(stop=["a"] * 17), 400, "invalid_type", "stop"),
    (CHAT, chat_body(logit_bias={"x": 1}), 400, "invalid_type", "logit_bias.x"),
    (CHAT, chat_body(logit_bias={"99999": 1}), 400, "invalid_value", None),
    (CHAT, chat_body(speculation={"width": 9}), 400, "invalid_value", None),
    (CHAT, chat_body(speculation={"enabled": False, "width": 3}), 400, "invalid_value", None),
    (CHAT, chat_body(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    (CHAT, chat_body(guided_regex="("), 400, "invalid_value", "guided_regex"),
    (
        CHAT,
        chat_body(guided_regex="a", response_format={"type": "json_object"}),
        400,
        "invalid_value",
        "guided_regex",
    ),
    (TEXT, text_body(""), 400, "invalid_value", "prompt"),
    (TEXT, text_body([]), 400, "invalid_type", "prompt"),
    (TEXT, text_body(["a"] * 5), 400, "invalid_value", "prompt"),
    (TEXT, text_body([1, -1]), 400, "invalid_type", "prompt[1]"),
    (TEXT, text_body([10**6]), 400, "invalid_value", None),
    (TEXT, text_body(suffix="x"), 400, "unsupported_parameter", "suffix"),
    (TEXT, text_body(best_of=2), 400, "unsupported_parameter", "best_of"),
    (TEXT, text_body(echo=True, logprobs=1), 400, "unsupported_parameter", "echo"),
    (TEXT, text_body(prompt_logprobs=1), 400, "unsupported_parameter", "prompt_logprobs"),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), ERRORS, ids=[str(n) for n in range(len(ERRORS))])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_wrong_is_said(
    server: Running, path: str, body: dict[str, Any], status: int, code: str, param: str | None, is_streamed: bool
) -> None:
    if is_streamed:
        if "stream_options" in body:
            return
        body = {**body, "stream": True}
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert error["type"] == "invalid_request_error" and error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b'{"model":', "application/json", 400, "invalid_json"),
        (b"\xff\xfe", "application/json", 400, "invalid_json"),
        (b'{"model": NaN}', "application/json", 400, "invalid_json"),
        (b'{"model": "a", "model": "b"}', "application/json", 400, "invalid_json"),
        (b"[" * 200_000, "application/json", 400, "invalid_json"),
        (b"9" * 10_000, "application/json", 400, "invalid_json"),
        (b'"text"', "application/json", 400, "invalid_type"),
        (b'{"\\ud800": 1}', "application/json", 400, "invalid_json"),
        (b'{"model": "\\uD800x"}', "application/json", 400, "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "application/json", 400, "invalid_json"),
        (b'{"model": "\\ud83d\\ude00"}', "application/json", 400, "missing_required_parameter"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
    ],
)
def test_bodies_that_are_no_json_object(server: Running, content: bytes, kind: str, status: int, code: str) -> None:
    response = server.post(CHAT, content=content, headers={"content-type": kind})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text


def test_null_is_not_given(server: Running) -> None:
    nulls = dict.fromkeys(("stop", "seed", "tools", "metadata", "user", "logit_bias", "response_format", "n"))
    assert server.chat(**nulls)["choices"][0] == server.chat()["choices"][0]


def test_routes_that_are_not_there(server: Running) -> None:
    assert server.http.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = server.http.put("/v1/models")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "GET"


def test_the_server_says_what_it_is(server: Running) -> None:
    get = server.http.get
    assert get("/health").json() == {"status": "ok"} and get("/ready").json() == {"status": "ready"}
    [card] = get("/v1/models").json()["data"]
    assert card["id"] == MODEL and get(f"/v1/models/{MODEL}").json() == card
    assert get("/v1/models/other").status_code == 404
    info = get("/info").json()
    assert info["max_width"] == 5 and info["max_length"] == 256 and info["reply_format"] == "plain"
    assert info["grammar"] is True and info["limits"]["max_n"] == 4
    assert get("/version").json()["version"]


def test_content_parts_and_developers(server: Running) -> None:
    plain = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "the fox"}]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}]},
        {"role": "user", "content": [{"type": "text", "text": "the fox"}]},
    ]
    texts = [server.chat(messages=messages)["choices"][0]["message"]["content"] for messages in (plain, parts)]
    assert texts[0] == texts[1]
