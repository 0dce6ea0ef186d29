"""The Kimi-K3 target against its formulas, and against itself from scratch after every kind of rollback."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from blockdraft.config import TapStream
from blockdraft.errors import RequestError
from blockdraft.targets import Row, Scored
from blockdraft.targets.kimi_k3 import KimiK3Config, KimiK3Target, count_parameters, published_tensors
from kimi_k3_kit import LAYERS, MAX_LENGTH, VOCAB, FromScratch, published, tensors_of, tiny_model, tiny_target

ALL_TAPS = tuple(range(LAYERS))
STREAMS: tuple[TapStream, ...] = ("prefix", "attn_res")


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def error(found: Scored, wanted: Scored) -> float:
    """The largest difference of logits or taps, relative to the size of what is wanted."""
    logits = (found.logits_TV - wanted.logits_TV).abs().max() / wanted.logits_TV.abs().max()
    taps = (found.taps_TNE - wanted.taps_TNE).abs().max() / wanted.taps_TNE.abs().max()
    return float(torch.maximum(logits, taps))


def fresh(target: KimiK3Target, ids: Tensor, count: int) -> Scored:
    """What the last `count` of some ids give when they are all fed to a new row at once."""
    row = target.new_row()
    [scored] = target.forward([ids], [row])
    target.free(row)
    return Scored(scored.logits_TV[-count:], scored.taps_TNE[-count:])


class Follower:
    """A row beside the list of ids that it should stand for."""

    def __init__(self, target: KimiK3Target) -> None:
        self.target, self.row, self.ids, self.num_last = target, target.new_row(), torch.empty(0, dtype=torch.long), 0

    def feed(self, ids: Tensor) -> Scored:
        [scored] = self.target.forward([ids], [self.row])
        self.ids, self.num_last = torch.cat((self.ids, ids)), len(ids)
        return scored

    def keep(self, count: int) -> None:
        self.target.rollback([self.row], [count])
        self.ids, self.num_last = self.ids[: len(self.ids) - self.num_last + count], count
        assert self.row.num_positions == len(self.ids)

    def check(self, ids: Tensor) -> None:
        """Feed some ids and compare with a new row."""
        assert error(self.feed(ids), fresh(self.target, self.ids, len(ids))) < 1e-10


# ---- the formulas ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", STREAMS)
def test_against_the_formulas(stream: TapStream) -> None:
    target = tiny_target(ALL_TAPS, stream=stream)
    ids = random_ids(37)
    oracle = FromScratch(tensors_of(target._model)).run(ids)
    wanted = oracle.prefix if stream == "prefix" else oracle.mixture
    scored = fresh(target, ids, len(ids))
    assert error(scored, Scored(oracle.logits, torch.stack([wanted[tap] for tap in ALL_TAPS], dim=1))) < 1e-11
    assert float(oracle.logits.std()) > 0.3  # nothing collapsed


def test_the_two_streams_differ_and_restart_where_a_block_begins() -> None:
    ids = random_ids(8)
    prefix, mixture = (fresh(tiny_target(ALL_TAPS, stream=stream), ids, 8).taps_TNE for stream in STREAMS)
    assert all(float((prefix[:, tap] - mixture[:, tap]).abs().max()) > 0.1 for tap in ALL_TAPS)
    oracle = FromScratch(tensors_of(tiny_model()))
    oracle.run(ids)
    # The sum behind layer 4 holds layer 4 alone.
    u = oracle.mixture[3]
    alone = oracle.kda(oracle.norm(u, "model.layers.4.input_layernorm"), "model.layers.4.self_attn")
    at = "model.layers.4"
    blocks = [oracle.get("model.embed_tokens.weight")[ids], oracle.prefix[3], alone]
    second = oracle.norm(oracle.mix(blocks, f"{at}.mlp_res"), f"{at}.post_attention_layernorm")
    assert torch.allclose(prefix[:, 4], alone + oracle.moe(second, f"{at}.block_sparse_moe"), atol=1e-11)


def test_every_part_matters() -> None:
    """No tensor is left out of the computation: a change of any of them shows."""
    ids = random_ids(24)
    model = tiny_model()
    reference = tiny_target()
    wanted = fresh(reference, ids, 24).logits_TV
    target = KimiK3Target(model, reference.facts)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".layers." in name and name.split(".layers.")[1].split(".")[0] not in ("0", "3", "4"):
            continue
        before = parameter.detach().clone()
        parameter.add_(0.3 * torch.randn(before.shape, generator=generator, dtype=before.dtype))
        # Layer 0 has only one value to weigh before its attention.
        is_idle = name.startswith("model.layers.0.self_attention_res")
        assert (float((fresh(target, ids, 24).logits_TV - wanted).abs().max()) > 1e-6) != is_idle, name
        parameter.copy_(before)


def test_training_form_has_the_same_logits_and_gradients_everywhere() -> None:
    model = tiny_model()
    ids_BT = torch.stack((random_ids(9), random_ids(9, seed=1)))
    logits_BTV = model(ids_BT)
    target = KimiK3Target(tiny_model(), tiny_target().facts)
    for ids, logits in zip(ids_BT, logits_BTV, strict=True):
        assert torch.allclose(fresh(target, ids, 9).logits_TV, logits, atol=1e-11)
    logits_BTV.square().sum().backward()
    idle = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert idle == {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    } | {f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias" for layer in range(1, LAYERS)}


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pieces", [[1] * 41, [5, 1, 20, 15]])
def test_chunks_do_not_show(stream: TapStream, pieces: list[int]) -> None:
    target = tiny_target(ALL_TAPS, stream=stream)
    ids = random_ids(41)
    row = target.new_row()
    parts = [target.forward([part], [row])[0] for part in ids.split(pieces)]
    joined = Scored(torch.cat([p.logits_TV for p in parts]), torch.cat([p.taps_TNE for p in parts]))
    assert error(joined, fresh(target, ids, 41)) < 1e-11


@pytest.mark.parametrize(("stream", "rounds"), [("prefix", 50), ("attn_res", 200)])
def test_rounds_of_random_acceptance(stream: TapStream, rounds: int) -> None:
    target = tiny_target((1, 3, 4, 8), stream=stream)
    chance = random.Random(7)
    follower = Follower(target)
    for round_ in range(rounds):
        if round_ % 25 == 0:
            follower = Follower(target)
            follower.feed(random_ids(chance.randint(1, 20), seed=round_))
        width = chance.randint(1, 8)
        follower.check(random_ids(width, seed=1000 + round_))
        follower.keep(chance.randint(0, width))


@pytest.mark.parametrize("width", [1, 2, 3, 8, 40])
def test_every_number_that_can_be_kept(width: int) -> None:
    """Zero, all, fewer and more than the convolution looks back, and across the chunks of a long pass."""
    target = tiny_target((0, 5))
    for kept in range(width + 1) if width < 40 else (1, 15, 16, 17, 32, 39):
        follower = Follower(target)
        follower.feed(random_ids(6))
        follower.check(random_ids(width, seed=1))
        follower.keep(kept)
        follower.check(random_ids(5, seed=2))


def test_rollback_right_after_prefill_and_to_nothing() -> None:
    target = tiny_target((2,))
    for kept in (0, 1, 2, 3, 19, 20):
        follower = Follower(target)
        follower.feed(random_ids(20))
        follower.keep(kept)
        follower.check(random_ids(7, seed=3))


def test_several_rollbacks_in_a_row() -> None:
    target = tiny_target((2, 7))
    follower = Follower(target)
    follower.feed(random_ids(11))
    for kept in ([8, 5, 5, 2, 0], [7, 1], [3, 3], [0, 0]):
        follower.check(random_ids(8, seed=sum(kept)))
        for count in kept:
            follower.keep(count)
    follower.check(random_ids(4, seed=9))


def test_a_rollback_leaves_what_was_there_before_alone() -> None:
    """Refused calls, and calls that keep everything, change nothing to the last bit."""
    target = tiny_target((2,))
    follower = Follower(target)
    follower.feed(random_ids(9))
    states = {layer: state.state_HAW.clone() for layer, state in follower.row.states.items()}  # type: ignore[attr-defined]
    for keep in ([10], [-1], [1, 2]):
        with pytest.raises(ValueError):
            target.rollback([follower.row], keep)
    follower.keep(9)
    assert all(torch.equal(states[layer], state.state_HAW) for layer, state in follower.row.states.items())  # type: ignore[attr-defined]
    follower.check(random_ids(3, seed=4))


def test_rows_are_independent() -> None:
    target = tiny_target((1, 4, 8), stream="attn_res")
    chance = random.Random(3)
    followers: list[Follower] = []
    for round_ in range(16):
        if len(followers) < 4 and chance.random() < 0.6:
            followers.append(Follower(target))
        if followers and chance.random() < 0.1:
            target.free(followers.pop(chance.randrange(len(followers))).row)
        chosen = [f for f in followers if chance.random() < 0.7]
        ids = [random_ids(chance.randint(1, 9), seed=100 * round_ + i) for i in range(len(chosen))]
        for follower, new, scored in zip(chosen, ids, target.forward(ids, [f.row for f in chosen]), strict=True):
            follower.ids, follower.num_last = torch.cat((follower.ids, new)), len(new)
            assert error(scored, fresh(target, follower.ids, len(new))) < 1e-10
        keep = [chance.randint(0, f.num_last) for f in chosen]
        target.rollback([f.row for f in chosen], keep)
        for follower, count in zip(chosen, keep, strict=True):
            follower.ids, follower.num_last = follower.ids[: len(follower.ids) - follower.num_last + count], count


def test_a_failed_forward_changes_nothing() -> None:
    target = tiny_target((2,))
    follower, other = Follower(target), target.new_row()
    follower.feed(random_ids(6))
    with pytest.raises(RequestError, match="positions do not fit"):
        target.forward([random_ids(2), random_ids(MAX_LENGTH + 1)], [follower.row, other])
    with pytest.raises(IndexError):
        target.forward([random_ids(3), torch.tensor([VOCAB])], [follower.row, other])
    follower.keep(4)
    assert other.num_positions == 0
    follower.check(random_ids(3, seed=5))


def test_memory_is_counted_and_let_go() -> None:
    target = tiny_target()
    row = target.new_row()
    assert row.num_bytes == 0
    target.forward([random_ids(10)], [row], num_logits=0)
    states = 6 * (3 * 8 * 8 + 3 * 72) * 8  # six delta layers: the state, three inputs of 72 channels
    latents = 3 * (10 + 64) * (10 + 4) * 8
    tape = 6 * (13 * 72 + 3 * 10 * 24) * 8
    assert row.num_bytes == 2 * states + latents + tape
    target.free(row)
    target.free(row)
    assert row.num_bytes == 0
    with pytest.raises(ValueError, match="freed"):
        target.forward([random_ids(1)], [row])


def test_logits_that_are_not_asked_for_and_the_parts_of_the_contract() -> None:
    target = tiny_target((3,))
    ids = random_ids(6)
    whole = fresh(target, ids, 6)
    for count in (0, 1, 4, 9):
        row: Row = target.new_row()
        [scored] = target.forward([ids], [row], num_logits=count)
        assert torch.allclose(scored.logits_TV, whole.logits_TV[6 - min(count, 6) :], atol=1e-12)
        assert scored.taps_TNE.shape == (6, 1, 32)
    assert torch.equal(target.embed(ids), target._model.model.embed_tokens.weight[ids])
    assert torch.equal(target.logits(whole.taps_TNE), target._model.lm_head(whole.taps_TNE))
    assert (target.facts.model_type, target.facts.is_recurrent, target.facts.eos_token_ids) == ("kimi_k3", True, (2,))
    assert target.forward([], []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_weights(dtype: torch.dtype) -> None:
    """Float32 stays near float64; bfloat16 runs with its states in float32."""
    ids = random_ids(30)
    narrow = KimiK3Target(tiny_model(dtype=dtype), tiny_target().facts, (4,))
    row = narrow.new_row()
    [scored] = narrow.forward([ids], [row])
    assert {state.state_HAW.dtype for state in row.states.values()} == {torch.float32}  # type: ignore[attr-defined]
    assert scored.logits_TV.dtype == scored.taps_TNE.dtype == dtype
    if dtype == torch.bfloat16:
        return
    assert error(scored, fresh(tiny_target((4,)), ids, 30)) < 1e-4
    narrow.rollback([row], [17])
    [again] = narrow.forward([ids[17:]], [row])
    assert error(again, Scored(scored.logits_TV[17:], scored.taps_TNE[17:])) < 1e-4


# ---- the published size ----------------------------------------------------------------------------------------------
def test_the_published_model_counted() -> None:
    config = KimiK3Config.from_dict(published())
    counts = count_parameters(config)
    assert counts.total == 2_779_484_476_000  # "2.8T"
    assert counts.active == 104_189_619_808  # "104B"
    assert (len(config.kda.layers), config.num_layers - len(config.kda.layers)) == (69, 24)
    names = published_tensors(config)
    assert len(names) == 497_220 - 168  # the published index without its vision tower and projector
    at = "language_model.model.layers"
    assert names[f"{at}.5.block_sparse_moe.experts.895.w1.weight_packed"] == (3072, 1792)
    assert names[f"{at}.5.block_sparse_moe.experts.895.w1.weight_scale"] == (3072, 112)
    assert names[f"{at}.92.self_attn.g_proj.weight"] == names[f"{at}.91.self_attn.g_proj.weight"] == (12288, 7168)
    assert names[f"{at}.0.self_attn.q_conv1d.weight"] == (12288, 1, 4)
