"""From the rows of several blocks to their proposals, whatever heads a draft has.

Owns which head proposes what, and what is done for all blocks at once. Candidates, their walk and the laws are
``heads``' and ``markov``'s. Knows config only.

Letters: K = all G proposals of all blocks, one block after another, L block length, D draft width, V vocabulary, M
candidates, P predecessors, R Markov rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdraft.draft.heads import CandidateLists, CandidateSelector, FullLaw, Proposal, top_candidates, walk
from blockdraft.draft.injection import rescored_walk
from blockdraft.draft.markov import chain, each_alone

if TYPE_CHECKING:
    from blockdraft.draft.model import DraftModel

__all__ = ["BlockRows", "CandidateLogits", "propose_rows"]

CandidateLogits = Callable[[Tensor, Tensor], Tensor]
"""(hidden_GD, ids_GM) -> [G, M]: the bare head on rows, of some ids each."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """One block as ``DraftModel.forward`` gave it, anchor row included, and how its proposals are drawn.

    Proposals end before the first row whose confidence is below ``min_confidence``.
    """

    hidden_LD: Tensor
    anchor_id: int
    temperature: float
    generator: torch.Generator | None
    min_confidence: float = 0.0


def propose_rows(
    draft: DraftModel,
    blocks: Sequence[BlockRows],
    logits_KV: Tensor,
    exclude_ids: Sequence[int],
    candidate_logits: CandidateLogits | None,
) -> list[Proposal]:
    """See ``DraftModel.propose_rows``."""
    first = 0 if draft.config.predicts_from_anchor else 1
    counts = [block.hidden_LD.shape[0] - first for block in blocks]
    num_all = sum(counts)
    if len(logits_KV) != num_all:
        raise ValueError(f"logits of {len(logits_KV)} rows for blocks that predict {num_all}")
    if draft.candidate_selector is not None and num_all > 0:
        proposals = _selected(draft, draft.candidate_selector, blocks, counts, logits_KV, exclude_ids)
    elif _is_fixed(draft, blocks) and num_all > 0:
        proposals = [Proposal(ids_G, None) for ids_G in _likeliest(draft, logits_KV, exclude_ids).split(counts)]
    else:
        every = zip(blocks, logits_KV.split(counts), strict=True)
        proposals = [_alone(draft, block, logits_GV, exclude_ids, candidate_logits) for block, logits_GV in every]
    return [
        proposal
        if block.min_confidence == 0.0 or draft.confidence_head is None or len(proposal.ids_G) == 0
        else proposal.first(_num_confident(draft, block, proposal.ids_G))
        for block, proposal in zip(blocks, proposals, strict=True)
    ]


def _is_fixed(draft: DraftModel, blocks: Sequence[BlockRows]) -> bool:
    """Whether each row proposes its largest logit, whatever the rows before it do."""
    is_drawn = draft.config.family == "dspark" and any(block.temperature != 0.0 for block in blocks)
    return draft.markov_head is None and draft.injection is None and not is_drawn


def _selected(
    draft: DraftModel,
    selector: CandidateSelector,
    blocks: Sequence[BlockRows],
    counts: Sequence[int],
    logits_KV: Tensor,
    exclude_ids: Sequence[int],
) -> list[Proposal]:
    """The selector's walk over each block's candidates, all blocks in one pass."""
    values_KM, ids_KM = top_candidates(logits_KV, selector.top_k, exclude_ids)
    starts = [sum(counts[:i]) for i, count in enumerate(counts) if count]
    before_KM = ids_KM.roll(1, 0)
    anchors = [block.anchor_id for block, count in zip(blocks, counts, strict=True) if count]
    before_KM[starts] = torch.tensor(anchors, device=ids_KM.device)[:, None]
    first = 0 if draft.config.predicts_from_anchor else 1
    hidden_KD = torch.cat([block.hidden_LD[first:] for block in blocks])
    scores_KPM = draft.scale_logits(_wide(values_KM))[:, None, :] + selector.edges(hidden_KD, before_KM, ids_KM)
    temperatures = [block.temperature for block in blocks]
    path_K, probs_KM = walk(scores_KPM, counts, temperatures, [block.generator for block in blocks])
    all_ids = ids_KM.gather(1, path_K[:, None])[:, 0].split(list(counts))
    if probs_KM is None:
        return [Proposal(ids_G, None) for ids_G in all_ids]
    laws = zip(all_ids, ids_KM.split(list(counts)), probs_KM.split(list(counts)), temperatures, strict=True)
    return [
        Proposal(ids_G, None if temperature == 0.0 or len(ids_G) == 0 else CandidateLists(ids_GM, probs_GM))
        for ids_G, ids_GM, probs_GM, temperature in laws
    ]


def _alone(
    draft: DraftModel,
    block: BlockRows,
    logits_GV: Tensor,
    exclude_ids: Sequence[int],
    candidate_logits: CandidateLogits | None,
) -> Proposal:
    """One block's proposals, where each token needs the one before it, or there is nothing to choose."""
    hidden_GD = block.hidden_LD if draft.config.predicts_from_anchor else block.hidden_LD[1:]
    if len(hidden_GD) == 0:
        return Proposal(ids_G=torch.empty(0, dtype=torch.long, device=hidden_GD.device), q=None)
    if draft.markov_head is not None or (draft.config.family == "dspark" and block.temperature != 0.0):
        return _spark(draft, block, hidden_GD, _wide(logits_GV), exclude_ids)
    if draft.config.injection is None:
        return Proposal(_likeliest(draft, logits_GV, exclude_ids), None)
    assert candidate_logits is not None, "a draft with injection scores its candidates with the head again"
    _, ids_GM = top_candidates(logits_GV, draft.config.injection.top_k, exclude_ids)
    rescore = _rescore(draft, hidden_GD, ids_GM, candidate_logits)
    ids_G, probs_GM = rescored_walk(rescore, ids_GM, block.anchor_id, block.temperature, block.generator)
    return Proposal(ids_G, None if probs_GM is None else CandidateLists(ids_GM, probs_GM))


def _likeliest(draft: DraftModel, logits_GV: Tensor, exclude_ids: Sequence[int]) -> Tensor:
    """ids_G of the largest logits, as the target counts them."""
    if draft.head_ids is None:
        return top_candidates(logits_GV, 1, exclude_ids)[1][:, 0]
    barred = torch.isin(draft.head_ids, torch.tensor(exclude_ids, device=draft.head_ids.device))
    rows_G = top_candidates(logits_GV, 1, barred.nonzero()[:, 0].tolist())[1][:, 0]
    return draft.head_ids[rows_G]


def _spark(
    draft: DraftModel, block: BlockRows, hidden_GD: Tensor, logits_GV: Tensor, exclude_ids: Sequence[int]
) -> Proposal:
    """Laws over all ids: along the block with a Markov head, otherwise of each row alone."""
    logits_GV = draft.scale_logits(logits_GV)
    if exclude_ids:
        logits_GV = logits_GV.clone()
        logits_GV[:, list(exclude_ids)] = -torch.inf
    if draft.markov_head is None:
        ids_G, q_GV = each_alone(logits_GV, block.temperature, block.generator)
        return Proposal(ids_G, FullLaw(q_GV))
    ids_G, probs_GV = chain(
        draft.markov_head, logits_GV, hidden_GD, block.anchor_id, block.temperature, block.generator
    )
    return Proposal(ids_G, None if probs_GV is None else FullLaw(probs_GV))


def _rescore(
    draft: DraftModel, x_GD: Tensor, ids_GM: Tensor, candidate_logits: CandidateLogits
) -> Callable[[int, Tensor], Tensor]:
    """Scores of a row's candidates when the last message comes from the token really proposed before."""
    injection, last = draft.injection, len(draft.layers) - 1
    assert injection is not None

    def rescore(row: int, previous_id: Tensor) -> Tensor:
        x_1D = x_GD[row][None]
        written_1D = injection.write(x_1D, injection.readout(x_1D, last), draft.codes(previous_id[None], x_1D), last)
        return draft.scale_logits(_wide(candidate_logits(draft.norm(written_1D), ids_GM[row][None])))[0]

    return rescore


def _num_confident(draft: DraftModel, block: BlockRows, ids_G: Tensor) -> int:
    """How many rows stand before the first whose confidence is below the least that is asked for."""
    assert draft.confidence_head is not None and draft.config.confidence is not None
    hidden_GD = block.hidden_LD if draft.config.predicts_from_anchor else block.hidden_LD[1:]
    token_GR = None
    if draft.config.confidence.reads_token:
        assert draft.markov_head is not None
        anchor_1 = torch.tensor([block.anchor_id], device=ids_G.device)
        token_GR = draft.markov_head.markov_w1.weight[torch.cat((anchor_1, ids_G[:-1]))]
    is_low_G = ~(draft.confidence_head(hidden_GD, token_GR) >= block.min_confidence)
    return int((is_low_G.cumsum(dim=-1) == 0).sum())


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
