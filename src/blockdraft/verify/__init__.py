"""Is this pair compatible, correct and lossless: an examination whose errors are known.

`examine_pair` examines an engine, `examine_system` anything that can be asked like one (`System`).
"""

from __future__ import annotations

from blockdraft.verify.exam import ALPHA, BUDGETS, Budget, exam_prompts, examine_pair, examine_system
from blockdraft.verify.report import Check, Report
from blockdraft.verify.system import EngineSystem, Step, System, Trace

__all__ = [
    "ALPHA",
    "BUDGETS",
    "Budget",
    "Check",
    "EngineSystem",
    "Report",
    "Step",
    "System",
    "Trace",
    "exam_prompts",
    "examine_pair",
    "examine_system",
]
