"""Predicted speed-ups by hand, their error beside what was measured, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from blockdraft.bench.journal import Journal
from blockdraft.bench.predict import Acceptance, MeasuredSteps, acceptances, gains, prediction_table
from blockdraft.bench.record import RequestRecord
from blockdraft.engine.costs import CostModel
from blockdraft.errors import RequestError
from test_bench_record import record
from tiny_pair import TinyPair, run_cli

# 10 ms for a position, 1 ms for each further one, 2 ms for a draft's pass, 0.5 ms for a proposal.
MODEL = CostModel(
    knots=((1, 0.010), (101, 0.110)),
    score_row_s=0.0,
    context_s=0.0,
    other_s=0.0,
    other_row_s=0.0,
    other_position_s=0.0,
    draft_pass_s=0.002,
    draft_row_s=0.0,
    draft_position_s=0.0005,
    inject_s=0.0,
    inject_position_s=0.0,
    error=0.1,
)


def test_gains_by_hand() -> None:
    found = Acceptance("x", (0.5, 0.25), context=0.0)
    one, two, three = gains(found, MeasuredSteps(MODEL), 1)
    assert (one.speed_up, one.step_s) == (1.0, pytest.approx(0.010))
    assert two.step_s == pytest.approx(0.011 + 0.0025) and two.speed_up == pytest.approx(1.5 * 0.010 / 0.0135)
    assert three.step_s == pytest.approx(0.012 + 0.003) and three.speed_up == pytest.approx(1.75 * 0.010 / 0.015)
    four = gains(found, MeasuredSteps(MODEL), 4)[2]
    assert four.step_s == pytest.approx(0.021 + 0.002 + 0.004) and four.speed_up == pytest.approx(1.75 * 0.013 / 0.027)


def run_records() -> list[RequestRecord]:
    """Width 3, speculation twice as fast as plain; survivals 3/4 and 2/4."""
    on = [
        replace(record([(2, 2), (2, 1)], prompt=f"p{i}", width=3), total_s=0.25 + 0.5 + 0.01 * i, num_prompt_tokens=30)
        for i in range(3)
    ]
    on += [replace(record([(2, 2), (2, 0)], prompt=f"q{i}", width=3), total_s=0.25 + 0.4) for i in range(3)]
    on = [replace(r, counts=replace(r.counts, max_draft_tokens=2)) for r in on]
    plain = {"speculation": False, "width": None}
    off = [
        replace(record([(0, 0)] * (r.counts.num_emitted_tokens - 1), prompt=r.prompt_id, **plain), total_s=0.25 + 2 * t)
        for r in on
        for t in [r.total_s - 0.25]
    ]
    return [*on, *off]


def test_the_prediction_stands_beside_the_measurement() -> None:
    [found] = acceptances(run_records())
    assert found.survival == pytest.approx((3 / 4, 2 / 4)) and found.length(3) == pytest.approx(2.25)
    table = prediction_table([found], MeasuredSteps(MODEL), [1, 2], notes=())
    assert [(row["load"], row["what"]) for row in table.rows] == [
        ("1 in flight", "best"),
        ("1 in flight", "measured"),
        ("2 in flight", "best"),
    ]
    row = table.rows[1]
    assert row["measured"].estimate == pytest.approx(2.0)  # type: ignore[union-attr]
    assert row["speed_up"] == pytest.approx(2.25 * 0.010 / 0.015)
    assert row["error"] == pytest.approx(2.25 * 0.010 / 0.015 / 2.0 - 1)
    with pytest.raises(RequestError, match="speculation on"):
        acceptances([r for r in run_records() if not r.speculation])


def test_the_command(tiny_pair: TinyPair, tmp_path: Path) -> None:
    words = [*tiny_pair.arguments, "--dtype", "float32", "--out", tmp_path, "--concurrency", "1,2", "--json"]
    ran = run_cli("bench", "--predict", "0.9,0.8,0.7,0.6", *words, "--context", "64")
    assert ran.code == 0, ran.err
    [table] = json.loads(ran.out)["tables"]
    assert [row["load"] for row in table["rows"]] == ["1 in flight", "2 in flight"]
    for row in table["rows"]:
        assert row["speed_up"] > 0.0 and row["plain"] > 0.0
    settings = {"table": "speed", "system": {}, "workloads": [], "left_out": [], "command": "x"}
    with Journal(tmp_path / "run.jsonl", settings, {}) as journal:
        for one in run_records():
            journal.append(one)
    ran = run_cli("bench", "--predict", tmp_path / "run.jsonl", *words)
    assert ran.code == 0, ran.err
    assert "measured" in [row["what"] for row in json.loads(ran.out)["tables"][0]["rows"]]


def test_rooflines_of_named_gpus(tiny_pair: TinyPair, tmp_path: Path) -> None:
    words = [*tiny_pair.arguments, "--out", tmp_path, "--gpus", "1xH200", "--concurrency", "1,64", "--context", "128"]
    ran = run_cli("bench", "--predict", "3.4", *words, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert [row["load"] for row in document["tables"][0]["rows"]] == ["1 in flight", "64 in flight"]
    assert any("roofline" in note for note in document["tables"][0]["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "missing.jsonl"], "no such journal"),
        (["--predict", "3", "--gpus", "8xH200"], "--target"),
        (["--gpus", "8xH200"], "--predict"),
        (["--predict", "3", "--report", "x"], "one of them"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], message: str) -> None:
    assert message in run_cli("bench", *words).refusal
