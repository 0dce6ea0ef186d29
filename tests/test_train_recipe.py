"""Recipes: what may stand in a file, in one table of bad settings; what is read is what is written."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import tomllib
from dataclasses import replace

import pytest

from blockdraft.config import GqaConfig, MlaConfig, RopeConfig, TargetFacts
from blockdraft.errors import ConfigError
from blockdraft.train.recipe import (
    HubRecipe,
    MlaRecipe,
    TargetRecipe,
    differing_keys,
    read_recipe,
    recipe_from_dict,
)
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


def full_recipe():
    """A recipe with every optional table and list, and text that is awkward to quote."""
    hub = HubRecipe(dataset="a/b", config="", split="train", field="messages", suffix='"\\\n\x7f', limit=3)
    other = replace(hub, dataset="c/d", limit=0)
    recipe = make_recipe(
        prompts={"files": ("a.jsonl", "ü b.jsonl"), "hub": (hub, other), "held_out": 2},
        draft={"windows": (0, 16), "initial": "target_layers", "initial_layers": (2, 2)},
        evaluation={"every_steps": 10, "num_prompts": 2, "max_new_tokens": 8, "width": 4},
        target=TargetRecipe(name="some/where", facts=FACTS),
    )
    rope = RopeConfig(
        theta=1e4, kind="yarn", params=(("factor", 32), ("original_max_position_embeddings", 512), ("mscale", 1))
    )
    mla = MlaRecipe(q_lora_rank=0, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    return replace(recipe, draft=replace(recipe.draft, gqa=None, mla=mla, rope=rope))


def test_every_table_and_list_reads_back(tmp_path) -> None:
    recipe = full_recipe()
    path = tmp_path / "r.toml"
    path.write_text(recipe.to_toml())
    assert read_recipe(path) == recipe
    assert recipe_from_dict(recipe.to_dict(), where="state") == recipe
    tables = tomllib.loads(recipe.to_toml())
    assert [source["limit"] for source in tables["prompts"]["hub"]] == [3, 0]
    assert tables["target"]["facts"]["pad_token_id"] == -1
    assert "gqa" not in tables["draft"]
    assert tables["draft"]["rope"]["factor"] == 32.0


def test_every_setting_of_a_recipe_is_needed() -> None:
    """Take any one key out: it is named as missing, or it is a whole table that may be absent."""
    absent = {"target.facts", "prompts.hub"}
    rope = {f"draft.rope.{name}" for name in ("beta_fast", "beta_slow", "mscale")}
    keys = list(dotted(full_recipe().to_dict(), ""))
    assert len(keys) > 90
    for key in keys:
        raw = full_recipe().to_dict()
        *sections, name = key.split(".")
        del functools.reduce(operator.getitem, sections, raw)[name]
        if key in absent | rope:
            recipe_from_dict(raw, where="r.toml")
            continue
        with pytest.raises(ConfigError) as caught:
            recipe_from_dict(raw, where="r.toml")
        assert name in str(caught.value) or key == "draft.mla", str(caught.value)
        assert "\n" not in str(caught.value)


def dotted(tables: dict, prefix: str):
    for key, value in tables.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")


NO_V2 = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)
SELF_WRITTEN = {
    "self_written": 4, "openings": ("", "What"), "temperature": 1.0, "top_p": 0.9, "max_tokens": 9, "held_out": 2,
}  # fmt: skip
EVALUATION = {"every_steps": 10, "num_prompts": 2, "max_new_tokens": 8, "width": 5}

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
    ("optim.kind", "sgd", 'optim.kind is \'sgd\'; allowed are "adamw" and "muon"'),
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
    ("target", {}, "target.name is missing"),
    ("target.name", "", "target.name is empty"),
    ("target.facts", {"model_type": "llama"}, "target.facts.vocab_size is missing"),
    ("prompts.files", "a.jsonl", "prompts.files is a list of strings, not 'a.jsonl'"),
    ("prompts.files", ["a", "a"], "prompts.files holds 'a' twice"),
    ("prompts.files", [""], "prompts.files holds an empty name"),
    ("prompts.openings", ["What"], "has no effect, because prompts.self_written is 0; write []"),
    ("prompts.temperature", 1.0, "because prompts.self_written is 0; write 0.0"),
    ("prompts.top_p", 0.9, "because prompts.self_written is 0; write 1.0"),
    ("prompts.top_p", 0.0, "it must be above 0"),
    ("prompts.max_tokens", 9, "because prompts.self_written is 0; write 0"),
    ("prompts.self_written", 5, "prompts.openings is empty"),
    ("prompts.held_out", 5, "prompts.held_out is 5, and there are 0 prompts"),
    ("prompts.hub", 3, "prompts.hub is a list of tables, each under [[prompts.hub]]"),
    ("prompts.hub", [{"dataset": "a"}], "prompts.hub.config is missing"),
    ("text.max_new_tokens", 128, "it must be below max_length, 128"),
    ("text.batch_size", 0, "text.batch_size is 0"),
    ("text.top_p", 0.9, "because text.temperature is 0; write 1.0"),
    ("text.dtype", "float16", '"float32" and "bfloat16"'),
    ("text.features", "ram", '"disk" and "online"'),
    ("text.features", "online", "text.features_dtype is 'bfloat16' while text.features is 'online'"),
    ("text.features_dtype", "none", "text.features_dtype is 'none' while text.features is 'disk'"),
    ("text.num_processes", 0, "text.num_processes is 0"),
    ("draft.block_size", 129, "max_length is only 128"),
    ("draft.windows", [0], "one number for each of the 2 layers"),
    ("draft.windows", [0, -1], "at least 0"),
    ("draft.initial", "zeros", '"random", "target_layers" and "draft"'),
    ("draft.initial", "draft", "name a draft where initial is"),
    ("draft.initial_draft", "some/draft", 'write "" elsewhere'),
    ("draft.initial", "target_layers", "list 2 target layers"),
    ("draft.initial_layers", [0, 1], "list no target layers"),
    ("draft.input_embedding_scale", 0.0, "draft.input_embedding_scale is 0"),
    ("draft.final_logit_softcapping", -1.0, "must not be negative"),
    ("draft.mla", {}, "draft.mla.q_lora_rank is missing"),
    (
        "draft.mla",
        dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
        "both are given",
    ),
    ("draft.gqa", None, "[draft.gqa] is a table"),
    ("draft.gqa.heads", 2, "unknown key draft.gqa.heads"),
    ("draft.rope", {"theta": 1e4}, "draft.rope.kind is missing"),
    ("draft.rope.kind", "ntk", "draft.rope: rope_type is 'ntk'"),
    ("draft.rope.factor", 8.0, "draft.rope: rope parameter factor is unknown for rope_type default"),
    ("draft.rope.factor", "8", "factor is a float, not '8'"),
    ("loss.kind", "kld", '"ce" and "kl"'),
    ("loss.kind", "kl", "loss.kl_temperature is 0"),
    ("loss.kl_temperature", 1.0, 'because loss.kind is "ce"; write 0.0'),
    ("loss.weighting", "decay", "loss.decay_gamma is 0"),
    ("loss.weighting", "none", 'loss.dpace_smoothing is 0.5 and has no effect, because loss.weighting is "none"'),
    ("loss.selector_weight", 0.0, "loss.selector_start_step is 2 and has no effect"),
    ("loss.selector_start_step", 40, "the selector would never be trained"),
    ("loss.full_head_from", 1.5, "from 0 to 1"),
    ("loss.full_head_from", 0.0, "loss.num_random_head_rows is 6 and has no effect"),
    ("loss.head_chunk_blocks", -1, "loss.head_chunk_blocks is -1"),
    ("optim.schedule", "linear", '"wsd" and "cosine"'),
    ("optim.schedule", "cosine", "optim.decay_fraction is 0.25 and has no effect"),
    ("optim.decay_fraction", 0.0, "optim.final_lr_fraction is 0.05 and has no effect"),
    ("optim.device", "tpu", '"cpu", "cuda" and "auto"'),
    ("optim.sharding", "zero3", '"none", "ddp" and "fsdp2"'),
    ("optim.taps_noise", -0.1, "must not be negative"),
    ("evaluation.every_steps", 5, "evaluation.num_prompts is 0"),
    ("evaluation.num_prompts", 5, "because evaluation.every_steps is 0, never; write 0"),
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft": NO_V2, "loss": {"selector_weight": 1.0}}, "because a DFlash draft has no selector"),
        ({"prompts": SELF_WRITTEN, "evaluation": EVALUATION | {"num_prompts": 3}}, "keeps only 2 out of training"),
        ({"prompts": SELF_WRITTEN, "evaluation": EVALUATION | {"width": 6}}, "must not exceed draft.block_size, 5"),
        ({"prompts": SELF_WRITTEN | {"held_out": 4}}, "nothing would be left to train on"),
        ({"prompts": SELF_WRITTEN | {"temperature": 0.0}}, "prompts.temperature is 0.0"),
        ({"prompts": SELF_WRITTEN | {"max_tokens": 0}}, "prompts.max_tokens is 0"),
        ({"target": TargetRecipe(name="x", facts=FACTS), "draft": {"target_layer_ids": (0, 3)}}, "holds 3"),
    ],
)
def test_sections_that_contradict_each_other(changes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(**changes)
    assert words in str(caught.value)


def test_sections_that_agree_are_taken() -> None:
    make_recipe(prompts=SELF_WRITTEN, evaluation=EVALUATION)
    make_recipe(draft=NO_V2)
    make_recipe(loss={"kind": "kl", "weighting": "none", "full_head_from": 0.0, "num_random_head_rows": 0})
    make_recipe(text={"features": "online", "features_dtype": "none"})
    make_recipe(optim={"schedule": "cosine", "decay_fraction": 0.0})


def test_facts_must_be_those_of_the_target_at_hand() -> None:
    TargetRecipe(name="x").check_facts(FACTS)
    recipe = TargetRecipe(name="x", facts=FACTS)
    recipe.check_facts(FACTS)
    with pytest.raises(ConfigError, match=r"target\.facts\.max_length is 512, the target at hand has 100; correct"):
        recipe.check_facts(replace(FACTS, max_length=100))


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
        ({"initial": "target_layers", "initial_layers": (0, 3)}, "draft.initial_layers holds 3"),
        ({"windows": (0, 513)}, "draft.windows holds 513, more than the target's 512 positions"),
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


def test_a_cosine_falls_from_the_warm_up_to_its_floor() -> None:
    optim = make_recipe(
        optim={"num_steps": 100, "learning_rate": 2.0, "schedule": "cosine", "decay_fraction": 0.0}
    ).optim
    rates = [optim.lr_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])
    expected = [2.0 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done / 90))) for done in range(90)]
    assert rates[10:] == pytest.approx(expected)
    assert rates[10] == 2.0


def test_a_draft_has_the_configuration_that_its_section_says() -> None:
    recipe = full_recipe()
    config = recipe.draft.config(FACTS)
    mla = MlaConfig(
        num_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        has_bias=False,
    )  # fmt: skip
    assert config.attention == mla
    assert [layer.window for layer in config.layers] == [None, 16]
    assert config.rope == recipe.draft.rope
    assert config.final_logit_softcapping is None
    scaled = make_recipe(draft={"final_logit_softcapping": 20.0, "output_multiplier": 0.196}).draft.config(FACTS)
    assert (scaled.final_logit_softcapping, scaled.output_multiplier) == (20.0, 0.196)
    assert scaled.attention == GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, has_bias=False)


def test_differing_keys_are_dotted_names() -> None:
    one, two = make_recipe(), make_recipe(optim={"beta1": 0.8}, draft={"target_layer_ids": (0, 1)}, seed=9)
    assert differing_keys(one.to_dict(), two.to_dict()) == ["draft.target_layer_ids", "optim.beta1", "seed"]
    assert differing_keys({"a": (1, 2)}, {"a": [1, 2]}) == []
