"""What a server bears: full queues, big, slow and broken bodies, wrong keys, clients that leave, steps that break."""

from __future__ import annotations

import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from blockdraft.engine import Engine, Ticket, load
from blockdraft.engine.row import RunningRow
from blockdraft.errors import ConfigError
from blockdraft.serve import ServerSettings, create_app
from blockdraft.serve.answers import Answer
from blockdraft.serve.engine_loop import Job, Submission
from serve_kit import Running, chat_body, parse_events, running, text_body
from tiny_pair import TinyPair

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KEYS = ("first-long-key", "second-long-key")


@pytest.fixture(scope="module")
def engine(tiny_pair: TinyPair) -> Engine:
    return load(tiny_pair.draft, tiny_pair.target, max_rows=2)


@pytest.fixture
def slow_engine(engine: Engine) -> Iterator[Engine]:
    """The engine with steps that take at least 20 ms."""
    plain = engine.decide

    def decide(*arguments: Any) -> Any:
        time.sleep(0.02)
        return plain(*arguments)

    engine.decide = decide
    yield engine
    engine.decide = plain


def long_body(**fields: Any) -> dict[str, Any]:
    return text_body("the", max_tokens=200, ignore_eos=True, speculation={"enabled": False}, **fields)


def head_of(num_bytes: int) -> bytes:
    """A request's head, for clients that do what no library does."""
    lines = (f"POST {TEXT} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {num_bytes}")
    return "\r\n".join([*lines, "", ""]).encode()


# --------------------------------------------------------------------------------------------------------- the queue


def test_a_full_queue_is_said_at_once(slow_engine: Engine) -> None:
    with running(slow_engine, max_queue=1) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.post, TEXT, long_body()) for _ in range(3)]
        server.wait_until(lambda: server.service.loop.num_open == 3)
        started = time.monotonic()
        refused = server.post(TEXT, long_body())
        assert time.monotonic() - started < 2.0
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert [each.result().status_code for each in waiting] == [200, 200, 200]
        too_many = server.post(TEXT, long_body(n=4))
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "n")  # there is never room for 4
        assert server.post(TEXT, text_body()).status_code == 200


def test_the_engine_must_not_bound_the_queue_too(tiny_pair: TinyPair) -> None:
    engine = load(tiny_pair.draft, tiny_pair.target, max_waiting=3)
    with pytest.raises(ConfigError, match="max_queue"):
        create_app(engine, ServerSettings())


# ------------------------------------------------------------------------------------------------ clients that leave


def watch_steps(server: Running) -> list[str]:
    """What happens in the engine's thread, in order: "step", and "free" where a cancelled row is given back."""
    seen: list[str] = []
    step, cancel = server.engine.step, server.engine.cancel
    told = server.service.loop.cancel

    def counted_step() -> None:
        step()
        seen.append("step")

    def counted_cancel(ticket: Any) -> None:
        cancel(ticket)
        seen.append("free")

    def counted_told(jobs: Any) -> None:
        seen.append("told")
        told(jobs)

    server.engine.step, server.engine.cancel = counted_step, counted_cancel  # type: ignore[method-assign]
    server.service.loop.cancel = counted_told  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_step(slow_engine: Engine, is_streamed: bool) -> None:
    with running(slow_engine) as server:
        seen = watch_steps(server)
        body = json.dumps({**long_body(), "stream": is_streamed}).encode()
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
            client.sendall(head_of(len(body)) + body)
            server.wait_until(lambda: seen.count("step") >= 5)
        server.wait_until(lambda: "free" in seen)
        assert seen[seen.index("told") : seen.index("free")].count("step") <= 1
        server.wait_until(lambda: server.service.loop.num_open == 0)
        assert seen.count("step") < 150
        assert server.post(TEXT, text_body()).status_code == 200
        for name in ("step", "cancel"):
            delattr(server.engine, name)


def test_a_client_that_stops_reading_holds_nobody_up(engine: Engine) -> None:
    with running(engine, stall_timeout_s=0.3) as server:
        body = json.dumps({**long_body(n=8, logprobs=20), "stream": True}).encode()
        lazy = socket.socket()
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", httpx.URL(server.url).port))
        lazy.sendall(head_of(len(body)) + body)
        server.wait_until(lambda: server.service.loop.num_open > 0)
        assert server.post(TEXT, text_body()).status_code == 200
        server.wait_until(lambda: server.service.loop.num_open == 0, seconds=60)
        lazy.close()


def test_nothing_of_a_request_stays(engine: Engine) -> None:
    kinds = (Submission, Job, Ticket, RunningRow, Answer)

    def alive() -> Counter[str]:
        gc.collect()
        return Counter(type(item).__name__ for item in gc.get_objects() if type(item) in kinds)

    with running(engine) as server:
        server.post(TEXT, text_body())
        before = alive()
        for number in range(12):
            with server.http.stream("POST", TEXT, json={**text_body(n=2), "stream": True}) as response:
                if number % 3:
                    response.read()  # the others leave at once
            server.post(TEXT, text_body(stop=["e"]))
        server.wait_until(lambda: server.service.loop.num_open == 0)
        server.post(TEXT, text_body())
        assert alive() <= before + Counter(before.keys())  # at most what the last request still holds


# ------------------------------------------------------------------------------------------------------------- times


def test_a_request_that_takes_too_long_ends(slow_engine: Engine) -> None:
    with running(slow_engine, request_timeout_s=0.4) as server:
        whole = server.post(TEXT, long_body())
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "request_timeout")
        with server.http.stream("POST", TEXT, json={**long_body(), "stream": True}) as response:
            events = parse_events(response.iter_text())
        assert events[-1][0] == "error" and json.loads(events[-1][1])["error"]["code"] == "request_timeout"
        assert len(events) > 1
        server.wait_until(lambda: server.service.loop.num_open == 0)


def test_a_body_that_comes_too_slowly_is_not_waited_for(engine: Engine) -> None:
    with running(engine, body_timeout_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
            client.sendall(head_of(99) + b"{")
            client.settimeout(10)
            answer = client.recv(4096)
        assert answer.startswith(b"HTTP/1.1 408")


# ------------------------------------------------------------------------------------------------------------ bodies


def test_bodies_above_the_limit_are_refused_cleanly(engine: Engine) -> None:
    with running(engine, max_body_bytes=2000) as server:
        big = json.dumps(text_body("dog " * 100_000)).encode()
        told = server.post(TEXT, content=big, headers={"content-type": "application/json"})

        def pieces() -> Iterator[bytes]:
            for start in range(0, len(big), 16_384):
                yield big[start : start + 16_384]

        found = server.post(TEXT, content=pieces(), headers={"content-type": "application/json"})
        for response in (told, found):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert server.post(TEXT, text_body()).status_code == 200


# ------------------------------------------------------------------------------------------------------ who may ask


def test_keys(engine: Engine) -> None:
    with running(engine, api_keys=KEYS) as server:
        for key in KEYS:
            assert server.post(TEXT, text_body(), headers={"authorization": f"Bearer {key}"}).status_code == 200
        wrong = ["", "Bearer", "Bearer nope", f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}"]
        for header in wrong:
            response = server.post(TEXT, text_body(), headers={"authorization": header})
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key"), header
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", "/info", "/metrics", "/openapi.json"):
            assert server.http.get(path).status_code == 401, path
            assert server.http.get(path, headers={"authorization": f"Bearer {KEYS[1]}"}).status_code == 200, path
        for path in ("/health", "/ready", "/version"):
            assert server.http.get(path).status_code == 200, path
        assert KEYS[0] not in repr(server.service.settings)


def test_hosts(engine: Engine) -> None:
    with running(engine, allowed_hosts=("localhost", "127.0.0.1")) as server:
        assert server.http.get("/health").status_code == 200
        foreign = server.post(TEXT, text_body(), headers={"host": "evil.example:80"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (421, "wrong_host")


def test_other_origins_are_let_in_only_when_named(engine: Engine) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with running(engine) as server:
        assert "access-control-allow-origin" not in server.http.options(TEXT, headers=ask).headers
        answer = server.post(TEXT, text_body(), headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in answer.headers
    with running(engine, cors_origins=("https://a.example",), api_keys=KEYS) as server:
        preflight = server.http.options(TEXT, headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options(TEXT, headers={**ask, "origin": "https://b.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = server.post(TEXT, text_body(), headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


# ------------------------------------------------------------------------------------------------------------ faults


def fail_when(engine: Engine, is_due: Callable[[], bool]) -> Callable[[], None]:
    """Let the engine's decisions break where `is_due`; returns what mends it."""
    plain = engine.decide

    def decide(*arguments: Any) -> Any:
        if is_due():
            raise RuntimeError("a fault of the test")
        return plain(*arguments)

    engine.decide = decide

    def mend() -> None:
        engine.decide = plain

    return mend


def test_a_step_that_breaks_fails_its_requests_and_no_others(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    breaks = threading.Event()
    mend = fail_when(engine, breaks.is_set)
    try:
        with running(engine) as server:
            expected = server.complete()["choices"][0]["text"]
            breaks.set()
            whole = server.post(TEXT, text_body())
            assert (whole.status_code, whole.json()["error"]["code"]) == (500, "engine_failed")
            assert "fault of the test" not in whole.text
            with server.http.stream("POST", TEXT, json={**text_body(), "stream": True}) as response:
                events = parse_events(response.iter_text())
            assert [name for name, _ in events] == ["error"] or events[-1][0] == "error"
            assert server.http.get("/health").status_code == 200
            server.post(TEXT, text_body())
            assert server.http.get("/health").json()["error"]["code"] == "engine_failed"
            assert server.http.get("/ready").status_code == 503
            breaks.clear()
            server.service.loop._num_failed_steps = 0
            assert server.complete()["choices"][0]["text"] == expected
            assert server.http.get("/health").status_code == 200
            engine.check_integrity()
    finally:
        mend()
    assert "a fault of the test" in caplog.text


def test_a_request_that_breaks_ends_alone(engine: Engine) -> None:
    plain = engine.decide

    def decide(rows: Any, proposals: Any, logits: Any) -> Any:
        for row, logits_TV in zip(rows, logits, strict=True):
            if row.request.seed == 666 and row.num_emitted > 4:
                logits_TV.fill_(float("nan"))
        return plain(rows, proposals, logits)

    engine.decide = decide
    try:
        with running(engine) as server, ThreadPoolExecutor(2) as pool:
            expected = server.complete(max_tokens=40, ignore_eos=True)["choices"][0]["text"]
            bad = pool.submit(server.post, TEXT, long_body(seed=666))
            good = pool.submit(server.complete, max_tokens=40, ignore_eos=True)
            assert good.result()["choices"][0]["text"] == expected
            response = bad.result()
            assert (response.status_code, response.json()["error"]["code"]) == (500, "request_failed")
            assert "NaN" in response.json()["error"]["message"]
    finally:
        engine.decide = plain


def test_our_own_fault_is_an_error_object_without_details(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> Any:
        raise KeyError("a secret detail")

    with running(engine) as server:
        monkeypatch.setattr("blockdraft.serve.app.prepare_chat", broken)
        response = server.post(CHAT, chat_body())
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in response.text
        assert "a secret detail" in caplog.text


def test_draining_ends_what_does_not_end_in_time(slow_engine: Engine) -> None:
    import asyncio

    with running(slow_engine, drain_timeout_s=0.3) as server, ThreadPoolExecutor(1) as pool:

        def ask() -> list[tuple[str, str]]:
            with server.http.stream("POST", TEXT, json={**long_body(), "stream": True}) as response:
                return parse_events(response.iter_text())

        asked = pool.submit(ask)
        server.wait_until(lambda: server.service.loop.num_open == 1)
        time.sleep(0.1)
        draining = asyncio.run_coroutine_threadsafe(server.service.drain(), server.service.loop._asyncio)
        server.wait_until(lambda: server.service.phase == "draining")
        refused = server.post(TEXT, text_body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert server.http.get("/ready").status_code == 503 and server.http.get("/health").status_code == 200
        events = asked.result()
        assert events[-1][0] == "error" and json.loads(events[-1][1])["error"]["code"] == "server_stopping"
        draining.result(10)
