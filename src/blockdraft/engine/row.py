"""One running request: its ids, its target row, its draft cache, its randomness, its counters.

Lengths of a row, as half-open position ranges:
    [0, num_fed)            fed to the target and kept; their taps are in the draft cache when it speculates
    num_fed                 the anchor: committed, its target state not known yet
so `len(ids) == num_fed + 1` between steps, and the draft cache holds exactly num_fed positions.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from blockdraft.accept import TokenLogprobs, request_generators
from blockdraft.draft import DraftCache
from blockdraft.engine.request import Completion, FinishReason, Request, Speculation, TokenEvent, TokenKind
from blockdraft.stats import RequestStats
from blockdraft.targets import Row as TargetRow
from blockdraft.text import StopScanner

__all__ = ["RunningRow"]


@dataclass(eq=False, kw_only=True)
class RunningRow:
    """State of one request between submission and completion."""

    request: Request
    stop_ids: frozenset[int]
    target_row: TargetRow
    draft_cache: DraftCache | None
    width: int
    scanner: StopScanner | None
    speculation_reason: str | None
    ids: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    stop: int | str | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt_ids)
        self.draft_generator, self.accept_generator = request_generators(self.request.seed)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_emitted(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def anchor_id(self) -> int:
        return self.ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def block_width(self, max_draft_length: int | None) -> int:
        """Width of the next block: shorter near the length limit; 1 is a plain step.

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
        self.draft_cache = None
        self.speculation_reason = reason

    def banned(self, num_rows: int) -> list[frozenset[int]] | tuple[()]:
        """Ids that each of the next `num_rows` tokens must not be: the stop ids below min_new_tokens."""
        if not self.stop_ids or self.num_emitted >= self.request.min_new_tokens:
            return ()
        return [
            self.stop_ids if self.num_emitted + i < self.request.min_new_tokens else frozenset()
            for i in range(num_rows)
        ]

    def commit(self, ids: list[int], kinds: list[TokenKind], logprobs: list[TokenLogprobs] | None) -> int:
        """Append a step's tokens up to a stop or the length limit; returns how many were emitted.

        What is cut here is never seen by anybody: not in ids, events, text or logprobs.
        """
        step = self.stats.num_steps + 1 if kinds[0] != "first" else 0
        for index, token_id in enumerate(ids):
            self.ids.append(token_id)
            text = self._settle(token_id)
            entry = None if logprobs is None else logprobs[index]
            self.events.append(TokenEvent(token_id, kinds[index], step, text, entry))
            if self.is_finished:
                return index + 1
        return len(ids)

    def _settle(self, token_id: int) -> str | None:
        """Finish if this token, the last of `ids`, ends the request; returns the text it made certain."""
        may_stop = self.num_emitted >= self.request.min_new_tokens
        text = ""
        if token_id in self.stop_ids and may_stop:
            self.finish("stop", token_id)
        elif self.scanner is not None:
            scan = self.scanner.feed((token_id,), may_stop=may_stop)
            text = scan.text
            if scan.stop is not None:
                self.finish("stop", scan.stop)
        if not self.is_finished and self.num_emitted == self.request.max_new_tokens:
            self.finish("length", None)
        if self.scanner is None:
            return None
        if self.is_finished:
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

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        enabled = self.speculation_reason is None
        return Completion(
            token_ids=tuple(self.ids[self.num_prompt :]),
            text=None if self.scanner is None else "".join(event.text or "" for event in self.events),
            finish_reason=self.finish_reason,
            stop=self.stop,
            events=tuple(self.events),
            stats=self.stats,
            speculation=Speculation(enabled, self.width if enabled else None, self.speculation_reason),
        )


def now_s() -> float:
    """Monotonic seconds; after pending accelerator work when there is an accelerator in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
