"""How a draft starts: a fresh network from a seed. Owns nothing of the network itself."""

from __future__ import annotations

import torch

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.train.head import FrozenHead

__all__ = ["initialise_draft"]


def initialise_draft(config: DraftConfig, head: FrozenHead, *, seed: int) -> DraftModel:
    """A fresh draft from `seed`; a fresh DFlash 2 draft proposes what a DFlash draft of the same linear weights would.

    The final norm starts as the target's own, since both stand before the same output head.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config)
    with torch.no_grad():
        model.norm.weight.copy_(head.final_norm_E)
    return model
