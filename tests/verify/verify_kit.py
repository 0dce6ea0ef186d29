"""A pair whose laws are tables, so that whole examinations take a moment; and seven ways to break it.

The engine is the real one. The target's next-token law depends on the last token only; the draft walks a table of its
own. A broken system gets another judgement of proposals, another draft, or other cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import blockdraft.accept as core
from blockdraft.accept import SamplingParams
from blockdraft.config import TargetFacts
from blockdraft.draft import BlockRows, CandidateLists, Proposal
from blockdraft.engine import Completion, Engine, Request
from blockdraft.engine.decide import Decide, Decision
from blockdraft.targets import Scored
from blockdraft.verify import Budget, EngineSystem, Report, examine_system
from blockdraft.verify.greedy import Judge
from blockdraft.verify.lossless import SampledBudget
from engine_kit import draft_config

VOCAB, WIDTH, EOS = 8, 5, 7
SAMPLING = SamplingParams(temperature=1.0, top_p=0.8)
PROMPTS = ([3, 5, 1], [2, 2], [6, 0, 4, 1], [5])
TINY = Budget(
    name="tiny",
    about="a moment",
    num_prompts=4,
    greedy_tokens=24,
    num_widths=2,
    num_seeds=3,
    seed_tokens=12,
    num_stops=4,
    sampled=SampledBudget(num_texts=28, text_tokens=24, num_contexts=1, num_per_context=120, rows_at_once=28),
    samplings=(("T 1, top-p 0.8", SAMPLING),),
)


class _Row:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_fed = 0
        self.was_freed = False

    @property
    def num_positions(self) -> int:
        return len(self.ids)


class TableTarget:
    """Logits are a table of the last token."""

    tap_layer_ids, tap_stream, dtype, device = (0, 1, 2), "prefix", torch.float64, torch.device("cpu")

    def __init__(self, logits_VV: Tensor) -> None:
        self.logits_VV = logits_VV
        self.facts = TargetFacts(
            model_type="llama",
            vocab_size=VOCAB,
            hidden_size=8,
            num_layers=3,
            max_length=4096,
            is_recurrent=False,
            eos_token_ids=(EOS,),
            pad_token_id=None,
        )

    def new_row(self) -> _Row:
        return _Row()

    def free(self, row: _Row) -> None:
        row.was_freed = True

    def forward(self, ids: Sequence[Tensor], rows: Sequence[_Row], *, num_logits: int | None = None) -> list[Scored]:
        scored = []
        for ids_T, row in zip(ids, rows, strict=True):
            row.ids += ids_T.tolist()
            row.num_fed = len(ids_T)
            first = 0 if num_logits is None else max(0, len(ids_T) - num_logits)
            scored.append(Scored(self.logits_VV[ids_T[first:]], torch.zeros(len(ids_T), 3, 8)))
        return scored

    def rollback(self, rows: Sequence[_Row], keep: Sequence[int]) -> None:
        for row, kept in zip(rows, keep, strict=True):
            del row.ids[len(row.ids) - row.num_fed + kept :]
            row.num_fed = kept

    def embed(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 8)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(*hidden.shape[:-1], VOCAB)


class TableDraft:
    """Proposals drawn one after another from a table, by inverting its distribution function with one number each.

    `told_VV` is the law that acceptance is told, the drawn one if not given.
    """

    def __init__(self, facts: TargetFacts, law_VV: Tensor, told_VV: Tensor | None = None) -> None:
        self.config = draft_config(facts, block_size=WIDTH, conv=None, selector=None)
        self.law_VV, self.told_VV = law_VV, law_VV if told_VV is None else told_VV
        self.max_length, self.own_embedding, self.own_head = 4096, None, None
        self.noise_before: dict[int, Tensor] = {}

    def new_cache(self) -> Any:
        return type("Count", (), {"num_positions": 0, "num_bytes": 0})()

    def inject_rows(self, taps: Sequence[Tensor], caches: Sequence[Any]) -> None:
        for taps_CNE, cache in zip(taps, caches, strict=True):
            cache.num_positions += len(taps_CNE)

    def noise(self, anchor_ids: Sequence[int], length: int, embed: object) -> Tensor:
        return torch.zeros(len(anchor_ids), length, 8)

    def __call__(self, noise_BLD: Tensor, caches: object) -> Tensor:
        return noise_BLD

    def propose_rows(self, blocks: Sequence[BlockRows], logits_KV: Tensor, **_: Any) -> list[Proposal]:
        return [self._proposal(block) for block in blocks]

    def _proposal(self, block: BlockRows) -> Proposal:
        ids: list[int] = []
        anchor, generator, count = block.anchor_id, block.generator, len(block.hidden_LD) - 1
        if block.temperature == 0.0:
            for _ in range(count):
                ids.append(int(self.law_VV[(anchor, *ids)[-1]].argmax()))
            return Proposal(torch.tensor(ids), None)
        assert generator is not None
        self.noise_before[id(generator)] = generator.get_state()
        noise = torch.rand(count, dtype=torch.float64, generator=generator).tolist()
        told = []
        for u in noise:
            last = (anchor, *ids)[-1]
            ids.append(min(int((self.law_VV[last].cumsum(0) <= u).sum()), VOCAB - 1))
            told.append(self.told_VV[last])
        return Proposal(
            torch.tensor(ids), CandidateLists(torch.arange(VOCAB).expand(len(ids), VOCAB), torch.stack(told))
        )


def pair(seed: int = 0, *, told_power: float = 1.0) -> Engine:
    """An honest engine; told_power != 1 tells acceptance another q than the drawn one."""
    generator = torch.Generator().manual_seed(seed)
    logits_VV = 1.2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    logits_VV[:, EOS] -= 1.0  # texts of some length
    other_VV = logits_VV + 0.8 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    law_VV = other_VV.softmax(-1)
    told_VV = law_VV**told_power
    target = TableTarget(logits_VV)
    draft = TableDraft(target.facts, law_VV, told_VV / told_VV.sum(-1, keepdim=True))
    return Engine(target, draft, max_rows=64)  # type: ignore[arg-type]


# ---- bent judgements -------------------------------------------------------------------------------------------------
Accept = Callable[[list[int], core.Sparse, Tensor, torch.Generator], tuple[int, int]]


def judging(accept: Accept, *, ignores_cuts: bool = False, shares_noise_of: TableDraft | None = None) -> Decide:
    """A decide made of an acceptance rule; greedy rows and plain steps are judged as they should be."""

    def decide(rows: Any, proposals: Any, logits: Any) -> list[Decision]:
        decisions = []
        for row, proposal, logits_TV in zip(rows, proposals, logits, strict=True):
            params, ids = row.request.sampling, [] if proposal is None else proposal.ids_G.tolist()
            context = {"history": row.ids, "num_prompt": 0, "proposals": ids, "banned": row.banned(len(ids) + 1)}
            if params.is_greedy:
                num_accepted, next_id = core.accept_greedy(ids, core.greedy_ids(logits_TV, params, **context))
            else:
                if ignores_cuts and proposal is not None:
                    params = SamplingParams(temperature=params.temperature)
                p_TV = core.target_distribution(logits_TV, params, **context)
                if proposal is None:
                    num_accepted, next_id = core.accept([], core.OneHot(), p_TV, row.accept_generator)
                else:
                    if shares_noise_of is not None:
                        row.accept_generator.set_state(shares_noise_of.noise_before[id(row.draft_generator)])
                    q = core.Sparse(proposal.q.ids_GM, proposal.q.probs_GM)
                    num_accepted, next_id = accept(ids, q, p_TV, row.accept_generator)
            decisions.append(Decision([*ids[:num_accepted], next_id], num_accepted))
        return decisions

    return decide


def argmax_verify(ids: list[int], q: core.Sparse, p_TV: Tensor, generator: torch.Generator) -> tuple[int, int]:
    return core.accept_greedy(ids, p_TV.argmax(-1))


def written_anew(*, subtracts: bool = True, bonus_row: int = -1) -> Accept:
    """The rule from its definition, with one place that may be bent."""

    def rule(ids: list[int], q: core.Sparse, p_TV: Tensor, generator: torch.Generator) -> tuple[int, int]:
        def draw(weights_V: Tensor) -> int:
            return int(torch.multinomial(weights_V / weights_V.sum(), 1, generator=generator))

        ids_G = torch.tensor(ids, dtype=torch.long)
        for index, q_of in enumerate(q.probs_of(ids_G).tolist()):
            u = float(torch.rand((), dtype=torch.float64, generator=generator))
            if u * q_of >= float(p_TV[index, ids[index]]):
                residual_V = (p_TV[index] - q.row(index, ids_G, VOCAB) * subtracts).clamp(min=0.0)
                return index, draw(residual_V)
        return len(ids), draw(p_TV[bonus_row])

    return rule


class OneTokenTooMany(EngineSystem):
    """Looks for a stop at the end of a step only, and so keeps the token that came after it."""

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        honest = super().run(requests)
        longer = super().run([replace(request, stop_ids=frozenset()) for request in requests])
        return [
            replace(one, token_ids=more.token_ids[: len(one.token_ids) + 1])
            if one.finish_reason == "stop" and not request.min_new_tokens
            else one
            for request, one, more in zip(requests, honest, longer, strict=True)
        ]


@dataclass(frozen=True)
class Broken:
    """A system, and what the report has to say of it."""

    make: Callable[[int], EngineSystem]
    check: str
    reason: str


def _shared(seed: int) -> EngineSystem:
    engine = pair(seed)
    return EngineSystem(engine, decide=judging(written_anew(), shares_noise_of=engine.draft))  # type: ignore[arg-type]


NAME = f"({TINY.samplings[0][0]})"
BROKEN = {
    "argmax verify at T=1": Broken(
        lambda seed: EngineSystem(pair(seed), decide=judging(argmax_verify)),
        f"surprise equals entropy {NAME}",
        "verified by argmax",
    ),
    "q not the sampled law": Broken(
        lambda seed: EngineSystem(pair(seed, told_power=0.5)), f"proposals follow q {NAME}", "not draws from the q"
    ),
    "shared noise": Broken(_shared, f"acceptance does not hang on the draw {NAME}", "share their noise"),
    "residual from p": Broken(
        lambda seed: EngineSystem(pair(seed), decide=judging(written_anew(subtracts=False))),
        f"replacements follow (p - q)+ {NAME}",
        "not from what p has above q",
    ),
    "top-p ignored on p": Broken(
        lambda seed: EngineSystem(pair(seed), decide=judging(core.accept, ignores_cuts=True)),
        f"tokens of free texts follow p {NAME}",
        "the cuts do not act on p",
    ),
    "one token too many at stop": Broken(
        lambda seed: OneTokenTooMany(pair(seed)), "stops and lengths", "goes on after a stop"
    ),
    "bonus from a stale row": Broken(
        lambda seed: EngineSystem(pair(seed), decide=judging(written_anew(bonus_row=-2))),
        f"bonuses follow p {NAME}",
        "a stale row",
    ),
}


def examined(system: EngineSystem, *, seed: int = 0, budget: Budget = TINY) -> Report:
    judge = Judge("the target's own pass over the whole text", system.logits, 1e-9)
    return examine_system(system, PROMPTS, judge=judge, budget=budget, itemsize=8, seed=seed, subject={"pair": "table"})
