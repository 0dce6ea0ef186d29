"""A real server on a free loopback port, in a thread of the test's process, and small ways to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from blockdraft.engine import Engine
from blockdraft.serve import ServerSettings, create_app
from blockdraft.serve.process import bind
from blockdraft.serve.service import Service

MODEL = "tiny"


@dataclass
class Running:
    """A server that answers."""

    url: str
    service: Service
    engine: Engine
    http: httpx.Client

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return self.http.post(path, **options)

    def chat(self, text: str = "the quick brown fox", **fields: Any) -> dict[str, Any]:
        """The answer to one message, greedy unless asked otherwise."""
        response = self.post("/v1/chat/completions", chat_body(text, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any = "the lazy dog", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", text_body(prompt, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            events = parse_events(response.iter_text())
        assert events[-1] == ("message", "[DONE]")
        assert all(name == "message" for name, _ in events)
        return [json.loads(data) for _, data in events[:-1]]

    def wait_until(self, condition: Any, *, seconds: float = 20.0) -> None:
        """Until a condition holds; an AssertionError when it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come true in time"
            time.sleep(0.005)


def chat_body(text: str = "the quick brown fox", **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 12,
        **fields,
    }


def text_body(prompt: Any = "the lazy dog", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}


def parse_events(pieces: Iterator[str]) -> list[tuple[str, str]]:
    """(event, data) of a whole stream of server-sent events; anything else in it is an AssertionError."""
    text = "".join(pieces)
    assert text.endswith("\n\n"), text[-80:]
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name = "message"
        *heads, data = block.split("\n")
        for head in heads:
            assert head.startswith("event: "), block
            name = head.removeprefix("event: ")
        assert data.startswith("data: "), block
        events.append((name, data.removeprefix("data: ")))
    return events


@contextlib.contextmanager
def running(engine: Engine, *, headers: dict[str, str] | None = None, **settings: Any) -> Iterator[Running]:
    """Serve an engine until the end of the block."""
    made = ServerSettings(**{"model_name": MODEL, "has_access_log": False, **settings})
    app = create_app(engine, made)
    address = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{address.getsockname()[1]}"
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="on", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[address])), daemon=True)
    thread.start()
    with httpx.Client(base_url=url, timeout=60.0, headers=headers) as http:
        end = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.01)
        yield Running(url, app.state.service, engine, http)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive(), "the server did not end"
