"""The one call behind `blockdraft train`: a saved target, a corpus and a recipe in, a drafter out."""

from __future__ import annotations

import gc
import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

from blockdraft.errors import CheckpointError, ConfigError, PairError
from blockdraft.formats import zlab
from blockdraft.targets import HFTarget, load_target
from blockdraft.train.borrowed import check_target_wrote, frozen_head
from blockdraft.train.command import run_training
from blockdraft.train.corpus import Corpus
from blockdraft.train.loop import Trainer
from blockdraft.train.state import read_lines
from engine_kit import bigram_model, tiny_model
from tiny_pair import run_cli
from train_kit import TAPS, head_of, make_corpus, make_recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with target/, corpus/ and recipe.toml that fit each other."""
    root = tmp_path_factory.mktemp("place")
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 2.0, 32))
    model.save_pretrained(root / "target")
    make_corpus(root / "corpus", model, [[1, 2, 3], [4, 5]], 16)
    (root / "recipe.toml").write_text(make_recipe(optim={"num_steps": 25}).to_toml())
    return root


def run(place: Path, out: Path, **options):
    named = {"source": "recipe.toml", "corpus": "corpus", "target": "target", "has_gates": False, **options}
    paths = {k: place / v if isinstance(v, str) and k not in ("commit", "tracker") else v for k, v in named.items()}
    return run_training(out=out, **paths)


def test_a_run_in_two_calls_gives_a_drafter_and_its_record(place: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = run(place, tmp_path, stop_after=10, on_progress=lines.append)
    assert (first.step, first.num_steps, first.draft) == (10, 25, None)
    second = run(place, tmp_path, on_progress=lines.append, commit="abc")
    assert (second.step, second.draft) == (25, tmp_path / "draft")
    assert lines[0] == "corpus: 2 sequences, 32 tokens written by tiny"
    assert (tmp_path / "draft" / "README.md").is_file()
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 1/25", "step 11/25", "step 20/25", "step 25/25",
    ]  # fmt: skip
    assert "going on from step 10" in lines
    assert all("\n" not in line for line in lines)
    record = json.loads((tmp_path / "draft" / "run.json").read_text())
    assert (record["steps"], record["blocks"], record["sequences"]) == (25, 25 * 16, 2)
    assert (record["answer_tokens"], record["target"], record["commit"]) == (32, "tiny", "abc")
    assert record["seconds"]["training_s"] >= record["seconds"]["steps"] > 0
    assert (record["exported_step"], record["evaluation"], record["corpus"]) == (25, None, None)
    assert record["versions"]["torch"] == torch.__version__
    assert zlab.read(tmp_path / "draft").config.block_size == 5
    again = run(place, tmp_path)
    assert again.draft == tmp_path / "draft"


def test_gates_run_before_the_first_step_and_not_before_a_later_call(place: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    run(place, tmp_path, has_gates=True, stop_after=1, on_progress=lines.append)
    assert lines[0].startswith("gates: 6 passed in ")
    lines.clear()
    run(place, tmp_path, has_gates=True, stop_after=2, on_progress=lines.append)
    assert not any(line.startswith("gates") for line in lines)


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_borrowed_is_the_targets_own(tmp_path: Path, is_tied: bool) -> None:
    model = tiny_model(dtype=torch.float32)
    if is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = is_tied
    model.save_pretrained(tmp_path)
    head = frozen_head(load_target(tmp_path, dtype=torch.float32), final_norm_E=None)
    expected = head_of(model)
    assert torch.equal(head.embed_VE, expected.embed_VE)
    assert torch.equal(head.head_VE, expected.head_VE)
    assert (head.head_VE is head.embed_VE) == is_tied
    assert torch.equal(head.final_norm_E, torch.ones(32))


def test_the_final_norm_is_read_from_the_targets_files(place: Path) -> None:
    from blockdraft.train.borrowed import _final_norm

    facts = HFTarget(tiny_model()).facts
    assert torch.equal(_final_norm(place / "target", facts), torch.linspace(0.5, 2.0, 32))


def test_another_targets_corpus_is_refused(place: Path, tmp_path: Path) -> None:
    corpus = Corpus(place / "corpus", max_length=128)
    check_target_wrote(load_target(place / "target", tap_layer_ids=TAPS, dtype=torch.bfloat16), corpus)
    with pytest.raises(PairError, match=r"written by tiny, and its tap of layer \d is off by"):
        check_target_wrote(HFTarget(tiny_model(seed=1, dtype=torch.float32), TAPS), corpus)
    bigram_model(lambda token: token, dtype=torch.float32).save_pretrained(tmp_path / "target")
    with pytest.raises(PairError, match="name the target that wrote it"):
        run(place, tmp_path / "out", target=tmp_path / "target")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"source": "none.toml"}, ConfigError, "no such recipe"),
        ({"corpus": "target"}, CheckpointError, "not a corpus"),
        ({"target": "nowhere"}, CheckpointError, "no such folder"),
        ({"stop_after": 0}, ConfigError, "stop_after is 0"),
        ({"tracker": "wendb"}, ConfigError, "tracker 'wendb' is not known"),
    ],
)
def test_bad_names_are_refused_before_anything_is_written(place: Path, tmp_path: Path, options, kind, words) -> None:
    with pytest.raises(kind, match=words):
        run(place, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_command_passes_every_option_on(place: Path, tmp_path: Path, monkeypatch) -> None:
    words = ["train", place / "recipe.toml", "--target", place / "target", "--corpus", place / "corpus"]
    ran = run_cli(*words, "--out", tmp_path / "out", "--no-gates", "--tracker", "wendb")
    assert (ran.code, ran.out) == (2, "") and "tracker 'wendb' is not known" in ran.err
    seen: list[bool] = []
    step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self: seen.append(gc.isenabled()) or step(self))
    ran = run_cli(*words, "--out", tmp_path / "out", "--no-gates", "--stop-after", "2")
    assert (ran.code, ran.out) == (0, "step 2 of 25\n")
    assert seen == [True, True], "garbage is collected while a run goes on"


# ---- what a kill or a full disk leaves -------------------------------------------------------------------------------
@pytest.fixture
def judged(place: Path, tmp_path: Path) -> Path:
    """The place again, with a corpus that keeps two prompts for evaluation and a recipe that uses them."""
    folder = tmp_path / "judged"
    shutil.copytree(place, folder)
    (folder / "corpus" / "held_out.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [6]}\n')
    evaluation = {"every_steps": 2, "num_prompts": 2, "max_new_tokens": 4, "width": 4}
    recipe = make_recipe(optim={"num_steps": 4}, prompts={"held_out": 2, "files": ("p.jsonl",)}, evaluation=evaluation)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    return folder


def test_torn_lines_do_not_stop_a_run(judged: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(judged, out, stop_after=2)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (out / name).open("a") as sink:
            sink.write('{"step": 2, "acc')
    run(judged, out)
    assert [line["step"] for line in read_lines(out / "evaluations.jsonl")] == [2, 4]
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [1, 2, 2, 3, 4, 4]
    record = json.loads((out / "draft" / "run.json").read_text())
    assert record["evaluation"]["num_prompts"] == 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("times.json", "", r"times\.json is damaged"),
        ("metrics.jsonl", '{"step": 1\n{"step": 2}\n', r"metrics\.jsonl line 1 is not a line of a run"),
        ("evaluations.jsonl", "", r"no evaluation of step \d, whose weights best\.pt holds"),
    ],
)
def test_a_damaged_file_is_one_line(judged: Path, tmp_path: Path, name: str, content: str, words: str) -> None:
    run(judged, tmp_path / "out")
    (tmp_path / "out" / name).write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        run(judged, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_the_first_failure_is_the_one_that_is_told(place: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "times.json"):  # neither can be written, as on a full disk
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written"):
        run(place, tmp_path)


def test_too_few_prompts_for_evaluation_are_missed(judged: Path, tmp_path: Path) -> None:
    path = judged / "corpus" / "held_out.jsonl"
    path.write_text('{"ids": [1, 2]}\n')
    with pytest.raises(CheckpointError, match=r"keeps 1 prompts for evaluation, and evaluation\.num_prompts is 2"):
        run(judged, tmp_path / "out")
    path.unlink()
    with pytest.raises(CheckpointError, match="keeps 0 prompts"):
        run(judged, tmp_path / "out")


@pytest.mark.parametrize(("most", "name"), [(30_000, "draft"), (60_000, "training.png")])
def test_a_disk_that_is_full_at_the_end_is_one_line(place: Path, tmp_path: Path, most: int, name: str) -> None:
    if name == "training.png":
        pytest.importorskip("matplotlib", reason="the extra `train` brings it")
    run(place, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "times.json"}
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, allowed[1]))  # the system's own refusal to write a byte more
    try:
        with pytest.raises(CheckpointError, match=rf"/{re.escape(name)} (could not|cannot) be written .*too large"):
            run(place, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    found = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "times.json"}
    assert found.keys() == before.keys()
    assert all(content == before[path] for path, content in found.items() if path.name not in ("run.json", "README.md"))
