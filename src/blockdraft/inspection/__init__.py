"""What a draft checkpoint is, whether it fits a target, what it costs, what engines do with it: `inspect`.

Owns: the report, its schema and its text. Must not know: torch, weights (headers are enough), how a draft computes.
"""

from __future__ import annotations

from blockdraft.inspection.costs import REFERENCE_CONTEXT, cache_bytes, count_parameters, file_sizes, step_cost
from blockdraft.inspection.pair import read_target_facts
from blockdraft.inspection.report import SCHEMA, inspect_checkpoint
from blockdraft.inspection.text import render_text

__all__ = [
    "REFERENCE_CONTEXT",
    "SCHEMA",
    "cache_bytes",
    "count_parameters",
    "file_sizes",
    "inspect_checkpoint",
    "read_target_facts",
    "render_text",
    "step_cost",
]
