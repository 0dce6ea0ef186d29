"""How a draft starts, how it is optimised, and where: copies of target layers, weight decay, precision, noise."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from blockdraft.config import MlaConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError, UnavailableError
from blockdraft.formats import zlab
from blockdraft.targets import HFTarget
from blockdraft.train import optim as train_optim
from blockdraft.train.blocks import step_generator
from blockdraft.train.corpus import Corpus
from blockdraft.train.initial import initialise_draft, read_draft_tensors, read_target_layers
from blockdraft.train.loop import Trainer
from blockdraft.train.optim import (
    MuonAndAdamW,
    has_fast_bfloat16,
    make_optimiser,
    noisy_taps,
    resolve_autocast,
    resolve_device,
)
from engine_kit import draft_config, tiny_model
from train_kit import TAPS, head_of, make_corpus, make_recipe, tiny_optim

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny_model(dtype=torch.float32)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return model, folder


def config_for(model, **changes):
    return replace(draft_config(HFTarget(model, TAPS).facts, block_size=5), **changes)


def like_target(model):
    """A draft with the target's own widths."""
    config = config_for(model, intermediate_size=48)
    shape = model.config
    attention = replace(
        config.attention, num_heads=shape.num_attention_heads, num_kv_heads=shape.num_key_value_heads, head_dim=8
    )
    return replace(config, attention=attention)


# ---- start -----------------------------------------------------------------------------------------------------------
def test_layers_start_as_copies_of_the_named_target_layers(target) -> None:
    model, folder = target
    config = like_target(model)
    layers = read_target_layers(folder, [2, 0], model_type="llama")
    draft = initialise_draft(config, head_of(model), seed=1, layers=layers)
    fresh = initialise_draft(config, head_of(model), seed=1)
    for mine, theirs in ((0, 2), (1, 0)):
        source = dict(model.model.layers[theirs].named_parameters())
        own = dict(draft.layers[mine].named_parameters())
        assert len(source) == 9
        for name, tensor in source.items():
            assert torch.equal(own[name], tensor), name
        for name in own.keys() - source.keys():
            assert torch.equal(own[name], dict(fresh.layers[mine].named_parameters())[name]), name
    assert torch.equal(draft.fc.weight, fresh.fc.weight)


def test_zero_centred_norms_are_made_whole(target) -> None:
    _, folder = target
    plain, centred = (read_target_layers(folder, [1], model_type=kind)[0] for kind in ("llama", "gemma3"))
    for name, tensor in plain.items():
        assert torch.equal(centred[name], tensor + 1 if "norm" in name else tensor), name


def test_layers_that_do_not_fit_are_refused_in_one_line(target) -> None:
    model, folder = target
    layers = read_target_layers(folder, [0, 1], model_type="llama")
    narrow = replace(like_target(model), intermediate_size=40)
    with pytest.raises(
        ConfigError, match=r"mlp\.gate_proj\.weight is \[48, 32\] there and \[40, 32\] in the draft"
    ) as e:
        initialise_draft(narrow, head_of(model), seed=1, layers=layers)
    assert "\n" not in str(e.value)
    latent = MlaConfig(
        num_heads=4,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        has_bias=False,
    )
    with pytest.raises(ConfigError, match=r"the target has no self_attn\.kv_a_proj_with_mqa\.weight"):
        initialise_draft(replace(like_target(model), attention=latent), head_of(model), seed=1, layers=layers)
    with pytest.raises(ConfigError, match="no tensors of layer 7 are found"):
        read_target_layers(folder, [7], model_type="llama")


def test_a_mask_embedding_of_its_own_starts_as_the_mask_ids_row(target) -> None:
    model, _ = target
    config = config_for(model, mask_token_id=5)
    learned = initialise_draft(config, head_of(model), seed=1, has_mask_embedding=True)
    frozen = initialise_draft(config, head_of(model), seed=1)
    embed = head_of(model).embed_VE

    def noise(draft: DraftModel) -> torch.Tensor:
        return draft.noise([1, 9], 5, lambda ids: embed[ids])

    assert torch.equal(noise(learned), noise(frozen))
    noise(learned).sum().backward()
    assert torch.equal(learned.mask_embedding.grad, torch.full((32,), 8.0))  # four masks in each of two blocks


# ---- optimiser -------------------------------------------------------------------------------------------------------
def test_weight_decay_concerns_matrices_only(target) -> None:
    model, _ = target
    draft = initialise_draft(config_for(model), head_of(model), seed=1, has_mask_embedding=True)
    optimiser = make_optimiser(draft, replace(tiny_optim(), weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimiser.param_groups for p in group["params"]}
    names = {name for name, parameter in draft.named_parameters() if decay[id(parameter)]}
    assert {"fc.weight", "layers.0.mlp.up_proj.weight", "candidate_selector.hidden_projection.weight"} <= names
    assert "layers.0.attention_conv.kernel_projection.weight" in names
    spared = {name for name, _ in draft.named_parameters()} - names
    assert spared == {
        name
        for name, _ in draft.named_parameters()
        if "norm" in name or name.endswith(("base_kernel", "_codebook")) or name == "mask_embedding"
    }
    assert len(decay) == len(list(draft.parameters()))


def muon_draft(target) -> tuple[DraftModel, MuonAndAdamW]:
    draft = initialise_draft(config_for(target[0]), head_of(target[0]), seed=1, has_mask_embedding=True)
    return draft, make_optimiser(draft, replace(tiny_optim(), kind="muon", weight_decay=0.1))


def some_step(draft: DraftModel, optimiser, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimiser.step()


def test_muon_moves_matrices_between_hidden_rows_and_adamw_the_rest(target) -> None:
    draft, optimiser = muon_draft(target)
    muon, adamw = optimiser.parts
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    moved = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert {"fc.weight", "layers.0.mlp.up_proj.weight", "layers.0.self_attn.q_proj.weight"} <= moved
    assert "candidate_selector.hidden_projection.weight" in moved
    assert not any(part in name for name in moved for part in ("norm", "codebook", "conv", "mask_embedding"))
    assert moved | rest == set(names.values()) and not moved & rest
    assert {group["weight_decay"] for group in adamw.param_groups} == {0.0}


def test_a_muon_step_is_an_orthogonal_matrix_of_the_learning_rates_size(target) -> None:
    draft, optimiser = muon_draft(target)
    before = draft.layers[0].mlp.up_proj.weight.detach().clone()
    some_step(draft, optimiser, seed=3)
    rate = tiny_optim().learning_rate
    step = before * (1 - rate * 0.1) - draft.layers[0].mlp.up_proj.weight.detach()
    values = torch.linalg.svdvals(step) / (rate * 0.2 * max(step.shape) ** 0.5)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3  # Newton-Schulz in bfloat16 is that rough


def test_muon_goes_on_from_its_saved_state_as_if_it_had_not_stopped(target) -> None:
    draft, optimiser = muon_draft(target)
    some_step(draft, optimiser, seed=3)
    saved, weights = copy.deepcopy(optimiser.state_dict()), copy.deepcopy(draft.state_dict())
    some_step(draft, optimiser, seed=4)
    again, other = muon_draft(target)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    some_step(again, other, seed=4)
    for one, two in zip(draft.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    saved["param_groups"].pop()
    with pytest.raises(ValueError, match="other groups"):
        other.load_state_dict(saved)


# ---- device and precision --------------------------------------------------------------------------------------------
def test_auto_takes_bfloat16_only_where_the_processor_has_it(monkeypatch) -> None:
    auto = replace(tiny_optim(), autocast="auto")
    assert resolve_autocast(auto, CPU) == ("bfloat16" if has_fast_bfloat16(CPU) else "none")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    for found, chosen in (
        ({"avx512_f": True}, "none"),
        ({"avx512_bf16": True}, "bfloat16"),
        ({"amx_bf16": True}, "bfloat16"),
    ):
        monkeypatch.setattr(train_optim.torch.cpu, "get_capabilities", lambda found=found: found)
        assert resolve_autocast(auto, CPU) == chosen
    for given in ("none", "bfloat16"):
        assert resolve_autocast(replace(auto, autocast=given), CPU) == given


def test_a_device_that_is_not_there_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(replace(tiny_optim(), device="auto")) == CPU
    with pytest.raises(UnavailableError, match=r"torch sees no GPU here; set optim\.device=cpu"):
        resolve_device(replace(tiny_optim(), device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device(replace(tiny_optim(), device="auto")).type == "cuda"
    assert resolve_device(replace(tiny_optim(), device="cpu")) == CPU


# ---- noise on taps ---------------------------------------------------------------------------------------------------
def test_noise_is_a_share_of_each_rows_own_size_and_padding_changes_nothing() -> None:
    sizes = torch.tensor([0.1, 1.0, 50.0])[:, None]
    taps = torch.randn(2, 40, 3, 64, generator=torch.Generator().manual_seed(0)) * sizes
    lengths = torch.tensor([40, 25])
    taps[1, 25:] = 0

    def noisy(batch, lengths, places):
        return noisy_taps(batch, lengths, 0.25, [step_generator(1, 2, place) for place in places])

    both = noisy(taps, lengths, [0, 1])
    share = (both - taps)[0].square().mean(dim=(0, 2)).sqrt() / taps[0].square().mean(dim=(0, 2)).sqrt()
    torch.testing.assert_close(share, torch.full((3,), 0.25), rtol=0.05, atol=0)
    assert not both[1, 25:].any()
    alone = noisy(taps[1:, :25], lengths[1:], [1])
    assert torch.equal(alone[0], both[1, :25])


def test_a_recipe_without_noise_draws_none() -> None:
    assert make_recipe().optim.taps_noise == 0.0


# ---- a trained draft as the start ------------------------------------------------------------------------------------
def test_a_run_starts_as_the_trained_draft_and_goes_on_without_it(target, tmp_path) -> None:
    model, _ = target
    config = make_recipe().draft.config(HFTarget(model, TAPS).facts)
    trained = initialise_draft(config, head_of(model), seed=9)
    zlab.write(tmp_path / "draft", zlab.Checkpoint(config=config, tensors=trained.state_dict()), dtype="float32")
    make_corpus(tmp_path / "corpus", model, [[1, 2, 3], [4, 5]], 16)
    recipe = make_recipe(draft={"initial": "draft", "initial_draft": "a/draft"}, optim={"num_steps": 3})
    tensors = read_draft_tensors(tmp_path / "draft", config, has_mask_embedding=False)

    def trainer(**start) -> Trainer:
        corpus = Corpus(tmp_path / "corpus", max_length=128)
        return Trainer(recipe, config, head_of(model), corpus, tmp_path / "run", **start)

    begun = trainer(initial_tensors=tensors)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in begun.model.state_dict().items())
    begun.run(stop_after=2)
    resumed = trainer()
    assert resumed.step == 2
    assert all(torch.equal(a, b) for a, b in zip(begun.model.parameters(), resumed.model.parameters(), strict=True))
    with pytest.raises(ConfigError, match="and none of its tensors are given"):
        Trainer(recipe, config, head_of(model), Corpus(tmp_path / "corpus", max_length=128), tmp_path / "other")


def test_a_start_must_be_like_the_recipes_draft(target, tmp_path) -> None:
    model, _ = target
    config = make_recipe().draft.config(HFTarget(model, TAPS).facts)
    tensors = initialise_draft(config, head_of(model), seed=9).state_dict()
    zlab.write(tmp_path / "draft", zlab.Checkpoint(config=config, tensors=tensors), dtype="float32")
    with pytest.raises(ConfigError, match="intermediate_size differ"):
        other = replace(config, intermediate_size=40)
        read_draft_tensors(tmp_path / "draft", other, has_mask_embedding=False)
    with pytest.raises(ConfigError, match="a mask embedding exactly if"):
        read_draft_tensors(tmp_path / "draft", config, has_mask_embedding=True)
