"""Which stream of a Kimi-K3 target a draft reads: in recipes and corpora, in the exported file, asked for, measured."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.config import TapStream, TargetFacts
from blockdraft.engine import load
from blockdraft.engine.tap_stream import PROBE_TEXTS
from blockdraft.errors import CheckpointError, ConfigError, PairError, RequestError
from blockdraft.formats import zlab
from blockdraft.formats.known_streams import hub_id_of, known_stream
from blockdraft.targets.kimi_k3 import write
from blockdraft.train.command import run_training
from blockdraft.train.corpus import Corpus
from blockdraft.train.corpus_facts import CorpusFacts
from blockdraft.train.online import OnlineCorpus
from blockdraft.train.recipe import Recipe
from kimi_k3_kit import TINY, edited, tiny_model, tiny_target
from tiny_pair import TinyPair, _write_tokenizer, run_cli
from train_kit import make_recipe

NUM_STEPS = 120
STREAMS: tuple[TapStream, ...] = ("prefix", "attn_res")
K3, LLAMA = TargetFacts.from_config(TINY), TargetFacts.from_config({**TINY["text_config"], "model_type": "llama"})


def recipe_of(stream: str, place: Path, **changes: Any) -> Recipe:
    """Short answers to the prompts of the probe, read at three layers of the tiny target."""
    draft = {"mask_token_id": 3, "target_layer_ids": (1, 4, 7), "tap_stream": stream, **changes.pop("draft", {})}
    recipe = make_recipe(
        draft=draft,
        optim={"num_steps": NUM_STEPS, "sequences_per_step": 3, "blocks_per_sequence": 32},
        prompts={"files": (str(place / "prompts.jsonl"),), "held_out": 1},
        text={"max_new_tokens": 40, "batch_size": 8},
        evaluation={"every_steps": NUM_STEPS, "num_prompts": 1, "max_new_tokens": 16, "width": 5},
        max_length=250,
        **changes,
    )
    return replace(recipe, target=replace(recipe.target, name=str(place / "target")))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/ with a tokenizer, and the probe's prompts among others."""
    root = tmp_path_factory.mktemp("place")
    (root / "words").mkdir()
    vocab = _write_tokenizer(root / "words")
    write(tiny_model(vocab_size=vocab, dtype=torch.float32), edited(vocab_size=vocab), root / "target")
    for file in (root / "words").iterdir():
        file.rename(root / "target" / file.name)
    prompts = [*PROBE_TEXTS, "the lazy dog", "a quick brown fox"]
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return root


@pytest.fixture(autouse=True)
def short_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.tap_stream.PROBE_NEW_TOKENS", 32)


@pytest.fixture(scope="module")
def trained(place: Path) -> dict[str, Path]:
    """One drafter for each stream, overfitted for a few steps."""
    found: dict[str, Path] = {}
    for stream in STREAMS:
        run = run_training_of(recipe_of(stream, place), place, place / stream)
        assert run.draft is not None
        found[stream] = run.draft
    return found


def run_training_of(recipe: Recipe, place: Path, out: Path, corpus: Path | None = None) -> Any:
    (place / "recipe.toml").write_text(recipe.to_toml())
    return run_training(place / "recipe.toml", corpus, place / "target", out, has_gates=False)


def silent(draft: Path, folder: Path) -> Path:
    """A copy whose config says nothing of the stream."""
    shutil.copytree(draft, folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["dflash_config"]["aux_hidden_stream"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


# ---- training --------------------------------------------------------------------------------------------------------
def test_corpus_evaluation_and_export_have_the_stream(place: Path, trained: dict[str, Path]) -> None:
    for stream, draft in trained.items():
        assert CorpusFacts.read(place / stream / "corpus").tap_stream == stream
        assert zlab.read(draft).config.tap_stream == stream
        [line] = (place / stream / "evaluations.jsonl").read_text().splitlines()
        assert json.loads(line)["num_steps"] > 0
    taps = [Corpus(place / stream / "corpus", max_length=250).batch([0]) for stream in STREAMS]
    assert torch.equal(taps[0].ids_BS, taps[1].ids_BS)  # the text is the target's own, whatever is tapped
    assert float((taps[0].taps_BSNE - taps[1].taps_BSNE).norm() / taps[0].taps_BSNE.norm()) > 0.1


def test_a_corpus_of_the_other_stream_is_refused(place: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has tap_stream prefix instead of attn_res; write a corpus") as caught:
        run_training_of(recipe_of("attn_res", place), place, tmp_path / "out", place / "prefix" / "corpus")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="tap_stream"):
        run_training_of(recipe_of("attn_res", place), place, place / "prefix")


def test_taps_computed_in_the_step_are_of_the_drafts_stream() -> None:
    recipe = make_recipe(draft={"mask_token_id": 3, "target_layer_ids": (1, 4), "tap_stream": "attn_res"})
    facts = CorpusFacts(
        target="tiny", weights_sha256="", tokenizer_sha256="", chat_template_sha256="", vocab_size=K3.vocab_size,
        target_hidden_size=K3.hidden_size, target_layer_ids=(), tap_stream="none", last_layer_id=None,
        features_dtype="none",
    )  # fmt: skip
    text = type("Text", (), {"facts": facts, "max_length": 64})()
    config = recipe.draft.config(K3)
    OnlineCorpus(text, tiny_target((1, 4), stream="attn_res"), target_layer_ids=(1, 4)).check_fits(config)
    wrong = OnlineCorpus(text, tiny_target((1, 4)), target_layer_ids=(1, 4))
    with pytest.raises(ConfigError, match="loaded with taps of the stream prefix, the draft reads attn_res"):
        wrong.check_fits(config)


def test_what_a_recipe_may_say(tmp_path: Path) -> None:
    def config(stream: str, facts: TargetFacts) -> Any:
        return make_recipe(draft={"mask_token_id": 3, "tap_stream": stream}).draft.config(facts)

    assert [config(stream, K3).tap_stream for stream in STREAMS] == list(STREAMS)
    assert config("plain", LLAMA).tap_stream is None
    parallel = replace(LLAMA, model_type="qwen4_exp_text")
    assert config("mean", parallel).tap_stream == "mean"
    with pytest.raises(ConfigError, match="'plain', and the target is qwen4_exp_text: write 'mean'"):
        config("plain", parallel)
    with pytest.raises(ConfigError, match=r"that is no mean of its streams: set loss\.kind=ce$"):
        make_recipe(draft={"tap_stream": "mean"}, loss={"kind": "kl"})
    with pytest.raises(ConfigError, match="'plain', and the target is kimi_k3: write 'prefix' or 'attn_res'"):
        config("plain", K3)
    with pytest.raises(ConfigError, match="'attn_res', and the target is llama: write 'plain'"):
        config("attn_res", LLAMA)
    with pytest.raises(ConfigError, match=r"draft\.tap_stream is 'mixture'"):
        make_recipe(draft={"tap_stream": "mixture"})
    with pytest.raises(ConfigError, match=r"loss\.kind is \"kl\" and draft\.tap_stream is \"prefix\""):
        make_recipe(draft={"tap_stream": "prefix"}, loss={"kind": "kl"})
    make_recipe(draft={"tap_stream": "attn_res"}, loss={"kind": "kl"})


def test_a_corpus_says_a_stream_exactly_where_it_has_taps(trained: dict[str, Path], tmp_path: Path) -> None:
    facts = CorpusFacts.read(trained["prefix"].parent / "corpus")
    replace(facts, tap_stream="none").write(tmp_path)
    with pytest.raises(CheckpointError, match="tap_stream is 'none' while features_dtype is 'bfloat16'"):
        CorpusFacts.read(tmp_path)
    with pytest.raises(ConfigError, match="tap_stream is 'mixture'"):
        replace(facts, tap_stream="mixture")


# ---- loading ---------------------------------------------------------------------------------------------------------
def test_a_silent_draft_is_not_guessed_at(place: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    draft = silent(trained["attn_res"], tmp_path / "draft")
    with pytest.raises(PairError, match=r"does not say which stream of kimi_k3 it reads; name it .*--tap-stream"):
        load(draft, place / "target")
    left_out = load(draft, place / "target", speculation="optional")
    assert left_out.draft is None and "--tap-stream" in left_out.draft_off_reason
    for stream in STREAMS:  # over what the file says, too
        for folder in (draft, trained["prefix"]):
            engine = load(folder, place / "target", tap_stream=stream)
            assert engine.draft is not None and engine.draft.config.tap_stream == engine.target.tap_stream == stream
            assert engine.tap_choice is None


def test_known_checkpoints(place: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    def cached(name: str) -> Path:
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "0a1b"
        folder.parent.mkdir(parents=True)
        return silent(trained["prefix"], folder)

    engine = load(cached("modal-labs/Kimi-K3-DFlash"), place / "target")
    assert engine.target.tap_stream == "attn_res"
    assert load(cached("Inferact/Kimi-K3-DSpark"), place / "target").target.tap_stream == "prefix"
    with pytest.raises(PairError, match=r"\(prefix would fit: TokenSpeed reads a file that is silent so\); name it"):
        load(cached("lightseekorg/kimi-k3-dflash2"), place / "target")
    known = known_stream("RadixArk/Kimi-K3.1-Dflash2-Preview")
    assert known is not None and (known.stream, known.is_inferred) == ("attn_res", True)
    assert hub_id_of(tmp_path) is None and known_stream("some/draft") is None


def test_words_that_have_no_place(place: Path, trained: dict[str, Path], tiny_pair: TinyPair) -> None:
    with pytest.raises(RequestError, match=r"tap_stream is 'mixture'; allowed are \"prefix\", \"attn_res\""):
        load(trained["prefix"], place / "target", tap_stream="mixture")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="speculation is off"):
        load(None, place / "target", speculation="off", tap_stream="auto")
    for word in ("prefix", "auto"):
        with pytest.raises(PairError, match=f"tap_stream is '{word}', and llama has one stream of taps: leave it out"):
            load(tiny_pair.draft, tiny_pair.target, tap_stream=word)  # type: ignore[arg-type]


# ---- measuring -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", STREAMS)
def test_auto_takes_the_stream_that_the_draft_was_trained_on(
    place: Path, trained: dict[str, Path], tmp_path: Path, stream: TapStream
) -> None:
    engine = load(silent(trained[stream], tmp_path / "draft"), place / "target", tap_stream="auto")
    choice = engine.tap_choice
    assert choice is not None and engine.draft is not None
    assert choice.stream == engine.target.tap_stream == engine.draft.config.tap_stream == stream
    [other] = set(STREAMS) - {stream}
    assert choice.acceptance_lengths[stream] > 1.3 * choice.acceptance_lengths[other] >= 1.3
    assert f"took {stream} (acceptance length prefix " in str(choice)


def test_auto_on_the_command_line(place: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    draft = silent(trained["attn_res"], tmp_path / "draft")
    words = ["generate", draft, "--target", place / "target", "--max-new-tokens", "4", "--json", "a fox"]
    ran = run_cli(*map(str, [*words, "--tap-stream", "auto"]))
    assert ran.code == 0 and "tap_stream auto: took attn_res (acceptance length prefix 1." in ran.err
    refused = run_cli(*map(str, words))
    assert refused.code == 2 and "--tap-stream" in refused.err


def test_auto_that_cannot_tell_is_an_error(place: Path, trained: dict[str, Path], tmp_path: Path) -> None:
    """A draft that ignores its taps has the same acceptance with both."""
    checkpoint = zlab.read(trained["prefix"])
    tensors = {name: torch.zeros_like(x) if name == "fc.weight" else x for name, x in checkpoint.tensors.items()}
    zlab.write(tmp_path / "draft", zlab.Checkpoint(checkpoint.config, tensors), dtype="float32")
    with pytest.raises(PairError, match=r"auto cannot tell the streams apart: acceptance length prefix .*; name"):
        load(tmp_path / "draft", place / "target", tap_stream="auto")
