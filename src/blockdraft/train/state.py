"""What a run keeps in its folder: the state it resumes from, its best weights, a line of metrics a step.

Owns the file names, atomic writing and the checks at reading. Knows no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.train.files import write_text_atomically
from blockdraft.train.recipe import differing_keys

__all__ = [
    "BEST_FILE",
    "METRICS_FILE",
    "STATE_FILE",
    "append_metrics",
    "check_same_run",
    "read_best",
    "read_lines",
    "read_state",
    "trim_metrics",
    "write_state",
]

STATE_FILE = "state.pt"
BEST_FILE = "best.pt"
METRICS_FILE = "metrics.jsonl"
# Settings that a resumed run may have otherwise: they change neither the maths of a step nor the order of the data.
# How many sequences a step takes is compared over all processes.
MAY_DIFFER = frozenset(
    {
        "optim.num_steps",
        "optim.sequences_per_step",
        "optim.sharding",
        "save_every_steps",
        "text.num_processes",
        "text.batch_size",
    }
)
MAY_DIFFER_TABLES = ("evaluation",)
_STATE_KEYS = ("step", "num_blocks_seen", "model", "optimiser", "generator", "order", "rows", "recipe")
_BEST_KEYS = ("step", "acceptance_length", "model", "recipe", "config")


def read_state(path: Path) -> dict[str, Any]:
    """What a run saved to resume from. Raises CheckpointError for a file that is not a whole training state."""
    return _read(path, _STATE_KEYS, "a training state", "delete it to start anew, or put an earlier one back")


def read_best(path: Path) -> dict[str, Any]:
    """What a run kept of its best evaluation: weights, step and acceptance length."""
    return _read(path, _BEST_KEYS, "the weights of a best evaluation", "delete it, or put an earlier one back")


def _read(path: Path, keys: tuple[str, ...], kind: str, advice: str) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and all of them mean an unusable file
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: the training state is damaged ({reason}); {advice}") from None
    if not isinstance(state, dict) or not all(key in state for key in keys):
        raise CheckpointError(f"{path}: not {kind}, {', '.join(keys)} belong in it; {advice}")
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write atomically: a kill at any moment, or a full disk, leaves the previous file whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as sink:
            torch.save(dict(state), sink)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        kept = "the previous checkpoint is whole" if path.is_file() else "there is no checkpoint yet"
        raise CheckpointError(
            f"{path}: step {state['step']} could not be saved ({error}); {kept}; free some space, then run again"
        ) from None


def check_same_run(
    path: Path, state: Mapping[str, Any], recipe: Mapping[str, Any], config: Mapping[str, Any], *, num_processes: int
) -> None:
    """Nothing; a ConfigError naming every setting of the saved run at `path` that is now another one."""
    keys = [key for key in differing_keys(state["recipe"], recipe) if not _may_differ(key)]
    if not keys and "config" in state:
        keys = differing_keys(state["config"], config, "config.")
    if keys:
        raise ConfigError(
            f"{path} was begun with another recipe or target: {', '.join(keys)} differ; "
            "go on with the old ones, or train into another folder"
        )
    saved = state["recipe"]["optim"]["sequences_per_step"] * state.get("num_processes", 1)
    each = recipe["optim"]["sequences_per_step"]
    if saved != each * num_processes:
        advice = "start a number of processes that divides it"
        if saved % num_processes == 0:
            advice = f"set optim.sequences_per_step={saved // num_processes}, or start another number of processes"
        raise ConfigError(
            f"{path} was begun with {saved} sequences a step over all processes, and {num_processes} x {each} "
            f"are asked for; {advice}"
        )


def _may_differ(key: str) -> bool:
    return key in MAY_DIFFER or key.split(".")[0] in MAY_DIFFER_TABLES


# ---- metrics ---------------------------------------------------------------------------------------------------------
def append_metrics(folder: Path, metrics: Mapping[str, Any]) -> None:
    """One more line of metrics."""
    append_line(folder / METRICS_FILE, metrics)


def append_line(path: Path, entry: Mapping[str, Any]) -> None:
    """One more line of a JSONL file of the run, in the place of one that a kill or a full disk has torn."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as sink:
            _drop_torn_line(sink)
            sink.write(json.dumps(dict(entry)).encode() + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error}); free some space, then run again") from None


def _drop_torn_line(sink: BinaryIO) -> None:
    """Cut off what stands behind the last line end."""
    end = sink.seek(0, os.SEEK_END)
    if not end:
        return
    sink.seek(end - 1)
    if sink.read(1) != b"\n":
        sink.seek(0)
        sink.truncate(sink.read().rfind(b"\n") + 1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file of the run; a torn last one is left out. Empty without a file."""
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            found.append({**entry, "step": int(entry["step"])})
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(f"{path} line {number} is not a line of a run; delete that line") from None
    return found


def trim_metrics(folder: Path, step: int) -> list[dict[str, Any]]:
    """The lines up to `step`, after dropping what an earlier, killed run wrote past it: those steps are done again."""
    path = folder / METRICS_FILE
    lines = read_lines(path)
    kept = [line for line in lines if line["step"] <= step]
    if len(kept) < len(lines):
        write_text_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
