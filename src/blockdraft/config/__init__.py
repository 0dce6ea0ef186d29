"""What every drafter hyper-parameter means, once, and whether a draft fits a target.

Owns: `DraftConfig` and its parts (frozen, validated), `TargetFacts`, the pairing rules.
Must not know: torch, files, the spelling of any checkpoint dialect of a draft.
"""

from __future__ import annotations

from blockdraft.config.attention import AttentionConfig, GqaConfig, LayerConfig, MlaConfig, RopeConfig
from blockdraft.config.checks import require_bool, require_float, require_int, token_ids
from blockdraft.config.draft import TAP_STREAMS, ConvConfig, DraftConfig, Family, SelectorConfig, TapStream
from blockdraft.config.heads import ConfidenceConfig, InjectionConfig, MarkovConfig, MarkovKind
from blockdraft.config.pairing import (
    PROVEN_RECURRENT_MODEL_TYPES,
    REFUSED_RECURRENT_MODEL_TYPES,
    PairRule,
    TargetFacts,
    Verdict,
    check_pair,
    is_kimi_k3,
    pairing_rules,
)

__all__ = [
    "PROVEN_RECURRENT_MODEL_TYPES",
    "REFUSED_RECURRENT_MODEL_TYPES",
    "TAP_STREAMS",
    "AttentionConfig",
    "ConfidenceConfig",
    "ConvConfig",
    "DraftConfig",
    "Family",
    "GqaConfig",
    "InjectionConfig",
    "LayerConfig",
    "MarkovConfig",
    "MarkovKind",
    "MlaConfig",
    "PairRule",
    "RopeConfig",
    "SelectorConfig",
    "TapStream",
    "TargetFacts",
    "Verdict",
    "check_pair",
    "is_kimi_k3",
    "pairing_rules",
    "require_bool",
    "require_float",
    "require_int",
    "token_ids",
]
