"""States of earlier requests, kept for later ones that begin alike: target, recurrent state and draft context together.

Owns what is kept, within a number of bytes, the least recently used leaves first; and which kept states a new row may
begin with. Knows no queue and no steps.

A target whose rows can be cut (attention only) gives any common prefix, also that of a row that still runs; where it
cannot, or where the draft's windows have dropped what a shorter context would need, only a whole kept state fits, and
snapshots of prompts are taken: before a prompt's last token, and every ``snapshot_every`` positions of it.

A row that begins with kept states has the same states as one that computed them, up to the rounding of other shapes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockdraft.draft import DraftCache, DraftModel
from blockdraft.engine.row import RunningRow
from blockdraft.engine.step import inject_pending
from blockdraft.targets import Row as TargetRow
from blockdraft.targets import Target

__all__ = ["PrefixCache"]

_MIN_LENGTH = 8  # positions; less is sooner computed than copied
_ID_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """States after ``ids``; the draft's context is that of all of them, or not there."""

    ids: bytes
    target_row: TargetRow
    draft_cache: DraftCache | None
    num_bytes: int

    @property
    def length(self) -> int:
        return len(self.ids) // _ID_BYTES


class PrefixCache:
    """Kept states of one engine. ``max_bytes`` 0 keeps nothing."""

    def __init__(
        self, target: Target, draft: DraftModel | None, *, max_bytes: int, snapshot_every: int | None = None
    ) -> None:
        self._target, self._draft = target, draft
        self.max_bytes, self.snapshot_every = max_bytes, snapshot_every
        self._kept: list[_Kept] = []  # the least recently used first
        self.num_bytes = 0
        self.num_lookups = self.num_hits = 0
        has_window = draft is not None and any(layer.window is not None for layer in draft.config.layers)
        self._needs_snapshots = max_bytes > 0 and not target.can_truncate
        self._draft_needs_snapshots = max_bytes > 0 and has_window

    def __len__(self) -> int:
        return len(self._kept)

    # ---- for a row that begins ---------------------------------------------------------------------------------------
    def begin(self, row: RunningRow, running: Iterable[RunningRow]) -> int:
        """Give a new row its states, with as much of its prompt as is kept; returns how many positions that is.

        The prompt's last token is never among them: it has to be fed for the row's first token.
        """
        wants_draft = self._draft is not None and row.speculation_reason is None
        self.num_lookups += self.max_bytes > 0
        running_too = (_running(other) for other in running if other.num_fed >= _MIN_LENGTH)
        found, length = self._longest(row.request.prompt_ids, wants_draft, running_too)
        if found is None:
            row.target_row = self._target.new_row()
            row.draft_cache = self._draft.new_cache() if self._draft is not None and wants_draft else None
            return 0
        row.target_row = self._target.copy(found.target_row, length)
        if wants_draft:
            assert found.draft_cache is not None
            row.draft_cache = found.draft_cache.copy(length)
        row.num_fed = length
        row.stats.num_cached_prompt_tokens = length
        self.num_hits += 1
        if found in self._kept:
            self._touch(found)
        return length

    def renew(self, prompt_ids: Sequence[int], *, wants_draft: bool) -> None:
        """Count the states that a prompt would begin with as used now, so that others go before them."""
        found, _ = self._longest(prompt_ids, wants_draft)
        if found is not None:
            self._touch(found)

    def _longest(
        self, prompt_ids: Sequence[int], wants_draft: bool, more: Iterable[_Kept] = ()
    ) -> tuple[_Kept | None, int]:
        """The states, kept or given, that hold the most of a prompt but its last token, and how much; None, 0: none."""
        best, longest = None, _MIN_LENGTH - 1
        if self.max_bytes:
            wanted = _as_bytes(prompt_ids[:-1])
            for kept in (*self._kept, *more):
                length = self._usable(kept, wanted, wants_draft)
                if length > longest:
                    best, longest = kept, length
        return best, longest if best else 0

    def _usable(self, kept: _Kept, wanted: bytes, wants_draft: bool) -> int:
        """How many positions of these states a row that begins with ``wanted`` can have; 0 for none."""
        length = _common(kept.ids, wanted)
        if wants_draft:
            if kept.draft_cache is None:
                return 0
            length = min(length, kept.draft_cache.num_positions)
            if not kept.draft_cache.can_copy(length):
                return 0
        return length if self._target.can_truncate or length == kept.length else 0

    # ---- from a row that ran -----------------------------------------------------------------------------------------
    def keep(self, row: RunningRow) -> bool:
        """Keep the states of a row that has ended well. True: they are no longer the caller's to free."""
        if row.num_fed < _MIN_LENGTH or not self.max_bytes or row.target_row is None:
            return False
        inject_pending([row], self._draft)
        if self._target.can_truncate:
            return self._add(_running(row))
        self._add_copy(row)  # without what it would take a block back with
        return False

    def next_stop(self, row: RunningRow) -> int:
        """How far a row's prompt may be fed at once, so that the snapshots that are wanted can be taken."""
        if not self._wants_snapshots(row):
            return row.num_prompt
        stops = [row.num_prompt, row.num_prompt - 1]
        if self.snapshot_every is not None:
            stops.append((row.num_fed // self.snapshot_every + 1) * self.snapshot_every)
        return min(stop for stop in stops if stop > row.num_fed)

    def snapshot(self, row: RunningRow) -> None:
        """Keep a copy of a row's states if it stands where one is wanted."""
        is_boundary = self.snapshot_every is not None and row.num_fed % self.snapshot_every == 0
        if not self._wants_snapshots(row) or row.num_fed < _MIN_LENGTH or row.num_fed >= row.num_prompt:
            return
        if not (is_boundary or row.num_fed == row.num_prompt - 1):
            return
        inject_pending([row], self._draft)
        self._add_copy(row)

    def _add_copy(self, row: RunningRow) -> None:
        here = _running(row)
        covering = next((kept for kept in self._kept if self._covers(kept, here)), None)
        if covering is not None:
            self._touch(covering)
            return
        draft_cache = None if here.draft_cache is None else here.draft_cache.copy()
        copied = _made(here.ids, self._target.copy(here.target_row), draft_cache)
        if not self._add(copied):
            self._target.free(copied.target_row)

    def _wants_snapshots(self, row: RunningRow) -> bool:
        return self._needs_snapshots or (self._draft_needs_snapshots and row.draft_cache is not None)

    # ---- what is kept ------------------------------------------------------------------------------------------------
    def shrink(self, max_bytes: int) -> None:
        """Let the least recently used go until at most so many bytes are held."""
        while self._kept and self.num_bytes > max_bytes:
            self._drop(self._kept[0])

    def clear(self) -> None:
        self.shrink(-1)

    def check(self) -> None:
        """Nothing; an AssertionError names what does not add up."""
        assert self.num_bytes == sum(kept.num_bytes for kept in self._kept) <= max(self.max_bytes, 0)
        for kept in self._kept:
            assert not kept.target_row.was_freed, "kept states were freed"
            assert kept.target_row.num_positions == kept.length, "a kept row is not that of its ids"
            assert kept.draft_cache is None or kept.draft_cache.num_positions == kept.length
            assert kept.num_bytes == _bytes_of(kept.target_row, kept.draft_cache), "kept states changed their size"

    def _add(self, new: _Kept) -> bool:
        covering = next((kept for kept in self._kept if self._covers(kept, new)), None)
        if covering is not None:
            self._touch(covering)
            return False
        if new.num_bytes > self.max_bytes:
            return False
        for kept in [kept for kept in self._kept if self._covers(new, kept)]:
            self._drop(kept)
        self.shrink(self.max_bytes - new.num_bytes)
        self._kept.append(new)
        self.num_bytes += new.num_bytes
        return True

    def _covers(self, one: _Kept, other: _Kept) -> bool:
        """Whether ``one`` is as good as ``other`` for every row that could begin with that."""
        if not one.ids.startswith(other.ids):
            return False
        if other.draft_cache is not None and (one.draft_cache is None or not one.draft_cache.can_copy(other.length)):
            return False
        return self._target.can_truncate or one.length == other.length

    def _touch(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self.num_bytes -= kept.num_bytes
        self._target.free(kept.target_row)


def _running(row: RunningRow) -> _Kept:
    """The states of a running row, as they are now."""
    assert row.target_row is not None
    return _made(_as_bytes(row.ids[: row.num_fed]), row.target_row, row.draft_cache)


def _made(ids: bytes, target_row: TargetRow, draft_cache: DraftCache | None) -> _Kept:
    return _Kept(ids, target_row, draft_cache, _bytes_of(target_row, draft_cache))


def _bytes_of(target_row: TargetRow, draft_cache: DraftCache | None) -> int:
    return target_row.num_bytes + (0 if draft_cache is None else draft_cache.num_bytes)


def _as_bytes(ids: Sequence[int]) -> bytes:
    """Ids in a form whose beginnings compare at the speed of memory."""
    return array("i", ids).tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Ids that both begin with."""
    low, high = 0, min(len(one), len(other)) // _ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[: middle * _ID_BYTES]):
            low = middle
        else:
            high = middle - 1
    return low
