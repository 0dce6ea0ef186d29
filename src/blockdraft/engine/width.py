"""How wide each row's next block is. Owns the choice; the step only carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from blockdraft.engine.row import RunningRow
from blockdraft.engine.times import StepTimes

__all__ = ["FixedWidth", "WidthPolicy"]


class WidthPolicy(Protocol):
    """Chooses the widths of a step, and learns from what came of them."""

    def choose(self, rows: Sequence[RunningRow], most: Sequence[int]) -> list[int]:
        """The width of each row's next block, 1 <= width <= most of the row; 1 is a plain step."""
        ...

    def offers(self, rows: Sequence[RunningRow], widths: Sequence[int]) -> Sequence[Sequence[int] | None]:
        """Called after ``choose``: width - 1 proposals of a row that need no draft, None where the draft makes them.

        They may depend on the row's ids so far and on nothing else: then their law is one-hot, and lossless.
        """
        ...

    def record(
        self, rows: Sequence[RunningRow], widths: Sequence[int], num_accepted: Sequence[int], times: StepTimes
    ) -> None:
        """What a step with these widths gave; called after every step."""
        ...


class FixedWidth:
    """Each row's own width, as long as there is room for it."""

    def choose(self, rows: Sequence[RunningRow], most: Sequence[int]) -> list[int]:
        return [min(row.width, limit) for row, limit in zip(rows, most, strict=True)]

    def offers(self, rows: Sequence[RunningRow], widths: Sequence[int]) -> Sequence[Sequence[int] | None]:
        return [None] * len(rows)

    def record(
        self, rows: Sequence[RunningRow], widths: Sequence[int], num_accepted: Sequence[int], times: StepTimes
    ) -> None:
        pass
