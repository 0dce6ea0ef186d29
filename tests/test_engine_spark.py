"""DSpark and DSpine in the engine: the text is the target's own, whatever they propose and wherever they are cut."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdraft.accept as core
import blockdraft.draft.injection as injection_module
import blockdraft.draft.markov as markov_module
from blockdraft.accept import Dense, SamplingParams, Sparse
from blockdraft.config import ConfidenceConfig, DraftConfig, InjectionConfig
from blockdraft.draft import CandidateLists, FullLaw
from blockdraft.engine import Engine, Request
from blockdraft.errors import RequestError
from engine_kit import hf_target, plain_ids, run_one, tiny_model
from exactness import Draft, largest_gap, plain_law, pooled_chi_square_ok, sequence_law_by_enumeration, step_law
from spark_kit import CAUSAL, KINDS, SLIDING, random_model, spark_config, spine_config
from test_draft_spark import Block
from test_engine_sampling import raw_table, table_model, target_distribution_table

NO_STOP = frozenset[int]()
PROMPT = [3, 7, 1, 12, 5]
DRAFTS = {
    **{kind: spark_config(kind) for kind in KINDS},
    "no heads": spark_config(None, confidence=None),
    "not from the anchor": spark_config("vanilla", predicts_from_anchor=False),
    "sliding": spark_config("gated", layers=(SLIDING, CAUSAL), block_size=7),
    "dspine": spine_config(block_size=6),
    "dspine, sliding": spine_config(layers=(SLIDING, SLIDING)),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def ar_text(model: Any) -> list[int]:
    return plain_ids(model, PROMPT, 18)


@pytest.mark.parametrize("config", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("own", [True, False], ids=["own", "borrowed"])
def test_greedy_text_is_the_targets_own(model: Any, ar_text: list[int], config: DraftConfig, own: bool) -> None:
    """Every width; a step of width w proposes w - 1 tokens, whichever rows of the draft predict them."""
    if not own:
        config = replace(config, hidden_size=32)
    draft = random_model(config, own=own)
    engine = Engine(hf_target(model, config.target_layer_ids), draft)
    for width in range(2, config.max_width + 1):
        done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=18, stop_ids=NO_STOP, width=width)
        assert list(done.token_ids) == ar_text
        assert done.speculation.width == width
        assert len(done.stats.drafted_histogram) == width and done.stats.drafted_histogram[-1] > 0
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=18, stop_ids=NO_STOP)
    assert done.speculation.width == config.max_width == config.num_proposals + 1
    with pytest.raises(RequestError, match=f"width is {config.max_width + 1}; the draft was trained for at most"):
        engine.check(Request(prompt_ids=PROMPT, max_new_tokens=18, width=config.max_width + 1))


@pytest.mark.parametrize("config", [DRAFTS["rnn"], DRAFTS["dspine"]], ids=["rnn", "dspine"])
def test_rows_of_a_batch_are_the_texts_of_each_alone(model: Any, config: DraftConfig) -> None:
    engine = Engine(hf_target(model, config.target_layer_ids), random_model(config))
    prompts = [[3, 7, 1], [5, 9, 2, 4, 4, 8, 11, 20, 21, 1, 2], [30, 2]]
    requests = [Request(prompt_ids=ids, max_new_tokens=9, stop_ids=NO_STOP) for ids in prompts]
    assert [list(done.token_ids) for done in engine.run(requests)] == [plain_ids(model, ids, 9) for ids in prompts]


@pytest.mark.parametrize(("name", "least"), [("rnn", 0.4), ("gated", 0.0), ("no heads", 0.0), ("dspine", 0.0)])
def test_sampled_rows_of_a_batch_are_those_of_each_seed_alone(model: Any, name: str, least: float) -> None:
    """Other temperatures, widths and lengths beside it change nothing: neither tokens nor what was proposed."""
    config = DRAFTS[name]
    engine = Engine(hf_target(model, config.target_layer_ids), random_model(config))
    requests = [
        Request(
            prompt_ids=[3 + i, 7, 1] * (1 + i % 3),
            max_new_tokens=10,
            stop_ids=NO_STOP,
            sampling=SamplingParams(temperature=(0.5, 1.0, 1.7)[i % 3], top_p=0.9),
            width=2 + i % (config.max_width - 1),
            min_confidence=least,
            seed=i,
        )
        for i in range(6)
    ]

    def seen(done: Any) -> tuple[Any, ...]:
        return done.token_ids, done.stats.drafted_histogram, done.stats.accepted_histogram

    together = [seen(done) for done in engine.run(requests)]
    assert together == [seen(engine.run([request])[0]) for request in requests]
    assert len({ids for ids, *_ in together}) == len(requests)


def test_a_cut_shortens_what_the_target_scores_and_not_the_text(model: Any, ar_text: list[int]) -> None:
    engine = Engine(hf_target(model, (0, 2)), random_model(spark_config("gated"), seed=2))
    drafted = []
    for least in (0.0, 0.5, 0.6, 1.0):
        done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=18, stop_ids=NO_STOP, min_confidence=least)
        assert list(done.token_ids) == ar_text
        drafted.append(done.stats.num_draft_tokens / done.stats.num_steps)
    assert drafted == sorted(drafted, reverse=True) and drafted[0] > drafted[2] > drafted[3] == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_confidence": 1.5}, "min_confidence is 1.5; it must be a number from 0 to 1"),
        ({"min_confidence": True}, "min_confidence is True"),
        ({"min_confidence": 0.5, "speculate": False}, "while speculation is off"),
    ],
)
def test_a_cut_that_means_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(prompt_ids=[1], max_new_tokens=4, **fields)


def test_a_cut_without_a_confidence_head_is_refused(model: Any) -> None:
    request = Request(prompt_ids=[1], max_new_tokens=4, min_confidence=0.5)
    for engine, message in (
        (Engine(hf_target(model, ())), "started without a draft"),
        (Engine(hf_target(model, (0, 2)), random_model(spine_config())), "has no confidence head"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.check(request)


# ---- the law of sampled text -----------------------------------------------------------------------------------------
SMALL: dict[str, Any] = {"vocab_size": 8, "mask_token_id": 0}


@pytest.mark.parametrize(
    ("config", "least"),
    [
        (spark_config("vanilla", **SMALL), 0.0),
        (spark_config("rnn", **SMALL), 0.2),
        (spark_config("gated", **SMALL), 0.4),
        (spark_config(None, confidence=None, **SMALL), 0.0),
        (spine_config(**SMALL), 0.0),
    ],
    ids=["vanilla", "rnn, cut", "gated, cut", "no Markov head", "dspine"],
)
def test_the_law_of_sampled_text_is_the_targets(config: DraftConfig, least: float) -> None:
    model = table_model()
    params = SamplingParams(temperature=0.9)
    engine = Engine(hf_target(model, config.target_layer_ids), random_model(config))
    requests = [
        Request(
            prompt_ids=[i % 8],
            max_new_tokens=8,
            stop_ids=NO_STOP,
            sampling=params,
            width=2 + i % (config.max_width - 1),
            min_confidence=least,
            seed=i,
        )
        for i in range(80)
    ]
    counts: list[Counter[int]] = [Counter() for _ in range(8)]
    accepted, cut = 0, 0
    for request, done in zip(requests, engine.run(requests), strict=True):
        accepted += done.stats.num_accepted_draft_tokens
        cut += done.stats.num_plain_steps
        for before, token in itertools.pairwise([request.prompt_ids[-1], *done.token_ids]):
            counts[before][token] += 1
    assert accepted > 25 and (cut > 30 or not least), (accepted, cut)
    laws = [dict(enumerate(row)) for row in target_distribution_table(raw_table(model), params).tolist()]
    assert pooled_chi_square_ok(list(zip(counts, laws, strict=True)), alpha=1e-5)
    shifted = laws[1:] + laws[:1]
    assert not pooled_chi_square_ok(list(zip(counts, shifted, strict=True)), alpha=1e-5)


class Enumerated:
    """Every proposal that a random draft can make after one anchor, with its probability, in float64."""

    def __init__(
        self, config: DraftConfig, monkeypatch: pytest.MonkeyPatch, *, least: float = 0.0, seed: int = 1
    ) -> None:
        self.block = Block(config, seed=seed)
        self.least, self.config = least, config
        self.numbers: list[float] = []
        for module in (markov_module, injection_module):
            monkeypatch.setattr(module, "uniform", lambda count, *_: torch.tensor(self.numbers, dtype=torch.float64))

    def paths(self) -> list[tuple[list[int], list[float], float]]:
        """(tokens, numbers that draw them, probability) of every whole block."""
        found: list[tuple[list[int], list[float], float]] = [([], [], 1.0)]
        for _ in range(self.config.num_proposals):
            longer = []
            for tokens, numbers, mass in found:
                law = self.block.law([self.block.anchor, *tokens], 1.0)
                order = self._order(len(tokens))
                ends = dict(zip(order, law[order].cumsum(0).tolist(), strict=True))
                longer += [
                    ([*tokens, t], [*numbers, ends[t] - float(law[t]) / 2], mass * float(law[t]))
                    for t in law.nonzero()[:, 0].tolist()
                ]
            found = longer
        return found

    def _order(self, row: int) -> list[int]:
        """How a row's ids stand on the line that a number falls on."""
        if self.config.injection is None:
            return list(range(self.config.vocab_size))
        logits = self.block.logits[row].clone()
        logits[self.config.mask_token_id] = -torch.inf
        return logits.topk(self.config.injection.top_k).indices.tolist()

    def drafts(self, p_VV: Tensor, cut: Any = None) -> list[Draft]:
        """What the package proposes for every path; `cut` replaces its own stopping by another."""
        result: list[Draft] = []
        for tokens, numbers, mass in self.paths():
            self.numbers = numbers
            proposal = self.block.propose(1.0, min_confidence=self.least)
            ids = proposal.ids_G.tolist()
            assert ids == tokens[: len(ids)]
            if cut is not None:
                kept = cut(proposal)
                proposal, ids = proposal.first(kept), ids[:kept]
            law = proposal.q
            assert isinstance(law, FullLaw | CandidateLists)
            q = Sparse(law.ids_GM, law.probs_GM) if isinstance(law, CandidateLists) else Dense(law.probs_GV)
            result.append((ids, q, p_VV[[self.block.anchor, *ids]], mass))
        return result

    def gap(self, p_VV: Tensor, cut: Any = None) -> float:
        """Error of the law of the tokens after the anchor: one drafted step, then plain ones."""
        length = self.config.num_proposals + 1
        drafted = step_law(core.accept, self.drafts(p_VV, cut))
        anchor = self.block.anchor

        def after(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
            if not prefix:
                return drafted
            return {(i,): p for i, p in enumerate(p_VV[prefix[-1]].tolist())}

        wanted = plain_law(lambda prefix: p_VV[prefix[-1] if prefix else anchor].tolist(), length)
        return largest_gap(sequence_law_by_enumeration(after, length), wanted)


TINY: dict[str, Any] = {"vocab_size": 5, "mask_token_id": 0, "block_size": 2}
NARROW = InjectionConfig(transfer_rank=7, message_size=5, top_k=3)


def target_table() -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return (1.5 * torch.randn(5, 5, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize(
    ("config", "cuts"),
    [
        (spark_config("vanilla", **TINY), False),
        (spark_config("rnn", **TINY), True),
        (spark_config("gated", **TINY, confidence=ConfidenceConfig(reads_token=False)), True),
        (spark_config(None, **TINY, confidence=None), False),
        (spark_config(None, **TINY), True),
        (spine_config(**{**TINY, "block_size": 3}, injection=NARROW), False),
    ],
    ids=["vanilla", "rnn, cut", "gated, cut", "no Markov head", "no Markov head, cut", "dspine"],
)
def test_one_step_keeps_the_law_exactly(monkeypatch: pytest.MonkeyPatch, config: DraftConfig, cuts: bool) -> None:
    enumerated = Enumerated(config, monkeypatch)
    if cuts:
        enumerated = cutting(config, monkeypatch)
        kept = {len(ids) for ids, *_ in enumerated.drafts(target_table())}
        assert kept == ({1, 2} if config.confidence.reads_token else {1})
    assert enumerated.gap(target_table()) < 1e-12


def cutting(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> Enumerated:
    """A draft, and a threshold that keeps its first row and stands in the middle of what its second row can have."""
    for seed in range(40):
        block = Block(config, seed=seed)
        first = block.scratch.confidence(block.predicting[0], block.anchor)
        second = sorted(block.scratch.confidence(block.predicting[1], t) for t in range(1, 5))
        least = (second[1] + second[2]) / 2 if config.confidence.reads_token else (first + second[0]) / 2
        if first > least > second[0]:
            return Enumerated(config, monkeypatch, least=least, seed=seed)
    raise AssertionError("no such draft")


def test_a_cut_that_looks_at_the_proposed_token_is_seen_to_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending before a token because that very token is unlikely is no stopping rule: its law is then another."""
    enumerated = Enumerated(spark_config("vanilla", **TINY), monkeypatch)

    def by_own_probability(proposal: Any) -> int:
        of = proposal.q.probs_GV.gather(1, proposal.ids_G[:, None])[:, 0]
        low = (of < 0.3).nonzero()
        return int(low[0]) if len(low) else len(of)

    assert enumerated.gap(target_table(), by_own_probability) > 1e-3
