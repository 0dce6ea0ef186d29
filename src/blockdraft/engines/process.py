"""The engine as a process: started in a group of its own, its log passed on, and nothing of it left behind.

Every process that the engine starts inherits a mark in its environment, so that those which left the group are found
too (where /proc shows environments: Linux). A SIGKILL of this process itself cannot be caught, and ends nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from blockdraft.errors import UnavailableError

_MARK = "BLOCKDRAFT_LAUNCH"
_TAIL_LINES = 12
_POLL_S = 0.05
_KILL_S = 10.0  # how long dead processes may take to be gone


class EngineProcess:
    """A running engine. `on_line` is called for every line of its output, from a thread of its own."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], on_line: Callable[[str], None]) -> None:
        self._mark = uuid.uuid4().hex
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_line = on_line
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"{argv[0]} could not be started: {error.strerror or error}") from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            text = line.rstrip("\n")
            if text.strip():
                self.tail.append(text)
            self._on_line(text)

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def wait(self) -> int:
        """The exit code, when it comes."""
        while True:
            code = self._popen.poll()
            if code is not None:
                self._reader.join(timeout=1)
                return code
            time.sleep(_POLL_S)

    def is_ended(self, within_s: float) -> bool:
        """Whether the engine ends within so many seconds; what it still had to say is read then."""
        deadline = time.monotonic() + within_s
        while self._popen.poll() is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        self._reader.join(timeout=1)
        return True

    def last_line(self) -> str:
        return self.tail[-1].strip() if self.tail else "it printed nothing"

    def stop(self, grace_s: float) -> None:
        """End the engine and everything it started: asked first, after `grace_s` seconds no longer."""
        self._signal_all(signal.SIGTERM)
        self._wait_for_end(grace_s)
        deadline = time.monotonic() + _KILL_S
        while self._is_anything_left() and time.monotonic() < deadline:
            self._signal_all(signal.SIGKILL)
            time.sleep(_POLL_S)
        self._reader.join(timeout=1)

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._is_anything_left():
            time.sleep(_POLL_S)

    def _is_anything_left(self) -> bool:
        if self._popen.poll() is None:
            return True
        if Path("/proc/self/stat").exists():
            return bool(self._living())
        try:
            os.killpg(self._popen.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _signal_all(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)
        for pid in self._living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _living(self) -> list[int]:
        """Processes of our group, or with our mark, that are not dead and merely unclaimed."""
        needle = f"{_MARK}={self._mark}".encode()
        found = []
        with contextlib.suppress(OSError):
            for entry in Path("/proc").iterdir():
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                with contextlib.suppress(OSError, ValueError, IndexError):
                    state, group = _state_and_group(entry)
                    is_ours = group == self._popen.pid or needle in (entry / "environ").read_bytes().split(b"\0")
                    if is_ours and state not in "ZX":
                        found.append(int(entry.name))
        return found


def _state_and_group(entry: Path) -> tuple[str, int]:
    """State letter and process group of a folder of /proc; the name before them may hold anything."""
    fields = (entry / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[2])
