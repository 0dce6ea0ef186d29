"""A draft against the implementation that its authors publish, where that is installed and knows the draft's kind.

The reference reads the checkpoint folder by itself, so that our reader is compared too.

Letters: C positions of context, L rows of the block, N taps, E target width, D draft width.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.targets import Target
from blockdraft.verify.report import Check

__all__ = ["check_draft"]

OTHER_BLOCK = "the draft's block is not that of the reference implementation"
_NAME = "draft parity"
_CLASSES = ("DFlashDraftModel", "DFlash2DraftModel")
_MAX_ERROR = 1e-4  # of the largest value, float32 against float32


@torch.inference_mode()
def check_draft(target: Target, draft: DraftModel, folder: Path, prompt: Sequence[int]) -> Check:
    """One block after the prompt's real taps, in float32, ours against theirs."""
    twin = _reference(folder)
    if isinstance(twin, str):
        return Check(name=_NAME, outcome="not run", finding="", reason=twin)
    if draft.dtype != torch.float32:
        return Check(name=_NAME, outcome="not run", finding="", reason="the reference is compared in float32 only")
    ids = torch.tensor(list(prompt), dtype=torch.long, device=target.device)
    row = target.new_row()
    try:
        [scored] = target.forward([ids], [row], num_logits=1)
    finally:
        target.free(row)
    errors = []
    for length in (len(ids), len(ids) // 2):
        taps_CNE = scored.taps_TNE[:length]
        cache = draft.new_cache()
        draft.inject_rows([taps_CNE], [cache])
        noise_BLD = draft.noise([int(ids[length - 1])], draft.config.block_size, target.embed)
        ours_LD = draft(noise_BLD, [cache])[0].cpu()
        theirs_LD: Tensor = twin(
            target_hidden=taps_CNE.flatten(1)[None].cpu().float(),
            noise_embedding=noise_BLD.cpu().float(),
            position_ids=torch.arange(length + noise_BLD.shape[1])[None],
        )[0]
        errors.append(float((ours_LD - theirs_LD).abs().max() / theirs_LD.abs().max()))
    error = max(errors)
    return Check(
        name=_NAME,
        outcome="passed" if error <= _MAX_ERROR else "failed",
        finding=f"blocks after {len(ids)} and {len(ids) // 2} positions differ from the dflash package's by at most "
        f"{error:.1e} of the largest value",
        reason=None if error <= _MAX_ERROR else OTHER_BLOCK,
        power=f"sees any value that is off by more than {_MAX_ERROR:g} of the largest one",
        figures={"error": error, "limit": _MAX_ERROR},
    )


def _reference(folder: Path) -> Any:
    """The published model with this checkpoint, or why there is none."""
    try:
        module = importlib.import_module("dflash.model")
    except ImportError:
        return "the reference implementation is not installed; pip install dflash brings it"
    try:
        names = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or [None]
    except (OSError, ValueError):
        names = [None]
    if names[0] not in _CLASSES or not hasattr(module, names[0]):
        return "the reference implementation has no drafter of this kind, or does not read this layout"
    try:
        return getattr(module, names[0]).from_pretrained(folder, dtype=torch.float32).eval()
    except Exception as error:  # what another package does with files of its own is its own
        text = " ".join(str(error).split())[:160]
        return f"the reference implementation does not load this checkpoint ({text})"
