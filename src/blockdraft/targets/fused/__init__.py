"""The Llama, Mistral, Qwen2 and Qwen3 families as a target without per-layer overhead: many rows in one pass.

Owns the fused weights (``weights``), what a forward writes and reads of each row (``attention``) and the pass itself
(``target``); the transformers model is needed only while a target is made. Must not know drafts or requests.
"""

from __future__ import annotations

from .target import FusedTarget, can_fuse

__all__ = ["FusedTarget", "can_fuse"]
