"""Accept: which proposals of each row stand, and the target's own id after them; for all rows of a step at once.

Owns the one place of a step that waits for the device, and what counts as a broken answer of the target. The rules of
acceptance are accept.py's.

Letters: G proposals, T = G+1 positions scored, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.accept import Dense, OneHot, Sparse, accept, accept_greedy, greedy_ids, target_distribution
from blockdraft.draft import CandidateLists, Proposal
from blockdraft.engine.constraint import RowConstraint
from blockdraft.engine.row import RunningRow

__all__ = ["Decide", "Decision", "decide"]

_BROKEN = -1  # in the place of an id: the target's logits hold NaN there. No proposal equals it.
_NAN_ADVICE = (
    "so that it has no next token: in float16 large numbers overflow, use bfloat16 or float32; otherwise its weights "
    "are damaged"
)
_NAN_DRAFT = (
    "the draft's probabilities hold NaN, so that its proposals cannot be judged: use bfloat16 or float32, or plain "
    "decoding (speculate false)"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What one row commits: ``num_accepted`` proposals, then one id of the target's own.

    Where ``error`` says why the target has no such id, the accepted proposals are all.
    """

    ids: list[int]
    num_accepted: int
    error: str | None = None


Decide = Callable[[Sequence[RunningRow], Sequence[Proposal | None], Sequence[Tensor]], list[Decision]]
"""What ``decide`` is; an examination may put an observer of its own in its place."""


def decide(
    rows: Sequence[RunningRow], proposals: Sequence[Proposal | None], logits: Sequence[Tensor]
) -> list[Decision]:
    """One decision per row; logits[i] is [T_i, V], what the target says after the anchor and after each proposal."""
    is_simple = [row.takes_best(len(x)) for row, x in zip(rows, logits, strict=True)]
    best = [best_ids(x) for x, simple in zip(logits, is_simple, strict=True) if simple]
    host = iter(_on_host([*(p.ids_G for p in proposals if p is not None), *best]))
    ids = [[] if p is None else next(host) for p in proposals]
    decisions = []
    for row, proposal, ids_G, simple, logits_TV in zip(rows, proposals, ids, is_simple, logits, strict=True):
        if simple:
            decisions.append(_by_best(row, ids_G, next(host)))
        elif _is_nan(proposal):
            decisions.append(Decision([], 0, _NAN_DRAFT))
        else:
            decisions.append(_by_law(row, proposal, ids_G, logits_TV))
    return decisions


def _by_best(row: RunningRow, ids_G: list[int], best_T: list[int]) -> Decision:
    """The decision of a row whose tokens are the most likely ids of the logits as they are."""
    num_accepted, next_id = accept_greedy(ids_G, best_T)
    if next_id == _BROKEN:
        return Decision(ids_G[:num_accepted], num_accepted, _nan_error(row, num_accepted))
    return Decision([*ids_G[:num_accepted], next_id], num_accepted)


def best_ids(logits_TV: Tensor) -> Tensor:
    """The most likely id of every row, the lowest among equals, [T]; -1 where a row holds NaN."""
    if logits_TV.device.type == "cpu" and logits_TV.dtype in (torch.float32, torch.float64):
        array_TV = logits_TV.numpy()  # its argmax takes a fortieth of the time of torch's on a CPU
        best_T = torch.from_numpy(array_TV.argmax(-1))
        value_T = logits_TV.gather(1, best_T[:, None])[:, 0]
    else:
        value_T, best_T = logits_TV.max(dim=-1)
    return best_T.masked_fill(value_T.isnan(), _BROKEN)  # both kinds of maximum find NaN before any number


def _on_host(vectors: Sequence[Tensor]) -> list[list[int]]:
    """The ids of all vectors in one transfer."""
    if not vectors:
        return []
    device = vectors[-1].device
    flat = iter(torch.cat([x.to(device) for x in vectors]).tolist())
    return [[next(flat) for _ in range(len(x))] for x in vectors]


def _by_law(row: RunningRow, proposal: Proposal | None, ids_G: list[int], logits_TV: Tensor) -> Decision:
    """The decision of a row that samples, or whose logits are changed first."""
    params = row.request.sampling
    banned = row.banned(len(ids_G) + 1)
    is_nan_T = logits_TV.amax(dim=-1).isnan().tolist()
    num_sound = is_nan_T.index(True) if True in is_nan_T else len(is_nan_T)
    allowed_TV, error = None, None
    if row.constraint is not None:
        allowed_TV, num_open, reason = _allowed(row, row.constraint, ids_G, logits_TV, banned)
        if num_open < num_sound:
            num_sound, error = num_open, reason
    if num_sound < len(is_nan_T):  # rows from there on are never answered for; they only have to be numbers
        logits_TV = logits_TV.nan_to_num(nan=0.0)
    rule = greedy_ids if params.is_greedy else target_distribution
    decided = rule(
        logits_TV,
        params,
        history=row.ids,
        num_prompt=row.num_prompt,
        proposals=ids_G,
        banned=banned,
        allowed_TV=allowed_TV,
    )
    if params.is_greedy:
        num_accepted, next_id = accept_greedy(ids_G, decided)
    else:
        num_accepted, next_id = accept(ids_G, _law(proposal), decided, row.accept_generator)
    if num_accepted < num_sound:
        return Decision([*ids_G[:num_accepted], next_id], num_accepted)
    return Decision(ids_G[:num_sound], num_sound, error or _nan_error(row, num_sound))


def _allowed(
    row: RunningRow,
    constraint: RowConstraint,
    ids_G: list[int],
    logits_TV: Tensor,
    banned: Sequence[frozenset[int]],
) -> tuple[Tensor, int, str | None]:
    """(ids that the grammar allows, how many rows keep one of them, why the next row keeps none).

    Rows from there on allow everything: they are never answered for.
    """
    found = constraint.allowed(ids_G)
    allowed_TV = found.on(logits_TV.device)
    open_TV = allowed_TV & (logits_TV != float("-inf"))
    for index, ids in enumerate(banned):
        open_TV[index, sorted(ids)] = False
    is_open_T = open_TV.any(dim=-1).tolist()
    num_open, error = found.num_known, found.error
    if False in is_open_T[:num_open]:
        num_open = is_open_T.index(False)
        error = _no_token_error(row, num_open, has_ids=bool(allowed_TV[num_open].any()))
    allowed_TV[num_open:] = True
    return allowed_TV, num_open, error


def _no_token_error(row: RunningRow, num_more: int, *, has_ids: bool) -> str:
    """Why no token is left after ``num_more`` proposals; ``has_ids``: the grammar would have left some."""
    place = f"after {row.num_emitted + num_more} tokens of the text"
    if not has_ids:
        return f"the grammar leaves no token of this target {place}"
    least = row.request.min_new_tokens
    if row.num_emitted + num_more < least:
        return f"the grammar must end {place}, and min_new_tokens is {least}; lower it"
    return f"the target gives no chance to any token that the grammar allows {place}"


def _nan_error(row: RunningRow, num_more: int) -> str:
    return f"the target's logits hold NaN after {len(row.ids) + num_more} tokens, {_NAN_ADVICE}"


def _is_nan(proposal: Proposal | None) -> bool:
    """Whether the law that proposals were drawn from holds NaN, so that nothing can be said of them."""
    law = None if proposal is None else proposal.q
    if law is None:
        return False
    return bool((law.probs_GM if isinstance(law, CandidateLists) else law.probs_GV).isnan().any())


def _law(proposal: Proposal | None) -> OneHot | Sparse | Dense:
    """What the proposals were drawn from, as acceptance knows it."""
    law = None if proposal is None else proposal.q
    if law is None:
        return OneHot()
    return Sparse(law.ids_GM, law.probs_GM) if isinstance(law, CandidateLists) else Dense(law.probs_GV)
