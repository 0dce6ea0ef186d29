"""From names to a running engine: find the checkpoints, check the pair, load both halves.

Owns which draft and target are meant when none is named, and what happens when a draft does not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from blockdraft.config import check_pair
from blockdraft.draft import DraftModel
from blockdraft.engine.core import Engine
from blockdraft.errors import BlockdraftError, PairError, RequestError
from blockdraft.formats import zlab
from blockdraft.formats.source import locate
from blockdraft.targets import ensure_target, load_target
from blockdraft.text import load_tokenizer

__all__ = ["DTYPES", "SpeculationMode", "builtin_draft", "load"]

SpeculationMode = Literal["required", "optional", "off"]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
BUILTIN_NAME = "smollm2-135m"


def builtin_draft() -> Path:
    """The folder of the drafter that the package carries, made for the built-in target."""
    return Path(str(resources.files("blockdraft"))) / "data" / BUILTIN_NAME


def load(
    draft: str | Path | None = None,
    target: str | Path | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    speculation: SpeculationMode = "required",
    max_rows: int = 16,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """An engine for a pair; without names, for the built-in one.

    `speculation`: "required" makes a draft that does not fit an error; "optional" goes on without it and says so in
    every completion; "off" loads no draft. `dtype` holds for both halves. `progress` is called with one short line as
    each stage of a first-time fetch begins.
    """
    if speculation not in ("required", "optional", "off"):
        raise RequestError(f'speculation is {speculation!r}; allowed are "required", "optional" and "off"')
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
    if draft is not None and target is None:
        raise PairError(f"draft {draft} needs its target; name it with target (--target on the command line)")
    if draft is None and target is not None and speculation != "off":
        raise PairError(f"target {target} has no draft; name one, or turn speculation off (--no-draft)")
    target_folder = ensure_target(progress=progress) if target is None else locate(target, what="target")
    draft_folder = builtin_draft() if draft is None else locate(draft, what="draft")
    model, reason = None, "speculation is switched off"
    if speculation != "off":
        model, reason = _load_draft(draft_folder, target_folder, dtype, device, speculation)
    taps = () if model is None else model.config.target_layer_ids
    loaded = load_target(
        target_folder,
        tap_layer_ids=taps,
        dtype=DTYPES[dtype],
        device=device,
        trust_remote_code=trust_remote_code,
    )
    if model is not None:
        check_pair(model.config, loaded.facts)
    return Engine(
        loaded, model, tokenizer=load_tokenizer(target_folder), draft_off_reason=reason, max_rows=max_rows
    )


def _load_draft(
    folder: Path, target_folder: Path, dtype: str, device: str, speculation: SpeculationMode
) -> tuple[DraftModel | None, str]:
    from blockdraft.inspection import read_target_facts

    try:
        checkpoint = zlab.read(folder)
        check_pair(checkpoint.config, read_target_facts(target_folder))
    except BlockdraftError as error:
        if speculation == "required":
            raise
        return None, f"the draft was left out: {error}"
    model = DraftModel.from_checkpoint(checkpoint, dtype=DTYPES[dtype], device=device)
    if device == "cpu" and dtype in ("float32", "bfloat16"):
        model.pack_()
    return model, ""
