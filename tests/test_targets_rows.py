"""Many rows in one pass of a transformers model: the same as each alone, every weight once, nothing without a trial."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from blockdraft.targets import HFTarget
from blockdraft.targets.hf_attention import use_grouped_attention_
from blockdraft.targets.hf_rows import Joint
from tiny_hybrids import RECURRENT, SPARSE, TRIED, relative, tapped, tiny_hybrid
from tiny_targets import ATTENTION_ONLY, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")

LIMIT = 1e-5
LATENTS = {"deepseek_v3", "kimi_linear", "bailing_hybrid"}
BY_NAME = {*SPARSE, "qwen4_exp_text", "glm5_next_text"}  # they look for the names of the backends that they know
# Distances of one row, made before the layers; cache layers of a class of its own.
APART = {"inkling_text", "inkling2_text", "inkling2_loop_text", "minimax_m3_vl_text"}
FAMILIES = [*ATTENTION_ONLY, *SPARSE, *RECURRENT, *TRIED]
_models: dict[str, Any] = {}


def model_of(family: str) -> Any:
    if family not in _models:
        _models[family] = tiny_model(family) if family in ATTENTION_ONLY else tiny_hybrid(family)
    return _models[family]


def target_of(family: str) -> HFTarget:
    return tapped(model_of(family))


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Iterator[HFTarget]:
    made = target_of(request.param)
    yield made
    made.close()


@pytest.fixture(params=["llama", "mistral", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen4_exp_text", "lfm2"])
def one_of_a_kind(request: pytest.FixtureRequest) -> Iterator[HFTarget]:
    made = target_of(request.param)
    yield made
    made.close()


class Rows:
    """Rows beside the ids that they should stand for."""

    def __init__(self, target: HFTarget, count: int) -> None:
        self.target, self.rows = target, [target.new_row() for _ in range(count)]
        self.ids = [random_ids(0)] * count
        self.last = [0] * count

    def feed(self, blocks: list[Tensor], num_logits: int | None = None) -> list[Any]:
        scored = self.target.forward(blocks, self.rows, num_logits=num_logits)
        self.ids = [torch.cat(pair) for pair in zip(self.ids, blocks, strict=True)]
        self.last = [len(block) for block in blocks]
        return scored

    def keep(self, counts: list[int]) -> None:
        self.target.rollback(self.rows, counts)
        self.ids = [x[: len(x) - last + kept] for x, last, kept in zip(self.ids, self.last, counts, strict=True)]
        self.last = counts

    def check(self, scored: list[Any]) -> None:
        """Against one pass of each row's text alone, on a new row."""
        for ids, last, found in zip(self.ids, self.last, scored, strict=True):
            row = self.target.new_row()
            [expected] = self.target.forward([ids], [row])
            self.target.free(row)
            count = len(found.logits_TV)
            if count:
                assert relative(found.logits_TV, expected.logits_TV[-count:]) <= LIMIT
            assert found.taps_TNE.shape[0] == last
            if self.target.tap_layer_ids:
                assert relative(found.taps_TNE, expected.taps_TNE[-last:]) <= LIMIT


def blocks_of(counts: list[int], seed: int = 0) -> list[Tensor]:
    return [random_ids(count, 100 * seed + index) for index, count in enumerate(counts)]


def test_rows_of_unequal_lengths(target: HFTarget) -> None:
    """Prompts, blocks of unequal and of equal width, one token each; none, some and all kept; beyond the window."""
    family = "glm5_next_text" if target.facts.model_type == "glm5_next" else target.facts.model_type
    way = "modules" if family in BY_NAME else "latents" if family in LATENTS else "attention"
    assert target.way == (None if family in APART else way)
    rows, draw = Rows(target, 4), random.Random(1)
    rows.feed(blocks_of([21, 3, 9, 2]), num_logits=0)
    for step, counts in enumerate([[4, 1, 6, 2], [5, 5, 5, 5], [1, 1, 1, 1], [7, 1, 1, 7]]):
        rows.check(rows.feed(blocks_of(counts, step + 1), num_logits=[None, 1, None, 2][step]))
        rows.keep([draw.choice([0, draw.randint(0, count), count]) for count in counts])
        rows.keep([draw.randint(0, kept) for kept in rows.last])
    rows.check(rows.feed(blocks_of([2, 2, 1, 3], 9)))
    assert len({row.num_positions for row in rows.rows}) > 1


def test_new_rows_beside_rows_that_were_taken_back_to_nothing(one_of_a_kind: HFTarget) -> None:
    rows = Rows(one_of_a_kind, 4)
    for index in (1, 3):
        one_of_a_kind.forward([random_ids(6)], [rows.rows[index]])
        one_of_a_kind.rollback([rows.rows[index]], [0])
    rows.check(rows.feed(blocks_of([5, 5, 5, 1])))
    rows.keep([0, 5, 0, 0])
    rows.check(rows.feed(blocks_of([3, 3, 3, 3], 1)))


def test_rows_leave_and_join(one_of_a_kind: HFTarget) -> None:
    target, rows = one_of_a_kind, Rows(one_of_a_kind, 3)
    rows.feed(blocks_of([12, 5, 8]))
    target.free(rows.rows[1])
    assert rows.rows[1].num_bytes == 0
    rows.rows[1], rows.ids[1], rows.last[1] = target.copy(rows.rows[0]), rows.ids[0], 0
    rows.check(rows.feed(blocks_of([3, 4, 3], 1)))
    rows.keep([1, 2, 0])
    [alone] = target.forward([random_ids(4, 7)], [rows.rows[2]])  # by itself in between
    rows.ids[2] = torch.cat([rows.ids[2], random_ids(4, 7)])
    rows.last[2] = 4
    target.rollback([rows.rows[2]], [1])
    rows.ids[2], rows.last[2] = rows.ids[2][:-3], 1
    rows.check(rows.feed(blocks_of([2, 2, 2], 2)))
    assert len(alone.logits_TV) == 4


def test_every_weight_is_read_once(one_of_a_kind: HFTarget) -> None:
    """MLPs and norms run once for all rows, mixers once for all rows of a width, attention's products where it can."""
    target, rows = one_of_a_kind, Rows(one_of_a_kind, 4)
    rows.feed(blocks_of([9, 4, 6, 5]))
    seen: dict[nn.Module, list[int]] = {}
    parts = [x for x in target._model.modules() if isinstance(x, nn.Linear)]
    handles = [
        part.register_forward_pre_hook(lambda m, args: seen.setdefault(m, []).append(args[0].numel())) for part in parts
    ]
    rows.feed(blocks_of([4, 4, 4, 4], 1))
    for handle in handles:
        handle.remove()
    writers = {part for module in target._watched().writers for part in module.modules()}
    is_apart = target.way == "modules"
    for part, sizes in seen.items():
        assert len(sizes) == (4 if is_apart and part in writers else 1)
    assert len(seen) > 8


def test_masks_are_made_once_a_pass_and_a_rollback_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target, made = target_of("gemma2"), []
    rows = Rows(target, 3)
    rows.feed(blocks_of([15, 4, 6]))
    name = target._text_config._attn_implementation
    real = ALL_MASK_ATTENTION_FUNCTIONS[name]
    mapping = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(mapping, name, lambda **kwargs: made.append(1) or real(**kwargs))
    rows.feed(blocks_of([4, 4, 4], 1))
    assert len(made) == 2  # for layers with a window and for layers without, all rows at once
    rooms = [layer._room[0].data_ptr() for row in rows.rows for layer in row.cache.layers]  # type: ignore[attr-defined]
    rows.keep([1, 0, 3])
    rows.check(rows.feed(blocks_of([2, 3, 1], 2)))
    assert rooms == [layer._room[0].data_ptr() for row in rows.rows for layer in row.cache.layers]  # type: ignore[attr-defined]
    target.close()


def test_a_pass_that_fails_leaves_every_row_as_it_was(one_of_a_kind: HFTarget) -> None:
    target, rows = one_of_a_kind, Rows(one_of_a_kind, 3)
    rows.feed(blocks_of([20, 25, 9]))
    rows.keep([11, 25, 4])  # two of them with work put off
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        raise KeyboardInterrupt

    for layer in target._layers:
        handle = layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            target.forward(blocks_of([4, 7, 2], 1), rows.rows)
        handle.remove()
        assert [row.num_positions for row in rows.rows] == [11, 25, 4]
    assert calls == 4
    rows.check(rows.feed(blocks_of([3, 3, 3], 2)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "kimi_linear", "deepseek_v32", "lfm2"])
def test_closed_the_model_is_as_it_was(family: str) -> None:
    model = model_of(family)
    before = model.config._attn_implementation
    one, two = target_of(family), target_of(family)
    for target in (one, two):
        rows = Rows(target, 2)
        rows.feed(blocks_of([5, 3]))
        rows.check(rows.feed(blocks_of([2, 2], 1)))
    one.close()
    again = Rows(two, 2)
    again.feed(blocks_of([4, 4]))
    again.check(again.feed(blocks_of([3, 1], 1)))
    two.close()
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(module) or "_blockdraft_hold" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_nobody_closed_goes_with_its_target() -> None:
    target = HFTarget(tiny_hybrid("qwen3_next"))
    rows = Rows(target, 2)
    rows.feed(blocks_of([5, 3]))
    assert target.way == "attention"
    model = weakref.ref(target._model)
    del target, rows
    gc.collect()
    assert model() is None


def test_a_pass_that_says_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' keys are exchanged: each row then has a pass of its own, and the model is left alone."""
    real = Joint.attend

    def exchanged(joint: Joint, attention: Any, module: Any, query: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        keys = [torch.cat((x[..., :1, :], x[..., :-1, :]), -2) for x in keys] if not isinstance(keys, Tensor) else keys
        return real(joint, attention, module, query, keys, *args, **kwargs)

    monkeypatch.setattr(Joint, "attend", exchanged)
    monkeypatch.setattr("blockdraft.targets.hf.WAYS", ("attention",))
    model = tiny_model("llama")
    target = HFTarget(model, (1,))
    rows = Rows(target, 2)
    rows.feed(blocks_of([8, 5]))
    rows.check(rows.feed(blocks_of([3, 3], 1)))
    assert target.way is None and model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())
    target.close()


def test_windows_are_not_left_to_causal_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a backend of ours only models that keep every position may run all rows at once."""
    monkeypatch.setattr("blockdraft.targets.hf.can_part_rows", lambda _model: False)
    windowed, whole = target_of("mistral"), target_of("llama")
    assert windowed.way is None and whole.way == "modules"
    rows = Rows(windowed, 2)
    rows.feed(blocks_of([14, 12]))
    rows.check(rows.feed(blocks_of([3, 3], 1)))
    windowed.close()
    whole.close()


def test_the_grouped_attention_knows_rows() -> None:
    model = tiny_model("llama")
    assert use_grouped_attention_(model)
    target = HFTarget(model, (1, 3))
    rows = Rows(target, 3)
    rows.feed(blocks_of([30, 7, 40]))
    for counts in ([1, 1, 1], [4, 5, 1]):
        rows.check(rows.feed(blocks_of(counts, sum(counts))))
        rows.keep([0, 1, 1])
    assert target.way == "attention"
    target.close()
    assert model.config._attn_implementation == "blockdraft_grouped"


def test_memory_is_counted_for_each_row(one_of_a_kind: HFTarget) -> None:
    """States of a pass stand in one tensor; each row counts its part, and what a lone row would hold."""
    rows, alone = Rows(one_of_a_kind, 3), Rows(one_of_a_kind, 1)
    rows.feed(blocks_of([9, 9, 9]))
    rows.feed(blocks_of([4, 4, 4], 1))
    alone.feed(blocks_of([9]))
    alone.feed(blocks_of([4], 1))
    assert {row.num_bytes for row in rows.rows} == {alone.rows[0].num_bytes}
