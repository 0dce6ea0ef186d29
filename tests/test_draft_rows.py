"""Several rows at once, and copies of a row's context: each equals what one row alone gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.draft import BlockRows, DraftModel
from spark_kit import KINDS, random_model, spark_config, spine_config
from test_draft_cache import EXACT, LAYOUTS, filled, make_model, make_noise, make_taps
from test_draft_heads import make_model as heads_model


@pytest.mark.parametrize("name", LAYOUTS)
def test_inject_rows_equals_inject_for_each(name: str) -> None:
    model = make_model(LAYOUTS[name])
    steps = [(3, 0, 14, 1), (1, 2, 1, 8), (0, 0, 0, 0), (9, 1, 0, 4)]
    together, alone = ([model.new_cache() for _ in steps[0]] for _ in range(2))
    for counts in steps:
        taps = [make_taps(count) for count in counts]
        model.inject_rows(taps, together)
        for one, cache in zip(taps, alone, strict=True):
            model.inject(one, cache)
    noise = make_noise(1, 8)
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.num_positions == theirs.num_positions
        torch.testing.assert_close(model(noise, [mine]), model(noise, [theirs]), atol=EXACT, rtol=EXACT)
        for index in range(len(model.config.layers)):
            for a, b in zip(mine.layer(index), theirs.layer(index), strict=True):
                torch.testing.assert_close(a, b, atol=EXACT, rtol=EXACT)


def test_inject_rows_wants_one_cache_for_each() -> None:
    model = make_model(LAYOUTS["full"])
    cache = model.new_cache()
    with pytest.raises(ValueError, match="no cache twice"):
        model.inject_rows([make_taps(1), make_taps(1)], [cache, cache])
    with pytest.raises(ValueError, match="taps of 1 rows for 2 caches"):
        model.inject_rows([make_taps(1)], [cache, model.new_cache()])
    assert cache.num_positions == 0
    model.inject_rows([], [])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_before", [0, 3, 17])
def test_a_copy_is_the_row_as_it_was_and_goes_its_own_way(name: str, num_before: int) -> None:
    model = make_model(LAYOUTS[name])
    taps, more = make_taps(num_before + 2), make_taps(7)
    cache, noise = filled(model, taps, [num_before, 1, 1]), make_noise(1, 8)
    before = model(noise, [cache])
    for length in range(num_before + 3):
        want = model(noise, [filled(model, taps[:length], [length])])
        if not cache.can_copy(length):
            assert any(layer.window is not None for layer in model.config.layers) and length < num_before + 2
            with pytest.raises(ValueError, match=f"cannot copy {length} of {num_before + 2}"):
                cache.copy(length)
            continue
        made = cache.copy(length)
        assert made.num_positions == length
        torch.testing.assert_close(model(noise, [made]), want, atol=EXACT, rtol=EXACT)
        model.inject(more, made)
        both = torch.cat((taps[:length], more))
        want = model(noise, [filled(model, both, [length + 7])])
        torch.testing.assert_close(model(noise, [made]), want, atol=EXACT, rtol=EXACT)
        assert torch.equal(model(noise, [cache]), before)
    assert cache.copy().num_positions == num_before + 2
    for length in (-1, num_before + 3):
        assert not cache.can_copy(length)
        with pytest.raises(ValueError, match="cannot copy"):
            cache.copy(length)


def test_a_copy_holds_no_more_than_it_needs() -> None:
    model = make_model(LAYOUTS["full"])
    cache = filled(model, make_taps(70), [70])
    made = cache.copy(40)
    assert made.num_bytes * 2 * 70 == cache.num_bytes * 40
    model.inject(make_taps(30), cache)
    assert made.num_positions == 40


# ---- proposals of several blocks -------------------------------------------------------------------------------------
DRAFTS: dict[str, Callable[[], DraftModel]] = {
    "selector": lambda: heads_model(200, top_k=3),
    "selector, large vocabulary": lambda: heads_model(3000, top_k=4, multiplier=1.3, cap=2.0),
    "plain head": lambda: heads_model(200, is_v2=False),
    **{kind: partial(random_model, spark_config(kind)) for kind in KINDS},
    "not from the anchor": lambda: random_model(spark_config("gated", predicts_from_anchor=False)),
    "no Markov head": lambda: random_model(spark_config(None)),
    "dspine": lambda: random_model(spine_config()),
}


def blocks_of(model: DraftModel, temperatures: Sequence[float]) -> tuple[list[BlockRows], list[Tensor]]:
    """Blocks of 4, 1, 3, ... rows, and the logits of the rows that predict."""
    config, torch_seed = model.config, torch.Generator().manual_seed(5)
    blocks, logits = [], []
    for index, temperature in enumerate(temperatures):
        length = (4, 1, 3, 2)[index % 4]
        hidden_LD = torch.randn(length, config.hidden_size, generator=torch_seed, dtype=torch.float64)
        count = length if config.predicts_from_anchor else length - 1
        logits.append(2 * torch.randn(count, config.vocab_size, generator=torch_seed, dtype=torch.float64))
        noise = torch.Generator().manual_seed(index)
        blocks.append(BlockRows(hidden_LD, 3 + index, temperature, noise, 0.0 if index % 2 else 0.4))
    return blocks, logits


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("temperatures", [(0.0,) * 5, (0.7, 1.3, 0.9), (0.0, 1.0, 0.0, 0.8, 1.0, 0.0)])
def test_each_block_proposes_what_it_proposes_alone(name: str, temperatures: tuple[float, ...]) -> None:
    model = DRAFTS[name]()
    table = torch.randn(model.config.hidden_size, model.config.vocab_size, dtype=torch.float64)
    options: dict[str, Any] = {
        "exclude_ids": (model.config.mask_token_id,),
        "candidate_logits": lambda hidden, ids: (hidden @ table).gather(1, ids),
    }
    blocks, logits = blocks_of(model, temperatures)
    together = model.propose_rows(blocks, torch.cat(logits), **options)
    fresh, _ = blocks_of(model, temperatures)
    num_drawn = 0
    for block, logits_GV, mine in zip(fresh, logits, together, strict=True):
        rows, least = block.hidden_LD, block.min_confidence
        alone = model.propose(
            rows, block.anchor_id, logits_GV, block.temperature, block.generator, min_confidence=least, **options
        )
        assert mine.ids_G.tolist() == alone.ids_G.tolist()
        assert (mine.q is None) == (alone.q is None) and (mine.q is None or block.temperature > 0.0)
        if mine.q is not None:
            num_drawn += 1
            for field in ("ids_GM", "probs_GM", "probs_GV"):
                if hasattr(alone.q, field):
                    torch.testing.assert_close(getattr(mine.q, field), getattr(alone.q, field), atol=1e-7, rtol=0)
    assert bool(num_drawn) == (any(temperatures) and name != "plain head")


def test_half_precision_logits_give_the_candidates_of_their_values() -> None:
    model = heads_model(3000, top_k=4)
    blocks, logits = blocks_of(model, (0.0, 0.0, 0.0))
    half = torch.cat(logits).bfloat16()
    same = zip(model.propose_rows(blocks, half), model.propose_rows(blocks, half.double()), strict=True)
    assert all(a.ids_G.tolist() == b.ids_G.tolist() for a, b in same)


def test_logits_of_another_number_of_rows_are_refused() -> None:
    model = heads_model(200)
    blocks, logits = blocks_of(model, (0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="logits of 4 rows for blocks that predict 5"):
        model.propose_rows(blocks, torch.cat(logits)[:4])
    assert model.propose_rows([], torch.empty(0, 200)) == []
