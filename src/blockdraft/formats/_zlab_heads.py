"""The fields of DSpark and DSpine in a config.json: heads, rows that predict from the anchor, adjacent injection.

Owns: which of them belong to which class, and how they are written. Must not know: tensors, maths.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.config import ConfidenceConfig, DraftConfig, Family, InjectionConfig, MarkovConfig, require_int
from blockdraft.errors import ConfigError
from blockdraft.formats._zlab_fields import Fields

__all__ = ["Heads", "heads_from_fields", "injection_to_dict", "spark_to_dict"]

_SPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_FROM_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next")
_PROJECTORS: Mapping[Family, tuple[str, ...]] = {
    "dflash": ("dflash", "dflash2"),
    "dflash2": ("dflash", "dflash2"),
    "dspark": ("dspark",),
    "dspine": ("dspine",),
}
_INJECTION = ("transfer_rank", "message_size", "top_k")
# What only training reads.
_INJECTION_TRAINING = (
    "ce_weight",
    "alignment_weight",
    "alignment_warmup_steps",
    "replacement_layers",
    "replacement_probability",
    "replacement_hold_ratio",
    "replacement_end_ratio",
    "candidate_mass_threshold",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What a class adds to the layers. The names are `DraftConfig`'s."""

    predicts_from_anchor: bool = False
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    injection: InjectionConfig | None = None


def heads_from_fields(fields: Fields, family: Family) -> Heads:
    """The heads that a class of this family declares. Raises ConfigError for one that belongs to another class."""
    projector = fields.pick("projector_type")
    if projector is not None and projector not in _PROJECTORS[family]:
        allowed = " or ".join(map(repr, _PROJECTORS[family]))
        raise ConfigError(f"projector_type is {projector!r}: with this class it is {allowed}, or absent")
    if family == "dspark":
        return _spark(fields)
    for name in (*_SPARK, *_FROM_ANCHOR):
        value = fields.pick(name)
        if value is not None and value is not False and not (name == "markov_rank" and value == 0):
            raise ConfigError(f"{name} is {value!r}: it belongs to DSpark, the class DSparkDraftModel would fit")
    given = fields.top.get("dspine_config")
    if family == "dspine":
        return Heads(injection=_injection(given))
    if given is not None:
        raise ConfigError("dspine_config is given: the class DSpineDraftModel would fit")
    return Heads()


def _spark(fields: Fields) -> Heads:
    if fields.top.get("dspine_config") is not None:
        raise ConfigError("dspine_config is given: it belongs to DSpine, the class DSpineDraftModel would fit")
    rank = require_int("markov_rank", fields.require("markov_rank", "0 says that there is no Markov head"), least=0)
    kind = fields.pick("markov_head_type")
    if rank and kind is None:
        raise ConfigError("markov_head_type is missing: say 'vanilla', 'gated' or 'rnn'; there is no default")
    if not rank and kind is not None:
        raise ConfigError(f"markov_head_type is {kind!r} and markov_rank is 0: it cannot take effect, drop it")
    return Heads(
        predicts_from_anchor=_from_anchor(fields),
        markov=MarkovConfig(rank=rank, kind=kind) if rank else None,
        confidence=_confidence(fields),
    )


def _from_anchor(fields: Fields) -> bool:
    """Two spellings of one statement; the class itself says yes where a file says nothing."""
    given = {name: fields.pick(name) for name in _FROM_ANCHOR}
    for name, value in given.items():
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: it must be true or false")
    values = {value for value in given.values() if value is not None}
    if len(values) > 1:
        raise ConfigError(f"{' and '.join(_FROM_ANCHOR)} differ: they say the same, make them equal")
    return values.pop() if values else True


def _confidence(fields: Fields) -> ConfidenceConfig | None:
    is_on = fields.require("enable_confidence_head", "true or false, there is no default")
    reads = fields.pick("confidence_head_with_markov")
    for name, value in (("enable_confidence_head", is_on), ("confidence_head_with_markov", reads)):
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}: it must be true or false")
    if not is_on:
        return None
    if reads is None:
        raise ConfigError("confidence_head_with_markov is missing: say whether the head reads the token before")
    return ConfidenceConfig(reads_token=reads)


def _injection(given: object) -> InjectionConfig:
    if not isinstance(given, Mapping):
        state = "missing" if given is None else repr(given)
        raise ConfigError(f"dspine_config is {state}: it must be an object with {', '.join(_INJECTION)}")
    known = sorted((*_INJECTION, *_INJECTION_TRAINING))
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"unknown key {key!r} in dspine_config: the nearest known name is {near!r}")
    missing = [name for name in _INJECTION if given.get(name) is None]
    if missing:
        raise ConfigError(f"dspine_config lacks {', '.join(missing)}: there is no default")
    return InjectionConfig(**{name: given[name] for name in _INJECTION})


def spark_to_dict(config: DraftConfig) -> dict[str, Any]:
    """The fields of DSpark's heads."""
    fields: dict[str, Any] = {
        "sample_from_anchor": config.predicts_from_anchor,
        "markov_rank": config.markov.rank if config.markov is not None else 0,
        "enable_confidence_head": config.confidence is not None,
    }
    if config.markov is not None:
        fields["markov_head_type"] = config.markov.kind
    if config.confidence is not None:
        fields["confidence_head_with_markov"] = config.confidence.reads_token
    return fields


def injection_to_dict(injection: InjectionConfig) -> dict[str, Any]:
    """The fields of `dspine_config` that serving needs."""
    return {name: getattr(injection, name) for name in _INJECTION}
