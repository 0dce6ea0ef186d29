"""One server, its engine and model: requests as this engine takes them, answers read into counts.

Owns what a request's body holds. When requests are sent, and what becomes of their records, is server.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, plain_counts
from blockdraft.bench.servers.answer import Answer, AnswerError
from blockdraft.bench.servers.client import Client
from blockdraft.bench.servers.prometheus import Growth, growth, read_metrics
from blockdraft.bench.system import Job, Prompt, Setting
from blockdraft.errors import RequestError

if TYPE_CHECKING:
    import httpx

__all__ = ["Connection"]

SETTLE_S, POLL_S = 5.0, 0.02
PROBE_TOKENS = 16
PROBE = Prompt(id="probe", dataset="probe", turns=("Count from one to twenty in words.",))


@dataclass(kw_only=True)
class Connection:
    """`has_metrics`: /metrics can be read and has counters that this engine's adapter knows."""

    client: Client
    adapter: Adapter
    model: str
    facts: EngineFacts
    has_metrics: bool
    counts_requests: bool | None = None
    """Whether answers carry acceptance; None until a request was asked."""

    # ---- what is sent ------------------------------------------------------------------------------------------------
    def request(
        self, job: Job, setting: Setting, turn: int, replies: Sequence[str], max_new_tokens: int, effort: str | None
    ) -> tuple[str, dict[str, Any]]:
        """(path, body) of a prompt's turn after the replies to those before it."""
        prompt = job.prompt
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_new_tokens}
        body |= self.adapter.sampling(setting.sampling) | self.adapter.body(setting)
        if (seed := job.seed(setting, turn)) is not None:
            body["seed"] = seed
        if prompt.stop:
            body["stop"] = list(prompt.stop)
        if prompt.is_raw:
            return "/v1/completions", body | {"prompt": prompt.turns[0]}
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        for asked, reply in zip(prompt.turns[:turn], replies, strict=True):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        body["messages"] = [*messages, {"role": "user", "content": prompt.turns[turn]}]
        if effort is not None and setting.sampling.reasoning_effort is not None:
            body["reasoning_effort"] = effort
        return "/v1/chat/completions", body

    # ---- what is read ------------------------------------------------------------------------------------------------
    def width(self, setting: Setting) -> int | None:
        """Rows of the block, as asked for or as the server says; None where neither does."""
        return setting.width if setting.width is not None else self.facts.max_width

    def counts(self, answer: Answer, setting: Setting) -> Counts:
        """Counters of an answer by itself; those of speculation None where it has none."""
        own = self.adapter.counts(answer, self.width(setting))
        if own is not None:
            return own
        if not setting.speculation:
            return plain_counts(answer.num_emitted)
        return Counts(
            num_steps=None,
            num_draft_tokens=None,
            num_accepted_draft_tokens=None,
            num_emitted_tokens=answer.num_emitted,
        )

    async def read_counters(self, http: httpx.AsyncClient) -> dict[str, float] | None:
        text = await self.client.metrics(http) if self.has_metrics else None
        return None if text is None else read_metrics(text)

    async def grown(
        self, http: httpx.AsyncClient, before: dict[str, float], num_requests: int, num_tokens: int
    ) -> Growth | None:
        """What was added since a reading, once the server has counted these requests (a few seconds at most)."""
        names = self.adapter.counters
        assert names is not None
        until, last = time.monotonic() + SETTLE_S, None
        while True:
            after = await self.read_counters(http)
            if after is None:
                return None
            found = growth(names, before, after, num_requests)
            match found.is_of(num_requests, num_tokens):
                case True:
                    return found
                case None if after == last:  # nothing says how many there were; nothing moves any more
                    return found
            if time.monotonic() > until:
                return found
            last = after
            await asyncio.sleep(POLL_S)

    # ---- once, before anything is measured ---------------------------------------------------------------------------
    def probe(self, setting: Setting, effort: str | None) -> None:
        """One short request: whether the server takes our fields, and whether its answers carry acceptance.

        Raises RequestError for what it refuses, and where another width runs than is asked for.
        """
        job = Job(PROBE)
        path, body = self.request(job, setting, 0, (), PROBE_TOKENS, effort)
        answer = Answer()
        try:
            self.ask_alone(path, body, answer)
            counts = self.counts(answer, setting)
        except AnswerError as error:
            detail = f": {error.detail}" if error.detail else ""
            raise RequestError(
                f"{self.client.url}: a request in the way of {self.adapter.name} failed: {error.words}{detail}"
            ) from None
        if not setting.speculation:
            return
        self.counts_requests = None not in (counts.num_steps, counts.num_draft_tokens, counts.num_accepted_draft_tokens)
        k = counts.max_draft_tokens
        if setting.width is not None and k is not None and setting.width != k + 1:
            raise RequestError(f"{self.client.url} runs width {k + 1}, not {setting.width}; start it with that")

    def ask_alone(self, path: str, body: dict[str, Any], answer: Answer) -> None:
        """One request outside of any run. Raises AnswerError."""

        async def ask() -> None:
            async with self.client.open() as http:
                await self.client.ask(http, path, body, answer, time.perf_counter)

        asyncio.run(ask())
