"""Two processes train as one with twice the sequences, share one checkpoint, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.targets import HFTarget
from blockdraft.train.corpus import Corpus
from blockdraft.train.export import export_draft
from blockdraft.train.loop import BEST_FILE, METRICS_FILE, STATE_FILE, Trainer
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import MlaRecipe
from engine_kit import tiny_model
from train_kit import TAPS, facts_of, head_of, make_corpus, make_recipe
from train_processes import run_processes

PROMPTS = [[1, 2, 3], [7, 5, 9, 4], [11, 3], [20, 21, 22], [8, 9]]
STEPS = 20
TOLERANCE = 1e-5
KINDS = ["ddp", "fsdp2"]


def recipe_of(sharding: str, sequences: int, *, num_steps: int = STEPS, **changes):
    """Every kind of parameter is in it: convolutions, a mask embedding, and a selector that begins late."""
    return make_recipe(
        draft={"learned_mask_embedding": True},
        loss={"selector_start_step": 5},
        optim={"num_steps": num_steps, "sequences_per_step": sequences, "sharding": sharding},
        **{"save_every_steps": 5, **changes},
    )


def trainer_of(recipe, corpus: Path, folder: Path, parallel: Parallel | None = None) -> Trainer:
    model = tiny_model(dtype=torch.float32)
    target = HFTarget(model)
    config = recipe.draft.config(target.facts)
    target.close()
    head = replace(head_of(model), final_norm_eps=1e-6)
    return Trainer(recipe, config, head, Corpus(corpus, max_length=128), folder, parallel)


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def assert_same_curve(one: Path, other: Path, num_steps: int = STEPS) -> None:
    mine, theirs = lines_of(one), lines_of(other)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs] == list(range(1, num_steps + 1))
    for a, b in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"step_s"}:
            rel = 2e-3 if name == "grad_norm" else TOLERANCE  # written down with four decimals
            assert a[name] == pytest.approx(b[name], rel=rel, abs=1e-4 if name == "grad_norm" else 1e-6), (
                a["step"],
                name,
            )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder, model = tmp_path_factory.mktemp("corpus"), tiny_model(dtype=torch.float32)
    make_corpus(folder, model, PROMPTS, 20)
    facts_of(HFTarget(model, TAPS), last_layer_id=2).write(folder)  # which is also a tap: the teacher's input is there
    return folder


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory) -> Path:
    """The folder of a whole run by one process with four sequences a step."""
    folder = tmp_path_factory.mktemp("alone")
    trainer_of(recipe_of("none", 4), corpus, folder).run()
    return folder


def state_of(folder: Path) -> dict:
    return torch.load(folder / STATE_FILE, weights_only=True)


def train(parallel: Parallel, recipe, corpus: Path, folder: Path, stop_after: int | None = None) -> int:
    trainer = trainer_of(recipe, corpus, folder, parallel)
    trainer.run(stop_after=stop_after)
    return trainer.step


# ---- the same maths --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sharding", KINDS)
def test_two_processes_train_as_one_and_leave_the_same_file(corpus, alone, tmp_path, sharding: str) -> None:
    run, recipe = tmp_path / "run", recipe_of(sharding, 2)
    ended = run_processes(2, train, recipe, corpus, run, folder=tmp_path)
    assert [(e.exit_code, e.result) for e in ended] == [(0, STEPS)] * 2, ended
    assert_same_curve(run, alone)
    one, other = state_of(run), state_of(alone)
    assert one.keys() == other.keys()
    for name, weight in other["model"].items():
        assert type(one["model"][name]) is torch.Tensor
        torch.testing.assert_close(one["model"][name], weight, rtol=1e-4, atol=1e-5)
    assert one["optimiser"]["param_groups"] == other["optimiser"]["param_groups"]
    for index, entry in other["optimiser"]["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(one["optimiser"]["state"][index][name], value, rtol=1e-3, atol=1e-5)
    assert (one["order"], one["num_blocks_seen"]) == (other["order"], other["num_blocks_seen"])
    assert torch.equal(one["generator"], other["generator"])
    assert {path.name for path in run.iterdir()} == {path.name for path in alone.iterdir()}
    export_draft(run / STATE_FILE, tmp_path / "draft", {})


def latent_recipe(sharding: str, sequences: int):
    """What `recipe_of` leaves out: latent attention, a teacher, noise, windows, a head in chunks and at last whole."""
    mla = MlaRecipe(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    return make_recipe(
        draft={"gqa": None, "mla": mla, "windows": (0, 6)},
        loss={"kind": "kl", "selector_detached": True, "full_head_from": 0.5, "head_chunk_blocks": 3},
        optim={"num_steps": 6, "sequences_per_step": sequences, "taps_noise": 0.1, "sharding": sharding},
    )


@pytest.mark.parametrize("sharding", KINDS)
def test_latent_attention_a_teacher_and_noise_change_nothing(corpus, tmp_path, sharding: str) -> None:
    trainer_of(latent_recipe("none", 4), corpus, tmp_path / "alone").run()
    ended = run_processes(2, train, latent_recipe(sharding, 2), corpus, tmp_path / "run", folder=tmp_path)
    assert [e.exit_code for e in ended] == [0, 0], ended
    assert_same_curve(tmp_path / "run", tmp_path / "alone", 6)


@pytest.mark.parametrize(("sharding", "first"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 1)])
def test_a_run_goes_on_with_another_number_of_processes(corpus, alone, tmp_path, sharding: str, first: int) -> None:
    """Ten steps by two processes and ten by one, in either order, are twenty by one."""
    run = tmp_path / "run"
    for count, stop_after in ((first, 10), (3 - first, None)):
        if count == 1:
            trainer_of(recipe_of("none", 4), corpus, run).run(stop_after=stop_after)
        else:
            ended = run_processes(2, train, recipe_of(sharding, 2), corpus, run, stop_after, folder=tmp_path)
            assert [e.exit_code for e in ended] == [0, 0], ended
    assert_same_curve(run, alone)


def test_another_number_of_sequences_cannot_go_on(corpus, alone, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"begun with 4 sequences a step over all processes, and 1 x 2 .*step=4"):
        trainer_of(recipe_of("none", 2), corpus, alone)


# ---- the main process alone ------------------------------------------------------------------------------------------
def train_and_evaluate(parallel: Parallel, recipe, corpus: Path, folder: Path) -> tuple:
    trainer = trainer_of(recipe, corpus, folder, parallel)
    seen, shown = [], []

    def on_evaluate(trainer: Trainer) -> float:
        assert all(type(value) is torch.Tensor for value in trainer.served.state_dict().values())
        seen.append({name: value.clone() for name, value in trainer.served.state_dict().items()})
        return 1.0 + (trainer.step == 2)

    trainer.run(on_step=shown.append, on_evaluate=on_evaluate)
    return seen, [line["step"] for line in shown], trainer.best, trainer.served is trainer.model


@pytest.mark.parametrize("sharding", KINDS)
def test_the_main_process_alone_evaluates_shows_and_writes(corpus, tmp_path, sharding: str) -> None:
    evaluation = {"every_steps": 2, "num_prompts": 1, "max_new_tokens": 4, "width": 5}
    recipe = make_recipe(
        loss={"selector_start_step": 0},
        optim={"num_steps": 4, "sharding": sharding},
        evaluation=evaluation,
        prompts={"files": ("prompts.jsonl",), "held_out": 1},
    )
    main, other = run_processes(2, train_and_evaluate, recipe, corpus, tmp_path / "run", folder=tmp_path)
    assert (main.exit_code, other.exit_code) == (0, 0), (main, other)
    (at_2, at_4), *rest = main.result
    assert rest == [[1, 2, 2, 3, 4, 4], (2, 2.0), True]
    assert other.result == ([], [], (2, 2.0), True)
    for file, seen in ((BEST_FILE, at_2), (STATE_FILE, at_4)):
        kept = torch.load(tmp_path / "run" / file, weights_only=True)["model"]
        assert kept.keys() == seen.keys()
        assert all(torch.equal(kept[name], value) for name, value in seen.items())
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 2, 3, 4, 4]


# ---- stopping together -----------------------------------------------------------------------------------------------
def train_until(parallel: Parallel, recipe, corpus: Path, folder: Path, how: str, at: int) -> None:
    """Process 1 meets with a mishap in step `at`."""
    trainer = trainer_of(recipe, corpus, folder, parallel)
    batch = trainer.corpus.batch

    def mishap(indices):
        found = batch(indices)
        if trainer.step + 1 == at and not parallel.is_main:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise CheckpointError("shard-7: damaged")
            found.taps_BSNE[:, 0] = torch.nan
        return found

    trainer.corpus.batch = mishap
    trainer.run()


def run_until(corpus: Path, folder: Path, sharding: str, how: str, at: int) -> list:
    return run_processes(2, train_until, recipe_of(sharding, 2), corpus, folder / "run", how, at, folder=folder)


@pytest.mark.parametrize("sharding", KINDS)
def test_a_nan_in_one_process_stops_all_with_one_line(corpus, tmp_path, sharding: str) -> None:
    ended = run_until(corpus, tmp_path, sharding, "nan", 7)
    assert [e.exit_code for e in ended] == [2, 2], ended
    told = [e.error for e in ended if not e.error.startswith("OtherProcessFailed")]
    assert len(told) == 1, ended
    assert told[0].startswith("ConfigError: step 7: the loss is nan; lower optim.learning_rate")
    assert state_of(tmp_path / "run")["step"] == 5


def test_an_error_in_one_process_is_told_by_it_alone(corpus, tmp_path) -> None:
    main, other = run_until(corpus, tmp_path, "ddp", "raise", 3)
    assert other.error == "CheckpointError: shard-7: damaged"
    assert main.error == "OtherProcessFailed: process 1 has failed, and says why"


@pytest.mark.parametrize("sharding", KINDS)
def test_a_killed_process_ends_the_run_and_leaves_the_checkpoint(corpus, alone, tmp_path, sharding: str) -> None:
    main, other = run_until(corpus, tmp_path, sharding, "kill", 8)
    assert other.exit_code == -signal.SIGKILL
    assert main.error.startswith("UnavailableError: process 0 lost touch with another process"), main
    assert "\n" not in main.error
    assert state_of(tmp_path / "run")["step"] == 5
    trainer_of(recipe_of("none", 4), corpus, tmp_path / "run").run()
    assert_same_curve(tmp_path / "run", alone)


def fill_disk(parallel: Parallel, recipe, corpus: Path, folder: Path) -> None:
    trainer = trainer_of(recipe, corpus, folder, parallel)
    trainer.run(stop_after=2)

    def fail(*_args) -> None:
        raise OSError(28, "No space left on device")

    os.replace = fail
    trainer.run()


def test_a_full_disk_in_the_main_process_stops_all(corpus, tmp_path) -> None:
    main, other = run_processes(2, fill_disk, recipe_of("ddp", 2), corpus, tmp_path / "run", folder=tmp_path)
    assert main.error.startswith("CheckpointError") and "step 5 could not be saved" in main.error
    assert other.error == "OtherProcessFailed: process 0 has failed, and says why"
    assert state_of(tmp_path / "run")["step"] == 2


# ---- agreement -------------------------------------------------------------------------------------------------------
def see_other_text(parallel: Parallel, recipe, corpora: list[Path], folder: Path) -> None:
    trainer_of(recipe, corpora[parallel.rank], folder, parallel)


def test_processes_that_see_other_files_are_refused(corpus, tmp_path) -> None:
    make_corpus(tmp_path / "other", tiny_model(dtype=torch.float32), PROMPTS[:3], 20)
    corpora = [corpus, tmp_path / "other"]
    ended = run_processes(2, see_other_text, recipe_of("ddp", 2), corpora, tmp_path / "run", folder=tmp_path)
    told = [e.error for e in ended if not e.error.startswith("OtherProcessFailed")]
    assert told == [
        "ConfigError: process 1 has another number of sequences in the corpus than process 0 (3 instead of 5); "
        "all processes must see the same files, of the same state"
    ]


def ask(parallel: Parallel) -> dict:
    order = []
    with parallel.main_first():
        order.append(parallel.rank)
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight.grad = torch.full((2, 3), 2.0)
    return {
        "share": parallel.shard(range(5)),
        "sum": parallel.sum_(torch.tensor([1.0, parallel.rank])).tolist(),
        "agree": parallel.agree(f"from {parallel.rank}"),
        "on_main": parallel.on_main(lambda: os.getpid()) == os.getpid(),
        "norm": float(parallel.clip_grad_norm_(model, 1.0)),
        "left": float(model.weight.grad.norm()),
    }


def test_what_processes_share_and_agree_on(tmp_path) -> None:
    main, other = (e.result for e in run_processes(2, ask, folder=tmp_path))
    alone = ask(Parallel.single())
    assert [main["share"], other["share"], alone["share"]] == [[0, 1, 2], [3, 4], [0, 1, 2, 3, 4]]
    assert main["sum"] == other["sum"] == [2.0, 1.0]
    assert main["agree"] == other["agree"] == alone["agree"] == "from 0"
    assert [main["on_main"], other["on_main"], alone["on_main"]] == [True, False, True]
    for found in (main, other, alone):
        assert found["norm"] == pytest.approx(24**0.5) and found["left"] == pytest.approx(1.0)


# ---- launching -------------------------------------------------------------------------------------------------------
def test_one_process_is_told_how_to_become_several(corpus, tmp_path) -> None:
    for sharding in KINDS:
        with pytest.raises(ConfigError, match=f"optim.sharding is {sharding}, and one process .* torchrun --nproc"):
            trainer_of(recipe_of(sharding, 2), corpus, tmp_path)


def test_several_processes_need_a_sharding(corpus, tmp_path) -> None:
    ended = run_processes(2, train, recipe_of("none", 2), corpus, tmp_path / "run", folder=tmp_path)
    told = [e.error for e in ended if not e.error.startswith("OtherProcessFailed")]
    assert len(told) == 1 and told[0].startswith("ConfigError: optim.sharding is none, and 2 processes were started")


def test_half_of_the_variables_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE are set, but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        Parallel.from_env()
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert Parallel.from_env().world_size == 1


def test_the_command_under_torchrun_shows_one_progress_and_one_result(corpus, tmp_path) -> None:
    tiny_model(dtype=torch.float32).save_pretrained(tmp_path / "target")
    recipe = make_recipe(loss={"selector_start_step": 2}, optim={"num_steps": 3})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "blockdraft.cli", "train", "recipe.toml", "optim.sharding=fsdp2", "--no-gates"]
    command += ["--corpus", str(corpus), "--target", "target", "--out", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # without it torchrun says that it sets it
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "drafter out/draft\n"
    lines = ran.stderr.splitlines()
    assert len(set(lines)) == len(lines)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["1/3", "3/3"], ran.stderr
    assert not [line for line in lines if "warning" in line.lower()], ran.stderr
    assert json.loads((tmp_path / "out/draft/run.json").read_text())["processes"] == 2
    assert state_of(tmp_path / "out")["step"] == 3
