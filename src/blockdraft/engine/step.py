"""The step: propose, score, accept, commit; one function for every draft, target, width and number of rows.

Plain decoding is the same step with width 1 and no draft; chunks of prompts ride in the same forward. Holds no state
and no policy.

Letters: B rows, L rows of the draft's block, G proposals, T positions fed to the target (G+1 of a block), M candidates,
N taps, E target width, D draft width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.accept import TokenLogprobs, logprobs
from blockdraft.draft import BlockRows, DraftCache, DraftModel, Proposal
from blockdraft.engine.decide import Decide, Decision, decide
from blockdraft.engine.request import TokenKind
from blockdraft.engine.row import RunningRow
from blockdraft.engine.times import Clock, StepTimes
from blockdraft.targets import Row as TargetRow
from blockdraft.targets import Scored, Target

__all__ = ["Chunk", "decode_step", "inject_pending"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next ``count`` positions of a row's prompt."""

    row: RunningRow
    count: int


def decode_step(
    rows: Sequence[RunningRow],
    widths: Sequence[int],
    target: Target,
    draft: DraftModel | None,
    chunks: Sequence[Chunk] = (),
    *,
    offers: Sequence[Sequence[int] | None] | None = None,
    decide: Decide = decide,
) -> tuple[StepTimes, list[int]]:
    """Advance every row by a block of its width and feed every chunk: (times, accepted proposals of each row).

    Each row commits the proposals that stand and one token of the target's own; a chunk that ends its prompt gives that
    row its first token. ``offers[i]`` are proposals of row i that need no draft. A row whose own answer is broken ends
    with an error, and the others go on.
    """
    clock = Clock()
    proposals = [None if ids is None else _offered(ids, target) for ids in offers or [None] * len(rows)]
    drafting = [i for i, width in enumerate(widths) if width > 1 and proposals[i] is None]
    inject_pending([rows[i] for i in drafting], draft)
    inject_s = clock.lap()
    drafted = _propose([rows[i] for i in drafting], [widths[i] for i in drafting], target, draft)
    for i, proposal in zip(drafting, drafted, strict=True):
        proposals[i] = proposal
    propose_s = clock.lap()
    blocks = [_Part.of_block(row, proposal) for row, proposal in zip(rows, proposals, strict=True)]
    prompts = [_Part.of_chunk(chunk) for chunk in chunks]
    alive = _score([*blocks, *prompts], target)
    forward_s = clock.lap()
    deciding = [part for part in alive if part.num_decided]
    decisions = decide([p.row for p in deciding], [p.proposal for p in deciding], [p.logits_TV for p in deciding])
    accept_s = clock.lap()
    for part, decision in zip(deciding, decisions, strict=True):
        _commit(part, decision)
    target.rollback([_state(part.row) for part in alive], [part.num_kept for part in alive])
    for part in alive:
        part.row.feed(part.taps_TNE[: part.num_kept])
    inject_pending([part.row for part in alive if part.row.must_inject], draft)
    times = StepTimes(propose_s=propose_s, accept_s=accept_s, commit_s=inject_s + clock.lap(), num_rows=len(rows))
    times.share_forward(forward_s, sum(p.num_fed for p in blocks), sum(p.num_fed for p in prompts))
    _count(alive, times)
    return times, [part.num_accepted for part in blocks]


def inject_pending(rows: Sequence[RunningRow], draft: DraftModel | None) -> None:
    """Bring the draft's context of these rows up to what the target was fed, all rows together."""
    waiting = [row for row in rows if row.num_pending]
    if not waiting:
        return
    assert draft is not None
    draft.inject_rows([row.joined_taps() for row in waiting], [_cache(row) for row in waiting])
    for row in waiting:
        row.drop_pending()


# ---- one row's part of the step --------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Part:
    """What one row feeds to the target in this step, a block or a chunk, and what comes of it."""

    row: RunningRow
    ids_T: Tensor
    num_decided: int  # tokens that may be decided after the last of these positions: T of a block, 1 or 0 of a chunk
    proposal: Proposal | None = None
    is_chunk: bool = False
    scored: Scored | None = None
    num_accepted: int = 0
    num_kept: int = 0
    num_emitted: int = 0

    @classmethod
    def of_block(cls, row: RunningRow, proposal: Proposal | None) -> _Part:
        ids_T = torch.tensor([row.anchor_id], dtype=torch.long)
        if proposal is not None:
            ids_T = torch.cat([ids_T.to(proposal.ids_G.device), proposal.ids_G])
        return cls(row, ids_T, len(ids_T), proposal)

    @classmethod
    def of_chunk(cls, chunk: Chunk) -> _Part:
        row, start = chunk.row, chunk.row.num_fed
        ids_T = torch.tensor(row.ids[start : start + chunk.count], dtype=torch.long)
        is_end = chunk.count == row.num_unfed
        return cls(row, ids_T, 1 if is_end else 0, is_chunk=True, num_kept=chunk.count)

    @property
    def num_fed(self) -> int:
        return len(self.ids_T)

    @property
    def logits_TV(self) -> Tensor:
        assert self.scored is not None
        return self.scored.logits_TV[-self.num_decided :]

    @property
    def taps_TNE(self) -> Tensor:
        assert self.scored is not None
        return self.scored.taps_TNE


def _state(row: RunningRow) -> TargetRow:
    assert row.target_row is not None
    return row.target_row


def _cache(row: RunningRow) -> DraftCache:
    assert row.draft_cache is not None and row.draft_cache.num_positions == row.num_fed - row.num_pending
    return row.draft_cache


def _offered(ids: Sequence[int], target: Target) -> Proposal:
    """Proposals that followed from the text: it had to be these."""
    return Proposal(torch.tensor(ids, dtype=torch.long, device=target.device), None)


# ---- propose ---------------------------------------------------------------------------------------------------------
def _propose(
    rows: Sequence[RunningRow], widths: Sequence[int], target: Target, draft: DraftModel | None
) -> list[Proposal]:
    """The draft's proposals for every row; all widths are above 1."""
    proposals: dict[int, Proposal] = {}
    for width, indices in _passes(rows, widths, draft):
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
        counts = [widths[i] - 1 for i in indices]
        hidden_KD = _predicting(hidden_BLD if from_anchor else hidden_BLD[:, 1:], counts)
        blocks = [
            BlockRows(
                rows_LD[: count if from_anchor else count + 1],
                rows[i].anchor_id,
                rows[i].request.sampling.temperature,
                rows[i].draft_generator,
                rows[i].request.min_confidence,
            )
            for i, count, rows_LD in zip(indices, counts, rows_BLD, strict=True)
        ]
        found = draft.propose_rows(
            blocks,
            _head(hidden_KD, target, draft),
            exclude_ids=(draft.config.mask_token_id,),
            candidate_logits=partial(_candidate_logits, target=target, draft=draft),
        )
        proposals.update(zip(indices, found, strict=True))
    return [proposals[i] for i in range(len(rows))]


def _passes(rows: Sequence[RunningRow], widths: Sequence[int], draft: DraftModel | None) -> list[tuple[int, list[int]]]:
    """(width of the pass, rows) of the draft's passes.

    Rows of a fixed width share a pass with their equals: what they propose depends on nothing but them. All others
    share one, as wide as the widest of them; a pass costs more than a few positions that nobody reads.
    """
    by_width: dict[int, list[int]] = defaultdict(list)
    widest = max((w for row, w in zip(rows, widths, strict=True) if not row.has_fixed_width), default=1)
    for index, (row, width) in enumerate(zip(rows, widths, strict=True)):
        assert draft is not None
        may_share = not row.has_fixed_width and row.num_fed + widest <= draft.max_length
        by_width[widest if may_share else width].append(index)
    return list(by_width.items())


def _predicting(hidden_BGD: Tensor, counts: Sequence[int]) -> Tensor:
    """[K, D]: the first ``counts[b]`` rows of each block, one block after another."""
    if min(counts) == hidden_BGD.shape[1]:
        return hidden_BGD.flatten(0, 1)
    return torch.cat([hidden_GD[:count] for hidden_GD, count in zip(hidden_BGD, counts, strict=True)])


def _head(hidden: Tensor, target: Target, draft: DraftModel) -> Tensor:
    """[..., V] of [..., D]."""
    if draft.own_head is not None:
        return F.linear(hidden, draft.own_head)
    return target.logits(hidden.to(target.dtype))


def _candidate_logits(hidden_GD: Tensor, ids_GM: Tensor, *, target: Target, draft: DraftModel) -> Tensor:
    """[G, M] of the same head, of some ids of each row."""
    if draft.own_head is not None:
        return torch.einsum("gd,gmd->gm", hidden_GD, draft.own_head[ids_GM])
    return target.logits(hidden_GD.to(target.dtype)).gather(1, ids_GM)


# ---- score -----------------------------------------------------------------------------------------------------------
def _score(parts: Sequence[_Part], target: Target) -> list[_Part]:
    """The parts that the target answered, all in one forward.

    Where that breaks off and nothing was fed, each part is tried alone: those that cannot be fed end their request
    with the error, and only if that is all of them it is raised.
    """
    most = max(part.num_decided for part in parts)
    num_logits = most if any(part.is_chunk for part in parts) else None
    try:
        answers = target.forward([p.ids_T for p in parts], [_state(p.row) for p in parts], num_logits=num_logits)
        for part, scored in zip(parts, answers, strict=True):
            part.scored = scored
        return list(parts)
    except Exception as error:
        broken = error
    for part in parts if len(parts) > 1 else ():
        try:
            [part.scored] = target.forward([part.ids_T], [_state(part.row)], num_logits=num_logits)
        except Exception as error:
            part.row.fail(" ".join(str(error).split()) or type(error).__name__)
    alive = [part for part in parts if part.scored is not None]
    if not alive:
        raise broken
    return alive


# ---- commit ----------------------------------------------------------------------------------------------------------
def _commit(part: _Part, decision: Decision) -> None:
    row, part.num_accepted = part.row, decision.num_accepted
    kinds: list[TokenKind] = ["accepted"] * decision.num_accepted
    kinds.append("first" if part.is_chunk else "bonus")
    if decision.ids:
        entries = _logprobs(row, part.logits_TV[: len(decision.ids)], decision.ids)
        part.num_emitted = row.commit(decision.ids, kinds, entries)
    if decision.error is not None and not row.is_finished:
        row.fail(decision.error)
    if not part.is_chunk:
        part.num_kept = part.num_emitted


def _logprobs(row: RunningRow, logits_TV: Tensor, ids: list[int]) -> list[TokenLogprobs] | None:
    if row.request.num_logprobs is None:
        return None
    return logprobs(logits_TV, ids, top_n=row.request.num_logprobs)


def _count(parts: Sequence[_Part], times: StepTimes) -> None:
    """Each row's share of the step: of its prompt by positions, of the rest by rows."""
    decode_s = (times.total_s - times.prefill_s) / max(times.num_rows, 1)
    for part in parts:
        stats = part.row.stats
        if not part.is_chunk:
            num_draft = 0 if part.proposal is None else len(part.proposal.ids_G)
            stats.add_step(
                num_draft=num_draft, num_accepted=part.num_accepted, num_emitted=part.num_emitted, seconds=decode_s
            )
            continue
        seconds = times.prefill_s * part.num_fed / times.num_prefilled
        if part.num_decided:
            stats.add_prefill(seconds=seconds, num_emitted=part.num_emitted)
        else:
            stats.prefill_s += seconds
