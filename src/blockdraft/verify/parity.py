"""The halves of a pair by themselves: the target against an independent reading, taking back positions, the draft.

Letters: T positions, N taps, E target width, V vocabulary, D draft width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.targets import Target
from blockdraft.targets.selftest import examine
from blockdraft.verify.greedy import Judge
from blockdraft.verify.report import Check
from blockdraft.verify.system import System

__all__ = ["check_draft_cache", "check_rollback", "check_target"]

OTHER_LOGITS = "the target's logits are not those of transformers"
LOST_POSITIONS = "the target does not take positions back exactly"
OTHER_CONTEXT = "the draft's context depends on how its positions came in"
_MAX_ERROR = {2: 0.06, 4: 1e-4, 8: 1e-5}  # of the largest logit, by bytes of a number


def check_target(system: System, prompts: Sequence[Sequence[int]], judge: Judge, itemsize: int) -> Check:
    """Our forward pass against the judge's at every position of the prompts."""
    error = 0.0
    num = num_same = 0
    for prompt in prompts:
        ours_TV, theirs_TV = system.logits(prompt).cpu().double(), judge.logits(prompt)
        error = max(error, float((ours_TV - theirs_TV).abs().max() / theirs_TV.abs().max()))
        num += len(prompt)
        num_same += int((ours_TV.argmax(-1) == theirs_TV.argmax(-1)).sum())
    limit = _MAX_ERROR[itemsize]
    return Check(
        name="target parity",
        outcome="passed" if error <= limit else "failed",
        finding=f"logits of {num} positions differ from {judge.name} by at most {error:.1e} of the largest one; "
        f"{num_same} of {num} most likely ids the same",
        reason=None if error <= limit else OTHER_LOGITS,
        power=f"sees any logit that is off by more than {limit:g} of the largest one",
        figures={"num_positions": num, "error": error, "limit": limit, "num_same_argmax": num_same},
    )


def check_rollback(target: Target, seed: int) -> Check:
    """Blocks fed and taken back, wholly, in part and not at all, against a row that never saw them."""
    try:
        found = examine(target, seed)
    except Exception as error:  # what a family does with a state that it cannot take back is its own
        reason = f"{LOST_POSITIONS}: {' '.join(str(error).split())}"
        return Check(name="rollback", outcome="failed", finding="the self-test broke off", reason=reason)
    fault = found.fault(target.dtype)
    return Check(
        name="rollback",
        outcome="failed" if fault else "passed",
        finding=f"after blocks taken back off by {found.error:.1e} (rounding {found.noise:.1e}); "
        f"positions left in by mistake would show as {found.contrast:.1e}",
        reason=f"{LOST_POSITIONS}: {fault}" if fault else None,
        power=f"a mistake shows {found.contrast / max(found.error, 1e-300):.0e} times as large as what was found",
        figures={"error": found.error, "noise": found.noise, "contrast": found.contrast},
    )


@torch.inference_mode()
def check_draft_cache(target: Target, draft: DraftModel, prompt: Sequence[int], seed: int) -> Check:
    """A context that came in at once, piece by piece and beside another row gives the draft the same block."""
    ids = torch.tensor(list(prompt), dtype=torch.long, device=target.device)
    row = target.new_row()
    try:
        [scored] = target.forward([ids], [row], num_logits=1)
    finally:
        target.free(row)
    taps_TNE, source = scored.taps_TNE, random.Random(seed)
    whole, pieces, beside, other = (draft.new_cache() for _ in range(4))
    draft.inject_rows([taps_TNE], [whole])
    start = 0
    while start < len(ids):
        size = source.randrange(1, draft.config.block_size + 1)
        draft.inject_rows([taps_TNE[start : start + size]], [pieces])
        start += size
    draft.inject_rows([taps_TNE[: len(ids) // 2 + 1], taps_TNE], [other, beside])
    anchor = int(ids[-1])
    blocks = [_block(target, draft, anchor, [cache])[0] for cache in (whole, pieces)]
    blocks.append(_block(target, draft, anchor, [other, beside])[1])
    scale = float(blocks[0].abs().max())
    error = max(float((block - blocks[0]).abs().max()) for block in blocks[1:]) / scale
    half = float((_block(target, draft, anchor, [other])[0] - blocks[0]).abs().max()) / scale
    limit = _MAX_ERROR[draft.dtype.itemsize]
    return Check(
        name="draft context",
        outcome="passed" if error <= limit else "failed",
        finding=f"the block after {len(ids)} positions is off by {error:.1e} when they come in pieces or beside others",
        reason=None if error <= limit else OTHER_CONTEXT,
        power=f"half of the context left out shows as {half:.1e}",
        figures={"error": error, "limit": limit, "contrast": half},
    )


def _block(target: Target, draft: DraftModel, anchor: int, caches: list) -> Tensor:  # type: ignore[type-arg]
    """hidden_BLD, float64."""
    config = draft.config
    anchors = [anchor] * len(caches)
    length = config.max_width - 1 if config.predicts_from_anchor else config.max_width
    noise_BLD = draft.noise(anchors, length, target.embed)
    return (draft(noise_BLD, caches) if config.injection is None else draft(noise_BLD, caches, anchors)).double()
