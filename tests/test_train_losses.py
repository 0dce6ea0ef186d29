"""Slot weights and losses against plain loops; the sampled head against the full one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from blockdraft.train.losses import (
    decay_weights,
    dpace_weights,
    prefix_sum,
    selector_loss,
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
    (nll * hit).sum().backward()
    assert edge.grad[0, 0].abs().sum() > 0
    assert edge.grad[0, 1].abs().sum() == 0
    assert unary.grad[0, 1].abs().sum() == 0
