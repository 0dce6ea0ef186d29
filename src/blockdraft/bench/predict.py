"""What speed-up should be, from step times and acceptance, and how far that is from what was measured.

Owns the prediction and its error. speed-up(N, B) = length(B) * plain step(N) / step(N, B), with length(B) = 1 + the
survivals of the first B - 1 positions. Step times come from the engine's own table of this pair on this machine
(costs.py), or from the roofline of a plan for named GPUs (inspection.plan).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from blockdraft.bench import estimates as est
from blockdraft.bench.identities import Verdict, examine
from blockdraft.bench.journal import JournalContent
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.report import Document
from blockdraft.bench.speed import paired_speed_up
from blockdraft.bench.table import Cell, Column, Figure, Series, Table
from blockdraft.bench.tables.grouping import grouped, mode_of, shown_load, speculating
from blockdraft.engine.costs import CostModel, StepSample
from blockdraft.errors import RequestError
from blockdraft.inspection.plan import Plan
from blockdraft.stats import Interval

__all__ = ["Acceptance", "MeasuredSteps", "acceptances", "plan_table", "prediction_of", "prediction_table"]

NO_RECORDS = Verdict(0, 0, 0, 0, 0, ())  # of a prediction from numbers that nobody measured here


@dataclass(frozen=True, slots=True)
class Acceptance:
    """P(at least i proposals stand) for i = 1, 2, ... of some texts, and the positions that a row holds on average."""

    name: str
    survival: tuple[float, ...]
    context: float
    records: Sequence[RequestRecord] = ()

    def length(self, width: int) -> float:
        """Tokens of a step of this width."""
        return 1.0 + sum(self.survival[: width - 1])

    @property
    def max_width(self) -> int:
        return len(self.survival) + 1


def acceptances(records: Sequence[RequestRecord]) -> list[Acceptance]:
    """Of each data set of a run, and of all together, from its widest mode. Raises RequestError without any."""
    on = [r for r in est.speculated(speculating(records)) if r.counts.has_positions]
    if not on:
        raise RequestError("the run tells no acceptance by position; measure with speculation on")
    widest = max(r.counts.max_draft_tokens or 0 for r in on)
    by_set = grouped([r for r in on if (r.counts.max_draft_tokens or 0) == widest], lambda r: r.dataset)
    whole = {"all": [r for members in by_set.values() for r in members]} if len(by_set) > 1 else {}
    found = []
    for name, members in (by_set | whole).items():
        shares = tuple(0.0 if share is None else share.estimate for share in est.survival(members))
        held = [(r.num_prompt_tokens or 0) + r.counts.num_emitted_tokens / 2 for r in members]
        sources = records if name == "all" and whole else [r for r in records if r.dataset == name]
        found.append(Acceptance(name, shares, sum(held) / len(held), sources))
    return found


class Steps(Protocol):
    """Seconds of a step of `num_rows` requests at one width; 1 is plain decoding."""

    def step_s(self, num_rows: int, width: int, *, context: float, length: float) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The engine's table of step times. `length` tokens of a step are injected into the draft's context."""

    model: CostModel

    def step_s(self, num_rows: int, width: int, *, context: float, length: float) -> float:
        is_drafting = width > 1
        sample = StepSample(
            num_rows=num_rows,
            num_scored=num_rows * width,
            context=round(num_rows * context),
            num_passes=int(is_drafting),
            num_drafting=num_rows if is_drafting else 0,
            num_proposals=num_rows * (width - 1),
            num_injected=round(num_rows * length) if is_drafting else 0,
            score_s=0.0,
            other_s=0.0,
        )
        return self.model.step_s(sample)


@dataclass(frozen=True, slots=True)
class _Gain:
    """What a width promises at a load."""

    width: int
    step_s: float
    speed_up: float


def gains(found: Acceptance, steps: Steps, num_rows: int) -> list[_Gain]:
    """Every width from 1 (plain) to the widest."""
    plain = steps.step_s(num_rows, 1, context=found.context, length=1.0)
    result = []
    for width in range(1, found.max_width + 1):
        length = found.length(width)
        seconds = steps.step_s(num_rows, width, context=found.context, length=length)
        result.append(_Gain(width, seconds, length * plain / seconds))
    return result


def prediction_table(found: Sequence[Acceptance], steps: Steps, loads: Sequence[int], *, notes: Sequence[str]) -> Table:
    """For each data set and load: plain step, best width and what it promises, and every measured mode beside it.

    A row holds the best width; one more for each width that was measured at that load holds prediction, measurement
    and error.
    """
    rows: list[Mapping[str, Cell]] = []
    lines: dict[str, list[tuple[str, Interval | float]]] = {}
    for one in found:
        for load in loads:
            every = gains(one, steps, load)
            best = max(every, key=lambda gain: gain.speed_up)
            head: dict[str, Cell] = {
                "dataset": one.name,
                "load": shown_load(f"closed:{load}"),
                "plain": 1000.0 * every[0].step_s,
            }
            rows.append({**head, "what": "best", **_cells(best, one)})
            lines.setdefault(one.name, []).append((shown_load(f"closed:{load}"), best.speed_up))
            for width, measured in _measured(one.records, load).items():
                gain = every[width - 1]
                error = gain.speed_up / measured.estimate - 1.0
                rows.append({**head, "what": "measured", **_cells(gain, one), "measured": measured, "error": error})
    columns = (
        Column("dataset", "data set"),
        Column("load", "load"),
        Column("what", "row", "best: the width that promises most; measured: a width that was measured"),
        Column("plain", "plain step ms", "predicted, without speculation", 1),
        Column("width", "width"),
        Column("step", "step ms", "predicted, at this width", 1),
        Column("length", "tokens a step", "1 + survivals of the positions", 2),
        Column("speed_up", "speed-up", "tokens a step x plain step / step, predicted", 2),
        Column("measured", "measured", "rate of users / that without speculation, same prompts", 2),
        Column("error", "error", "predicted / measured - 1", 0, "%+"),
    )
    records = list({record.key: record for one in found for record in one.records}.values())
    return Table(
        name="predict",
        title="Predicted speed-up and best width",
        columns=columns,
        rows=tuple(rows),
        verdict=examine(records) if records else NO_RECORDS,
        notes=(
            "a narrower width is taken to accept what the widest one does up to there: not so of blocks that see ahead",
            "prompts that are fed beside running rows are not in the prediction",
            *notes,
        ),
        figure=_figure(lines),
    )


def _cells(gain: _Gain, found: Acceptance) -> dict[str, Cell]:
    return {
        "width": gain.width,
        "step": 1000.0 * gain.step_s,
        "length": found.length(gain.width),
        "speed_up": gain.speed_up,
    }


def _measured(records: Sequence[RequestRecord], load: int) -> dict[int, Interval]:
    """Measured speed-ups by width, at so many requests in flight."""
    here = [r for r in records if r.load == f"closed:{load}" and not r.is_replay]
    plain = [r for r in here if not r.speculation]
    found = {}
    for members in grouped(speculating(here), mode_of).values():
        width = members[0].width
        gain = paired_speed_up(members, plain)
        if width is not None and gain is not None:
            found[width] = gain
    return found


def plan_table(name: str, plan: Plan) -> Table:
    """A plan's loads as a prediction."""
    rows: list[Mapping[str, Cell]] = [
        {
            "load": shown_load(f"closed:{load.num_requests}"),
            "plain": 1000.0 * load.plain_s,
            "width": load.width,
            "step": 1000.0 * load.step_s,
            "length": load.length,
            "speed_up": load.speed_up,
            "full": load.full_speed_up,
            "each": load.tok_per_s_each,
            "memory": "fits" if load.memory.fits else "does not fit",
        }
        for load in plan.loads
    ]
    points = tuple((str(row["load"]), load.speed_up) for row, load in zip(rows, plan.loads, strict=True))
    return Table(
        name="predict",
        title=f"Predicted on {plan.tensor_parallel} x {plan.gpu.name}, {name}",
        columns=(
            Column("load", "load"),
            Column("plain", "plain step ms", "roofline, without speculation", 2),
            Column("width", "best width", "1: speculation does not pay"),
            Column("step", "step ms", "roofline, at this width", 2),
            Column("length", "tokens a step", "1 + survivals of the positions", 2),
            Column("speed_up", "speed-up", "predicted, at the best width", 2),
            Column("full", "at full width", "predicted", 2),
            Column("each", "tok/s a user", "predicted", 0),
            Column("memory", "memory"),
        ),
        rows=tuple(rows),
        verdict=NO_RECORDS,
        notes=plan.assumptions,
        figure=_figure({name: list(points)}),
    )


def _figure(lines: Mapping[str, Sequence[tuple[str, Interval | float]]]) -> Figure:
    return Figure(
        "lines",
        "predicted speed-up at the best width",
        "load",
        "times as fast",
        tuple(Series(name, tuple(points)) for name, points in lines.items()),
        base=1.0,
    )


def prediction_of(
    content: JournalContent | None,
    found: Sequence[Acceptance],
    steps: MeasuredSteps,
    *,
    loads: Sequence[int],
    system: Mapping[str, Any],
    command: str,
    where: Mapping[str, Any],
) -> Document:
    """Speed-ups predicted from this machine's step times, beside those that the run measured."""
    error = steps.model.error
    told = "not known" if error is None else f"{error:.0%}"
    notes = [f"step times: the engine's own table of this pair here, median error {told} on steps it had not seen"]
    settings = {} if content is None else content.settings or {}
    return Document(
        title="Predicted speed-up",
        command=command,
        system=system,
        settings={key: value for key, value in settings.items() if key not in ("system", "workloads", "command")},
        workloads=settings.get("workloads", []),
        runs=[*([] if content is None else content.runs), where],
        tables=[prediction_table(found, steps, loads, notes=notes)],
        details={"step_costs": steps.model.to_json()},
    )
