"""The drafter: tensors in, tensors out. It knows its config, and neither targets nor requests."""

from __future__ import annotations

from blockdraft.draft.cache import DraftCache
from blockdraft.draft.heads import CandidateLists, FullLaw, Proposal
from blockdraft.draft.model import DraftModel
from blockdraft.draft.proposing import BlockRows

__all__ = ["BlockRows", "CandidateLists", "DraftCache", "DraftModel", "FullLaw", "Proposal"]
