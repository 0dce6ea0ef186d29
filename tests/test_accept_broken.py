"""The checks of exactness catch every known way to get acceptance wrong, and pass the real one.

Each variant was seen in a public engine; most of them show a healthy or even higher acceptance, so only the
output's law can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import blockdraft.accept as core
from blockdraft.accept import SamplingParams, accept
from exactness import Accept, BigramPair, bigram_pair, exact_gap, pooled_chi_square_ok, sampled_tables

WARM = SamplingParams(temperature=1.8)
CUT = SamplingParams(temperature=1.0, top_p=0.6)


def honest(kind: str, params: SamplingParams = WARM) -> BigramPair:
    return bigram_pair(kind, params, vocab_size=5, seed=21)


def draft_told_at_temperature_one() -> BigramPair:
    pair = honest("sparse")
    hotter = pair.drawn_VV**WARM.temperature
    return replace(pair, told_VV=hotter / hotter.sum(-1, keepdim=True))


def argmax_draft_told_the_models_q() -> BigramPair:
    return replace(honest("dense"), drawn_VV=honest("one_hot").drawn_VV)


def target_without_its_cut() -> BigramPair:
    uncut = bigram_pair("dense", SamplingParams(temperature=1.0), vocab_size=5, seed=21)
    return replace(honest("dense", CUT), p_VV=uncut.p_VV)


def variant(*, ratio: Callable[[float], float] = lambda q: q, subtracts: bool = True, bonus_row: int = -1) -> Accept:
    """An acceptance written anew, with one place bent."""

    def bent(proposals: Any, q: Any, p_TV: Tensor, generator: Any) -> tuple[int, int]:
        ids_G = torch.as_tensor(proposals)
        for i, q_of in enumerate(q.probs_of(ids_G).tolist()):
            if core._uniform(generator) * ratio(q_of) < float(p_TV[i, ids_G[i]]):
                continue
            residual_V = p_TV[i] - q.row(i, ids_G, p_TV.shape[1]) * subtracts
            return i, core._draw(residual_V.clamp(min=0.0), generator)
        return len(ids_G), core._draw(p_TV[bonus_row], generator)

    return bent


def argmax_verification(proposals: Any, q: Any, p_TV: Tensor, generator: Any) -> tuple[int, int]:
    return core.accept_greedy(proposals, p_TV.argmax(-1))


@dataclass(frozen=True)
class Case:
    pair: Callable[[], BigramPair]
    accept: Accept = accept
    shares_noise: bool = False


HONEST = {
    "one_hot": Case(lambda: honest("one_hot")),
    "sparse": Case(lambda: honest("sparse")),
    "dense": Case(lambda: honest("dense")),
    "cut": Case(lambda: honest("dense", CUT)),
    "written anew, nothing bent": Case(lambda: honest("dense"), variant()),
}
BROKEN = {
    "drawn at T, told at 1": Case(draft_told_at_temperature_one),
    "argmax draft, told the model's q": Case(argmax_draft_told_the_models_q),
    "residual from p": Case(lambda: honest("dense"), variant(subtracts=False)),
    "top_p ignored on p": Case(target_without_its_cut),
    "argmax verification": Case(lambda: honest("dense"), argmax_verification),
    "lenient threshold": Case(lambda: honest("dense"), variant(ratio=lambda q: 0.7 * q)),
    "min(1, p) for a drawn draft": Case(lambda: honest("dense"), variant(ratio=lambda q: 1.0)),
    "bonus from the wrong row": Case(lambda: honest("dense"), variant(bonus_row=0)),
    "shared noise": Case(lambda: honest("dense"), accept, shares_noise=True),
}


def passes_exactly(case: Case) -> bool:
    return exact_gap(case.pair(), case.accept, num_proposals=1, length=3) < 1e-12


def passes_sampled(case: Case) -> bool:
    tables, _ = sampled_tables(
        case.pair(), case.accept, num_proposals=2, num_steps=4000, seed=77, shares_noise=case.shares_noise
    )
    return pooled_chi_square_ok(tables, alpha=1e-5)


@pytest.mark.parametrize("name", HONEST)
def test_honest_ones_pass_both_checks(name: str) -> None:
    assert passes_exactly(HONEST[name]) and passes_sampled(HONEST[name])


@pytest.mark.parametrize("name", BROKEN)
def test_broken_ones_fail_the_sampled_check(name: str) -> None:
    assert not passes_sampled(BROKEN[name])


@pytest.mark.parametrize("name", [name for name in BROKEN if not BROKEN[name].shares_noise])
def test_broken_ones_fail_the_exact_check(name: str) -> None:
    """Shared noise is not seen here: this check integrates over independent noise."""
    assert not passes_exactly(BROKEN[name])


def test_acceptance_itself_would_not_have_told() -> None:
    rates = {}
    for name in ("one_hot", "drawn at T, told at 1", "argmax draft, told the model's q"):
        case = {**HONEST, **BROKEN}[name]
        rates[name] = sampled_tables(case.pair(), case.accept, num_proposals=2, num_steps=2000, seed=5)[1]
    assert rates["argmax draft, told the model's q"] > 1.2 * rates["one_hot"]
    assert rates["drawn at T, told at 1"] > rates["one_hot"]
