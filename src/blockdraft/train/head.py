"""The target's output head over the slots of a step, without anything of size slots x vocabulary that stays.

Owns the head's rows of a step, the losses of a slot and their gradient. The head is frozen, so the gradient of a slot's
loss with respect to its hidden row is known as soon as the loss is: it is made chunk by chunk in the forward pass, one
row of width D a slot, and the backward pass only scales it. Knows no blocks, no files.

Letters: V vocabulary (or the rows of it that a step uses), E target width, D draft width (= E), Q slots, M candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FrozenHead", "HeadRows", "LogitScale", "SlotLosses", "Teacher", "slot_losses"]


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding rows, final norm weight and output rows. Embedding and output may be one tensor (tied).

    `final_norm_eps` is known where the final norm is an RMS norm whose weight was found; a teacher needs it.
    """

    embed_VE: Tensor
    final_norm_E: Tensor
    head_VE: Tensor
    final_norm_eps: float | None = None


@dataclass(frozen=True)
class HeadRows:
    """Rows of the output head a step's softmax runs over: all kept ids, and a fresh random sample of the rest.

    ids_V          the rows, kept ones first
    log_weight_V   corrects for the sampling, so that the partition function is estimated without bias:
                   log(rest / drawn) on drawn rows, 0 on kept ones
    index_of       [vocabulary] place of an id in ids_V, -1 where it has none
    """

    ids_V: Tensor
    log_weight_V: Tensor
    index_of: Tensor

    @classmethod
    def draw(cls, kept: Tensor, vocab_size: int, num_random: int, generator: torch.Generator) -> HeadRows:
        """Rows `kept` and `num_random` others (all of them where there are fewer), without replacement."""
        is_rest = torch.ones(vocab_size, dtype=torch.bool)
        is_rest[kept] = False
        rest = is_rest.nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest), generator=generator)[:num_random]]
        ids = torch.cat([kept, drawn])
        log_weight = torch.zeros(len(ids))
        if len(drawn):
            log_weight[len(kept) :] = math.log(len(rest) / len(drawn))
        index_of = torch.full((vocab_size,), -1)
        index_of[ids] = torch.arange(len(ids))
        return cls(ids, log_weight, index_of)

    @classmethod
    def whole(cls, vocab_size: int) -> HeadRows:
        """Every row in its place."""
        return cls(torch.arange(vocab_size), torch.zeros(vocab_size), torch.arange(vocab_size))

    @property
    def is_whole(self) -> bool:
        """Whether no row is left out."""
        return len(self.ids_V) == len(self.index_of)

    @property
    def is_in_order(self) -> bool:
        """Whether these are all rows, each in its place."""
        return self.is_whole and torch.equal(self.ids_V, torch.arange(len(self.ids_V), device=self.ids_V.device))

    @property
    def first_weighted(self) -> int:
        """Where the rows begin whose weight is not 1; the number of rows where there is none."""
        weighted = self.log_weight_V.nonzero()
        return int(weighted[0]) if len(weighted) else len(self.log_weight_V)

    def to(self, device: torch.device) -> HeadRows:
        return HeadRows(self.ids_V.to(device), self.log_weight_V.to(device), self.index_of.to(device))


@dataclass(frozen=True, slots=True)
class LogitScale:
    """What becomes of a raw head output: the output multiplier, then the soft cap (None: none)."""

    multiplier: float
    cap: float | None

    def logits_(self, raw: Tensor) -> Tensor:
        """The logits, in the memory of `raw`."""
        if self.multiplier != 1.0:
            raw.mul_(self.multiplier)
        return raw if self.cap is None else raw.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Derivative of the logits with respect to the raw outputs."""
        if self.cap is None:
            return self.multiplier
        return (1 - (logits / self.cap).square()) * self.multiplier


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's own final rows before each label, behind its final norm, and the temperature of the comparison."""

    hidden_QE: Tensor
    temperature: float


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """What the head says of every slot.

    loss_Q      what is minimised: cross-entropy of the label, or the teacher's divergence times temperature squared;
                differentiable
    values_QM   largest logits, falling; differentiable
    slots_QM    their places among the rows
    nll_Q       cross-entropy of the label at temperature 1
    agrees_Q    whether the teacher's first choice is the label; None without a teacher
    """

    loss_Q: Tensor
    values_QM: Tensor
    slots_QM: Tensor
    nll_Q: Tensor
    agrees_Q: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    rows_VE: Tensor
    log_weight_V: Tensor
    first_weighted: int
    labels_Q: Tensor
    num_candidates: int
    scale: LogitScale
    chunk: int
    teacher: Teacher | None


def slot_losses(
    hidden_QD: Tensor,
    rows_VE: Tensor,
    rows: HeadRows,
    labels_Q: Tensor,
    *,
    num_candidates: int,
    scale: LogitScale,
    chunk: int,
    teacher: Teacher | None = None,
) -> SlotLosses:
    """Losses and candidates of slots whose labels stand at `labels_Q` among the rows, `chunk` slots at a time.

    A label without a row (-1) gives the numbers of row 0: mask it. Matrix products run in the rows' precision,
    everything else in float32 at least.
    """
    task = _Task(
        rows_VE=rows_VE,
        log_weight_V=rows.log_weight_V,
        first_weighted=rows.first_weighted,
        labels_Q=labels_Q.clamp_min(0),
        num_candidates=min(num_candidates, len(rows_VE)),
        scale=scale,
        chunk=chunk or len(labels_Q),
        teacher=teacher,
    )
    loss_Q, values_QM, slots_QM, nll_Q, agrees_Q = _Head.apply(hidden_QD, task)
    return SlotLosses(loss_Q, values_QM, slots_QM, nll_Q, None if teacher is None else agrees_Q)


class _Head(torch.autograd.Function):
    """Keeps one gradient row a slot, and of the candidates their places and slopes."""

    @staticmethod
    def forward(ctx: Any, hidden_QD: Tensor, task: _Task) -> tuple[Tensor, ...]:
        needs_grad = bool(ctx.needs_input_grad[0])
        with torch.autocast(hidden_QD.device.type, enabled=False):
            parts = list(_chunks(hidden_QD, task, needs_grad))
        loss_Q, values_QM, slots_QM, nll_Q, agrees_Q, grad_QD = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.task, ctx.dtype = task, hidden_QD.dtype
        ctx.save_for_backward(grad_QD, values_QM, slots_QM)
        ctx.mark_non_differentiable(slots_QM, nll_Q, agrees_Q)
        ctx.set_materialize_grads(False)
        return loss_Q, values_QM, slots_QM, nll_Q, agrees_Q

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        of_loss_Q, of_values_QM = grads[:2]
        grad_QD, values_QM, slots_QM = ctx.saved_tensors
        total = None if of_loss_Q is None else grad_QD * of_loss_Q[:, None]
        if of_values_QM is not None:
            rows_VE = ctx.task.rows_VE
            weights_QM = (of_values_QM * ctx.task.scale.slope(values_QM)).to(rows_VE.dtype)
            unary = F.embedding_bag(slots_QM, rows_VE, per_sample_weights=weights_QM, mode="sum")
            total = unary if total is None else total + unary
        return None if total is None else total.to(ctx.dtype), None


def _chunks(hidden_QD: Tensor, task: _Task, needs_grad: bool) -> Iterator[tuple[Tensor, ...]]:
    """(loss, values, slots, nll, agrees, gradient) of one chunk of slots after another."""
    for start in range(0, len(hidden_QD), task.chunk):
        span = slice(start, start + task.chunk)
        hidden, labels = hidden_QD[span], task.labels_Q[span]
        logits = _logits(hidden, task)
        values, slots = _largest(logits, task.num_candidates)
        if task.teacher is None:
            nll, grad = _cross_entropy(logits, labels, slots[:, :1], task, needs_grad)
            loss, agrees = nll, labels < 0
        else:
            teacher = _logits(task.teacher.hidden_QE[span], task)
            nll, _ = _cross_entropy(logits.clone(), labels, slots[:, :1], task, needs_grad=False)
            agrees = teacher.argmax(-1) == labels
            loss, grad = _divergence(logits, teacher, task, task.teacher.temperature, needs_grad)
        yield loss, values, slots, nll.clone(), agrees, grad


def _logits(hidden: Tensor, task: _Task) -> Tensor:
    raw = hidden.to(task.rows_VE.dtype) @ task.rows_VE.T
    return task.scale.logits_(raw if raw.dtype == torch.float64 else raw.float())


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits, falling, and their places."""
    return logits.max(-1, keepdim=True) if count == 1 else logits.topk(count, -1)


def _cross_entropy(
    logits: Tensor, labels: Tensor, first: Tensor, task: _Task, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """(nll, gradient of it); `logits` is overwritten. `first` is the place of each row's largest logit."""
    slope = task.scale.slope(logits)
    logits[:, task.first_weighted :] += task.log_weight_V[task.first_weighted :]
    probs = torch.softmax(logits, -1)
    # What the softmax divided by, read off the largest entry, whose probability never underflows.
    log_sum = logits.gather(1, first) - probs.gather(1, first).log()
    places = labels[:, None]
    nll = (log_sum - logits.gather(1, places))[:, 0]
    if not needs_grad:
        return nll, nll.new_empty(0)
    if isinstance(slope, Tensor):
        of_label = slope.gather(1, places)
        return nll, _through_rows(probs.mul_(slope), task) - of_label * task.rows_VE[labels]
    return nll, (_through_rows(probs, task) - task.rows_VE[labels]) * slope


def _divergence(
    logits: Tensor, teacher: Tensor, task: _Task, temperature: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """(KL(teacher || draft) * T^2, gradient of it), both at temperature T; `logits` and `teacher` are overwritten."""
    slope = task.scale.slope(logits)
    for scores in (logits, teacher):
        if temperature != 1.0:
            scores /= temperature
        scores[:, task.first_weighted :] += task.log_weight_V[task.first_weighted :]
    log_probs, of_teacher = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    probs = of_teacher.exp()
    loss = (probs * (of_teacher - log_probs)).sum(-1) * temperature**2
    if not needs_grad:
        return loss, loss.new_empty(0)
    wrong = log_probs.exp_().sub_(probs)
    if isinstance(slope, Tensor):
        return loss, _through_rows(wrong.mul_(slope), task) * temperature
    return loss, _through_rows(wrong, task) * (slope * temperature)


def _through_rows(of_logits: Tensor, task: _Task) -> Tensor:
    """Gradient of hidden rows from the gradient of raw head outputs."""
    grad = of_logits.to(task.rows_VE.dtype) @ task.rows_VE
    return grad if grad.dtype == torch.float64 else grad.float()
