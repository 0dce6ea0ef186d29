"""What is examined: something that continues prompts in steps, and lets its steps be seen.

`System` is all that the exam asks of it; `EngineSystem` gives it for an engine of this package. How the engine judges
proposals may be replaced (`decide`), which is how the exam itself is tested.

Letters: G proposals of a step, M candidates, V vocabulary, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.config import TargetFacts
from blockdraft.draft import CandidateLists, Proposal
from blockdraft.engine import Completion, Engine, Request, Ticket
from blockdraft.engine.decide import Decide, Decision
from blockdraft.engine.row import RunningRow
from blockdraft.errors import RequestError

__all__ = ["EngineSystem", "Step", "System", "Trace"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what was proposed, the law acceptance was told (None: one-hot), and what was decided.

    The first proposal stands at index `start` of prompt and text together.
    """

    start: int
    proposals: tuple[int, ...]
    told: tuple[Tensor, Tensor] | None  # ids_GM, probs_GM: a list of candidates for each proposal
    num_accepted: int
    next_id: int

    @property
    def committed(self) -> tuple[int, ...]:
        return (*self.proposals[: self.num_accepted], self.next_id)

    def q_row(self, index: int, vocab_size: int) -> Tensor:
        """The law that proposal `index` is said to come from, [V] float64."""
        row_V = torch.zeros(vocab_size, dtype=torch.float64)
        if self.told is None:
            row_V[self.proposals[index]] = 1.0
            return row_V
        ids_GM, probs_GM = self.told
        return row_V.index_add_(0, ids_GM[index], probs_GM[index].double())


@dataclass(slots=True)
class Trace:
    """The steps of one request, with everything they committed: also what a limit or a stop then cut away."""

    request: Request
    first_id: int | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Prompt, first token, and what the steps committed."""
        ids = [*self.request.prompt_ids]
        if self.first_id is not None:
            ids.append(self.first_id)
        for step in self.steps:
            ids.extend(step.committed)
        return ids


class System(Protocol):
    """What an exam needs to be able to ask."""

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def max_width(self) -> int:
        """The widest block that a request may ask for."""
        ...

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in order; the requests run together."""
        ...

    def trace(
        self, requests: Sequence[Request], *, first_ids: Sequence[int] | None = None, num_steps: int | None = None
    ) -> list[Trace]:
        """The steps of the requests, which run together.

        `first_ids` sets each one's first token instead of letting the prefill decide it; `num_steps` ends each after so
        many steps.
        """
        ...

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The target's own logits [T, V] over a text that is fed at once to an empty row: no draft, no blocks."""
        ...


class EngineSystem:
    """An engine under examination. `decide` takes the place of the engine's own judgement of proposals."""

    def __init__(self, engine: Engine, *, decide: Decide | None = None) -> None:
        assert engine.draft is not None, "an engine without a draft has nothing to examine"
        self.engine = engine
        self._decide = engine.decide if decide is None else decide
        engine.decide = self._decide

    @property
    def facts(self) -> TargetFacts:
        return self.engine.target.facts

    @property
    def max_width(self) -> int:
        assert self.engine.draft is not None
        return self.engine.draft.config.max_width

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.run(requests)

    def trace(
        self, requests: Sequence[Request], *, first_ids: Sequence[int] | None = None, num_steps: int | None = None
    ) -> list[Trace]:
        traces = {id(request): Trace(request) for request in requests}
        assert len(traces) == len(requests), "a request object can be traced once at a time"
        firsts = {} if first_ids is None else {id(r): i for r, i in zip(requests, first_ids, strict=True)}

        def watched(
            rows: Sequence[RunningRow], proposals: Sequence[Proposal | None], logits: Sequence[Tensor]
        ) -> list[Decision]:
            starts = [len(row.ids) for row in rows]
            decisions = self._decide(rows, proposals, logits)
            for index, (row, proposal, start) in enumerate(zip(rows, proposals, starts, strict=True)):
                trace, decision = traces[id(row.request)], decisions[index]
                if decision.error is not None:
                    continue
                if trace.first_id is None:
                    trace.first_id = firsts.get(id(row.request), decision.ids[-1])
                    decisions[index] = Decision([trace.first_id], 0)
                    continue
                drafted = () if proposal is None else tuple(proposal.ids_G.tolist())
                trace.steps.append(Step(start, drafted, _told(proposal), decision.num_accepted, decision.ids[-1]))
            return decisions

        engine = self.engine
        engine.decide = watched
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(engine.submit(request))
            while not all(ticket.is_finished for ticket in tickets):
                engine.step()
                for ticket in tickets:
                    if ticket.completion is not None and ticket.completion.error is not None:
                        raise RequestError(ticket.completion.error)
                    if num_steps is not None and len(traces[id(ticket.request)].steps) >= num_steps:
                        engine.cancel(ticket)
        finally:
            engine.decide = self._decide
            for ticket in tickets:
                engine.cancel(ticket)
        return list(traces.values())

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        target = self.engine.target
        row = target.new_row()
        try:
            [scored] = target.forward([torch.tensor(list(ids), dtype=torch.long, device=target.device)], [row])
        finally:
            target.free(row)
        return scored.logits_TV


def _told(proposal: Proposal | None) -> tuple[Tensor, Tensor] | None:
    law = None if proposal is None else proposal.q
    if law is None:
        return None
    if isinstance(law, CandidateLists):
        return law.ids_GM.cpu(), law.probs_GM.cpu()
    probs_GV = law.probs_GV.cpu()
    return torch.arange(probs_GV.shape[1]).expand_as(probs_GV), probs_GV
