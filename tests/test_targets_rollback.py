"""What a block drafter does to a row, for every family of targets: partial acceptance, again and again.

One row a family: right after the prefill, several times in a row, nothing kept, everything kept, a block longer than
any convolution, then plain steps; logits and taps are those of one forward over what remained, whatever came between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdraft.targets import HFTarget
from blockdraft.targets.fused import FusedTarget
from blockdraft.targets.recurrent import Undo
from kimi_k3_kit import VOCAB as K3_VOCAB
from kimi_k3_kit import tiny_target
from tiny_hybrids import RECURRENT, SPARSE, TRIED, relative, tapped, tiny_hybrid
from tiny_targets import ATTENTION_ONLY, random_ids, tiny_model

LIMIT = 1e-5
# (ids fed, what is kept of them, one after another); the prompt comes first, the last block tells.
STORIES: dict[str, list[tuple[int, list[int]]]] = {
    "behind the prefill, several times": [
        (21, [13]),
        (8, [8]),
        (9, [7, 7, 4, 1]),
        (9, [9, 3]),
        (2, [1, 0]),
    ],
    "to nothing, and everything kept": [
        (21, [0]),
        (8, [3]),
        (8, [0]),
        (1, [1]),
        (8, [8]),
        (8, [8]),
    ],
    "long blocks, plain steps": [
        (5, [5]),
        (20, [11]),
        (20, [2]),
        (1, [0]),
        (1, [1]),
        (20, [19]),
    ],
    "no prompt": [(6, [1]), (6, [0]), (6, [6])],
}


@pytest.fixture(
    scope="module", params=[*ATTENTION_ONLY, "llama, fused", *SPARSE, *RECURRENT, *TRIED, "kimi_k3, prefix", "kimi_k3"]
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKDRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = target_of(request.param)
    yield made
    if isinstance(made, HFTarget):
        made.close()


def target_of(family: str) -> Any:
    if family.startswith("kimi_k3"):
        return tiny_target((1, 3), stream="prefix" if family.endswith("prefix") else "attn_res")
    if family == "llama, fused":
        model = tiny_model("llama")
        return FusedTarget(model, HFTarget(model).facts, (1, 3), pack=False)
    return tapped(tiny_model(family) if family in ATTENTION_ONLY else tiny_hybrid(family))


def worst(target: Any, story: list[tuple[int, list[int]]], seed: int) -> float:
    """The largest difference of all logits and taps that stayed, and of a last block's, from one forward over them."""
    row, ids, found = target.new_row(), [], []
    for number, (count, keeps) in enumerate([*story, (6, [6])]):
        block = ids_of(count, 100 * seed + number)
        [scored] = target.forward([block], [row])
        for keep in keeps:
            target.rollback([row], [keep])
        assert row.num_positions == sum(map(len, ids)) + keeps[-1]
        ids.append(block[: keeps[-1]])
        found.append((scored.logits_TV[: keeps[-1]], scored.taps_TNE[: keeps[-1]]))
    whole = target.new_row()
    [expected] = target.forward([torch.cat(ids)], [whole])
    for one in (row, whole):
        target.free(one)
    error = relative(torch.cat([logits for logits, _ in found]), expected.logits_TV)
    if target.tap_layer_ids:
        error = max(error, relative(torch.cat([taps for _, taps in found]), expected.taps_TNE))
    return error


def ids_of(count: int, seed: int) -> Tensor:
    """Of every family's vocabulary."""
    return random_ids(count, seed) % K3_VOCAB


def test_partial_acceptance_of_every_kind(target: Any) -> None:
    for seed, (name, story) in enumerate(STORIES.items()):
        assert worst(target, story, seed) <= LIMIT, name


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "qwen4_exp_text", "falcon_h1", "lfm2", "kimi_k3"])
def test_states_behind_every_step_are_those_of_plain_decoding(family: str) -> None:
    """Blocks of seven ids of which none, one, ... all stay, in turn; beside them a row that is fed those one by one."""
    target = target_of(family)
    speculating, plain = target.new_row(), target.new_row()
    for row in (speculating, plain):
        target.forward([ids_of(10, 1)], [row], num_logits=0)
    for step in range(16):
        block, kept = ids_of(7, 50 + step), step % 8
        target.forward([block], [speculating], num_logits=0)
        target.rollback([speculating], [kept])
        for index in range(kept):
            target.forward([block[index : index + 1]], [plain], num_logits=0)
        found, wanted = states_of(speculating), states_of(plain)
        assert len(found) == len(wanted) > 3
        for one, other in zip(found, wanted, strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
            limit = 1e-12 if family in {"lfm2", "kimi_k3"} else LIMIT  # the others keep or gate them in float32
            assert float((one - other).abs().max()) <= limit * max(1.0, float(other.abs().max()))


def states_of(row: Any) -> list[Tensor]:
    """Every state of a row, as its next forward will find it."""
    if hasattr(row, "states"):
        return [x for _, state in sorted(row.states.items()) for x in (state.state_HAW, state.tail_KP)]
    with torch.inference_mode():
        row.undo.settle()
    held = [x for layer in row.cache.states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
    keys = [layer.keys for layer in row.cache.layers if getattr(layer, "keys", None) is not None]
    return [x for x in (*held, *keys) if x is not None]


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2", "lfm2"])
def test_every_story_finds_a_state_that_is_not_taken_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(family)
    monkeypatch.setattr(Undo, "settle", lambda _undo: None)
    for seed, (name, story) in enumerate(STORIES.items()):
        assert worst(target, story, seed) > 100 * LIMIT, name
    target.close()
