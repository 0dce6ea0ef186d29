"""The step: propose, score, accept, commit; one function for every draft, target, width and number of rows.

Plain decoding is the same step with width 1 and no draft. Holds no state and no policy.

Letters: B rows, L rows of the draft's block, G proposals, T = G+1 positions fed to the target, M candidates,
N taps, E target width, D draft width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.accept import (
    Dense,
    OneHot,
    Sparse,
    TokenLogprobs,
    accept,
    accept_greedy,
    greedy_ids,
    logprobs,
    target_distribution,
)
from blockdraft.draft import CandidateLists, DraftCache, DraftModel, Proposal
from blockdraft.engine.request import TokenKind
from blockdraft.engine.row import RunningRow, now_s
from blockdraft.errors import RequestError
from blockdraft.targets import Target

__all__ = ["decode_step", "first_token", "prefill"]


def decode_step(rows: Sequence[RunningRow], target: Target, draft: DraftModel | None) -> None:
    """Advance every row by one step. Each row commits the proposals that stand and one token of the target's own."""
    started = now_s()
    max_draft_length = None if draft is None else draft.max_length
    widths = [row.block_width(max_draft_length) for row in rows]
    proposals = _propose(rows, widths, target, draft)
    blocks = [_block(row, proposal) for row, proposal in zip(rows, proposals, strict=True)]
    scored = target.forward(blocks, [row.target_row for row in rows])
    decisions = [_accept(row, proposal, s.logits_TV) for row, proposal, s in zip(rows, proposals, scored, strict=True)]
    num_emitted = [
        _commit(row, proposal, *decision, s.logits_TV)
        for row, proposal, decision, s in zip(rows, proposals, decisions, scored, strict=True)
    ]
    target.rollback([row.target_row for row in rows], num_emitted)
    for row, kept, s in zip(rows, num_emitted, scored, strict=True):
        if row.draft_cache is not None and draft is not None:
            draft.inject(s.taps_TNE[:kept], row.draft_cache)
    spent = (now_s() - started) / len(rows)
    for row, proposal, (num_accepted, _), kept in zip(rows, proposals, decisions, num_emitted, strict=True):
        num_draft = 0 if proposal is None else len(proposal.ids_G)
        row.stats.add_step(num_draft=num_draft, num_accepted=num_accepted, num_emitted=kept, seconds=spent)


def prefill(row: RunningRow, target: Target, draft: DraftModel | None, *, chunk_size: int) -> Tensor:
    """Feed the prompt in chunks; returns the logits [1, V] after its last token. The row's draft cache follows."""
    prompt = torch.tensor(row.request.prompt_ids, dtype=torch.long, device=target.device)
    for start in range(0, len(prompt), chunk_size):
        chunk = prompt[start : start + chunk_size]
        is_last = start + len(chunk) == len(prompt)
        [scored] = target.forward([chunk], [row.target_row], num_logits=1 if is_last else 0)
        target.rollback([row.target_row], [len(chunk)])
        if row.draft_cache is not None and draft is not None:
            draft.inject(scored.taps_TNE, row.draft_cache)
    return scored.logits_TV


def first_token(row: RunningRow, logits_1V: Tensor) -> None:
    """Commit the token that the prefill decides."""
    decision = _accept(row, None, logits_1V)
    entries = _logprobs(row, logits_1V, [decision[1]])
    row.commit([decision[1]], ["first"], entries)


def _propose(
    rows: Sequence[RunningRow], widths: Sequence[int], target: Target, draft: DraftModel | None
) -> list[Proposal | None]:
    """A proposal for every row of width above 1; rows of equal width go through the draft together."""
    proposals: list[Proposal | None] = [None] * len(rows)
    by_width: dict[int, list[int]] = defaultdict(list)
    for index, width in enumerate(widths):
        if width > 1:
            by_width[width].append(index)
    for width, indices in by_width.items():
        assert draft is not None
        anchors = [rows[i].anchor_id for i in indices]
        caches = [_cache(rows[i]) for i in indices]
        from_anchor = draft.config.predicts_from_anchor
        noise_BLD = draft.noise(anchors, width - 1 if from_anchor else width, target.embed)
        if draft.config.injection is None:
            rows_BLD = hidden_BLD = draft(noise_BLD, caches)
        else:
            rows_BLD = draft(noise_BLD, caches, anchors)
            hidden_BLD = draft.head_rows(rows_BLD, anchors)
        logits_BGV = _head_logits(hidden_BLD if from_anchor else hidden_BLD[:, 1:], target, draft)
        for at, i in enumerate(indices):
            row = rows[i]
            proposals[i] = draft.propose(
                rows_BLD[at],
                row.anchor_id,
                logits_BGV[at],
                row.request.sampling.temperature,
                row.draft_generator,
                exclude_ids=(draft.config.mask_token_id,),
                min_confidence=row.request.min_confidence,
                candidate_logits=partial(_candidate_logits, target=target, draft=draft),
            )
    return proposals


def _head_logits(hidden_BGD: Tensor, target: Target, draft: DraftModel) -> Tensor:
    """[B, G, V] of the draft's own head if it has one, else of the target's."""
    if draft.own_head is not None:
        return F.linear(hidden_BGD, draft.own_head)
    return target.logits(hidden_BGD.to(target.dtype))


def _candidate_logits(hidden_GD: Tensor, ids_GM: Tensor, *, target: Target, draft: DraftModel) -> Tensor:
    """[G, M] of the same head, of some ids of each row."""
    if draft.own_head is not None:
        return torch.einsum("gd,gmd->gm", hidden_GD, draft.own_head[ids_GM])
    return target.logits(hidden_GD.to(target.dtype)).gather(1, ids_GM)


def _cache(row: RunningRow) -> DraftCache:
    assert row.draft_cache is not None and row.draft_cache.num_positions == len(row.ids) - 1
    return row.draft_cache


def _block(row: RunningRow, proposal: Proposal | None) -> Tensor:
    anchor = torch.tensor([row.anchor_id], dtype=torch.long)
    return anchor if proposal is None else torch.cat([anchor.to(proposal.ids_G.device), proposal.ids_G])


def _accept(row: RunningRow, proposal: Proposal | None, logits_TV: Tensor) -> tuple[int, int]:
    """(num_accepted, next id) for one row; the one place of a step that waits for the device."""
    if bool(logits_TV.amax().isnan()):
        raise RequestError(
            f"the target's logits hold NaN after {len(row.ids)} tokens, so that it has no next token: in float16 large "
            "numbers overflow, use bfloat16 or float32; otherwise its weights are damaged"
        )
    ids_G = [] if proposal is None else proposal.ids_G.tolist()
    params = row.request.sampling
    decide = greedy_ids if params.is_greedy else target_distribution
    decided = decide(
        logits_TV,
        params,
        history=row.ids,
        num_prompt=row.num_prompt,
        proposals=ids_G,
        banned=row.banned(len(ids_G) + 1),
    )
    if params.is_greedy:
        return accept_greedy(ids_G, decided)
    return accept(ids_G, _law(proposal), decided, row.accept_generator)


def _law(proposal: Proposal | None) -> OneHot | Sparse | Dense:
    """What the proposals were drawn from, as acceptance knows it."""
    law = None if proposal is None else proposal.q
    if law is None:
        return OneHot()
    return Sparse(law.ids_GM, law.probs_GM) if isinstance(law, CandidateLists) else Dense(law.probs_GV)


def _commit(row: RunningRow, proposal: Proposal | None, num_accepted: int, next_id: int, logits_TV: Tensor) -> int:
    accepted = [] if proposal is None else proposal.ids_G[:num_accepted].tolist()
    ids = [*accepted, next_id]
    kinds: list[TokenKind] = ["bonus" if index == num_accepted else "accepted" for index in range(len(ids))]
    return row.commit(ids, kinds, _logprobs(row, logits_TV[: len(ids)], ids))


def _logprobs(row: RunningRow, logits_TV: Tensor, ids: list[int]) -> list[TokenLogprobs] | None:
    if row.request.num_logprobs is None:
        return None
    return logprobs(logits_TV, ids, top_n=row.request.num_logprobs)
