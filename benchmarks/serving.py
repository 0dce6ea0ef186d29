"""What the measurements of the server share: a server process, and a bare HTTP client that can also misbehave.

The client is raw asyncio: one connection a request, so that it may leave at any byte, read as slowly as it likes and
send what no library would.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.errors import UnavailableError

MODEL = "measured"


class ServerProcess:
    """`blockdraft serve` on a free loopback port."""

    def __init__(self, words: list[str], *, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blockdraft.cli", "serve", "--port", "0", "--model-name", MODEL, *words],
            stderr=self._log,
        )
        self.port = self._wait()

    def _wait(self, seconds: float = 300.0) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for line in self._log_path.read_text().splitlines():
                if line.startswith("url "):
                    return int(line.split()[1].rstrip(",").removesuffix("/v1").rsplit(":", 1)[1])
            time.sleep(0.2)
        raise UnavailableError(f"the server did not start: {self._log_path.read_text()[-500:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    @property
    def rss_mib(self) -> float:
        """Memory of the process that is in use now (Linux)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    @property
    def cpu_s(self) -> float:
        """Processor time of the process so far (Linux)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._log.close()


@dataclass
class Answer:
    """What came back: `is_whole` only if the answer ended the way HTTP says it ends."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    is_whole: bool = False
    events: list[tuple[str, str]] = field(default_factory=list)
    """(event, data) of a stream."""

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for name, data in self.events if name == "message" and data != "[DONE]"]

    @property
    def is_done(self) -> bool:
        """Whether a stream ended with its last event."""
        return bool(self.events) and self.events[-1] == ("message", "[DONE]")


async def call(
    port: int,
    body: bytes,
    *,
    path: str = "/v1/chat/completions",
    leave_after: int | None = None,
    pause_s: float = 0.0,
    timeout_s: float = 300.0,
) -> Answer:
    """POST a body. `leave_after`: close after so many bytes of the answer; `pause_s`: a wait at each read."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            answer = await _read_head(reader)
            async for piece in _pieces(reader, answer):
                answer.body += piece
                if leave_after is not None and len(answer.body) >= leave_after:
                    return answer
                if pause_s:
                    await asyncio.sleep(pause_s)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                answer.events = _events(answer.body)
            return answer
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    return Answer(int(lines[0].split()[1]), headers)


async def _pieces(reader: asyncio.StreamReader, answer: Answer) -> AsyncIterator[bytes]:
    if "content-length" in answer.headers:
        yield await reader.readexactly(int(answer.headers["content-length"]))
        answer.is_whole = True
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    answer.is_whole = True


def _events(body: bytes) -> list[tuple[str, str]]:
    events = []
    for block in body.decode().split("\n\n"):
        if block:
            *names, data = block.split("\n")
            name = names[0].removeprefix("event: ") if names else "message"
            events.append((name, data.removeprefix("data: ")))
    return events


def chat_body(text: str, **fields: Any) -> bytes:
    """A greedy chat with one message."""
    made = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps(made).encode()


def content_of(answer: Answer) -> str:
    """The text of an answer of one choice, streamed or whole."""
    if not answer.events:
        return str(answer.json()["choices"][0]["message"]["content"])
    return "".join(choice["delta"].get("content") or "" for chunk in answer.chunks for choice in chunk["choices"])
