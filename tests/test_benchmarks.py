"""The measuring scripts: work files survive kills, ties are judged, numbers are the hand-computed ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from blockdraft.errors import ConfigError
from blockdraft.stats import RequestStats
from engine_kit import bigram_model

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import common, lossless, session, table, worth_it  # noqa: E402

SETTINGS = {"draft": {"name": "d"}, "target": {"name": "t"}, "dtype": "float32", "threads": 1}


def opened(path: Path, **changes: object) -> common.Work:
    return common.Work.open(path, {**SETTINGS, **changes}, {"commit": "c", "is_dirty": False})


# ---- work files ----------------------------------------------------------------------------------------------------
def test_a_torn_last_line_is_cut_off_and_the_rest_resumes(tmp_path: Path) -> None:
    file = tmp_path / "work" / "x.jsonl"
    first = opened(file)
    first.append("gsm8k-0", "plain", {"ids": [1]})
    first.append("gsm8k-0", "w8", {"ids": [2]})
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"prompt": "gsm8k-1", "mo')
    again = opened(file)
    assert file.read_bytes() == whole
    assert list(again.records) == [("gsm8k-0", "plain"), ("gsm8k-0", "w8")]
    again.append("gsm8k-1", "plain", {"ids": [3]})
    last = opened(file)
    assert last.records["gsm8k-1", "plain"]["ids"] == [3]
    assert len(last.runs) == 2  # one entry per process that wrote


def test_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    opened(file).append("gsm8k-0", "plain", {"ids": [1]})
    with pytest.raises(ConfigError, match="another dtype"):
        opened(file, dtype="bfloat16")
    file.write_bytes(b"nonsense\n" + file.read_bytes())
    with pytest.raises(ConfigError, match="line 1"):
        opened(file)


def test_parts_merge_to_the_whole(tmp_path: Path) -> None:
    prompts = [common.Prompt(f"gsm8k-{i}", "") for i in range(5)]
    for i in (1, 2):
        work = opened(tmp_path / f"part-{i}.jsonl")
        for prompt in common.part_of(prompts, (i, 2)):
            work.append(prompt.id, "plain", {"ids": [i]})
    merged = common.merge(tmp_path.glob("part-*.jsonl"))
    merged.require((prompt.id, "plain") for prompt in prompts)
    assert len(merged.records) == 5 and len(merged.runs) == 2
    with pytest.raises(ConfigError, match="1 of 1 records are missing"):
        merged.require([("gsm8k-5", "plain")])
    opened(tmp_path / "part-3.jsonl").append("gsm8k-4", "plain", {"ids": [9]})
    with pytest.raises(ConfigError, match=r"part-3\.jsonl.*another work file"):
        common.merge(tmp_path.glob("part-*.jsonl"))


def test_prompts_of_a_folder(tmp_path: Path) -> None:
    for name, row in {
        "gsm8k/test.jsonl": {"question": "2 + 2?", "answer": "4"},
        "mtbench/question.jsonl": {"question_id": 81, "turns": ["Hello", "again"]},
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    [gsm8k], [mtbench] = (common.load_prompts(tmp_path, name, 10) for name in ("gsm8k", "mtbench"))
    assert gsm8k.text.startswith("2 + 2?\nPlease") and gsm8k.text.endswith("\\boxed{}.")
    assert (mtbench.id, mtbench.set, mtbench.text) == ("mtbench-81", "mtbench", "Hello")
    with pytest.raises(ConfigError, match="--data"):
        common.load_prompts(tmp_path / "no", "gsm8k", 1)


# ---- the judge -----------------------------------------------------------------------------------------------------
def near_tie(gap: float):
    """After token 3 a target wants 4 and, weaker by a relative `gap`, 5; token 6 is far behind."""
    model = bigram_model(lambda token: token + 1 if token < 31 else 0)
    with torch.no_grad():
        model.lm_head.weight[5] += model.lm_head.weight[4] * (1 - gap)
    return model


@pytest.mark.parametrize(
    ("gap", "tokens", "is_tie"),
    [
        (1e-7, (4, 5), True),
        (1e-7, (5, 4), True),
        (1e-2, (4, 5), False),  # top two, but not close
        (1e-7, (4, 6), False),  # close, but 6 is not one of the two
    ],
)
def test_a_tie_is_two_close_tokens_that_are_the_top_two(gap: float, tokens: tuple[int, int], is_tie: bool) -> None:
    verdict = lossless.judge(near_tie(gap), [1, 2, 3], *tokens)
    assert verdict.is_tie(lossless.TIE_MARGIN) is is_tie
    assert (verdict.margin < lossless.TIE_MARGIN) is (gap == 1e-7)
    assert verdict.are_top_two is (set(tokens) == {4, 5})


def test_outcomes_of_comparisons() -> None:
    def record(*ids: int, finish: str = "stop") -> dict[str, object]:
        return {"prompt": "gsm8k-0", "prompt_ids": [1, 2], "ids": list(ids), "finish": finish}

    def compare(other: dict[str, object], gap: float = 1e-7) -> dict[str, object]:
        return lossless.compare(record(3, 4, 31), other, lambda: near_tie(gap))

    assert compare(record(3, 4, 31)) == {"prompt": "gsm8k-0", "outcome": "identical", "num_compared": 3}
    assert compare(record(3, 4, 31, finish="length"))["outcome"] == "failure"
    assert compare(record(3, 4)) == {
        "prompt": "gsm8k-0",
        "outcome": "failure",
        "num_compared": 3,
        "position": 2,
    }
    tie = compare(record(3, 5, 9))
    assert (tie["outcome"], tie["position"], tie["num_compared"]) == ("tie", 1, 2)
    assert compare(record(3, 5, 9), gap=1e-2)["outcome"] == "failure"
    assert compare(record(3, 6))["outcome"] == "failure"


# ---- numbers -------------------------------------------------------------------------------------------------------
def run(accepted: list[int], *, draft: int, seconds: float, prefill: float = 2.0) -> dict[str, object]:
    stats = RequestStats()
    stats.add_prefill(seconds=prefill)
    for count in accepted:
        stats.add_step(num_draft=draft, num_accepted=count, num_emitted=count + 1, seconds=seconds / len(accepted))
    return {"stats": stats.to_json(), "finish": "length", "is_plain_text": True}


def test_speed_numbers_are_the_hand_computed_ones() -> None:
    plain = [run([0] * 10, draft=0, seconds=s) for s in (10.0, 10.0, 40.0)]  # 1 token a second, one outlier
    fast = [run([1] * 5, draft=3, seconds=s) for s in (5.0, 5.0, 5.0)]  # twice as fast
    slow = [run([1] * 5, draft=3, seconds=12.5)] * 3  # 0.8 of plain
    slow[0] = {**slow[0], "is_plain_text": False}
    found = worth_it.speed_summary([{"plain": plain, "w4": fast}, {"plain": plain, "w4": slow}])
    mode = found["w4"]
    assert found["plain"]["decode_tok_per_s_by_prompt"] == pytest.approx([1.0, 1.0])
    assert found["plain"]["repeat_spread"] == pytest.approx(3.0)
    assert mode["median_ratio"]["estimate"] == pytest.approx((2.0 + 0.8) / 2)
    assert (mode["median_ratio"]["low"], mode["median_ratio"]["high"]) == pytest.approx((0.8, 2.0))
    assert mode["median_ratio_with_prefill"]["estimate"] == pytest.approx((12 / 7 + 12 / 14.5) / 2)
    assert mode["total_ratio"] == pytest.approx((60 / 52.5) / (60 / 120))
    assert mode["ms_per_step"] == pytest.approx(1e3 * 52.5 / 30)
    assert mode["break_even_acceptance_length"] == pytest.approx((52.5 / 30) / (120 / 60))
    assert mode["pooled_acceptance_length"] == 2.0
    assert (mode["num_prompts_text_differs"], mode["num_prompts_faster"]) == (1, 1)


def test_acceptance_numbers_are_the_hand_computed_ones() -> None:
    records = [run([3, 0], draft=3, seconds=1.0), run([1, 2, 0, 0], draft=3, seconds=1.0)]
    found = common.acceptance_summary(records)
    assert found["pooled_acceptance_length"]["estimate"] == pytest.approx(1 + 6 / 6)
    assert found["committed_acceptance_length"] == pytest.approx((5 + 7) / 6)
    assert found["mean_acceptance_length"] == pytest.approx((2.5 + 1.75) / 2)
    assert found["survival_by_position"] == pytest.approx([3 / 6, 2 / 6, 1 / 6])
    assert found["conditional_acceptance_by_position"] == pytest.approx([3 / 6, 2 / 3, 1 / 2])
    assert (found["mean_output_tokens"], found["finish_reasons"]) == (7.0, {"length": 2})


def test_the_interval_of_a_median() -> None:
    # Of three values, 7 of 27 resamplings have the smallest as median: far above 2.5 %.
    assert common.median_interval([3.0, 1.0, 2.0]) == {"estimate": 2.0, "low": 1.0, "high": 3.0, "level": 0.95}
    assert common.median_interval([1.5])["low"] is None


def test_every_mode_goes_first_in_turn() -> None:
    assert [worth_it.rotated("abc", by)[0] for by in range(4)] == list("abca")
    assert sorted(worth_it.rotated("abc", 2)) == list("abc")


# ---- the table -----------------------------------------------------------------------------------------------------
def write_results(folder: Path) -> None:
    machine = {"cpu": "a CPU", "gpu": "none used", "cores": 2, "ram_gib": 8.0, "os": "Linux 6"}
    versions = {"python": "3.11", "torch": "2", "transformers": "5"}
    facts = {"commit": "0123456789abcdef", "is_dirty": True, "date_utc": "2026-01-02 03:04"}
    common_part = {
        "settings": {**SETTINGS, "device": "cpu", "max_new_tokens": 256},
        "runs": [{**facts, "machine": machine, "versions": versions}],
    }
    runs = [run([0] * 4, draft=0, seconds=4.0)]
    drafted = [run([1, 1], draft=3, seconds=4.0)]
    comparison = {"set": "gsm8k", "width": 4, "num_prompts": 1, "num_identical": 1, "num_ties": 0}
    comparison |= {"num_failures": 0, "num_tokens_compared": 1234}
    comparison["acceptance"] = acceptance = common.acceptance_summary(drafted)
    speed = {**common_part, "set": "gsm8k", "modes": worth_it.speed_summary([{"plain": runs, "w4": drafted}])}
    common.write_json(folder / "lossless.json", {**common_part, "comparisons": [comparison]})
    result = {"pair": {name: SETTINGS[name] for name in ("draft", "target")}}
    result["acceptance"] = {"float32": {**common_part, "set": "gsm8k", "widths": {"4": acceptance}}}
    common.write_json(folder / "worth_it.json", {**result, "speed": {"float32": speed}})


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["table", *map(str, words)])
    return table.main()


def test_the_table_is_written_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n")
    options = ("--results", tmp_path)
    assert call(monkeypatch, *options, "--check", readme) == 1
    assert call(monkeypatch, *options, "--write", readme) == 0
    assert call(monkeypatch, *options, "--check", readme) == 0
    text = readme.read_text()
    assert text.startswith("above\n") and text.endswith(f"{table.END}\nbelow\n")
    assert "| GSM8K test | 4 | 1 of 1 | 0 | 0 | 1,234 | 2.00 |" in text
    assert "| width 4 | 1.0 | 2000.0 | 2.00 | 2.00 | 1.00 | 1.00 | 1.00 | 0 |" in text
    assert "commit 0123456789+" in text
    readme.write_text(text.replace("1,234", "1,235"))
    assert call(monkeypatch, *options, "--check", readme) == 1
    readme.write_text("no marks")
    with pytest.raises(ConfigError, match="results:begin"):
        call(monkeypatch, *options, "--check", readme)


def test_results_of_different_pairs_are_not_shown_together(tmp_path: Path) -> None:
    write_results(tmp_path)
    other = json.loads((tmp_path / "worth_it.json").read_text())
    other["pair"]["draft"]["name"] = "another"
    common.write_json(tmp_path / "worth_it.json", other)
    with pytest.raises(ConfigError, match="different pairs"):
        table.block(tmp_path)
    assert [path.name for path in tmp_path.glob(".*")] == []  # no temporary file is left


def test_the_readme_shows_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    readme = ROOT / "README.md"
    if not readme.is_file() or table.BEGIN not in readme.read_text("utf-8"):
        pytest.skip("the README has no marks for results")
    assert call(monkeypatch, "--check", readme) == 0


def test_facts_of_a_run_hold_no_path() -> None:
    options = session.parser("").parse_args(["--data", "x"])
    text = json.dumps(session.run_facts(options))
    assert str(ROOT) not in text and str(Path.home()) not in text
    assert {"commit", "is_dirty", "date_utc", "machine", "versions"} <= set(json.loads(text))
