"""Acceptance gives exactly the target's law: enumerated to 1e-12, sampled, and at the edges."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.accept import (
    Dense,
    OneHot,
    SamplingParams,
    Sparse,
    accept,
    accept_greedy,
    request_generators,
    target_distribution,
)
from exactness import (
    BigramPair,
    accept_law,
    bigram_pair,
    chi_square,
    chi_square_ok,
    draw,
    exact_gap,
    largest_gap,
    pooled_chi_square_ok,
    sampled_tables,
    sequence_law_by_enumeration,
    step_law,
)

KINDS = ["one_hot", "sparse", "dense", "disjoint", "equal"]
GRID = [
    SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    for temperature, top_p, top_k in itertools.product((0.6, 1.0, 1.3), (1.0, 0.9, 0.6), (None, 4))
]
P10 = torch.tensor([0.05, 0.15, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64)
Q10 = torch.tensor([0.5, 0.2, 0.15, 0.09, 0.05, 0.01], dtype=torch.float64)


def rows(size: int, count: int) -> st.SearchStrategy[torch.Tensor]:
    """Rows of probabilities with zeros and ties among them."""
    row = st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 7, 40]), min_size=size, max_size=size).filter(any)
    return st.lists(row, min_size=count, max_size=count).map(
        lambda weights: torch.tensor(weights, dtype=torch.float64) / torch.tensor(weights).sum(-1, keepdim=True)
    )


# ------------------------------------------------------------------------------------------------- enumerated


@settings(max_examples=40, deadline=None)
@given(p_TV=rows(6, 2), q_V=rows(6, 1), is_sparse=st.booleans())
def test_one_proposal_law_is_p(p_TV: torch.Tensor, q_V: torch.Tensor, is_sparse: bool) -> None:
    q = Sparse(q_V.nonzero()[:, 1][None], q_V[q_V > 0][None]) if is_sparse else Dense(q_V)
    drafts = [((y,), q, p_TV, float(q_V[0, y])) for y in range(6) if q_V[0, y] > 0]
    law = step_law(accept, drafts)
    first: Counter[tuple[int, ...]] = Counter()
    for emitted, mass in law.items():
        first[emitted[:1]] += mass  # type: ignore[assignment]
    assert largest_gap(first, {(i,): p for i, p in enumerate(p_TV[0].tolist())}) < 1e-12
    # a textbook statement of the same: acceptance is sum min(p, q), the bonus has the law of the last row
    accepted = {e: mass for e, mass in law.items() if len(e) == 2}
    assert sum(accepted.values()) == pytest.approx(float(torch.minimum(p_TV[0], q_V[0]).sum()), abs=1e-12)
    want = {(a, b): float(torch.minimum(p_TV[0], q_V[0])[a] * p_TV[1, b]) for a in range(6) for b in range(6)}
    assert largest_gap(accepted, want) < 1e-12


@settings(max_examples=6, deadline=None)
@given(p_VV=rows(3, 3), q_VV=rows(3, 3), form=st.sampled_from(["dense", "sparse"]))
def test_two_proposals_any_laws(p_VV: torch.Tensor, q_VV: torch.Tensor, form: str) -> None:
    pair = BigramPair(law_VV=p_VV, p_VV=p_VV, drawn_VV=q_VV, told_VV=q_VV, form=form)
    assert exact_gap(pair, accept, num_proposals=2, length=4) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_exact_on_the_grid(kind: str) -> None:
    for seed, params in enumerate(GRID):
        pair = bigram_pair(kind, params, vocab_size=5, seed=seed)
        drafts = pair.drafts(0, 1)
        law = step_law(accept, drafts)
        first: Counter[int] = Counter()
        for emitted, mass in law.items():
            first[emitted[0]] += mass  # type: ignore[assignment]
        assert largest_gap(first, dict(enumerate(pair.law_VV[0].tolist()))) < 1e-12, params


@pytest.mark.parametrize("kind", KINDS)
def test_exact_over_several_steps_of_width_four(kind: str) -> None:
    pair = bigram_pair(kind, SamplingParams(temperature=1.3, top_p=0.95), vocab_size=3, seed=4)
    assert exact_gap(pair, accept, num_proposals=3, length=5) < 1e-12


def test_exact_when_p_and_q_depend_on_the_whole_prefix() -> None:
    def table(salt: int, prefix: tuple[int, ...]) -> torch.Tensor:
        number = salt
        for token in prefix:
            number = number * 7 + token + 1
        generator = torch.Generator().manual_seed(number)
        return (2 * torch.randn(3, generator=generator, dtype=torch.float64)).softmax(-1)

    def law_of(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        drafts = []
        for proposals in itertools.product(range(3), repeat=2):
            paths = [prefix + proposals[:i] for i in range(3)]
            q_GV = torch.stack([table(2, path) for path in paths[:2]])
            mass = float(q_GV[0, proposals[0]] * q_GV[1, proposals[1]])
            drafts.append((proposals, Dense(q_GV), torch.stack([table(1, path) for path in paths]), mass))
        return step_law(accept, drafts)

    wanted = sequence_law_by_enumeration(lambda prefix: {(i,): float(p) for i, p in enumerate(table(1, prefix))}, 3)
    assert largest_gap(sequence_law_by_enumeration(law_of, 3), wanted) < 1e-12


def test_exact_under_penalties_and_bans() -> None:
    """Penalties make p depend on the proposals before it; the first two tokens may not be id 2."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.5, frequency_penalty=1.0, top_p=0.98)
    logits_VV = torch.randn(3, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q_V = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)

    def p_rows(prefix: tuple[int, ...], proposals: tuple[int, ...]) -> torch.Tensor:
        history = (1, *prefix)
        banned = [{2} if len(prefix) + i < 2 else () for i in range(len(proposals) + 1)]
        logits_TV = logits_VV[[history[-1], *proposals]]
        return target_distribution(logits_TV, params, history=history, num_prompt=1, proposals=proposals, banned=banned)

    def law_of(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        return step_law(
            accept,
            [
                (y, Dense(torch.stack((q_V, q_V))), p_rows(prefix, y), float(q_V[y[0]] * q_V[y[1]]))
                for y in itertools.product(range(3), repeat=2)
            ],
        )

    wanted = sequence_law_by_enumeration(
        lambda prefix: {(i,): p for i, p in enumerate(p_rows(prefix, ())[0].tolist()) if p > 0}, 3
    )
    assert largest_gap(sequence_law_by_enumeration(law_of, 3), wanted) < 1e-12


# ---------------------------------------------------------------------------------------------------- sampled


@pytest.mark.parametrize("num_proposals", [1, 2, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_on_the_grid(kind: str, num_proposals: int) -> None:
    num_steps = 150
    tables = []
    for seed, params in enumerate(GRID):
        pair = bigram_pair(kind, params, vocab_size=6, seed=seed)
        part, num_accepted = sampled_tables(
            pair, accept, num_proposals=num_proposals, num_steps=num_steps, seed=100 * seed + num_proposals
        )
        tables += part
        if kind == "equal":
            assert num_accepted == num_steps * num_proposals
        if kind == "disjoint" and params.top_k is not None:
            assert num_accepted == 0
    assert pooled_chi_square_ok(tables, alpha=1e-4)


@pytest.mark.parametrize("form", ["dense", "sparse", "bfloat16", "one_hot"])
def test_one_slot_over_20000_seeds(form: str) -> None:
    q_1V = Q10[None]
    if form == "bfloat16":
        q_1V = Q10.log().bfloat16()[None].float().softmax(-1)
    if form == "one_hot":
        q_1V = torch.eye(6)[:1]
    order = torch.tensor([[3, 1, 5, 0, 4, 2]])
    shapes: dict[str, OneHot | Dense | Sparse] = {
        "sparse": Sparse(order, q_1V.gather(1, order)),
        "one_hot": OneHot(),
    }
    q = shapes.get(form, Dense(q_1V))
    p_TV = torch.stack((P10, P10))
    counts: Counter[int] = Counter()
    for seed in range(20_000):
        draft_noise, accept_noise = request_generators(seed)
        y = draw(q_1V[0], draft_noise)
        num_accepted, next_id = accept([y], q, p_TV, accept_noise)
        counts[y if num_accepted else next_id] += 1
    statistic, degrees = chi_square(counts, dict(enumerate(P10.tolist())))
    assert degrees == 5 and statistic < 25.7, statistic


def test_three_sparse_slots_and_a_cut_target_never_emit_outside_the_support() -> None:
    pair = bigram_pair("sparse", SamplingParams(temperature=1.0, top_p=0.6, top_k=3), vocab_size=6, seed=11)
    assert ((pair.drawn_VV > 0) & (pair.p_VV == 0)).any(), "the draft must propose ids that the cuts removed"
    tables, _ = sampled_tables(pair, accept, num_proposals=3, num_steps=4000, seed=1)
    for counts, law in tables:
        assert all(law[token] > 0 for token in counts)
    assert pooled_chi_square_ok(tables, alpha=1e-4)


def test_plain_decoding_draws_from_p() -> None:
    generator = request_generators(5)[1]
    counts = Counter(accept([], OneHot(), P10[None].float(), generator) for _ in range(5000))
    assert chi_square_ok({i: n for (_, i), n in counts.items()}, dict(enumerate(P10.tolist())), alpha=1e-4)
    assert {num for num, _ in counts} == {0}


# ------------------------------------------------------------------------------------------------- the edges


@pytest.mark.parametrize("form", ["one_hot", "dense", "sparse"])
def test_greedy_is_prefix_match_without_randomness(form: str) -> None:
    q_GV = torch.full((3, 5), 0.2)
    shapes: dict[str, OneHot | Dense | Sparse] = {
        "one_hot": OneHot(),
        "dense": Dense(q_GV),
        "sparse": Sparse(torch.arange(5).repeat(3, 1), q_GV),
    }
    q = shapes[form]
    for proposals in itertools.product(range(5), repeat=3):
        greedy = [4, 0, 2, 1]
        got = accept(proposals, q, torch.eye(5)[greedy], None)
        assert got == accept_greedy(proposals, torch.tensor(greedy)), proposals
        matches = [a == b for a, b in zip(proposals, greedy, strict=False)] + [False]
        assert got == (matches.index(False), greedy[matches.index(False)])
    assert accept([], OneHot(), torch.eye(5)[[3]], None) == (0, 3) == accept_greedy([], [3])


def test_a_tiny_temperature_is_the_greedy_limit() -> None:
    logits_TV = torch.randn(4, 9, generator=torch.Generator().manual_seed(8))
    arguments = {"history": [0], "num_prompt": 1, "proposals": [0, 1, 2]}
    cold = target_distribution(logits_TV, SamplingParams(temperature=1e-5), **arguments)  # type: ignore[arg-type]
    assert torch.equal(cold, target_distribution(logits_TV, SamplingParams(), **arguments))  # type: ignore[arg-type]


def test_residual_without_mass_falls_back_to_p() -> None:
    """p below q everywhere can only be a rounding of p = q; the replacement is then a draw from p."""
    p_TV = torch.tensor([[0.5, 0.5 - 1e-6, 0.0]] * 2, dtype=torch.float64)
    q = Dense(torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64))
    law = accept_law(accept, [1], q, p_TV)
    rejected = {next_id: mass for (num, next_id), mass in law.items() if num == 0}
    assert sum(rejected.values()) == pytest.approx(2e-6, rel=1e-6) and set(rejected) == {0, 1}


def test_candidates_listed_twice_are_summed() -> None:
    twice = Sparse(torch.tensor([[2, 0, 2]]), torch.tensor([[0.3, 0.4, 0.3]], dtype=torch.float64))
    once = Sparse(torch.tensor([[0, 2]]), torch.tensor([[0.4, 0.6]], dtype=torch.float64))
    p_TV = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for y in (0, 2):
        assert largest_gap(accept_law(accept, [y], twice, p_TV), accept_law(accept, [y], once, p_TV)) < 1e-12


def test_the_ratio_is_strict_and_the_extreme_uniforms_are_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    p_TV = torch.tensor([[0.25, 0.75, 0.0], [0.0, 0.5, 0.5]], dtype=torch.float64)
    q = Dense(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
    for number, want in ((0.5, (0, 1)), (0.5 - 2**-53, (1, 1)), (0.0, (1, 1)), (1 - 2**-53, (0, 1))):
        monkeypatch.setattr("blockdraft.accept._uniform", lambda generator, number=number: number)
        assert accept([0], q, p_TV, None) == want
        assert accept([2], q, p_TV, None) == (0, 1), "p = 0 is rejected whatever u is"
    assert accept([1], q, p_TV, None) == (1, 2)


def test_lies_about_q_and_broken_rows_are_our_faults() -> None:
    p_TV = torch.full((2, 3), 1 / 3)
    generator = request_generators(0)[1]
    with pytest.raises(AssertionError, match="no draw from q"):
        accept([2], Sparse(torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])), p_TV, generator)
    with pytest.raises(AssertionError, match="NaN"):
        accept([2], OneHot(), p_TV * float("nan"), generator)
    with pytest.raises(AssertionError, match="rows of p"):
        accept([2, 1], OneHot(), p_TV, generator)
    with pytest.raises(AssertionError, match="acceptance generator"):
        accept([2], OneHot(), p_TV, None)


def test_a_seed_gives_the_same_tokens_whatever_was_drawn_before() -> None:
    pair = bigram_pair("sparse", SamplingParams(temperature=1.0), vocab_size=6, seed=0)
    first = sampled_tables(pair, accept, num_proposals=3, num_steps=50, seed=9)
    sampled_tables(pair, accept, num_proposals=2, num_steps=50, seed=10)
    torch.rand(100)
    assert sampled_tables(pair, accept, num_proposals=3, num_steps=50, seed=9) == first
