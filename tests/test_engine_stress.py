"""The stress run, small: every text of a busy engine is that of a fresh run, and the run can tell when it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import stress  # noqa: E402


@pytest.mark.parametrize(("is_fused", "num_requests"), [(True, 60), (False, 25)])
def test_every_text_is_that_of_a_fresh_run(is_fused: bool, num_requests: int) -> None:
    found = stress.Stress(num_requests, seed=3, is_fused=is_fused, max_outstanding=16).run()
    assert found["verdict"] == "ok", found["faults"]
    assert sum(found["ends"].values()) == num_requests
    assert found["engine"]["num_prefix_hits"] >= 3 and found["engine"]["num_cached_prompt_tokens"] > 0
    assert found["num_texts_run_again_alone"] > 3 and len(found["process_bytes"]) == num_requests // 5


def _wrong_context(run: stress.Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept draft contexts come back one position late: texts stay right, proposals do not."""
    real = run.engine._prefixes.begin

    def begin(row: Any, running: Any) -> int:
        length = real(row, running)
        if length and row.draft_cache is not None:
            for store in row.draft_cache._stores:
                store.buffer_NKSA[:, :, 0] = store.buffer_NKSA[:, :, 1]
        return length

    monkeypatch.setattr(run.engine._prefixes, "begin", begin)


def _wrong_state(run: stress.Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied row of the target is one position off."""
    real = run.target.copy

    def copy(row: Any, length: int | None = None) -> Any:
        made = real(row, length)
        made.room[..., 0, :] = made.room[..., 1, :]
        return made

    monkeypatch.setattr(run.target, "copy", copy)


def _leak(run: stress.Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth row is forgotten."""
    real, count = run.target._target.free, [0]

    def free(row: Any) -> None:
        count[0] += 1
        if count[0] % 5:
            run.target.open.pop(id(row), None)
            real(row)

    monkeypatch.setattr(run.target, "free", free)


@pytest.mark.parametrize(
    ("fault", "words"), [(_wrong_context, "differs"), (_wrong_state, "differs"), (_leak, "never freed")]
)
def test_the_run_finds_a_fault(fault: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stress.Stress(40, seed=5, max_outstanding=16)
    fault(run, monkeypatch)
    found = run.run()
    assert any(words in text for text in found["faults"]), found["faults"]
