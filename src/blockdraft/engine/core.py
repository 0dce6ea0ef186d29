"""The engine: requests in, token events out, one continuous batch of rows.

Owns admission and the lifetime of rows. The maths of a step is step.py's, the order of work scheduler.py's; words are
text.py's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from blockdraft.config import DraftConfig, TargetFacts, check_pair
from blockdraft.draft import DraftModel
from blockdraft.engine.decide import Decide, decide
from blockdraft.engine.request import Completion, Request, TokenEvent
from blockdraft.engine.row import RunningRow
from blockdraft.engine.scheduler import Queue, Ticket, prompt_chunks
from blockdraft.engine.step import decode_step
from blockdraft.engine.width import FixedWidth, WidthPolicy
from blockdraft.errors import PairError, RequestError
from blockdraft.targets import Target
from blockdraft.text import StopScanner, Tokenizer

if TYPE_CHECKING:
    from blockdraft.engine.tap_stream import TapChoice

__all__ = ["Engine", "Ticket"]


def check_fit(
    draft: DraftConfig, target: TargetFacts, *, own: Collection[str], allow_mask_is_eos: bool = False
) -> None:
    """Raise PairError if the engine cannot run this pair. `own` names the tensors that the draft brings itself."""
    check_pair(
        draft,
        target,
        has_own_embedding="embed_tokens.weight" in own,
        has_own_head="lm_head.weight" in own,
        allow_mask_is_eos=allow_mask_is_eos,
    )
    if draft.vocab_size != target.vocab_size:  # a rule that a config alone leaves open; ids must mean the same
        raise PairError(
            f"the draft has {draft.vocab_size} ids and the target {target.vocab_size}; use a draft made for it"
        )


def _check_stream(target: Target, draft: DraftConfig) -> None:
    streams = target.facts.tap_streams
    if draft.tap_stream is None and len(streams) > 1:
        raise PairError(
            f"the draft does not say which stream of {target.facts.model_type} it reads; name it with tap_stream: "
            f"{', '.join(map(repr, streams))}, or 'auto', which measures both"
        )
    read = draft.tap_stream or "prefix"
    if target.tap_stream != read:
        raise PairError(
            f"the target's taps are the stream {target.tap_stream!r} and the draft reads {read!r}; "
            f"load the target with tap_stream={read!r}"
        )


class Engine:
    """Runs requests on one target, with a draft or without.

    `draft_off_reason` says why there is no draft, for requests that would have used one. Rows join and leave at any
    step; at most `max_rows` run at once, in the order of submission. `allow_mask_is_eos` consents to a draft whose mask
    id ends or pads a text of this target.
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
            _check_stream(target, draft.config)
        if mixed_chunk_size is None:
            mixed_chunk_size = min(prefill_chunk_size, 64 if target.device.type == "cpu" else 512)
        for name, value in (
            ("max_rows", max_rows),
            ("prefill_chunk_size", prefill_chunk_size),
            ("mixed_chunk_size", mixed_chunk_size),
            ("max_waiting", 1 if max_waiting is None else max_waiting),
        ):
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
        self.target, self.draft, self.tokenizer = target, draft, tokenizer
        self.draft_off_reason = draft_off_reason
        self.tap_choice: TapChoice | None = None  # of load(..., tap_stream="auto")
        self.max_rows, self.prefill_chunk_size = max_rows, prefill_chunk_size
        self.mixed_chunk_size = mixed_chunk_size
        self.max_waiting = max_waiting
        self.width_policy: WidthPolicy = FixedWidth() if width_policy is None else width_policy
        self.decide: Decide = decide  # an examination puts its observer here
        self._waiting = Queue()
        self._running: list[Ticket] = []
        self._num_steps = 0

    # ---- requests in -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> Ticket:
        """Queue a request. Raises RequestError at once for anything that can't be served as asked."""
        self.check(request)
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            raise RequestError(
                f"{len(self._waiting)} requests are waiting and the queue takes {self.max_waiting}; try again later"
            )
        ticket = Ticket(request)
        self._waiting.join(ticket, self._num_steps)
        return ticket

    def check(self, request: Request) -> None:
        """Nothing; a RequestError if this engine cannot serve the request as asked."""
        facts = self.target.facts
        longest = len(request.prompt_ids) + request.max_new_tokens
        if longest > facts.max_length:
            raise RequestError(
                f"prompt of {len(request.prompt_ids)} tokens + max_new_tokens {request.max_new_tokens} = {longest}, "
                f"above the target's {facts.max_length} positions; shorten one of them"
            )
        highest = max(request.prompt_ids)
        if highest >= facts.vocab_size:
            raise RequestError(
                f"prompt_ids holds {highest}; the target has {facts.vocab_size} ids; use the target's tokenizer"
            )
        request.sampling.check_vocab(facts.vocab_size)
        if request.stop_ids and max(request.stop_ids) >= facts.vocab_size:
            raise RequestError(
                f"stop_ids holds {max(request.stop_ids)}; the target has ids 0 to {facts.vocab_size - 1}; remove it"
            )
        ends = facts.eos_token_ids if request.stop_ids is None else request.stop_ids
        if request.min_new_tokens > 0 and len(ends) >= facts.vocab_size:
            raise RequestError(
                f"min_new_tokens is {request.min_new_tokens} and all {facts.vocab_size} ids are stop ids, so that no "
                "first token is left; lower it to 0 or name fewer stop ids"
            )
        if request.num_logprobs is not None and request.num_logprobs > facts.vocab_size:
            raise RequestError(f"num_logprobs is {request.num_logprobs}; the target has {facts.vocab_size} ids")
        if request.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer; give the engine one, or use stop_ids")
        if request.speculate is True and self.draft is None:
            raise RequestError(f"speculation is demanded, but {self.draft_off_reason}; load a draft that fits")
        if request.width is not None:
            self._check_width(request.width)
        if request.min_confidence > 0.0:
            self._check_confidence(request.min_confidence)
        if request.speculate is True and self.draft is not None:
            width = min(request.width or self.draft.config.max_width, request.max_new_tokens - 1)
            if width > 1 and len(request.prompt_ids) + width > self.draft.max_length:
                raise RequestError(
                    f"speculation is demanded, but the prompt of {len(request.prompt_ids)} tokens leaves no block of "
                    f"{width} below the draft's maximum length of {self.draft.max_length}; shorten it, or do not demand"
                )

    def _check_width(self, width: int) -> None:
        if self.draft is None:
            raise RequestError(f"width is {width}, but {self.draft_off_reason}; drop the width or load a draft")
        trained = self.draft.config.max_width
        if width > trained:
            raise RequestError(f"width is {width}; the draft was trained for at most {trained}; use 2 to {trained}")

    def _check_confidence(self, least: float) -> None:
        if self.draft is None:
            raise RequestError(f"min_confidence is {least:g}, but {self.draft_off_reason}; drop it or load a draft")
        if self.draft.config.confidence is None:
            raise RequestError(f"min_confidence is {least:g}; this draft has no confidence head; drop it")

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
        while self._waiting and len(self._running) < self.max_rows:
            self._admit(self._waiting.pop())
        if not self._running:
            return
        self._num_steps += 1
        try:
            self._advance([ticket.row for ticket in self._running if ticket.row is not None])
        except BaseException:
            for ticket in list(self._running):  # a step that broke off leaves no row that could go on
                self._abandon(ticket)
            raise
        for ticket in [t for t in self._running if t.row is not None and t.row.is_finished]:
            self._retire(ticket)

    def _advance(self, running: Sequence[RunningRow]) -> None:
        rows = [row for row in running if not row.num_unfed]
        budget = self.mixed_chunk_size if rows else self.prefill_chunk_size
        chunks = list(prompt_chunks((row for row in running if row.num_unfed), budget))
        max_draft_length = None if self.draft is None else self.draft.max_length
        most = [row.most_width(max_draft_length) for row in rows]
        widths = self.width_policy.choose(rows, most)
        assert all(1 <= width <= limit for width, limit in zip(widths, most, strict=True)), (widths, most)
        times, num_accepted = decode_step(rows, widths, self.target, self.draft, chunks, decide=self.decide)
        self.width_policy.record(rows, widths, num_accepted, times)

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
    def _new_row(self, request: Request) -> RunningRow:
        """A row without states yet."""
        facts = self.target.facts
        reason, width = None, 1
        if request.speculate is False:
            reason = "the request asked for plain decoding"
        elif self.draft is None:
            reason = self.draft_off_reason
        else:
            width = self.draft.config.max_width if request.width is None else request.width
        return RunningRow(
            request=request,
            stop_ids=frozenset(facts.eos_token_ids) if request.stop_ids is None else request.stop_ids,
            width=width,
            scanner=None if self.tokenizer is None else StopScanner(self.tokenizer, request.stop_strings),
            speculation_reason=reason,
        )

    def _admit(self, ticket: Ticket) -> None:
        row = ticket.row = self._new_row(ticket.request)
        row.target_row = self.target.new_row()
        if self.draft is not None and row.speculation_reason is None:
            row.draft_cache = self.draft.new_cache()
        self._running.append(ticket)

    def _abandon(self, ticket: Ticket) -> None:
        """End a request whose step broke off: what that step had begun is dropped."""
        assert ticket.row is not None
        ticket.row.drop_uncounted()
        ticket.row.finish("cancelled", None)
        self._retire(ticket)

    def _retire(self, ticket: Ticket) -> None:
        """Let go of a finished row's states and make its completion."""
        row = ticket.row
        assert row is not None
        if ticket in self._running:
            self._running.remove(ticket)
        if row.target_row is not None:
            self.target.free(row.target_row)
        row.draft_cache = None
        row.drop_pending()
        row.stats.check()
        ticket.completion = row.completion()


def _raise_if_broken(ticket: Ticket) -> None:
    if ticket.completion is not None and ticket.completion.error is not None:
        raise RequestError(ticket.completion.error)
