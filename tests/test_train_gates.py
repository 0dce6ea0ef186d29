"""Every gate passes on the real thing, for every kind of draft, and fails on one that is broken where it looks.

Below the gates: finer looks at what a block sees, where the gates only say yes or no. Weights are random (convolutions
and selector included), numbers float64, so equality means equality.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import DraftConfig, GqaConfig, LayerConfig, MlaConfig, RopeConfig, TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.draft.conv import BlockConv, convolve
from blockdraft.draft.model import Layer
from blockdraft.engine import Engine, Request
from blockdraft.errors import ConfigError
from blockdraft.train import blocks as train_blocks
from blockdraft.train import gates, loop
from blockdraft.train.blocks import Blocks, block_hidden, sample_blocks
from blockdraft.train.gates import check_gates, run_gates, small_copy
from blockdraft.train.loop import FrozenHead, initialise_draft
from blockdraft.train.sections import OptimRecipe
from blockdraft.train.toy_target import ToyTarget
from engine_kit import draft_config, random_draft
from train_kit import blocks_at, make_recipe

VOCAB, LENGTH, NUM_TAPS, WIDTH, BLOCK = 32, 24, 3, 32, 5
FACTS = TargetFacts(
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_layers=3,
    max_length=512,
    is_recurrent=False,
    eos_token_ids=(31,),
    pad_token_id=None,
)
FULL = LayerConfig(is_causal=False, window=None)
LAYERS = {
    "full": (FULL, FULL),
    "sliding": (LayerConfig(is_causal=False, window=6),) * 2,
    "tiny window": (LayerConfig(is_causal=False, window=3),) * 2,
    "causal": (LayerConfig(is_causal=True, window=None),) * 2,
    "causal sliding": (LayerConfig(is_causal=True, window=6),) * 2,
    "mixed": (LayerConfig(is_causal=True, window=4), FULL),
}
ATTENTION = {
    "gqa": GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, has_bias=False),
    "mla": MlaConfig(
        num_heads=4,
        q_lora_rank=None,
        kv_lora_rank=10,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=5,
        has_bias=False,
    ),
}
LEARNS = "learns a text and serves it"
WITHOUT_TRAINING = {name: gate for name, gate in gates._GATES.items() if name != LEARNS}


def config_of(layers: str, v2: bool, **changes) -> DraftConfig:
    return draft_config(FACTS, block_size=BLOCK, v2=v2, layers=LAYERS[layers], **changes)


NO_V2_PARTS = dict.fromkeys(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"), 0)


def recipe_for(config: DraftConfig, **changes):
    return make_recipe(draft=NO_V2_PARTS if config.family == "dflash" else None, **changes)


# ---- every gate passes on the real thing -----------------------------------------------------------------------------
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("layers", LAYERS)
def test_every_kind_of_draft_passes(monkeypatch, layers: str, v2: bool, attention: str) -> None:
    monkeypatch.setattr(gates, "_GATES", WITHOUT_TRAINING)
    config = config_of(layers, v2, attention=ATTENTION[attention], input_embedding_scale=1.7)
    results = run_gates(config, recipe=recipe_for(config), seed=3)
    assert [result.detail for result in results if not result.passed] == []
    names = [name for name in WITHOUT_TRAINING if v2 or "fresh" not in name]
    assert [result.name for result in results] == names


@pytest.mark.parametrize(
    ("draft", "changes"),
    [
        ({}, {}),
        (NO_V2_PARTS, {"loss": {"weighting": "decay"}}),
        ({"gqa": None, "mla": "mla", "is_causal": True}, {"loss": {"kind": "kl", "selector_detached": True}}),
        ({"learned_mask_embedding": True, "windows": (8, 0), "block_size": 8}, {"loss": {"num_random_head_rows": 0}}),
    ],
    ids=["v2", "v1 decay", "mla causal kl", "learned mask, windows"],
)
def test_a_small_draft_learns_a_text_and_serves_it(draft, changes) -> None:
    """The recipe's own draft section, loss and optimiser; all gates together stay a matter of seconds."""
    from blockdraft.train.recipe import MlaRecipe

    if draft.get("mla"):
        mla = MlaRecipe(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        draft = {**draft, "mla": mla}
    recipe = make_recipe(draft=draft, **changes)
    seen = []
    check_gates(recipe.draft.config(FACTS), recipe=recipe, seed=1, on_gate=seen.append)
    assert all(result.passed and result.seconds > 0 for result in seen)
    assert [result.name for result in seen if "fresh" not in result.name] == [
        n for n in gates._GATES if "fresh" not in n
    ]
    assert "is accepted whole" in seen[-1].detail


def test_gates_leave_randomness_alone_and_are_the_same_each_time(monkeypatch) -> None:
    monkeypatch.setattr(gates, "_GATES", {LEARNS: gates._GATES[LEARNS]})
    config = config_of("full", True)
    state = torch.random.get_rng_state()
    details = [run_gates(config, recipe=recipe_for(config), seed=2)[0].detail for _ in range(2)]
    assert details[0] == details[1]
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- and fails on a broken one ---------------------------------------------------------------------------------------
def anchor_in_context(patch) -> None:
    """The classic leak: the anchor's own hidden state."""
    real = train_blocks.block_masks

    def masks(layer, blocks, num_context):
        to_context, inside = real(layer, blocks, num_context)
        return to_context | (torch.arange(num_context) == blocks.anchors_BK[..., None, None]), inside

    patch.setattr(train_blocks, "block_masks", masks)


def taps_shifted_left(patch) -> None:
    """Taps stored as another family's trainer wants them."""
    real = gates.block_hidden
    patch.setattr(gates, "block_hidden", lambda m, e, taps, b: real(m, e, taps.roll(-1, dims=1), b))


def blind_to_context(patch) -> None:
    real = train_blocks.block_masks

    def masks(layer, blocks, num_context):
        to_context, inside = real(layer, blocks, num_context)
        return to_context & (torch.arange(num_context) < blocks.anchors_BK[..., None, None] - 1), inside

    patch.setattr(train_blocks, "block_masks", masks)


def conv_across_blocks(patch) -> None:
    def across(x_BLD, kernel_BLWUY):
        return convolve(x_BLD.flatten(0, 1)[None], kernel_BLWUY.flatten(0, 1)[None])[0].view_as(x_BLD)

    patch.setattr(sys.modules[Layer.__module__], "convolve", across)


def context_centred(patch) -> None:
    """A fused context that depends on how long the batch is."""
    real = DraftModel.fuse

    def fuse(self, taps):
        fused = real(self, taps)
        return fused - 0.1 * fused.mean(dim=-2, keepdim=True)

    patch.setattr(DraftModel, "fuse", fuse)


def random_conv_start(patch) -> None:
    real = BlockConv.reset_to_identity

    def reset(self):
        real(self)
        torch.nn.init.normal_(self.kernel_projection.weight, std=0.02)

    patch.setattr(BlockConv, "reset_to_identity", reset)


def random_successors(patch) -> None:
    real = DraftModel.reset_parameters

    def reset(self, *, std=0.02):
        real(self, std=std)
        if self.candidate_selector is not None:
            torch.nn.init.normal_(self.candidate_selector.successor_codebook, std=5.0)
            torch.nn.init.normal_(self.candidate_selector.predecessor_codebook, std=5.0)

    patch.setattr(DraftModel, "reset_parameters", reset)


def positions_off_by_one(patch) -> None:
    real = Blocks.positions_BKL.fget
    patch.setattr(Blocks, "positions_BKL", property(lambda self: real(self) + 1))


def windows_from_the_anchor(patch) -> None:
    """A window measured from the anchor instead of from each row."""
    real = train_blocks.block_masks

    def masks(layer, blocks, num_context):
        first = real(layer, blocks, num_context)[0][..., :1, :]
        return first.expand(-1, -1, blocks.ids_BKL.shape[-1], -1), real(layer, blocks, num_context)[1]

    patch.setattr(train_blocks, "block_masks", masks)


def labels_shifted(patch) -> None:
    def shifted(*args, **kwargs):
        blocks = sample_blocks(*args, **kwargs)
        ids = blocks.ids_BKL.clone()
        ids[..., 1:-1] = blocks.ids_BKL[..., 2:]
        return replace(blocks, ids_BKL=ids)

    patch.setattr(loop, "sample_blocks", shifted)


def nothing_learnt(patch) -> None:
    patch.setattr(OptimRecipe, "lr_at", lambda self, step: 1e-12)


def exploding(patch) -> None:
    patch.setattr(OptimRecipe, "lr_at", lambda self, step: torch.inf)


BROKEN = [
    ("no look ahead", anchor_in_context, "full", "changes with the text from its anchor on"),
    ("no look ahead", taps_shifted_left, "full", "changes with the text from its anchor on"),
    ("no look ahead", blind_to_context, "full", "does not see the taps right before it"),
    ("no look aside", conv_across_blocks, "full", "another one beside other blocks"),
    ("padding is not seen", context_centred, "full", "text 2 of a padded batch"),
    ("fresh DFlash 2 is DFlash", random_conv_start, "full", "does not start as the DFlash draft"),
    ("fresh DFlash 2 is DFlash", random_successors, "full", "a fresh selector changes what the draft proposes"),
    ("training is serving", positions_off_by_one, "full", "another one in training"),
    ("training is serving", windows_from_the_anchor, "sliding", "another one in training"),
    ("training is serving", anchor_in_context, "causal", "another one in training"),
    (LEARNS, labels_shifted, "full", r"look at labels and positions"),
    (LEARNS, nothing_learnt, "full", r"training counts a prefix of 1\.?\d*"),
    (LEARNS, exploding, "full", "lower optim.learning_rate"),
]


@pytest.mark.parametrize(
    ("name", "breaker", "layers", "said"), BROKEN, ids=[f"{name}: {breaker.__name__}" for name, breaker, *_ in BROKEN]
)
def test_a_broken_trainer_does_not_pass(monkeypatch, name: str, breaker, layers: str, said: str) -> None:
    monkeypatch.setattr(gates, "_GATES", {name: gates._GATES[name]})
    monkeypatch.setattr(gates, "OVERFIT_STEPS", 20 if breaker is nothing_learnt else 40)
    config = config_of(layers, True)
    with monkeypatch.context() as patch:
        breaker(patch)
        with pytest.raises(ConfigError, match=f"no step was taken: {name}: .*{said}") as caught:
            check_gates(config, recipe=recipe_for(config), seed=3)
    assert "\n" not in str(caught.value)
    if name != LEARNS:
        check_gates(config, recipe=recipe_for(config), seed=3)


def test_all_that_fails_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setattr(gates, "_GATES", WITHOUT_TRAINING)
    anchor_in_context(monkeypatch)
    config = config_of("full", True)
    with pytest.raises(ConfigError, match=r"taken: no look ahead: .*; training is serving: "):
        check_gates(config, recipe=recipe_for(config), seed=3)


# ---- the small copy and its target -----------------------------------------------------------------------------------
def large(**changes) -> DraftConfig:
    numbers = {"factor": 4.0, "original_max_position_embeddings": 32768.0}
    config = DraftConfig(
        hidden_size=5120,
        intermediate_size=17408,
        vocab_size=151936,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        attention=GqaConfig(num_heads=32, num_kv_heads=8, head_dim=128, has_bias=True),
        layers=(LayerConfig(is_causal=False, window=2048),) * 4 + (FULL,),
        rope=RopeConfig(theta=1e6, kind="yarn", params=tuple(numbers.items())),
        block_size=16,
        mask_token_id=151669,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        target_hidden_size=5120,
        output_multiplier=0.196,
        final_logit_softcapping=20.0,
        **draft_v2_parts(),
    )
    return replace(config, **changes)


def draft_v2_parts():
    from blockdraft.config import ConvConfig, SelectorConfig

    return {"conv": ConvConfig(kernel_size=3, group_size=16), "selector": SelectorConfig(rank=256, top_k=16)}


def test_the_small_copy_keeps_the_shape() -> None:
    config = large()
    small = small_copy(config)
    assert small.family == "dflash2"
    assert small.conv.kernel_size == 3
    assert small.attention == GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, has_bias=True)
    assert small.layers == (LayerConfig(is_causal=False, window=small.block_size + 2), FULL)
    same = ("rope", "output_multiplier", "final_logit_softcapping", "input_embedding_scale", "rms_norm_eps")
    assert [getattr(small, name) for name in same] == [getattr(config, name) for name in same]
    assert sum(p.numel() for p in DraftModel(small).parameters()) < 50_000
    causal = LayerConfig(is_causal=True, window=4)
    kinds = [
        ((FULL,), (FULL,)),
        ((FULL,) * 5, (FULL, FULL)),
        (
            (causal, LayerConfig(is_causal=True, window=512), FULL),
            (causal, LayerConfig(is_causal=True, window=10), FULL),
        ),
    ]
    for given, expected in kinds:
        assert small_copy(large(layers=given)).layers == expected
    assert small_copy(large(conv=None, selector=None)).family == "dflash"


@pytest.mark.parametrize("q_lora_rank", [None, 1536])
def test_the_small_copy_of_latent_attention(monkeypatch, q_lora_rank: int | None) -> None:
    mla = MlaConfig(
        num_heads=64,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        has_bias=False,
    )
    small = small_copy(large(attention=mla)).attention
    assert isinstance(small, MlaConfig)
    assert (small.q_lora_rank is None) == (q_lora_rank is None)
    assert small.v_head_dim not in (small.qk_head_dim, small.qk_nope_head_dim)
    monkeypatch.setattr(gates, "_GATES", WITHOUT_TRAINING)
    assert all(result.passed for result in run_gates(large(attention=mla), recipe=make_recipe(), seed=0))


def test_the_gates_target_writes_a_text_worth_learning() -> None:
    config = small_copy(large())
    for seed in range(3):
        target = ToyTarget(config, seed=seed)
        ids = target.write([5, 9, 2], 25)
        assert len(set(ids)) > 12
        assert config.mask_token_id not in ids
        [completion] = Engine(target).run([Request(prompt_ids=ids[:3], max_new_tokens=25)])
        assert [*ids[:3], *completion.token_ids] == ids
        row = target.new_row()
        for part in ([5, 9], [2, 1, 1], [7]):
            target.forward([torch.tensor(part)], [row])
        target.forward([torch.tensor([3, 4])], [row])
        target.rollback([row], [1])
        [scored] = target.forward([torch.tensor(ids[7:])], [row])
        outputs = target.outputs([5, 9, 2, 1, 1, 7, 3, *ids[7:]])
        torch.testing.assert_close(scored.taps_TNE[:, 1], outputs[1][7:], rtol=0, atol=1e-12)


# ---- finer: what a block sees ----------------------------------------------------------------------------------------
def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EMBED = randn(VOCAB, WIDTH, seed=1)
HEAD = randn(VOCAB, WIDTH, seed=2)
TAPS = randn(LENGTH, NUM_TAPS, WIDTH, seed=3)
IDS = torch.randint(1, VOCAB - 1, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()


def hidden(model: DraftModel, taps: Tensor = TAPS, *, anchors) -> Tensor:
    """[K, L, D] of the blocks of one sequence."""
    return block_hidden(model, EMBED, taps[None], blocks_at(IDS, anchors, BLOCK))


def test_a_window_hides_what_is_older() -> None:
    """With one layer of window W, row i of a block at a reads context [a + i - W + 1, a) only."""
    model = random_draft(replace(config_of("sliding", False), layers=LAYERS["sliding"][:1]))
    anchor = 12
    before = hidden(model, anchors=[anchor])
    for position in range(anchor):
        taps = TAPS.clone()
        taps[position] += 1.0
        moved = (hidden(model, taps, anchors=[anchor]) - before).abs().amax(dim=(0, 2)) > 1e-9
        # The block's rows see each other's embeddings only, so one layer gives no second-hand sight.
        assert moved.tolist() == [anchor + i - position < 6 for i in range(BLOCK)]


def test_a_shifted_position_or_a_context_one_too_long_would_be_noticed() -> None:
    model = random_draft(config_of("full", True))
    trained = hidden(model, anchors=[12])
    noise = model.noise([IDS[12]], BLOCK, lambda ids: F.embedding(ids, EMBED))
    for num_context in (11, 13):
        cache = model.new_cache()
        model.inject(TAPS[:num_context], cache)
        assert (model(noise, [cache])[0] - trained[0]).abs().max() > 1e-3


def test_a_fresh_draft_starts_with_the_targets_final_norm_and_from_its_seed() -> None:
    head = FrozenHead(EMBED, randn(WIDTH, seed=8), HEAD)
    config = config_of("full", True)
    state = torch.random.get_rng_state()
    one, two, other = (initialise_draft(config, head, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.norm.weight, head.final_norm_E.float())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)


@pytest.mark.parametrize("attention", ATTENTION)
def test_gradients_reach_every_parameter(attention: str) -> None:
    model = random_draft(config_of("mixed", True, attention=ATTENTION[attention])).requires_grad_(True)
    rows = hidden(model, anchors=[3, 5, 5, 7, 12, 18, 22])
    edges = model.candidate_selector.edges(rows[:, 1:], torch.ones(1, 1, 1, dtype=torch.long), torch.arange(4))
    (rows.square().sum() + edges.sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
