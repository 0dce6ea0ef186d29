"""The fast path's own promises; what it shares with every target is in test_targets_hf."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdraft.targets import HFTarget
from blockdraft.targets.fused import FusedTarget
from tiny_targets import random_ids, tiny_model

TAPS = (0, 2, 3)


def make(family: str = "llama", **changes: object) -> FusedTarget:
    model = tiny_model(family, **changes)
    return FusedTarget(model, HFTarget(model).facts, TAPS, pack=False)


def fresh(target: FusedTarget, ids: Tensor) -> Tensor:
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return scored.logits_TV


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [None, 0, 1, 20, 27])
def test_a_copy_of_a_row_goes_its_own_way(length: int | None) -> None:
    target = make()
    ids, more, other = random_ids(27, 1), random_ids(5, 2), random_ids(9, 3)
    row = target.new_row()
    target.forward([ids[:20]], [row])
    target.forward([ids[20:]], [row])
    assert target.can_truncate
    made = target.copy(row, length)
    kept = 27 if length is None else length
    assert (row.num_positions, made.num_positions) == (27, kept)
    target.rollback([made], [0])
    with pytest.raises(ValueError, match="cannot keep 1"):
        target.rollback([made], [1])
    [a, b] = target.forward([more, other], [made, row])
    same(a.logits_TV, fresh(target, torch.cat([ids[:kept], more]))[kept:])
    same(b.logits_TV, fresh(target, torch.cat([ids, other]))[27:])
    target.rollback([made, row], [2, 4])
    target.free(row)
    [a] = target.forward([other], [made])
    same(a.logits_TV, fresh(target, torch.cat([ids[:kept], more[:2], other]))[kept + 2 :])


def test_what_cannot_be_copied_is_named() -> None:
    target = make()
    row = target.new_row()
    target.forward([random_ids(3)], [row])
    for length in (-1, 4):
        with pytest.raises(ValueError, match=f"cannot copy {length} positions of a row that has 3"):
            target.copy(row, length)
    with pytest.raises(ValueError, match="another target"):
        make().copy(row)
    target.free(row)
    with pytest.raises(ValueError, match="freed"):
        target.copy(row)
