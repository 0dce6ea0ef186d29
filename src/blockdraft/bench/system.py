"""What is measured: a system under test, what it is asked, under which load.

Owns the contract between runs and systems: `System`, and what a run hands to it. An adapter of an engine implements
`System` and yields one RequestRecord for each request; it knows nothing of tables. No torch.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from blockdraft.bench.record import RequestRecord, Scalar
from blockdraft.errors import RequestError, shown

__all__ = ["SAMPLINGS", "Job", "Load", "Prompt", "Sampling", "Setting", "System", "SystemFacts", "find_sampling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question: user turns that are asked one after the other, each with the live replies to those before.

    `cluster` is what is independent: prompts made of one source row share it. `is_raw`: the one turn is continued as
    plain text, without a chat template. `answers` are for the scorer that `scorer` names (workloads.scoring) and never
    get into records. `is_private`: neither text nor ids may be kept.
    """

    id: str
    dataset: str
    turns: tuple[str, ...]
    cluster: str = ""
    system: str | None = None
    is_raw: bool = False
    answers: tuple[str, ...] = ()
    scorer: str | None = None
    max_new_tokens: int | None = None
    """Instead of the setting's, where it is smaller."""
    stop: tuple[str, ...] = ()
    is_private: bool = False
    tags: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.turns and (len(self.turns) == 1 or not self.is_raw), self.id
        if not self.cluster:
            object.__setattr__(self, "cluster", self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """A named way to draw tokens. Temperature 0 is greedy; `top_k` None means no cut.

    `reasoning_effort` goes to targets whose template takes one; "highest" is the template's own highest word.
    """

    name: str
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    reasoning_effort: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "reasoning_effort": self.reasoning_effort,
        }


SAMPLINGS: Mapping[str, Sampling] = {
    "production": Sampling(name="production", temperature=1.0, top_p=0.95, reasoning_effort="highest"),
    "greedy": Sampling(name="greedy", temperature=0.0),
}


def find_sampling(name: str) -> Sampling:
    if name not in SAMPLINGS:
        raise RequestError(f"sampling profile {shown(name)} is unknown; there are {', '.join(SAMPLINGS)}")
    return SAMPLINGS[name]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive: `concurrency` conversations always in flight, or `rate` Poisson arrivals a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise RequestError("a load is either a number of requests in flight or a rate of arrivals; give one")
        if self.concurrency is not None and self.concurrency < 1:
            raise RequestError(f"concurrency is {self.concurrency}; it must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise RequestError(f"the rate is {self.rate}; it must be a number of arrivals a second above 0")

    @property
    def name(self) -> str:
        return f"closed:{self.concurrency}" if self.rate is None else f"open:{self.rate:g}"

    def arrivals_s(self, count: int, seed: int) -> list[float]:
        """When each of `count` conversations arrives, in seconds from the start; all at 0 in a closed loop."""
        if self.rate is None:
            return [0.0] * count
        source, now, times = random.Random(f"arrivals:{seed}"), 0.0, []
        for _ in range(count):
            now += source.expovariate(self.rate)
            times.append(now)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all requests of one part of a run share. `width` None: the system's own."""

    speculation: bool
    width: int | None
    sampling: Sampling
    max_new_tokens: int
    load: Load
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.speculation and self.width is not None:
            raise RequestError(f"width is {self.width} while speculation is off; drop one of the two")

    @property
    def mode(self) -> str:
        """ "off", "width 8", or "own width"."""
        if not self.speculation:
            return "off"
        return "own width" if self.width is None else f"width {self.width}"

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.sampling.name}, {self.load.name}"

    def to_json(self) -> dict[str, Any]:
        return {
            "speculation": self.speculation,
            "width": self.width,
            "sampling": self.sampling.to_json(),
            "max_new_tokens": self.max_new_tokens,
            "load": self.load.name,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Job:
    """One sample of one prompt: a conversation to be held, turn by turn."""

    prompt: Prompt
    sample: int = 0

    def seed(self, setting: Setting, turn: int) -> int | None:
        """The seed of one turn's request, None for greedy: it depends on what is asked and on nothing else."""
        if setting.sampling.temperature == 0.0:
            return None
        words = f"{setting.seed}:{self.prompt.dataset}:{self.prompt.id}:{self.sample}:{turn}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """What stands beside every number of this system. `details` is whatever else explains them, JSON values only."""

    engine: str
    version: str
    target: str
    draft: str | None
    max_width: int | None
    """Rows of the draft's block; None without a draft, or where it is not known."""
    template_sha256: str | None
    """Of the chat template; None where it is not known, or there is none."""
    hardware: Mapping[str, Any]
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "version": self.version,
            "target": self.target,
            "draft": self.draft,
            "max_width": self.max_width,
            "template_sha256": self.template_sha256,
            "hardware": dict(self.hardware),
            "details": dict(self.details),
        }


@runtime_checkable
class System(Protocol):
    """Anything that answers prompts and says what it counted.

    A run calls `check` with every setting before anything runs, then for each setting `warm_up` once and `run`. A
    conversation with several turns gives one record for each; its requests follow each other, with the live replies.
    A request that breaks is a record with finish reason "error", and ends its conversation. Records come with text and
    ids where the system knows them; the run takes them out again where they may not be kept, so no text goes into
    `raw` or `error`. Tags are the prompt's.
    """

    @property
    def facts(self) -> SystemFacts:
        """What is measured, for the files."""
        ...

    def check(self, setting: Setting) -> None:
        """Nothing; a RequestError where this system cannot do what the setting asks for."""
        ...

    def num_tokens(self, text: str) -> int | None:
        """Tokens of a text by the target's tokenizer; None where the system does not know it."""
        ...

    def warm_up(self, setting: Setting) -> None:
        """Whatever must have happened once before times mean something."""
        ...

    def run(self, jobs: Sequence[Job], setting: Setting) -> Iterator[RequestRecord]:
        """Hold all conversations under the setting's load; a record for each request as soon as it is finished."""
        ...
