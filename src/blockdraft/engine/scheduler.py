"""Who is next, and how much of whose prompt is fed: the waiting line and the prompt budget of a step.

Owns the order of work. Knows no models and no memory.

Order of the line: a request of priority p that joined at step s stands at ``p * AGEING_STEPS + s``, lowest first, then
in the order of joining. So lower priorities go first, equal ones in turn, and one level of priority is worth
AGEING_STEPS steps of waiting: nobody waits for ever behind others that keep coming. The head of the line is never
passed by one behind it that would need less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from blockdraft.engine.request import Completion, Request
from blockdraft.engine.row import RunningRow
from blockdraft.engine.step import Chunk
from blockdraft.text import CompiledGrammar

__all__ = ["AGEING_STEPS", "Queue", "Ticket", "prompt_chunks"]

AGEING_STEPS = 100


class Ticket:
    """A submitted request: waiting, running, or finished with a completion."""

    def __init__(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        self.request, self.grammar = request, grammar
        self.row: RunningRow | None = None
        self.completion: Completion | None = None
        self.num_reserved_bytes = 0
        """Memory set aside for it while it runs; 0 where the engine has no limit."""

    @property
    def is_finished(self) -> bool:
        return self.completion is not None


class Queue:
    """The waiting line."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Ticket]] = []
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Ticket]:
        """In no particular order."""
        return (ticket for _, _, ticket in self._heap)

    def join(self, ticket: Ticket, step: int) -> None:
        place = ticket.request.priority * AGEING_STEPS + step
        heappush(self._heap, (place, next(self._arrivals), ticket))

    @property
    def head(self) -> Ticket:
        return self._heap[0][2]

    def pop(self) -> Ticket:
        return heappop(self._heap)[2]

    def leave(self, ticket: Ticket) -> bool:
        """Take a ticket out of the line; False if it does not stand in it."""
        rest = [entry for entry in self._heap if entry[2] is not ticket]
        was_there = len(rest) < len(self._heap)
        self._heap = rest
        heapify(self._heap)
        return was_there


def prompt_chunks(
    rows: Iterable[RunningRow], budget: int, next_stop: Callable[[RunningRow], int] = lambda row: row.num_prompt
) -> Iterator[Chunk]:
    """Parts of the prompts of these rows, at most ``budget`` positions in all, the rows in turn.

    ``next_stop(row)`` is the position up to which a row's prompt may be fed at once. No row is asked for in vain.
    """
    for row in rows:
        size = min(budget, next_stop(row) - row.num_fed)
        budget -= size
        yield Chunk(row, size)
        if not budget:
            return
