"""Real clients on the built-in pair: openai's, LangChain's and curl; and HTTP changes no token of the engine's."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from blockdraft import SamplingParams
from blockdraft.engine import Engine, Request, load
from serve_kit import MODEL, Running, running

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 7 times 8?",
    "Say good morning in Spanish.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "Who wrote Hamlet?",
    "List two prime numbers.",
    "What do cows eat?",
    "Translate 'cat' into French.",
    "What is water made of?",
]
NEW_TOKENS = 10


def settings_of(number: int) -> dict[str, Any]:
    """Greedy and sampled in turn, each sampled one with a seed of its own."""
    return {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 100 + number}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(dtype="bfloat16", max_rows=16)


@pytest.fixture(scope="module")
def in_process(engine: Engine) -> list[str]:
    """What the engine says to each question, one after another, before any server has it."""
    assert engine.tokenizer is not None
    texts = []
    for number, question in enumerate(QUESTIONS):
        given = settings_of(number)
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": question}])
        sampling = SamplingParams(temperature=given["temperature"], top_p=given.get("top_p", 1.0))
        request = Request(prompt_ids=ids, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=given.get("seed"))
        [completion] = engine.run([request])
        texts.append(str(completion.text))
    return texts


@pytest.fixture(scope="module")
def server(engine: Engine, in_process: list[str]) -> Iterator[Running]:
    with running(engine, reply_format="hermes", api_keys=("a-key-of-tests",), has_page=False) as made:
        made.http.headers["authorization"] = "Bearer a-key-of-tests"
        yield made


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key-of-tests", max_retries=0, timeout=120) as made:
        yield made


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# -------------------------------------------------------------------------------------------------------- the same text


def test_http_streamed_or_not_says_what_the_engine_says(server: Running, in_process: list[str]) -> None:
    def body(number: int, **more: Any) -> dict[str, Any]:
        return {
            "model": MODEL,
            "messages": user(QUESTIONS[number]),
            "max_tokens": NEW_TOKENS,
            **settings_of(number),
            **more,
        }

    def whole(number: int) -> str:
        answer = server.post("/v1/chat/completions", body(number)).json()
        return answer["choices"][0]["message"]["content"]

    def streamed(number: int) -> str:
        chunks = server.stream("/v1/chat/completions", body(number))
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    assert [whole(number) for number in range(12)] == in_process
    assert [streamed(number) for number in range(12)] == in_process


# --------------------------------------------------------------------------------------------------------------- openai


def test_openai_chat_and_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user("What is the capital of France?"), temperature=0, max_tokens=8, seed=1
    )
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == [MODEL]
    text = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in text.choices[0].text


def test_openai_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user("Name three colours."),
        temperature=0,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"tokens": True}},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens <= 16
    tokens = [
        token for chunk in chunks for choice in chunk.choices for token in (choice.model_extra or {}).get("tokens", [])
    ]
    assert len(tokens) == chunks[-1].usage.completion_tokens
    assert {token["kind"] for token in tokens} <= {"first", "accepted", "bonus"}


def test_openai_logprobs_and_three_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=user("Name a fruit."),
        temperature=1.0,
        seed=5,
        n=3,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)


class Colour(BaseModel):
    name: str
    is_warm: bool


def test_openai_parses_a_schema(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=user("Describe the colour red as JSON."),
            response_format=Colour,
            temperature=temperature,
            seed=2,
            max_tokens=120,
            stop=["\n\n\n\n"],
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(answer.choices[0].message.parsed, Colour)
    assert isinstance(answer.choices[0].message.parsed, Colour)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def test_openai_tools(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": user("What is the weather in Paris?"),
        "tools": [WEATHER],
        "temperature": 0,
        "max_tokens": 80,
    }
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(**fields, tool_choice=named).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls
    [call] = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and arguments["city"] in ("Paris", "Rome")
    name, pieces = "", ""
    for chunk in client.chat.completions.create(**fields, tool_choice=named, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name += part.function.name or "" if part.function else ""
            pieces += part.function.arguments or "" if part.function else ""
    assert (name, json.loads(pieces)) == ("get_weather", arguments)
    history = [
        *fields["messages"],
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "18 C, sunny"},
    ]
    answer = client.chat.completions.create(**{**fields, "messages": history}, tool_choice="none")
    assert answer.choices[0].message.content


def test_openai_stop_strings_at_any_place_of_a_block(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": user("Count from one to ten in words."),
        "temperature": 0,
        "max_tokens": 16,
    }
    free = client.chat.completions.create(**fields).choices[0].message.content or ""
    for start in range(2, len(free) - 4, 13):
        stop = free[start : start + 4]
        cut = client.chat.completions.create(**fields, stop=[stop]).choices[0]
        assert cut.message.content == free[: free.index(stop)]
        assert cut.finish_reason == "stop"


def test_characters_that_span_tokens_arrive_whole(client: openai.OpenAI) -> None:
    text = "日本 🦊 é"
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": user("Repeat."),
        "max_tokens": 80,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert client.chat.completions.create(**fields).choices[0].message.content == text


def test_openai_hears_what_is_wrong(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.chat.completions.create(model="gpt-x", messages=user("x"))
    with pytest.raises(openai.BadRequestError, match="unknown field") as caught:
        client.chat.completions.create(model=MODEL, messages=user("x"), extra_body={"max_token": 3})
    assert caught.value.code == "unknown_parameter" and caught.value.param == "max_token"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=user("word " * 9000), stream=True)
    assert caught.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


# ------------------------------------------------------------------------------------------------------ curl, LangChain


def test_curl(server: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = {"model": MODEL, "messages": user("Say hello."), "max_tokens": 8, "temperature": 0, "stream": True}
    words = [curl, "-sSN", f"{server.url}/v1/chat/completions", "-H", "content-type: application/json"]
    words += ["-H", "authorization: Bearer a-key-of-tests", "--data-binary", json.dumps(body)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    first = json.loads(lines[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk" and first["choices"][0]["delta"]["role"] == "assistant"


def test_langchain(server: Running) -> None:
    from langchain_openai import ChatOpenAI

    fields: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "a-key-of-tests", "max_retries": 0}
    model = ChatOpenAI(model=MODEL, temperature=0, max_tokens=100, **fields)
    short = ChatOpenAI(model=MODEL, temperature=0, max_tokens=10, **fields)
    answer = short.invoke("What is the capital of France?")
    assert answer.content and answer.usage_metadata is not None
    pieces = list(short.stream("What is the capital of France?"))
    assert "".join(str(piece.content) for piece in pieces) == answer.content
    made = model.with_structured_output(Colour, method="json_schema").invoke("Describe the colour red as JSON.")
    assert isinstance(made, Colour)
    called = model.bind_tools([WEATHER], tool_choice="get_weather").invoke("What is the weather in Rome?")
    assert called.tool_calls[0]["name"] == "get_weather"
    assert called.tool_calls[0]["args"]["city"] in ("Paris", "Rome")
