"""A target as its config.json describes it, and every rule of its pairing with a draft."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, TargetFacts, pairing_rules, token_ids
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import gguf, zlab
from blockdraft.formats._gguf_file import find_gguf

# What transformers' own classes fill in, of the text parts that published models with vision write down in part.
_FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id", "pad_token_id")
CLASS_DEFAULTS: Mapping[str, Mapping[str, int | None]] = {
    "llama": dict(zip(_FIELDS, (32000, 4096, 32, 2048, 2, None), strict=True)),
    "mistral": dict(zip(_FIELDS, (32000, 4096, 32, 131072, 2, None), strict=True)),
    "gemma": dict(zip(_FIELDS, (256000, 3072, 28, 8192, 1, 0), strict=True)),
    "gemma3_text": dict(zip(_FIELDS, (262208, 2304, 26, 131072, 1, 0), strict=True)),
}


def read_target_facts(target_path: Path | str) -> TargetFacts:
    """The facts of a target from its folder, config.json or GGUF; end and pad ids also of the generation config."""
    path = Path(target_path)
    if not path.exists():
        text = str(target_path)
        is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        hint = "a hub id is not fetched here, download it first" if is_id else "give a folder or a config.json"
        raise CheckpointError(f"the target {text} does not exist: {hint}")
    if (file := find_gguf(path)) is not None:
        return gguf.target_facts(file)
    raw, folder = zlab.read_raw_config(path)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config of the target {target_path} is not an object")
    facts = TargetFacts.from_config(_completed(raw))
    generation = folder / "generation_config.json" if folder is not None else None
    more: Any = {}
    if generation is not None and generation.is_file():
        more, _ = zlab.read_raw_config(generation)
    if not isinstance(more, Mapping):
        raise ConfigError(f"{generation} is not an object")
    ends = {*facts.eos_token_ids}
    for config in (raw, more):
        ends |= {*token_ids("eos_token_id", config.get("eos_token_id"))}
    pads = token_ids("pad_token_id", more.get("pad_token_id"))
    pad = facts.pad_token_id if facts.pad_token_id is not None else next(iter(pads), None)
    return dataclasses.replace(facts, eos_token_ids=tuple(sorted(ends)), pad_token_id=pad)


def _completed(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with what a nested text part leaves to its class, where that is a class that is known here."""
    for key in ("text_config", "language_config", "llm_config"):
        text = raw.get(key)
        if isinstance(text, Mapping):
            return {**raw, key: {**CLASS_DEFAULTS.get(str(text.get("model_type")), {}), **text}}
    return raw


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
