"""What does HTTP cost: tokens per second through the server against the same requests in process?

The built-in pair, greedy, streamed, a fixed number of tokens; --concurrency requests at once. Both ways take turns,
in-process in this process, the server in its own, each with one CPU thread. Two ratios: of wall time, which the rest of
the machine disturbs, and of processor time (server's process against this one), which it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks import common, session
from benchmarks.serving import ServerProcess, call, chat_body

RESULT = "serve_overhead.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--work", type=Path, default=session.ROOT / "benchmarks" / "work")
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    options = parser.parse_args()
    options.device, options.threads = "cpu", 1
    import torch

    torch.set_num_threads(1)
    from blockdraft.engine import load

    most = max(options.concurrency)
    engine = load(options.draft, options.target, dtype=options.dtype, max_rows=most)
    words = [options.draft] if options.draft else []
    words += ["--target", options.target] if options.target else []
    words += ["--dtype", options.dtype, "--threads", "1", "--max-rows", str(most), "--no-access-log", "--no-page"]
    server = ServerProcess(words, log=options.work / "serve_overhead.log")
    try:
        rows = [measure(engine, server, options, count) for count in options.concurrency]
    finally:
        server.terminate()
        server.wait(60)
    what = "throughput through HTTP against in process; overhead is 1 - HTTP / in process of wall time, and CPU - 1"
    pair = Path(options.target).name if options.target else "built-in"
    settings = {"pair": pair, "dtype": options.dtype, "max_new_tokens": options.max_new_tokens}
    result = {"what": what, "settings": settings, "rows": rows, "run": session.run_facts(options)}
    common.write_json(options.results / RESULT, result)
    return 0


def measure(engine: Any, server: ServerProcess, options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Pairs of runs of `count` requests at once; the first pair warms up and is not counted."""
    questions = [prompt.text for prompt in common.load_prompts(Path(), "chat", count)]
    pairs = []
    for repeat in range(options.repeats + 1):
        inside, outside = in_process(engine, questions, options), through_http(server, questions, options)
        assert inside["tokens"] == outside["tokens"], (inside, outside)
        if repeat:
            pairs.append((inside, outside))
    row = {
        "concurrency": count,
        "tokens": pairs[0][0]["tokens"],
        "in_process_tok_per_s": common.median_interval([a["tokens"] / a["wall_s"] for a, _ in pairs]),
        "http_tok_per_s": common.median_interval([b["tokens"] / b["wall_s"] for _, b in pairs]),
        "wall_overhead": common.median_interval([1 - a["wall_s"] / b["wall_s"] for a, b in pairs]),
        "cpu_overhead": common.median_interval([b["cpu_s"] / a["cpu_s"] - 1 for a, b in pairs]),
        "load_average": session.load_average(),
    }
    print(json.dumps(row), flush=True)
    return row


def in_process(engine: Any, questions: list[str], options: argparse.Namespace) -> dict[str, float]:
    from blockdraft.engine import Request

    count = options.max_new_tokens
    ids = [engine.tokenizer.chat_ids([{"role": "user", "content": text}]) for text in questions]
    requests = [Request(prompt_ids=each, max_new_tokens=count, stop_ids=frozenset()) for each in ids]
    started, cpu = time.perf_counter(), time.process_time()
    completions = engine.run(requests)
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "tokens": sum(len(each.token_ids) for each in completions),
    }


def through_http(server: ServerProcess, questions: list[str], options: argparse.Namespace) -> dict[str, float]:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    bodies = [chat_body(text, max_tokens=options.max_new_tokens, **fields) for text in questions]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(call(server.port, body) for body in bodies))

    started, cpu = time.perf_counter(), server.cpu_s
    answers = asyncio.run(all_at_once())
    wall_s = time.perf_counter() - started
    assert all(answer.is_done for answer in answers)
    tokens = sum(answer.chunks[-1]["usage"]["completion_tokens"] for answer in answers)
    return {"wall_s": wall_s, "cpu_s": server.cpu_s - cpu, "tokens": tokens}


if __name__ == "__main__":
    session.finish(main)
