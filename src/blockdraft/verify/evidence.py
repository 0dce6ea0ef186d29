"""What the steps of sampled texts say about a sampler: one pass over a trace, sums and places that tests read.

Owns which question each token answers. Every number is compared with laws that the exam works out for itself: p from
the target's plain forward over the whole text (law.py), q as acceptance was told it. Conditional on what came before,
each place is uniform and each acceptance has a known chance, whatever the draft is like; so all contexts go into one
test.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.accept import SamplingParams
from blockdraft.verify.law import places, sampling_law
from blockdraft.verify.system import Step, Trace

__all__ = ["TILTS", "Draws", "Evidence"]

TILTS = (-3.2, -1.6, -0.8, -0.4, -0.2, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_RESIDUAL_ROOM = 20.0  # a residual of less than so many slacks is rounding; so rarely is anything drawn from it


_SURPRISE_OFF_LAW = 20.0  # nats, for a token that the law does not hold


@dataclass(slots=True)
class Draws:
    """Tokens that should be draws from laws known: their places, and those that the laws do not hold at all."""

    places: list[float] = field(default_factory=list)
    num_outside: int = 0
    log_odds: float = 0.0
    """Sum of ln(rival / law) over the tokens, where a rival law was given; a token that only one has counts 20."""

    @property
    def num(self) -> int:
        return len(self.places) + self.num_outside

    def add(self, law_V: Tensor, token: int, noise: float, rival_V: Tensor | None = None) -> None:
        self.take(places(law_V[None], [token], [noise]))
        if rival_V is not None:
            own, other = law_V[token] / law_V.sum(), rival_V[token] / rival_V.sum()
            self.log_odds += float((other.log() - own.log()).nan_to_num(0.0, 20.0, -20.0).clamp(-20.0, 20.0))

    def take(self, found: list[float | None]) -> None:
        inside = [at for at in found if at is not None]
        self.places.extend(inside)
        self.num_outside += len(found) - len(inside)


@dataclass(slots=True)
class Evidence:
    """Sums over traces of one way to sample. `slack`: how far rounding may move a probability."""

    sampling: SamplingParams
    slack: float
    noise: random.Random
    proposals: Draws = field(default_factory=Draws)
    first: Draws = field(default_factory=Draws)
    tokens: Draws = field(default_factory=Draws)
    replacements: Draws = field(default_factory=Draws)
    bonuses: Draws = field(default_factory=Draws)
    acceptances: list[tuple[float, bool, float]] = field(default_factory=list)
    """(chance to stand, whether it stood, middle of its place in q in q's own order) of the uncertain ones."""
    rates: dict[int, tuple[list[float], list[bool]]] = field(default_factory=dict)
    """Position in the block, from 1 -> sum min(p, q) there, and whether the proposal stood."""
    num_certain: int = 0
    num_certain_broken: int = 0
    num_most_likely: int = 0
    """Tokens of steps with proposals that are the target's most likely ones, of so many, and so many expected."""
    num_judged: int = 0
    mass_most_likely: float = 0.0
    num_outside_cuts: int = 0
    """Tokens that no rounding of the cuts lets in; bonuses apart."""
    surprise: float = 0.0
    """Sum of -ln p(x) - H over the tokens that steps committed."""
    surprise_variance: float = 0.0
    cumulants: list[float] = field(default_factory=lambda: [0.0] * len(TILTS))

    @torch.inference_mode()
    def add(self, trace: Trace, logits: Callable[[list[int]], Tensor]) -> list[float]:
        """Take in a trace; returns ln p of each of its tokens, -20 for those off the law."""
        num_prompt = len(trace.request.prompt_ids)
        ids = trace.ids
        raw_TV = logits(ids[:-1])[num_prompt - 1 :]
        p_TV = sampling_law(raw_TV, self.sampling)
        assert trace.first_id is not None
        self.first.add(p_TV[0], trace.first_id, self.noise.random())
        bonuses = set()
        for step in trace.steps:
            at = step.start - num_prompt
            self._judge(step, p_TV[at : at + step.num_accepted + 1])
            if step.proposals and step.num_accepted == len(step.proposals):
                bonuses.add(at + step.num_accepted)
        self._count(p_TV[1:], ids[num_prompt + 1 :])
        for at, token in enumerate(ids[num_prompt:]):
            if p_TV[at, token] == 0.0 and at not in bonuses:
                wide_1V = sampling_law(raw_TV[at : at + 1], self.sampling, slack=self.slack)
                self.num_outside_cuts += bool(wide_1V[0, token] == 0.0)
        return _logs(p_TV, ids[num_prompt:])

    @torch.inference_mode()
    def add_plain(self, ids: list[int], num_prompt: int, logits: Callable[[list[int]], Tensor]) -> list[float]:
        """Take in a text that was written without a draft; returns what `add` does."""
        p_TV = sampling_law(logits(ids[:-1])[num_prompt - 1 :], self.sampling)
        self._count(p_TV, ids[num_prompt:])
        return _logs(p_TV, ids[num_prompt:])

    def _count(self, p_TV: Tensor, tokens: list[int]) -> None:
        """Tokens that should follow p: their places, and surprise against entropy."""
        if not tokens:
            return
        self.tokens.take(places(p_TV, tokens, [self.noise.random() for _ in tokens]))
        row_N, id_N = p_TV.nonzero(as_tuple=True)
        p_N = p_TV[row_N, id_N]
        surprise_N = -p_N.log()

        def by_row(value_N: Tensor) -> Tensor:
            return torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, row_N, value_N)

        entropy_T = by_row(p_N * surprise_N)
        own_T = p_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        self.surprise += float(((-own_T.log()).clamp(max=_SURPRISE_OFF_LAW) - entropy_T).sum())
        self.surprise_variance += float((by_row(p_N * surprise_N.square()) - entropy_T.square()).sum())
        for index, tilt in enumerate(TILTS):
            mgf_T = by_row(p_N * (tilt * surprise_N).exp())
            self.cumulants[index] += float((mgf_T.log() - tilt * entropy_T).sum())

    def _judge(self, step: Step, p_TV: Tensor) -> None:
        """A step's proposals, its acceptances, and the token that ended it."""
        vocab_size = p_TV.shape[1]
        for index, token in enumerate(step.proposals):
            if step.told is None and index > step.num_accepted:
                break
            q_V = step.q_row(index, vocab_size)
            if step.told is not None:
                self.proposals.add(q_V, token, self.noise.random())
            if index > step.num_accepted:
                continue
            stands = index < step.num_accepted
            self._judge_acceptance(step, index, p_TV[index], q_V, stands)
            if not stands:
                residual_V = (p_TV[index] - q_V).clamp(min=0.0)
                if float(residual_V.sum()) > _RESIDUAL_ROOM * self.slack:
                    self.replacements.add(residual_V, step.next_id, self.noise.random(), p_TV[index])
        if not step.proposals:
            return
        top_T = p_TV.amax(-1)
        own_T = p_TV.gather(1, torch.tensor(step.committed)[:, None])[:, 0]
        self.num_judged += len(step.committed)
        self.num_most_likely += int((own_T == top_T).sum())
        self.mass_most_likely += float(top_T.sum())
        if step.num_accepted == len(step.proposals):
            self.bonuses.add(p_TV[-1], step.next_id, self.noise.random(), p_TV[-2])

    def _judge_acceptance(self, step: Step, index: int, p_V: Tensor, q_V: Tensor, stands: bool) -> None:
        token = step.proposals[index]
        rate = float(torch.minimum(p_V, q_V).sum())
        if self.slack < rate < 1.0 - self.slack:
            probs, hits = self.rates.setdefault(index + 1, ([], []))
            probs.append(rate)
            hits.append(stands)
        q_of = float(q_V[token])
        chance = min(1.0, float(p_V[token]) / q_of) if q_of > 0.0 else 0.0
        if not self.slack < chance < 1.0 - self.slack:
            self.num_certain += 1
            self.num_certain_broken += stands != (chance > 0.5)
            return
        middle = 0.5
        if step.told is not None:
            ids_M, probs_M = step.told[0][index], step.told[1][index].double()
            where = int((ids_M == token).nonzero()[0])
            middle = float((probs_M[:where].sum() + 0.5 * probs_M[where]) / probs_M.sum())
        self.acceptances.append((chance, stands, middle))


def _logs(p_TV: Tensor, tokens: list[int]) -> list[float]:
    own_T = p_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    logs: list[float] = own_T.log().clamp(min=-_SURPRISE_OFF_LAW).tolist()
    return logs
