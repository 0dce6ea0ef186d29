"""What a draft knew at the step boundaries of served texts: its own first choice, the selector's walk, the list.

Owns the replay (the draft's serving forward on true context, from taps of a teacher-forced pass of the target) and the
counts made of it. Knows neither requests nor training.

Gold is the target's own greedy text. Past an end id it goes on, as the counters of a served step do.

Letters: B rows, L block length, G = L-1 proposals, T positions, N taps, E target width, D draft width, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError
from blockdraft.targets import Target

__all__ = ["PositionCounts", "ReplayedStep", "ServedStep", "position_counts", "replay", "totals"]

RECALL_AT = (1, 4, 16)
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class ServedStep:
    """One step of the engine. `anchor` is the anchor's position in prompt and emitted text."""

    anchor: int
    num_draft: int
    num_accepted: int
    num_emitted: int


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step as the replay found it; entry k-1 stands for proposal k.

    ranks       place of the gold id among the draft's logits, 0 = the largest; ties go by rising id, as in the draft
    picked      whether the walk over the lists took the gold id (without a selector: whether its rank is 0)
    """

    served: ServedStep
    ranks: tuple[int, ...]
    picked: tuple[bool, ...]

    @property
    def walk_accepted(self) -> int:
        return _run(self.picked)

    @property
    def base_accepted(self) -> int:
        return _run(rank == 0 for rank in self.ranks)

    def oracle_accepted(self, list_size: int) -> int:
        return _run(rank < list_size for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCounts:
    """Steps by what happened at proposal `position`. reached = picked + missed + misranked.

    proposed        steps with a proposal at this position; `in_top` of them have the gold id in the M largest logits
    reached         steps with one whose walk was right before it
    picked          of those, the walk is right here too
    missed          of those, gold stands outside the list: no selector could have picked it
    misranked       of those, gold stands in the list and another was picked
    base_reached, base_right    the same walk without a selector: the largest logit at every position
    """

    position: int
    proposed: int
    in_top: dict[int, int]
    reached: int
    picked: int
    missed: int
    misranked: int
    base_reached: int
    base_right: int


def position_counts(steps: Sequence[ReplayedStep], list_size: int) -> tuple[PositionCounts, ...]:
    """Counts for position 1, 2, ... up to the longest block of `steps`."""
    longest = max((len(step.ranks) for step in steps), default=0)
    return tuple(_counts_at(k, [s for s in steps if len(s.ranks) >= k], list_size) for k in range(1, longest + 1))


def _counts_at(position: int, steps: Sequence[ReplayedStep], list_size: int) -> PositionCounts:
    at = position - 1
    reached = [step for step in steps if step.walk_accepted >= at]
    lost = [step for step in reached if not step.picked[at]]
    missed = sum(step.ranks[at] >= list_size for step in lost)
    return PositionCounts(
        position=position,
        proposed=len(steps),
        in_top={size: sum(step.ranks[at] < size for step in steps) for size in RECALL_AT},
        reached=len(reached),
        picked=len(reached) - len(lost),
        missed=missed,
        misranked=len(lost) - missed,
        base_reached=sum(step.base_accepted >= at for step in steps),
        base_right=sum(step.base_accepted >= position for step in steps),
    )


def totals(steps: Sequence[ReplayedStep], list_size: int) -> tuple[int, int, int]:
    """(walk, base, oracle): accepted proposals summed over `steps`."""
    walk = sum(step.walk_accepted for step in steps)
    base = sum(step.base_accepted for step in steps)
    return walk, base, sum(step.oracle_accepted(list_size) for step in steps)


def _run(right: Iterable[bool]) -> int:
    """Length of the leading run of True."""
    return sum(1 for _ in takewhile(bool, right))


# ---- the replay ------------------------------------------------------------------------------------------------------
@torch.inference_mode()
def replay(
    draft: DraftModel, target: Target, texts: Sequence[Sequence[int]], steps: Sequence[Sequence[ServedStep]]
) -> list[list[ReplayedStep]]:
    """The steps of each text (prompt and emitted ids) again, all texts at once; plain steps have no proposals."""
    forced = [_teacher_forced(target, text, of_text) for text, of_text in zip(texts, steps, strict=True)]
    caches = [draft.new_cache() for _ in texts]
    done: list[list[ReplayedStep]] = [[] for _ in texts]
    for index in range(max((len(of_text) for of_text in steps), default=0)):
        by_width: dict[int, list[int]] = defaultdict(list)
        for row, of_text in enumerate(steps):
            if index < len(of_text):
                by_width[of_text[index].num_draft + 1].append(row)
        for width, rows in by_width.items():
            if width == 1:
                for row in rows:
                    done[row].append(ReplayedStep(steps[row][index], (), ()))
                continue
            served = [steps[row][index] for row in rows]
            for row, step in zip(rows, served, strict=True):
                taps_TNE = forced[row][1]
                draft.inject(taps_TNE[caches[row].num_positions : step.anchor], caches[row])
            anchors = [forced[row][0][step.anchor] for row, step in zip(rows, served, strict=True)]
            noise_BLD = draft.noise(anchors, width, target.embed)
            hidden_BLD = draft(noise_BLD, [caches[row] for row in rows])
            logits_BGV = _head_logits(draft, target, hidden_BLD[:, 1:])
            for at, (row, step) in enumerate(zip(rows, served, strict=True)):
                gold = forced[row][0][step.anchor + 1 : step.anchor + width]
                done[row].append(_judge(draft, step, anchors[at], hidden_BLD[at], logits_BGV[at], gold))
    return done


def _teacher_forced(target: Target, ids: Sequence[int], steps: Sequence[ServedStep]) -> tuple[list[int], Tensor]:
    """(gold ids as far as any block reaches, taps of every position before the last anchor)."""
    gold = list(ids)
    num_context = max((step.anchor for step in steps), default=0)
    num_gold = max((step.anchor + step.num_draft + 1 for step in steps), default=0)
    if not num_context:
        return gold, torch.empty(0)
    row = target.new_row()
    try:
        taps = []
        for ids_T in torch.tensor(gold[:num_context]).split(_CHUNK):
            [scored] = target.forward([ids_T], [row], num_logits=0)
            target.rollback([row], [len(ids_T)])
            taps.append(scored.taps_TNE)
        num_fed = num_context
        while len(gold) < num_gold:
            [scored] = target.forward([torch.tensor(gold[num_fed:])], [row], num_logits=1)
            target.rollback([row], [len(gold) - num_fed])
            num_fed = len(gold)
            gold.append(int(scored.logits_TV[-1].argmax()))
        return gold, torch.cat(taps)
    finally:
        target.free(row)


def _head_logits(draft: DraftModel, target: Target, hidden_BGD: Tensor) -> Tensor:
    """[B, G, V], as the engine has them."""
    if draft.own_head is not None:
        return F.linear(hidden_BGD, draft.own_head)
    return target.logits(hidden_BGD.to(target.dtype))


def _judge(
    draft: DraftModel, step: ServedStep, anchor_id: int, hidden_LD: Tensor, logits_GV: Tensor, gold: Sequence[int]
) -> ReplayedStep:
    """Where the gold ids stand in one block's logits, and which of them the walk takes."""
    mask_id = draft.config.mask_token_id
    if not bool(logits_GV.isfinite().all()):
        raise CheckpointError(
            f"the draft's logits are not finite at position {step.anchor} of a text, so it cannot be evaluated; "
            "go back to an earlier checkpoint, or train in float32 with a lower learning rate"
        )
    walk = draft.propose(hidden_LD, anchor_id, logits_GV, 0.0, None, exclude_ids=(mask_id,)).ids_G
    gold_G = torch.tensor(gold, device=logits_GV.device)
    logits_GV = logits_GV.clone()
    logits_GV[:, mask_id] = -torch.inf  # never proposed: a gold mask id ranks last
    own_G1 = logits_GV.gather(1, gold_G[:, None])
    ids_V = torch.arange(logits_GV.shape[1], device=logits_GV.device)
    is_before_GV = (logits_GV > own_G1) | ((logits_GV == own_G1) & (ids_V < gold_G[:, None]))
    ranks = is_before_GV.sum(-1).tolist()
    return ReplayedStep(step, tuple(ranks), tuple((walk == gold_G).tolist()))
