"""The engine: requests in, token events out, one continuous batch of rows.

Owns admission and the lifetime of rows. The maths of a step is step.py's, the order of work scheduler.py's; words are
text.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from blockdraft.draft import DraftModel
from blockdraft.engine.constraint import GrammarCache
from blockdraft.engine.decide import Decide, decide
from blockdraft.engine.fit import check_fit, check_request, check_stream
from blockdraft.engine.integrity import check_rows
from blockdraft.engine.memory import Costs, measure_costs
from blockdraft.engine.prefix import PrefixCache
from blockdraft.engine.request import Completion, Request, TokenEvent
from blockdraft.engine.row import RunningRow
from blockdraft.engine.scheduler import Queue, Ticket, prompt_chunks
from blockdraft.engine.step import Chunk, decode_step
from blockdraft.engine.times import now_s
from blockdraft.engine.width import FixedWidth, WidthPolicy
from blockdraft.errors import RequestError
from blockdraft.stats import EngineStats
from blockdraft.targets import Target
from blockdraft.text import StopScanner, Tokenizer

if TYPE_CHECKING:
    from blockdraft.engine.tap_stream import TapChoice

__all__ = ["Engine", "Ticket"]


class Engine:
    """Runs requests on one target, with a draft or without.

    Rows join and leave at any step; at most `max_rows` run at once, and at most `max_waiting` wait (None: any number).
    A step feeds at most `prefill_chunk_size` positions of prompts, `mixed_chunk_size` beside rows that decode (None: 64
    on a CPU, 512 elsewhere). `memory_limit` bounds the bytes of all states, running and kept: a request is admitted
    when its whole possible length has room, and refused if it never could. `prefix_cache_bytes` of states are kept for
    later requests that begin alike; 0 keeps none. `prefix_snapshot_every` positions of a prompt a state is kept where
    a target's rows cannot be cut. `width_policy` None gives every row its own width. `draft_off_reason` says why there
    is no draft, for requests that would have used one. `allow_mask_is_eos` consents to a draft whose mask id ends or
    pads a text of this target.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftModel | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        draft_off_reason: str = "the engine was started without a draft",
        max_rows: int = 16,
        max_waiting: int | None = None,
        prefill_chunk_size: int = 512,
        mixed_chunk_size: int | None = None,
        memory_limit: int | None = None,
        prefix_cache_bytes: int = 0,
        prefix_snapshot_every: int | None = None,
        width_policy: WidthPolicy | None = None,
        allow_mask_is_eos: bool = False,
    ) -> None:
        if draft is not None:
            own = {"embed_tokens.weight": draft.own_embedding, "lm_head.weight": draft.own_head}
            check_fit(
                draft.config,
                target.facts,
                own=[name for name, value in own.items() if value is not None],
                allow_mask_is_eos=allow_mask_is_eos,
            )
            assert tuple(target.tap_layer_ids) == tuple(draft.config.target_layer_ids)
            check_stream(target, draft.config)
        _check_limits(
            max_rows=max_rows,
            max_waiting=max_waiting,
            prefill_chunk_size=prefill_chunk_size,
            mixed_chunk_size=mixed_chunk_size,
            memory_limit=memory_limit,
            prefix_cache_bytes=prefix_cache_bytes or None,
            prefix_snapshot_every=prefix_snapshot_every,
        )
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.draft_off_reason = draft_off_reason
        self.tap_choice: TapChoice | None = None  # of load(..., tap_stream="auto")
        self.max_rows, self.max_waiting = max_rows, max_waiting
        self.prefill_chunk_size = prefill_chunk_size
        self.mixed_chunk_size = mixed_chunk_size or min(prefill_chunk_size, 64 if target.device.type == "cpu" else 512)
        self.memory_limit = memory_limit
        self.width_policy: WidthPolicy = FixedWidth() if width_policy is None else width_policy
        self.decide: Decide = decide  # an examination puts its observer here
        self.grammars = GrammarCache(tokenizer, vocab_size=target.facts.vocab_size)
        self._costs: Costs | None = None  # measured when first asked for
        self._prefixes = PrefixCache(target, draft, max_bytes=prefix_cache_bytes, snapshot_every=prefix_snapshot_every)
        self._stats = EngineStats()
        self._waiting = Queue()
        self._running: list[Ticket] = []

    # ---- requests in -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises RequestError at once for anything that can't be served as asked."""
        self.check(request)
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting and the queue takes {self.max_waiting}; try again later"
            )
        ticket = Ticket(request, None if request.grammar is None else self.grammars.compiled(request.grammar))
        self._waiting.join(ticket, self._stats.num_steps)
        return ticket

    def check(self, request: Request) -> None:
        """Nothing; a RequestError if this engine cannot serve the request as asked."""
        check_request(
            request,
            self.target.facts,
            self.draft,
            has_tokenizer=self.tokenizer is not None,
            draft_off_reason=self.draft_off_reason,
        )
        if request.grammar is not None:
            self.grammars.begin(self.grammars.compiled(request.grammar), self._stop_ids(request))
        if self.memory_limit is not None and (need := self.bytes_needed(request)) > self.memory_limit:
            raise RequestError(
                f"a prompt of {len(request.prompt_ids)} tokens and max_new_tokens {request.max_new_tokens} need "
                f"{_megabytes(need)} of memory, above the engine's memory_limit of {_megabytes(self.memory_limit)}; "
                "shorten one of them"
            )

    @torch.inference_mode()
    def cancel(self, ticket: Ticket) -> None:
        """End a request now; its memory is free at once. A finished ticket stays as it is.

        Not to be called while `step` runs.
        """
        if ticket.is_finished:
            return
        if self._waiting.leave(ticket):
            ticket.row = self._new_row(ticket.request)
        assert ticket.row is not None
        ticket.row.finish("cancelled", None)
        self._retire(ticket)

    # ---- work --------------------------------------------------------------------------------------------------------
    @property
    def num_running(self) -> int:
        """Requests whose prompt or text is worked on."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then advance every running row by one step, and prompts by what a step has room for."""
        started = now_s()
        self._admit()
        if not self._running:
            return
        try:
            phases_s = self._advance([ticket.row for ticket in self._running if ticket.row is not None])
        except BaseException:
            for ticket in list(self._running):  # a step that broke off leaves no row that could go on
                self._abandon(ticket)
            raise
        for ticket in [t for t in self._running if t.row is not None and t.row.is_finished]:
            self._retire(ticket)
        if not self._running and not self._waiting:
            self.check_integrity()
        self._stats.other_s += now_s() - started - phases_s

    def _advance(self, running: Sequence[RunningRow]) -> float:
        """One step of all rows; returns the seconds of its phases."""
        rows = [row for row in running if row.target_row is not None and not row.num_unfed]
        chunks = list(self._chunks(running, self.mixed_chunk_size if rows else self.prefill_chunk_size))
        max_draft_length = None if self.draft is None else self.draft.max_length
        most = [row.most_width(max_draft_length) for row in rows]
        widths = self.width_policy.choose(rows, most)
        assert all(1 <= width <= limit for width, limit in zip(widths, most, strict=True)), (widths, most)
        offers = self.width_policy.offers(rows, widths)
        times, num_accepted = decode_step(
            rows, widths, self.target, self.draft, chunks, offers=offers, decide=self.decide
        )
        self.width_policy.record(rows, widths, num_accepted, times)
        for chunk in chunks:
            self._prefixes.snapshot(chunk.row)
        self._stats.add_step(times)
        return times.total_s

    def _chunks(self, running: Sequence[RunningRow], budget: int) -> Iterator[Chunk]:
        """The parts of prompts that this step feeds; a row gets its states when it gets its first part."""

        def beginning() -> Iterator[RunningRow]:
            for row in running:
                if row.target_row is None:
                    self._stats.num_cached_prompt_tokens += self._prefixes.begin(row, running)
                if row.num_unfed:
                    yield row

        return prompt_chunks(beginning(), budget, self._prefixes.next_stop)

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of `requests`, in their order. All are checked before the first one runs.

        Raises RequestError when one of them breaks, and cancels the others; who wants to keep those submits them.
        """
        for request in requests:
            self.check(request)
        left = deque(requests)
        tickets: list[Ticket] = []
        try:
            while left or not all(ticket.is_finished for ticket in tickets):
                while left and (self.max_waiting is None or self.num_waiting < self.max_waiting):
                    tickets.append(self.submit(left.popleft()))
                self.step()
                for ticket in tickets:
                    _raise_if_broken(ticket)
        except BaseException:
            for ticket in tickets:
                self.cancel(ticket)
            raise
        return [ticket.completion for ticket in tickets if ticket.completion is not None]

    def stream(self, request: Request) -> Iterator[list[TokenEvent]]:
        """The events of each step of one request as they are committed. Closing the iterator cancels the request.

        The request is checked at once and joins the queue when the first events are asked for.
        """
        self.check(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[list[TokenEvent]]:
        yield from self.follow(self.submit(request))

    def follow(self, ticket: Ticket) -> Iterator[list[TokenEvent]]:
        """The events of a submitted request, driving the engine until it is finished; closing cancels it.

        Raises RequestError after the last event of a request that broke.
        """
        try:
            sent = 0
            while True:
                row = ticket.row
                if row is not None and len(row.events) > sent:
                    fresh, sent = row.events[sent:], len(row.events)
                    yield fresh
                if ticket.is_finished:
                    _raise_if_broken(ticket)
                    return
                self.step()
        finally:
            self.cancel(ticket)

    # ---- rows --------------------------------------------------------------------------------------------------------
    def _stop_ids(self, request: Request) -> frozenset[int]:
        return frozenset(self.target.facts.eos_token_ids) if request.stop_ids is None else request.stop_ids

    def _new_row(self, request: Request) -> RunningRow:
        """A row without states yet."""
        reason, width = None, 1
        if request.speculate is False:
            reason = "the request asked for plain decoding"
        elif self.draft is None:
            reason = self.draft_off_reason
        else:
            width = self.draft.config.max_width if request.width is None else request.width
        return RunningRow(
            request=request,
            stop_ids=self._stop_ids(request),
            width=width,
            scanner=None
            if self.tokenizer is None
            else StopScanner(
                self.tokenizer, request.stop_strings, visible_special_tokens=request.visible_special_tokens
            ),
            speculation_reason=reason,
        )

    def _admit(self) -> None:
        """Let those in line run, in order, as long as there is a row and memory for the next one."""
        while self._waiting and len(self._running) < self.max_rows and self._reserve(self._waiting.head):
            ticket = self._waiting.pop()
            ticket.row = row = self._new_row(ticket.request)
            if ticket.grammar is not None:
                row.constraint = self.grammars.begin(ticket.grammar, row.stop_ids)
            self._running.append(ticket)

    def bytes_needed(self, request: Request) -> int:
        """Memory that is set aside for this request while it runs: for its whole possible length, target and draft."""
        if self._costs is None:
            self._costs = measure_costs(self.target, self.draft)
        return self._costs.of_request(request, has_draft=self.draft is not None)

    def _reserve(self, ticket: Ticket) -> bool:
        """Set memory aside for a request; kept prefixes make room for it."""
        if self.memory_limit is None:
            return True
        need = self.bytes_needed(ticket.request)
        free = self.memory_limit - self._reserved_bytes
        if need > free:
            return False
        if free - need < self._prefixes.num_bytes:
            wants_draft = self.draft is not None and ticket.request.speculate is not False
            self._prefixes.renew(ticket.request.prompt_ids, wants_draft=wants_draft)
            self._prefixes.shrink(free - need)
        ticket.num_reserved_bytes = need
        return True

    @property
    def _reserved_bytes(self) -> int:
        return sum(ticket.num_reserved_bytes for ticket in self._running)

    def _abandon(self, ticket: Ticket) -> None:
        """End a request whose step broke off: what that step had begun is dropped."""
        assert ticket.row is not None
        ticket.row.drop_uncounted()
        ticket.row.finish("cancelled", None)
        self._retire(ticket, is_whole=False)

    def _retire(self, ticket: Ticket, *, is_whole: bool = True) -> None:
        """Make a finished row's completion, and keep its states or let them go; not `is_whole`: they may be torn."""
        row = ticket.row
        assert row is not None
        if ticket in self._running:
            self._running.remove(ticket)
        row.stats.check()
        ticket.completion = row.completion()
        self._stats.add_request(row.stats, ticket.completion.finish_reason)
        is_kept = False
        try:
            is_kept = is_whole and row.error is None and self._prefixes.keep(row)
        finally:
            if row.target_row is not None and not is_kept:
                self.target.free(row.target_row)
            row.target_row = row.draft_cache = None
            row.drop_pending()
        if self.memory_limit is not None:
            self._prefixes.shrink(self.memory_limit - self._reserved_bytes)

    # ---- looking inside ----------------------------------------------------------------------------------------------
    def stats(self) -> EngineStats:
        """What this engine did so far, and what it holds now."""
        rows = [ticket.row for ticket in self._running if ticket.row is not None]
        return replace(
            self._stats,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            target_bytes=sum(row.target_row.num_bytes for row in rows if row.target_row is not None),
            draft_bytes=sum(row.num_draft_bytes for row in rows),
            prefix_bytes=self._prefixes.num_bytes,
            reserved_bytes=self._reserved_bytes,
            num_prefixes=len(self._prefixes),
            num_prefix_lookups=self._prefixes.num_lookups,
            num_prefix_hits=self._prefixes.num_hits,
        )

    def check_integrity(self) -> None:
        """Nothing; an AssertionError names the first thing that does not add up. Run when the engine becomes idle."""
        check_rows([ticket.row for ticket in self._running if ticket.row is not None])
        self._prefixes.check()
        assert self.memory_limit is None or self._reserved_bytes + self._prefixes.num_bytes <= self.memory_limit

    def clear_prefixes(self) -> None:
        """Let go of all kept prefixes."""
        self._prefixes.clear()


def _raise_if_broken(ticket: Ticket) -> None:
    if ticket.completion is not None and ticket.completion.error is not None:
        raise RequestError(ticket.completion.error)


def _check_limits(**limits: int | None) -> None:
    for name, value in limits.items():
        if value is not None and (type(value) is not int or value < 1):
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
