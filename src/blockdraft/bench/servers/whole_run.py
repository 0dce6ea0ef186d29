"""Counters of a whole run beside those of its requests: what /metrics grew by from the first request to the last.

Owns that entry of a record's `raw`. Where requests have counters of their own it checks them; where they have none (an
engine that counts on /metrics alone, several requests in flight) it is all that can be told, without an interval.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockdraft.bench.record import WHOLE_RUN, RequestRecord
from blockdraft.bench.servers.connection import Connection

if TYPE_CHECKING:
    import httpx

__all__ = ["WholeRun"]

SUMS = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")


class WholeRun:
    """From `begin` to `end` nobody but this run may use the server; whether that was so is written down."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._before: dict[str, float] | None = None
        self._records: list[RequestRecord] = []

    async def begin(self, http: httpx.AsyncClient) -> None:
        self._before = await self._connection.read_counters(http)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    async def end(self, http: httpx.AsyncClient, last: RequestRecord) -> RequestRecord:
        """The last record with the run's counters in it; as it was where the server has none."""
        if self._before is None or not all(record.is_whole for record in self._records) or not last.speculation:
            return last
        num_tokens = sum(record.counts.num_emitted_tokens for record in self._records)
        grown = await self._connection.grown(http, self._before, len(self._records), num_tokens)
        if grown is None:
            return last
        entry: dict[str, Any] = {
            "num_requests": len(self._records),
            "num_emitted_tokens": num_tokens,
            "nobody_else": grown.is_of(len(self._records), num_tokens),
            "server": {name: getattr(grown, name) for name in SUMS},
            "requests": None,
        }
        if all(r.counts.has_acceptance and r.counts.steps_source == "counted" for r in self._records):
            entry["requests"] = {name: sum(getattr(r.counts, name) for r in self._records) for name in SUMS}
        return replace(last, raw={**last.raw, WHOLE_RUN: entry})
