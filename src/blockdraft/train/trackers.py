"""Metrics to a tracking service, where one is asked for: trackio, wandb or tensorboard.

Owns the table of services. None of them is a dependency; metrics.jsonl is written whatever happens here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from blockdraft.errors import ConfigError, UnavailableError

__all__ = ["TRACKERS", "Tracking", "check_tracker", "open_tracking"]


class _Run(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Tracking:
    """Takes every line of metrics. A service that fails is named once, and left alone from then on."""

    def __init__(self, name: str, run: _Run, say: Callable[[str], None]) -> None:
        self.name, self._say = name, say
        self._run: _Run | None = run

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """One line of metrics, a step's or an evaluation's."""
        values = flat_numbers({key: value for key, value in metrics.items() if key != "step"})
        self._guarded(lambda run: run.log(values, int(metrics["step"])))

    def close(self) -> None:
        self._guarded(lambda run: run.close())
        self._run = None

    def _guarded(self, call: Callable[[_Run], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:  # whatever a service does wrong, the run goes on
            self._run = None
            self._say(f"{self.name} failed ({type(error).__name__}: {error}); the run goes on without it")


def check_tracker(name: str) -> Any:
    """The module of the service `name`. Raises ConfigError for an unknown one, UnavailableError if it is missing."""
    if name not in TRACKERS:
        raise ConfigError(f"tracker {name!r} is not known; there are {', '.join(TRACKERS)}")
    module_name, package, _ = TRACKERS[name]
    try:
        return importlib.import_module(module_name)
    except ImportError:
        raise UnavailableError(f"{name} is not installed; pip install {package}, or leave the tracker out") from None


def open_tracking(
    name: str,
    *,
    project: str,
    run_name: str,
    recipe: Mapping[str, Any],
    folder: Path,
    say: Callable[[str], None],
) -> Tracking:
    """Tracking by the service `name`; a run of the same name goes on. Raises UnavailableError with what to install."""
    module = check_tracker(name)
    try:
        run = TRACKERS[name][2](module, project, run_name, recipe, folder)
    except Exception as error:
        raise UnavailableError(f"{name} could not be started ({type(error).__name__}: {error})") from None
    return Tracking(name, run, say)


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested mappings and lists under names with slashes; anything else is left out."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, list | tuple):
            found |= flat_numbers({str(place): entry for place, entry in enumerate(value, 1)}, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found


# ---- the services ----------------------------------------------------------------------------------------------------
class _LoggingModule:
    """trackio and wandb: module-level init, log, finish."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._module.log(dict(values), step=step)

    def close(self) -> None:
        self._module.finish()


class _EventFiles:
    """tensorboard: event files below the run's folder."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


def _open_trackio(module: Any, project: str, run_name: str, recipe: Mapping[str, Any], _folder: Path) -> _Run:
    module.init(project=project, name=run_name, config=dict(recipe), resume="allow")
    return _LoggingModule(module)


def _open_wandb(module: Any, project: str, run_name: str, recipe: Mapping[str, Any], folder: Path) -> _Run:
    module.init(project=project, id=run_name, name=run_name, config=dict(recipe), dir=str(folder), resume="allow")
    return _LoggingModule(module)


def _open_tensorboard(module: Any, _project: str, run_name: str, _recipe: Mapping[str, Any], folder: Path) -> _Run:
    return _EventFiles(module.SummaryWriter(log_dir=str(folder / "tensorboard" / run_name)))


TRACKERS: dict[str, tuple[str, str, Callable[[Any, str, str, Mapping[str, Any], Path], _Run]]] = {
    "trackio": ("trackio", "trackio", _open_trackio),
    "wandb": ("wandb", "wandb", _open_wandb),
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", _open_tensorboard),
}
