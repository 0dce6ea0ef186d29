"""Hybrid targets end to end: tiny ones taught a text, a drafter trained on each by the trainer, served and compared.

Here at toy size; the text is the licence, which does not change. What was measured at full size is checked in the file.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from blockdraft.targets.kimi_k3 import KimiK3Config
from blockdraft.targets.kimi_k3.delta import DeltaState, Tape

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common, session  # noqa: E402
from benchmarks.hybrids import course, lesson, prose, serving, shown  # noqa: E402
from benchmarks.hybrids.drafting import PAIRS  # noqa: E402
from benchmarks.hybrids.targets import KimiK3, Qwen35, Size  # noqa: E402

K3_TOKENS = 300
SHAPES = {
    "qwen3_5": Qwen35(Size(vocab_size=300, hidden_size=48, num_layers=4, num_heads=2)),
    "kimi_k3": KimiK3(Size(vocab_size=300, hidden_size=48, num_layers=3, num_heads=2, num_experts=3, block_size=2)),
}
LESSON = lesson.Lesson(num_steps=30, sequences_per_step=4, length=32, learning_rate=1e-2)
TOY = course.Course(
    shapes=SHAPES,
    lessons=dict.fromkeys(SHAPES, LESSON),
    num_taught=3,
    num_drafted=8,
    num_prompts=2,
    max_new_tokens=60,
    has_gates=False,
    changes=(
        "max_length=128", "text.max_new_tokens=64", "optim.num_steps=60", "optim.blocks_per_sequence=8",
        "draft.num_layers=1", "draft.windows=[0]", "draft.intermediate_size=64", "draft.target_layer_ids=[0,2]",
        "loss.selector_start_step=10",
    ),
)  # fmt: skip
COURSES = {
    "qwen3_5": replace(TOY, pairs=PAIRS[:1]),
    "kimi_k3": replace(TOY, pairs=PAIRS[1:], num_prompts=1, max_new_tokens=K3_TOKENS),
}


def licence() -> prose.Prose:
    paragraphs = (" ".join(part.split()) for part in (ROOT / "LICENSE").read_text("utf-8").split("\n\n"))
    return prose.split([text for text in paragraphs if len(text.split()) >= 20], TOY.num_taught, TOY.num_drafted)


def silent(_line: str) -> None:
    pass


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path_factory.mktemp("hybrids")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(place: Path) -> dict[str, dict[str, Any]]:
    return {name: course.run(toy, licence(), place, 1, silent) for name, toy in COURSES.items()}


# ---- the whole way ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", COURSES)
def test_served_text_is_the_targets_own(results: dict[str, dict[str, Any]], name: str) -> None:
    streams = ["plain"] if name == "qwen3_5" else ["prefix", "attn_res"]
    assert [pair["tap_stream"] for pair in results[name]["pairs"]] == streams
    for pair in results[name]["pairs"]:
        served, toy = pair["served"], COURSES[name]
        assert served["num_failures"] == 0
        assert served["num_ties"] or served["num_tokens_compared"] == toy.num_prompts * toy.max_new_tokens
        assert served["acceptance"]["pooled_acceptance_length"]["estimate"] > 1.5


def test_the_targets_are_hybrids_and_the_drafts_are_theirs(results: dict[str, dict[str, Any]], place: Path) -> None:
    config = json.loads((place / "qwen3_5" / "target" / "config.json").read_text("utf-8"))
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    k3 = KimiK3Config.from_dict(json.loads((place / "kimi_k3" / "target" / "config.json").read_text("utf-8")))
    assert (k3.kda.layers, k3.block_size, k3.moe.num_experts) == ({0, 1}, 2, 3)
    for pair in PAIRS:
        config = zlab.read(place / pair.target / pair.stream / "draft").config
        assert config.tap_stream == (None if pair.stream == "plain" else pair.stream)
        assert (type(config.attention).__name__ == "MlaConfig") == (pair.target == "kimi_k3")


def test_a_second_call_does_nothing_again(
    results: dict[str, dict[str, Any]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("made again")

    for name in ("teach", "loss_of"):
        monkeypatch.setattr(course, name, refuse)
    monkeypatch.setattr("blockdraft.train.command.run_training", refuse)
    monkeypatch.setattr(session, "load_engine", refuse)
    again = course.run(COURSES["qwen3_5"], licence(), place, 1, silent)
    assert json.dumps(again) == json.dumps(results["qwen3_5"])
    for other in ({"lessons": dict.fromkeys(SHAPES, replace(LESSON, seed=2))}, {"changes": (*TOY.changes, "seed=2")}):
        with pytest.raises(ConfigError, match=r"another .*; use another --work folder"):
            course.run(replace(COURSES["qwen3_5"], **other), licence(), place, 1, silent)


def test_the_public_recipe_is_right_where_nothing_is_taken_back(
    results: dict[str, dict[str, Any]], place: Path
) -> None:
    """So what it changes elsewhere is the crop's doing."""
    from transformers import AutoModelForCausalLM

    home = place / "qwen3_5"
    model = AutoModelForCausalLM.from_pretrained(home / "target", dtype=torch.float32).eval()
    records = common.merge([home / "plain" / "served.jsonl"]).records
    for prompt in licence().prompts(2):
        plain = records[prompt.id, common.PLAIN]
        assert serving._cropped(model, plain, [0] * 7 + [1], 8, random.Random(0)) == plain["ids"]
    assert results["qwen3_5"]["pairs"][0]["reference"]["num_failures"] > 0


def test_a_state_that_is_not_taken_back_is_found(
    results: dict[str, dict[str, Any]], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cropping does: keys and latents go back, the recurrent state stays."""

    def left(tape: Tape, kept: int) -> DeltaState:
        right = honest(tape, kept)
        return DeltaState(tape.after.state_HAW, right.tail_KP)

    honest = Tape.state_after
    home = place / "kimi_k3"
    work = common.Work.open(tmp_path / "served.jsonl", {}, {})
    plain = common.merge([home / "prefix" / "served.jsonl"])
    prompts = licence().prompts(1)
    for prompt in prompts:
        work.append(prompt.id, common.PLAIN, plain.records[prompt.id, common.PLAIN])
    monkeypatch.setattr(Tape, "state_after", left)

    def load() -> Any:
        from blockdraft.engine import load

        return load(home / "prefix" / "draft", home / "target")

    serving.serve(work, prompts, 8, K3_TOKENS, load)
    entry = serving.report(work, prompts, 8, lambda: SHAPES["kimi_k3"].judge(home / "target"))
    assert entry["num_failures"] > 0


# ---- its parts -------------------------------------------------------------------------------------------------------
def test_a_lesson_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Qwen35(Size(vocab_size=40, hidden_size=32, num_layers=4, num_heads=2))
    ids_S = torch.randint(40, (200,), generator=torch.Generator().manual_seed(0))
    short = replace(LESSON, num_steps=5, length=8)
    monkeypatch.setattr(lesson, "_SAVE_EVERY", 2)
    whole = lesson.teach(shape, ids_S, short, tmp_path / "whole.pt", silent)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shape, "after_step", _interrupt_at(4))
        lesson.teach(shape, ids_S, short, tmp_path / "killed.pt", silent)
    again = lesson.teach(shape, ids_S, short, tmp_path / "killed.pt", silent)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name
    with pytest.raises(ConfigError, match="other settings"):
        lesson.teach(shape, ids_S, replace(short, learning_rate=1.0), tmp_path / "killed.pt", silent)


def _interrupt_at(step: int) -> Any:
    calls: list[int] = []

    def after_step(_model: Any) -> None:
        calls.append(len(calls))
        if len(calls) == step:
            raise KeyboardInterrupt

    return after_step


def test_paragraphs_of_prompts_are_of_no_other_use() -> None:
    texts = [f"paragraph {row}" for row in range(100)]
    parts = prose.split(texts, 30, 20)
    assert list(parts.held_out) == [0, 20, 40, 60, 80]
    assert (len(parts.taught), len(parts.drafted)) == (30, 20)
    assert len({*parts.taught, *parts.drafted, *parts.held_out}) == 55
    assert [prompt.id for prompt in parts.prompts(2)] == ["sherlock-0", "sherlock-20"]
    with pytest.raises(ConfigError, match="6 prompts asked for, 5 paragraphs"):
        parts.prompts(6)
    with pytest.raises(ConfigError, match=r"90 \+ 6 paragraphs asked for, the text has 95; ask for fewer"):
        prose.split(texts, 90, 6)


# ---- what was measured at full size ----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "results" / "hybrids.json").read_text("utf-8"))
    return found


def test_the_measurement_says_what_is_claimed(measured: dict[str, Any]) -> None:
    assert measured["settings"]["max_new_tokens"] >= 300
    assert [(pair["target"], pair["tap_stream"]) for pair in measured["pairs"]] == [
        (pair.target, pair.stream) for pair in PAIRS
    ]
    for pair in measured["pairs"]:
        served = pair["served"]
        assert served["num_prompts"] >= 20 and served["num_failures"] == 0
        assert served["num_identical"] + served["num_ties"] == served["num_prompts"]
        assert served["acceptance"]["pooled_acceptance_length"]["low"] > 1.5
        assert served["num_loops"] == 0
    assert measured["pairs"][0]["reference"]["num_failures"] > 0
    assert not any(run["is_dirty"] for run in measured["runs"])


def test_the_document_shows_the_measurement(measured: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "targets.md").read_text("utf-8")
    assert shown.written(text, measured) == text, "run python -m benchmarks.hybrids --write docs/targets.md"
