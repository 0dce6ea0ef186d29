"""Slot weights, losses and the restricted output head of a block drafter, as pure functions.

Knows no model and no files.

Letters: X blocks, G proposals per block, V rows of the (restricted) head, M selector candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "HeadRows",
    "decay_weights",
    "dpace_weights",
    "prefix_sum",
    "selector_loss",
    "weighted_mean",
]


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

    def cross_entropy(self, logits_XGV: Tensor, slots_XG: Tensor) -> Tensor:
        """nll_XG of the labels at `slots_XG` (a label without a row, -1, gives the number of slot 0: mask it)."""
        weighted_XGV = logits_XGV + self.log_weight_V
        nll = F.cross_entropy(weighted_XGV.flatten(0, 1), slots_XG.clamp_min(0).flatten(), reduction="none")
        return nll.view(slots_XG.shape)


def decay_weights(num_proposals: int, gamma: float) -> Tensor:
    """[G] exp(-(k-1)/gamma) for proposal k = 1..G (DFlash paper, appendix A.1)."""
    return torch.exp(-torch.arange(num_proposals) / gamma)


def dpace_weights(nll_XG: Tensor, weights_XG: Tensor, smoothing: float) -> Tensor:
    """[X, G] detached weights: how much of the expected accepted length hangs on each slot (arXiv 2605.18810).

    q = exp(-nll) smoothed to (1-a) q + a; weight of slot j = sum over m >= j of prod over i <= m of q_i.
    A slot without a label ends the block: products past it are 0.
    """
    q_XG = torch.exp(-nll_XG.detach().float()) * (1 - smoothing) + smoothing
    reach_XG = torch.cumprod(q_XG * weights_XG, dim=-1)
    return reach_XG.flip(-1).cumsum(-1).flip(-1) * weights_XG


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """sum(w v) / sum(w); 0 where every weight is 0."""
    return (values * weights).sum() / weights.sum().clamp_min(1e-6)


def selector_loss(
    unary_XGM: Tensor, edge_XGM: Tensor, candidates_XGM: Tensor, labels_XG: Tensor
) -> tuple[Tensor, Tensor]:
    """(nll_XG, hit_XG): cross-entropy of the label among its slot's candidates, and whether it is among them.

    A label that the candidate list misses gives nll 0 and hit 0: the walk could not pick it either, so it is skipped,
    never inserted.
    """
    is_label_XGM = candidates_XGM == labels_XG[..., None]
    hit_XG = is_label_XGM.any(-1)
    log_probs_XGM = torch.log_softmax((unary_XGM + edge_XGM).float(), dim=-1)
    nll_XG = -(log_probs_XGM.masked_fill(~is_label_XGM, 0)).sum(-1)
    return nll_XG, hit_XG.float()


def prefix_sum(right_XG: Tensor, weights_XG: Tensor) -> Tensor:
    """Sum over blocks of the leading run of right proposals; teacher-forced, so only a proxy of what is accepted."""
    return torch.cumprod(right_XG.float() * weights_XG, -1).sum()
