"""A stand-in for a production engine: a real process with a real HTTP server that says and answers what is documented.

It is installed as the package `sglang`, `vllm` or `tokenspeed` of an environment folder, and behaves as the file
behaviour.json beside it says. It imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STEPS, TOKENS = 20, 128


def value_of(arguments: list[str], name: str) -> str | None:
    return arguments[arguments.index(name) + 1] if name in arguments else None


class Engine:
    def __init__(self, name: str, behaviour: dict[str, Any], arguments: list[str]) -> None:
        self.name, self.behaviour, self.arguments = name, behaviour, arguments
        self.start = time.monotonic()
        self.drafts = self.accepted = 0
        self.lock = threading.Lock()

    def say(self, line: str) -> None:
        print(line, flush=True)

    @property
    def length(self) -> float:
        return float(self.behaviour.get("acceptance", 4.0))

    def is_ready(self) -> bool:
        return time.monotonic() - self.start >= self.behaviour.get("ready_after_s", 0.0)

    def introduce(self) -> None:
        """What the engine's log says about the draft."""
        draft, shift = self.behaviour["draft"], self.behaviour.get("shift_taps", 0)
        width = self.behaviour.get("width")
        if self.name == "sglang":
            width = width or value_of(self.arguments, "--speculative-num-draft-tokens")
            window = value_of(self.arguments, "--speculative-draft-window-size")
            self.say(
                "[2026-09-20 10:00:00 TP0] Initialized DFLASH draft runner. attention_backend=fa3, "
                f"model=DFlashDraftModel, block_size={width}, draft_window_size={window}, compact_cache=True"
            )
            self.say(
                "[2026-09-20 10:00:00 TP0] DFLASH draft runner ready. mask_token=<|MASK|>, "
                f"mask_token_id={self.behaviour.get('mask', draft['mask'])}, mask_token_id_override=None"
            )
        elif self.name == "vllm":
            config = json.loads(value_of(self.arguments, "--speculative-config") or "{}")
            count = config["num_speculative_tokens"] if width is None else width - 1
            self.say(
                f"(EngineCore pid=1) INFO Initializing a V1 LLM engine (v0.32.0) with config: model='t', "
                f"speculative_config=SpeculativeConfig(method='dflash', model='d', num_spec_tokens={count}), seed=0"
            )
            taps = tuple(tap + 1 + shift for tap in draft["taps"])
            self.say(f"(Worker pid=2) INFO Using Eagle3 auxiliary layers from config: {taps}")
        else:
            width = width or value_of(self.arguments, "--speculative-num-draft-tokens")
            self.say(f"[ENGINE] server_args=ServerArgs(model='t', speculative_num_draft_tokens={width}, port=1)")
        for line in self.behaviour.get("lines", []):
            self.say(line)

    def answer(self) -> dict[str, Any]:
        """One request served: the reply, and what it adds to the counters and the log."""
        accepted = round((self.length - 1) * STEPS)
        with self.lock:
            self.drafts += STEPS
            self.accepted += accepted
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": "words"}, "finish_reason": "length"}
        if self.name == "sglang" and self.length > 1.0:
            choice["meta_info"] = {"spec_verify_ct": STEPS, "spec_num_correct_drafts": accepted}
        elif self.name == "sglang" and self.behaviour.get("is_speculating", True):
            choice["meta_info"] = {"spec_verify_ct": STEPS, "spec_num_correct_drafts": 0}
        if self.name == "tokenspeed":
            self.say(
                f"Req: r1 Finish! RequestStats(status='finished', reason='length', prompt_tokens=9, cache_tokens=0, "
                f"output_tokens={TOKENS}, cache_hit_rate=0.0, decode_tps=9.9, acc_len={self.length}, acc_rate=0.2)"
            )
        return {"id": "1", "choices": [choice], "usage": {"completion_tokens": TOKENS}}

    def metrics(self) -> str:
        labels = '{engine="0",model_name="t"}'
        return (
            "# TYPE vllm:spec_decode_num_drafts_total counter\n"
            f"vllm:spec_decode_num_drafts_total{labels} {self.drafts}.0\n"
            f"vllm:spec_decode_num_draft_tokens_total{labels} {7 * self.drafts}.0\n"
            f"vllm:spec_decode_num_accepted_tokens_total{labels} {self.accepted}.0\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {self.accepted}.0\n'
        )


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: str, status: int = 200) -> None:
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path in ("/health", "/readiness"):
                self.reply("", 200 if engine.is_ready() else 503)
            elif self.path == "/v1/models":
                self.reply(json.dumps({"data": [{"id": "served"}]}))
            elif self.path == "/metrics" and engine.name == "vllm":
                self.reply(engine.metrics())
            else:
                self.reply("not here", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "served" and body["messages"]
            if engine.behaviour.get("dies_at_first_request"):
                engine.say("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
                os._exit(7)
            wanted = engine.behaviour.get("api_key")
            if wanted is not None and self.headers.get("Authorization") != f"Bearer {wanted}":
                self.reply('{"error": "unauthorized"}', 401)
                return
            self.reply(json.dumps(engine.answer()))

        def log_message(self, *words: object) -> None:
            pass

    return Handler


def main(name: str) -> None:
    behaviour = json.loads((Path(__file__).parent / "behaviour.json").read_text())
    arguments = sys.argv[1:]
    engine = Engine(name, behaviour, arguments)
    if behaviour.get("is_stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Workers as engines have them: one in our group, one in a session of its own that does not listen to SIGTERM.
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600"], start_new_session=True)
    engine.say(f"{name} starts: {' '.join(arguments)}")
    if "crash_line" in behaviour:
        engine.say(behaviour["crash_line"])
        raise SystemExit(3)
    engine.introduce()
    host = value_of(arguments, "--host") or "127.0.0.1"
    server = ThreadingHTTPServer((host, int(value_of(arguments, "--port") or 0)), handler_of(engine))
    if "ends_after_s" in behaviour:
        threading.Timer(behaviour["ends_after_s"], lambda: os._exit(0)).start()
    server.serve_forever()


def install(environment: Path, name: str, version: str, behaviour: dict[str, Any], files: list[str]) -> Path:
    """An environment folder in which `name` of this version is installed: its Python, its program, its files."""
    site, programs = environment / "site", environment / "bin"
    package = site / name
    package.mkdir(parents=True)
    programs.mkdir()
    (package / "__init__.py").write_text("")
    (package / "behaviour.json").write_text(json.dumps(behaviour))
    source = Path(__file__).read_text()
    start = f"\n\nmain({name!r})\n"
    (package / ("launch_server.py" if name == "sglang" else "__main__.py")).write_text(source + start)
    for file in files:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text("")
    info = site / f"{name}-{re.sub('[^0-9.]', '', version)}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    script(programs / "python", f'PYTHONPATH="{site}" exec "{sys.executable}" -S "$@"')
    if name != "sglang":
        script(programs / name, f'exec "{programs / "python"}" -m {name} "$@"')
    return environment


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
