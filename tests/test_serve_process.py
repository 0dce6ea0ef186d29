"""`blockdraft serve` as a process: its words, its configuration, its signals."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from blockdraft.cli.serve import serve as serve_command
from blockdraft.errors import ConfigError, UnavailableError
from blockdraft.serve import ServerSettings
from blockdraft.serve.config_file import LaunchSettings, resolve
from blockdraft.serve.process import bind
from serve_kit import parse_events
from tiny_pair import TinyPair

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "server.md"
LONG = {"model": "target", "prompt": "the", "max_tokens": 200, "ignore_eos": True, "temperature": 0}


class Process:
    """A server process and what it has said so far on stderr."""

    def __init__(self, *words: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "blockdraft.cli", "serve", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stderr)

    def wait(self, seconds: float = 60) -> int:
        """The exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def said(self, beginning: str) -> str:
        """The line that begins so, once it is there."""
        end = time.monotonic() + 90
        while True:
            for line in list(self.lines):
                if line.startswith(beginning):
                    return line
            assert self.process.poll() is None and time.monotonic() < end, self.lines
            time.sleep(0.05)

    def url(self) -> str:
        return self.said("url ").split()[1].rstrip(",").removesuffix("/v1")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def read_in_background(url: str) -> tuple[threading.Thread, list[tuple[str, str]]]:
    """A long stream that has begun, and its events once it has come to its end."""
    events: list[tuple[str, str]] = []
    has_begun = threading.Event()

    def read() -> None:
        pieces = []
        try:
            with httpx.stream("POST", url, json={**LONG, "n": 8, "stream": True}, timeout=60) as answer:
                for piece in answer.iter_text():
                    pieces.append(piece)
                    has_begun.set()
        except httpx.HTTPError:
            return
        events.extend(parse_events(iter(pieces)))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert has_begun.wait(60)
    return reader, events


@pytest.fixture
def serve(tiny_pair: TinyPair) -> Iterator[Process]:
    made = Process(*tiny_pair.arguments, "--port", "0", "--threads", "1", "--drain-timeout-s", "30")
    yield made
    made.end()


def test_it_says_what_it_is_and_drains_at_the_first_signal(serve: Process) -> None:
    url = serve.url()
    said = "\n".join(serve.lines)
    for words in ("target (llama), window 256, float32 on cpu", "taps", "layers 0, 1, 2 of 3", "confirmed"):
        assert words in said
    assert "2 to 5 in a request, else 5" in said and "16 rows, no limit" in said and "none: open" in said
    reader, events = read_in_background(f"{url}/v1/completions")
    serve.process.send_signal(signal.SIGTERM)
    reader.join(60)
    assert events[-1] == ("message", "[DONE]")
    finished = [json.loads(data)["choices"][0]["finish_reason"] for _, data in events[:-1]]
    assert finished.count("length") == 8
    assert serve.wait() == 0
    [line] = [json.loads(line) for line in serve.lines if line.startswith('{"client"')]
    assert line["path"] == "/v1/completions" and line["status"] == 200 and line["completion_tokens"] == 1600
    assert "the" not in line.values()


def test_a_second_signal_ends_at_once(serve: Process) -> None:
    reader, events = read_in_background(f"{serve.url()}/v1/completions")
    serve.process.send_signal(signal.SIGTERM)
    serve.said("stopping")
    serve.process.send_signal(signal.SIGTERM)
    assert serve.wait() == 143
    reader.join(10)
    assert not events


def test_a_signal_while_it_loads_ends_it(serve: Process) -> None:
    serve.said("loading")
    serve.process.send_signal(signal.SIGTERM)
    assert serve.wait() == 0
    assert not any("Traceback" in line for line in serve.lines), serve.lines


def test_what_cannot_be_loaded_is_one_line_and_exit_2(tmp_path: Path) -> None:
    made = Process(str(tmp_path), "--target", str(tmp_path), "--port", "0")
    assert made.wait() == 2
    assert made.lines[-1].startswith("blockdraft: ") and not any("Traceback" in line for line in made.lines)


# ----------------------------------------------------------------------------------------------------- configuration


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_flags_go_before_the_file_and_that_before_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-long-key\n\nsecond-long-key\n")
    monkeypatch.setenv("BLOCKDRAFT_API_KEYS", "third-long-key, first-long-key")
    path = write(
        tmp_path,
        f'[pair]\ndtype = "bfloat16"\n[engine]\nmax_rows = 4\nwidth = "auto"\n[listen]\nport = 9000\n'
        f'api_key_file = "{keys}"\n[server]\nmax_queue = 3\nrequest_timeout_s = 5\n'
        'cors_origins = ["https://a.example"]\n',
    )
    launch, settings = resolve(path, {"port": 9001, "max_rows": None, "model_name": "mine"})
    assert (launch.dtype, launch.max_rows, launch.width, launch.port) == ("bfloat16", 4, "auto", 9001)
    assert settings.max_queue == 3 and settings.request_timeout_s == 5 and settings.model_name == "mine"
    assert settings.api_keys == ("third-long-key", "first-long-key", "second-long-key")
    assert settings.cors_origins == ("https://a.example",)
    assert settings.allowed_hosts == ("localhost", "127.0.0.1", "[::1]")
    assert resolve(None, {"host": "0.0.0.0"})[1].allowed_hosts == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\nmax_queu = 3", "unknown key server.max_queu (did you mean 'max_queue'?)"),
        ("[server]\nport = 3", "unknown key server.port; it belongs to [listen]"),
        ("[sever]\nmax_queue = 3", "unknown table 'sever'"),
        ("max_queue = 3", "unknown table 'max_queue'"),
        ("server = 3", "server is not a table"),
        ('[server]\nmax_queue = "3"', "it must be int"),
        ("[server]\nmax_queue = true", "it must be int"),
        ("[server]\nmax_queue = -1", "max_queue is -1"),
        ('[server]\ncors_origins = "x"', "give a list of texts"),
        ("[server]\nrequest_timeout_s = 0", "request_timeout_s is 0"),
        ("[server]\nrequest_timeout_s = inf", "request_timeout_s is inf"),
        ('[server]\napi_keys = ["a"]', "unknown key server.api_keys"),
        ("[listen]\nport = 70000", "port is 70000"),
        ("[engine]\nmax_rows = 0", "max_rows is 0"),
        ('[engine]\nwidth = "wide"', "width is 'wide'"),
        ('[listen]\napi_key_file = "/nowhere"', "cannot be read"),
        ("[server\n", "is not TOML"),
    ],
)
def test_a_wrong_file_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(write(tmp_path, text), {})
    assert words in str(caught.value)


def test_the_document_shows_every_setting(tmp_path: Path) -> None:
    text = DOCUMENT.read_text("utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    (tmp_path / "keys").write_text("a-key-of-tests\n")
    launch, settings = resolve(write(tmp_path, example), {"api_key_file": str(tmp_path / "keys")})
    assert launch.width == "auto" and settings.max_queue == 128
    names = [item.name for kind in (LaunchSettings, ServerSettings) for item in dataclasses.fields(kind)]
    assert [name for name in names if name != "api_keys" and not re.search(rf"\b{name}\b", text)] == []


def test_every_flag_is_a_setting() -> None:
    words = {"cors_origin": "cors_origins", "allow_host": "allowed_hosts", "page": "has_page", "config": None}
    words["access_log"] = "has_access_log"
    flags = {words.get(name, name) for name in inspect.signature(serve_command).parameters} - {None}
    names = {item.name for kind in (LaunchSettings, ServerSettings) for item in dataclasses.fields(kind)}
    assert flags <= names
    only_in_files = {"api_keys", "max_prompts", "max_connections", "body_timeout_s", "stall_timeout_s"}
    assert names - flags == only_in_files


def test_keys_must_be_long_and_an_empty_key_file_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="shorter than 8"):
        ServerSettings(api_keys=("short",))
    (tmp_path / "keys").write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        resolve(None, {"api_key_file": str(tmp_path / "keys")})


def test_an_address_that_is_taken_is_said() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UnavailableError, match="cannot listen"):
            bind("127.0.0.1", taken.getsockname()[1])
