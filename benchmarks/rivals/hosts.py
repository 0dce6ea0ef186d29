"""The process behind a mode, as the measurement sees it: asked for a text, it answers with ids and times, or fails.

Owns the pipe to a worker. The servers have files of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks import session
from blockdraft.errors import UnavailableError

STOP_S = 20.0


class Host(Protocol):
    """`facts` is what it said of itself when it was ready."""

    facts: dict[str, Any]

    def generate(self, how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Failed(Exception):
    """A rival did not start, or did not write a text; the message is its own last line."""


class Worker:
    """A worker process: its own environment, one request at a time. Its stderr goes to a log."""

    def __init__(self, python: Path, module: str, settings: Mapping[str, Any], log: Path) -> None:
        threads = str(settings["threads"])
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [str(python), "-m", f"benchmarks.rivals.{module}", json.dumps(settings)],
            cwd=session.ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._path = log
        try:
            self.facts: dict[str, Any] = self._answer()["ready"]
        except Failed:
            self.close()
            raise

    def generate(self, how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        asked = {"how": how, "prompt_ids": list(prompt_ids), "max_new_tokens": max_new_tokens}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_line()) from None
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(STOP_S)
            raise Failed(self._last_line())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _last_line(self) -> str:
        lines = [line for line in self._path.read_text("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"ended with code {self._process.returncode} and said nothing"


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def required_file(path: Path | None, what: str) -> Path:
    """A file that was named; UnavailableError in one line where it was not, or is not there."""
    if path is None or not path.is_file():
        raise UnavailableError(f"{what}{'' if path is None else f' {path}'}: not given or not there")
    return path
