"""Hybrid targets end to end at toy size: taught a text, a drafter trained on each by the trainer, served and compared.

The text is the licence, which does not change; what was measured at full size is in results/hybrids.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.config import TAP_STREAMS
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common  # noqa: E402
from benchmarks.hybrids import prose, serving, shown  # noqa: E402
from benchmarks.hybrids.course import FULL, Course, run  # noqa: E402
from benchmarks.hybrids.lesson import Lesson, teach  # noqa: E402
from benchmarks.hybrids.targets import KimiK3, Qwen35, Size  # noqa: E402

NUM_TOKENS = 300
SHAPES = {
    "qwen3_5": Qwen35(Size(vocab_size=300, hidden_size=48, num_layers=4, num_heads=2)),
    "kimi_k3": KimiK3(Size(vocab_size=300, hidden_size=48, num_layers=4, num_heads=2, num_experts=3, block_size=2)),
}
LESSON = Lesson(num_steps=40, sequences_per_step=4, length=48, learning_rate=1e-2)
TOY = Course(
    shapes=SHAPES,
    lessons=dict.fromkeys(SHAPES, LESSON),
    num_taught=10,
    num_prompts=2,
    max_new_tokens=NUM_TOKENS,
    has_gates=False,
    changes=(
        "max_length=128", "text.max_new_tokens=64", "optim.num_steps=60", "optim.blocks_per_sequence=12",
        "draft.num_layers=1", "draft.windows=[0]", "draft.intermediate_size=64", "draft.target_layer_ids=[0,2]",
        "loss.selector_start_step=10",
    ),
)  # fmt: skip


def licence() -> prose.Prose:
    paragraphs = (" ".join(part.split()) for part in (ROOT / "LICENSE").read_text("utf-8").split("\n\n"))
    return prose.split([text for text in paragraphs if len(text.split()) >= 20], TOY.num_taught)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("hybrids")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    return run(TOY, licence(), place, 1, lambda _line: None)


def test_served_text_is_the_targets_own(found: dict[str, Any]) -> None:
    assert [(pair["target"], pair["tap_stream"]) for pair in found["pairs"]] == [
        ("qwen3_5", "plain"), *(("kimi_k3", stream) for stream in TAP_STREAMS),
    ]  # fmt: skip
    for pair in found["pairs"]:
        served = pair["served"]
        assert (served["num_failures"], served["num_identical"] + served["num_ties"]) == (0, 2)
        assert served["num_tokens_compared"] == 2 * NUM_TOKENS or served["num_ties"]
        assert served["acceptance"]["pooled_acceptance_length"]["estimate"] > 1.5
