"""Figures as inline SVG: bars and lines with their intervals. Owns drawing; no third-party code, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape

from blockdraft.bench.table import Figure, Series
from blockdraft.stats import Interval

__all__ = ["figure_svg"]

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 16, 64
NUM_COLOURS = 8  # classes c0 ... c7 of the page's style
LEGEND_ROW = 18


def figure_svg(figure: Figure) -> str:
    """The drawing; empty where there is nothing to draw."""
    series = [_possible(one, figure.least) for one in figure.series if one.points]
    if not series:
        return ""
    labels = list(dict.fromkeys(label for one in series for label, _ in one.points))
    legend_rows = _legend_rows([one.name for one in series])
    height = HEIGHT + LEGEND_ROW * len(legend_rows)
    scale = _Scale.of(figure, _values(series), num_labels=len(labels))
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(figure.title)}">',
        f"<title>{escape(figure.title)}</title>",
        *_axes(figure, scale, labels),
    ]
    for number, one in enumerate(series):
        places = [(labels.index(label), value) for label, value in one.points]
        draw = _bars if figure.kind == "bars" else _line
        parts += draw(scale, places, number, len(series))
    parts += _legend(legend_rows)
    return "".join([*parts, "</svg>"])


def _possible(series: Series, least: float | None) -> Series:
    """The series with no interval below what is possible."""
    if least is None:
        return series
    points = []
    for label, value in series.points:
        if isinstance(value, Interval) and value.low is not None:
            value = replace(value, low=max(value.low, least))
        points.append((label, value))
    return Series(series.name, tuple(points))


def _values(series: Sequence[Series]) -> list[float]:
    found: list[float] = []
    for one in series:
        for _, value in one.points:
            found += [bound for bound in _bounds(value) if bound is not None]
    return found


def _bounds(value: Interval | float) -> tuple[float, float | None, float | None]:
    if isinstance(value, Interval):
        return value.estimate, value.low, value.high
    return value, None, None


class _Scale:
    """From values to places on the drawing."""

    def __init__(
        self, low: float, high: float, *, step: float, base: float, num_labels: int, is_share: bool = False
    ) -> None:
        self.low, self.high, self.step, self.base = low, high, step, base
        self.num_labels, self.is_share = num_labels, is_share

    @classmethod
    def of(cls, figure: Figure, values: Sequence[float], *, num_labels: int) -> _Scale:
        if figure.is_share:
            return cls(0.0, 1.0, step=0.2, base=0.0, num_labels=num_labels, is_share=True)
        low, high = min([*values, figure.base]), max([*values, figure.base])
        step = _nice((high - low) / 5 or 1.0)
        low, high = math.floor(low / step) * step, math.ceil(high / step + 1e-9) * step
        return cls(low, high, step=step, base=figure.base, num_labels=num_labels)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - min(max(share, 0.0), 1.0) * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def slot(self) -> float:
        return (WIDTH - LEFT - RIGHT) / self.num_labels

    def x(self, index: int) -> float:
        return round(LEFT + self.slot * (index + 0.5), 1)

    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + self.step * i for i in range(count + 1)]

    def word(self, value: float) -> str:
        return f"{100 * value:.0f} %" if self.is_share else f"{value:.10g}"


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= step * 0.999)


def _axes(figure: Figure, scale: _Scale, labels: Sequence[str]) -> list[str]:
    parts = []
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{scale.word(tick)}</text>')
    if not scale.is_share:
        y = scale.y(figure.base)
        parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
    is_crowded = max(map(len, labels)) * 6.5 > scale.slot
    for index, label in enumerate(labels):
        x, y = scale.x(index), HEIGHT - BOTTOM + 16
        turn = f' transform="rotate(-25 {x} {y})"' if is_crowded else ""
        anchor = "end" if is_crowded else "middle"
        parts.append(f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}"{turn}>{escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(figure.x_title)}</text>'
    )
    y = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="axis" x="14" y="{y}" text-anchor="middle" transform="rotate(-90 14 {y})">'
        f"{escape(figure.y_title)}</text>"
    )
    return parts


def _bars(scale: _Scale, places: Sequence[tuple[int, Interval | float]], number: int, count: int) -> list[str]:
    parts = []
    width = min(scale.slot * 0.8 / count, 46.0)
    for index, value in places:
        estimate, low, high = _bounds(value)
        x = scale.x(index) + (number - (count - 1) / 2) * width
        bottom, top = scale.y(scale.base), scale.y(estimate)
        parts.append(
            f'<rect class="bar c{number % NUM_COLOURS}" x="{x - width * 0.45:.1f}" y="{min(top, bottom)}" '
            f'width="{width * 0.9:.1f}" height="{abs(bottom - top):.1f}"/>'
        )
        parts += _whisker(scale, x, low, high, "whisker")
    return parts


def _line(scale: _Scale, places: Sequence[tuple[int, Interval | float]], number: int, count: int) -> list[str]:
    shift = (number - (count - 1) / 2) * min(6.0, scale.slot * 0.5 / count)  # so that whiskers can be told apart
    colour = f"c{number % NUM_COLOURS}"
    points = [(scale.x(index) + shift, *_bounds(value)) for index, value in places]
    path = " ".join(f"{x:.1f},{scale.y(estimate)}" for x, estimate, _, _ in points)
    parts = [f'<polyline class="line {colour}" points="{path}"/>']
    for x, estimate, low, high in points:
        parts += _whisker(scale, x, low, high, f"line {colour}")
        parts.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{scale.y(estimate)}" r="3"/>')
    return parts


def _whisker(scale: _Scale, x: float, low: float | None, high: float | None, kind: str) -> list[str]:
    if low is None or high is None:
        return []
    top, bottom = scale.y(high), scale.y(low)
    return [
        f'<path class="{kind}" d="M{x:.1f} {top}V{bottom}M{x - 4:.1f} {top}h8M{x - 4:.1f} {bottom}h8"/>',
    ]


def _legend_rows(names: Sequence[str]) -> list[list[tuple[int, str, float]]]:
    """Names in rows: (number, name, x)."""
    rows: list[list[tuple[int, str, float]]] = [[]]
    x = float(LEFT)
    for number, name in enumerate(names):
        size = 30 + 6.5 * len(name)
        if rows[-1] and x + size > WIDTH - RIGHT:
            rows.append([])
            x = float(LEFT)
        rows[-1].append((number, name, x))
        x += size
    return rows


def _legend(rows: Sequence[Sequence[tuple[int, str, float]]]) -> list[str]:
    parts = []
    for row_number, row in enumerate(rows):
        y = HEIGHT + LEGEND_ROW * row_number + 6
        for number, name, x in row:
            parts.append(f'<rect class="bar c{number % NUM_COLOURS}" x="{x}" y="{y - 9}" width="12" height="10"/>')
            parts.append(f'<text class="tick" x="{x + 17}" y="{y}">{escape(name)}</text>')
    return parts
