"""From a training run to a drafter that anything can load: the published checkpoint, its recipe, its record.

Owns what lies beside the weights (recipe.toml, run.json). The layout of the weights is formats.zlab's.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.train.loop import Trainer
from blockdraft.train.recipe import read_recipe, recipe_from_dict
from blockdraft.train.state import BEST_FILE, read_best, read_state

__all__ = ["RECIPE_FILE", "RUN_FILE", "export_draft", "model_from_state"]

RECIPE_FILE = "recipe.toml"
RUN_FILE = "run.json"
_OWN_FILES = ("config.json", "model.safetensors", "mask_embedding.pt", RECIPE_FILE, RUN_FILE, "README.md")


def model_from_state(path: Path, *, target: TargetFacts | None = None) -> tuple[DraftModel, dict[str, Any], int]:
    """(model, recipe as nested dictionaries, number of steps done) of a saved run or a best evaluation, in float32.

    `target` is needed only for a state that does not hold the draft's configuration itself.
    """
    state = read_best(path) if path.name == BEST_FILE else read_state(path)
    if "config" in state:
        config = zlab.config_from_dict(state["config"])
    elif target is not None:
        config = recipe_from_dict(state["recipe"], where=str(path)).draft.config(target)
    else:
        raise CheckpointError(f"{path} does not say which target it is for; give the target's facts")
    try:
        model = DraftModel.from_checkpoint(zlab.Checkpoint(config=config, tensors=dict(state["model"])))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return model, dict(state["recipe"]), int(state["step"])


def export_draft(
    source: Trainer | Path,
    folder: Path,
    run: Mapping[str, Any],
    *,
    target: TargetFacts | None = None,
    overwrite: bool = False,
) -> None:
    """Write the drafter of a trainer, or of a saved state, in bfloat16: all of it and read back, or nothing.

    `run` says what was measured (steps, blocks, sequences, answer tokens, seconds, versions, commit) and becomes
    run.json. `overwrite` replaces a folder that holds nothing but an earlier export.
    """
    if isinstance(source, Trainer):
        config, recipe = source.config, source.recipe
        tensors = source.model.state_dict()
    else:
        model, raw, _ = model_from_state(source, target=target)
        config, recipe = model.config, recipe_from_dict(raw, where=str(source))
        tensors = model.state_dict()
    try:
        record = json.dumps(dict(run), indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the run's record cannot be written as JSON: {error}") from None
    _check_destination(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh = temporary / "new"
        zlab.write(fresh, zlab.Checkpoint(config=config, tensors=dict(tensors)), dtype="bfloat16")
        _write(fresh / RECIPE_FILE, recipe.to_toml())
        _write(fresh / RUN_FILE, record)
        _check_reads_back(fresh, config, tensors)
        if read_recipe(fresh / RECIPE_FILE) != recipe:
            raise CheckpointError(f"{folder}: {RECIPE_FILE} does not read back as the recipe")
        if folder.exists():
            os.rename(folder, temporary / "old")
        os.rename(fresh, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written ({error}); nothing was changed") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check_reads_back(folder: Path, config: DraftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    again = zlab.read(folder)
    same = again.config == config and again.tensors.keys() == tensors.keys()
    if not same or not all(torch.equal(again.tensors[n], t.bfloat16()) for n, t in tensors.items()):
        raise CheckpointError("the exported drafter does not read back as it was written; check the disk")


def _check_destination(folder: Path, *, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a folder to write to")
    inside = sorted(path.name for path in folder.iterdir())
    foreign = [name for name in inside if name not in _OWN_FILES]
    if foreign:
        raise CheckpointError(f"{folder} holds {foreign[0]}, which no export writes; choose another folder")
    if inside and not overwrite:
        raise CheckpointError(f"{folder} is not empty; choose another folder or overwrite explicitly")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as sink:
        sink.write(text)
        sink.flush()
        os.fsync(sink.fileno())
