"""One running request: its ids, its target row, its draft cache, its randomness, its counters.

Positions of a row, as half-open ranges:
    [0, num_fed)                    fed to the target and kept
    [0, num_fed - num_pending)      of these, in the draft's context, where there is one
    [num_fed - num_pending, num_fed)  their taps wait in ``pending_taps`` for the next time that the row speculates
    num_fed                         the anchor: committed, its target state not known yet
While the prompt is fed, num_fed counts its positions that are; afterwards ``len(ids) == num_fed + 1`` between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.accept import TokenLogprobs, request_generators
from blockdraft.draft import DraftCache
from blockdraft.engine.constraint import RowConstraint
from blockdraft.engine.request import Completion, FinishReason, Request, Speculation, TokenEvent, TokenKind
from blockdraft.stats import RequestStats
from blockdraft.targets import Row as TargetRow
from blockdraft.text import StopScanner

__all__ = ["RunningRow"]

MAX_PENDING = 256  # positions whose taps a row may hold back
MAX_PENDING_BYTES = 16 * 2**20


@dataclass(eq=False, kw_only=True)
class RunningRow:
    """State of one request between submission and completion."""

    request: Request
    stop_ids: frozenset[int]
    width: int
    """Of a block at most; the request's own, or what the draft was trained for."""
    scanner: StopScanner | None
    speculation_reason: str | None
    """Why it does not speculate (any more); None while it may."""
    constraint: RowConstraint | None = None
    """Its text's way through the request's grammar, where there is one."""
    target_row: TargetRow | None = None
    draft_cache: DraftCache | None = None
    pending_taps: list[Tensor] = field(default_factory=list)
    num_pending: int = 0
    num_fed: int = 0
    ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    stop: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)
        self.num_prompt = len(self.ids)
        self.draft_generator, self.accept_generator = request_generators(self.request.seed)
        params = self.request.sampling
        self._is_plain_greedy = params.is_greedy and not params.has_penalties and not params.logit_bias

    @property
    def num_emitted(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_unfed(self) -> int:
        """Positions of the prompt that the target has not seen."""
        return max(self.num_prompt - self.num_fed, 0)

    @property
    def anchor_id(self) -> int:
        return self.ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_fixed_width(self) -> bool:
        """Whether its blocks must have the row's own width wherever there is room: the request names a width, or a
        seed for sampling, whose text depends on the widths."""
        request = self.request
        return request.width is not None or (request.seed is not None and not request.sampling.is_greedy)

    @property
    def num_draft_bytes(self) -> int:
        """Memory of the draft's context, and of the taps on their way to it."""
        held = 0 if self.draft_cache is None else self.draft_cache.num_bytes
        return held + sum(taps.nbytes for taps in self.pending_taps)

    @property
    def num_bytes(self) -> int:
        """Memory of all its states."""
        return self.num_draft_bytes + (0 if self.target_row is None else self.target_row.num_bytes)

    def takes_best(self, num_rows: int) -> bool:
        """Whether its next ``num_rows`` tokens are the most likely ids of the logits as they are."""
        return self._is_plain_greedy and self.constraint is None and not self.banned(num_rows)

    # ---- width -------------------------------------------------------------------------------------------------------
    def most_width(self, max_draft_length: int | None) -> int:
        """The widest block that it may take now: narrower near the length limit; 1 is a plain step.

        It also narrows toward the draft's own maximum length; where not even two positions are left there, speculation
        ends for good, with the reason in the completion.
        """
        if self.draft_cache is None:
            return 1
        width = min(self.width, self.request.max_new_tokens - self.num_emitted)
        room = width if max_draft_length is None else max_draft_length - (len(self.ids) - 1)
        if room < min(width, 2):
            self.stop_speculating(f"the draft's maximum length is {max_draft_length} positions")
            return 1
        return min(width, room)

    def stop_speculating(self, reason: str) -> None:
        self.draft_cache, self.speculation_reason = None, reason
        self.drop_pending()

    # ---- states ------------------------------------------------------------------------------------------------------
    def feed(self, taps_TNE: Tensor) -> None:
        """Count positions that the target was fed and kept; their taps wait for the draft."""
        count = taps_TNE.shape[0]
        self.num_fed += count
        if self.draft_cache is not None and count:
            # a copy: the target may write its next answer into the same memory, and a part must not hold the whole
            self.pending_taps.append(taps_TNE.clone())
            self.num_pending += count

    def joined_taps(self) -> Tensor:
        """The pending taps, [num_pending, N, E]."""
        return self.pending_taps[0] if len(self.pending_taps) == 1 else torch.cat(self.pending_taps)

    def drop_pending(self) -> None:
        """Forget the pending taps: they are in the draft's context now, or never will be."""
        self.pending_taps, self.num_pending = [], 0

    @property
    def must_inject(self) -> bool:
        """Whether its pending taps are as many as may wait."""
        return self.num_pending >= MAX_PENDING or sum(x.nbytes for x in self.pending_taps) >= MAX_PENDING_BYTES

    # ---- tokens ------------------------------------------------------------------------------------------------------
    def banned(self, num_rows: int) -> Sequence[frozenset[int]]:
        """Ids that each of the next `num_rows` tokens must not be: the stop ids below min_new_tokens."""
        if not self.stop_ids or self.num_emitted >= self.request.min_new_tokens:
            return ()
        return [
            self.stop_ids if self.num_emitted + i < self.request.min_new_tokens else frozenset()
            for i in range(num_rows)
        ]

    def commit(self, ids: list[int], kinds: Sequence[TokenKind], logprobs: list[TokenLogprobs] | None) -> int:
        """Append a step's tokens up to a stop or the length limit; returns how many were emitted.

        What is cut here is never seen by anybody: not in ids, events, text or logprobs.
        """
        step = self.stats.num_steps + 1 if kinds[0] != "first" else 0
        for index, token_id in enumerate(ids):
            self.ids.append(token_id)
            text = self._settle(token_id)
            entry = None if logprobs is None else logprobs[index]
            self.events.append(TokenEvent(token_id, kinds[index], step, text, entry))
            if self.finish_reason is not None:
                return index + 1
        if self.constraint is not None:
            self.constraint.advance(ids)
        return len(ids)

    def _settle(self, token_id: int) -> str | None:
        """Finish if this token, the last of `ids`, ends the request; returns the text it made certain."""
        num_emitted = len(self.ids) - self.num_prompt
        may_stop = num_emitted >= self.request.min_new_tokens
        text = ""
        if may_stop and token_id in self.stop_ids:
            self.finish("stop", token_id)
        elif self.scanner is not None:
            scan = self.scanner.feed((token_id,), may_stop=may_stop)
            text = scan.text
            if scan.stop is not None:
                self.finish("stop", scan.stop)
        if self.finish_reason is None and num_emitted == self.request.max_new_tokens:
            self.finish("length", None)
        if self.scanner is None:
            return None
        if self.finish_reason is not None:
            rest = self.scanner.flush()
            text += rest.text
            if rest.stop is not None and self.finish_reason == "length":
                self.finish("stop", rest.stop)  # its last character became certain only with the end of the text
        return text

    def drop_uncounted(self) -> None:
        """Forget the tokens of a step that never came to its end, hence to the counters."""
        num_counted = self.stats.num_emitted_tokens
        del self.ids[self.num_prompt + num_counted :]
        del self.events[num_counted:]

    def finish(self, reason: FinishReason, stop: int | str | None) -> None:
        self.finish_reason, self.stop = reason, stop

    def fail(self, error: str) -> None:
        """End with an error of its own; what was emitted before stays."""
        self.finish_reason, self.stop, self.error = "error", None, error

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        enabled = self.speculation_reason is None
        return Completion(
            token_ids=tuple(self.ids[self.num_prompt :]),
            text=None if self.scanner is None else "".join(event.text or "" for event in self.events),
            finish_reason=self.finish_reason,
            stop=self.stop,
            error=self.error,
            events=tuple(self.events),
            stats=self.stats,
            speculation=Speculation(enabled, self.width if enabled else None, self.speculation_reason),
        )
