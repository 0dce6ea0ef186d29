"""The figure of a run: losses and acceptance against steps, from metrics.jsonl and evaluations.jsonl alone.

Owns what is drawn. matplotlib comes with the extra `train`; without it there is no figure, and one line says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.errors import CheckpointError
from blockdraft.train.state import METRICS_FILE

__all__ = ["FIGURE_FILE", "draw_figure", "read_metrics"]

FIGURE_FILE = "training.png"
EVALUATIONS_FILE = "evaluations.jsonl"
INSTALL = 'pip install "blockdraft[train]"'
_LOSSES = {"loss": ("head", "C0"), "selector_loss": ("selector", "C1")}
_LENGTHS = {
    "prefix": ("largest logit", "C0"),
    "selector_prefix": ("selector, true predecessor", "C1"),
    "oracle_prefix": ("best in its lists", "C7"),
}
_MEAN_OVER = 40  # the smoothed line is a mean over a 40th of the steps


def read_metrics(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(lines of steps, lines of evaluations) of a run's folder. A torn last line is left out.

    Where evaluations.jsonl has the evaluation of a step, its acceptance length comes with its interval.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {METRICS_FILE}, so no step of a run; name the folder of a run")
    steps, evaluations = _read_lines(path)
    whole = folder / EVALUATIONS_FILE
    lengths = {line["step"]: line["acceptance_length"] for line in (_read_lines(whole)[1] if whole.is_file() else ())}
    for line in evaluations:
        line["acceptance_length"] = lengths.get(line["step"]) or line["acceptance_length"]
    return steps, evaluations


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    steps: list[dict[str, Any]] = []
    evaluations: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            (evaluations if "acceptance_length" in entry else steps).append({**entry, "step": int(entry["step"])})
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(f"{path} line {number} is not a line of metrics; delete that line") from None
    return steps, evaluations


def draw_figure(folder: Path, *, say: Callable[[str], None]) -> Path | None:
    """Write the figure of the run in `folder` beside its metrics; None, and a line to `say`, without matplotlib."""
    steps, evaluations = read_metrics(folder)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        say(f"no figure of the run: matplotlib is not installed; {INSTALL}")
        return None
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, lengths = figure.subplots(1, 2)
    _draw_lines(losses, steps, _LOSSES)
    losses.set(xlabel="step", ylabel="loss (nats)", title="Loss")
    _draw_learning_rate(losses, steps)
    _draw_lines(lengths, steps, _LENGTHS)
    _draw_evaluations(lengths, evaluations)
    lengths.set(xlabel="step", ylabel="tokens a step, the target's own included", title="Acceptance length")
    for axes, lowest in ((losses, 0), (lengths, 1)):
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.set_ylim(bottom=lowest)
            axes.legend(frameon=False, fontsize="small")
    path = folder / FIGURE_FILE
    temporary = path.with_name(f".{FIGURE_FILE}.tmp")
    try:
        figure.savefig(temporary, dpi=120, format="png")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written ({error}); free some space, then run again") from None
    return path


def _draw_lines(axes: Any, steps: Sequence[Mapping[str, Any]], names: Mapping[str, tuple[str, str]]) -> None:
    """Every step thinly, and a running mean over it."""
    for name, (label, colour) in names.items():
        points = [(line["step"], float(line[name])) for line in steps if name in line]
        if not points:
            continue
        at, values = [point[0] for point in points], [point[1] for point in points]
        suffix = ", in training" if names is _LENGTHS else ""
        axes.plot(at, values, color=colour, linewidth=0.5, alpha=0.3)
        axes.plot(at, _running_mean(values), color=colour, linewidth=1.6, label=label + suffix)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean over a 40th of all steps around each, fewer at both ends."""
    half = len(values) // _MEAN_OVER // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(0, at - half), min(len(values), at + half + 1)) for at in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _draw_learning_rate(axes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    points = [(line["step"], line["lr"]) for line in steps if "lr" in line]
    if points:
        other = axes.twinx()
        other.plot(*zip(*points, strict=True), color="C7", linewidth=1, linestyle=":")
        other.set_ylabel("learning rate (dotted)", color="C7")
        other.set_ylim(bottom=0)


def _draw_evaluations(axes: Any, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Served acceptance length with its interval, where the evaluation gave one."""
    points = []
    for line in evaluations:
        found = line["acceptance_length"]
        if isinstance(found, Mapping):
            low, high = found.get("low"), found.get("high")
            estimate = float(found["estimate"])
            points.append(
                (line["step"], estimate, estimate if low is None else low, estimate if high is None else high)
            )
        elif found is not None:
            points.append((line["step"], float(found), float(found), float(found)))
    if not points:
        return
    at = [point[0] for point in points]
    below = [point[1] - point[2] for point in points]
    above = [point[3] - point[1] for point in points]
    axes.errorbar(
        at,
        [point[1] for point in points],
        yerr=[below, above],
        color="C3",
        marker="o",
        markersize=4,
        capsize=2,
        linewidth=1.4,
        label="served, held-out prompts",
        zorder=5,
    )
