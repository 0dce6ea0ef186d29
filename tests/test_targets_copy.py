"""A copy of a row: as good as one that was fed the same ids, and from then on nobody's business but its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.targets import HFTarget, Scored
from kimi_k3_kit import VOCAB as K3_VOCAB
from kimi_k3_kit import tiny_target
from tiny_hybrids import RECURRENT, SPARSE, relative, tapped, tiny_hybrid
from tiny_targets import ATTENTION_ONLY, tiny_model
from tiny_targets import random_ids as random_ids_of_61

LIMIT = 1e-5
WINDOWED = {"qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss"}
_models: dict[str, Any] = {}


def random_ids(count: int, seed: int = 0) -> Tensor:
    """Of every family's vocabulary."""
    return random_ids_of_61(count, seed) % K3_VOCAB


def target_of(family: str) -> Any:
    if family == "kimi_k3":
        return tiny_target((1, 3))
    if family not in _models:
        _models[family] = tiny_model(family) if family in ATTENTION_ONLY else tiny_hybrid(family)
    return tapped(_models[family])


@pytest.fixture(params=[*ATTENTION_ONLY, *SPARSE, *RECURRENT, "kimi_k3"])
def target(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = target_of(request.param)
    yield made
    if isinstance(made, HFTarget):
        made.close()


def fresh(target: Any, ids: Tensor, count: int) -> Scored:
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return Scored(scored.logits_TV[-count:], scored.taps_TNE[-count:])


def agrees(target: Any, row: Any, before: Tensor, new: Tensor) -> None:
    """Feed some ids and compare with a fresh row of all of them."""
    [scored] = target.forward([new], [row])
    wanted = fresh(target, torch.cat([before, new]), len(new))
    assert relative(scored.logits_TV, wanted.logits_TV) <= LIMIT
    if target.tap_layer_ids:
        assert relative(scored.taps_TNE, wanted.taps_TNE) <= LIMIT


def test_a_copy_goes_its_own_way(target: Any) -> None:
    prompt, block, mine, theirs = (random_ids(n, n) for n in (21, 7, 4, 5))
    row = target.new_row()
    target.forward([prompt], [row], num_logits=0)
    target.forward([block], [row], num_logits=0)
    target.rollback([row], [3])  # what this asks for is not done yet
    made = target.copy(row)
    assert (made.num_positions, row.num_positions) == (24, 24) and made.num_bytes > 0
    with pytest.raises(ValueError, match="cannot keep"):
        target.rollback([made], [1])
    target.rollback([made], [0])
    target.rollback([row], [1])  # the source still knows its last forward
    agrees(target, made, torch.cat([prompt, block[:3]]), mine)
    target.rollback([made], [2])
    agrees(target, row, torch.cat([prompt, block[:1]]), theirs)
    agrees(target, made, torch.cat([prompt, block[:3], mine[:2]]), theirs)
    target.free(row)
    assert row.num_bytes == 0
    agrees(target, made, torch.cat([prompt, block[:3], mine[:2], theirs]), mine)
    target.free(made)


@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v32", "qwen3_next", "lfm2", "kimi_k3"])
def test_a_copy_of_nothing_and_of_what_was_freed(family: str) -> None:
    target = target_of(family)
    row = target.new_row()
    made = target.copy(row)
    assert made.num_positions == 0
    agrees(target, made, random_ids(0), random_ids(9))
    target.free(row)
    with pytest.raises(ValueError, match="freed"):
        target.copy(row)


def test_a_shorter_copy(target: Any) -> None:
    ids, more = random_ids(30), random_ids(4, 2)
    row = target.new_row()
    target.forward([ids[:22]], [row], num_logits=0)
    target.forward([ids[22:]], [row], num_logits=0)
    family = target.facts.model_type
    assert target.can_truncate == (family in {*ATTENTION_ONLY, *SPARSE} - WINDOWED)
    for length in (31, -1):
        with pytest.raises(ValueError, match=f"cannot copy {length} positions: the row has 30"):
            target.copy(row, length)
    for length in (29, 22, 3, 0):
        if target.can_truncate:
            agrees(target, target.copy(row, length), ids[:length], more)
        else:
            with pytest.raises(ValueError, match=f"cannot copy {length} of 30"):
                target.copy(row, length)
    agrees(target, target.copy(row, 30), ids, more)


def test_a_window_as_long_as_any_row_drops_nothing() -> None:
    target = HFTarget(tiny_model("mistral", sliding_window=256))
    assert target.facts.max_length == 256 and target.can_truncate
    row = target.new_row()
    for count in (80, 90, 60):
        target.forward([random_ids(count, count)], [row], num_logits=0)
    ids = torch.cat([random_ids(count, count) for count in (80, 90, 60)])
    for length in (229, 100, 5):
        agrees(target, target.copy(row, length), ids[:length], random_ids(4, 2))


def test_rows_of_another_target_are_not_copied() -> None:
    with pytest.raises(ValueError, match="another target"):
        target_of("llama").copy(target_of("llama").new_row())
