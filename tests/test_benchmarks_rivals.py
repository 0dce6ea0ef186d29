"""The comparison with rivals: real workers on a tiny pair, what is made of their records, vLLM's counters, the walk."""

from __future__ import annotations

import json
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockdraft.errors import ConfigError, UnavailableError
from engine_kit import draft_config
from tiny_pair import BLOCK_SIZE, MASK_ID, TinyPair, write_draft

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins" / "vllm")]

import blockdraft_vllm  # noqa: E402
from benchmarks import common, vllm_cpu  # noqa: E402
from benchmarks.rivals import __main__ as rivals  # noqa: E402
from benchmarks.rivals import environments, figure, hosts, summary, vllm_server  # noqa: E402
from benchmarks.rivals import table as rivals_table  # noqa: E402
from benchmarks.rivals.modes import BF16, F32, MODES, OURS, PLAIN, RATIOS, V1, V2, Mode  # noqa: E402


# ---- the whole, on a tiny pair ---------------------------------------------------------------------------------------
@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Environments of transformers and the wheel that are this one's Python."""
    for name in ("transformers", "dflash"):
        python = tmp_path / "environments" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    return tmp_path / "environments"


@pytest.fixture
def v1_draft(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    config = draft_config(tiny_pair.facts, block_size=BLOCK_SIZE, mask_token_id=MASK_ID, v2=False)
    write_draft(tmp_path / "v1", config)
    (tmp_path / "v1" / "run.json").write_text(json.dumps({"steps": 7, "note": "of a test", "else": 1}))
    return tmp_path / "v1"


def test_every_rival_of_a_tiny_pair_writes_the_same_text(
    tiny_pair: TinyPair, v1_draft: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dflash")
    for name, rows in {
        "gsm8k/test.jsonl": [{"question": f"a fox jumps {i}?", "answer": ""} for i in range(3)],
        "mtbench/question.jsonl": [{"question_id": 81, "turns": ["a dog", "then?"]}],
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["rivals", "--draft", tiny_pair.draft, "--target", tiny_pair.target, "--v1-draft", v1_draft]
    words += ["--data", tmp_path, "--work", tmp_path / "work", "--results", tmp_path / "results", "--threads", "1"]
    words += ["--environments", prepared, "--limit", "2", "--max-new-tokens", "12", "--only", F32, "vllm", "llama.cpp"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    assert rivals.main() == 0
    result = json.loads((tmp_path / "results" / "rivals.json").read_text())
    assert result["num_prompts"] == {"gsm8k": 2, "mtbench": 1}
    of_f32 = [mode.name for mode in MODES if mode.precision == F32]
    assert list(result["modes"]) == [Mode(OURS, BF16, PLAIN).name, *of_f32]
    work = common.merge([tmp_path / "work" / "rivals.jsonl"])
    for prompt in ("gsm8k-0", "gsm8k-1", "mtbench-81"):
        texts = {name: work.records[prompt, name]["ids"] for name in of_f32}
        assert len({tuple(ids) for ids in texts.values()}) == 1 and all(len(ids) == 12 for ids in texts.values())
    for name, mode in result["modes"].items():
        assert mode["gsm8k"]["num_steps"] == 22 or mode["how"] != PLAIN, name
        assert mode["gsm8k"]["decode_tok_per_s"] > 0 and mode["gsm8k"]["ms_per_step"] > 0
    # the same drafter in two loops makes the same proposals: the same number of steps, prompt by prompt
    for ours, other in ((V2, Mode("dflash", F32, V2)), (V1, Mode("transformers", F32, V1))):
        for prompt in ("gsm8k-0", "gsm8k-1", "mtbench-81"):
            steps = [work.records[prompt, name]["num_steps"] for name in (Mode(OURS, F32, ours).name, other.name)]
            assert abs(steps[0] - steps[1]) <= 1, (prompt, other)  # ours counts a last step without proposals
    assert len(result["ratios"]) == 7  # those between modes of float32
    assert "prepare vllm-cpu" in result["not_run"][f"vllm-cpu {BF16} {PLAIN}"]
    assert "--server" in result["not_run"][f"llama.cpp q4_1 {PLAIN}"]
    assert result["settings"]["v1_draft"]["made"] == {"steps": 7, "note": "of a test"}
    assert str(tmp_path) not in json.dumps({key: value for key, value in result.items() if key != "not_run"})
    # everything is on disk: nothing is run again
    monkeypatch.setattr(hosts, "Worker", lambda *given: pytest.fail("started again"))
    assert rivals.main() == 0
    again = json.loads((tmp_path / "results" / "rivals.json").read_text())
    assert again["modes"] == result["modes"]
    block = rivals_table.block(tmp_path / "results")
    assert f"| {OURS} | {F32} | DFlash 2 drafter |" in block and "Not run:" in block
    bars = [one for one in ET.fromstring(figure.drawn(result)).iter() if one.get("class") in ("ours", "other")]
    assert len(bars) == 2 * len(result["modes"]) and all(float(bar.get("width", 0)) > 0 for bar in bars)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = {"target": str(tmp_path), "precision": F32, "threads": 1, "hows": [PLAIN], "drafts": {}}
    with pytest.raises(hosts.Failed, match=r"config\.json"):
        hosts.Worker(Path(sys.executable), "in_transformers", settings, tmp_path / "log")


def test_a_worker_that_dies_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(hosts.Failed, match=r"No module named benchmarks\.rivals\.in_nothing"):
        hosts.Worker(Path(sys.executable), "in_nothing", {"threads": 1}, tmp_path / "log")


# ---- words and numbers -----------------------------------------------------------------------------------------------
def test_names_of_modes_are_one_each_and_ratios_are_of_modes() -> None:
    assert len({mode.name for mode in MODES}) == len(MODES)
    assert {ratio.ours for ratio in RATIOS} | {ratio.other for ratio in RATIOS} <= set(MODES)
    assert rivals.chosen(["llama"])[0] == Mode(OURS, BF16, PLAIN) and len(rivals.chosen([])) == len(MODES)
    with pytest.raises(ConfigError, match="names no mode"):
        rivals.chosen(["nothing"])


def test_numbers_are_those_counted_by_hand(tmp_path: Path) -> None:
    ours, other = Mode(OURS, BF16, V2), Mode("dflash", BF16, V2)
    work = common.Work.open(tmp_path / "w.jsonl", {}, {})
    prompts = [common.Prompt(f"gsm8k-{i}", "") for i in range(3)]
    for i, prompt in enumerate(prompts):
        for mode, decode_s, steps in ((ours, 1.0, 4), (other, 2.0 + i, 5)):
            record = {"ids": list(range(11)), "num_steps": steps, "prefill_s": 1.0, "decode_s": decode_s}
            work.append(prompt.id, mode.name, {**record, "load_average": 0.5})
    lead, failed = Mode(OURS, BF16, PLAIN), Mode("vllm-cpu", BF16, V1)
    for prompt in prompts:
        work.records[prompt.id, lead.name] = work.records[prompt.id, ours.name] | {"num_steps": 10}
    found = summary.summary(work, prompts, (lead, ours, other, failed), {failed.name: "its line"}, 11)
    assert found["not_run"] == {failed.name: "its line"} and found["highest_load_average"] == 0.5
    mine = found["modes"][ours.name]["gsm8k"]
    assert mine["decode_tok_per_s"] == 10.0 and mine["tok_per_s_with_prefill"] == 5.5
    assert mine["tokens_a_step"]["estimate"] == 2.5 and mine["ms_per_step"] == 250.0
    assert found["modes"][lead.name]["gsm8k"]["tokens_a_step"]["estimate"] == 1.0
    [ratio] = [one for one in found["ratios"] if one["other"] == other.name]
    assert ratio["gsm8k"]["decode"]["estimate"] == 3.0  # of 2, 3 and 4


def test_a_rival_without_environment_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="prepare dflash"):
        environments.python_of("dflash", tmp_path)
    with pytest.raises(ConfigError, match=r"benchmarks\.llama_cpp build"):
        environments.prepare("llama.cpp", tmp_path)
    with pytest.raises(ConfigError, match="there are transformers, dflash, vllm-cpu"):
        environments.prepare("other", tmp_path)


# ---- vLLM ------------------------------------------------------------------------------------------------------------
class Handler(BaseHTTPRequestHandler):
    """Speaks what is asked of vLLM; a completion of 6 ids takes two steps, counted a moment after the answer."""

    done, late = 0, 0
    asked: list[Any] = []  # noqa: RUF012

    def do_GET(self) -> None:
        Handler.late, counted = max(Handler.late - 1, 0), Handler.done - (Handler.late > 1)
        lines = ["# TYPE vllm:spec_decode_num_drafts_total counter"]
        for name, each in (("num_drafts", 2), ("num_draft_tokens", 14), ("num_accepted_tokens", 3)):
            lines.append(f'vllm:spec_decode_{name}_total{{engine="0"}} {each * counted}.0')
            lines.append(f'vllm:spec_decode_{name}_created{{engine="0"}} 1.7e+09')
        for position, each in ((0, 2), (1, 1)):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{engine="0",position="{position}"}} {each * counted}.0')
        for name, each in (("decode", 0.5), ("prefill", 0.25)):
            lines.append(f'vllm:request_{name}_time_seconds_sum{{engine="0"}} {each * counted}')
            lines.append(f'vllm:request_{name}_time_seconds_count{{engine="0"}} {counted}.0')
        self._say("\n".join(lines))

    def do_POST(self) -> None:
        Handler.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        Handler.done, Handler.late = Handler.done + 1, 4
        self._say(json.dumps({"choices": [{"token_ids": [1, 2, 3, 4, 5, 6], "finish_reason": "length"}]}))

    def _say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[vllm_server.Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield vllm_server.Client(one.server_address[1])
        one.shutdown()
        thread.join()


def test_a_request_to_vllm_counts_its_own_steps(client: vllm_server.Client) -> None:
    client.generate("m", [1, 2], 6)
    found = client.generate("m", [1, 2], 6, ignore_eos=True)
    asked = Handler.asked[-1]
    assert (asked["prompt"], asked["max_tokens"], asked["temperature"]) == ([1, 2], 6, 0.0) and asked["ignore_eos"]
    record = vllm_cpu.record_of([1, 2], found)
    assert (record["prefill_s"], record["decode_s"], record["by_position"]) == (0.25, 0.5, [2, 1])
    assert vllm_cpu.counts_of(record) == {"num_steps": 2, "num_draft_tokens": 14, "num_accepted_draft_tokens": 3}


def test_our_steps_are_counted_whole_up_to_the_last_id() -> None:
    kinds = ["first", *["accepted"] * 2, "bonus", "bonus", *["accepted"] * 3, "bonus"]
    steps = [0, 1, 1, 1, 2, 3, 3, 3, 3]
    events = [SimpleNamespace(kind=kind, step=step) for kind, step in zip(kinds, steps, strict=True)]
    done = SimpleNamespace(token_ids=tuple(range(9)), events=events, finish_reason="stop")
    record = vllm_cpu.our_record(done, 7)
    assert record["ids"] == list(range(7)) and record["finish"] == "length"
    counts = {"num_steps": 3, "num_draft_tokens": 21, "num_accepted_draft_tokens": 5}
    assert vllm_cpu.counts_of(record) == counts and record["by_position"] == [2, 2, 1, 0, 0, 0, 0]
    assert vllm_cpu.our_record(done, 5)["num_steps"] == 2 and vllm_cpu.our_record(done, 9)["finish"] == "stop"


# ---- the plugin ------------------------------------------------------------------------------------------------------
def test_the_walk_takes_the_best_successor_of_the_token_before() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.stack([torch.randperm(50, generator=generator)[:4] for _ in range(6)]) for _ in range(3)])
    edges = torch.randn(3, 6, 4, 4, generator=generator)
    edges[:, 0] = edges[:, 0, :1]  # the anchor's, whatever the predecessor
    found = blockdraft_vllm.walk(ids, edges)
    for row in range(3):
        place, wanted = 0, []
        for position in range(6):
            scores = edges[row, position, place].tolist()
            place = scores.index(max(scores))
            wanted.append(int(ids[row, position, place]))
        assert found[row].tolist() == wanted


def test_only_dflash_2_is_let_through() -> None:
    class Config:
        def __init__(self, kind: str | None, others: list[str]) -> None:
            model = SimpleNamespace(architectures=[kind])
            self.speculative_config = SimpleNamespace(draft_model_config=model) if kind else None
            self.others = others

        def _get_v1_model_runner_unsupported_features(self) -> list[str]:
            return [*self.others, "DFlash candidate-head drafts"] if self.speculative_config else self.others

    blockdraft_vllm._lift_refusal(Config)
    refused = Config._get_v1_model_runner_unsupported_features
    assert refused(Config("DFlash2DraftModel", ["a"])) == ["a"]
    assert refused(Config("LiLiCorrDraftModel", [])) == ["DFlash candidate-head drafts"]
    assert refused(Config(None, ["b"])) == ["b"]
