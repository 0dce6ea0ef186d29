"""What is asked of a transformers model before it runs: its facts, its cache's name, its list of layers.

Owns the refusal of families by their configuration. Runs no forward and reads no file.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from torch import nn

from blockdraft.config import REFUSED_RECURRENT_MODEL_TYPES, TargetFacts, token_ids
from blockdraft.errors import PairError

from .hf_cache import refusal

__all__ = ["cache_word", "declared_facts", "decoder_of", "end_ids_of", "facts_of", "is_spread"]


def declared_facts(config: Any) -> TargetFacts:
    """Facts of a configuration. Raises PairError, naming the family, when its state is known to be out of reach."""
    # Before anything is read of it: purely recurrent families declare no maximum length, for one.
    model_type = config.get_text_config(decoder=True).model_type
    if model_type in REFUSED_RECURRENT_MODEL_TYPES:
        raise PairError(refusal(model_type, "recurrent state that is out of reach or lost between forwards"))
    raw = _filled(config)
    facts = TargetFacts.from_config(raw)
    # The class of a text part fills in an end of its own where the file leaves it to the whole model.
    ends = (*facts.eos_token_ids, *token_ids("eos_token_id", raw.get("eos_token_id")))
    return dataclasses.replace(facts, eos_token_ids=tuple(dict.fromkeys(ends)))


def _filled(config: Any) -> dict[str, Any]:
    """The configuration as a dictionary, with the number of layers also where it follows from their kinds."""
    raw: dict[str, Any] = config.to_dict()
    text = config.get_text_config(decoder=True)
    known = {"num_hidden_layers": text.num_hidden_layers} if hasattr(text, "num_hidden_layers") else {}
    if text is config:
        return {**known, **raw}
    inner = {key: {**known, **value} for key, value in raw.items() if getattr(config, key, None) is text}
    return {**raw, **inner}


def facts_of(model: Any) -> TargetFacts:
    """Facts of a loaded model: those of its configuration, corrected by what really is in memory."""
    config = model.config
    facts = declared_facts(config)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    return dataclasses.replace(
        facts,
        is_recurrent=facts.is_recurrent or bool(getattr(model, "_is_stateful", False)),
        vocab_size=vocab_size,
        max_length=min([facts.max_length, *_rope_limits(config.get_text_config(decoder=True))]),
        eos_token_ids=end_ids_of(model, facts, vocab_size),
    )


def end_ids_of(model: Any, facts: TargetFacts, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text: those of the configuration and of the generation config that the model can emit."""
    more = token_ids("eos_token_id", getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    return tuple(dict.fromkeys(i for i in (*facts.eos_token_ids, *more) if i < vocab_size))


def _rope_limits(config: Any) -> list[int]:
    """Lengths past which the rotary table changes with the longest sequence seen.

    Beyond them a key would depend on what was fed later, or by another row, and no rollback is exact.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    tables = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = []
    for table in tables:
        if table.get("rope_type") in ("dynamic", "longrope"):
            own = table.get("original_max_position_embeddings")
            shared = getattr(config, "original_max_position_embeddings", None)
            limits.append(int(own or shared or config.max_position_embeddings))
    return limits


def is_spread(model: Any) -> bool:
    """Whether the modules of a model lie on more than one device, or are fetched when they run."""
    return len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1


def cache_word(model: Any, model_type: str) -> str:
    """The name under which this model takes its cache: it changed between transformers releases."""
    parameters = inspect.signature(model.forward).parameters
    for word in ("cache", "past_key_values"):
        if word in parameters:
            return word
    raise PairError(refusal(model_type, "no key/value cache argument"))


def decoder_of(model: Any, facts: TargetFacts) -> tuple[Any, nn.ModuleList]:
    """The module that runs the layers (embedding to final norm), and its list of layers."""
    names = ("model", "transformer")  # where get_decoder() does not find it
    for decoder in (model.get_decoder(), *(getattr(model, name, None) for name in names)):
        layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == facts.num_layers:
            return decoder, layers
    raise PairError(
        f"target family {facts.model_type!r} has no list of {facts.num_layers} decoder layers to tap: a"
        " causal language model of transformers, built like Llama, is needed"
    )
