"""How far a run is, for somebody who watches: a bar on a terminal, a line now and then elsewhere.

Owns the wording and the estimate of the time left. Knows the metrics of a step and of an evaluation, no model.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["TrainingProgress", "evaluation_line"]

LINE_EVERY_STEPS = 20
_STEPS_OF_ESTIMATE = 50
_SHOWN = ("loss", "selector_loss", "prefix", "selector_prefix", "oracle_prefix", "recall", "grad_norm", "step_s")
_ON_BAR = ("loss", "prefix", "selector_prefix", "recall")


class TrainingProgress:
    """Takes every line of metrics, a step's or an evaluation's, as it is written. A context manager.

    Where `stream` is a terminal a bar stands on it, and other lines appear above the bar; elsewhere `say` gets one line
    for the first step, every 20th and the last, with means since the line before.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        say: Callable[[str], None],
        start_step: int = 0,
        evaluate_every: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self.num_steps, self.evaluate_every = num_steps, evaluate_every
        self._say, self._stream = say, stream or sys.stderr
        self._step_s: deque[float] = deque(maxlen=_STEPS_OF_ESTIMATE)
        self._evaluate_s: deque[float] = deque(maxlen=3)
        self._since: list[Mapping[str, Any]] = []
        self._has_spoken = False
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._served = ""
        if self._stream.isatty():
            self._open_bar(start_step)

    def __enter__(self) -> TrainingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal, finished or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """One line of text beside the progress."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            self._say(line)

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics."""
        if "acceptance_length" in metrics:
            self._evaluated(metrics)
        else:
            self._stepped(metrics)

    def left_s(self, step: int) -> float:
        """Seconds that the steps and evaluations after `step` will take, by the mean of the latest ones."""
        steps = _mean(self._step_s) * (self.num_steps - step)
        return steps + _mean(self._evaluate_s) * self._evaluations_after(step)

    # ---- inside --------------------------------------------------------------------------------------------------
    def _evaluations_after(self, step: int) -> int:
        if not self.evaluate_every:
            return 0
        planned = {*range(self.evaluate_every, self.num_steps + 1, self.evaluate_every), self.num_steps}
        return sum(at > step for at in planned)

    def _evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._evaluate_s.append(float(metrics.get("evaluate_s", 0.0)))
        line = evaluation_line(metrics)
        self._served = line.partition(": ")[2]
        self.say(line)

    def _stepped(self, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["step"])
        self._step_s.append(float(metrics["step_s"]))
        if self._bar is not None and self._task is not None:
            numbers = "  ".join(f"{name} {metrics[name]:.3f}" for name in _ON_BAR if name in metrics)
            self._bar.update(
                self._task,
                completed=step,
                numbers=numbers + (f"  served {self._served}" if self._served else ""),
                left=f"{_clock(self.left_s(step))} left",
            )
            return
        self._since.append(metrics)
        if self._has_spoken and step % LINE_EVERY_STEPS and step != self.num_steps:
            return
        means = {name: _mean([entry[name] for entry in self._since if name in entry]) for name in _SHOWN}
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in means.items() if name in metrics)
        left = _clock(self.left_s(step))
        self._say(f"step {step}/{self.num_steps}  {numbers}  lr {metrics['lr']:.2e}  {left} left")
        self._since, self._has_spoken = [], True

    def _open_bar(self, start_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[numbers]}"),
        )
        self._bar = Progress(*columns, console=Console(file=self._stream), get_time=time.monotonic)
        self._bar.start()
        self._task = self._bar.add_task("", total=self.num_steps, completed=start_step, numbers="", left="")


def evaluation_line(metrics: Mapping[str, Any]) -> str:
    """One line for an evaluation's metrics: acceptance length, its interval where there is one, the best so far."""
    found = metrics["acceptance_length"]
    if isinstance(found, Mapping):
        text = f"{found['estimate']:.3f}"
        if found.get("low") is not None:
            text += f" [{found['low']:.3f}, {found['high']:.3f}]"
    else:
        text = f"{found:.3f}"
    best = metrics.get("best_step")
    mark = "" if best is None else " (best)" if best == metrics["step"] else f" (best at step {best})"
    return f"step {metrics['step']}: acceptance length {text}{mark}"


def _mean(values: deque[float] | list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
