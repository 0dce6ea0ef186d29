"""The chunked head against the same losses written plainly and differentiated by autograd, in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.train.head import HeadRows, LogitScale, Teacher, slot_losses

VOCAB, WIDTH, SLOTS = 40, 12, 11
SCALES = {"plain": LogitScale(1.0, None), "multiplier": LogitScale(0.3, None), "cap": LogitScale(1.7, 5.0)}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEAD, HIDDEN = randn(VOCAB, WIDTH, seed=1), randn(SLOTS, WIDTH, seed=2)
LABELS = torch.tensor([3, 5, 8, 3, 5, 8, 3, 3, 5, 8, 5])


def some_rows(num_random: int = 6) -> HeadRows:
    return HeadRows.draw(torch.tensor([3, 5, 8]), VOCAB, num_random, torch.Generator().manual_seed(0))


def scaled(raw: Tensor, scale: LogitScale) -> Tensor:
    logits = raw * scale.multiplier
    return logits if scale.cap is None else torch.tanh(logits / scale.cap) * scale.cap


def by_head(hidden: Tensor, rows: HeadRows, scale: LogitScale, *, chunk: int = 0, candidates: int = 4, teacher=None):
    return slot_losses(
        hidden,
        HEAD[rows.ids_V],
        rows,
        rows.index_of[LABELS],
        num_candidates=candidates,
        scale=scale,
        chunk=chunk,
        teacher=teacher,
    )


def naive(hidden: Tensor, rows: HeadRows, scale: LogitScale, teacher: Teacher | None):
    """(loss, cross-entropy, logits) of every slot over the weighted rows."""
    logits = scaled(hidden @ HEAD[rows.ids_V].T, scale)
    nll = F.cross_entropy(logits + rows.log_weight_V, rows.index_of[LABELS], reduction="none")
    if teacher is None:
        return nll, nll, logits
    of_teacher = scaled(teacher.hidden_QE @ HEAD[rows.ids_V].T, scale)
    p, q = (torch.softmax(x / teacher.temperature + rows.log_weight_V, -1) for x in (of_teacher, logits))
    return (p * (p.log() - q.log())).sum(-1) * teacher.temperature**2, nll, logits


@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("temperature", [None, 1.0, 2.5], ids=["ce", "kl", "kl-warm"])
@pytest.mark.parametrize("rows", [some_rows(), HeadRows.whole(VOCAB)], ids=["drawn", "whole"])
def test_losses_candidates_and_gradients_are_the_plain_ones(chunk, scale, temperature, rows) -> None:
    teacher = None if temperature is None else Teacher(randn(SLOTS, WIDTH, seed=3), temperature)
    upstream, of_values = randn(SLOTS, seed=4), randn(SLOTS, 4, seed=5)
    mine, plain = (HIDDEN.clone().requires_grad_() for _ in range(2))
    got = by_head(mine, rows, scale, chunk=chunk, teacher=teacher)
    loss, nll, logits = naive(plain, rows, scale, teacher)
    torch.testing.assert_close(got.loss_Q, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(got.nll_Q, nll, rtol=0, atol=1e-12)
    values, slots = logits.topk(4, -1)
    assert torch.equal(got.slots_QM, slots)
    torch.testing.assert_close(got.values_QM, values, rtol=0, atol=1e-12)
    (got.loss_Q * upstream).sum().add((got.values_QM * of_values).sum()).backward()
    (loss * upstream).sum().add((values * of_values).sum()).backward()
    torch.testing.assert_close(mine.grad, plain.grad, rtol=0, atol=1e-11)


def test_either_output_alone_gives_its_own_gradient() -> None:
    rows, scale = some_rows(), SCALES["cap"]
    for is_loss in (True, False):
        mine, plain = (HIDDEN.clone().requires_grad_() for _ in range(2))
        got = by_head(mine, rows, scale, chunk=3)
        (got.loss_Q if is_loss else got.values_QM.square()).sum().backward()
        loss, _, logits = naive(plain, rows, scale, None)
        (loss if is_loss else logits.topk(4, -1).values.square()).sum().backward()
        torch.testing.assert_close(mine.grad, plain.grad, rtol=0, atol=1e-11)


def test_only_what_is_differentiable_carries_a_gradient() -> None:
    teacher = Teacher(randn(SLOTS, WIDTH, seed=3), 1.0)
    got = by_head(HIDDEN.clone().requires_grad_(), some_rows(), SCALES["plain"], teacher=teacher)
    assert got.loss_Q.requires_grad and got.values_QM.requires_grad
    assert not got.nll_Q.requires_grad
    with torch.no_grad():
        again = by_head(HIDDEN, some_rows(), SCALES["plain"], teacher=teacher)
    assert torch.equal(again.loss_Q, got.loss_Q)


def test_a_teacher_that_is_the_draft_has_nothing_to_teach() -> None:
    mine = HIDDEN.clone().requires_grad_()
    got = by_head(mine, some_rows(), SCALES["cap"], teacher=Teacher(HIDDEN, 1.0))
    got.loss_Q.sum().backward()
    assert got.loss_Q.abs().max() < 1e-12
    assert mine.grad.abs().max() < 1e-12
    logits = HIDDEN @ HEAD[some_rows().ids_V].T
    assert torch.equal(got.agrees_Q, logits.argmax(-1) == some_rows().index_of[LABELS])


def test_nothing_of_slots_times_vocabulary_is_kept() -> None:
    """Bytes that autograd holds between the passes: a gradient row a slot and its candidates."""
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        got = by_head(HIDDEN.clone().requires_grad_(), HeadRows.whole(VOCAB), SCALES["plain"], chunk=2)
    got.loss_Q.sum().backward()
    assert max(held) <= max(SLOTS * WIDTH, SLOTS * 4)


def test_float32_is_close_and_a_sure_label_does_not_underflow() -> None:
    rows = HeadRows.whole(VOCAB)
    hidden = (HIDDEN * 60).float().requires_grad_()
    got = slot_losses(hidden, HEAD.float(), rows, LABELS, num_candidates=4, scale=SCALES["plain"], chunk=4)
    expected = F.cross_entropy((hidden.detach().double() @ HEAD.T), LABELS, reduction="none")
    assert expected.max() > 150  # exp(-150) is no float32
    torch.testing.assert_close(got.loss_Q.double(), expected, rtol=1e-5, atol=1e-4)
    got.loss_Q.sum().backward()
    assert torch.isfinite(hidden.grad).all()


# ---- rows ------------------------------------------------------------------------------------------------------------
def test_rows_hold_what_is_kept_and_a_sample_of_the_rest() -> None:
    rows = HeadRows.draw(torch.tensor([3, 5, 8]), 20, 6, torch.Generator().manual_seed(0))
    assert rows.ids_V[:3].tolist() == [3, 5, 8]
    assert len(set(rows.ids_V.tolist())) == 9
    assert rows.log_weight_V.tolist() == pytest.approx([0, 0, 0] + [math.log(17 / 6)] * 6)
    assert (rows.first_weighted, rows.is_whole) == (3, False)
    for token in range(20):
        place = int(rows.index_of[token])
        assert (place == -1) == (token not in rows.ids_V.tolist())
        assert place == -1 or int(rows.ids_V[place]) == token
    whole = HeadRows.whole(20)
    assert (whole.first_weighted, whole.is_whole) == (20, True)
    assert torch.equal(whole.index_of, torch.arange(20))


def test_the_partition_function_is_estimated_without_bias() -> None:
    logits, kept = randn(40) * 1.5, torch.tensor([0, 7, 9])
    full = float(logits.exp().sum())
    generator = torch.Generator().manual_seed(1)
    estimates = []
    for _ in range(4000):
        rows = HeadRows.draw(kept, 40, 8, generator)
        estimates.append(float((logits[rows.ids_V] + rows.log_weight_V).exp().sum()))
    mean = torch.tensor(estimates, dtype=torch.float64).mean()
    error = torch.tensor(estimates, dtype=torch.float64).std() / len(estimates) ** 0.5
    assert abs(float(mean) - full) < 4 * float(error)
    uncorrected = math.log(37 / 8)
    assert abs(float(mean) - full) < 0.1 * uncorrected * full  # the correction is far larger than the error


def test_a_draw_of_all_rows_is_the_whole_head() -> None:
    rows = HeadRows.draw(torch.tensor([3, 5, 8]), VOCAB, 1000, torch.Generator().manual_seed(0))
    assert rows.is_whole
    for one, other in zip(
        by_head(HIDDEN, rows, SCALES["plain"]).loss_Q, by_head(HIDDEN, HeadRows.whole(VOCAB), SCALES["plain"]).loss_Q,
        strict=True,
    ):  # fmt: skip
        assert float(one) == pytest.approx(float(other), abs=1e-12)
