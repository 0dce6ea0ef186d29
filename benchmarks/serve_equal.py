"""Does HTTP change a token? 100 prompts through the server, whole and streamed, alone and 16 at a time, and the engine.

The built-in pair; every other prompt is sampled with a seed, the others are greedy. First the engine in process, one
request after another; then a server around the same engine. Greedy ones also run without speculation. Texts that differ
are listed. With several rows in a pass the target's sums come in another order, so that a greedy text may differ at a
near tie in a low-precision format; such a text is a difference here all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common, session
from benchmarks.serving import MODEL, call, chat_body, content_of

RESULT = "serve_equal.json"
AT_ONCE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    options = parser.parse_args()
    options.device, options.threads = "cpu", 1
    import torch

    torch.set_num_threads(1)
    from blockdraft.engine import load

    engine = load(options.draft, options.target, dtype=options.dtype, max_rows=AT_ONCE)
    questions = [prompt.text for prompt in common.load_prompts(Path(), "chat", options.prompts)]
    known = in_process(engine, questions, options)
    session.note(f"{len(known)} texts known; asking the server")
    found = through_server(engine, questions, options)
    ways = {name: compared(known, texts) for name, texts in found.items()}
    result = {
        "what": "texts of the server that are not those of the engine in process, for each way of asking",
        "settings": {
            "pair": Path(options.target).name if options.target else "built-in",
            "dtype": options.dtype,
            "prompts": len(questions),
            "max_new_tokens": options.max_new_tokens,
            "sampling": "even prompts: temperature 0.9, top_p 0.95, a seed each; odd ones greedy",
        },
        "ways": ways,
        "run": session.run_facts(options),
    }
    common.write_json(options.results / RESULT, result)
    print(json.dumps({name: len(way["different"]) for name, way in ways.items()}))
    return 1 if any(way["different"] for way in ways.values()) else 0


def fields_of(number: int) -> dict[str, Any]:
    return {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + number}


def in_process(engine: Any, questions: Sequence[str], options: argparse.Namespace) -> dict[int, str]:
    from blockdraft import SamplingParams
    from blockdraft.engine import Request

    known = {}
    for number, question in enumerate(questions):
        given = fields_of(number)
        request = Request(
            prompt_ids=engine.tokenizer.chat_ids([{"role": "user", "content": question}]),
            max_new_tokens=options.max_new_tokens,
            sampling=SamplingParams(temperature=given["temperature"], top_p=given.get("top_p", 1.0)),
            seed=given.get("seed"),
        )
        [completion] = engine.run([request])
        known[number] = str(completion.text)
    return known


def through_server(engine: Any, questions: Sequence[str], options: argparse.Namespace) -> dict[str, dict[int, str]]:
    import uvicorn

    from blockdraft.serve import ServerSettings, create_app
    from blockdraft.serve.process import bind

    app = create_app(engine, ServerSettings(model_name=MODEL, has_access_log=False, has_page=False))
    address = bind("127.0.0.1", 0)
    port = address.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="on"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[address])), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        return asyncio.run(ask_all(port, questions, options))
    finally:
        server.should_exit = True
        thread.join(30)


async def ask_all(port: int, questions: Sequence[str], options: argparse.Namespace) -> dict[str, dict[int, str]]:
    async def ask(number: int, **more: Any) -> str:
        fields = {"max_tokens": options.max_new_tokens, **fields_of(number), **more}
        answer = await call(port, chat_body(questions[number], **fields), timeout_s=600.0)
        assert answer.status == 200 and answer.is_whole, answer
        return content_of(answer)

    every, greedy = range(len(questions)), range(1, len(questions), 2)
    plain = {"speculation": {"enabled": False}}
    ways: dict[str, tuple[Sequence[int], int, dict[str, Any]]] = {
        "whole": (every, 1, {}),
        "streamed": (every, 1, {"stream": True}),
        "whole, 16 at once": (every, AT_ONCE, {}),
        "streamed, 16 at once": (every, AT_ONCE, {"stream": True}),
        "greedy without speculation": (greedy, 1, plain),
        "greedy without speculation, 16 at once": (greedy, AT_ONCE, {**plain, "stream": True}),
    }
    found = {}
    for name, (numbers, count, more) in ways.items():
        found[name] = await several(numbers, count, lambda number, more=more: ask(number, **more))
        session.note(name)
    return found


async def several(numbers: Sequence[int], count: int, ask: Callable[[int], Awaitable[str]]) -> dict[int, str]:
    """All of them, at most `count` at a time."""
    room = asyncio.Semaphore(count)

    async def one(number: int) -> tuple[int, str]:
        async with room:
            return number, await ask(number)

    return dict(await asyncio.gather(*(one(number) for number in numbers)))


def compared(known: dict[int, str], texts: dict[int, str]) -> dict[str, Any]:
    different = [
        {"prompt": number, "engine": known[number][:200], "server": text[:200]}
        for number, text in texts.items()
        if text != known[number]
    ]
    return {"asked": len(texts), "different": different}


if __name__ == "__main__":
    session.finish(main)
