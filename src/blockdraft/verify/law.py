"""What the target samples from, written anew from the definitions, and where a token stands in it.

The second opinion on blockdraft.accept: a whole sort in float64 where acceptance takes the largest few; no code is
shared. Only what an examination asks for: temperature, top_k, top_p, min_p; no penalties, bias or bans.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.accept import SamplingParams

__all__ = ["places", "sampling_law"]


def sampling_law(logits_TV: Tensor, sampling: SamplingParams, *, slack: float = 0.0) -> Tensor:
    """p_TV, float64. `slack` > 0 widens every cut by about that probability: what rounding may let through."""
    assert not (sampling.has_penalties or sampling.logit_bias), "the exam asks for no penalties and no bias"
    scores_TV = logits_TV.detach().cpu().double()
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(scores_TV.argmax(-1), scores_TV.shape[1]).double()
    sorted_TV, ids_TV = (scores_TV / sampling.temperature).sort(dim=-1, descending=True, stable=True)
    keeps_TV = torch.ones_like(sorted_TV, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < sorted_TV.shape[1]:
        last_T1 = sorted_TV[:, sampling.top_k - 1 : sampling.top_k]
        by_rank_V = torch.arange(sorted_TV.shape[1]) < sampling.top_k
        keeps_TV = by_rank_V | (sorted_TV >= last_T1 - slack) if slack > 0.0 else by_rank_V.expand_as(keeps_TV)
    p_TV = sorted_TV.masked_fill(~keeps_TV, -torch.inf).softmax(-1)
    if sampling.top_p < 1.0:
        before_TV = p_TV.cumsum(-1) - p_TV
        keeps_TV = keeps_TV & (before_TV < sampling.top_p + slack)
    if sampling.min_p > 0.0:
        keeps_TV = keeps_TV & (p_TV >= sampling.min_p * p_TV[:, :1] * (1.0 - slack))
    p_TV = p_TV.masked_fill(~keeps_TV, 0.0)
    p_TV = p_TV / p_TV.sum(-1, keepdim=True)
    return torch.zeros_like(p_TV).scatter_(-1, ids_TV, p_TV)


def places(law_TV: Tensor, tokens: Sequence[int], noise: Sequence[float]) -> list[float | None]:
    """Numbers of [0, 1) that are uniform if each token is a draw from its law and the noise is uniform.

    A law's mass on likelier ids (lower ones among equals) plus `noise` times the token's own; None off its support.
    """
    tokens_T1 = torch.tensor(list(tokens), dtype=torch.long)[:, None]
    own_T1 = law_TV.gather(1, tokens_T1)
    is_before_TV = (law_TV > own_T1) | ((law_TV == own_T1) & (torch.arange(law_TV.shape[1]) < tokens_T1))
    before_T = law_TV.masked_fill(~is_before_TV, 0.0).sum(-1)
    own_T, total_T = own_T1[:, 0], law_TV.sum(-1)
    at_T = ((before_T + torch.tensor(list(noise), dtype=law_TV.dtype) * own_T) / total_T).clamp(max=1.0 - 1e-12)
    return [at if own > 0.0 else None for at, own in zip(at_T.tolist(), own_T.tolist(), strict=True)]
