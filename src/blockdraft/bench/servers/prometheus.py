"""Counters of a /metrics page: what was read, and what grew between two readings. Owns that text format."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["CounterNames", "Growth", "growth", "read_metrics"]

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+([^\s]+)(?:\s+-?\d+)?$")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterNames:
    """Names of an engine's counters, without `_total`; None is what it has not.

    `finished` counts ended requests, `tokens` emitted ones (`tokens_without_first`: the first one of a request is not
    among them). `counts_rows`: the engine adds the rows of a block, anchor and proposals, where others add proposals.
    """

    steps: str | None
    proposed: str | None
    accepted: str | None
    plain_steps: str | None = None
    per_position: str | None = None
    finished: str | None = None
    tokens: str | None = None
    tokens_without_first: bool = False
    counts_rows: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What counters grew by between two readings; None is what the engine does not count. No proposals in P's anchor.

    `at_least[i]`: steps that accepted more than i proposals.
    """

    num_steps: int | None
    num_draft_tokens: int | None
    num_accepted_draft_tokens: int | None
    at_least: tuple[int, ...] | None
    num_finished: int | None
    num_tokens: int | None

    def is_of(self, num_requests: int, num_tokens: int) -> bool | None:
        """Whether these requests, with so many emitted tokens in all, are all that the server did; None: unknown."""
        if self.num_finished is not None:
            return self.num_finished == num_requests
        return None if self.num_tokens is None else self.num_tokens == num_tokens


def read_metrics(text: str) -> dict[str, float]:
    """Every sample, summed over labels (ranks, models); those by position as name[position]. `_total` is cut off."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or found[1].endswith("_created"):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        position = _POSITION.search(found[2] or "")
        name = found[1].removesuffix("_total") + (f"[{position[1]}]" if position else "")
        sums[name] = sums.get(name, 0.0) + value
    return sums


def growth(names: CounterNames, before: Mapping[str, float], after: Mapping[str, float], num_requests: int) -> Growth:
    """What `num_requests` requests, and whatever else ran, added. A counter that appears with its first event was 0."""

    def grown(name: str | None) -> int | None:
        if name is None or (name not in after and name not in before):
            return None
        return round(after.get(name, 0.0) - before.get(name, 0.0))

    steps, proposed, tokens = grown(names.steps), grown(names.proposed), grown(names.tokens)
    if names.counts_rows and steps is not None and proposed is not None:
        proposed -= steps
    if (plain := grown(names.plain_steps)) is not None and steps is not None:
        steps += plain
    if names.tokens_without_first and tokens is not None:
        tokens += num_requests
    return Growth(
        num_steps=steps,
        num_draft_tokens=proposed,
        num_accepted_draft_tokens=grown(names.accepted),
        at_least=_by_position(names.per_position, grown),
        num_finished=grown(names.finished),
        num_tokens=tokens,
    )


def _by_position(name: str | None, grown: Callable[[str | None], int | None]) -> tuple[int, ...] | None:
    found: list[int] = []
    while name is not None and (count := grown(f"{name}[{len(found)}]")) is not None:
        found.append(count)
    return tuple(found) if found else None
