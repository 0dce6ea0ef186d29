"""Does the server bear rough traffic: no lost or mixed stream, flat memory, clean refusals, a good end?

A server process and 64 clients in this one, on loopback: streams, whole answers, several choices, clients that leave
in the middle, slow readers, bodies too large, no JSON, unknown fields and models. Every greedy text that comes to its
end is compared with what the engine says in process, known beforehand. At the end the server gets SIGTERM under load:
each stream must finish or be told, and the process exit 0. Two processes: a core for each is best.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common, session
from benchmarks.serving import Answer, ServerProcess, call, chat_body, content_of

RESULT = "serve_load.json"
KINDS = {
    "stream": 40,
    "whole": 18,
    "choices": 5,
    "leaves": 12,
    "slow": 8,
    "oversize": 5,
    "no_json": 5,
    "unknown_field": 4,
    "other_model": 3,
}
EXPECTED_STATUS = {"oversize": 413, "no_json": 400, "unknown_field": 400, "other_model": 404}
MAX_BODY_BYTES = 65_536
SAMPLE_S = 2.0


@dataclass
class Seen:
    """What the clients saw."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    num_compared: int = 0
    num_refused_busy: int = 0
    end: Counter[str] = field(default_factory=Counter)

    def fault(self, text: str) -> None:
        if len(self.wrong) < 50:
            self.wrong.append(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--max-rows", type=int, default=16)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=session.ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    options = parser.parse_args()
    options.device, options.threads = "cpu", 1
    texts = expected_texts(options)
    session.note(f"{len(texts)} texts known; starting the server")
    words = [options.draft] if options.draft else []
    words += ["--target", options.target] if options.target else []
    words += ["--dtype", options.dtype, "--threads", "1", "--max-rows", str(options.max_rows), "--no-access-log"]
    words += ["--max-queue", str(options.max_queue), "--max-body-bytes", str(MAX_BODY_BYTES), "--drain-timeout-s", "60"]
    server = ServerProcess(words, log=options.work / "serve_load.log")
    try:
        found = asyncio.run(drive(server, options, texts))
        found["exit_code"] = server.wait(120)
    finally:
        server.kill()
    found["is_clean"] = is_clean(found)
    what = "64 clients of mixed and rough traffic on one server; faults are listed, an empty list is the claim"
    result = {"what": what, "settings": shown(options), **found, "run": session.run_facts(options)}
    common.write_json(options.results / RESULT, result)
    print(json.dumps({key: found[key] for key in ("is_clean", "requests", "faults", "queue_s", "rss_mib", "end")}))
    return 0 if found["is_clean"] else 1


def shown(options: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "seconds", "clients", "max_rows", "max_queue", "prompts", "max_new_tokens", "seed")
    return {
        "pair": Path(options.target).name if options.target else "built-in",
        **{name: getattr(options, name) for name in names},
    }


def expected_texts(options: argparse.Namespace) -> dict[str, str]:
    """What the engine of this process says to each prompt, alone."""
    import torch

    torch.set_num_threads(1)
    from blockdraft.engine import Request, load

    engine = load(options.draft, options.target, dtype=options.dtype, max_rows=1)
    assert engine.tokenizer is not None
    questions = [prompt.text for prompt in common.load_prompts(Path(), "chat", options.prompts)]
    found = {}
    for question in questions:
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": question}])
        [completion] = engine.run([Request(prompt_ids=ids, max_new_tokens=options.max_new_tokens)])
        found[question] = str(completion.text)
    return found


# ---- traffic -------------------------------------------------------------------------------------------------------
async def drive(server: ServerProcess, options: argparse.Namespace, texts: dict[str, str]) -> dict[str, Any]:
    """Traffic for the asked time, then SIGTERM while all clients are busy."""
    seen = Seen()
    ending = asyncio.Event()
    end = time.monotonic() + options.seconds
    clients = [
        asyncio.create_task(
            client(server.port, random.Random(options.seed * 1000 + number), options, texts, seen, ending)
        )
        for number in range(options.clients)
    ]
    samples: list[float] = []
    while time.monotonic() < end:
        await asyncio.sleep(min(SAMPLE_S, max(end - time.monotonic(), 0.01)))
        samples.append(server.rss_mib)
        for task in clients:
            if task.done():
                task.result()
    metrics = server.get("/metrics")
    ending.set()
    server.terminate()
    await asyncio.gather(*clients)
    return {
        "requests": sum(seen.kinds.values()),
        "kinds": dict(seen.kinds),
        "statuses": dict(seen.statuses),
        "num_texts_compared": seen.num_compared,
        "num_refused_busy": seen.num_refused_busy,
        "faults": seen.wrong,
        "queue_s": percentiles(seen.queue_s),
        "time_to_first_token_s": percentiles(seen.first_s),
        "rss_mib": memory(samples),
        "end": dict(seen.end),
        "step_failures": counter(metrics, "engine_step_failures_total"),
        "generated_tokens": counter(metrics, "generation_tokens_total"),
    }


async def client(
    port: int,
    draw: random.Random,
    options: argparse.Namespace,
    texts: dict[str, str],
    seen: Seen,
    ending: asyncio.Event,
) -> None:
    """One client: request after request until the server stops."""
    await asyncio.sleep(draw.random() * 0.5)
    while not ending.is_set():
        [kind] = draw.choices(list(KINDS), weights=list(KINDS.values()))
        question = draw.choice(list(texts))
        try:
            answer = await send(port, kind, question, draw, options)
        except (OSError, asyncio.IncompleteReadError) as error:
            if ending.is_set():
                seen.end["closed before an answer"] += 1
            else:
                seen.fault(f"{kind}: {type(error).__name__} {error}")
            continue
        except TimeoutError:
            seen.fault(f"{kind}: no end within the client's time")
            continue
        seen.kinds[kind] += 1
        judge(kind, question, answer, texts, seen, is_ending=ending.is_set())
        await asyncio.sleep(draw.random() * 0.05)


async def send(port: int, kind: str, question: str, draw: random.Random, options: argparse.Namespace) -> Answer:
    fields: dict[str, Any] = {"max_tokens": options.max_new_tokens}
    if kind == "oversize":
        return await call(port, chat_body("x" * draw.choice([MAX_BODY_BYTES, 20 * MAX_BODY_BYTES])))
    if kind == "no_json":
        return await call(port, draw.choice([b"{", b"\xff\x00", b"[" * 5000, b"", b'{"model": NaN}']))
    if kind == "unknown_field":
        return await call(port, chat_body(question, max_token=3))
    if kind == "other_model":
        return await call(port, chat_body(question, model="other"))
    if kind == "whole":
        return await call(port, chat_body(question, **fields))
    if kind == "choices":
        return await call(port, chat_body(question, n=3, seed=draw.randrange(1000), **{**fields, "temperature": 0.9}))
    fields.update(stream=True, speculation={"tokens": draw.random() < 0.3})
    leave_after = draw.choice([1, 400, 1500]) if kind == "leaves" else None
    pause_s = 0.1 + 0.2 * draw.random() if kind == "slow" else 0.0
    return await call(port, chat_body(question, **fields), leave_after=leave_after, pause_s=pause_s)


def judge(kind: str, question: str, answer: Answer, texts: dict[str, str], seen: Seen, *, is_ending: bool) -> None:
    """Compare an answer with what it must be; while the server ends, an error that says so is fine too."""
    seen.statuses[str(answer.status)] += 1
    if answer.status == 429:
        seen.num_refused_busy += 1
        if "retry-after" not in answer.headers or answer.json()["error"]["code"] != "queue_full":
            seen.fault("a 429 without Retry-After or its code")
        return
    if is_ending and answer.status == 503:
        seen.end["refused with 503"] += 1
        return
    expected = EXPECTED_STATUS.get(kind, 200)
    if answer.status != expected:
        seen.fault(f"{kind}: status {answer.status}, not {expected}: {answer.body[:200]!r}")
        return
    if expected != 200:
        error = answer.json()["error"]
        if not (answer.is_whole and error["message"] and error["type"] and "code" in error):
            seen.fault(f"{kind}: not an error object: {answer.body[:200]!r}")
        return
    if kind == "leaves" and not answer.is_whole:
        return
    if answer.events and not answer.is_done:
        name, data = answer.events[-1]
        if is_ending and name == "error" and json.loads(data)["error"]["code"] == "server_stopping":
            seen.end["told by an error event"] += 1
        else:
            seen.fault(f"{kind}: a stream ended with {name} {data[:200]}")
        return
    if not answer.is_whole:
        seen.fault(f"{kind}: an answer was cut off")
        return
    seen.end["finished"] += is_ending
    compare(kind, question, answer, texts, seen)


def compare(kind: str, question: str, answer: Answer, texts: dict[str, str], seen: Seen) -> None:
    if kind == "choices":
        indices = [choice["index"] for choice in answer.json()["choices"]]
        if indices != [0, 1, 2]:
            seen.fault(f"choices {indices}")
        return
    seen.num_compared += 1
    if content_of(answer) != texts[question]:
        seen.fault(f"{kind}: the text is another one: {content_of(answer)[:80]!r}, not {texts[question][:80]!r}")
    last = answer.chunks[-1] if answer.events else answer.json()
    timing = last["metrics"]["timing"]
    seen.queue_s.append(timing["queue_s"])
    seen.first_s.append(timing["queue_s"] + timing["prefill_s"])


# ---- numbers -------------------------------------------------------------------------------------------------------
def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {
        name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 4) for name, share in shares.items()
    }
    return {**found, "max": round(ordered[-1], 4), "count": len(ordered)} if ordered else {}


def memory(samples: list[float]) -> dict[str, Any]:
    """The first sixth is warming up; then the second half against the first."""
    warm = samples[len(samples) // 6 :]
    first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
    return {
        "first_half": round(median(first), 1),
        "second_half": round(median(second), 1),
        "growth": round(median(second) / median(first) - 1, 4),
        "peak": round(max(samples), 1),
        "samples": [round(value, 1) for value in samples[:: max(len(samples) // 60, 1)]],
    }


def counter(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(f"blockdraft:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def is_clean(found: dict[str, Any]) -> bool:
    """No fault, no 5xx but the 503 of the end, no broken step, memory within 3 %, exit 0."""
    server_errors = [status for status in found["statuses"] if status.startswith("5") and status != "503"]
    is_quiet = not found["faults"] and not server_errors and not found["step_failures"]
    return is_quiet and found["rss_mib"]["growth"] < 0.03 and found["exit_code"] == 0


if __name__ == "__main__":
    session.finish(main)
