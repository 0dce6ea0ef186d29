"""What production engines would do with a draft: one table of rules per engine, each rule with its source.

The tables say what was read at the named state of an engine, not what its newest version does.
"""

from __future__ import annotations

from typing import Any

from blockdraft.inspection.engines.llama_cpp import LLAMA_CPP
from blockdraft.inspection.engines.mistral_rs import MISTRAL_RS
from blockdraft.inspection.engines.rules import LEVELS, EngineRules, Facts, Level, Outcome, Rule
from blockdraft.inspection.engines.sglang import SGLANG
from blockdraft.inspection.engines.tokenspeed import TOKENSPEED
from blockdraft.inspection.engines.vllm import VLLM

__all__ = ["ENGINES", "LEVELS", "EngineRules", "Facts", "Level", "Outcome", "Rule", "examine_engines"]

ENGINES: tuple[EngineRules, ...] = (SGLANG, VLLM, TOKENSPEED, LLAMA_CPP, MISTRAL_RS)


def examine_engines(facts: Facts) -> list[dict[str, Any]]:
    """What each engine would do, in a fixed order."""
    return [engine.examine(facts) for engine in ENGINES]
