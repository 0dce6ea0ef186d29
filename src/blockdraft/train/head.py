"""The target's rows that a draft borrows while it is trained.

Letters: V vocabulary, E target width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["FrozenHead"]


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding rows, final norm weight and output rows. Embedding and output may be one tensor (tied)."""

    embed_VE: Tensor
    final_norm_E: Tensor
    head_VE: Tensor
