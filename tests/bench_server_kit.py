"""Recorded answers of each engine in its documented format, and a real HTTP server that plays them.

Every recording is of one and the same request: STEPS. So whatever is read from them must be the same record.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from blockdraft.serve.process import bind

STEPS = [(7, 5), (7, 7), (7, 2), (7, 3)]  # proposals and accepted ones of every step
S, P, A = len(STEPS), sum(p for p, _ in STEPS), sum(a for _, a in STEPS)
C = 1 + S + A
WORD = "zebra "  # what the answer is made of; must not get into `raw`
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1787366173, "model": "m"}
USAGE = {"prompt_tokens": 20, "completion_tokens": C, "total_tokens": 20 + C}


def _deltas(**of_choice: Any) -> list[dict[str, Any]]:
    """Chunks with the role, one for the prefill's token and one for every step, and the finish reason."""

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
        return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}

    texts = [chunk({"content": WORD * n}) for n in (1, *(a + 1 for _, a in STEPS))]
    return [chunk({"role": "assistant", "content": ""}), *texts, chunk({}, "stop", **of_choice)]


def _histogram(size: int = 8) -> list[int]:
    return [sum(a == i for _, a in STEPS) for i in range(size)]


def _last(**numbers: Any) -> dict[str, Any]:
    return {**HEAD, "choices": [], "usage": dict(USAGE), **numbers}


VLLM_SPEC = {
    "mean_acceptance_length": 1 + A / S,
    "draft_acceptance_rate": A / P,
    "acceptance_histogram": _histogram(),
    "acceptance_histogram_by_draft_length": {"7": _histogram()},
    "num_spec_steps": S,
    "num_accepted_draft_tokens": A,
    "num_draft_tokens": P,
    "num_spec_tokens": 7,
}
SGLANG_SPEC = {
    "spec_accept_rate": A / P,
    "spec_accept_length": C / S,  # the prefill's token is in it
    "spec_correct_drafts_histogram": _histogram(),
    "spec_num_correct_drafts": A,
    "spec_num_proposed_drafts": P,
    "spec_verify_ct": S,
}
SGLANG_OLD = {
    "id": "x",
    "finish_reason": {"type": "stop", "matched": WORD},
    "output_ids": [1, 2],
    "spec_verify_ct": S,
    "spec_accepted_drafts": A,
    "spec_proposed_drafts": P,
    "spec_accept_histogram": _histogram(),
}
TOKENSPEED_META = {"id": "x", "completion_tokens": C, "spec_verify_ct": S, "accept_draft_tokens": (C - 1) / S}
LLAMA_TIMINGS = {
    "cache_n": 0,
    "prompt_n": 20,
    "prompt_ms": 12.5,
    "prompt_per_token_ms": 0.625,
    "prompt_per_second": 1600.0,
    "predicted_n": C,
    "predicted_ms": 220.0,
    "predicted_per_token_ms": 10.0,
    "predicted_per_second": 100.0,
    "draft_n": P,
    "draft_n_accepted": A,
}
TRTLLM_PERF = {
    "timing_metrics": {"arrival_time": 1.0, "first_token_time": 1.1, "last_token_time": 1.4},
    "speculative_decoding": {"acceptance_rate": A / P, "total_accepted_draft_tokens": A, "total_draft_tokens": P},
}
RECORDINGS: dict[str, list[dict[str, Any]]] = {
    "vllm": [*_deltas(), _last(metrics={"speculative_decoding": VLLM_SPEC})],
    "vllm detailed": [
        *_deltas(),
        _last(
            metrics={
                "speculative_decoding": VLLM_SPEC
                | {"per_step_accepted": [a for _, a in STEPS], "per_step_drafted": [p for p, _ in STEPS]}
            }
        ),
    ],
    "vllm silent": [*_deltas(), _last(metrics=None)],
    "sglang": [*_deltas(matched_stop=2), _last(sglext={"spec_tokens_details": SGLANG_SPEC})],
    "sglang old": [*_deltas(meta_info=SGLANG_OLD), _last()],
    "tokenspeed": [*_deltas(meta_info=TOKENSPEED_META), _last()],
    "tokenspeed silent": [*_deltas(), _last()],
    "llama_cpp": [*_deltas(), _last(timings=LLAMA_TIMINGS)],
    "mistral_rs": [*_deltas(), _last()],
    "tensorrt_llm": [
        *_deltas(avg_decoded_tokens_per_iter=(C - 1) / S, request_perf_metrics=TRTLLM_PERF),
        _last(),
    ],
}
OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tokenspeed": "tokenspeed",
    "llama_cpp": "llamacpp",
    "mistral_rs": "local",
    "tensorrt_llm": "tensorrt_llm",
}
INFO: dict[str, dict[str, Any]] = {
    "vllm": {"/version": {"version": "0.29.0"}},
    "sglang": {"/server_info": {"version": "0.5.21", "speculative_num_draft_tokens": 8}},
    "tokenspeed": {"/server_info": {"version": "0.3", "speculative_num_draft_tokens": 8}},
    "llama_cpp": {"/props": {"build_info": "b9000-abc", "chat_template": "{{ x }}", "speculative": "none"}},
    "mistral_rs": {},
    "tensorrt_llm": {"/version": {"version": "1.3.0"}},
}


def _metrics_of(engine: str, count: int) -> str | None:
    """The /metrics page after `count` of these requests; what the server did before is not nothing."""
    done, spec = 5 + count, 3 + count
    at_least = [sum(a > i for _, a in STEPS) for i in range(7)]
    if engine == "vllm":
        label = '{engine="0",model_name="m"}'
        position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        positions = [
            f'{position}{{engine="0",model_name="m",position="{i}"}} {spec * n}.0' for i, n in enumerate(at_least)
        ]
        return "\n".join(
            [
                "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
                "# TYPE vllm:spec_decode_num_drafts_total counter",
                f"vllm:spec_decode_num_drafts_total{label} {spec * S}.0",
                f"vllm:spec_decode_num_drafts_created{label} 1.756e+09",
                f"vllm:spec_decode_num_draft_tokens_total{label} {spec * P}.0",
                f"vllm:spec_decode_num_accepted_tokens_total{label} {spec * A}.0",
                *positions,
                f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {done}.0',
                'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0',
                f"vllm:generation_tokens_total{label} {done * C}.0",
            ]
        )
    if engine == "tokenspeed":  # draft tokens are rows of the block
        names = {"num_drafts": S, "num_draft_tokens": P + S, "num_accepted_tokens": A}
        return "\n".join(f'tokenspeed:spec_decode_{name}_total{{model="m"}} {spec * n}' for name, n in names.items())
    if engine == "llama_cpp":
        names = {
            "spec_decode_num_drafts_total": spec * S,
            "spec_decode_num_draft_tokens_total": spec * P,
            "spec_decode_num_accepted_tokens_total": spec * A,
            "tokens_predicted_total": done * C,
        }
        return "\n".join(f"llamacpp:{name} {n}" for name, n in names.items())
    if engine == "mistral_rs":
        per_position = [
            f'mistralrs_speculative_draft_tokens_accepted_per_pos_total{{position="{i}"}} {spec * n}'
            for i, n in enumerate(at_least)
        ]
        names = {"drafts": S, "draft_tokens_proposed": P, "draft_tokens_accepted": A}
        return "\n".join([f"mistralrs_speculative_{name}_total {spec * n}" for name, n in names.items()] + per_position)
    return None


@dataclass
class Scripted:
    """An engine that gives one recorded answer to everything. `broken`: by the text of a message, what goes wrong."""

    recording: str
    broken: dict[str, str] = field(default_factory=dict)
    has_metrics: bool = True
    others_per_request: int = 0
    count: int = 0
    """Requests answered, others' included."""
    die_at: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    stop: Any = None

    @property
    def engine(self) -> str:
        return self.recording.split()[0]

    def app(self) -> Starlette:
        async def models(request: Request) -> Response:
            return JSONResponse({"object": "list", "data": [{"id": "m", "owned_by": OWNERS[self.engine]}]})

        async def page(request: Request) -> Response:
            return JSONResponse(INFO[self.engine][request.url.path])

        async def metrics(request: Request) -> Response:
            text = _metrics_of(self.engine, self.count) if self.has_metrics else None
            return Response(status_code=404) if text is None else PlainTextResponse(text)

        async def answer(request: Request) -> Response:
            return self._answer(await request.json())

        return Starlette(
            routes=[
                Route("/v1/models", models),
                Route("/metrics", metrics),
                Route("/v1/chat/completions", answer, methods=["POST"]),
                Route("/v1/completions", answer, methods=["POST"]),
                *(Route(path, page) for path in INFO[self.engine]),
            ]
        )

    def _answer(self, body: dict[str, Any]) -> Response:
        self.bodies.append(body)
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        how = self.broken.get(text)
        if self.die_at is not None and len(self.bodies) >= self.die_at:
            self.stop()
            how = "hang"
        if how in ("429", "500"):
            error = {"message": f"no room for {text}", "type": "overloaded", "code": None}
            return JSONResponse({"error": error}, status_code=int(how))
        self.count += how is None and 1 + self.others_per_request
        return StreamingResponse(self._lines(how), media_type="text/event-stream")

    async def _lines(self, how: str | None) -> AsyncIterator[str]:
        chunks = copy.deepcopy(RECORDINGS[self.recording])
        for number, chunk in enumerate(chunks):
            if number == 2 and how == "hang":
                await asyncio.sleep(30.0)  # the server ends in the meantime
            if number == 2 and how == "cut":
                raise ConnectionResetError
            if number == 2 and how == "no JSON":
                yield f'data: {{"choices": [{WORD}\n\n'
            if number == 2 and how == "other shape":
                yield f"data: [{json.dumps(WORD)}]\n\n"
            if number == 2 and how == "error":
                yield f"event: error\ndata: {json.dumps({'error': {'message': WORD}})}\n\n"
            if how == "no usage":
                chunk.pop("usage", None)
            if how == "no end" and chunk["choices"]:
                chunk["choices"][0]["finish_reason"] = None
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


@contextlib.contextmanager
def playing(scripted: Scripted, port: int = 0) -> Iterator[Scripted]:
    """Serve until the end of the block, or until the script kills it."""
    address = bind("127.0.0.1", port)
    scripted.url = f"http://127.0.0.1:{address.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(scripted.app(), log_level="critical", access_log=False, lifespan="off"))

    def stop() -> None:
        server.should_exit = server.force_exit = True

    scripted.stop = stop
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[address])), daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end, "the server did not start"
        time.sleep(0.005)
    try:
        yield scripted
    finally:
        stop()
        thread.join(20)
        address.close()
    assert not thread.is_alive(), "the server did not end"
