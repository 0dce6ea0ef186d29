"""What the decode loop may ask of a target. Knows no model class, no draft and no request.

Shapes: T positions fed to the target, N taps, E target width, V vocabulary rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import PairError, RequestError

__all__ = ["Row", "Scored", "Target", "check_forward", "checked_length", "checked_taps"]


class Row(ABC):
    """One sequence inside a target: its cached state, and nothing about who asked for it."""

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """Positions written and not rolled back; also the position of the next id."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory that this row's state holds now, spare room included."""

    @property
    @abstractmethod
    def was_freed(self) -> bool:
        """Whether the target has let go of it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one row's forward pass gave back."""

    logits_TV: Tensor  # the last num_logits positions (all of them when num_logits was None), model dtype
    taps_TNE: Tensor  # every position that was fed; N = 0 when the target has no taps


class Target(Protocol):
    """A causal language model with per-row state that can be taken back exactly."""

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """0-based layers; a tap is what that layer puts out, before any final norm."""
        ...

    @property
    def tap_stream(self) -> TapStream:
        """Which of its streams the taps are, "prefix" where there is only one."""
        ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def new_row(self) -> Row:
        """An empty row of this target."""
        ...

    def free(self, row: Row) -> None:
        """Let go of the row's memory. The row must not be used afterwards; freeing it again does nothing."""
        ...

    @property
    def can_truncate(self) -> bool:
        """Whether any row may be copied to any smaller length: no state, and no window that drops positions."""
        ...

    def copy(self, row: Row, length: int | None = None) -> Row:
        """A row of its own with the first ``length`` positions of this one, all by default.

        The used positions are copied; the given row is as it was, and both are fed, rolled back and freed apart from
        now on. Before its first forward the copy has nothing to roll back. ``length < row.num_positions`` needs
        ``can_truncate`` and is a ValueError without it.
        """
        ...

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row, in order; ids[i] is a vector of T_i >= 1 ids that follow rows[i].

        Positions come from the row, never from the caller. All rows advance, or (on an error) none.
        """
        ...

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        """Keep the first keep[i] of the positions that the row's LAST forward wrote; forget the others.

        0 <= keep[i] <= that forward's T. May be called again with a smaller keep.
        """
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[..., E] raw rows of the input embedding matrix: no scaling, no norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] the bare output head on [..., E]: no multiplier, no softcap."""
        ...


def checked_taps(tap_layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    taps = tuple(tap_layer_ids)
    wrong = [i for i in taps if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < num_layers]
    if wrong or len(set(taps)) != len(taps):
        raise PairError(
            f"taps {list(taps)} do not fit a target of {num_layers} layers: different whole numbers"
            f" 0..{num_layers - 1} are needed; is this the target that the draft was trained for?"
        )
    return taps


def checked_length(row: Row, length: int | None, *, can_truncate: bool) -> int:
    """How many positions ``Target.copy`` shall copy; ValueError if it may not be called so."""
    if row.was_freed:
        raise ValueError("this row was freed")
    kept = row.num_positions if length is None else length
    if not 0 <= kept <= row.num_positions:
        raise ValueError(f"cannot copy {kept} positions: the row has {row.num_positions}")
    if kept < row.num_positions and not can_truncate:
        raise ValueError(
            f"cannot copy {kept} of {row.num_positions} positions: this target keeps state, or a window, that is that"
            " of all of them"
        )
    return kept


def check_forward(ids: Sequence[Tensor], rows: Sequence[Row], num_logits: int | None, *, max_length: int) -> None:
    """Nothing; an error if ``Target.forward`` may not be called so. The rows are known to be the target's own."""
    if len(ids) != len(rows) or len(set(map(id, rows))) != len(rows):
        raise ValueError(f"{len(ids)} id vectors for {len(rows)} rows: one for each, no row twice")
    if num_logits is not None and num_logits < 0:
        raise ValueError(f"num_logits is {num_logits}: 0, a positive number or None")
    for x, row in zip(ids, rows, strict=True):
        if row.was_freed:
            raise ValueError("this row was freed")
        if x.dim() != 1 or x.shape[0] == 0:
            raise ValueError(f"ids of shape {tuple(x.shape)}: a vector of at least one id is needed")
        if row.num_positions + x.shape[0] > max_length:
            raise RequestError(
                f"{row.num_positions} + {x.shape[0]} positions do not fit: this target takes at most"
                f" {max_length}; shorten the prompt or ask for fewer tokens"
            )
