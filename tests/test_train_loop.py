"""A run resumes bit for bit, survives kills and full disks, refuses bad numbers, and its draft serves as trained."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdraft.draft import DraftModel
from blockdraft.engine import Engine
from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.targets import HFTarget
from blockdraft.train.blocks import Blocks
from blockdraft.train.export import export_draft, model_from_state
from blockdraft.train.loop import METRICS_FILE, STATE_FILE, Trainer
from blockdraft.train.recipe import read_recipe
from engine_kit import bigram_model, draft_config, plain_ids, run_one, tiny_model
from train_kit import TAPS, blocks_at, facts_of, make_corpus, make_recipe, make_trainer, write_shard, written_text

PROMPTS = [[1, 2, 3], [7, 5, 9, 4], [11, 3], [20, 21, 22]]


@pytest.fixture(scope="module")
def model():
    return tiny_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def shards(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    make_corpus(folder, model, PROMPTS, 20)
    return folder


@pytest.fixture
def trainer_in(model, shards, tmp_path):
    """A function: the trainer of a recipe in a named folder, its corpus read anew."""
    from blockdraft.train.corpus import Corpus

    def make(name: str = "run", corpus: Path = shards, **changes) -> Trainer:
        recipe = make_recipe(**changes)
        return make_trainer(recipe, model, Corpus(corpus, max_length=128), tmp_path / name)

    return make


def metrics_of(folder: Path) -> list[dict]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "step_s"} for line in lines]


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


# ---- resume ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("stops", [[7], [25], [26, 27]])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(trainer_in, autocast: str, stops: list[int]) -> None:
    optim = {"num_steps": 30, "autocast": autocast}
    whole = trainer_in("whole", optim=optim)
    whole.run()
    for stop in stops:
        trainer_in("parts", optim=optim).run(stop_after=stop)
    last = trainer_in("parts", optim=optim)
    assert last.step == stops[-1]
    last.run()
    assert same(weights_of(last), weights_of(whole))
    assert metrics_of(last.folder) == metrics_of(whole.folder)
    assert [m["step"] for m in metrics_of(whole.folder)] == list(range(1, 31))
    assert torch.equal(last.generator.get_state(), whole.generator.get_state())


def test_a_finished_run_does_nothing_more_and_a_longer_recipe_goes_on(trainer_in) -> None:
    trainer_in(optim={"num_steps": 3}).run()
    again = trainer_in(optim={"num_steps": 3})
    before = weights_of(again)
    again.run()
    assert same(weights_of(again), before)
    longer = trainer_in(optim={"num_steps": 5}, save_every_steps=2)
    longer.run()
    assert longer.step == 5


def test_steps_past_the_last_checkpoint_are_done_again_and_counted_once(trainer_in) -> None:
    class Killed(Exception):
        pass

    def kill(metrics) -> None:
        if metrics["step"] == 6:
            raise Killed

    whole = trainer_in("whole", optim={"num_steps": 8})
    whole.run()
    with pytest.raises(Killed):
        trainer_in("killed", optim={"num_steps": 8}, save_every_steps=4).run(on_step=kill)
    with (whole.folder.parent / "killed" / METRICS_FILE).open("a") as sink:
        sink.write('{"step": 7, "lo')  # the kill came while a line was being written
    after = trainer_in("killed", optim={"num_steps": 8}, save_every_steps=4)
    assert after.step == 4
    after.run()
    assert same(weights_of(after), weights_of(whole))
    assert metrics_of(after.folder) == metrics_of(whole.folder)


def test_shards_that_a_writer_adds_are_picked_up_and_keep_their_order(trainer_in, model, tmp_path) -> None:
    """Sequence indices in a checkpoint mean the same sequences after a resume, whatever the new shards are called."""
    optim = {"num_steps": 60}

    def add(folder: Path, name: str, prompt: list[int]) -> None:
        target = HFTarget(model, TAPS)
        ids, taps = written_text(target, prompt, 12)
        write_shard(folder / name, [(ids, taps, len(prompt))])
        target.close()

    runs = []
    for name in ("whole", "parts"):
        corpus = tmp_path / f"{name}-corpus"
        make_corpus(corpus, model, PROMPTS, 20)
        trainer = trainer_in(name, corpus=corpus, optim=optim)
        trainer.run(stop_after=10)
        add(corpus, "0-early-name.safetensors", [2, 9])
        if name == "parts":
            trainer.run(stop_after=30)
            trainer = trainer_in(name, corpus=corpus, optim=optim)
            assert trainer.corpus.shard_names == ["a-0000.safetensors", "0-early-name.safetensors"]
        trainer.run()
        runs.append(trainer)
    assert same(weights_of(runs[0]), weights_of(runs[1]))
    assert len(runs[0].corpus) == 5
    (tmp_path / "parts-corpus" / "a-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a-0000\.safetensors: this shard was there"):
        trainer_in("parts", corpus=tmp_path / "parts-corpus", optim=optim)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "seed"),
        ({"optim": {"learning_rate": 1e-4}}, "optim.learning_rate"),
        ({"draft": {"mask_token_id": 1}, "max_length": 64}, "draft.mask_token_id, max_length"),
        ({"draft": {"num_layers": 1}}, "draft.num_layers, draft.windows"),
    ],
)
def test_another_recipe_cannot_go_on(trainer_in, changes, named: str) -> None:
    trainer_in().run(stop_after=1)
    with pytest.raises(ConfigError, match=f"another recipe or target: {named} differ"):
        trainer_in(**changes)


# ---- kills, disks, damage --------------------------------------------------------------------------------------------
def fail(*_args, **_kwargs):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", [(os, "replace"), (os, "fsync"), (torch, "save")], ids=lambda b: b[1])
def test_a_full_disk_leaves_the_old_checkpoint(trainer_in, monkeypatch, broken) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=2)
    before = (trainer.folder / STATE_FILE).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(*broken, fail)
        trainer.train_step()
        with pytest.raises(CheckpointError, match=r"step 3 could not be saved .*No space left.*previous checkpoint"):
            trainer.save()
    assert (trainer.folder / STATE_FILE).read_bytes() == before
    assert not list(trainer.folder.glob("*.tmp"))
    assert trainer_in().step == 2


def test_a_kill_during_a_save_leaves_the_old_checkpoint(trainer_in) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=2)
    (trainer.folder / (STATE_FILE + ".tmp")).write_bytes(b"half of a checkpoint")
    again = trainer_in()
    assert again.step == 2
    again.run(stop_after=3)
    assert trainer_in().step == 3


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(b"\x00\x01not a checkpoint" * 20)
    elif how == "other":
        torch.save({"weights": torch.ones(2)}, path)
    else:
        state = torch.load(path, weights_only=True)
        state["model"]["fc.weight"] = torch.ones(2, 2)
        torch.save(state, path)


@pytest.mark.parametrize("how", ["cut", "empty", "noise", "other", "shape"])
def test_a_damaged_checkpoint_is_named(trainer_in, how: str) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=1)
    damage(trainer.folder / STATE_FILE, how)
    with pytest.raises(CheckpointError, match=r"state\.pt") as caught:
        trainer_in()
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_shards_and_config_still_resumes(trainer_in) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=2)
    path = trainer.folder / STATE_FILE
    state = torch.load(path, weights_only=True)
    torch.save({k: v for k, v in state.items() if k not in ("shards", "config")}, path)
    again = trainer_in()
    assert again.step == 2
    assert same(weights_of(again), weights_of(trainer))
    with pytest.raises(CheckpointError, match="does not say which target"):
        model_from_state(path)


# ---- bad numbers -----------------------------------------------------------------------------------------------------
def test_a_nan_in_the_loss_is_raised_before_weights_change(trainer_in) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=2)
    batch = trainer.corpus.batch

    def poisoned(indices):
        found = batch(indices)
        found.taps_BSNE[:, 0] = torch.nan
        return found

    trainer.corpus.batch = poisoned
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match=r"step 3: the loss is nan; lower optim\.learning_rate"):
        trainer.run(stop_after=4)
    assert same(weights_of(trainer), before)
    assert trainer.step == 2
    assert trainer_in().step == 2


def test_a_nan_in_a_gradient_is_raised_before_weights_change(trainer_in) -> None:
    trainer = trainer_in()
    trainer.model.fc.weight.register_hook(lambda grad: grad * torch.nan)
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match="step 1: the gradient's norm is nan"):
        trainer.run(stop_after=1)
    assert same(weights_of(trainer), before)


def test_metrics_grow_by_a_line_a_step(trainer_in) -> None:
    trainer, lines = trainer_in(), []
    trainer.run(stop_after=3, on_step=lambda m: lines.append((trainer.folder / METRICS_FILE).read_text()))
    assert [text.count("\n") for text in lines] == [1, 2, 3]
    last = json.loads(lines[-1].splitlines()[-1])
    assert last["step"] == 3
    assert last["blocks"] == 3 * 16
    assert {"loss", "prefix", "selector_prefix", "oracle_prefix", "recall", "lr", "grad_norm", "step_s"} <= set(last)


def test_a_corpus_of_another_target_is_refused_by_number(model, shards, tmp_path) -> None:
    from blockdraft.train.corpus import Corpus

    corpus = Corpus(shards, max_length=128)
    recipe = make_recipe(draft={"target_layer_ids": (0, 2)})
    with pytest.raises(ConfigError, match=r"target_layer_ids \[0, 1, 2\] instead of \[0, 2\]"):
        make_trainer(recipe, model, corpus, tmp_path)
    wide = replace(draft_config(facts_of_model(model)), vocab_size=64, target_hidden_size=16)
    with pytest.raises(ConfigError, match="target_hidden_size 32 instead of 16, vocab_size 32 instead of 64"):
        corpus.facts.check_fits(wide)


def facts_of_model(model):
    target = HFTarget(model, TAPS)
    target.close()
    assert facts_of(target).vocab_size == 32
    return target.facts


# ---- the whole way: overfit, export, serve ---------------------------------------------------------------------------
NUM_NEW = 28


def overfit(model, folder: Path, *, v2: bool) -> Trainer:
    """A draft that knows one text by heart."""
    corpus = make_corpus(folder / "corpus", model, [[1, 2, 3]], NUM_NEW)
    none = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
    recipe = make_recipe(
        draft=None if v2 else none,
        optim={"num_steps": 150, "sequences_per_step": 1, "blocks_per_sequence": 27, "learning_rate": 1e-2},
    )
    trainer = make_trainer(recipe, model, corpus, folder / "run")
    trainer.run()
    return trainer


CASES = [("ladder", True), ("ladder", False), ("free", True)]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{'v2' if c[1] else 'v1'}")
def overfitted(request, tmp_path_factory):
    """S16 (a): the text 1, 2, 3, ... and a text without a pattern."""
    name, v2 = request.param
    model = bigram_model(lambda token: (token + 1) % 32) if name == "ladder" else tiny_model()
    if name == "ladder":
        assert plain_ids(model, [1, 2, 3], NUM_NEW) == list(range(4, 4 + NUM_NEW))
    return model, overfit(model, tmp_path_factory.mktemp(name), v2=v2)


def test_an_overfitted_draft_is_accepted_whole_when_served(overfitted, tmp_path) -> None:
    model, trainer = overfitted
    export_draft(trainer, tmp_path / "draft", {"steps": trainer.step})
    draft = DraftModel.from_checkpoint(zlab.read(tmp_path / "draft"), dtype=torch.float64)
    engine = Engine(HFTarget(model, TAPS), draft)
    completion = run_one(engine, prompt_ids=[1, 2, 3], max_new_tokens=NUM_NEW, stop_ids=frozenset())
    assert list(completion.token_ids) == plain_ids(model, [1, 2, 3], NUM_NEW)
    stats = completion.stats
    assert stats.num_accepted_draft_tokens / stats.num_draft_tokens >= 0.95
    assert stats.num_steps <= -(-(NUM_NEW - 1) // trainer.config.block_size) + 1


def test_labels_shifted_by_one_are_worse(overfitted) -> None:
    _, trainer = overfitted
    batch = trainer.corpus.batch([0])
    ids = batch.ids_BS[0].tolist()
    right = blocks_at(ids, range(3, 20), 5)
    with torch.no_grad():
        losses = {}
        for shift in (-1, 0, 1):
            moved = blocks_at(ids, range(3 + shift, 20 + shift), 5).ids_BKL
            moved[..., 0] = right.ids_BKL[..., 0]
            losses[shift], _ = trainer.loss(batch.taps_BSNE, Blocks(right.anchors_BK, moved, right.weights_BKL))
    assert losses[0] < 0.2
    assert min(losses[-1], losses[1]) > losses[0] + 1


def test_prefix_metrics_are_what_serving_would_accept(trainer_in) -> None:
    """Up to its first mistake a walk has the true tokens before it, as in training: the prefixes agree."""
    trainer = trainer_in(loss={"num_random_head_rows": 1000}, optim={"num_steps": 60, "blocks_per_sequence": 40})
    trainer.run()
    selector, generator = trainer.model.candidate_selector, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for book in (selector.predecessor_codebook, selector.successor_codebook):
            book.copy_(torch.randn(book.shape, generator=generator) * 0.6)
        selector.hidden_projection.weight.copy_(torch.randn(4, 32, generator=generator) * 0.3)
    seen = set()
    for index in range(len(PROMPTS)):
        batch = trainer.corpus.batch([index])
        ids = batch.ids_BS[0].tolist()
        for anchor in range(len(PROMPTS[index]), len(ids) - 5):
            blocks = blocks_at(ids, [anchor], 5)
            with torch.no_grad():
                _, metrics = trainer.loss(batch.taps_BSNE, blocks)
                cache = trainer.model.new_cache()
                trainer.model.inject(batch.taps_BSNE[0, :anchor], cache)
                noise = trainer.model.noise([ids[anchor]], 5, lambda t: trainer.head.embed_VE[t])
                rows = trainer.model(noise, [cache])[0]
                logits = rows[1:] @ trainer.head.head_VE.T
                walked = trainer.model.propose(rows, ids[anchor], logits, 0.0, None).ids_G.tolist()
            for name, proposed in (("prefix", logits.argmax(-1).tolist()), ("selector_prefix", walked)):
                right = [a == b for a, b in zip(proposed, ids[anchor + 1 : anchor + 5], strict=True)]
                assert metrics[name] == 1 + [*right, False].index(False)
            seen.add((metrics["prefix"], metrics["selector_prefix"]))
    assert len({walk for _, walk in seen}) > 2
    assert any(plain != walk for plain, walk in seen)


# ---- export ----------------------------------------------------------------------------------------------------------
def test_an_export_holds_weights_recipe_and_record(trainer_in, tmp_path) -> None:
    trainer = trainer_in()
    trainer.run(stop_after=2)
    run = {"steps": 2, "seconds": 1.5, "commit": None, "versions": {"torch": torch.__version__}}
    export_draft(trainer, tmp_path / "a", run)
    export_draft(trainer.folder / STATE_FILE, tmp_path / "b", run)
    for name in ("a", "b"):
        folder = tmp_path / name
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json", "model.safetensors", "recipe.toml", "run.json",
        ]  # fmt: skip
        assert json.loads((folder / "run.json").read_text()) == run
        assert read_recipe(folder / "recipe.toml") == trainer.recipe
        checkpoint = zlab.read(folder)
        assert checkpoint.config == trainer.config
        for key, tensor in trainer.model.state_dict().items():
            assert torch.equal(checkpoint.tensors[key], tensor.bfloat16())
    model, recipe, step = model_from_state(trainer.folder / STATE_FILE)
    assert (recipe, step) == (trainer.recipe.to_dict(), 2)
    assert same([*model.parameters()], weights_of(trainer))


def test_an_export_replaces_an_export_only_when_told_and_nothing_else_ever(trainer_in, tmp_path) -> None:
    trainer, folder = trainer_in(), tmp_path / "draft"
    export_draft(trainer, folder, {"steps": 0})
    with pytest.raises(CheckpointError, match="not empty"):
        export_draft(trainer, folder, {"steps": 1})
    export_draft(trainer, folder, {"steps": 1}, overwrite=True)
    assert json.loads((folder / "run.json").read_text()) == {"steps": 1}
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt"):
        export_draft(trainer, folder, {}, overwrite=True)


def test_a_failed_export_changes_nothing(trainer_in, tmp_path, monkeypatch) -> None:
    trainer, folder = trainer_in(), tmp_path / "out" / "draft"
    export_draft(trainer, folder, {"steps": 0})
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for run, broken in (({"steps": float("nan")}, None), ({"path": folder}, None), ({"steps": 1}, "fsync")):
        with monkeypatch.context() as patch:
            if broken:
                patch.setattr(os, broken, fail)
            with pytest.raises(BlockdraftError):
                export_draft(trainer, folder, run, overwrite=True)
    with torch.no_grad():
        trainer.model.fc.weight[0, 0] = torch.inf
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        export_draft(trainer, folder, {"steps": 1}, overwrite=True)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["draft"]
