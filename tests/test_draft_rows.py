"""Several rows at once, and copies of a row's context: each equals what one row alone gives."""

from __future__ import annotations

import pytest
import torch

from test_draft_cache import EXACT, LAYOUTS, filled, make_model, make_noise, make_taps


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
