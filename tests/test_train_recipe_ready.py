"""Ready recipes and changes on the command line: every one resolves, and full-size ones have the published sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blockdraft
from blockdraft.config import MlaConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from blockdraft.train.overrides import apply_overrides, ready_recipes, recipe_path, resolve_recipe
from blockdraft.train.recipe import read_recipe
from train_kit import make_recipe

# Published or computed by hand from published shapes; without a copy of the target's embedding, and with one.
PARAMETERS = {
    "smollm2-135m": (15_409_792, None),
    "single-gpu": (1_169_573_120, None),
    "multi-gpu": (1_169_573_120, None),
    "qwen3.8-27b": (1_924_404_480, None),
    "kimi-k3-5-layer": (2_518_472_704, 3_692_877_824),
    "kimi-k3-6-layer": (3_005_020_160, 4_179_425_280),
    "kimi-k3.1": (2_784_811_008, None),
}


def by_hand(name: str) -> int:
    """The sum over a draft's matrices, written out."""
    draft, facts = resolve_recipe(name).recipe.draft, resolve_recipe(name).recipe.target.facts
    assert facts is not None
    width, heads = facts.hidden_size, draft.num_heads
    if draft.gqa is not None:
        head, kv = draft.gqa.head_dim, draft.gqa.num_kv_heads
        attention = width * heads * head * 2 + 2 * width * kv * head + 2 * head
    else:
        mla = draft.mla
        assert mla is not None
        nope, turned, value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
        attention = width * mla.q_lora_rank + mla.q_lora_rank * heads * (nope + turned) + mla.q_lora_rank
        attention += width * (mla.kv_lora_rank + turned) + mla.kv_lora_rank * heads * (nope + value) + mla.kv_lora_rank
        attention += heads * value * width
    conv = 2 * draft.conv_kernel_size * width * (1 + width // draft.conv_group_size)
    layer = attention + 3 * width * draft.intermediate_size + 2 * width + 2 * conv
    shared = len(draft.target_layer_ids) * width**2 + 2 * width
    return draft.num_layers * layer + shared + draft.selector_rank * (2 * facts.vocab_size + width)


def test_the_ready_recipes_are_these() -> None:
    assert sorted(PARAMETERS) == ready_recipes()


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_ready_recipe_resolves_and_has_its_published_size(name: str, tmp_path: Path) -> None:
    resolved = resolve_recipe(name)
    recipe = resolved.recipe
    assert recipe.target.facts is not None
    config = recipe.draft.config(recipe.target.facts)
    plain, with_embedding = PARAMETERS[name]
    assert by_hand(name) == plain
    with torch.device("meta"):
        assert sum(p.numel() for p in DraftModel(config).parameters()) == plain
        if with_embedding is not None:
            model = DraftModel(config, has_embedding=True)
            assert sum(p.numel() for p in model.parameters()) == with_embedding
    (tmp_path / "r.toml").write_text(resolved.to_toml())
    assert read_recipe(tmp_path / "r.toml") == recipe


def test_the_published_shapes_are_those_of_their_cards() -> None:
    qwen, six, k31 = (resolve_recipe(name).recipe for name in ("qwen3.8-27b", "kimi-k3-6-layer", "kimi-k3.1"))
    assert qwen.draft.target_layer_ids == (5, 19, 33, 47, 61)
    assert (qwen.draft.windows, qwen.draft.is_causal, qwen.draft.mask_token_id) == ((2048,) * 5, False, 248070)
    assert (qwen.loss.decay_gamma, qwen.optim.schedule, qwen.optim.blocks_per_sequence) == (4.0, "cosine", 64)
    assert (six.draft.windows, six.draft.is_causal) == ((4096,) * 5 + (0,), False)
    assert (k31.draft.windows, k31.draft.is_causal, k31.draft.selector_top_k) == ((1024,) * 5, True, 32)
    assert six.target.facts is not None
    attention = six.draft.config(six.target.facts).attention
    assert isinstance(attention, MlaConfig)
    assert attention.softmax_scale(six.draft.rope) == pytest.approx(0.130861, abs=1e-6)


def test_the_built_in_drafters_recipe_describes_it() -> None:
    folder = Path(blockdraft.__file__).parent / "data" / "smollm2-135m"
    recipe = read_recipe(folder / "recipe.toml")
    assert recipe.target.facts is not None
    assert recipe.draft.config(recipe.target.facts) == zlab.read_config(folder)
    assert resolve_recipe("smollm2-135m").recipe.draft == recipe.draft


# ---- names -----------------------------------------------------------------------------------------------------------
def test_a_name_is_a_ready_recipe_and_a_path_is_a_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").write_text("not this one")
    assert recipe_path("smollm2-135m").parent.name == "recipes"
    assert recipe_path("mine.toml") == Path("mine.toml")
    assert recipe_path("./smollm2-135m") == Path("smollm2-135m")
    assert recipe_path(Path("smollm2-135m")) == Path("smollm2-135m")
    with pytest.raises(
        ConfigError, match=r"no ready recipe 'smollm-135m'; did you mean smollm2-135m\? there are kimi-k3"
    ):
        recipe_path("smollm-135m")
    with pytest.raises(ConfigError, match=r"no ready recipe 'zzz'; there are kimi-k3-5-layer, .* path of its \.toml"):
        recipe_path("zzz")
    with pytest.raises(ConfigError, match="no such recipe"):
        resolve_recipe("mine.toml")


# ---- changes ---------------------------------------------------------------------------------------------------------
def changed(*overrides: str):
    raw, changes = apply_overrides(make_recipe().to_dict(), overrides)
    return raw, changes


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("seed=7", ("seed",), 7),
        ("optim.learning_rate=1e-4", ("optim", "learning_rate"), 1e-4),
        ("optim.num_steps = 12", ("optim", "num_steps"), 12),
        ("text.every_turn=true", ("text", "every_turn"), True),
        ("target.name=Qwen/Qwen3-8B", ("target", "name"), "Qwen/Qwen3-8B"),
        ("target.name=123", ("target", "name"), "123"),
        ("target.name='a b'", ("target", "name"), "a b"),
        ('target.name=""', ("target", "name"), ""),
        ("target.name=a=b", ("target", "name"), "a=b"),
        ("draft.windows=[0, 64]", ("draft", "windows"), [0, 64]),
        ("prompts.files=['a.jsonl', \"b\"]", ("prompts", "files"), ["a.jsonl", "b"]),
        ("prompts.files=a.jsonl", ("prompts", "files"), "a.jsonl"),
        ("draft.gqa={num_kv_heads = 1, head_dim = 8}", ("draft", "gqa"), {"num_kv_heads": 1, "head_dim": 8}),
        ("draft.gqa.num_kv_heads=1", ("draft", "gqa", "num_kv_heads"), 1),
        ("draft.rope.factor=4", ("draft", "rope", "factor"), 4),
        ("target.facts.num_layers=3", ("target", "facts", "num_layers"), 3),
        ("seed=1\nmax_length = 2", ("seed",), "1\nmax_length = 2"),
    ],
)
def test_a_change_is_put_in_its_place(text: str, place: tuple[str, ...], value) -> None:
    found, _ = changed(text)
    for key in place:
        found = found[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["seed"], "'seed' is not a change; write key=value"),
        (["optim.num_step=3"], "a recipe has no setting 'optim.num_step'; did you mean optim.num_steps?"),
        (["num_steps=3"], "did you mean optim.num_steps?"),
        (["max_new_tokens=3"], "did you mean text.max_new_tokens or evaluation.max_new_tokens?"),
        (["zzzzzz=3"], "tables are target, prompts, text, draft, loss, optim, evaluation"),
        (["seed.x=3"], "did you mean"),
        (["seed=1", "seed=2"], "seed is changed twice"),
        (["draft.gqa={}", "draft.gqa.head_dim=2"], "draft.gqa.head_dim is changed twice"),
        (["=3"], "a recipe has no setting ''"),
    ],
)
def test_a_change_that_cannot_be_meant_is_one_line(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(*overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_changes_are_recorded_and_leave_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(make_recipe().to_toml())
    resolved = resolve_recipe(path, ["optim.num_steps=50", "optim.device=auto"])
    assert (resolved.recipe.optim.num_steps, resolved.recipe.optim.device) == (50, "auto")
    assert resolved.changes == ("optim.num_steps = 50, was 40", "optim.device = 'auto', was 'cpu'")
    assert "# changed: optim.num_steps = 50, was 40\n" in resolved.to_toml()
    assert read_recipe(path) == make_recipe()
    raw = make_recipe().to_dict()
    apply_overrides(raw, ["optim.num_steps=50"])
    assert raw == make_recipe().to_dict()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optim.num_steps=0", "with 'optim.num_steps=0': optim.num_steps is 0"),
        ("optim.num_steps=many", "optim.num_steps is a int, not 'many'"),
        ("optim.device=tpu", '"cpu", "cuda" and "auto"'),
        ("draft.windows=[0,0", "draft.windows is a list of whole numbers, not '[0,0'"),
        ("loss.kind=kl", "loss.kl_temperature is 0"),
    ],
)
def test_a_changed_recipe_is_as_strict(tmp_path: Path, override: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(make_recipe().to_toml())
    with pytest.raises(ConfigError) as caught:
        resolve_recipe(path, [override])
    assert str(caught.value).startswith("mine.toml with ")
    assert words in str(caught.value)
