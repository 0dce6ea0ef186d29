"""Checks of exactness that any sampler can be put to: enumerated sequence laws, chi-square, support.

A law is a dictionary from outcomes to probabilities; an outcome is a token id or a tuple of token ids.
Nothing here knows how acceptance works; only `step_law` calls it, through the `accept` it is given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats
from torch import Tensor

import blockdraft.accept as core

Law = dict[tuple[int, ...], float]
Draft = tuple[Sequence[int], Any, Tensor, float]
Accept = Callable[[Any, Any, Tensor, Any], tuple[int, int]]


# ------------------------------------------------------------------------------------------- enumerated laws


def sequence_law_by_enumeration(step_law: Callable[[tuple[int, ...]], Law], length: int) -> Law:
    """Law of the first `length` tokens when step_law(prefix) is the law of what a step appends to it."""
    done: Law = {}
    open_law: Law = {(): 1.0}
    while open_law:
        following: Law = {}
        for prefix, mass in open_law.items():
            for emitted, chance in step_law(prefix).items():
                sequence = (prefix + emitted)[:length]
                into = done if len(sequence) == length else following
                into[sequence] = into.get(sequence, 0.0) + mass * chance
        open_law = following
    return done


def plain_law(p_of: Callable[[tuple[int, ...]], Sequence[float]], length: int) -> Law:
    """Law of `length` tokens drawn one by one from p_of(prefix)."""
    law = sequence_law_by_enumeration(lambda prefix: {(i,): p for i, p in enumerate(p_of(prefix))}, length)
    return {sequence: mass for sequence, mass in law.items() if mass > 0.0}


def largest_gap(first: Mapping[Any, float], second: Mapping[Any, float]) -> float:
    """Largest difference of two laws over all outcomes."""
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in set(first) | set(second))


class _Script:
    """Stands for the uniform numbers of one call: scripted ones, then zeros; counts what was asked for."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = numbers
        self.num_asked = 0

    def __call__(self, generator: object) -> float:
        self.num_asked += 1
        return self.numbers[self.num_asked - 1] if self.num_asked <= len(self.numbers) else 0.0


def accept_law(accept: Accept, proposals: Sequence[int], q: Any, p_TV: Tensor) -> dict[tuple[int, int], float]:
    """Exact law of the (num_accepted, next_id) that `accept` gives, over its uniform numbers.

    Every uniform number is cut into the intervals on which the outcome is constant (found by bisection to
    1e-15), the rest of the numbers following as zeros. That finds all of them because an acceptance test has
    one threshold and an inverse-CDF draw is monotone.
    """

    def run(numbers: Sequence[float]) -> tuple[tuple[int, int], int]:
        script = _Script(numbers)
        original, core._uniform = core._uniform, script
        try:
            return accept(proposals, q, p_TV, None), script.num_asked
        finally:
            core._uniform = original

    law: dict[tuple[int, int], float] = {}

    def walk(prefix: tuple[float, ...], mass: float) -> None:
        outcome, num_asked = run(prefix)
        if num_asked <= len(prefix):
            law[outcome] = law.get(outcome, 0.0) + mass
            return
        for low, high in _constant_pieces(lambda u: run((*prefix, u))[0]):
            walk((*prefix, 0.5 * (low + high)), mass * (high - low))

    walk((), 1.0)
    return law


def _constant_pieces(outcome_of: Callable[[float], Hashable]) -> list[tuple[float, float]]:
    edges = [0.0]

    def cut(low: float, at_low: Hashable, high: float, at_high: Hashable) -> None:
        if at_low == at_high:
            return
        middle = 0.5 * (low + high)
        if high - low < 1e-15 or middle in (low, high):
            edges.append(high)
            return
        at_middle = outcome_of(middle)
        cut(low, at_low, middle, at_middle)
        cut(middle, at_middle, high, at_high)

    last = math.nextafter(1.0, 0.0)
    cut(0.0, outcome_of(0.0), last, outcome_of(last))
    edges.append(1.0)
    return list(itertools.pairwise(edges))


def step_law(accept: Accept, drafts: Sequence[Draft]) -> Law:
    """Law of what one step emits; `drafts` lists (proposals, q told, p_TV, probability of being drafted)."""
    law: Law = {}
    for proposals, q, p_TV, mass in drafts:
        for (num_accepted, next_id), chance in accept_law(accept, proposals, q, p_TV).items():
            emitted = (*proposals[:num_accepted], next_id)
            law[emitted] = law.get(emitted, 0.0) + mass * chance
    return law


# --------------------------------------------------------------------------------------------------- samples


def chi_square(counts: Mapping[Any, int], law: Mapping[Any, float], *, min_expected: float = 5.0) -> tuple[float, int]:
    """(statistic, degrees of freedom), infinite off the support; outcomes expected rarely are pooled."""
    total = sum(counts.values())
    if any(count > 0 and law.get(key, 0.0) <= 0.0 for key, count in counts.items()):
        return math.inf, 0
    cells: list[tuple[float, float]] = []
    rest_observed, rest_expected = 0.0, 0.0
    for key, mass in sorted(law.items(), key=lambda item: item[1]):
        if mass * total >= min_expected:
            cells.append((counts.get(key, 0), mass * total))
        else:
            rest_observed += counts.get(key, 0)
            rest_expected += mass * total
    if rest_expected >= min_expected or not cells:
        cells.append((rest_observed, rest_expected))
    elif rest_expected > 0.0:
        observed, expected = cells[0]
        cells[0] = (observed + rest_observed, expected + rest_expected)
    statistic = sum((observed - expected) ** 2 / expected for observed, expected in cells if expected > 0.0)
    return statistic, len(cells) - 1


def chi_square_ok(counts: Mapping[Any, int], law: Mapping[Any, float], *, alpha: float) -> bool:
    """True unless the counts are off the law's support or refute the law at level alpha."""
    return pooled_chi_square_ok([(counts, law)], alpha=alpha)


def pooled_chi_square_ok(tables: Sequence[tuple[Mapping[Any, int], Mapping[Any, float]]], *, alpha: float) -> bool:
    """One test over independent tables: statistics and degrees of freedom are summed."""
    parts = [chi_square(counts, law) for counts, law in tables if sum(counts.values()) > 0]
    statistic, degrees = sum(part[0] for part in parts), sum(part[1] for part in parts)
    if math.isinf(statistic):
        return False
    return degrees == 0 or bool(stats.chi2.sf(statistic, degrees) > alpha)


def draw(weights_V: Tensor, generator: torch.Generator) -> int:
    """One id of a distribution: the drafting side of the tests, by inverse CDF."""
    ends = weights_V.double().cumsum(0)
    mark = torch.rand((1,), dtype=torch.float64, generator=generator) * ends[-1]
    return int(torch.searchsorted(ends, mark, right=True).clamp_(max=len(ends) - 1))


# ------------------------------------------------------------------------------- a pair small enough to count


@dataclass(frozen=True, eq=False)
class BigramPair:
    """Target and draft whose next-token laws depend on the last token only; row = last token, all float64.

    An honest pair has law_VV == p_VV and drawn_VV == told_VV; a broken one lies in one of them.
    """

    law_VV: Tensor
    """The law that the output must have."""
    p_VV: Tensor
    """What acceptance is given as p."""
    drawn_VV: Tensor
    """What a proposal is drawn from."""
    told_VV: Tensor
    """What acceptance is told that it was drawn from."""
    form: str
    """one_hot (told_VV is not shown), sparse or dense."""

    def q(self, context: Sequence[int]) -> core.OneHot | core.Dense | core.Sparse:
        """q of the proposals that were drawn after each token of `context`."""
        if self.form == "one_hot":
            return core.OneHot()
        told_GV = self.told_VV[list(context)]
        if self.form == "dense":
            return core.Dense(told_GV)
        num_candidates = max(1, int((self.told_VV > 0).sum(-1).max()))
        ids_GM = told_GV.topk(num_candidates, dim=-1).indices.flip(-1)
        return core.Sparse(ids_GM, told_GV.gather(1, ids_GM))

    def drafts(self, anchor: int, num_proposals: int) -> list[Draft]:
        """Every block that can be drafted after `anchor`, as `step_law` wants them."""
        result: list[Draft] = []
        for proposals in itertools.product(range(len(self.law_VV)), repeat=num_proposals):
            context = (anchor, *proposals)
            mass = math.prod(float(self.drawn_VV[a, b]) for a, b in itertools.pairwise(context))
            if mass > 0.0:
                result.append((proposals, self.q(context[:-1]), self.p_VV[list(context)], mass))
        return result


def exact_gap(pair: BigramPair, accept: Accept, *, num_proposals: int, length: int) -> float:
    """Largest error of the law of the first `length` tokens after token 0, steps enumerated."""
    by_anchor: dict[int, Law] = {}

    def law_of(prefix: tuple[int, ...]) -> Law:
        anchor = prefix[-1] if prefix else 0
        if anchor not in by_anchor:
            by_anchor[anchor] = step_law(accept, pair.drafts(anchor, num_proposals))
        return by_anchor[anchor]

    wanted = plain_law(lambda prefix: pair.law_VV[prefix[-1] if prefix else 0].tolist(), length)
    return largest_gap(sequence_law_by_enumeration(law_of, length), wanted)


Tables = list[tuple[dict[int, int], dict[int, float]]]


def sampled_tables(
    pair: BigramPair,
    accept: Accept,
    *,
    num_proposals: int,
    num_steps: int,
    seed: int,
    shares_noise: bool = False,
) -> tuple[Tables, int]:
    """(for every last token: counts of what was emitted after it, and the law of that; accepted proposals).

    Steps start at token 0, 1, ... in turn. `shares_noise` gives draft and acceptance the same random numbers.
    """
    size = len(pair.law_VV)
    counts: list[dict[int, int]] = [{} for _ in range(size)]
    draft_noise, accept_noise = core.request_generators(seed)
    if shares_noise:
        accept_noise.set_state(draft_noise.get_state())
    total = 0
    for step in range(num_steps):
        context = [step % size]
        for _ in range(num_proposals):
            context.append(draw(pair.drawn_VV[context[-1]], draft_noise))
        num_accepted, next_id = accept(context[1:], pair.q(context[:-1]), pair.p_VV[context], accept_noise)
        total += num_accepted
        emitted = [context[0], *context[1 : num_accepted + 1], next_id]
        for last, token in itertools.pairwise(emitted):
            counts[last][token] = counts[last].get(token, 0) + 1
        if shares_noise:
            draft_noise.manual_seed(seed + step + 1)
            accept_noise.manual_seed(seed + step + 1)
    laws = [dict(enumerate(row)) for row in pair.law_VV.tolist()]
    return list(zip(counts, laws, strict=True)), total


def bigram_pair(kind: str, params: core.SamplingParams, *, vocab_size: int, seed: int) -> BigramPair:
    """An honest random pair: one_hot (argmax draft), sparse, dense, disjoint (draft avoids p) or equal."""
    generator = torch.Generator().manual_seed(seed)
    logits_VV = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    history = {"history": [0], "num_prompt": 1, "proposals": [0] * (vocab_size - 1)}
    p_VV = core.target_distribution(logits_VV, params, **history)  # type: ignore[arg-type]
    draft_VV = (logits_VV + torch.randn(vocab_size, vocab_size, generator=generator)) / (params.temperature or 1.0)
    form = kind if kind in ("one_hot", "sparse") else "dense"
    if kind == "one_hot":
        q_VV = torch.nn.functional.one_hot(draft_VV.argmax(-1), vocab_size).double()
    elif kind == "sparse":
        last_V1 = draft_VV.topk(min(3, vocab_size), dim=-1).values[:, -1:]
        q_VV = draft_VV.masked_fill(draft_VV < last_V1, -math.inf).softmax(-1)
    elif kind == "disjoint":
        q_VV = torch.nn.functional.one_hot(p_VV.argmin(-1), vocab_size).double()
    else:
        q_VV = p_VV if kind == "equal" else draft_VV.softmax(-1)
    return BigramPair(law_VV=p_VV, p_VV=p_VV, drawn_VV=q_VV, told_VV=q_VV, form=form)
