"""One request as it was measured: what was asked, what the engine counted, how long it took. One JSON line.

Owns the record that every system under test is read into, and its JSON. Whether its counters can be true is
identities.py's; what is made of many of them tables.py's. No torch, no engine.

Letters, as in stats.py: S steps, P proposals, A accepted ones, C emitted tokens (the first one comes from the prefill),
k proposals of a full block. A step commits its accepted proposals and one token of the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from blockdraft.errors import ConfigError, shown
from blockdraft.stats import RequestStats

__all__ = [
    "PROCESS_TAG",
    "RECORD_SCHEMA",
    "ROUND_TAG",
    "WHOLE_RUN",
    "Counts",
    "FinishReason",
    "RequestRecord",
    "Scalar",
]

RECORD_SCHEMA = "blockdraft.bench.record/1"
ROUND_TAG = "round"  # tags that a run adds: in which of its rounds, and by which of its processes, a record was made
PROCESS_TAG = "process"
WHOLE_RUN = (
    "whole_run"  # in `raw` of a run's last record: what the server's own counters grew by, from its first one on
)
FinishReason = Literal["stop", "length", "cancelled", "error"]
Scalar = str | int | float | bool
StepsSource = Literal["counted", "derived"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What an engine counted for one request; None is what it does not tell.

    `num_emitted_tokens` are those the user got, the first token and an end token among them. `num_clipped_tokens` were
    committed and cut away by a stop or a length limit. Histograms count steps: `accepted_histogram[i]` of those that
    accepted i proposals, `drafted_histogram[i]` of those that had i, `full_histogram[i]` of those that had i and
    accepted all of them. The lists per step, in order, replace all three. `max_draft_tokens` is k; `has_fixed_depth`
    says that every step proposes exactly k. `steps_source` "derived" says that S is not a counter of the engine but was
    worked out of the others, so that no identity can check it. `reported_*` are ratios the engine states itself:
    1 + A / S and A / P in its own words; a ratio with another meaning belongs into the record's `raw`.
    """

    num_steps: int | None
    num_draft_tokens: int | None
    num_accepted_draft_tokens: int | None
    num_emitted_tokens: int
    num_clipped_tokens: int | None = None
    accepted_histogram: tuple[int, ...] | None = None
    drafted_histogram: tuple[int, ...] | None = None
    full_histogram: tuple[int, ...] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None
    max_draft_tokens: int | None = None
    has_fixed_depth: bool = False
    steps_source: StepsSource = "counted"
    reported_acceptance_length: float | None = None
    reported_acceptance_rate: float | None = None

    @classmethod
    def of_stats(
        cls,
        stats: RequestStats,
        *,
        per_step_drafted: tuple[int, ...] | None = None,
        per_step_accepted: tuple[int, ...] | None = None,
        max_draft_tokens: int | None = None,
    ) -> Counts:
        """The counts of an engine of this package."""
        return cls(
            num_steps=stats.num_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            num_emitted_tokens=stats.num_emitted_tokens,
            num_clipped_tokens=stats.num_clipped_tokens,
            accepted_histogram=stats.accepted_histogram,
            drafted_histogram=stats.drafted_histogram,
            full_histogram=stats.full_histogram,
            per_step_accepted=per_step_accepted,
            per_step_drafted=per_step_drafted,
            max_draft_tokens=max_draft_tokens,
        )

    @property
    def has_acceptance(self) -> bool:
        """Whether S, P and A are known, and a step was taken."""
        known = None not in (self.num_steps, self.num_draft_tokens, self.num_accepted_draft_tokens)
        return known and bool(self.num_steps)

    @property
    def has_positions(self) -> bool:
        """Whether acceptance by position can be told."""
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            return True
        return self.accepted_histogram is not None and (self.drafted_histogram is not None or self.has_fixed_depth)

    def histograms(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Steps by accepted, by drafted, and full ones by drafted; all empty where they are not known."""
        if self.per_step_accepted is not None and self.per_step_drafted is not None:
            pairs = list(zip(self.per_step_accepted, self.per_step_drafted, strict=True))
            full = [drafted for accepted, drafted in pairs if accepted == drafted]
            return _histogram(self.per_step_accepted), _histogram(self.per_step_drafted), _histogram(full)
        if self.accepted_histogram is None:
            return (), (), ()
        if self.drafted_histogram is not None:
            return self.accepted_histogram, self.drafted_histogram, self.full_histogram or ()
        if self.has_fixed_depth and self.max_draft_tokens is not None and self.num_steps is not None:
            k, accepted = self.max_draft_tokens, self.accepted_histogram
            num_full = accepted[k] if len(accepted) > k else 0
            return accepted, (*[0] * k, self.num_steps), (*[0] * k, num_full)
        return (), (), ()

    def stats(self, *, prefill_s: float = 0.0, decode_s: float = 0.0) -> RequestStats:
        """These counts as the estimators of stats.py take them; unknown ones are 0, so ask `has_acceptance` first."""
        accepted, drafted, full = self.histograms()
        return RequestStats(
            num_steps=self.num_steps or 0,
            num_draft_tokens=self.num_draft_tokens or 0,
            num_accepted_draft_tokens=self.num_accepted_draft_tokens or 0,
            accepted_histogram=accepted,
            drafted_histogram=drafted,
            full_histogram=full,
            num_emitted_tokens=self.num_emitted_tokens,
            num_clipped_tokens=self.num_clipped_tokens or 0,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request (one turn of one prompt) in one setting.

    `cluster_id` is what intervals take as independent: all turns and samples of a prompt share one. `width` None is the
    system's own choice, or no speculation. `load` is "closed:N" (N requests in flight) or "open:R" (R arrivals a
    second). Times are seconds: `sent_s` after its process began this
    setting and data set (and round), the others after that request was sent, queue included;
    `prefill_s` and `decode_s` are the engine's own, where it has them. `num_thinking_tokens` counts the emitted tokens
    up to and including the end of the thinking section; None where there is none or nobody looked. `output_ids`
    and `text` stay None for data sets whose rows may not be kept; the hash is always there. `is_replay`: the text was
    given, and nothing but acceptance means anything. `raw` holds the engine's own fields as they came.
    """

    dataset: str
    prompt_id: str
    cluster_id: str
    turn: int
    sample: int
    speculation: bool
    width: int | None
    sampling: str
    load: str
    seed: int | None
    max_new_tokens: int
    finish_reason: FinishReason
    error: str | None
    num_prompt_tokens: int | None
    counts: Counts
    sent_s: float
    first_token_s: float | None
    total_s: float
    engine: str
    engine_version: str
    prefill_s: float | None = None
    decode_s: float | None = None
    num_thinking_tokens: int | None = None
    output_sha256: str | None = None
    output_ids: tuple[int, ...] | None = None
    text: str | None = None
    is_replay: bool = False
    tags: Mapping[str, Scalar] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str | int | bool | None, ...]:
        """What this record is the only one of in a run."""
        return (*self.setting_key, self.prompt_id, self.sample, self.turn)

    @property
    def setting_key(self) -> tuple[str | bool | int | None, ...]:
        """What was varied: speculation, width, sampling, load, and the data set."""
        return (self.dataset, self.speculation, self.width, self.sampling, self.load)

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def is_whole(self) -> bool:
        """Whether it ended by itself or by its limit: only such records are counted."""
        return self.finish_reason in ("stop", "length")

    def stats(self) -> RequestStats:
        """Counts and times for the estimators of stats.py, by the client's clock: the first token ends the prefill."""
        first = self.first_token_s
        prefill, decode = (0.0, 0.0) if first is None else (first, max(self.total_s - first, 0.0))
        return self.counts.stats(prefill_s=prefill, decode_s=decode)

    def to_json(self) -> dict[str, Any]:
        """A dictionary that json can write; `from_json` gives the equal record back. What is None is left out."""
        values = _plain(self)
        values["counts"] = _plain(self.counts)
        return {"schema": RECORD_SCHEMA, **values}

    @classmethod
    def from_json(cls, raw: object) -> RequestRecord:
        """The record that `to_json` wrote; a ConfigError for unknown, missing or impossible fields."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"a record is a {type(raw).__name__}; it must be an object")
        if raw.get("schema") != RECORD_SCHEMA:
            raise ConfigError(f"a record has the schema {shown(raw.get('schema'))}; this version reads {RECORD_SCHEMA}")
        values = {key: value for key, value in raw.items() if key != "schema"}
        counts = values.pop("counts", None)
        if not isinstance(counts, Mapping):
            raise ConfigError("a record has no counts; they must be an object")
        checked = _checked("record", values, cls, without="counts")
        return cls(counts=Counts(**_checked("counts", counts, Counts)), **checked)


def _histogram(values: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    counts = [0] * (max(values, default=-1) + 1)
    for value in values:
        counts[value] += 1
    return tuple(counts)


# ---- JSON ------------------------------------------------------------------------------------------------------------
def _plain(value: RequestRecord | Counts) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for entry in fields(value):
        item = getattr(value, entry.name)
        if item is None or (item == {} and isinstance(item, Mapping)):
            continue
        plain[entry.name] = list(item) if isinstance(item, tuple) else item
    return plain


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_counts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_count(item) for item in value)


def _is_scalars(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(key, str) and (isinstance(x, str | bool) or _is_number(x)) for key, x in value.items())


def _is_scores(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and _is_number(x) for key, x in value.items())


_KINDS: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(
        ("dataset", "prompt_id", "cluster_id", "sampling", "load", "engine", "engine_version"), ("a text", _is_text)
    ),
    **dict.fromkeys(("error", "text", "output_sha256"), ("a text", _is_text)),
    **dict.fromkeys(
        ("turn", "sample", "width", "seed", "max_new_tokens", "num_prompt_tokens", "num_thinking_tokens"),
        ("a whole number >= 0", _is_count),
    ),
    **dict.fromkeys(
        ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_emitted_tokens", "num_clipped_tokens"),
        ("a whole number >= 0", _is_count),
    ),
    "max_draft_tokens": ("a whole number >= 0", _is_count),
    **dict.fromkeys(
        ("sent_s", "first_token_s", "total_s", "prefill_s", "decode_s"),
        ("seconds >= 0", lambda value: _is_number(value) and value >= 0),
    ),
    **dict.fromkeys(("reported_acceptance_length", "reported_acceptance_rate"), ("a number", _is_number)),
    **dict.fromkeys(("speculation", "is_replay", "has_fixed_depth"), ("true or false", _is_bool)),
    **dict.fromkeys(
        ("accepted_histogram", "drafted_histogram", "full_histogram", "per_step_accepted", "per_step_drafted"),
        ("a list of whole numbers >= 0", _is_counts),
    ),
    "output_ids": ("a list of whole numbers >= 0", _is_counts),
    "finish_reason": (f"one of {', '.join(get_args(FinishReason))}", lambda value: value in get_args(FinishReason)),
    "steps_source": (f"one of {', '.join(get_args(StepsSource))}", lambda value: value in get_args(StepsSource)),
    "tags": ("an object of texts and numbers", _is_scalars),
    "scores": ("an object of numbers", _is_scores),
    "raw": ("an object", lambda value: isinstance(value, Mapping)),
}
_REQUIRED = {
    "record": {
        *("dataset", "prompt_id", "cluster_id", "turn", "sample", "speculation", "sampling", "load", "max_new_tokens"),
        *("finish_reason", "sent_s", "total_s", "engine", "engine_version"),
    },
    "counts": {"num_emitted_tokens"},
}
_NEVER_LEFT_OUT = ("width", "seed", "error", "num_prompt_tokens", "first_token_s")
_NEVER_LEFT_OUT_COUNTS = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")


def _checked(what: str, raw: Mapping[str, Any], kind: type[Any], *, without: str = "") -> dict[str, Any]:
    """Every field of `kind` with its value from `raw`, None where it was left out."""
    known = {entry.name for entry in fields(kind)} - {without}
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"a {what} has the unknown field {shown(unknown[0])}; known are {', '.join(sorted(known))}")
    if missing := sorted(_REQUIRED[what] - set(raw)):
        raise ConfigError(f"a {what} has no {missing[0]}; every {what} needs it")
    values: dict[str, Any] = dict.fromkeys(_NEVER_LEFT_OUT if what == "record" else _NEVER_LEFT_OUT_COUNTS)
    for name, value in raw.items():
        words, is_fine = _KINDS[name]
        if not is_fine(value):
            raise ConfigError(f"a {what}: {name} is {shown(value)}; it must be {words}")
        values[name] = tuple(value) if isinstance(value, list) and name != "raw" else value
    return values
