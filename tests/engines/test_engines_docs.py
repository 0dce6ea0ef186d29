"""What the guides show: every command is one that we take, every GPU is as in the table."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from pairs import PAIRS, serve_hub, write_pair
from test_plan import KIMI_K3, QWEN_27B

from blockdraft.inspection.plan_gpus import GPUS
from tiny_pair import run_cli

DOCS = Path(__file__).resolve().parents[2] / "docs"
INT4 = {"quantization_config": {"quant_method": "auto-round", "bits": 4}}
SIZES = {
    "Qwen/Qwen3.8-27B": QWEN_27B,
    "dbirks/Qwen3.8-27B-W4A16-AutoRound": {**QWEN_27B, **INT4},
    "moonshotai/Kimi-K3": KIMI_K3,
    "moonshotai/Kimi-K3.1-Pro": KIMI_K3,
}


def commands() -> list[list[str]]:
    """The `blockdraft` calls of docs/deploy.md."""
    text = (DOCS / "deploy.md").read_text()
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("blockdraft ")]
    return [words for words in found if "DRAFT" not in words]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[str, Path] = {}
    for name, pair in PAIRS.items():
        places |= write_pair(pair, tmp_path / name)
    for number, (hub_id, config) in enumerate(SIZES.items()):
        places[hub_id] = tmp_path / f"sizes-{number}"
        places[hub_id].mkdir()
        (places[hub_id] / "config.json").write_text(json.dumps(config))
    serve_hub(monkeypatch, places)


def test_every_command_of_the_guide_is_taken(hub: None) -> None:
    shown = commands()
    assert len(shown) == 18
    for words in shown:
        if "--url" in words:  # no server runs here, and that is all that is wrong with them
            words = [re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9", word) for word in words]
            ran = run_cli(*words)
            assert ran.code == 2 and "http://127.0.0.1:9" in ran.err and ran.err.count("\n") == 1, (words, ran.err)
            continue
        dry = ["--print"] if words[0] == "launch" else []
        ran = run_cli(*words, *dry)
        assert ran.code == 0, (words, ran.err)


def test_the_gpus_of_the_guide_are_those_of_the_table() -> None:
    text = (DOCS / "deploy-plan.md").read_text()
    for gpu in GPUS.values():
        row = (
            f"| {gpu.name} | {gpu.memory_bytes / 1e9:.1f} GB | {gpu.bandwidth_bytes_s / 1e12:.2f} TB/s | "
            f"{gpu.bf16_flops / 1e12:.0f} TFLOP/s | {gpu.source} |"
        )
        assert row in text
