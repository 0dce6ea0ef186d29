"""`launch` against engines that are ready, slow, crashing, wrong or old: what it says, how it ends, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_engine import install
from pairs import PAIRS, write_pair

from blockdraft.engines import ENGINES
from tiny_pair import Ran, run_cli

QWEN = PAIRS["qwen3.8-27b-dflash2"]
VERSIONS = {"sglang": "0.5.23", "vllm": "0.32.0", "tokenspeed": "0.1.0"}
MARK = "FAKE_ENGINE_TEST"
QUICK = ("--probes", "1", "--stop-grace", "0.1", "--startup-timeout", "20")
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@dataclass
class Bench:
    """Folders of a pair and of fake engines, and the processes that were started for this test."""

    folder: Path
    mark: str

    def engine(self, name: str, version: str | None = None, files: list[str] | None = None, **behaviour: Any) -> Path:
        draft = QWEN.draft_raw()["dflash_config"]
        behaviour = {"draft": {"taps": draft["target_layer_ids"], "mask": draft["mask_token_id"]}, **behaviour}
        held = list(ENGINES[name].features.values()) if files is None else files
        return install(self.folder / f"env-{uuid.uuid4().hex[:8]}", name, version or VERSIONS[name], behaviour, held)

    def words(self, name: str, environment: Path, *more: str, port: int | None = None) -> list[str]:
        pair = ("launch", name, str(self.folder / "draft"), "--target", str(self.folder / "target"))
        place = ("--engine-env", str(environment), "--port", str(port or free_port()))
        return [*pair, *place, *QUICK, *more]

    def launch(self, name: str, environment: Path, *more: str, port: int | None = None) -> Ran:
        return run_cli(*self.words(name, environment, *more, port=port))

    def left(self) -> list[str]:
        """Command lines of the processes of this test that still live."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                is_ours = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if is_ours and state not in "ZX":
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody may be asked by way of a proxy
    monkeypatch.setattr("blockdraft.engines.launch._POLL_S", 0.02)
    monkeypatch.setattr("blockdraft.engines.launch._SETTLE_S", 0.05)
    write_pair(QWEN, tmp_path)
    made = Bench(tmp_path, mark)
    yield made
    assert made.left() == []


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "sglang",
            ["taps 5 19 33 47 61: this engine's log never says it", "width 8: confirmed", "mask 248070: confirmed"],
        ),
        ("vllm", ["taps 5 19 33 47 61: confirmed", "width 8: confirmed", "mask 248070: the log did not say it"]),
        ("tokenspeed", ["taps 5 19 33 47 61: this engine's log never says it", "width 8: confirmed"]),
    ],
)
def test_a_sound_engine_is_confirmed_measured_and_stopped(bench: Bench, name: str, says: list[str]) -> None:
    ran = bench.launch(name, bench.engine(name), "--check-only")
    assert ran.code == 0, ran.err
    for text in says:
        assert text in ran.err
    formula = "Σ(C-1)/ΣS" if name == "tokenspeed" else "1 + ΣA/ΣS"
    assert f"acceptance 4.00 tokens a step, {formula}" in ran.err and "floor 1.20: no card is known" in ran.err
    assert f"{name} starts:" in ran.out and "checked; stopping" in ran.err


def test_a_slow_engine_is_waited_for(bench: Bench) -> None:
    started = time.monotonic()
    ran = bench.launch("vllm", bench.engine("vllm", ready_after_s=0.7), "--check-only")
    assert ran.code == 0 and time.monotonic() - started > 0.7


def test_an_engine_that_is_never_ready_is_stopped(bench: Bench) -> None:
    environment = bench.engine("vllm", ready_after_s=60.0)
    ran = bench.launch("vllm", environment, "--startup-timeout", "0.6")
    assert ran.code == 2
    assert "vLLM was not ready after 0.6 s and is stopped; its last line:" in ran.err and "--startup-timeout" in ran.err


def test_an_engine_that_crashes_says_its_last_line(bench: Bench) -> None:
    environment = bench.engine(
        "sglang", crash_line="ValueError: DFLASH mask_token_id is outside the target vocab size."
    )
    ran = bench.launch("sglang", environment)
    assert ran.code == 2
    assert "SGLang ended with code 3 before it was ready" in ran.err and "outside the target vocab size" in ran.err


def test_an_engine_that_dies_under_the_first_request(bench: Bench) -> None:
    ran = bench.launch("vllm", bench.engine("vllm", dies_at_first_request=True))
    assert ran.code == 2
    assert "ended with code 7 while it was probed" in ran.err and "illegal memory access" in ran.err


def test_wrong_taps_in_the_log_end_the_launch(bench: Bench) -> None:
    ran = bench.launch("vllm", bench.engine("vllm", shift_taps=-1, ready_after_s=60.0))
    assert ran.code == 1
    assert "the draft declares 5 19 33 47 61, the engine took 4 18 32 46 60 (shifted by -1)" in ran.err
    assert "would not serve what was asked" in ran.err and "acceptance" not in ran.err


@pytest.mark.parametrize(
    ("name", "behaviour", "text"),
    [
        ("sglang", {"width": 16}, "width: the draft declares 8, the engine took 16"),
        ("sglang", {"mask": 151669}, "mask: the draft declares 248070, the engine took 151669"),
        ("tokenspeed", {"width": 4}, "width: the draft declares 8, the engine took 4"),
        (
            "sglang",
            {"lines": ["DFLASH non-greedy verification is unavailable; falling back to greedy argmax verification."]},
            "not the target's distribution",
        ),
        ("vllm", {"lines": ["Using Eagle3 auxiliary layers from model: (2, 18, 33)"]}, "taps of its own"),
    ],
)
def test_what_the_log_contradicts_ends_the_launch(
    bench: Bench, name: str, behaviour: dict[str, Any], text: str
) -> None:
    ran = bench.launch(name, bench.engine(name, **behaviour))
    assert ran.code == 1 and text in ran.err


def test_a_harmless_alarm_is_a_note(bench: Bench) -> None:
    line = "Disable DFLASH draft cuda graph because dp attention is enabled"
    ran = bench.launch("sglang", bench.engine("sglang", lines=[line]), "--check-only")
    assert ran.code == 0 and "slower steps, the same proposals" in ran.err


@pytest.mark.parametrize("name", ENGINES)
def test_a_collapse_of_acceptance_is_explained(bench: Bench, name: str) -> None:
    ran = bench.launch(name, bench.engine(name, acceptance=1.05))
    assert ran.code == 1
    assert "too little is accepted" in ran.err and "template" in ran.err
    # Almost nothing is accepted: a layout that nobody confirmed comes before how the draft is used.
    first = next(line for line in ran.err.splitlines() if line.startswith("blockdraft: 1."))
    assert ("shifted taps" in first) == (name != "vllm")


def test_the_floor_is_what_the_user_says(bench: Bench) -> None:
    environment = bench.engine("vllm", acceptance=2.5)
    assert bench.launch("vllm", environment, "--floor", "3", "--check-only").code == 1
    assert bench.launch("vllm", environment, "--floor", "2.4", "--check-only").code == 0
    assert bench.launch("vllm", environment, "--floor", "9", "--probes", "0", "--check-only").code == 0


def test_speculation_that_is_off_is_not_called_accepting(bench: Bench) -> None:
    ran = bench.launch("sglang", bench.engine("sglang", acceptance=1.0, is_speculating=False), "--check-only")
    assert ran.code == 2 and "without a single step of the draft" in ran.err


def test_a_port_that_is_taken_starts_nothing(bench: Bench) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ran = bench.launch("vllm", bench.engine("vllm"), port=other.getsockname()[1])
    assert ran.code == 2 and "cannot be had" in ran.err and "--port" in ran.err and "starts:" not in ran.out


@pytest.mark.parametrize(
    ("name", "version", "files", "text"),
    [
        ("vllm", "0.27.1", None, "vLLM 0.27.1 is too old for DFlash 2: 0.28.0"),
        ("sglang", "0.5.16", None, "SGLang 0.5.16 is too old for DFlash 2: 0.5.23"),
        ("tokenspeed", "0.1.0", ["runtime/models/dflash.py"], "has no tokenspeed/runtime/models/dflash2.py"),
    ],
)
def test_a_version_that_cannot_run_it_starts_nothing(
    bench: Bench, name: str, version: str, files: list[str] | None, text: str
) -> None:
    ran = bench.launch(name, bench.engine(name, version, files))
    assert ran.code == 2 and text in ran.err and "starts:" not in ran.out


def test_an_engine_that_is_not_there(bench: Bench) -> None:
    environment = bench.engine("vllm")
    ran = bench.launch("sglang", environment)
    assert ran.code == 2 and "SGLang is not installed for" in ran.err and "--engine-env" in ran.err
    ran = bench.launch("tokenspeed", environment)
    assert ran.code == 2 and "bin/tokenspeed does not exist" in ran.err


def test_the_users_flags_and_key_arrive(bench: Bench) -> None:
    environment = bench.engine("vllm", api_key="s3cret")
    ran = bench.launch("vllm", environment, "--check-only", "--", "--api-key", "s3cret", "--seed", "7")
    assert ran.code == 0, ran.err
    assert "--api-key s3cret --seed 7" in ran.out
    ran = bench.launch("vllm", environment, "--check-only")
    assert ran.code == 2 and "answered 401" in ran.err


def test_an_engine_that_ends_by_itself_ends_the_launch(bench: Bench) -> None:
    ran = bench.launch("vllm", bench.engine("vllm", ends_after_s=1.0))
    assert ran.code == 0 and "serving on http://127.0.0.1:" in ran.err and "vLLM ended with code 0" in ran.err


@pytest.mark.parametrize(
    ("number", "behaviour", "moment"),
    [
        (signal.SIGTERM, {"ready_after_s": 60.0}, "waiting for"),
        (signal.SIGTERM, {}, "serving on"),
        (signal.SIGINT, {"is_stubborn": True}, "serving on"),
        (signal.SIGHUP, {}, "serving on"),
    ],
)
def test_a_signal_stops_the_engine_and_its_workers(
    bench: Bench, number: signal.Signals, behaviour: dict[str, Any], moment: str
) -> None:
    words = bench.words("vllm", bench.engine("vllm", **behaviour))
    process = subprocess.Popen(
        [sys.executable, "-m", "blockdraft.cli", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if moment in line:
            break
    deadline = time.monotonic() + 10
    while len(bench.left()) < 5 and time.monotonic() < deadline:  # launch, the engine, its workers
        time.sleep(0.02)
    assert len(bench.left()) >= 5
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(20) == 128 + number and f"{number.name}: stopping vLLM" in rest


def test_what_the_log_says_is_passed_on_as_it_comes(bench: Bench) -> None:
    environment = bench.engine("vllm", lines=["wörds \x1b[31m in colour", "", "  indented"])
    ran = bench.launch("vllm", environment, "--check-only")
    assert "wörds \x1b[31m in colour\n\n  indented\n" in ran.out


def test_print_needs_no_engine(bench: Bench) -> None:
    pair = (str(bench.folder / "draft"), "--target", str(bench.folder / "target"))
    ran = run_cli("launch", "vllm", *pair, "--print", "--engine-version", "0.30.1", "--", "--seed", "7")
    assert ran.code == 0 and ran.out.startswith("# vLLM 0.30.1 (not found here, assumed)\n")
    assert f"vllm serve {bench.folder / 'target'}" in ran.out and "--seed 7" in ran.out
    config = json.dumps({"method": "dflash", "model": str(bench.folder / "draft"), "num_speculative_tokens": 7})
    assert config in ran.out
