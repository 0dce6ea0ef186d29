"""What a step costs: seconds by rows, positions scored, context, drafting and injection.

Owns the model of a step's time, its fit to measured steps, and its running correction by the steps that are served. No
torch: measuring is ``cost_probe``'s. What a step costs is the sum of
    scored      a curve over the positions that the target scores (never falling), a term per row beyond the first and
                one per position of context
    other       acceptance, bookkeeping, rollback: a constant, a term per row and one per position
    drafting    a term per pass of the draft, one per drafting row and one per proposal
    injection   a term per step that injects and one per injected position
with no term below zero. Beyond the widest measured step the curve goes on with the slope of its end.

Letters: M positions scored, n rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from operator import mul
from statistics import median

from blockdraft.errors import CheckpointError

__all__ = ["CostModel", "StepCosts", "StepSample", "fit"]

_END_SHARE = 0.5  # of the mean slope from nothing: what the curve rises by at least beyond its end
_CLIP = 0.25  # log-ratio of one step that is believed: a shared machine has moments of any length
_LEVEL_RATE = 0.1
_CELL_RATE = 0.05
_VERSION_STEP = 0.02  # log-ratio that a cell moves before tables are made again


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step: what it did and the seconds of its parts."""

    num_rows: int
    num_scored: int
    context: int = 0
    """Committed positions of all rows."""
    num_passes: int = 0
    """Passes of the draft: one for each width."""
    num_drafting: int = 0
    num_proposals: int = 0
    num_injected: int = 0
    score_s: float
    other_s: float
    """Accept and commit, injection included."""
    propose_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step's terms on one machine. ``knots`` are (M, seconds of the target's pass), rising in both."""

    knots: tuple[tuple[int, float], ...]
    score_row_s: float
    context_s: float
    other_s: float
    other_row_s: float
    other_position_s: float
    draft_pass_s: float
    draft_row_s: float
    draft_position_s: float
    inject_s: float
    inject_position_s: float
    error: float | None = None
    """Median relative error of a plain or speculative step that the fit had not seen (each left out in turn)."""

    def __post_init__(self) -> None:
        counts, seconds = [m for m, _ in self.knots], [s for _, s in self.knots]
        if not counts or counts != sorted(set(counts)) or seconds != sorted(seconds) or seconds[0] <= 0.0:
            raise CheckpointError(f"a cost table needs rising positions and times, it has {self.knots}")

    def score_s(self, num_rows: int, num_scored: int) -> float:
        """The target's forward without context."""
        return self.curve_s(num_scored) + self.score_row_s * (num_rows - 1)

    def curve_s(self, num_scored: int) -> float:
        knots = self.knots
        at = bisect_left(knots, (num_scored, -math.inf))
        if at == 0:
            return knots[0][1]
        if at < len(knots):
            (m0, s0), (m1, s1) = knots[at - 1], knots[at]
            return s0 + (s1 - s0) * (num_scored - m0) / (m1 - m0)
        last, s_last = knots[-1]
        slope = _END_SHARE * s_last / last
        if len(knots) > 1:
            slope = max(slope, (s_last - knots[-2][1]) / (last - knots[-2][0]))
        return s_last + slope * (num_scored - last)

    def rest_s(self, num_rows: int, num_scored: int) -> float:
        """Accept and commit without injection."""
        return self.other_s + self.other_row_s * num_rows + self.other_position_s * num_scored

    def propose_s(self, num_passes: int, num_drafting: int, num_proposals: int) -> float:
        return self.draft_pass_s * num_passes + self.draft_row_s * num_drafting + self.draft_position_s * num_proposals

    def injection_s(self, num_injected: int) -> float:
        return self.inject_s + self.inject_position_s * num_injected if num_injected else 0.0

    def step_s(self, sample: StepSample) -> float:
        """Seconds of a step like this one."""
        return (
            self.score_s(sample.num_rows, sample.num_scored)
            + self.context_s * sample.context
            + self.rest_s(sample.num_rows, sample.num_scored)
            + self.propose_s(sample.num_passes, sample.num_drafting, sample.num_proposals)
            + self.injection_s(sample.num_injected)
        )

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: object) -> CostModel:
        names = {f.name for f in fields(cls)}
        if not isinstance(raw, Mapping) or set(raw) != names:
            raise CheckpointError(f"a cost table must hold exactly {sorted(names)}")
        numbers = {name: raw[name] for name in names - {"knots", "error"}}
        try:
            knots = tuple((int(m), float(s)) for m, s in raw["knots"])
            values = {name: float(value) for name, value in numbers.items()}
            error = None if raw["error"] is None else float(raw["error"])
        except (TypeError, ValueError):
            raise CheckpointError("a cost table holds numbers only") from None
        if any(not math.isfinite(value) or value < 0.0 for value in values.values()):
            raise CheckpointError("a cost table holds no negative numbers")
        return cls(knots=knots, error=error, **values)


# ---- fit -------------------------------------------------------------------------------------------------------------
def fit(samples: Sequence[StepSample], *, context_s: float | None = None, leave_out: bool = True) -> CostModel:
    """The model of measured steps: least squares of relative errors, no term below zero.

    ``context_s`` fixes the seconds per position of context where the samples hold too little of it. ``leave_out``
    states the error on steps that the fit has not seen.
    """
    model = _fitted(samples, context_s)
    if not leave_out:
        return model
    errors = []
    rows, counts = [s.num_rows for s in samples], [s.num_scored for s in samples]
    for i, sample in enumerate(samples):
        if sample.num_scored in (min(counts), max(counts)) or sample.num_rows == max(rows):
            continue  # an end of the table: nothing that is left says anything about it
        seen = _fitted([*samples[:i], *samples[i + 1 :]], context_s)
        measured = sample.score_s + sample.other_s + sample.propose_s
        errors.append(abs(seen.step_s(sample) - measured) / measured)
    return replace(model, error=median(errors) if errors else None)


def _fitted(samples: Sequence[StepSample], context_s: float | None) -> CostModel:
    counts = sorted({sample.num_scored for sample in samples})
    first, gaps = counts[0], list(pairwise(counts))
    known = 0.0 if context_s is None else context_s
    features = [
        [
            1.0,
            *(min(max((s.num_scored - low) / (high - low), 0.0), 1.0) for low, high in gaps),
            s.num_rows - 1.0,
            float(s.context) if context_s is None else 0.0,
        ]
        for s in samples
    ]
    found = _nonnegative(features, [max(s.score_s - known * s.context, 1e-9) for s in samples])
    seconds, knots = found[0], [(first, max(found[0], 1e-9))]
    for (_, high), rise in zip(gaps, found[1:-2], strict=True):
        seconds += rise
        knots.append((high, max(seconds, knots[-1][1])))
    other = _nonnegative(
        [[1.0, s.num_rows, s.num_scored, float(s.num_injected > 0), s.num_injected] for s in samples],
        [s.other_s for s in samples],
    )
    drafting = [s for s in samples if s.num_passes]
    draft = [0.0, 0.0, 0.0]
    if drafting:
        draft = _nonnegative(
            [[s.num_passes, s.num_drafting, s.num_proposals] for s in drafting], [s.propose_s for s in drafting]
        )
    return CostModel(
        knots=tuple(knots),
        score_row_s=found[-2],
        context_s=found[-1] if context_s is None else context_s,
        other_s=other[0],
        other_row_s=other[1],
        other_position_s=other[2],
        draft_pass_s=draft[0],
        draft_row_s=draft[1],
        draft_position_s=draft[2],
        inject_s=other[3],
        inject_position_s=other[4],
    )


def _nonnegative(features: Sequence[Sequence[float]], measured: Sequence[float], num_rounds: int = 400) -> list[float]:
    """x >= 0 that minimises the sum of ((features x - measured) / measured)^2, by coordinate descent."""
    rows = [[f / max(y, 1e-9) for f in row] for row, y in zip(features, measured, strict=True)]
    num = len(rows[0])
    # normal equations: num is small, and every round is num^2 then
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(num)] for i in range(num)]
    aim = [sum(row[i] for row in rows) for i in range(num)]
    x = [0.0] * num
    for _ in range(num_rounds):
        moved = 0.0
        for i in range(num):
            if gram[i][i] <= 0.0:
                continue
            rest = aim[i] - sum(gram[i][j] * x[j] for j in range(num)) + gram[i][i] * x[i]
            fresh = max(rest / gram[i][i], 0.0)
            moved = max(moved, abs(fresh - x[i]) * math.sqrt(gram[i][i]))
            x[i] = fresh
        if moved < 1e-7:
            break
    return x


# ---- correction ------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Cell:
    value: float = 0.0
    count: int = 0


class _Correction:
    """log(measured / modelled): a level that all cells share and drifts with the machine, and each cell's own."""

    def __init__(self) -> None:
        self.level = 0.0
        self.version = 0
        self._cells: dict[int, dict[int, _Cell]] = {}
        self._unseen = 0.0

    def observe(self, num_rows: int, num_positions: int, log_ratio: float) -> None:
        cell = self._cells.setdefault(_bucket(num_rows), {}).setdefault(_bucket(num_positions), _Cell())
        error = min(max(log_ratio - self.level - cell.value, -_CLIP), _CLIP)
        self.level += _LEVEL_RATE * error
        moved = max(_CELL_RATE, 1.0 / (cell.count + 4)) * error
        cell.value += moved
        cell.count += 1
        self._unseen += abs(moved)
        if self._unseen > _VERSION_STEP:
            self._unseen, self.version = 0.0, self.version + 1

    def factors(self, num_rows: int, first: int, count: int) -> list[float]:
        """Measured / modelled without the level at ``count`` positions from ``first``: a straight line between two
        cells, held beyond the outer ones."""
        cells = self._cells.get(_bucket(num_rows))
        if not cells:
            return [1.0] * count
        points = [(_centre(place), math.exp(cells[place].value)) for place in sorted(cells)]
        found = [points[0][1]] * min(max(math.ceil(points[0][0]) - first, 0), count)
        for (m0, f0), (m1, f1) in pairwise(points):
            slope = (f1 - f0) / (m1 - m0)
            found += [f0 + slope * (m - m0) for m in range(first + len(found), min(math.ceil(m1), first + count))]
        return found + [points[-1][1]] * (count - len(found))


def _bucket(count: int) -> int:
    """Quarter octaves: each of 1 to 6 has its own, 64 shares one with 60."""
    return round(4.0 * math.log2(count))


def _centre(bucket: int) -> float:
    return float(2.0 ** (bucket / 4.0))


@dataclass(slots=True)
class DraftPrices:
    """Seconds of drafting now, on the same scale as ``StepCosts.table``."""

    pass_s: float
    row_s: float
    position_s: float
    inject_s: float
    inject_position_s: float


@dataclass(slots=True)
class StepCosts:
    """A model and what the served steps say about it.

    Times are given without the level that all parts share, which a choice between widths does not need; ``level``
    is the factor to today's seconds.
    """

    model: CostModel
    _step: _Correction = field(default_factory=_Correction)
    _draft: _Correction = field(default_factory=_Correction)
    _tables: dict[int, tuple[int, list[float]]] = field(default_factory=dict)
    _modelled: dict[int, list[float]] = field(default_factory=dict)

    @property
    def level(self) -> float:
        return math.exp(self._step.level)

    def table(self, num_rows: int, most_extra: int) -> list[float]:
        """Seconds of a step of ``num_rows`` rows without drafting, injection and context, by positions scored beyond
        one for each row: 0 to at least ``most_extra``."""
        version, table = self._tables.get(num_rows, (-1, []))
        if version != self._step.version or len(table) <= most_extra:
            modelled = self._modelled.get(num_rows, [])
            if len(modelled) <= most_extra:
                positions = range(num_rows, num_rows + most_extra + 1)
                modelled = [self.model.score_s(num_rows, m) + self.model.rest_s(num_rows, m) for m in positions]
                self._modelled[num_rows] = modelled
            factors = self._step.factors(num_rows, num_rows, len(modelled))
            table = list(map(mul, modelled, factors))
            self._tables[num_rows] = (self._step.version, table)
        return table

    def draft_prices(self, num_drafting: int, num_proposals: int) -> DraftPrices:
        model = self.model
        [own] = self._draft.factors(max(num_drafting, 1), max(num_proposals, 1), 1)
        factor = math.exp(self._draft.level) * own
        return DraftPrices(
            model.draft_pass_s * factor,
            model.draft_row_s * factor,
            model.draft_position_s * factor,
            model.inject_s,
            model.inject_position_s,
        )

    def observe(self, sample: StepSample) -> None:
        """Learn from a served step."""
        model = self.model
        step_s = sample.score_s + sample.other_s - self.level * model.injection_s(sample.num_injected)
        modelled_s = (
            model.score_s(sample.num_rows, sample.num_scored)
            + model.context_s * sample.context
            + model.rest_s(sample.num_rows, sample.num_scored)
        )
        if step_s > 0.0:
            self._step.observe(sample.num_rows, sample.num_scored, math.log(step_s / modelled_s))
        propose_s = model.propose_s(sample.num_passes, sample.num_drafting, sample.num_proposals)
        if sample.num_passes and propose_s > 0.0 and sample.propose_s > 0.0:
            ratio = math.log(sample.propose_s / propose_s) - self._step.level  # a slow machine slows both alike
            self._draft.observe(sample.num_drafting, max(sample.num_proposals, 1), ratio)
