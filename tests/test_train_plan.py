"""`blockdraft train --plan`: its numbers against counted ones, a probe of real steps, and no network."""

from __future__ import annotations

import json
import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.config import TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.targets import HFTarget
from blockdraft.train.optim import make_optimiser
from blockdraft.train.overrides import ResolvedRecipe
from blockdraft.train.plan import facts_for, make_plan, sizes_of
from blockdraft.train.probe import PROBE_STEPS, RandomCorpus, run_probe, why_not
from blockdraft.train.recipe import HubRecipe, TargetRecipe, recipe_from_dict
from engine_kit import tiny_model
from tiny_pair import run_cli
from train_kit import make_recipe

FACTS = TargetFacts(
    model_type="llama",
    vocab_size=32,
    hidden_size=32,
    num_layers=3,
    max_length=512,
    is_recurrent=False,
    eos_token_ids=(31,),
    pad_token_id=None,
)
SELF_WRITTEN = {
    "self_written": 20, "openings": ("", "What"), "temperature": 1.0, "top_p": 0.9, "max_tokens": 9, "held_out": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a plan touches no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def recipe_with_facts(**changes):
    return make_recipe(target=TargetRecipe(name="nobody/tiny", facts=FACTS), **changes)


def plan_of(recipe, **options):
    resolved = ResolvedRecipe(name="r", recipe=recipe, changes=())
    return make_plan(resolved, probe=lambda *_: {"reason": "not asked"}, **options)


def sizes(recipe):
    return sizes_of(recipe, recipe.draft.config(FACTS))


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("learned", "kind"), [(False, "adamw"), (True, "adamw"), (True, "muon")])
def test_parameters_and_their_bytes_are_those_of_the_model(learned: bool, kind: str) -> None:
    recipe = recipe_with_facts(draft={"learned_mask_embedding": learned}, optim={"kind": kind})
    found = sizes(recipe)
    model = DraftModel(recipe.draft.config(FACTS), has_mask_embedding=learned)
    optimiser = make_optimiser(model, recipe.optim)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimiser.step()
    moments = [t for state in optimiser.state_dict()["state"].values() for t in state.values() if t.dim()]
    assert found["trainable_parameters"] == sum(p.numel() for p in model.parameters())
    assert sum(count for name, count in found["parameters"].items() if name != "total") == found["parameters"]["total"]
    assert found["train_bytes"] == {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "gradients": sum(p.grad.numel() * p.grad.element_size() for p in model.parameters()),
        "optimiser": sum(t.numel() * t.element_size() for t in moments if t.dim()),
    }


@pytest.mark.parametrize(
    ("loss", "taps", "stored"),
    [({}, (0, 1), 2), ({"kind": "kl"}, (0, 1), 3), ({"kind": "kl"}, (0, 2), 2)],
)
def test_features_are_counted_as_they_are_stored(loss, taps, stored: int) -> None:
    recipe = recipe_with_facts(loss=loss, draft={"target_layer_ids": taps}, prompts=SELF_WRITTEN)
    kept = torch.zeros(1, stored, FACTS.hidden_size, dtype=torch.bfloat16)
    assert sizes(recipe)["features"] == {
        "where": "disk",
        "bytes_per_token": kept.numel() * kept.element_size(),
        "bytes_at_most": 16 * 128 * kept.numel() * kept.element_size(),
    }
    online = recipe_with_facts(text={"features": "online", "features_dtype": "none"})
    assert sizes(online)["features"]["bytes_per_token"] == 0


def test_text_is_counted_from_every_source(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    hub = HubRecipe(dataset="a/b", config="", split="train", field="text", suffix="", limit=100)
    prompts = SELF_WRITTEN | {"files": (str(path),), "hub": (hub,)}
    found = sizes(recipe_with_facts(prompts=prompts))["text"]
    assert found == {
        "prompts": 122,
        "sequences_at_most": 118,
        "tokens_at_most": 118 * 128,
        "written_tokens_at_most": 118 * 16,
    }
    every = sizes(recipe_with_facts(prompts=prompts, text={"every_turn": True}))["text"]
    assert every["written_tokens_at_most"] == 118 * 128
    for unknown in ({"files": ("nowhere.jsonl",)}, {"hub": (replace(hub, limit=0),)}):
        assert set(sizes(recipe_with_facts(prompts=prompts | unknown))["text"].values()) == {None}


def test_steps_and_head_are_counted_over_a_loop() -> None:
    optim = {"num_steps": 3, "sequences_per_step": 2, "blocks_per_sequence": 5}
    recipe = recipe_with_facts(optim=optim, loss={"head_chunk_blocks": 4}, prompts=SELF_WRITTEN)
    found = sizes(recipe)
    blocks = [(step, s, b) for step in range(3) for s in range(2) for b in range(5)]
    labels = [(*block, slot) for block in blocks for slot in range(1, 5)]
    assert found["steps"] == {
        "sharding": "none", "num_steps": 3, "sequences": 6, "passes_at_least": 6 / 16, "blocks": len(blocks),
        "labels_at_most": len(labels),
    }  # fmt: skip
    chunk = torch.zeros(4, 4, FACTS.vocab_size)
    kept = torch.zeros(10, 4, FACTS.hidden_size)
    assert found["head"]["logits_bytes_at_most"] == chunk.numel() * chunk.element_size()
    assert found["head"]["gradient_bytes"] == kept.numel() * kept.element_size()
    assert sizes(recipe_with_facts(optim=optim))["head"]["blocks_per_chunk"] == 10
    assert sizes(recipe_with_facts(optim=optim, loss={"head_chunk_blocks": 99}))["head"]["blocks_per_chunk"] == 10


# ---- facts -----------------------------------------------------------------------------------------------------------
def test_facts_are_the_targets_own_where_it_is_at_hand(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "target")
    target = HFTarget(tiny_model())
    own = replace(target.facts, pad_token_id=None)
    target.close()
    recipe = make_recipe(target=TargetRecipe(name=str(tmp_path / "target")))
    found, source = facts_for(recipe)
    assert (replace(found, pad_token_id=None), source) == (own, str(tmp_path / "target"))
    assert facts_for(make_recipe(), tmp_path / "target")[0] == found
    wrong = make_recipe(target=TargetRecipe(name="x", facts=replace(found, max_length=9)))
    with pytest.raises(ConfigError, match=r"target\.facts\.max_length is 9"):
        facts_for(wrong, tmp_path / "target")


def test_facts_of_a_target_elsewhere_are_the_recipes() -> None:
    found, source = facts_for(recipe_with_facts())
    assert found == FACTS
    assert "not on this machine" in source
    with pytest.raises(ConfigError, match=r"'nobody/tiny' is not on this machine, and the recipe has no \[target"):
        facts_for(make_recipe(target=TargetRecipe(name="nobody/tiny")))
    with pytest.raises(ConfigError, match="a plan fetches nothing; name a folder"):
        facts_for(recipe_with_facts(), "nobody/other")
    with pytest.raises(ConfigError, match="is not on this machine"):
        facts_for(make_recipe(target=TargetRecipe(name="no such folder")))


# ---- the probe -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [{}, {"loss": {"kind": "kl", "full_head_from": 0.5}}], ids=["ce", "kl, two phases"])
def test_a_probe_takes_real_steps(changes) -> None:
    recipe = recipe_with_facts(optim={"num_steps": 1000}, **changes)
    config = recipe.draft.config(FACTS)
    found = run_probe(recipe, config)
    assert (found["steps"], found["device"]) == (PROBE_STEPS, "cpu")
    step_s = found["seconds_per_step"]
    if changes:
        step_s = (step_s + found["full_head_seconds_per_step"]) / 2
    else:
        assert found["full_head_seconds_per_step"] is None
    assert 0 < step_s < 60
    assert found["training_seconds"] == pytest.approx(1000 * step_s)
    assert found["blocks_per_second"] == pytest.approx(16 / step_s)


def test_random_text_has_the_recipes_shape() -> None:
    recipe = recipe_with_facts(loss={"kind": "kl"})
    batch = RandomCorpus(recipe, recipe.draft.config(FACTS)).batch([3, 4, 5])
    assert batch.ids_BS.shape == (3, 128)
    assert batch.taps_BSNE.shape == (3, 128, 3, 32)
    assert batch.written_BS.sum(1).tolist() == [16] * 3
    assert bool(batch.written_BS[:, -16:].all())
    assert batch.last_BSE is not None
    assert batch.last_BSE.shape == (3, 128, 32)
    assert int(batch.ids_BS.max()) < 32


def test_a_recipe_too_large_for_a_machine_is_not_tried() -> None:
    recipe = recipe_with_facts()
    config = recipe.draft.config(FACTS)
    assert why_not(recipe, config, "cpu") is None
    assert "GB for it" in str(why_not(recipe, config, "cpu", memory=1000))
    deep = recipe_with_facts(optim={"blocks_per_sequence": 10**9})
    assert "TFLOP, so 20 of them would take" in str(why_not(deep, config, "cpu", memory=10**18))
    if not torch.cuda.is_available():
        reason = run_probe(recipe_with_facts(optim={"device": "cuda"}), config)["reason"]
        assert "no GPU that PyTorch can use" in reason


# ---- words -----------------------------------------------------------------------------------------------------------
def test_the_text_reads_back_as_the_recipe_and_the_json_holds_the_numbers() -> None:
    recipe = recipe_with_facts(prompts=SELF_WRITTEN)
    plan = plan_of(recipe)
    assert recipe_from_dict(tomllib.loads(plan.to_text()), where="plan") == recipe
    assert "# time       not probed: not asked\n" in plan.to_text()
    numbers = json.loads(json.dumps(plan.to_dict()))
    assert recipe_from_dict(numbers["recipe"], where="plan") == recipe
    assert numbers["facts"]["vocab_size"] == 32
    assert numbers["text"]["prompts"] == 20
    unknown = plan_of(recipe_with_facts(prompts=SELF_WRITTEN | {"files": ("nowhere.jsonl",)})).to_text()
    assert "# text       unknown" in unknown
    assert "bytes a token, unknown in all" in unknown


def test_the_command_prints_a_plan_and_stops(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(recipe_with_facts().to_toml())
    ran = run_cli("train", path, "optim.num_steps=50", "--plan")
    assert (ran.code, ran.err) == (0, "")
    assert "# changed: optim.num_steps = 50, was 40" in ran.out
    assert " s a step (median of 20, cpu, " in ran.out
    assert sorted(tmp_path.iterdir()) == [path]
    ran = run_cli("train", "kimi-k3.1", "--plan", "--json")
    numbers = json.loads(ran.out)
    assert numbers["trainable_parameters"] == 2_784_811_008
    assert numbers["train_bytes"]["optimiser"] == 8 * 2_784_811_008
    assert ("no GPU" in numbers["probe"]["reason"]) or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["smollm2", "--plan"], "no ready recipe 'smollm2'; did you mean smollm2-135m?"),
        (["smollm2-135m"], "give --out FOLDER"),
        (["smollm2-135m", "--json", "--out", "x"], "--json is for --plan"),
        (["smollm2-135m", "num_steps=3", "--plan"], "did you mean optim.num_steps?"),
        (["smollm2-135m", "--plan", "--target", "nobody/other"], "a plan fetches nothing"),
    ],
)
def test_a_wrong_command_is_one_line(arguments: list[str], words: str) -> None:
    ran = run_cli("train", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ran.err.count("\n") == 1
