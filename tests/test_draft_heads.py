"""Candidates, the walk and its law: fixed order, greedy choice, a q that is what was sampled from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

from blockdraft.config import DraftConfig, SelectorConfig
from blockdraft.draft import DraftModel
from blockdraft.draft.heads import top_candidates
from test_draft_cache import LAYOUTS, make_config


def make_model(
    vocab_size: int = 40,
    top_k: int = 4,
    *,
    is_v2: bool = True,
    multiplier: float = 1.0,
    cap: float | None = None,
) -> DraftModel:
    base = make_config(LAYOUTS["full"], is_v2=is_v2)
    config: DraftConfig = replace(
        base,
        vocab_size=vocab_size,
        mask_token_id=vocab_size - 1,
        selector=SelectorConfig(rank=6, top_k=top_k) if is_v2 else None,
        output_multiplier=multiplier,
        final_logit_softcapping=cap,
    )
    torch.manual_seed(3)
    model = DraftModel(config).double().requires_grad_(False)
    if model.candidate_selector is not None:
        for parameter in model.candidate_selector.parameters():
            parameter.normal_(0.0, 0.5)
    return model


def hidden_and_logits(model: DraftModel, length: int) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(length, 32, dtype=torch.float64)
    return hidden, 2.0 * torch.randn(length - 1, model.config.vocab_size, dtype=torch.float64)


def brute_top(row: list[float], count: int, exclude: set[int]) -> list[int]:
    order = sorted((i for i in range(len(row)) if i not in exclude), key=lambda i: (-row[i], i))
    return order[:count]


def scores_of(model: DraftModel, hidden_D: Tensor, logits_V: Tensor, previous: int, ids: list[int]) -> Tensor:
    """unary + A[previous] * e . B[candidate], straight from the formula."""
    selector = model.candidate_selector
    assert selector is not None
    e = selector.hidden_projection.weight @ hidden_D
    unary = model.config.output_multiplier * logits_V
    if model.config.final_logit_softcapping is not None:
        unary = model.config.final_logit_softcapping * torch.tanh(unary / model.config.final_logit_softcapping)
    left = selector.predecessor_codebook[previous]
    return torch.stack([unary[i] + (left * e * selector.successor_codebook[i]).sum() for i in ids])


@pytest.mark.parametrize("vocab_size", [5, 63, 64, 700, 5000, 5013])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("levels", [None, 3, 40])
def test_top_candidates_against_a_sort(vocab_size: int, count: int, levels: int | None) -> None:
    """Also with many equal logits, where the place of every id is decided by the id."""
    torch.manual_seed(vocab_size + count)
    logits = torch.randn(3, vocab_size)
    if levels is not None:
        logits = torch.randint(levels, (3, vocab_size)).float()
    for exclude in ((), (0,), (int(logits[0].argmax()), 2, vocab_size + 7, -1)):
        values, ids = top_candidates(logits, count, exclude)
        for row in range(3):
            want = brute_top(logits[row].tolist(), count, set(exclude))
            assert ids[row].tolist() == want
            assert values[row].tolist() == logits[row, want].tolist()


def test_top_candidates_with_nan() -> None:
    logits = torch.randn(2, 1000)
    logits[0, 100:] = torch.nan
    logits[1] = torch.nan
    _, ids = top_candidates(logits, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert int(ids[0, 0]) < 100


def test_top_candidates_with_forbidden_logits() -> None:
    logits = torch.full((1, 300), -torch.inf)
    logits[0, [7, 290]] = torch.tensor([1.0, 2.0])
    values, ids = top_candidates(logits, 4, (290,))
    assert ids[0, 0] == 7 and 290 not in ids[0].tolist() and len(set(ids[0].tolist())) == 4
    assert values[0, 1:].tolist() == [-torch.inf] * 3


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("exclude", [(), (39,), (3, 8, 11)])
def test_greedy_walk(cap: float | None, exclude: tuple[int, ...]) -> None:
    model = make_model(multiplier=0.8, cap=cap)
    for anchor in range(6):
        hidden, logits = hidden_and_logits(model, 8)
        proposal = model.propose(hidden, anchor, logits, 0.0, None, exclude_ids=exclude)
        previous, want = anchor, []
        for g in range(7):
            ids = brute_top(logits[g].tolist(), 4, set(exclude))
            best = scores_of(model, hidden[g + 1], logits[g], previous, ids).argmax()
            previous = ids[int(best)]
            want.append(previous)
        assert proposal.ids_G.tolist() == want and proposal.ids_G.dtype == torch.long
        assert proposal.q is None


def test_greedy_takes_the_first_of_equal_scores() -> None:
    model = make_model()
    assert model.candidate_selector is not None
    model.candidate_selector.successor_codebook.zero_()
    logits = torch.zeros(3, 40, dtype=torch.float64)
    logits[1, [9, 30]] = 1.0
    proposal = model.propose(torch.randn(4, 32, dtype=torch.float64), 2, logits, 0.0, None)
    assert proposal.ids_G.tolist() == [0, 9, 0]


def test_zero_successor_codebook_is_the_plain_argmax() -> None:
    second, first = make_model(), make_model(is_v2=False)
    assert second.candidate_selector is not None
    second.candidate_selector.successor_codebook.zero_()
    hidden, logits = hidden_and_logits(second, 8)
    ids = [m.propose(hidden, 1, logits, 0.0, None, exclude_ids=(39,)).ids_G.tolist() for m in (first, second)]
    assert ids[0] == ids[1] == logits[:, :39].argmax(-1).tolist()


def test_plain_head_is_one_hot_at_any_temperature() -> None:
    model = make_model(is_v2=False)
    hidden, logits = hidden_and_logits(model, 5)
    for temperature in (0.0, 0.7, 3.0):
        proposal = model.propose(hidden, 1, logits, temperature, torch.Generator().manual_seed(0))
        assert proposal.q is None and proposal.ids_G.tolist() == logits.argmax(-1).tolist()


def test_q_is_the_softmax_along_the_path() -> None:
    model = make_model(multiplier=1.3, cap=4.0)
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.05, 0.6, 1.0, 2.5):
        hidden, logits = hidden_and_logits(model, 8)
        proposal = model.propose(hidden, 5, logits, temperature, generator)
        q = proposal.q
        assert q is not None and q.probs_GM.dtype == torch.float32
        torch.testing.assert_close(q.probs_GM.double().sum(-1), torch.ones(7).double(), atol=1e-6, rtol=0)
        previous = 5
        for g in range(7):
            ids = q.ids_GM[g].tolist()
            want = (scores_of(model, hidden[g + 1], logits[g], previous, ids) / temperature).softmax(-1)
            torch.testing.assert_close(q.probs_GM[g].double(), want, atol=1e-6, rtol=1e-4)
            previous = int(proposal.ids_G[g])
            assert float(q.probs_GM[g][q.ids_GM[g] == previous]) > 0


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_law_of_the_sampled_walk(temperature: float) -> None:
    """Chi-square of 6000 walks against the enumerated law of whole paths: 3 candidates, 3 proposals."""
    model = make_model(vocab_size=7, top_k=3)
    torch.manual_seed(8)
    hidden, logits = hidden_and_logits(model, 4)
    logits = logits / 2
    lists = [brute_top(logits[g].tolist(), 3, set()) for g in range(3)]
    law: dict[tuple[int, ...], float] = {}
    for path in itertools.product(*lists):
        probability, previous = 1.0, 4
        for g, token in enumerate(path):
            scores = scores_of(model, hidden[g + 1], logits[g], previous, lists[g])
            probability *= float((scores / temperature).softmax(-1)[lists[g].index(token)])
            previous = token
        law[path] = probability
    assert abs(sum(law.values()) - 1.0) < 1e-12
    generator = torch.Generator().manual_seed(11)
    counts = dict.fromkeys(law, 0)
    num_walks = 6000
    for _ in range(num_walks):
        counts[tuple(model.propose(hidden, 4, logits, temperature, generator).ids_G.tolist())] += 1
    big = [path for path, p in law.items() if p * num_walks >= 5]
    rest = [path for path in law if path not in big]
    observed = [counts[p] for p in big] + ([sum(counts[p] for p in rest)] if rest else [])
    expected = [law[p] * num_walks for p in big] + ([sum(law[p] for p in rest) * num_walks] if rest else [])
    assert len(big) > 8
    assert float(stats.chisquare(observed, expected).pvalue) > 1e-3


def test_seed_decides_the_walk() -> None:
    model = make_model()
    hidden, logits = hidden_and_logits(model, 8)

    def ids(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        result: list[int] = model.propose(hidden, 1, logits, 1.5, generator).ids_G.tolist()
        return result

    assert ids(1) == ids(1)
    assert len({tuple(ids(seed)) for seed in range(20)}) > 3


def test_excluded_ids_are_never_proposed() -> None:
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    hidden, logits = hidden_and_logits(model, 8)
    logits[:, 39] = 50.0
    for temperature in (0.0, 1.0):
        proposal = model.propose(hidden, 1, logits, temperature, generator, exclude_ids=(39,))
        assert 39 not in proposal.ids_G.tolist()
        assert proposal.q is None or not bool((proposal.q.ids_GM == 39).any())


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    model = make_model()
    hidden, logits = hidden_and_logits(model, 8)
    q = model.propose(hidden, 1, logits, temperature, torch.Generator().manual_seed(0)).q
    assert q is not None
    assert bool(torch.isfinite(q.probs_GM).all())
    torch.testing.assert_close(q.probs_GM.sum(-1), torch.ones(7), atol=1e-5, rtol=0)


def test_broken_hidden_rows_still_give_a_law() -> None:
    """A draft that computes NaN proposes under a valid q all the same: the text stays exact."""
    model = make_model()
    hidden, logits = hidden_and_logits(model, 4)
    hidden[2] = torch.nan
    logits[1] = torch.nan
    for temperature in (0.0, 1.0):
        proposal = model.propose(hidden, 1, logits, temperature, torch.Generator().manual_seed(0))
        assert all(0 <= token < 40 for token in proposal.ids_G.tolist())
        if proposal.q is not None:
            torch.testing.assert_close(proposal.q.probs_GM.sum(-1), torch.ones(3), atol=1e-6, rtol=0)


def test_block_of_one_row_proposes_nothing() -> None:
    model = make_model()
    proposal = model.propose(torch.randn(1, 32, dtype=torch.float64), 1, torch.empty(0, 40), 1.0, None)
    assert proposal.ids_G.tolist() == [] and proposal.q is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_logits(dtype: torch.dtype) -> None:
    """Equal logits are common in bfloat16: the order stays that of (logit, id)."""
    model = make_model(vocab_size=3000, top_k=16, is_v2=True).to(dtype)
    hidden, logits = hidden_and_logits(model, 8)
    logits = logits.to(dtype)
    proposal = model.propose(hidden.to(dtype), 1, logits, 1.0, torch.Generator().manual_seed(0))
    assert proposal.q is not None
    for g in range(7):
        assert proposal.q.ids_GM[g].tolist() == brute_top(logits[g].tolist(), 16, set())
