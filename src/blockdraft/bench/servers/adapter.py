"""What differs between engines: the fields they need, the counters they give, and what those are called.

Owns the contract of the adapters and what they share. One file an engine implements it; traps of its units stand there.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.answer import Answer
from blockdraft.bench.servers.prometheus import CounterNames, Growth
from blockdraft.bench.system import Sampling, Setting

__all__ = ["Adapter", "EngineFacts", "Page", "Pages", "plain_counts", "server_info_facts"]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a server that was asked for facts: its JSON (None for other pages), text and headers."""

    json: Any
    text: str
    headers: Mapping[str, str]


Pages = Mapping[str, Page]
"""By path; those that are not there are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a server says of itself. `max_width` counts the anchor; `template` is its chat template."""

    version: str = "unknown"
    max_width: int | None = None
    draft: str | None = None
    template: str | None = None
    dtype: str | None = None


class Adapter(ABC):
    """One engine. Reading methods raise AnswerError for fields that are no counters."""

    name: ClassVar[str]
    owned_by: ClassVar[str | None] = None
    """What its /v1/models says; None where that says nothing."""
    metrics_prefix: ClassVar[str | None] = None
    pages: ClassVar[tuple[str, ...]] = ()
    """Paths that `facts` reads, beside /v1/models and /metrics."""
    counters: ClassVar[CounterNames | None] = None
    advice: ClassVar[str]
    """How to start it so that it can be measured."""
    can_switch: ClassVar[bool] = False
    """Whether a request can do without the draft, and choose a width."""
    counts_steps_apart: ClassVar[bool] = False
    """Whether steps have to be taken from /metrics although the answer has the other counters."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Fields that keep a server from adding cuts of its own (or of the model's files) to the sampling that is asked."""
    tokenize: ClassVar[tuple[str, str, Mapping[str, Any]] | None] = None
    """(path, field of the text, further fields) of the page that counts tokens."""

    def facts(self, pages: Pages) -> EngineFacts:
        return EngineFacts()

    def body(self, setting: Setting) -> dict[str, Any]:
        """Fields beside OpenAI's for a request under this setting."""
        return {}

    def sampling(self, sampling: Sampling) -> dict[str, Any]:
        made: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, **self.neutral}
        return made if sampling.top_k is None else {**made, "top_k": sampling.top_k}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        """Counters of one request, None where the answer has none. `width`: rows of the block, where known."""
        return None

    def by_growth(self, own: Counts | None, grown: Growth, answer: Answer, width: int | None) -> Counts:
        """Counters of the only request that ran between two readings of /metrics."""
        accepted = None
        if grown.at_least is not None and grown.num_steps is not None:
            falling = (grown.num_steps, *grown.at_least, 0)
            accepted = tuple(one - two for one, two in pairwise(falling))
        return Counts(
            num_steps=grown.num_steps,
            num_draft_tokens=grown.num_draft_tokens,
            num_accepted_draft_tokens=grown.num_accepted_draft_tokens,
            num_emitted_tokens=answer.num_emitted,
            accepted_histogram=accepted if accepted is None or min(accepted) >= 0 else None,
            max_draft_tokens=None if width is None else width - 1,
        )


def plain_counts(num_emitted: int) -> Counts:
    """Of an answer without speculation by an engine that counts none: every token after the first took a step."""
    return Counts(
        num_steps=max(num_emitted - 1, 0),
        num_draft_tokens=0,
        num_accepted_draft_tokens=0,
        num_emitted_tokens=num_emitted,
        steps_source="derived",
    )


def server_info_facts(pages: Pages, paths: Sequence[str]) -> EngineFacts:
    """What the first of these pages that is there tells of an engine with SGLang's server arguments."""
    infos = (pages[path].json for path in paths if path in pages and isinstance(pages[path].json, Mapping))
    info: Mapping[str, Any] = next(infos, {})
    width = info.get("speculative_num_draft_tokens")
    return EngineFacts(version=str(info.get("version", "unknown")), max_width=width if isinstance(width, int) else None)
