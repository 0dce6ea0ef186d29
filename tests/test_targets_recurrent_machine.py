"""Rows with recurrent state in any order of calls: logits, taps and the states themselves are those of fresh rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import Tensor

from blockdraft.targets import Scored
from blockdraft.targets.kimi_k3 import KimiK3Target
from blockdraft.targets.recurrent import Undo
from kimi_k3_kit import tiny_target
from tiny_hybrids import relative, tapped, tiny_hybrid
from tiny_targets import random_ids

LIMIT = 1e-5
MAX_ROWS, MAX_POSITIONS = 3, 100
FAMILIES = ("qwen3_next", "kimi_linear", "qwen4_exp_text", "falcon_h1", "lfm2", "kimi_k3")
Held = tuple[Any, list[int], int]  # row, ids it holds, how many of them came with its last forward


@cache
def target_of(family: str) -> Any:
    if family == "kimi_k3":
        return tiny_target((1, 3), stream="attn_res")
    return tapped(tiny_hybrid(family))


def states_of(row: Any) -> list[Tensor]:
    """Every recurrent and convolution state of a row, and its keys or latents, as its next forward will find them."""
    if isinstance(row.owner, KimiK3Target):
        states = [x for _, state in sorted(row.states.items()) for x in (state.state_HAW, state.tail_KP)]
        return states + [room[: row.length] for _, room in sorted(row.rooms.items())]
    with torch.inference_mode():
        row.undo.settle()
    found = [x for layer in row.cache.states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    keys = [layer.keys for layer in row.cache.layers if getattr(layer, "keys", None) is not None]
    return [x for x in (*found, *keys) if x is not None]


class Rows(RuleBasedStateMachine):
    family = ""

    def __init__(self) -> None:
        super().__init__()
        self.target = target_of(self.family)
        self.held: list[Held] = []

    @rule(data=st.data(), chunks=st.lists(st.integers(1, 12), min_size=1, max_size=3))
    @precondition(lambda self: len(self.held) < MAX_ROWS)
    def join(self, data: st.DataObject, chunks: list[int]) -> None:
        """A row is opened and its prompt prefilled in chunks."""
        self.held.append((self.target.new_row(), [], 0))
        for chunk in chunks:
            self.feed([len(self.held) - 1], [self.draw_ids(data, chunk)], num_logits=0)

    @rule(data=st.data())
    @precondition(lambda self: 0 < len(self.held) < MAX_ROWS)
    def clone(self, data: st.DataObject) -> None:
        """A copy joins beside its source: at any moment, also with a rollback behind it that is not worked off yet."""
        row, ids, _ = data.draw(st.sampled_from(self.held))
        made = self.target.copy(row)
        for found, expected in zip(states_of(made), states_of(row), strict=True):
            assert torch.equal(found, expected)
        self.held.append((made, ids, 0))

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def leave(self, data: st.DataObject) -> None:
        row, _, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.target.free(row)
        assert row.num_bytes == 0

    @rule(data=st.data(), counts=st.lists(st.integers(1, 9), min_size=MAX_ROWS, max_size=MAX_ROWS))
    @precondition(lambda self: self.held)
    def block(self, data: st.DataObject, counts: list[int]) -> None:
        """Blocks for some of the rows, of equal or unequal width; how much of them stays is left to what comes."""
        indices = data.draw(st.lists(st.integers(0, len(self.held) - 1), min_size=1, unique=True))
        self.feed(indices, [self.draw_ids(data, counts[index]) for index in indices])

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def plain_step(self, data: st.DataObject) -> None:
        self.feed([data.draw(st.integers(0, len(self.held) - 1))], [self.draw_ids(data, 1)])

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def rollback(self, data: st.DataObject) -> None:
        """Any length, zero and all among them, also behind a prefill and behind another rollback."""
        indices = data.draw(st.lists(st.integers(0, len(self.held) - 1), min_size=1, unique=True))
        keep = [data.draw(st.integers(0, self.held[index][2])) for index in indices]
        self.target.rollback([self.held[index][0] for index in indices], keep)
        for index, kept in zip(indices, keep, strict=True):
            row, ids, last = self.held[index]
            self.held[index] = (row, ids[: len(ids) - last + kept], kept)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def look_at_the_states(self, data: st.DataObject) -> None:
        row, ids, _ = data.draw(st.sampled_from(self.held))
        if ids:
            whole = self.target.new_row()
            self.target.forward([torch.tensor(ids)], [whole], num_logits=0)
            for found, expected in zip(states_of(row), states_of(whole), strict=True):
                assert found.shape == expected.shape
                assert float((found - expected).abs().max()) <= LIMIT * max(1.0, float(expected.abs().max()))
            self.target.free(whole)

    @invariant()
    def lengths_agree(self) -> None:
        assert all(row.num_positions == len(ids) for row, ids, _ in self.held)

    def draw_ids(self, data: st.DataObject, count: int) -> Tensor:
        return random_ids(count, data.draw(st.integers(0, 9))) % self.target.facts.vocab_size

    def feed(self, indices: list[int], blocks: list[Tensor], num_logits: int | None = None) -> None:
        if any(len(self.held[i][1]) + len(x) > MAX_POSITIONS for i, x in zip(indices, blocks, strict=True)):
            return
        scored = self.target.forward(blocks, [self.held[index][0] for index in indices], num_logits=num_logits)
        for index, new, one in zip(indices, blocks, scored, strict=True):
            row, ids, _ = self.held[index]
            ids = ids + new.tolist()
            self.held[index] = (row, ids, len(new))
            expected = self.fresh(ids)
            if num_logits is None:
                assert relative(one.logits_TV, expected.logits_TV[-len(new) :]) <= LIMIT
            if self.target.tap_layer_ids:
                assert relative(one.taps_TNE, expected.taps_TNE[-len(new) :]) <= LIMIT

    def fresh(self, ids: list[int]) -> Scored:
        row = self.target.new_row()
        [scored] = self.target.forward([torch.tensor(ids)], [row])
        self.target.free(row)
        return scored

    def teardown(self) -> None:
        for row, _, _ in self.held:
            self.target.free(row)


def try_it(family: str) -> None:
    machine: Callable[[], Rows] = type("Rows", (Rows,), {"family": family})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=6,
            stateful_step_count=12,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],  # to make a failing order shorter takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_in_any_order(family: str) -> None:
    try_it(family)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_states_that_are_not_taken_back_are_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Undo, "settle", lambda _undo: None)
    with pytest.raises(AssertionError):
        try_it(family)
