"""The measuring scripts of training, run whole on a tiny pair: they go on after a kill, numbers are right."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from blockdraft.config import TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.engine import Request, load
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.stats import RequestStats
from blockdraft.train.recipe import TargetRecipe
from engine_kit import random_draft
from tiny_pair import TinyPair
from train_kit import make_recipe

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import acceptance, common, evaluated, scaling, table, training, training_table, where  # noqa: E402

QUESTIONS = {
    "gsm8k/test.jsonl": [{"question": "2 + 2?", "answer": "4"}, {"question": "3 + 3?", "answer": "6"}],
    "mtbench/question.jsonl": [{"question_id": 81, "turns": ["Hello", "again"]}],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in QUESTIONS.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, words)])
    return script.main()


def options(pair: TinyPair, data: Path, out: Path) -> list[object]:
    named = {"--target": pair.target, "--data": data, "--work": out / "work", "--results": out / "results"}
    flat = [word for item in named.items() for word in item]
    return [*flat, "--threads", 1, "--max-new-tokens", 10]


def read(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / "results" / name).read_text())


def cut_in_half(work: Path) -> int:
    """Leave half of the lines of the one work file, and a torn one; returns how many records are left."""
    [file] = work.glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    kept = lines[: len(lines) // 2]
    file.write_text("".join(kept) + '{"prompt": "gs')
    return sum('"prompt"' in line for line in kept)


# ---- prompts ---------------------------------------------------------------------------------------------------------
def test_prompts_of_the_code_sets_and_of_the_file_of_chats(tmp_path: Path) -> None:
    (tmp_path / "mbpp").mkdir()
    tasks = [{"task_id": number, "prompt": f"task {number}"} for number in (2, 601, 700, 974, 975)]
    (tmp_path / "mbpp" / "sanitized-mbpp.json").write_text(json.dumps(tasks))
    (tmp_path / "humaneval").mkdir()
    stub = json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}).encode() + b"\n"
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(stub))
    mbpp = common.load_prompts(tmp_path, "mbpp", 10)
    assert [(p.id, p.text) for p in mbpp] == [("mbpp-2", "task 2"), ("mbpp-975", "task 975")]
    [stub] = common.load_prompts(tmp_path, "humaneval", 10)
    assert stub.set == "humaneval" and stub.text.endswith("```python\ndef f():\n\n```")
    chats = common.load_prompts(tmp_path, "chat", 1000)
    assert len(chats) == 100 and len({chat.text for chat in chats}) == 100 and chats[7].id == "chat-7"


@pytest.mark.parametrize(
    ("ids", "is_loop"),
    [
        ([1] * 64, True),
        ([1] * 63, False),
        ([*range(50), *[1, 2, 3] * 30], True),
        ([*range(50), *[1, 2, 3] * 30, 9], False),
        (list(range(200)), False),
        ([*range(33)] * 4, False),  # a period of 33 is too long
        ([*range(32)] * 4, True),
    ],
)
def test_a_text_loops_if_its_end_repeats(ids: list[int], is_loop: bool) -> None:
    assert common.loops(ids) is is_loop


# ---- served acceptance -----------------------------------------------------------------------------------------------
def test_acceptance_is_the_engine_s_and_a_killed_run_goes_on(
    tiny_pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*options(tiny_pair, data, tmp_path), "--draft", tiny_pair.draft, "--sets", "gsm8k,mtbench"]
    words += ["--widths", "5,3", "--max-rows", 2]
    assert run(monkeypatch, acceptance, *words) == 0
    whole = read(tmp_path, "acceptance.json")
    assert [(r["set"], r["sampling"], r["width"], r["num_prompts"]) for r in whole["rows"]] == [
        ("gsm8k", "greedy", 5, 2), ("mtbench", "greedy", 5, 1), ("gsm8k", "greedy", 3, 2), ("mtbench", "greedy", 3, 1),
        ("gsm8k", "sampled", 5, 2), ("mtbench", "sampled", 5, 1), ("gsm8k", "sampled", 3, 2),
        ("mtbench", "sampled", 3, 1),
    ]  # fmt: skip
    assert all(
        row.get("num_texts_as_at_first_width", row["num_prompts"]) == row["num_prompts"] for row in whole["rows"]
    )
    left = cut_in_half(tmp_path / "work")
    assert 0 < left < 12
    assert run(monkeypatch, acceptance, *words) == 0
    again = read(tmp_path, "acceptance.json")
    assert again["rows"] == whole["rows"] and len(again["runs"]) == 2

    engine = load(tiny_pair.draft, tiny_pair.target)
    prompts = [p for name in ("gsm8k", "mtbench") for p in common.load_prompts(data, name, 10)]
    ids = [
        engine.tokenizer.chat_ids([{"role": "user", "content": p.text}], add_generation_prompt=True) for p in prompts
    ]
    done = engine.run([Request(prompt_ids=i, max_new_tokens=10, width=3) for i in ids])
    row = next(r for r in again["rows"] if (r["set"], r["sampling"], r["width"]) == ("gsm8k", "greedy", 3))
    assert row["acceptance"]["num_steps"] == sum(completion.stats.num_steps for completion in done[:2])


def test_unknown_names_are_refused(tiny_pair: TinyPair, data: Path, tmp_path: Path, monkeypatch) -> None:
    words = [*options(tiny_pair, data, tmp_path), "--draft", tiny_pair.draft]
    for option, name in (("--sets", "arc"), ("--samplings", "beam")):
        with pytest.raises(ConfigError, match=f"{option} names '{name}'"):
            run(monkeypatch, acceptance, *words, option, name)


# ---- the evaluator's records -----------------------------------------------------------------------------------------
def test_where_the_loss_is_over_records_that_went_through_a_file(
    tiny_pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*options(tiny_pair, data, tmp_path), "--draft", tiny_pair.draft, "--width", 4, "--max-rows", 1]
    assert run(monkeypatch, where, *words) == 0
    whole = read(tmp_path, "where.json")
    found = whole["sets"]["gsm8k"]
    assert found["num_prompts"] == 2 and found["num_steps"] > 0 and found["num_steps_replayed_otherwise"] == 0
    for at in found["positions"]:
        assert at["reached"] == at["picked"] + at["missed"] + at["misranked"]
    failures = sum(sum(at["steps_by_rank"].values()) for at in found["ranks_where_the_walk_failed"])
    assert failures == sum(at["missed"] + at["misranked"] for at in found["positions"])
    cut_in_half(tmp_path / "work")
    assert run(monkeypatch, where, *words) == 0
    assert read(tmp_path, "where.json")["sets"] == whole["sets"]


def test_rank_bins_name_what_they_hold() -> None:
    labels = evaluated._rank_labels()
    assert labels == ["0", "1", "2-3", "4-7", "8-15", "16-63", "64-255", "256-1023", "1024-"]
    assert [labels[evaluated._rank_bin(rank)] for rank in (0, 1, 2, 3, 4, 15, 16, 1023, 1024, 40000)] == [
        "0", "1", "2-3", "2-3", "4-7", "8-15", "16-63", "256-1023", "1024-", "1024-",
    ]  # fmt: skip


# ---- scaling ---------------------------------------------------------------------------------------------------------
def state_of(draft: DraftModel, step: int, *, num_steps: int = 20) -> dict[str, Any]:
    return {
        "step": step,
        "num_blocks_seen": 10 * step,
        "model": draft.state_dict(),
        "recipe": {"optim": {"num_steps": num_steps}},
        "config": zlab.config_to_dict(draft.config, dtype="float32"),
    }


@pytest.fixture
def runs(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """Two runs of the tiny target's shape: `a` with two kept states and a last one, `b` with a last one."""
    config = zlab.read(tiny_pair.draft).config
    for name, steps in (("a", (5, 10, 12)), ("b", (12,))):
        (tmp_path / name / "kept").mkdir(parents=True)
        for step in steps:
            state = state_of(random_draft(config, seed=step + ord(name), dtype=torch.float32), step)
            is_last = step == steps[-1]
            torch.save(state, tmp_path / name / ("state.pt" if is_last else f"kept/state-{step:07d}.pt"))
    return tmp_path


def test_states_along_a_run_are_measured_on_the_same_prompts(
    tiny_pair: TinyPair, data: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["measure", *options(tiny_pair, data, runs), "--width", 5]
    words += ["--run", f"a={runs / 'a'}", "--run", f"b={runs / 'b'}", "--run", f"out={tiny_pair.draft}"]
    assert run(monkeypatch, scaling, *words, "--against", "b=a") == 0
    result = read(runs, "scaling.json")
    assert [(p["run"], p["step"], p["blocks"], p["proposals_trained"]) for p in result["points"]] == [
        ("a", 5, 50, 200), ("a", 10, 100, 400), ("a", 12, 120, 480), ("b", 12, 120, 480), ("out", 0, None, None),
    ]  # fmt: skip
    [difference] = result["differences"]
    assert difference["first"].startswith("b@12.") and difference["second"].startswith("a@12.")
    lengths = {
        p["run"]: p["sets"]["gsm8k"]["acceptance_length"]["estimate"] for p in result["points"] if p["step"] == 12
    }
    assert difference["sets"]["gsm8k"]["estimate"] == pytest.approx(lengths["a"] - lengths["b"])
    cut_in_half(runs / "work")
    assert run(monkeypatch, scaling, *words, "--against", "b=a") == 0
    assert read(runs, "scaling.json")["points"] == result["points"]
    assert "| a | DFlash 2 | 12 | 480 |" in training_table.block(runs / "results")
    with pytest.raises(ConfigError, match="'c', which no --run does"):
        run(monkeypatch, scaling, *words, "--against", "b=c")


def test_states_that_are_none_are_named(runs: Path) -> None:
    with pytest.raises(CheckpointError, match="no state of a run in it"):
        scaling.points_of("x", runs / "nowhere")
    (runs / "b" / "state.pt").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        scaling.points_of("b", runs / "b")
    torch.save({"step": 1}, runs / "b" / "state.pt")
    with pytest.raises(CheckpointError, match="no state of a run, step, model"):
        scaling.points_of("b", runs / "b")


def test_states_are_kept_as_a_run_passes_them(tiny_pair: TinyPair, tmp_path: Path) -> None:
    draft = random_draft(zlab.read(tiny_pair.draft).config, dtype=torch.float32)
    kept = []
    for step in (3, 5, 7, 12, 20):
        torch.save(state_of(draft, step), tmp_path / "state.pt")
        is_last = scaling.keep_state(tmp_path, 5)
        kept.append([int(path.stem[-7:]) for path in sorted((tmp_path / "kept").glob("*.pt"))])
        assert is_last == (step == 20)
    assert kept == [[], [5], [5], [5, 12], [5, 12, 20]]
    assert [p.step for p in scaling.points_of("a", tmp_path)] == [5, 12, 20]
    assert scaling.keep_state(tmp_path, 5) is True  # again: nothing twice
    assert len(list((tmp_path / "kept").iterdir())) == 3


# ---- what a step costs -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny recipe that brings the facts of its target."""
    facts = TargetFacts(
        model_type="llama",
        vocab_size=64,
        hidden_size=32,
        num_layers=4,
        max_length=512,
        is_recurrent=False,
        eos_token_ids=(2,),
        pad_token_id=None,
    )
    recipe = replace(make_recipe(draft={"mask_token_id": 63}), target=TargetRecipe(name="not/here", facts=facts))
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(recipe.to_toml())
    return path


def spec_of(recipe: Path, **changes: Any) -> dict[str, Any]:
    return {"recipe": str(recipe), "changes": [], "corpus": None, "threads": 1, "steps": 2, **changes}


def test_a_step_is_timed_and_its_shape_is_said(recipe_file: Path) -> None:
    found = training.run_one(spec_of(recipe_file))
    assert (found["num_blocks"], found["num_slots"], found["vocab_size"]) == (16, 64, 64)
    assert found["blocks_per_s"] == pytest.approx(16 / found["step_s"])
    assert found["peak_bytes"] > 50 * 2**20 and found["num_tokens"] == 2 * 128
    grown = {"vocab_size": 2, "max_length": 2, "blocks_per_sequence": 3}
    found = training.run_one(spec_of(recipe_file, grown=grown, whole_head=True))
    assert (found["num_blocks"], found["vocab_size"], found["num_tokens"], found["head_rows"]) == (48, 128, 512, 128)


def test_every_part_of_a_step_has_its_time_and_together_they_are_the_step(recipe_file: Path) -> None:
    found = training.run_one(spec_of(recipe_file, profile=True))
    parts = found["parts"]
    assert set(parts) == {
        "data and anchors",
        "context: fuse, keys and values",
        "block layers",
        "attention",
        "head and its gradient",
        "selector",
        "optimiser",
        "other",
    }
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)
    assert all(part["seconds"] > 0 for part in parts.values())


def event(name: str, start: float, end: float, *, sequence_nr: int = -1, scope: int = 0) -> SimpleNamespace:
    span = SimpleNamespace(start=start * 1e6, end=end * 1e6)
    return SimpleNamespace(name=name, time_range=span, sequence_nr=sequence_nr, scope=scope, thread=1)


def test_time_goes_to_the_innermost_part_and_backward_to_the_part_of_its_forward() -> None:
    node = "autograd::engine::evaluate_function: "
    found = training.by_part(
        [
            event("part:other", 0, 100),
            event("part:block layers", 10, 40),
            event("aten::mm", 12, 14, sequence_nr=7),
            event("part:attention", 20, 30),
            event("aten::mm", 21, 29, sequence_nr=8),
            event(f"{node}MmBackward0", 60, 66, sequence_nr=8, scope=1),
            event("aten::mm", 61, 65, sequence_nr=8, scope=1),
            event(f"{node}MmBackward0", 70, 71, sequence_nr=7, scope=1),
            event(f"{node}torch::autograd::AccumulateGrad", 72, 75, scope=1),
            event("part:optimiser", 90, 95),
        ]
    )
    assert found == pytest.approx({"other": 55, "block layers": 21, "attention": 16, "optimiser": 8})
    assert sum(found.values()) == pytest.approx(100)


def test_what_two_factors_take_together_is_beyond_the_sum_of_each() -> None:
    def point(vocab: int, length: int, blocks: int) -> dict[str, Any]:
        grown = {"vocab_size": vocab, "max_length": length, "blocks_per_sequence": blocks}
        rows, tokens, slots = 1000 * vocab, 50 * length, 80 * blocks
        # A step that holds a float for every row, token and slot, and one for each pair of row and slot.
        taken = 4 * (rows + tokens + slots + rows * slots)
        shape = {"vocab_size": rows, "num_tokens": tokens, "num_slots": slots}
        return {"grown": grown, **shape, "step_bytes": taken, "step_s": 1.0 + rows / 1e3}

    points = [point(a, b, c) for a in (1, 2) for b in (1, 2) for c in (1, 2)]
    flat, grows = (training._together(points, name) for name in ("max_length", "blocks_per_sequence"))
    assert flat["bytes_beyond_the_sum"] == 0 and flat["bytes_of_one_float_each"] == 1000 * 50 * 4
    assert grows["bytes_beyond_the_sum"] == grows["bytes_of_one_float_each"] == 1000 * 80 * 4
    assert flat["seconds_beyond_the_sum"] == pytest.approx(0)


def test_the_stages_are_kept_and_shown(recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the measurements themselves in this process instead of their own."""
    monkeypatch.setattr(training, "_in_process", training.run_one)
    words = [recipe_file, "--threads", 1, "--steps", 1, "--results", tmp_path / "results"]
    assert run(monkeypatch, training, *words) == 0
    result = read(tmp_path, "training.json")
    assert list(result["stages"]) == ["throughput", "profile", "growth"]
    assert len(result["stages"]["growth"]["points"]) == 8 and "growth_so_far" not in result
    assert str(recipe_file.parent) not in json.dumps(result)
    monkeypatch.setattr(training, "_in_process", pytest.fail)
    assert run(monkeypatch, training, *words) == 0  # all there: nothing is measured again
    text = training_table.block(tmp_path / "results")
    assert "**A training step of `tiny.toml`**" in text and "| positions of the sequences | " in text


# ---- tables ----------------------------------------------------------------------------------------------------------
def test_the_tables_of_acceptance_and_of_where_it_is_lost(
    tiny_pair: TinyPair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*options(tiny_pair, data, tmp_path), "--draft", tiny_pair.draft]
    assert run(monkeypatch, acceptance, *words, "--sets", "gsm8k,mtbench", "--widths", 5) == 0
    assert run(monkeypatch, where, *words, "--width", 4) == 0
    readme = tmp_path / "README.md"
    marks = [table.BEGIN, table.END, training_table.BEGIN, training_table.END]
    readme.write_text("a\n{}\n{}\nb\n{}\n{}\nc\n".format(*marks))
    results = ("--results", tmp_path / "results")
    assert run(monkeypatch, table, *results, "--check", readme) == 1
    assert run(monkeypatch, table, *results, "--write", readme) == 0
    assert run(monkeypatch, table, *results, "--check", readme) == 0
    text = readme.read_text()
    assert "width 5, T=1, top-p 0.95" in text and "greedy where nothing else is said." in text
    assert "| GSM8K test | not in the list | " in text and "Where acceptance is lost, width 4, greedy" in text
    readme.write_text(text.replace("MT-Bench", "MT-Bank"))
    assert run(monkeypatch, table, *results, "--check", readme) == 1


def test_a_length_of_the_table_is_the_hand_computed_one(tmp_path: Path) -> None:
    stats = RequestStats()
    stats.add_prefill(seconds=1.0)
    for accepted in (3, 0):
        stats.add_step(num_draft=4, num_accepted=accepted, num_emitted=accepted + 1)
    record = {"ids": [1, 2, 3], "finish": "length", "stats": stats.to_json()}
    work = common.Work(settings={"draft": {"name": "d"}, "target": {"name": "t"}, "sampling": {"greedy": {}}})
    prompts = [common.Prompt("gsm8k-0", "")]
    work.records["gsm8k-0", "greedy.w5"] = record
    row = acceptance.summary(work, prompts, ["greedy"], [5])["rows"][0]
    assert row["acceptance"]["pooled_acceptance_length"]["estimate"] == pytest.approx(1 + 3 / 2)
    assert row["acceptance"]["conditional_acceptance_by_position"] == pytest.approx([0.5, 1.0, 1.0, 0.0])
    assert (row["num_texts_as_at_first_width"], row["num_loops"]) == (1, 0)
