"""How long the parts of a step took. Owns the phases and the one clock that tells them apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

__all__ = ["Clock", "StepTimes", "now_s"]


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step's phases, and what they were spent on.

    The one forward of a step scores blocks and feeds prompt chunks together; its time is shared out by positions, so
    in a step with chunks (``num_prefilled`` > 0) ``score_s`` and ``prefill_s`` are shares, not measurements.
    """

    propose_s: float = 0.0
    """Noise, the draft's pass, its head, the choice of proposals."""
    score_s: float = 0.0
    """The target's forward, as far as it scored blocks."""
    accept_s: float = 0.0
    commit_s: float = 0.0
    """Ids, text and counters of every row, rollback, and the injection of taps into the draft's context."""
    prefill_s: float = 0.0
    """The target's forward, as far as it fed prompts."""
    num_rows: int = 0
    """Rows that scored a block."""
    num_scored: int = 0
    """Positions of their blocks."""
    num_prefilled: int = 0
    """Positions of prompts."""

    @property
    def total_s(self) -> float:
        return self.propose_s + self.score_s + self.accept_s + self.commit_s + self.prefill_s

    def share_forward(self, seconds: float, num_scored: int, num_prefilled: int) -> None:
        """Count the one forward: blocks of ``num_scored`` positions, chunks of ``num_prefilled``."""
        share = num_prefilled / max(num_scored + num_prefilled, 1)
        self.score_s, self.prefill_s = seconds * (1.0 - share), seconds * share
        self.num_scored, self.num_prefilled = num_scored, num_prefilled


class Clock:
    """Seconds from one lap to the next."""

    def __init__(self) -> None:
        self._last = now_s()

    def lap(self) -> float:
        last, self._last = self._last, now_s()
        return self._last - last


def now_s() -> float:
    """Monotonic seconds; after pending accelerator work when there is an accelerator in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
