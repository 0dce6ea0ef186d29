"""The Kimi-K3 text model as a target: rows, taps of both kinds, exact rollback.

A row keeps latents for the layers that attend to everything, and for each delta layer a state, the last inputs of its
convolution and a tape of the last forward pass. Rolling back moves a counter over the latents and takes each state
from its tape. Must not know drafts, requests or files.

Letters: F new positions of all rows, T of one row, S positions of a row, N taps, Q width of a latent and its shared
key, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import TapStream, TargetFacts
from blockdraft.targets.contract import Row, Scored, check_forward, checked_length

from .delta import DeltaState, Tape
from .model import KimiK3Model, Memory

__all__ = ["KimiK3Target"]

_MIN_SPARE = 64  # positions of spare room a new buffer has at least


class _KimiK3Row(Row, Memory):
    """One row; ``num_last`` of its positions came with the last forward."""

    def __init__(self, owner: KimiK3Target) -> None:
        self.owner = owner
        self.is_free = False
        self.length = 0
        self.num_last = 0
        self.rooms: dict[int, Tensor] = {}
        self.states: dict[int, DeltaState] = {}
        self.tapes: dict[int, Tape] = {}

    @property
    def num_positions(self) -> int:
        return self.length

    @property
    def num_bytes(self) -> int:
        held = [room.nbytes for room in self.rooms.values()]
        held += [state.num_bytes for state in self.states.values()]
        return sum(held) + sum(tape.num_bytes for tape in self.tapes.values())

    @property
    def was_freed(self) -> bool:
        return self.is_free

    def latents(self, layer: int, new_TQ: Tensor) -> Tensor:
        end = self.length + new_TQ.shape[0]
        room_SQ = self.rooms.get(layer)
        if room_SQ is None or end > room_SQ.shape[0]:
            larger_SQ = new_TQ.new_empty((end + max(end, _MIN_SPARE), new_TQ.shape[1]))
            if room_SQ is not None:
                larger_SQ[: self.length] = room_SQ[: self.length]
            self.rooms[layer] = room_SQ = larger_SQ
        room_SQ[self.length : end] = new_TQ
        return room_SQ[:end]

    def delta(self, layer: int) -> DeltaState | None:
        return self.states.get(layer)

    def advance(self, count: int, tapes: dict[int, Tape]) -> None:
        """Take over what a forward pass of `count` positions did."""
        self.tapes = tapes
        self.states = {layer: tape.after for layer, tape in tapes.items()}
        self.length += count
        self.num_last = count

    def keep(self, count: int) -> None:
        self.length -= self.num_last - count
        self.num_last = count
        self.states = {layer: tape.state_after(count) for layer, tape in self.tapes.items()}

    def take(self, other: _KimiK3Row) -> None:
        """Be a row of another's positions. States are never written into, so both rows may hold the same ones."""
        self.rooms = {layer: room_SQ[: other.length].clone() for layer, room_SQ in other.rooms.items()}
        self.states = dict(other.states)
        self.length = other.length

    def clear(self) -> None:
        self.is_free, self.length, self.num_last = True, 0, 0
        self.rooms, self.states, self.tapes = {}, {}, {}


class KimiK3Target:
    """A target around a loaded model. `tap_stream`: which of its two streams the taps are."""

    def __init__(
        self,
        model: KimiK3Model,
        facts: TargetFacts,
        tap_layer_ids: Sequence[int] = (),
        *,
        tap_stream: TapStream = "prefix",
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self.facts, self.tap_layer_ids = facts, tuple(tap_layer_ids)
        self.tap_stream: TapStream = tap_stream
        self._embedding: Tensor = model.model.embed_tokens.weight
        self.dtype, self.device = self._embedding.dtype, self._embedding.device

    def with_stream(self, stream: TapStream) -> KimiK3Target:
        """Another target around the same model, whose taps are this stream."""
        return KimiK3Target(self._model, self.facts, self.tap_layer_ids, tap_stream=stream)

    def new_row(self) -> Row:
        return _KimiK3Row(self)

    def free(self, row: Row) -> None:
        self._owned(row).clear()

    @property
    def can_truncate(self) -> bool:
        return False

    def copy(self, row: Row, length: int | None = None) -> Row:
        source = self._owned(row)
        checked_length(source, length, can_truncate=False)
        made = _KimiK3Row(self)
        made.take(source)
        return made

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row, all rows in one pass; on an error every row is as it was."""
        owned = [self._owned(row) for row in rows]
        check_forward(ids, owned, num_logits, max_length=self.facts.max_length)
        if not owned:
            return []
        lengths = [x.shape[0] for x in ids]
        with torch.no_grad():
            ids_F = torch.cat([x.to(self.device) for x in ids])
            hidden_FD, taps, tapes = self._model.run(
                ids_F, owned, lengths, taps=self.tap_layer_ids, stream=self.tap_stream
            )
            logits = self._logits_of(hidden_FD, lengths, num_logits)
            taps_FND = torch.stack(taps, dim=1) if taps else hidden_FD.new_empty((len(ids_F), 0, hidden_FD.shape[1]))
        for index, (row, count) in enumerate(zip(owned, lengths, strict=True)):
            row.advance(count, {layer: of_rows[index] for layer, of_rows in tapes.items()})
        return [Scored(logits_TV=x, taps_TNE=y) for x, y in zip(logits, taps_FND.split(lengths), strict=True)]

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        if len(rows) != len(keep):
            raise ValueError(f"rollback of {len(rows)} rows was given {len(keep)} numbers to keep")
        owned = [self._owned(row) for row in rows]
        for row, kept in zip(owned, keep, strict=True):
            if row.is_free or not 0 <= kept <= row.num_last:
                raise ValueError(f"cannot keep {kept} positions: the last forward left {row.num_last}")
        with torch.no_grad():
            for row, kept in zip(owned, keep, strict=True):
                if kept < row.num_last:
                    row.keep(kept)

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return F.embedding(ids.to(self.device), self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self._model.lm_head(hidden)
            return logits

    # ---- inside ----
    def _owned(self, row: Row) -> _KimiK3Row:
        if not isinstance(row, _KimiK3Row) or row.owner is not self:
            raise ValueError("this row belongs to another target")
        return row

    def _logits_of(self, hidden_FD: Tensor, lengths: list[int], num_logits: int | None) -> list[Tensor]:
        if num_logits == 0:
            return [self._embedding.new_empty((0, self.facts.vocab_size)) for _ in lengths]
        kept = [count if num_logits is None else min(count, num_logits) for count in lengths]
        if kept != lengths:
            hidden_FD = torch.cat([x[-count:] for x, count in zip(hidden_FD.split(lengths), kept, strict=True)])
        return list(self._model.lm_head(hidden_FD).split(kept))
