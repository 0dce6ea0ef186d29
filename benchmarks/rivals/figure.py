"""The speeds of all modes as bars in one SVG: a panel for each set of prompts, a group for each precision.

No library and no outside font; one colour is ours, grey is everybody else's, and it reads on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.markdown import SET_NAMES
from benchmarks.rivals.modes import LOOKUP, OURS, PLAIN, V1, V2

_WIDTH, _LABELS, _BAR, _ROW, _GROUP, _TOP, _PANEL_GAP, _VALUES = 940, 236, 12, 18, 26, 64, 30, 52
_HOW = {PLAIN: "plain", LOOKUP: "prompt lookup", V1: "DFlash 1", V2: "DFlash 2"}
_PRECISION = {
    "bfloat16": "bfloat16",
    "float32": "float32",
    "int8": "int8 weights",
    "f16": "float16 (GGUF)",
    "q4_1": "4 bit (GGUF)",
}
_STYLE = """
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#24292f}
.head{font-size:14px;font-weight:600}.note,.axis{fill:#57606a;font-size:11px}.group{font-weight:600}
.grid{stroke:#d0d7de;stroke-width:1}.ours{fill:#0969da}.other{fill:#8c959f}.back{fill:#ffffff}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note,.axis{fill:#9198a1}.grid{stroke:#30363d}
.ours{fill:#58a6ff}.other{fill:#6e7681}.back{fill:#0d1117}}
"""


def drawn(result: Mapping[str, Any]) -> str:
    """The SVG of a result of benchmarks.rivals."""
    sets = list(result["num_prompts"])
    modes = list(result["modes"].values())
    groups = {p: [mode for mode in modes if mode["precision"] == p] for p in _PRECISION}
    groups = {p: members for p, members in groups.items() if members}
    height = _TOP + sum(_GROUP + _ROW * len(members) for members in groups.values()) + 34
    panel = (_WIDTH - _LABELS - 12 - _PANEL_GAP * (len(sets) - 1)) / len(sets)
    fastest = max(mode[name]["decode_tok_per_s"] for mode in modes for name in sets)
    step = _round_step(fastest / 3)
    scale = (panel - _VALUES) / fastest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="Decode tokens per second of every mode, by set of prompts">',
        f"<style>{_STYLE}</style>",
        f'<rect class="back" width="{_WIDTH}" height="{height}"/>',
        _text(12, 22, "Decode tokens per second, one request at a time", "head"),
        _text(12, 40, _note(result), "note"),
    ]
    for at, name in enumerate(sets):
        left = _LABELS + at * (panel + _PANEL_GAP)
        parts.append(_text(left, _TOP - 4, SET_NAMES[name], "group"))
        for tick in range(int(fastest / step) + 1):
            x = left + tick * step * scale
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP + 4}" y2="{height - 28}"/>')
            parts.append(_text(x, height - 12, f"{tick * step:g}", "axis", anchor="middle"))
    y = _TOP
    for precision, members in groups.items():
        y += _GROUP
        parts.append(_text(12, y - 6, _PRECISION[precision], "group"))
        for mode in members:
            parts += _row(mode, sets, y, panel, scale)
            y += _ROW
    return "\n".join([*parts, "</svg>", ""])


def _row(mode: Mapping[str, Any], sets: list[str], y: float, panel: float, scale: float) -> list[str]:
    kind = "ours" if mode["rival"] == OURS else "other"
    parts = [_text(_LABELS - 10, y + _BAR - 2, f"{mode['rival']}, {_HOW[mode['how']]}", "", anchor="end")]
    for at, name in enumerate(sets):
        left, value = _LABELS + at * (panel + _PANEL_GAP), mode[name]["decode_tok_per_s"]
        width = max(value * scale, 1.0)
        parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="2"/>')
        steps = mode[name]["tokens_a_step"]
        shown = f"{value:.0f}" if mode["how"] == PLAIN or steps is None else f"{value:.0f}  ({steps['estimate']:.2f})"
        parts.append(_text(left + width + 5, y + _BAR - 2, shown, "axis"))
    return parts


def _note(result: Mapping[str, Any]) -> str:
    run, settings = result["runs"][-1], result["settings"]
    threads = f"{settings['threads']} thread{'' if settings['threads'] == 1 else 's'}"
    counts = ", ".join(f"{count} {SET_NAMES[name]}" for name, count in result["num_prompts"].items())
    return (
        f"{settings['target']['name']}, {result['num_tokens_each']} tokens each, {counts}; {run['machine']['cpu']}, "
        f"{threads}, {run['date_utc'][:10]}. In brackets: tokens a step"
    )


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that is not below `least`."""
    power = 10 ** math.floor(math.log10(least))
    return float(next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least))


def _text(x: float, y: float, words: str, kind: str, *, anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
