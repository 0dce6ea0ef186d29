"""Anchors, labels and masks of training blocks, against loops over their definitions."""

from __future__ import annotations

import itertools

import pytest
import torch

from blockdraft.config import LayerConfig
from blockdraft.train.attend import attend_flexibly, flex_mask
from blockdraft.train.blocks import Blocks, block_attention, block_masks, sample_blocks, written_mask

LAYERS = [
    LayerConfig(is_causal=is_causal, window=window) for is_causal in (False, True) for window in (None, 1, 2, 3, 7)
]


def a_batch(prompts=(4, 1, 9), lengths=(20, 13, 12)):
    """Sequences 1, 2, 3, ... so that a token says its own position plus one."""
    ids_BS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids_BS[row, :length] = torch.arange(1, length + 1)
    return ids_BS, written_mask(torch.tensor(prompts), torch.tensor(lengths), max(lengths))


def sample(num_blocks=6, block_size=5, seed=0, **batch) -> Blocks:
    given = a_batch(**batch)
    generators = [torch.Generator().manual_seed(seed + row) for row in range(len(given[0]))]
    return sample_blocks(*given, num_blocks=num_blocks, block_size=block_size, generators=generators)


# ---- anchors and labels ----------------------------------------------------------------------------------------------
def test_anchors_are_tokens_of_the_target_and_never_its_last() -> None:
    prompts, lengths = (4, 1, 9), (20, 13, 12)
    seen = [set() for _ in lengths]
    for seed in range(60):
        anchors_BK = sample(seed=seed).anchors_BK
        assert torch.equal(anchors_BK, anchors_BK.sort().values)
        for row, anchors in enumerate(anchors_BK.tolist()):
            seen[row] |= set(anchors)
    assert seen == [set(range(p, n - 1)) for p, n in zip(prompts, lengths, strict=True)]


def test_anchors_repeat_only_where_there_are_too_few() -> None:
    anchors_BK = sample(num_blocks=6, prompts=(4, 9), lengths=(20, 12)).anchors_BK
    assert len(set(anchors_BK[0].tolist())) == 6
    assert sorted(anchors_BK[1].tolist()) == [9, 9, 9, 10, 10, 10]


def test_the_label_of_row_k_is_the_token_k_behind_the_anchor() -> None:
    """S16 (a): with the text 1, 2, 3, ... row k of an anchor at position a predicts a + k + 1."""
    blocks = sample()
    for row, length in enumerate((20, 13, 12)):
        for block, anchor in enumerate(blocks.anchors_BK[row].tolist()):
            for k in range(5):
                exists = anchor + k < length
                assert blocks.ids_BKL[row, block, k] == (anchor + k + 1 if exists else 0)
                assert blocks.positions_BKL[row, block, k] == anchor + k
                assert blocks.weights_BKL[row, block, k] == (1 if exists and k > 0 else 0)


def test_a_slot_is_trained_iff_the_target_wrote_its_token() -> None:
    """S16 (c): blocks over the end of a sequence keep their real labels; padding and prompt are never trained."""
    blocks = sample(num_blocks=40, prompts=(4, 1, 9), lengths=(20, 13, 12))
    trained = blocks.weights_BKL > 0
    has_tail_block = (trained.sum(-1) < 4).any(dim=1)
    assert has_tail_block.all()
    assert (trained.sum(-1) >= 1).all()
    for row, (prompt_len, length) in enumerate(((4, 20), (1, 13), (9, 12))):
        positions = blocks.positions_BKL[row][trained[row]]
        assert set(positions.tolist()) == set(range(prompt_len + 1, length))


def test_of_several_turns_only_the_targets_own_are_trained() -> None:
    """Written: 2-5, 8, 11-12. A block ends where the target's own text does, though more of it follows."""
    written_S = torch.zeros(14, dtype=torch.bool)
    written_S[[2, 3, 4, 5, 8, 11, 12]] = True
    blocks = sample_blocks(
        torch.arange(1, 15)[None],
        written_S[None],
        num_blocks=8,
        block_size=8,
        generators=[torch.Generator().manual_seed(0)],
    )
    assert blocks.anchors_BK[0].tolist() == [2, 2, 3, 3, 4, 4, 11, 11]
    for block, anchor in enumerate(blocks.anchors_BK[0].tolist()):
        last = 5 if anchor < 6 else 12
        assert blocks.weights_BKL[0, block].tolist() == [float(0 < k <= last - anchor) for k in range(8)]


def test_a_sequence_without_an_anchor_is_not_trained_and_stops_nothing() -> None:
    ids_BS, written_BS = a_batch()
    written_BS[1] = torch.arange(20) % 2 == 0
    generators = [torch.Generator().manual_seed(row) for row in range(3)]
    blocks = sample_blocks(ids_BS, written_BS, num_blocks=4, block_size=5, generators=generators)
    assert blocks.weights_BKL.sum(dim=(1, 2))[1] == 0
    assert blocks.weights_BKL.sum(dim=(1, 2))[0] > 0


def test_the_generator_alone_decides() -> None:
    assert torch.equal(sample(seed=5).anchors_BK, sample(seed=5).anchors_BK)
    assert not torch.equal(sample(seed=5).anchors_BK, sample(seed=6).anchors_BK)


# ---- visibility ------------------------------------------------------------------------------------------------------
def may_see(layer: LayerConfig, query: int, key: int) -> bool:
    distance = query - key
    if layer.is_causal and distance < 0:
        return False
    return layer.window is None or abs(distance) < layer.window


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_masks_equal_a_loop_over_the_rule(layer: LayerConfig) -> None:
    blocks = sample(num_blocks=4)
    to_context_BKLS, inside_LL = block_masks(layer, blocks, 20)
    for row, block, i in itertools.product(range(3), range(4), range(5)):
        anchor = int(blocks.anchors_BK[row, block])
        for key in range(20):
            expected = key < anchor and may_see(layer, anchor + i, key)
            assert bool(to_context_BKLS[row, block, i, key]) == expected
        for j in range(5):
            assert bool(inside_LL[i, j]) == may_see(layer, anchor + i, anchor + j)


HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, SCALE = 4, 2, 6, 3, 0.37


def attention_inputs(blocks: Blocks, num_context: int, dtype=torch.float64) -> list[torch.Tensor]:
    """q, keys, values, own keys, own values; values are narrower than keys, as in latent attention."""
    generator = torch.Generator().manual_seed(1)
    num_rows, num_blocks, length = blocks.ids_BKL.shape
    num = num_rows * num_blocks
    shapes = [
        (num, length, HEADS, WIDTH),
        (num_rows, num_context, KV_HEADS, WIDTH),
        (num_rows, num_context, KV_HEADS, VALUE_WIDTH),
        (num, length, KV_HEADS, WIDTH),
        (num, length, KV_HEADS, VALUE_WIDTH),
    ]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_loop(layer: LayerConfig, blocks: Blocks, q, keys, values, k, v) -> torch.Tensor:
    """Every row by itself, over the keys that it may see and no others."""
    num_rows, num_blocks, length = blocks.ids_BKL.shape
    out = {}
    for row, block, i, head in itertools.product(range(num_rows), range(num_blocks), range(length), range(HEADS)):
        x, kv = row * num_blocks + block, head // (HEADS // KV_HEADS)
        anchor = int(blocks.anchors_BK[row, block])
        seen = [(keys[row, s, kv], values[row, s, kv]) for s in range(anchor) if may_see(layer, anchor + i, s)]
        seen += [(k[x, j, kv], v[x, j, kv]) for j in range(length) if may_see(layer, i, j)]
        scores = torch.stack([q[x, i, head] @ key * SCALE for key, _ in seen]).softmax(0)
        out[x, i, head] = sum(p * value for p, (_, value) in zip(scores, seen, strict=True))
    return torch.stack(list(out.values())).view(num_rows * num_blocks, length, HEADS, VALUE_WIDTH)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_attention_equals_a_loop_over_rows_and_visible_keys(layer: LayerConfig) -> None:
    """Also its gradients; and what lies behind an anchor gets none from that block."""
    blocks = sample(num_blocks=3, block_size=4, prompts=(0, 2), lengths=(9, 6))
    mine, plain = ([t.requires_grad_() for t in attention_inputs(blocks, 9)] for _ in range(2))
    q, keys, values, k, v = mine
    got = block_attention((layer,), [(keys, values)], blocks, SCALE)(0, q, k, v)
    expected = by_loop(layer, blocks, *plain)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours = torch.autograd.grad(got, mine, upstream)
    theirs = torch.autograd.grad(expected, plain, upstream, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert not ours[1][:, int(blocks.anchors_BK.max()) :].any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_flexible_attention_is_the_dense_one(layer: LayerConfig) -> None:
    """What a GPU compiles, run as it stands; anchors repeat and stand closer than a block."""
    blocks = sample(num_blocks=20, block_size=5)
    q, keys, values, k, v = attention_inputs(blocks, 20, torch.float32)
    with torch.no_grad():
        dense = block_attention((layer,), [(keys, values)], blocks, SCALE)(0, q, k, v)
        mask = flex_mask(layer, blocks.anchors_BK, 5, 20)
        flexible = attend_flexibly(q, (k, v), (keys, values), mask, SCALE)
    torch.testing.assert_close(flexible, dense, rtol=0, atol=1e-5)


def test_attention_under_autocast_is_close() -> None:
    blocks = sample(num_blocks=3)
    inputs = [t.requires_grad_() for t in attention_inputs(blocks, 20, torch.float32)]
    q, keys, values, k, v = inputs
    attend = block_attention((LAYERS[0],), [(keys, values)], blocks, SCALE)
    exact = attend(0, q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        rough = attend(0, q, k, v)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, rtol=0, atol=0.05)
    rough.float().sum().backward()
    assert all(torch.isfinite(t.grad).all() and t.grad.dtype == torch.float32 for t in inputs)
