"""A table: columns that name their formula, rows of numbers with intervals, what has to be said beside them.

Owns the form that every output (terminal, Markdown, CSV, JSON, HTML) is made from, and how a number is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockdraft.bench.identities import Verdict
from blockdraft.stats import Interval

__all__ = ["Cell", "Column", "Figure", "Series", "Table", "shown_cell"]

Cell = Interval | float | int | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """`formula` says what the number is; `digits` after the point; a `unit` "%" is written times 100,
    "%+" is a change, which has a sign.

    `least` is what the number cannot be below (0 of a share, which cannot be above 1 either): bounds of an interval are
    shown no further, while files keep them as they were computed.
    """

    key: str
    title: str
    formula: str = ""
    digits: int = 2
    unit: str = ""
    least: float | None = None

    def possible(self, bound: float) -> float:
        """A bound of an interval, within what is possible."""
        if self.unit == "%":
            return min(max(bound, 0.0), 1.0)
        return bound if self.least is None else max(bound, self.least)


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line or one kind of bar: (x as shown, estimate with interval or a bare number)."""

    name: str
    points: tuple[tuple[str, Interval | float], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """`kind` is "bars" or "lines". `base` is where bars begin, and a line of comparison; `least` as of a column."""

    kind: str
    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    base: float = 0.0
    least: float | None = None
    is_share: bool = False
    """Whether y is a share, shown in per cent from 0 to 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table of a report. `verdict` is that of its records; where it does not hold, no row is shown."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Cell], ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.verdict.holds

    def refusal(self) -> list[str]:
        """Why it is not shown, in lines."""
        return ["not shown: counters of these records cannot be true", *self.verdict.faults]

    def to_json(self) -> dict[str, Any]:
        """Columns, rows and verdict; no rows where the verdict does not hold."""
        return {
            "name": self.name,
            "title": self.title,
            "columns": [{"key": c.key, "title": c.title, "formula": c.formula, "unit": c.unit} for c in self.columns],
            "rows": [_row_json(row, self.columns) for row in self.rows] if self.holds else [],
            "identities": self.verdict.to_json(),
            "notes": list(self.notes),
            "facts": dict(self.facts),
        }


def _row_json(row: Mapping[str, Cell], columns: Sequence[Column]) -> dict[str, Any]:
    return {column.key: _cell_json(row.get(column.key)) for column in columns}


def _cell_json(cell: Cell) -> Any:
    if not isinstance(cell, Interval):
        return cell
    return {
        "estimate": cell.estimate,
        "low": cell.low,
        "high": cell.high,
        "level": cell.level,
        "num_clusters": cell.num_clusters,
    }


def shown_cell(cell: Cell, column: Column) -> str:
    """A cell as text: "3.25 [3.16, 3.34]", "46 %", "1,319", "-" where there is nothing."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, Interval):
        estimate = _number(cell.estimate, column)
        if cell.low is None or cell.high is None:
            return f"{estimate} [only one]"
        low, high = column.possible(cell.low), column.possible(cell.high)
        return f"{estimate} [{_number(low, column, bare=True)}, {_number(high, column, bare=True)}]"
    if isinstance(cell, int):
        return f"{cell:,}"
    return _number(cell, column)


def _number(value: float, column: Column, *, bare: bool = False) -> str:
    if column.unit in ("%", "%+"):
        sign = "+" if column.unit == "%+" else ""
        return f"{100 * value:{sign}.{column.digits}f}" + ("" if bare else " %")
    return f"{value:,.{column.digits}f}"
