"""The report on a draft: one JSON-able value that holds everything `inspect` knows.

Its keys are documented in docs/inspect.md. `schema` rises when a key changes its meaning or goes; new keys may come.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.formats import Layout, find_dialect, zlab
from blockdraft.formats.known_streams import KnownStream, known_stream
from blockdraft.inspection.costs import count_parameters, file_sizes, step_cost
from blockdraft.inspection.engines import Facts, examine_engines
from blockdraft.inspection.pair import examine_pair, read_target_facts

SCHEMA = 1
_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}


def inspect_checkpoint(
    draft_path: Path | str,
    target_path: Path | str | None = None,
    *,
    allow_mask_is_eos: bool = False,
    block_size: int | None = None,
    name: str | None = None,
    target_name: str | None = None,
) -> dict[str, Any]:
    """A JSON-able report on a draft (folder, bare config.json or GGUF file), and on its pair if a target is given.

    Raises ConfigError or CheckpointError where the draft itself is not sound; a pair that does not fit is a
    result (`pair.fits` false), not an error. `block_size` is for a draft whose files state none. `name`, `target_name`:
    what they are called, if not by their paths.
    """
    target = None if target_path is None else read_target_facts(target_path)
    layout = find_dialect(draft_path)
    config = layout.read_config(draft_path, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size)
    raw, place = layout.read_raw(draft_path)
    weights = _weights(layout, config, place) if place is not None else None
    own = weights["own"] if weights is not None else []
    facts = Facts(config=config, dialect=layout.name, raw=raw, own=own, target=target)
    known = None
    if config.tap_stream is None and facts.is_kimi_k3:
        known = (known_stream(name) if name else None) or known_stream(draft_path)
    paired = config if known is None or known.is_inferred else dataclasses.replace(config, tap_stream=known.stream)
    return {
        "schema": SCHEMA,
        "draft": name or str(draft_path),
        "dialect": layout.name,
        "family": config.family,
        "architecture": ", ".join(raw.get("architectures") or []) or raw.get("general.architecture"),
        "shape": _shape(config),
        "layers": [{"window": layer.window, "is_causal": layer.is_causal} for layer in config.layers],
        "rope": {"theta": config.rope.theta, "rope_type": config.rope.kind, **config.rope.numbers},
        "conventions": _conventions(facts, known),
        "parameters": count_parameters(config, own),
        "num_tensors": len({*zlab.expected_tensors(config), *own}),
        "weights": weights,
        "size_bytes": file_sizes(config, own),
        "cost": step_cost(config),
        "engines": examine_engines(facts),
        "target": None if target_path is None else target_name or str(target_path),
        "pair": None if target is None else examine_pair(paired, target, own, allow_mask_is_eos=allow_mask_is_eos),
    }


def _shape(config: DraftConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_proposals": config.num_proposals,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "tap_stream": config.tap_stream,
        "has_tap_norms": config.has_tap_norms,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "attention": "mla" if isinstance(config.attention, MlaConfig) else "gqa",
        **dataclasses.asdict(config.attention),
        "softmax_scale": config.softmax_scale,
        "max_length": config.max_position_embeddings,
        "max_window": config.max_window,
        "conv_kernel_size": config.conv.kernel_size if config.conv else None,
        "conv_group_size": config.conv.group_size if config.conv else None,
        "selector_rank": config.selector.rank if config.selector else None,
        "selector_top_k": config.selector.top_k if config.selector else None,
        "markov_rank": config.markov.rank if config.markov else None,
        "markov_kind": config.markov.kind if config.markov else None,
        "has_confidence_head": config.confidence is not None,
        "injection": dataclasses.asdict(config.injection) if config.injection else None,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _conventions(facts: Facts, known: KnownStream | None) -> dict[str, Any]:
    """What files leave to convention, said outright; and which of it this file says itself."""
    config = facts.config
    given = {**facts.raw, **(facts.raw.get("dflash_config") or {})}
    return {
        "first_proposal_row": 0 if config.predicts_from_anchor else 1,
        "tap": "output of the layer, counted from 0; the last one before the final norm",
        "narrower_is_prefix": all(layer.is_causal for layer in config.layers),
        "is_causality_declared": _is_causality_declared(facts, given),
        "has_target_two_streams": facts.is_kimi_k3,
        "is_tap_stream_declared": given.get("aux_hidden_stream") is not None,
        "known_tap_stream": None if known is None else dataclasses.asdict(known),
    }


def _is_causality_declared(facts: Facts, given: Mapping[str, Any]) -> bool:
    """By a key, or by a class or layout that knows one causality only."""
    is_fixed = not facts.is_zlab or facts.family == "dspine"
    return is_fixed or any(given.get(key) is not None for key in ("is_causal", "causal"))


def _weights(layout: Layout, config: DraftConfig, place: Path) -> dict[str, Any] | None:
    """What the weight files hold, checked against the config; None if the folder has only a config."""
    if place.is_dir() and not any(place.glob("*.safetensors*")):
        return None
    header = layout.read_header(place, config)
    layout.check(config, header, place)
    optional = zlab.optional_tensors(config)
    own = sorted(name for name in header if name in optional)
    if (place / zlab.MASK_EMBEDDING_FILE).is_file():
        own.append(zlab.MASK_EMBEDDING)
    return {
        "num_tensors": len(header),
        "dtypes": sorted({dtype for dtype, _ in header.values()}),
        "size_bytes": sum(_DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in header.values()),
        "own": own,
    }
