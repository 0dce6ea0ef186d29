"""The benchmark of the adaptive width, whole, on a tiny pair; and which steps it counts."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

import pytest

import blockdraft.engine.cost_probe as cost_probe
from blockdraft.engine.times import StepTimes
from blockdraft.engine.width import FixedWidth
from tiny_pair import TinyPair

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import adaptive, sources


def test_plain_fixed_and_adaptive_side_by_side(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cost_probe, "LIMIT_S", 0.1)
    (tmp_path / "gsm8k").mkdir()
    lines = [json.dumps({"question": f"a fox jumps {i} times?", "answer": ""}) for i in range(8)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(lines))
    words = ["adaptive", "--draft", tiny_pair.draft, "--target", tiny_pair.target, "--data", tmp_path]
    words += [
        "--work",
        tmp_path / "work",
        "--results",
        tmp_path / "results",
        "--threads",
        "1",
        "--max-new-tokens",
        "12",
    ]
    words += ["--batches", "1,2", "--widths", "3,5", "--sets", "gsm8k,copy", "--repeats", "1", "--limit", "4"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    assert adaptive.main() == 0
    result = json.loads((tmp_path / "results" / "adaptive.json").read_text())
    cells = {(cell["set"], cell["draft"], cell["batch"]): cell for cell in result["cells"]}
    assert set(cells) == {(s, d, b) for s in ("gsm8k", "copy") for d in ("own", "random") for b in (1, 2)}
    for cell in cells.values():
        assert set(cell["modes"]) == {"plain", "adaptive", "w3", "w5"}
        assert all(mode["num_texts_differ"] == 0 for mode in cell["modes"].values())
        assert cell["modes"]["plain"]["ratio"] == 1.0
        assert cell["modes"]["adaptive"]["policy"][0]["num_steps"] > 0
    first = (tmp_path / "results" / "adaptive.json").read_text()
    monkeypatch.setattr(adaptive, "_Bench", None)  # everything is on disk: nothing is run again
    assert adaptive.main() == 0
    assert (tmp_path / "results" / "adaptive.json").read_text() == first


def test_only_steps_of_the_whole_batch_count() -> None:
    watch = adaptive._Watch(FixedWidth(), 2)
    watch.record([None, None], [1, 1], [0, 3], StepTimes(score_s=0.5, num_rows=2))
    watch.record([None], [1], [0], StepTimes(score_s=0.5, num_rows=1))
    watch.record([None, None], [1, 1], [0, 0], StepTimes(score_s=0.5, num_rows=2, num_prefilled=3))
    assert (watch.num_tokens, watch.seconds, watch.num_steps) == (5, 0.5, 1)


# ---- sources ---------------------------------------------------------------------------------------------------------
def block(num_right: int, probabilities: list[float], match: list[int], num_matching: int) -> sources.Block:
    return sources.Block(num_right, probabilities, 50, match, num_matching)


def test_a_walk_pays_for_what_a_rule_scores_and_drafts() -> None:
    prices = sources.Prices("made up", a_pass=0.1, proposal=0.01, position=0.02)
    text = [block(2, [0.9, 0.8, 0.1], [], 0), *[block(0, [0.5, 0.5, 0.5], [7, 8], 1)] * 5]
    plain = sources.walk(text, partial(sources.fixed, 1), prices)
    assert (plain.tokens, plain.seconds) == (6.0, 6.0)
    wide = sources.walk(text, partial(sources.fixed, 4), prices)  # 3 tokens, then one each
    assert (wide.tokens, wide.seconds) == (6.0, pytest.approx(4 * (1 + 0.1 + 3 * 0.03)))
    known = sources.walk(text, sources.best_cut, prices)
    assert known.seconds == pytest.approx(4 * (1 + 0.1 + 3 * 0.01) + 2 * 0.02)
    looked_up = sources.walk(text, partial(sources.lookup, partial(sources.fixed, 4)), prices)
    assert looked_up.seconds == pytest.approx((1 + 0.1 + 3 * 0.03) + 2 * (1 + 2 * 0.02))  # 3 + 2 + 2: past the end
    curve = [0.0, 1.0, 0.0]  # the draft's own probability, as it is
    assert sources.cut(curve, 0.7, text[0]) == (2, 3, 2) and sources.cut(curve, 0.95, text[0]) == (0, 3, 0)


def test_the_curve_finds_what_the_probabilities_are_worth() -> None:
    source = random.Random(4)
    truth, texts = [-0.8, 0.7, 0.1], []
    for _ in range(3):
        text = []
        for _ in range(400):
            probabilities = [source.uniform(0.05, 0.98) for _ in range(3)]
            right = 0
            while right < 3 and source.random() < sources._predicted(truth, right, probabilities[right]):
                right += 1
            text.append(block(right, probabilities, [], 0))
        texts.append(text)
    assert sources.fit_curve(texts) == pytest.approx(truth, abs=0.25)
