"""Slot weights and losses against plain loops; the sampled head against the full one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from blockdraft.train.losses import (
    HeadRows,
    decay_weights,
    dpace_weights,
    prefix_sum,
    selector_loss,
    weighted_mean,
)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- slot weights ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("smoothing", [0.0, 0.5, 1.0])
def test_dpace_weights_equal_a_plain_loop(smoothing: float) -> None:
    nll_XG = randn(7, 5).abs() * 2
    num_labels = [5, 5, 4, 3, 2, 1, 5]
    weights_XG = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in num_labels])
    got = dpace_weights(nll_XG, weights_XG, smoothing)
    for x, count in enumerate(num_labels):
        q = [(1 - smoothing) * math.exp(-float(nll_XG[x, g])) + smoothing for g in range(5)]
        for j in range(5):
            expected = sum(math.prod(q[: m + 1]) for m in range(j, count)) if j < count else 0.0
            assert float(got[x, j]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_dpace_weights_end_at_a_slot_without_a_label_and_carry_no_gradient() -> None:
    nll = randn(1, 4).abs().requires_grad_()
    weights = dpace_weights(nll, torch.tensor([[1.0, 0.0, 1.0, 1.0]]), 0.5)
    assert not weights.requires_grad
    assert weights[0, 1:].tolist() == [0, 0, 0]
    assert weights[0, 0] > 0


def test_decay_weights() -> None:
    assert decay_weights(4, 3.0).tolist() == pytest.approx([math.exp(-k / 3) for k in range(4)])


def test_weighted_mean_of_nothing_is_zero() -> None:
    assert weighted_mean(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0])) == 2.5
    assert weighted_mean(torch.tensor([1.0, 3.0]), torch.zeros(2)) == 0


def test_prefix_sum_counts_the_leading_run() -> None:
    right = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    assert float(prefix_sum(right, torch.ones(3, 4))) == 2 + 0 + 4
    weights = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    assert float(prefix_sum(right, weights)) == 1 + 0 + 2


# ---- selector --------------------------------------------------------------------------------------------------------
def test_selector_loss_is_the_cross_entropy_among_candidates() -> None:
    unary, edge = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    candidates = torch.arange(4).expand(2, 3, 4) * 10
    labels = torch.tensor([[0, 10, 30], [20, 7, 0]])  # 7 is no candidate
    nll, hit = selector_loss(unary, edge, candidates, labels)
    assert hit.tolist() == [[1, 1, 1], [1, 0, 1]]
    for x in range(2):
        for g in range(3):
            expected = 0.0
            if hit[x, g]:
                expected = float(F.cross_entropy((unary + edge)[x, g], labels[x, g] // 10))
            assert float(nll[x, g]) == pytest.approx(expected, rel=1e-5)


def test_a_missed_label_gives_the_selector_no_gradient() -> None:
    unary, edge = randn(1, 2, 3).requires_grad_(), randn(1, 2, 3, seed=1).requires_grad_()
    candidates = torch.tensor([[[1, 2, 3], [1, 2, 3]]])
    nll, hit = selector_loss(unary, edge, candidates, torch.tensor([[2, 9]]))
    weighted_mean(nll, hit).backward()
    assert edge.grad[0, 0].abs().sum() > 0
    assert edge.grad[0, 1].abs().sum() == 0
    assert unary.grad[0, 1].abs().sum() == 0


# ---- head rows -------------------------------------------------------------------------------------------------------
def test_rows_hold_what_is_kept_and_a_sample_of_the_rest() -> None:
    kept = torch.tensor([3, 5, 8])
    rows = HeadRows.draw(kept, 20, 6, torch.Generator().manual_seed(0))
    assert rows.ids_V[:3].tolist() == [3, 5, 8]
    assert len(set(rows.ids_V.tolist())) == 9
    assert rows.log_weight_V.tolist() == pytest.approx([0, 0, 0] + [math.log(17 / 6)] * 6)
    for token in range(20):
        place = int(rows.index_of[token])
        assert (place == -1) == (token not in rows.ids_V.tolist())
        assert place == -1 or int(rows.ids_V[place]) == token


def test_the_partition_function_is_estimated_without_bias() -> None:
    logits, kept = randn(1, 1, 40) * 1.5, torch.tensor([0, 7, 9])
    full = float(logits.exp().sum())
    generator = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(4000):
        rows = HeadRows.draw(kept, 40, 8, generator)
        estimates.append(float((logits[0, 0, rows.ids_V] + rows.log_weight_V).exp().sum()))
    mean = torch.tensor(estimates, dtype=torch.float64).mean()
    error = torch.tensor(estimates, dtype=torch.float64).std() / len(estimates) ** 0.5
    assert abs(float(mean) - full) < 4 * float(error)
    uncorrected = math.log(37 / 8)
    assert abs(float(mean) - full) < 0.1 * uncorrected * full  # the correction is far larger than the error


def test_a_head_of_all_rows_is_the_full_cross_entropy() -> None:
    logits, labels = randn(3, 4, 30), torch.randint(30, (3, 4), generator=torch.Generator().manual_seed(2))
    rows = HeadRows.draw(torch.tensor([2, 4]), 30, 1000, torch.Generator().manual_seed(0))
    got = rows.cross_entropy(logits[..., rows.ids_V], rows.index_of[labels])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 4)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
