"""The table of rollback errors: what it shows is in the result, and the result covers what the package runs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.config import PROVEN_RECURRENT_MODEL_TYPES, REFUSED_RECURRENT_MODEL_TYPES
from blockdraft.config.pairing import _RECURRENT_MODEL_TYPES
from blockdraft.targets.recurrent import Undo

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rollback, rows  # noqa: E402
from benchmarks.table import split  # noqa: E402

from tiny_hybrids import FLOAT32_ONLY, TRIED  # noqa: E402

LIMIT = 1e-5
WRAPPED = {"qwen3_5", "qwen3_5_moe", "qwen4_exp", "glm5_next"}  # the same text model inside a multimodal one


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "results" / "rollback.json").read_text("utf-8"))
    return read


def test_the_document_shows_the_result(found: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "targets.md").read_text("utf-8")
    assert rollback.written(text, found) == text, "run python -m benchmarks.rollback --write docs/targets.md"
    _, shown, _ = split(text, rollback.BEGIN, rollback.END)
    for entry in found["families"]:
        [line] = [line for line in shown.splitlines() if line.startswith(f"| {entry['family']} |")]
        wide = entry["float64"]
        first = "computes in float32" if wide is None else f"{wide['error']:.0e}"
        assert f"| {entry['rows']} | {entry['method']} | {first} | {entry['float32']['error']:.0e} |" in line


def test_every_family_stands_in_the_document_once(found: dict[str, Any]) -> None:
    standing, _, _ = rollback.block(found).partition("**Worst")
    for family in _RECURRENT_MODEL_TYPES | PROVEN_RECURRENT_MODEL_TYPES | REFUSED_RECURRENT_MODEL_TYPES:
        assert standing.count(f"`{family}`") == 1, family


def test_the_result_covers_every_family_that_runs(found: dict[str, Any]) -> None:
    measured = [entry["family"] for entry in found["families"]]
    assert measured == list(rollback.families())
    assert set(measured) >= PROVEN_RECURRENT_MODEL_TYPES - WRAPPED | set(TRIED)
    assert not set(found["others"]) & set(measured) and len(found["others"]) > 50
    assert set(found["refused"]) == REFUSED_RECURRENT_MODEL_TYPES
    assert found["settings"]["rounds"] == 200


def test_the_measured_differences_are_rounding(found: dict[str, Any]) -> None:
    for entry in found["families"]:
        if entry["float64"] is None:
            assert entry["family"] in FLOAT32_ONLY
        else:
            assert entry["float64"]["error"] <= LIMIT, entry["family"]
        assert entry["float32"]["error"] <= max(LIMIT, 4 * entry["float32"]["rounding"]), entry["family"]
    for family, seen in found["refused"].items():
        assert seen.get("error", 1.0) > 100 * LIMIT, family
    for family, seen in found["others"].items():
        assert seen["error"] <= LIMIT and seen["mistake"] > 100 * LIMIT, family


@pytest.mark.parametrize("family", ["llama, fused", "lfm2", "qwen3_next", "kimi_k3"])
def test_a_family_measured_anew(family: str, found: dict[str, Any]) -> None:
    [entry] = rollback.run([family], num_rounds=10)
    assert entry["float64"]["error"] <= LIMIT
    [before] = [one for one in found["families"] if one["family"] == family]
    assert entry["method"] == before["method"] and entry["rows"] == before["rows"]
    assert entry["reference"]["outcome"] == before["reference"]["outcome"]
    assert entry.keys() == before.keys()


def test_a_rollback_that_does_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Undo, "settle", lambda _undo: None)
    target, _ = rollback.families()["qwen3_next"](torch.float64)
    seen = rollback.measure(target, 10)
    assert seen["rounding"] <= LIMIT and seen["error"] > 100 * LIMIT


def test_another_number_in_the_document_is_found(found: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "targets.md").read_text("utf-8")
    changed = json.loads(json.dumps(found))
    changed["families"][3]["float32"]["error"] *= 3
    assert rollback.written(text, changed) != text


# ---- many rows in one pass -------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def timed() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((ROOT / "results" / "rows.json").read_text("utf-8"))
    return read


def test_the_document_shows_what_one_pass_saves(timed: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "targets.md").read_text("utf-8")
    assert rows.written(text, timed) == text, "run python -m benchmarks.rows --write docs/targets.md"
    _, shown, _ = split(text, rows.BEGIN, rows.END)
    for case in ("1 x 1", "4 x 1", "8 x 8"):
        [line] = [line for line in shown.splitlines() if line.startswith(f"| {case} |")]
        assert all(
            f"{shape['steps'][case]['times_faster']['estimate']:.2f} [" in line for shape in timed["shapes"].values()
        )


def test_a_pass_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small model: both ways run, and every case is there."""
    monkeypatch.setattr(rows, "_ALL_SHAPES", {"qwen3": {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2}})
    seen = rows.measured("qwen3", argparse.Namespace(device="cpu", width=3, context=10, repeats=2))
    assert seen["rows_part"] == "attention" and list(seen["steps"]) == [
        "1 x 1",
        "1 x 3",
        "4 x 1",
        "4 x 3",
        "8 x 1",
        "8 x 3",
    ]
    assert all(step[name]["estimate"] > 0 for step in seen["steps"].values() for name in step)
