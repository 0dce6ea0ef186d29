"""DSpark and DSpine against their formulas: rows, heads, the law of every proposal, the cut by confidence."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdraft.config import ConfidenceConfig, DraftConfig, InjectionConfig
from blockdraft.draft import CandidateLists, DraftModel, FullLaw, Proposal
from blockdraft.draft.markov import draw
from spark_kit import (
    CAUSAL,
    FULL,
    KINDS,
    SLIDING,
    TAP_WIDTH,
    WIDTH,
    FromScratch,
    random_model,
    spark_config,
    spine_config,
)

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def no_target(ids: Tensor) -> Tensor:
    raise AssertionError("the target's embedding was asked for, and the draft has its own")


class Block:
    """One block of a random draft after a random context: what the package computes, and what the formulas say."""

    def __init__(self, config: DraftConfig, *, seed: int = 0, length: int | None = None) -> None:
        self.model = model = random_model(config, seed=seed)
        self.scratch = FromScratch(model)
        generator = torch.Generator().manual_seed(seed)
        taps = torch.randn(9, 2, TAP_WIDTH, generator=generator, dtype=torch.float64)
        self.anchor = min(7, config.vocab_size - 1)
        cache = model.new_cache()
        for piece in taps.split([4, 1, 4]):
            model.inject(piece, cache)
        noise = model.noise([self.anchor], length or config.block_size, no_target)
        if config.injection is None:
            self.rows = self.hidden = model(noise, [cache])[0]
            self.wanted_rows = self.wanted = self.scratch.hidden(taps, noise[0])
        else:
            rows = model(noise, [cache], [self.anchor])
            self.rows, self.hidden = rows[0], model.head_rows(rows, [self.anchor])[0]
            self.wanted_rows, self.wanted = self.scratch.spine_rows(taps, noise[0], self.anchor)
        first = 0 if config.predicts_from_anchor else 1
        self.predicting, self.predicting_rows = self.wanted[first:], self.wanted_rows[first:]
        head = model.own_head
        assert head is not None
        self.logits = self.hidden[first:] @ head.T
        self.head = head

    def propose(self, temperature: float = 0.0, seed: int = 0, **options: float) -> Proposal:
        return self.model.propose(
            self.rows,
            self.anchor,
            self.logits,
            temperature,
            torch.Generator().manual_seed(seed),
            exclude_ids=(self.model.config.mask_token_id,),
            candidate_logits=lambda hidden, ids: (hidden @ self.head.T).gather(1, ids),
            **options,
        )

    def law(self, before: list[int], temperature: float) -> Tensor:
        if self.model.config.injection is None:
            return self.scratch.spark_law(self.predicting, before, temperature)
        return self.scratch.spine_law(self.predicting_rows, self.predicting, before, temperature)


CONFIGS = {
    **{kind: spark_config(kind) for kind in KINDS},
    "rnn, capped": spark_config("rnn", output_multiplier=0.7, final_logit_softcapping=2.0),
    "not from the anchor": spark_config("gated", predicts_from_anchor=False),
    "no Markov head": spark_config(None),
    "no Markov head, capped": spark_config(None, confidence=None, output_multiplier=0.7, final_logit_softcapping=2.0),
    "causal": spark_config("vanilla", layers=(SLIDING, CAUSAL)),
    "dspine": spine_config(),
    "dspine, sliding": spine_config(layers=(SLIDING, CAUSAL)),
    "dspine, one layer, capped": spine_config(layers=(SLIDING,), final_logit_softcapping=3.0),
}
cases = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def dense(proposal: Proposal, vocab_size: int) -> Tensor:
    law = proposal.q
    if isinstance(law, CandidateLists):
        return torch.zeros(len(law.ids_GM), vocab_size, dtype=law.probs_GM.dtype).scatter_(1, law.ids_GM, law.probs_GM)
    assert isinstance(law, FullLaw)
    return law.probs_GV


@cases
def test_rows_are_those_of_the_formulas(config: DraftConfig) -> None:
    block = Block(config)
    torch.testing.assert_close(block.rows, block.wanted_rows, **CLOSE)
    torch.testing.assert_close(block.hidden, block.wanted, **CLOSE)


@cases
def test_every_law_is_the_one_of_the_formulas_given_the_tokens_really_proposed(config: DraftConfig) -> None:
    block = Block(config)
    assert config.num_proposals == len(block.propose().ids_G)
    for seed in range(4):
        proposal = block.propose(1.3, seed)
        ids = proposal.ids_G.tolist()
        told = dense(proposal, config.vocab_size)
        for row in range(len(ids)):
            torch.testing.assert_close(told[row], block.law([block.anchor, *ids[:row]], 1.3), **CLOSE)
            assert told[row, ids[row]] > 0 and told[row, config.mask_token_id] == 0


@cases
def test_greedy_proposals_are_the_likeliest_one_after_the_other(config: DraftConfig) -> None:
    block = Block(config)
    proposal = block.propose()
    before = [block.anchor]
    for token in proposal.ids_G.tolist():
        assert token == int(block.law(before, 1.0).argmax())
        before.append(token)
    assert proposal.q is None


@pytest.mark.parametrize("name", ["vanilla", "rnn", "dspine"])
def test_proposals_follow_the_law_that_is_told(name: str) -> None:
    """The share of each number line that a token gets, by a sweep over the one number that decides the first row."""
    block = Block(CONFIGS[name])
    wanted = block.law([block.anchor], 1.3)
    probs = wanted.nonzero()[:, 0]
    ends = wanted.cumsum(0)
    for token in probs.tolist():
        low, high = float(ends[token] - wanted[token]), float(ends[token])
        if high - low > 1e-9:
            assert int(draw(wanted, torch.tensor(low + 1e-12, dtype=torch.float64))) == token
            assert int(draw(wanted, torch.tensor(high - 1e-12, dtype=torch.float64))) == token
    counts = torch.zeros(len(wanted))
    for seed in range(300):
        counts[block.propose(1.3, seed).ids_G[0]] += 1
    assert float((counts / 300 - wanted).abs().max()) < 0.1


@pytest.mark.parametrize("name", ["vanilla", "rnn", "dspine"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_broken_logits_still_give_a_law(name: str, value: float, temperature: float) -> None:
    """A draft that overflows proposes under a valid law all the same: the text stays exact."""
    block = Block(CONFIGS[name])
    block.logits[1:, 5:7] = value
    block.head = torch.full_like(block.head, value)
    proposal = block.propose(temperature)
    assert all(0 <= token < 32 for token in proposal.ids_G.tolist())
    if proposal.q is not None:
        law = dense(proposal, 32)
        torch.testing.assert_close(law.sum(-1), torch.ones(len(law), dtype=law.dtype))
        assert bool((law.gather(1, proposal.ids_G[:, None]) > 0).all())


@cases
def test_rounds_of_random_acceptance_over_a_cache_equal_one_pass_from_scratch(config: DraftConfig) -> None:
    """Every width, far past the windows of 5: rows and greedy proposals of each round."""
    chance = random.Random(len(config.layers) + config.num_proposals)
    model = random_model(config, seed=2)
    scratch, generator = FromScratch(model), torch.Generator().manual_seed(2)
    taps = torch.randn(40, 2, TAP_WIDTH, generator=generator, dtype=torch.float64)
    head, cache, count = model.own_head, model.new_cache(), 3
    assert head is not None
    model.inject(taps[:count], cache)
    first = 0 if config.predicts_from_anchor else 1
    for length in (config.block_size, *range(1 + first, config.block_size + 1)):
        anchor = chance.randrange(4, config.vocab_size)
        noise = model.noise([anchor], length, no_target)
        rows = model(noise, [cache], [anchor])
        hidden = model.head_rows(rows, [anchor])[0]
        if config.injection is None:
            wanted_rows = wanted = scratch.hidden(taps[:count], noise[0])
        else:
            wanted_rows, wanted = scratch.spine_rows(taps[:count], noise[0], anchor)
        torch.testing.assert_close(rows[0], wanted_rows, **CLOSE)
        torch.testing.assert_close(hidden, wanted, **CLOSE)
        proposal = model.propose(
            rows[0],
            anchor,
            hidden[first:] @ head.T,
            0.0,
            None,
            exclude_ids=(config.mask_token_id,),
            candidate_logits=lambda rows, ids: (rows @ head.T).gather(1, ids),
        )
        before = [anchor]
        for token in proposal.ids_G.tolist():
            if config.injection is None:
                law = scratch.spark_law(wanted[first:], before, 1.0)
            else:
                law = scratch.spine_law(wanted_rows[first:], wanted[first:], before, 1.0)
            assert token == int(law.argmax())
            before.append(token)
        more = chance.randint(1, length + 1 - first)
        model.inject(taps[count : count + more], cache)
        count += more
    assert cache.num_positions == count > 6


def test_a_draw_never_falls_on_what_has_no_weight() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    numbers = [0.0, 0.25, 0.5, 1.0 - 2**-53, 1.0]
    assert [int(draw(probs, torch.tensor(n, dtype=torch.float64))) for n in numbers] == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("kind", [*KINDS, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cut_stands_before_the_first_row_of_low_confidence(kind: str | None, temperature: float) -> None:
    config = spark_config(kind)
    block = Block(config, seed=3)
    whole = block.propose(temperature)
    ids = whole.ids_G.tolist()
    values = [block.scratch.confidence(block.predicting[j], [block.anchor, *ids][j]) for j in range(len(ids))]
    for least in [0.0, *(v + d for v in values for d in (-1e-9, 1e-9)), 1.0]:
        kept = next((j for j, value in enumerate(values) if value < least), len(ids))
        cut = block.propose(temperature, min_confidence=least)
        assert cut.ids_G.tolist() == ids[:kept]
        if whole.q is not None:
            assert cut.q is not None and torch.equal(dense(cut, 32), dense(whole, 32)[:kept])


def test_the_cut_does_not_depend_on_the_token_it_would_propose() -> None:
    """What stands at or behind a row is redrawn many times: whether the row is proposed never changes with it."""
    block = Block(spark_config("rnn"), seed=5)
    first = block.scratch.confidence(block.predicting[0], block.anchor)
    second = sorted(block.scratch.confidence(block.predicting[1], token) for token in range(32))
    least = min(first - 1e-6, second[16])
    cut_of: dict[tuple[int, ...], set[bool]] = {}
    for seed in range(200):
        whole, cut = block.propose(1.5, seed), block.propose(1.5, seed, min_confidence=least)
        ids, kept = whole.ids_G.tolist(), len(cut.ids_G)
        for row in range(min(kept + 1, len(ids))):
            cut_of.setdefault(tuple(ids[:row]), set()).add(row < kept)
    assert all(len(seen) == 1 for seen in cut_of.values())
    assert {True, False} == {value for seen in cut_of.values() for value in seen}


def test_a_fresh_markov_head_and_fresh_injections_change_nothing() -> None:
    torch.manual_seed(0)
    noise, taps = torch.randn(1, 4, WIDTH), torch.randn(5, 2, TAP_WIDTH)
    plain = spark_config(None, confidence=None)
    for config in (spark_config("rnn", confidence=None), spine_config(), replace(plain, layers=(CAUSAL, CAUSAL))):
        model = DraftModel(config).eval()
        backbone = DraftModel(replace(plain, layers=config.layers)).eval()
        backbone.load_state_dict({name: model.state_dict()[name] for name in backbone.state_dict()})
        caches = [model.new_cache(), backbone.new_cache()]
        model.inject(taps, caches[0])
        backbone.inject(taps, caches[1])
        rows = model(noise, caches[:1], [5])
        assert torch.equal(model.head_rows(rows, [5]), backbone(noise, caches[1:]))
        if model.markov_head is not None:
            logits = torch.randn(4, 32)
            assert model.propose(rows[0], 5, logits, 0.0, None).ids_G.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", ["dspine", "causal"])
def test_a_shorter_block_of_a_causal_draft_is_a_prefix(name: str) -> None:
    whole, short = Block(CONFIGS[name]), Block(CONFIGS[name], length=3)
    torch.testing.assert_close(short.hidden, whole.hidden[:3], **CLOSE)
    count = len(short.logits)
    assert short.propose(1.0, 4).ids_G.tolist()[:1] == whole.propose(1.0, 4).ids_G.tolist()[:1] and count < 4


def test_a_later_row_and_another_anchor_code_reach_where_they_should() -> None:
    """A row's message comes from the row before it only; the anchor's own row is never written to."""
    block = Block(spine_config())
    injection = block.model.injection
    assert injection is not None
    x = torch.randn(1, 4, WIDTH, dtype=torch.float64)
    code = torch.randn(1, 7, dtype=torch.float64)
    out = injection(x, code, 0)
    assert torch.equal(out[:, 0], x[:, 0])
    changed = x.clone()
    changed[:, 2] += 1.0
    reached = (injection(changed, code, 0) != out).any(-1)[0].tolist()
    assert reached == [False, False, True, True]
    reached = (injection(x, code + 1.0, 0) != out).any(-1)[0].tolist()
    assert reached == [False, True, False, False]


def test_packed_weights_give_the_same_rows() -> None:
    for config in (spark_config("gated"), spark_config("rnn"), spine_config()):
        model = random_model(config).float()
        torch.manual_seed(1)
        noise, taps = torch.randn(1, 4, WIDTH), torch.randn(5, 2, TAP_WIDTH)
        cache = model.new_cache()
        model.inject(taps, cache)
        logits = torch.randn(config.num_proposals, 32)
        results = []
        for _ in range(2):
            rows = model(noise, [cache], [5])
            law = model.propose(
                rows[0],
                5,
                logits,
                1.0,
                torch.Generator().manual_seed(0),
                min_confidence=1e-9 if config.confidence else 0.0,
                candidate_logits=lambda hidden, ids: hidden.sum(-1, keepdim=True) * ids,
            )
            results.append((model.head_rows(rows, [5]), dense(law, 32)))
            model.pack_()
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"injection": InjectionConfig(transfer_rank=1, message_size=1, top_k=1)}, "one of the two"),
        ({"markov": None}, "no Markov head to read"),
        ({"block_size": 0}, "block_size is 0"),
        ({"predicts_from_anchor": 1}, "sample_from_anchor is 1"),
    ],
)
def test_parts_that_contradict_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        spark_config(**change)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="sees only the rows before it"):
        spine_config(layers=(CAUSAL, FULL))
    with pytest.raises(Exception, match="top_k is 33"):
        spine_config(injection=InjectionConfig(transfer_rank=1, message_size=1, top_k=33))


def test_widths_and_families() -> None:
    assert [c.family for c in (spark_config(), spark_config(None, confidence=None), spine_config())] == [
        "dspark",
        "dspark",
        "dspine",
    ]
    assert (spark_config().num_proposals, spark_config().max_width) == (4, 5)
    assert (spine_config().num_proposals, spine_config().max_width) == (3, 4)
    assert spark_config(block_size=1).max_width == 2
    assert spark_config(None, confidence=ConfidenceConfig(reads_token=False)).family == "dspark"
