"""The comparison with llama.cpp: what is asked of its server, what is made of its answers, the widened target."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from blockdraft.errors import UnavailableError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common, llama_cpp

ANSWER = {
    "tokens": [5, 6, 7, 8, 2],
    "stop_type": "eos",
    "timings": {"prompt_ms": 20.0, "predicted_ms": 500.0, "predicted_n": 5, "draft_n": 14, "draft_n_accepted": 2},
}


class Handler(BaseHTTPRequestHandler):
    """Speaks the two paths of llama.cpp's server; every completion takes two verified blocks."""

    num_steps = 0
    asked: list[Any] = []  # noqa: RUF012

    def do_GET(self) -> None:
        name = "llamacpp:spec_decode_num_drafts_total"
        self._say(f"# TYPE {name} counter\n{name} {Handler.num_steps}\n" if self.path == "/metrics" else "{}")

    def do_POST(self) -> None:
        Handler.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        Handler.num_steps += 2
        self._say(json.dumps(ANSWER))

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[llama_cpp.Server]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield llama_cpp.Server(f"http://127.0.0.1:{one.server_address[1]}")
        one.shutdown()
        thread.join()


def test_a_request_is_greedy_and_counts_its_own_steps(server: llama_cpp.Server) -> None:
    server.generate([1, 2, 3], 16)
    record = server.generate([1, 2, 3], 16)
    asked = Handler.asked[-1]
    assert (asked["prompt"], asked["n_predict"], asked["temperature"]) == ([1, 2, 3], 16, 0.0)
    assert asked["cache_prompt"] is False and asked["return_tokens"] is True
    assert (record["ids"], record["finish"]) == ([5, 6, 7, 8, 2], "stop")
    counts = (record["num_steps"], record["num_draft_tokens"], record["num_accepted_draft_tokens"])
    assert counts == (2, 14, 2) and record["decode_s"] == 0.5


def test_plain_decoding_has_no_counters() -> None:
    plain = {**ANSWER, "stop_type": "limit", "timings": {"prompt_ms": 1.0, "predicted_ms": 2.0}}
    record = llama_cpp.record_of([1], plain, 0)
    assert (record["finish"], record["num_steps"], record["num_draft_tokens"]) == ("length", 0, 0)


def test_the_server_is_started_in_float32_with_the_width_of_the_block() -> None:
    words = llama_cpp.command_of(Path("s"), Path("t.gguf"), Path("d.gguf"), 8, 2, 99)
    options = dict(itertools.pairwise(words))
    assert options["--spec-type"] == "draft-dflash" and options["--spec-draft-n-max"] == "7"
    assert {options[f"--{name}"] for name in ("cache-type-k", "cache-type-v", "spec-draft-type-k")} == {"f32"}
    assert not any("spec" in word for word in llama_cpp.command_of(Path("s"), Path("t"), Path("d"), None, 2, 99))


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    broken = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(UnavailableError, match="did not start"), llama_cpp.running(broken, 1, tmp_path / "log"):
        pass


def test_the_comparison_is_the_hand_computed_one(tmp_path: Path) -> None:
    work = common.Work.open(tmp_path / "w.jsonl", {}, {})

    def put(prompt: str, mode: str, ids: list[int], steps: int, accepted: int) -> None:
        counts = {"num_steps": steps, "num_draft_tokens": 7 * steps, "num_accepted_draft_tokens": accepted}
        stats = counts if mode.startswith("llama.cpp") else {"stats": counts}
        work.append(prompt, mode, {"prompt_ids": [1], "ids": ids, "finish": "stop", **stats})

    for index, (steps, accepted) in enumerate([(4, 4), (2, 4)]):
        put(f"p-{index}", "plain", [5, 6, 7, 2], 3, 0)
        put(f"p-{index}", "w8", [5, 6, 7, 2], steps, accepted)
        put(f"p-{index}", "llama.cpp w8", [5, 6, 7], steps, accepted + 1)  # without the token that ends it
    entry = llama_cpp.entry_of(work, ["p-0", "p-1"], 8, (2,), None)
    assert (entry["num_identical"], entry["num_failures"], entry["divergences"]) == (2, 0, [])
    assert entry["ours"]["pooled_acceptance_length"]["estimate"] == pytest.approx(1 + 8 / 6)
    assert entry["llama_cpp"]["pooled_acceptance_length"]["estimate"] == pytest.approx(1 + 10 / 6)
    assert entry["difference"]["estimate"] == pytest.approx(2 / 6)
    put("p-2", "plain", [5, 6], 1, 0)
    put("p-2", "llama.cpp plain", [5], 1, 0)
    assert llama_cpp.entry_of(work, ["p-2"], None, (2,), None)["num_failures"] == 1


def test_the_target_is_widened_without_a_change(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama")
    writer.add_block_count(1)
    writer.add_file_type(3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wide = gguf.GGUFReader(llama_cpp.widen(tmp_path / "s.gguf", tmp_path / "w.gguf"))
    [stored] = gguf.GGUFReader(tmp_path / "s.gguf").tensors
    assert wide.tensors[0].tensor_type.name == "F32"
    assert np.array_equal(wide.tensors[0].data, gguf.quants.dequantize(stored.data, kind))
    found = {key: wide.get_field(key).contents() for key in ("general.architecture", "general.file_type")}
    assert found == {"general.architecture": "llama", "general.file_type": 0}
    assert wide.get_field("tokenizer.ggml.tokens").contents() == ["a", "b"]
