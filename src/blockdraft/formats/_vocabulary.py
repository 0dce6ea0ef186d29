"""The map of a reduced draft vocabulary: which id of the target each row of the draft's own head stands for.

Owns: `head_ids` as it stands on disk, offsets from a row's number (d2t) beside a mask over the target's ids (t2d).

Letters: R rows of the head, V ids of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockdraft.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_head_ids", "ids_of_maps", "maps_of_ids"]


def ids_of_maps(d2t_R: Tensor, t2d_V: Tensor) -> Tensor:
    """head_ids_R of the two maps. Raises CheckpointError where they disagree."""
    import torch

    ids_R = d2t_R + torch.arange(len(d2t_R))
    check_head_ids(ids_R, len(t2d_V), where="d2t")
    unmarked = (~t2d_V[ids_R]).nonzero()[:, 0].tolist()
    marked = int(t2d_V.sum())
    if unmarked or marked != len(ids_R):
        first = f", such as row {unmarked[0]}, id {int(ids_R[unmarked[0]])}" if unmarked else ""
        raise CheckpointError(
            f"d2t and t2d disagree: t2d marks {marked} ids for {len(ids_R)} rows, and {len(unmarked)} rows of d2t lead "
            f"to ids that it does not mark{first}; the two must come from one mapping"
        )
    return ids_R


def maps_of_ids(ids_R: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(d2t_R, t2d_V) of sound head ids."""
    import torch

    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[ids_R] = True
    return ids_R - torch.arange(len(ids_R)), t2d_V


def check_head_ids(ids_R: Tensor, vocab_size: int, *, where: str = "head_ids") -> None:
    """Raise CheckpointError unless every row stands for an id of the target, and no two for the same."""
    seen: dict[int, int] = {}
    for row, token in enumerate(ids_R.tolist()):
        if not 0 <= token < vocab_size:
            raise CheckpointError(f"row {row} of {where} leads to id {token}: the target's are 0 to {vocab_size - 1}")
        if token in seen:
            raise CheckpointError(f"rows {seen[token]} and {row} of {where} lead to the same id {token}: each has one")
        seen[token] = row
