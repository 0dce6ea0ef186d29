"""A simulated engine for the width policy: true costs and true acceptance are known, nothing is loaded.

Requests come one after another in each of a fixed number of rows. A step's seconds are the truth times noise; which
proposals stand is drawn from each request's own conditional acceptance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

from blockdraft.engine.costs import StepCosts, StepSample, fit
from blockdraft.engine.times import StepTimes

WIDTH = 8
GSM8K = (0.54, 0.65, 0.66, 0.65, 0.67, 0.62, 0.66)
CHAT = (0.27, 0.40, 0.45, 0.45, 0.45, 0.45, 0.45)
COPY = (0.9, 0.92, 0.93, 0.93, 0.93, 0.93, 0.93)
BAD = (0.003,) * 7


@dataclass(frozen=True)
class Machine:
    """True seconds of a step's parts."""

    name: str
    score: Callable[[int, int], float]  # rows, positions
    propose: Callable[[int, int], float]  # drafting rows, proposals
    other: Callable[[int], float]
    inject_position_s: float = 1e-4
    context_s: float = 2e-6


def cpu_machine() -> Machine:
    """Two cores of a server: memory-bound at one row, with the jump from a vector to a small matrix, then compute."""
    return Machine(
        "cpu",
        lambda n, m: 0.040 + 0.0005 * (n - 1) + (0.002 if m > 1 else 0.0) + 0.0021 * m + 0.0002 * max(m - 24, 0),
        lambda n, g: 0.0055 + 0.0004 * n + 0.0006 * g,
        lambda n: 0.0003 + 0.0002 * n,
    )


def gpu_machine() -> Machine:
    """Flat up to 150 positions, then linear; the draft's pass is mostly launches."""
    return Machine(
        "gpu",
        lambda n, m: 0.012 + 0.00002 * n + 0.012 * max(m / 150.0 - 1.0, 0.0),
        lambda n, g: 0.0021 + 0.000004 * g,
        lambda n: 0.0004 + 0.00002 * n,
        inject_position_s=2e-6,
        context_s=2e-8,
    )


class SimRow:
    """What the policy reads of a running row."""

    def __init__(self, truth: Sequence[float], length: int, fixed: bool = False) -> None:
        self.truth, self.left, self.has_fixed_width = truth, length, fixed
        self.ids = list(range(80))
        self.num_pending = 80
        self.stats = SimpleNamespace(num_draft_tokens=0)


def at_ease(shares: Sequence[float], ease: float) -> list[float]:
    """Conditional acceptance moved by `ease` on the log-odds scale."""
    return [1.0 / (1.0 + (1.0 - a) / a * math.exp(-ease)) for a in shares]


class FixedPolicy:
    def __init__(self, width: int) -> None:
        self.width = width

    def choose(self, rows, most):
        return [min(self.width, limit) for limit in most]

    def offers(self, rows, widths):
        return [None] * len(rows)

    def record(self, rows, widths, num_accepted, times):
        pass


@dataclass
class Outcome:
    tokens: int = 0
    seconds: float = 0.0
    widths: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy,
    machine: Machine,
    *,
    num_rows: int,
    num_tokens: int,
    shares: Sequence[float] | Callable[[int], Sequence[float]],
    spread: float = 0.4,
    noise: float = 0.04,
    length: int = 200,
    seed: int = 0,
    slowdown: Callable[[int], float] = lambda step: 1.0,
) -> Outcome:
    """Serve until `num_tokens` are emitted. `shares` may depend on the tokens emitted so far."""
    source = random.Random(seed)
    outcome = Outcome()

    numbers = count()

    def fresh() -> SimRow:
        current = shares(outcome.tokens) if callable(shares) else shares
        own = random.Random(f"{seed} {next(numbers)}")  # the same requests, in order, for every policy
        row = SimRow(at_ease(current, own.gauss(0.0, spread)), int(length * own.uniform(0.5, 1.5)))
        row.draw = own.random
        return row

    rows = [fresh() for _ in range(num_rows)]
    while outcome.tokens < num_tokens:
        most = [max(1, min(WIDTH, row.left)) for row in rows]
        widths = policy.choose(rows, most)
        assert all(1 <= w <= limit for w, limit in zip(widths, most, strict=True))
        accepted = []
        for row, width in zip(rows, widths, strict=True):
            k = 0
            while k < width - 1 and row.draw() < row.truth[k]:
                k += 1
            accepted.append(k)
        num_scored = sum(widths)
        drafting = [w for w in widths if w > 1]
        injected = sum(row.num_pending for row, w in zip(rows, widths, strict=True) if w > 1)
        factor = slowdown(outcome.num_steps) * math.exp(source.gauss(0.0, noise))
        context = sum(len(row.ids) for row in rows)
        times = StepTimes(
            propose_s=factor * machine.propose(len(drafting), sum(drafting) - len(drafting)) if drafting else 0.0,
            score_s=factor * (machine.score(num_rows, num_scored) + machine.context_s * context),
            accept_s=0.0,
            commit_s=factor * (machine.other(num_rows) + machine.inject_position_s * injected),
            num_rows=num_rows,
            num_scored=num_scored,
        )
        outcome.seconds += times.total_s
        outcome.num_steps += 1
        for row, width, num_accepted in zip(rows, widths, accepted, strict=True):
            outcome.widths[width] = outcome.widths.get(width, 0) + 1
            outcome.tokens += num_accepted + 1
            row.left -= num_accepted + 1
            row.ids.extend(range(len(row.ids), len(row.ids) + num_accepted + 1))
            row.num_pending = num_accepted + 1 if width > 1 else row.num_pending + 1
            if row.num_pending >= 256:
                outcome.seconds += machine.inject_position_s * row.num_pending
                row.num_pending = 0
            row.stats.num_draft_tokens += width - 1
        policy.record(rows, widths, accepted, times)
        rows = [row if row.left > 0 else fresh() for row in rows]
    return outcome


def measured_costs(machine: Machine, *, noise: float = 0.04, seed: int = 0, most_scored: int = 64) -> StepCosts:
    """Costs as a start-up measurement sees them: few noisy steps, nothing beyond `most_scored` positions."""
    return StepCosts(fit(samples_of(machine, noise=noise, seed=seed, most_scored=most_scored), context_s=0.0))


def samples_of(machine: Machine, *, noise: float, seed: int = 0, most_scored: int = 64) -> list[StepSample]:
    source = random.Random(seed)
    grid = [
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 8),
        (2, 1),
        (4, 1),
        (4, 4),
        (8, 1),
        (8, 2),
        (16, 1),
        (32, 1),
        (8, 8),
        (16, 4),
        (16, 8),
        (32, 8),
    ]
    samples = []
    for rows, width in grid:
        if rows * width > most_scored:
            continue
        drafting, proposals = (rows, rows * (width - 1)) if width > 1 else (0, 0)
        for _ in range(3):
            injected = 2 * rows if width > 1 else 0
            factor = math.exp(source.gauss(0.0, noise))
            samples.append(
                StepSample(
                    num_rows=rows,
                    num_scored=rows * width,
                    num_passes=1 if drafting else 0,
                    num_drafting=drafting,
                    num_proposals=proposals,
                    num_injected=injected,
                    score_s=factor * machine.score(rows, rows * width),
                    other_s=factor * (machine.other(rows) + machine.inject_position_s * injected),
                    propose_s=factor * machine.propose(drafting, proposals) if drafting else 0.0,
                )
            )
    return samples
