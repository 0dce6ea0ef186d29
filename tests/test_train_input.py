"""Recipes and corpora that cannot be meant, or cannot be read: one line that says what, what is allowed, what to do."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.config import TargetFacts
from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from blockdraft.train.corpus import Corpus
from blockdraft.train.recipe import differing_keys, read_recipe, recipe_from_dict
from engine_kit import tiny_model
from train_kit import make_corpus, make_recipe

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


# ---- recipes ---------------------------------------------------------------------------------------------------------
def test_a_recipe_reads_back_from_its_own_text(tmp_path) -> None:
    recipe = make_recipe(optim={"learning_rate": 1e-5, "weight_decay": 0.0}, draft={"rope_theta": 1e16})
    path = tmp_path / "r.toml"
    path.write_text(recipe.to_toml())
    assert read_recipe(path) == recipe
    assert tomllib.loads(recipe.to_toml())["draft"]["target_layer_ids"] == [0, 1, 2]
    assert recipe_from_dict(recipe.to_dict(), where="state") == recipe


def test_shipped_recipes_are_valid() -> None:
    import blockdraft.train.recipe as module

    paths = sorted((Path(module.__file__).parent / "recipes").glob("*.toml"))
    for path in paths:
        assert read_recipe(path).to_toml()


SET = object()
BAD = [
    ("seed", -1, "seed is -1"),
    ("seed", 2**63, "below 2^63"),
    ("seed", 1.5, "seed is a int, not 1.5"),
    ("max_length", 3, "max_length is 3"),
    ("save_every_steps", 0, "save_every_steps is 0"),
    ("sead", 1, "unknown key sead; did you mean seed?"),
    ("draft", 1, "[draft] is a table"),
    ("draft.block_siz", 4, "unknown key draft.block_siz; did you mean block_size?"),
    ("draft.zzz", 4, "unknown key draft.zzz; known: num_layers"),
    ("draft.block_size", 1, "draft.block_size is 1"),
    ("draft.block_size", True, "block_size is a int, not True"),
    ("draft.block_size", "8", "block_size is a int, not '8'"),
    ("draft.num_layers", 0, "draft.num_layers is 0"),
    ("draft.num_kv_heads", 3, "num_heads must be a multiple of num_kv_heads"),
    ("draft.head_dim", 7, "head_dim even"),
    ("draft.rms_norm_eps", 0, "draft.rms_norm_eps is 0"),
    ("draft.rope_theta", -1.0, "draft.rope_theta is -1"),
    ("draft.rope_theta", 10**400, "rope_theta has 401 digits"),
    ("draft.mask_token_id", -1, "draft.mask_token_id is -1"),
    ("draft.target_layer_ids", [], "list at least one layer"),
    ("draft.target_layer_ids", [2, 1], "rising"),
    ("draft.target_layer_ids", [1, 1], "each once"),
    ("draft.target_layer_ids", [-1, 1], "at least 0"),
    ("draft.target_layer_ids", [0.5], "list of whole numbers"),
    ("draft.target_layer_ids", 3, "list of whole numbers"),
    ("draft.is_causal", 0, "is_causal is a bool, not 0"),
    ("draft.conv_kernel_size", 0, "while conv_kernel_size is 0; convolution and selector come together"),
    ("draft.selector_rank", 0, "while selector_rank is 0"),
    ("draft.selector_top_k", -1, "draft.selector_top_k is -1"),
    ("loss.weighting", "flat", '"dpace" and "decay"'),
    ("loss.weighting", 3, "weighting is a str, not 3"),
    ("loss.dpace_smoothing", 1.5, "from 0 to 1"),
    ("loss.decay_gamma", 0.0, "loss.decay_gamma is 0"),
    ("loss.selector_weight", -0.1, "must not be negative"),
    ("loss.selector_start_step", -1, "loss.selector_start_step is -1"),
    ("loss.num_random_head_rows", -1, "loss.num_random_head_rows is -1"),
    ("optim.num_steps", 0, "optim.num_steps is 0"),
    ("optim.sequences_per_step", 0, "optim.sequences_per_step is 0"),
    ("optim.learning_rate", -1e-3, "optim.learning_rate is -0.001"),
    ("optim.learning_rate", float("nan"), "finite"),
    ("optim.learning_rate", float("inf"), "finite"),
    ("optim.learning_rate", "1e-3", "learning_rate is a float, not '1e-3'"),
    ("optim.beta1", 1.0, "optim.beta1 is 1.0; it must be below 1"),
    ("optim.beta2", -0.1, "from 0 to 1"),
    ("optim.weight_decay", -1.0, "must not be negative"),
    ("optim.max_grad_norm", 0.0, "optim.max_grad_norm is 0"),
    ("optim.warmup_fraction", 1.1, "from 0 to 1"),
    ("optim.warmup_fraction", 0.8, "warmup_fraction 0.8 + decay_fraction 0.25 is above 1"),
    ("optim.final_lr_fraction", -0.5, "from 0 to 1"),
    ("optim.autocast", "float16", '"none" and "bfloat16"'),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD, ids=[f"{k}={v}"[:40] for k, v, _ in BAD])
def test_a_bad_setting_is_one_clear_line(key: str, value, words: str) -> None:
    raw = make_recipe().to_dict()
    *section, name = key.split(".")
    (raw[section[0]] if section else raw)[name] = value
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(raw, where="r.toml")
    message = str(caught.value)
    assert message.startswith("r.toml: ")
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("key", ["seed", "optim", "loss.weighting", "draft.mask_token_id"])
def test_a_missing_setting_is_named(key: str) -> None:
    raw = make_recipe().to_dict()
    *section, name = key.split(".")
    del (raw[section[0]] if section else raw)[name]
    with pytest.raises(ConfigError, match=rf"r\.toml: {key} is missing"):
        recipe_from_dict(raw, where="r.toml")


@pytest.mark.parametrize("content", [b"seed = ", b"\xff\xfe", b"seed = 1\nseed = 2"])
def test_a_file_that_is_no_toml_is_named(tmp_path, content: bytes) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.toml: not valid TOML"):
        read_recipe(path)
    with pytest.raises(ConfigError, match="no such recipe"):
        read_recipe(tmp_path / "other.toml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask_token_id": 32}, "mask_token_id is 32"),
        ({"mask_token_id": 31}, "mask_token_id is 31, an end id of the target"),
        ({"target_layer_ids": (1, 3)}, "target_layer_ids holds 3"),
        ({"conv_group_size": 5}, "conv_group_size is 5"),
        ({"selector_top_k": 33}, "selector_top_k is 33"),
        ({"block_size": 600}, "block_size is 600"),
    ],
)
def test_a_recipe_that_does_not_fit_the_target_is_refused(changes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(draft=changes).draft.config(FACTS)
    assert words in str(caught.value)


def test_the_learning_rate_warms_up_holds_and_falls() -> None:
    optim = make_recipe(optim={"num_steps": 100, "learning_rate": 2.0}).optim
    rates = [optim.lr_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    assert set(rates[9:76]) == {2.0}
    assert all(a > b for a, b in itertools.pairwise(rates[75:]))
    assert rates[-1] == pytest.approx(2.0 * (0.05 + 0.95 / 25))
    flat = make_recipe(optim={"decay_fraction": 0.0, "warmup_fraction": 0.0}).optim
    assert {flat.lr_at(step) for step in range(40)} == {flat.learning_rate}


def test_differing_keys_are_dotted_names() -> None:
    one, two = make_recipe(), make_recipe(optim={"beta1": 0.8}, draft={"target_layer_ids": (0, 1)}, seed=9)
    assert differing_keys(one.to_dict(), two.to_dict()) == ["draft.target_layer_ids", "optim.beta1", "seed"]
    assert differing_keys({"a": (1, 2)}, {"a": [1, 2]}) == []


# ---- corpora ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path) -> Path:
    make_corpus(tmp_path / "corpus", tiny_model(dtype=torch.float32), [[1, 2, 3], [4, 5]], 8)
    return tmp_path / "corpus"


def open_corpus(folder: Path, max_length: int = 64) -> Corpus:
    return Corpus(folder, max_length=max_length)


def test_a_batch_is_the_shards_content_padded(folder: Path) -> None:
    corpus = open_corpus(folder)
    shard = load_file(folder / "a-0000.safetensors")
    assert (len(corpus), corpus.num_answer_tokens) == (2, 16)
    batch = corpus.batch([1, 0])
    assert batch.len_B.tolist() == [10, 11]
    assert batch.prompt_len_B.tolist() == [2, 3]
    assert torch.equal(batch.ids_BS[1].int(), shard["ids"][:11])
    assert torch.equal(batch.ids_BS[0, :10].int(), shard["ids"][11:])
    assert torch.equal(batch.taps_BSNE[0, :10], shard["taps"][11:].float())
    assert batch.ids_BS[0, 10] == 0
    assert not batch.taps_BSNE[0, 10].any()
    assert torch.equal(corpus.token_ids(), shard["ids"].long().unique())


def test_sequences_too_long_or_too_short_are_left_out(folder: Path) -> None:
    assert len(open_corpus(folder, max_length=10)) == 1
    with pytest.raises(CheckpointError, match=r"no usable sequence \(1 shards; usable are .* max_length 9"):
        open_corpus(folder, max_length=9)


def test_an_empty_corpus_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a corpus, it has no corpus\.json"):
        open_corpus(tmp_path)
    (folder / "a-0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no usable sequence"):
        open_corpus(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: "{", "cannot be read as JSON"),
        (lambda raw: [], "must hold target, target_layer_ids"),
        (lambda raw: {**raw, "more": 1}, "must hold"),
        (lambda raw: {k: v for k, v in raw.items() if k != "vocab_size"}, "must hold"),
        (lambda raw: {**raw, "vocab_size": "32"}, "vocab_size is '32'"),
        (lambda raw: {**raw, "vocab_size": 0}, "vocab_size is 0"),
        (lambda raw: {**raw, "target_layer_ids": 3}, "target_layer_ids is 3"),
        (lambda raw: {**raw, "target_layer_ids": [True]}, "target_layer_ids is True"),
        (lambda raw: {**raw, "target": None}, "target is None"),
        (lambda raw: {**raw, "target_layer_ids": [0, 1]}, r"taps have shape"),
        (lambda raw: {**raw, "vocab_size": 8}, "the target has 0 to 7"),
    ],
)
def test_bad_facts_are_named(folder: Path, change, words: str) -> None:
    path = folder / "corpus.json"
    raw = change(json.loads(path.read_text()))
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    with pytest.raises(CheckpointError) as caught:
        open_corpus(folder)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def edit(shard, **changes):
    return {**shard, **changes}


BROKEN = [
    (lambda s: {k: v for k, v in s.items() if k != "taps"}, "a shard holds ids, taps, prompt_len, len"),
    (lambda s: edit(s, more=torch.ones(1)), "a shard holds"),
    (lambda s: edit(s, taps=s["taps"][:-1].clone()), "taps have shape [20, 3, 32]"),
    (lambda s: edit(s, taps=s["taps"][:, :2].clone()), "taps have shape [21, 2, 32]"),
    (lambda s: edit(s, len=torch.tensor([11, 11])), "do not add up"),
    (lambda s: edit(s, len=torch.tensor([11])), "do not add up"),
    (lambda s: edit(s, prompt_len=torch.tensor([3, 12])), "do not add up"),
    (lambda s: edit(s, prompt_len=torch.tensor([-1, 2])), "do not add up"),
    (lambda s: edit(s, ids=s["ids"] - 40), "ids run from"),
    (lambda s: edit(s, ids=s["ids"] + 30), "the target has 0 to 31"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_a_shard_that_contradicts_itself_is_named(folder: Path, change, words: str) -> None:
    path = folder / "a-0000.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(CheckpointError, match=r"a-0000\.safetensors") as caught:
        open_corpus(folder)
    assert words in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_a_torn_shard_is_named(folder: Path, share: float) -> None:
    corpus = open_corpus(folder)
    content = (folder / "a-0000.safetensors").read_bytes()
    (folder / "b-0000.safetensors").write_bytes(content[: int(len(content) * share)])
    for attempt in (lambda: open_corpus(folder), corpus.rescan):
        with pytest.raises(BlockdraftError, match=r"b-0000\.safetensors: the shard is damaged") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert len(corpus) == 2
