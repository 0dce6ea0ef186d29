"""Runs with every option resume bit for bit; evaluations keep the best weights; the last phase is the whole head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from blockdraft.targets import HFTarget
from blockdraft.train.corpus import Corpus
from blockdraft.train.export import export_draft
from blockdraft.train.initial import read_target_layers
from blockdraft.train.loop import BEST_FILE, METRICS_FILE, Trainer
from blockdraft.train.recipe import GqaRecipe
from blockdraft.train.state import read_best
from engine_kit import tiny_model
from train_kit import TAPS, facts_of, head_of, make_corpus, make_recipe

PROMPTS = [[1, 2, 3], [7, 5, 9, 4], [11, 3], [20, 21, 22]]
EVALUATION = {"every_steps": 4, "num_prompts": 1, "max_new_tokens": 4, "width": 4}


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def shards(model, tmp_path_factory) -> Path:
    """A corpus that keeps the last layer (here also a tap), and the target's own folder."""
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder, model, PROMPTS, 20)
    facts_of(HFTarget(model, TAPS), last_layer_id=2).write(folder)
    model.save_pretrained(folder / "target")
    return folder


@pytest.fixture
def trainer_in(model, shards, tmp_path):
    def make(name: str = "run", *, layers=None, **changes) -> Trainer:
        recipe = make_recipe(**changes)
        config = recipe.draft.config(HFTarget(model).facts)
        ids = recipe.draft.initial_layers
        given = (
            read_target_layers(shards / "target", ids, model_type="llama") if layers is None and ids else layers or ()
        )
        head = replace(head_of(model), final_norm_eps=1e-6)
        corpus = Corpus(shards, max_length=128)
        return Trainer(recipe, config, head, corpus, tmp_path / name, initial_layers=given)

    return make


def lines_of(trainer: Trainer) -> list[dict]:
    lines = (trainer.folder / METRICS_FILE).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("step_s", "evaluate_s")} for line in lines]


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


EVERYTHING = {
    "draft": {
        "learned_mask_embedding": True, "windows": (0, 6), "initial": "target_layers", "initial_layers": (2, 1),
        "gqa": GqaRecipe(num_kv_heads=2, head_dim=8), "input_embedding_scale": 1.5, "output_multiplier": 0.8,
        "final_logit_softcapping": 15.0,
    },
    "loss": {
        "kind": "kl", "kl_temperature": 2.0, "selector_detached": True, "num_random_head_rows": 2,
        "full_head_from": 0.5, "head_chunk_blocks": 3,
    },
    "optim": {
        "num_steps": 30, "schedule": "cosine", "decay_fraction": 0.0, "taps_noise": 0.1, "weight_decay": 0.1,
        "autocast": "auto",
    },
}  # fmt: skip


@pytest.mark.parametrize(("stop", "kind"), [(13, "adamw"), (25, "muon"), (27, "adamw")])
def test_a_run_with_every_option_resumes_bit_for_bit(trainer_in, stop: int, kind: str) -> None:
    options = {**EVERYTHING, "optim": {**EVERYTHING["optim"], "kind": kind}}
    whole = trainer_in("whole", **options)
    start = whole.model.mask_embedding.detach().clone()
    whole.run()
    trainer_in("parts", **options).run(stop_after=stop)
    last = trainer_in("parts", layers=(), **options)
    last.run()
    assert same(weights_of(last), weights_of(whole))
    assert lines_of(last) == lines_of(whole)
    assert not torch.equal(start, whole.model.mask_embedding)
    assert {"autocast", "nll", "teacher_agrees"} <= set(lines_of(whole)[0])


def test_its_export_brings_the_mask_embedding(trainer_in, tmp_path) -> None:
    trainer = trainer_in(**EVERYTHING)
    trainer.run(stop_after=2)
    export_draft(trainer, tmp_path / "draft", {"steps": 2})
    draft = DraftModel.from_checkpoint(zlab.read(tmp_path / "draft"))
    assert torch.equal(draft.mask_embedding, trainer.model.mask_embedding.bfloat16())
    assert draft.config == trainer.config


def test_target_layers_that_were_not_given_are_missed(trainer_in) -> None:
    with pytest.raises(ConfigError, match=r"draft\.initial_layers is \[2, 1\], and the tensors of 0 target layers"):
        trainer_in(layers=(), **EVERYTHING)


def test_the_last_phase_runs_over_the_whole_vocabulary(trainer_in) -> None:
    trainer, sizes = trainer_in(loss={"full_head_from": 0.6, "num_random_head_rows": 1}, optim={"num_steps": 10}), []
    trainer.run(on_step=lambda _: sizes.append(len(trainer.objective.rows.ids_V)))
    assert len(set(sizes[:6])) == 1 and sizes[0] < 32
    assert sizes[6:] == [32] * 4
    again = trainer_in(
        "from the start", loss={"full_head_from": 0.0, "num_random_head_rows": 0}, optim={"num_steps": 2}
    )
    again.run()
    assert again.objective.rows.is_whole


def test_anchors_depend_on_seed_step_and_place_alone(trainer_in) -> None:
    trainer, other = trainer_in("a"), trainer_in("b")
    _, one = trainer._batch([0, 1])
    other.generator.manual_seed(99)
    _, two = other._batch([0, 3])
    assert torch.equal(one.anchors_BK[0], two.anchors_BK[0])
    other.step = 1
    assert not torch.equal(other._batch([0, 1])[1].anchors_BK, one.anchors_BK)


# ---- evaluations -----------------------------------------------------------------------------------------------------
VALUES = {4: 1.5, 8: 2.5, 10: 2.0}
EVALUATED = {"optim": {"num_steps": 10}, "evaluation": EVALUATION, "prompts": {"held_out": 1, "files": ("p.jsonl",)}}


def test_evaluations_come_every_few_steps_and_at_the_end_and_the_best_is_kept(trainer_in) -> None:
    trainer, weights = trainer_in(**EVALUATED), {}

    def evaluate(run: Trainer) -> float:
        weights[run.step] = [p.detach().clone() for p in run.served.parameters()]
        return VALUES[run.step]

    trainer.run(on_evaluate=evaluate)
    assert list(weights) == list(VALUES)
    found = [line for line in lines_of(trainer) if "acceptance_length" in line]
    assert found == [
        {"step": step, "acceptance_length": VALUES[step], "best_step": best}
        for step, best in ((4, 4), (8, 8), (10, 8))
    ]  # fmt: skip
    best = read_best(trainer.folder / BEST_FILE)
    assert (best["step"], best["acceptance_length"], trainer.best) == (8, 2.5, (8, 2.5))
    assert same(list(best["model"].values()), weights[8])
    assert not list(trainer.folder.glob("*.tmp"))


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_at", [4, 8, 10])
def test_a_kill_during_an_evaluation_repeats_that_evaluation_only(trainer_in, killed_at: int) -> None:
    whole, seen = trainer_in("whole", **EVALUATED), []
    whole.run(on_evaluate=lambda run: VALUES[run.step])

    def evaluate(run: Trainer) -> float:
        seen.append(run.step)
        if run.step == killed_at and seen.count(killed_at) == 1:
            raise Killed
        return VALUES[run.step]

    with pytest.raises(Killed):
        trainer_in("parts", **EVALUATED).run(on_evaluate=evaluate)
    again = trainer_in("parts", **EVALUATED)
    assert again.step == killed_at
    again.run(on_evaluate=evaluate)
    assert sorted(seen) == sorted([*VALUES, killed_at])
    assert lines_of(again) == lines_of(whole)
    assert same(weights_of(again), weights_of(whole))
    done = trainer_in("parts", **EVALUATED)
    done.run(on_evaluate=evaluate)
    assert len(seen) == 4
    assert done.best == (8, 2.5)


def test_an_evaluation_without_a_value_keeps_nothing(trainer_in) -> None:
    trainer = trainer_in(**EVALUATED)
    trainer.run(on_evaluate=lambda _: None)
    assert trainer.best is None
    assert not (trainer.folder / BEST_FILE).exists()


def test_values_of_other_evaluations_do_not_compete(trainer_in) -> None:
    first = trainer_in(**EVALUATED)
    first.run(on_evaluate=lambda run: VALUES[run.step])
    wider = {**EVALUATED, "evaluation": {**EVALUATION, "width": 5}}
    again = trainer_in(**wider)
    assert again.best is None
    again.run(on_evaluate=lambda _: 1.25)
    assert again.best == (10, 1.25) == trainer_in(**wider).best
    rarer = {**EVALUATED, "evaluation": {**EVALUATION, "width": 5, "every_steps": 9}}
    assert trainer_in(**rarer).best == (10, 1.25)
    never = dict.fromkeys(EVALUATION, 0)
    assert trainer_in(**{**EVALUATED, "evaluation": never}).best == (10, 1.25)


def test_another_corpus_under_the_same_names_is_refused(model, trainer_in, shards, tmp_path) -> None:
    trainer_in().run(stop_after=2)
    make_corpus(tmp_path / "other", model, PROMPTS[:2], 20)
    facts_of(HFTarget(model, TAPS), last_layer_id=2).write(tmp_path / "other")
    recipe = make_recipe()
    config = recipe.draft.config(HFTarget(model).facts)
    with pytest.raises(ConfigError, match=r"another corpus: \[4, 80\] sequences and written tokens .* now \[2, 40\]"):
        Trainer(recipe, config, head_of(model), Corpus(tmp_path / "other", max_length=128), tmp_path / "run")
