"""Recipes: what may stand in a file, in one table of bad settings; what is read is what is written."""

from __future__ import annotations

import functools
import itertools
import operator
import tomllib
from pathlib import Path

import pytest

from blockdraft.config import RopeConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.train.recipe import differing_keys, read_recipe, recipe_from_dict
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


def test_a_recipe_reads_back_from_its_own_text(tmp_path) -> None:
    recipe = make_recipe(optim={"learning_rate": 1e-5, "weight_decay": 0.0}, draft={"rope": RopeConfig(theta=1e16)})
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
    ("draft.gqa.num_kv_heads", 3, "num_heads must be a multiple of num_kv_heads"),
    ("draft.gqa.head_dim", 7, "head_dim even"),
    ("draft.rms_norm_eps", 0, "draft.rms_norm_eps is 0"),
    ("draft.rope.theta", -1.0, "draft.rope: rope_theta is -1"),
    ("draft.rope.theta", 10**400, "theta has 401 digits"),
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
    ("loss.weighting", "flat", '"dpace", "decay" and "none"'),
    ("loss.weighting", 3, "weighting is a str, not 3"),
    ("loss.dpace_smoothing", 1.5, "from 0 to 1"),
    ("loss.decay_gamma", 4.0, 'has no effect, because loss.weighting is "dpace"; write 0'),
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
    ("optim.autocast", "float16", '"none", "bfloat16" and "auto"'),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD, ids=[f"{k}={v}"[:40] for k, v, _ in BAD])
def test_a_bad_setting_is_one_clear_line(key: str, value, words: str) -> None:
    raw = make_recipe().to_dict()
    *sections, name = key.split(".")
    functools.reduce(operator.getitem, sections, raw)[name] = value
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
    flat = make_recipe(optim={"decay_fraction": 0.0, "warmup_fraction": 0.0, "final_lr_fraction": 1.0}).optim
    assert {flat.lr_at(step) for step in range(40)} == {flat.learning_rate}


def test_differing_keys_are_dotted_names() -> None:
    one, two = make_recipe(), make_recipe(optim={"beta1": 0.8}, draft={"target_layer_ids": (0, 1)}, seed=9)
    assert differing_keys(one.to_dict(), two.to_dict()) == ["draft.target_layer_ids", "optim.beta1", "seed"]
    assert differing_keys({"a": (1, 2)}, {"a": [1, 2]}) == []
