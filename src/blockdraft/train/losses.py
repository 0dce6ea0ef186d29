"""Slot weights and the selector's loss of a block drafter, as pure functions.

Knows no model and no files.

Letters: X blocks, G proposals per block, M selector candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decay_weights", "dpace_weights", "prefix_sum", "selector_loss"]


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
