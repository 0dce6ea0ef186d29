"""How records are grouped for a table, and the cells that several tables share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from blockdraft.bench import estimates as est
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.table import Cell, Column
from blockdraft.stats import Interval

__all__ = [
    "COMMITTED",
    "LENGTH",
    "PER_REQUEST",
    "POOLED",
    "RATE",
    "acceptance_cells",
    "by_setting",
    "grouped",
    "mean_output",
    "mode_of",
    "num_prompts",
    "score",
    "shown_load",
    "speculating",
    "truncated",
]

LENGTH = "acceptance length"
RATE = Column("proposal", "proposal acceptance", est.FORMULAS["proposal"], 1, "%")
POOLED = Column("pooled", "pooled", est.FORMULAS["pooled"], 3, least=1.0)
COMMITTED = Column("committed", "committed", est.FORMULAS["committed"], 3, least=1.0)
PER_REQUEST = Column("per_request", "per request", est.FORMULAS["per_request"], 3, least=1.0)

Grouped = dict[str, list[RequestRecord]]


def mode_of(record: RequestRecord) -> str:
    """ "width 8", "own width" or "off"."""
    if not record.speculation:
        return "off"
    return "own width" if record.width is None else f"width {record.width}"


def grouped(records: Iterable[RequestRecord], key: Callable[[RequestRecord], str]) -> Grouped:
    """Records by key, in the order in which keys first come."""
    found: Grouped = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def speculating(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.speculation]


def by_setting(records: Sequence[RequestRecord]) -> Grouped:
    """By sampling and load, what every table is about one of."""
    return grouped(records, lambda r: f"{r.sampling}, {shown_load(r.load)}" + (", replay" if r.is_replay else ""))


def shown_load(load: str) -> str:
    """ "8 in flight" of "closed:8", "2.5 arrivals/s" of "open:2.5"."""
    kind, _, number = load.partition(":")
    return f"{number} in flight" if kind == "closed" else f"{number} arrivals/s"


def num_prompts(records: Iterable[RequestRecord]) -> int:
    return len({est.cluster_of(record) for record in records})


def truncated(records: Iterable[RequestRecord]) -> int:
    return sum(record.is_truncated for record in records)


def mean_output(records: Sequence[RequestRecord]) -> Interval | None:
    return est.mean_of(est.counted(records), lambda r: r.counts.num_emitted_tokens)


def acceptance_cells(records: Sequence[RequestRecord]) -> dict[str, Cell]:
    known = est.speculated(records)
    cut = [r.counts.num_clipped_tokens for r in known if r.counts.num_clipped_tokens is not None]
    return {
        "pooled": est.acceptance_length(known),
        "per_request": est.per_request_length(known),
        "committed": est.committed_length(known),
        "proposal": est.proposal_acceptance(known),
        "steps": sum(r.counts.num_steps or 0 for r in known),
        "clipped": sum(cut) if len(cut) == len(known) else None,
    }


def score(records: Iterable[RequestRecord], name: str) -> Interval | None:
    return est.mean_of([r for r in records if name in r.scores], lambda r: r.scores[name])
