"""A target as its config.json describes it, and every rule of its pairing with a draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, TargetFacts, pairing_rules, token_ids
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import gguf, zlab


def read_target_facts(target_path: Path | str) -> TargetFacts:
    """The facts of a target from its folder, config.json or GGUF; end and pad ids also of the generation config."""
    path = Path(target_path)
    if not path.exists():
        text = str(target_path)
        is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        hint = "a hub id is not fetched here, download it first" if is_id else "give a folder or a config.json"
        raise CheckpointError(f"the target {text} does not exist: {hint}")
    if path.suffix == ".gguf" and path.is_file():
        return gguf.target_facts(path)
    raw, folder = zlab.read_raw_config(path)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config of the target {target_path} is not an object")
    generation = folder / "generation_config.json" if folder is not None else None
    if generation is None or not generation.is_file():
        return TargetFacts.from_config(raw)
    more, _ = zlab.read_raw_config(generation)
    if not isinstance(more, Mapping):
        raise ConfigError(f"{generation} is not an object")
    facts = TargetFacts.from_config(raw)
    ends = {*facts.eos_token_ids, *token_ids("eos_token_id", more.get("eos_token_id"))}
    pads = token_ids("pad_token_id", more.get("pad_token_id"))
    pad = facts.pad_token_id if facts.pad_token_id is not None else next(iter(pads), None)
    return dataclasses.replace(facts, eos_token_ids=tuple(sorted(ends)), pad_token_id=pad)


def examine_pair(
    config: DraftConfig, facts: TargetFacts, own: Collection[str], *, allow_mask_is_eos: bool
) -> dict[str, Any]:
    """Every rule with its verdict; the pair fits if none failed."""
    rules = pairing_rules(
        config,
        facts,
        allow_mask_is_eos=allow_mask_is_eos,
        has_own_embedding="embed_tokens.weight" in own,
        has_own_head="lm_head.weight" in own,
    )
    return {
        "target_model_type": facts.model_type,
        "fits": all(rule.verdict != "fail" for rule in rules),
        "rules": [{"name": rule.name, "verdict": rule.verdict, "detail": rule.detail} for rule in rules],
    }
