"""What must hold for every running row between two steps. Owns the list of it; reads states, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.engine.row import RunningRow

__all__ = ["check_rows"]


def check_rows(rows: Sequence[RunningRow]) -> None:
    """Nothing; an AssertionError names the first row, and what of it does not hold."""
    states = [id(row.target_row) for row in rows if row.target_row is not None]
    assert len(set(states)) == len(states), "two requests share a row of the target"
    for index, row in enumerate(rows):
        try:
            _check_row(row)
        except AssertionError as error:
            raise AssertionError(f"running row {index}: {error}") from error


def _check_row(row: RunningRow) -> None:
    assert not row.is_finished, "it is finished"
    if row.target_row is None:
        assert row.num_fed == row.num_pending == row.num_emitted == 0, "it was worked on and has no states"
        return
    held = row.target_row.num_positions
    assert held == row.num_fed, f"the target holds {held} positions, {row.num_fed} were kept"
    if row.num_unfed:
        assert row.num_emitted == 0, "it emitted before its prompt was fed"
    else:
        assert len(row.ids) == row.num_fed + 1, f"{len(row.ids)} ids after {row.num_fed} positions and an anchor"
        assert row.events[-1].kind != "accepted", "its anchor was not decided by the target"
    waiting = sum(taps.shape[0] for taps in row.pending_taps)
    assert waiting == row.num_pending, f"taps of {waiting} positions wait, {row.num_pending} were counted"
    if row.draft_cache is None:
        assert not waiting, "taps wait for a draft that it does not use"
    else:
        known = row.draft_cache.num_positions
        assert known + waiting == row.num_fed, f"the draft knows {known} + {waiting} of {row.num_fed} positions"
    assert len(row.events) == row.num_emitted == row.stats.num_emitted_tokens, "events, ids and counters differ"
    row.stats.check()
