"""What must hold before a long run: no look ahead, no look aside, and the forward pass of serving (S16).

Weights are random everywhere (convolutions and selector included), numbers float64, so equality means equality.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import DraftConfig, LayerConfig, TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.train.blocks import Blocks, block_hidden, sample_blocks
from blockdraft.train.loop import FrozenHead, initialise_draft
from engine_kit import draft_config, random_draft
from train_kit import blocks_at

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
KINDS = [(name, v2) for name in LAYERS for v2 in (True, False)]
every_kind = pytest.mark.parametrize(("layers", "v2"), KINDS, ids=[f"{n}-{'v2' if v else 'v1'}" for n, v in KINDS])


def config_of(layers: str, v2: bool, **changes) -> DraftConfig:
    return draft_config(FACTS, block_size=BLOCK, v2=v2, layers=LAYERS[layers], **changes)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EMBED = randn(VOCAB, WIDTH, seed=1)
HEAD = randn(VOCAB, WIDTH, seed=2)
TAPS = randn(LENGTH, NUM_TAPS, WIDTH, seed=3)
IDS = torch.randint(1, VOCAB - 1, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
ANCHORS = [3, 5, 5, 7, 12, 18, 22]  # close together, repeated, and one whose block crosses the end


def hidden(model: DraftModel, taps: Tensor = TAPS, ids=IDS, anchors=ANCHORS) -> Tensor:
    """[K, L, D] of the blocks of one sequence."""
    return block_hidden(model, EMBED, taps[None], blocks_at(ids, anchors, BLOCK))


# ---- no look ahead ---------------------------------------------------------------------------------------------------
@every_kind
def test_nothing_at_or_past_an_anchor_is_seen(layers: str, v2: bool) -> None:
    """S16 (b): anchors stand closer than a block; other taps and other tokens behind an anchor change nothing."""
    model = random_draft(config_of(layers, v2))
    before = hidden(model)
    for block, anchor in enumerate(ANCHORS):
        taps, ids = TAPS.clone(), list(IDS)
        taps[anchor:] = randn(LENGTH - anchor, NUM_TAPS, WIDTH, seed=9) * 5
        ids[anchor + 1 :] = [(token + 7) % VOCAB for token in ids[anchor + 1 :]]
        after = hidden(model, taps, ids)
        assert torch.equal(after[block], before[block])
        if anchor < max(ANCHORS):
            assert not torch.equal(after[-1], before[-1])


@every_kind
def test_taps_right_before_an_anchor_and_the_anchor_itself_are_seen(layers: str, v2: bool) -> None:
    model = random_draft(config_of(layers, v2))
    before = hidden(model)
    for block, anchor in enumerate(ANCHORS):
        taps = TAPS.clone()
        taps[anchor - 1] += 1.0
        assert (hidden(model, taps)[block] - before[block]).abs().max() > 1e-3
        ids = list(IDS)
        ids[anchor] = (ids[anchor] + 7) % VOCAB
        assert (hidden(model, ids=ids)[block] - before[block]).abs().max() > 1e-3


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


# ---- no look aside ---------------------------------------------------------------------------------------------------
@every_kind
def test_many_blocks_together_are_each_block_alone(layers: str, v2: bool) -> None:
    model = random_draft(config_of(layers, v2))
    together = hidden(model)
    for block, anchor in enumerate(ANCHORS):
        alone = hidden(model, anchors=[anchor])
        torch.testing.assert_close(together[block], alone[0], rtol=0, atol=1e-12)


@every_kind
def test_a_padded_batch_is_each_sequence_alone(layers: str, v2: bool) -> None:
    model = random_draft(config_of(layers, v2))
    lengths, prompts = [LENGTH, 15, 9], [2, 6, 3]
    ids_BS = torch.randint(1, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    taps = randn(3, LENGTH, NUM_TAPS, WIDTH, seed=6)
    for row, length in enumerate(lengths):
        ids_BS[row, length:] = 0
        taps[row, length:] = 0
    blocks = sample_blocks(
        ids_BS,
        torch.tensor(prompts),
        torch.tensor(lengths),
        num_blocks=4,
        block_size=BLOCK,
        generators=[torch.Generator().manual_seed(7)] * 3,
    )
    together = block_hidden(model, EMBED, taps, blocks).view(3, 4, BLOCK, -1)
    for row, length in enumerate(lengths):
        one = Blocks(*(t[row : row + 1] for t in (blocks.anchors_BK, blocks.ids_BKL, blocks.weights_BKL)))
        alone = block_hidden(model, EMBED, taps[row : row + 1, :length], one)
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-12)


# ---- what is trained is what is served -------------------------------------------------------------------------------
@every_kind
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_training_forward_is_the_cached_serving_forward(layers: str, v2: bool, chunk: int) -> None:
    config = config_of(layers, v2, input_embedding_scale=1.7)
    model = random_draft(config)
    trained = hidden(model)
    for block, anchor in enumerate(ANCHORS):
        cache = model.new_cache()
        for taps in TAPS[:anchor].split(chunk):
            model.inject(taps, cache)
        noise = model.noise([IDS[anchor]], BLOCK, lambda ids: F.embedding(ids, EMBED))
        served = model(noise, [cache])
        torch.testing.assert_close(trained[block], served[0], rtol=0, atol=1e-10)


def test_a_shifted_position_or_a_context_one_too_long_would_be_noticed() -> None:
    model = random_draft(config_of("full", True))
    trained = hidden(model, anchors=[12])
    noise = model.noise([IDS[12]], BLOCK, lambda ids: F.embedding(ids, EMBED))
    for num_context in (11, 13):
        cache = model.new_cache()
        model.inject(TAPS[:num_context], cache)
        assert (model(noise, [cache])[0] - trained[0]).abs().max() > 1e-3


def test_a_fresh_dflash_2_proposes_what_a_dflash_of_the_same_weights_does() -> None:
    head = FrozenHead(EMBED, randn(WIDTH, seed=8), HEAD)
    v2 = initialise_draft(config_of("full", True), head, seed=11).double()
    v1 = DraftModel(config_of("full", False)).double()
    weights = {name: t for name, t in v2.state_dict().items() if name in v1.state_dict()}
    v1.load_state_dict(weights, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(hidden(v2), hidden(v1), rtol=0, atol=0)
        for block, anchor in enumerate(ANCHORS):
            rows = hidden(v1)[block]
            logits = rows[1:] @ HEAD.T
            [first, second] = [m.propose(rows, IDS[anchor], logits, 0.0, None) for m in (v1, v2)]
            assert torch.equal(first.ids_G, second.ids_G)


def test_a_fresh_draft_starts_with_the_targets_final_norm_and_from_its_seed() -> None:
    head = FrozenHead(EMBED, randn(WIDTH, seed=8), HEAD)
    config = config_of("full", True)
    state = torch.random.get_rng_state()
    one, two, other = (initialise_draft(config, head, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.norm.weight, head.final_norm_E.float())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)


def test_gradients_reach_every_parameter() -> None:
    model = random_draft(config_of("mixed", True)).requires_grad_(True)
    rows = hidden(model)
    edges = model.candidate_selector.edges(rows[:, 1:], torch.ones(1, 1, 1, dtype=torch.long), torch.arange(4))
    (rows.square().sum() + edges.sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
