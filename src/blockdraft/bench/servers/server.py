"""A server as a system under test: conversations under a load, a record for every request.

Owns when requests are sent, in a thread of its own so that writing records never holds up what comes in, and which
counters a record takes: those of the answer, or what /metrics grew by while nothing else ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockdraft.bench.record import Counts, RequestRecord
from blockdraft.bench.servers.answer import Answer, AnswerError, numbers_of
from blockdraft.bench.servers.connection import PROBE, PROBE_TOKENS, Connection
from blockdraft.bench.servers.whole_run import WholeRun
from blockdraft.bench.system import Job, Setting, SystemFacts
from blockdraft.errors import RequestError, UnavailableError

if TYPE_CHECKING:
    import httpx

__all__ = ["Server"]

GONE_AFTER = 3  # requests in a row that nobody took
NO_EFFORT = "none"


class Server:
    """`plain` is the same engine without a draft. `effort`: its word for the highest reasoning effort, or "none"."""

    def __init__(self, main: Connection, plain: Connection | None = None, *, effort: str | None = None) -> None:
        self.main, self.plain = main, plain
        self._effort = effort
        self._probed: set[tuple[bool, int | None]] = set()
        facts = main.facts
        details: dict[str, Any] = {"effort": effort, "dtype": facts.dtype}
        if plain is not None:
            details |= {"plain_model": plain.model, "plain_version": plain.facts.version}
        self._facts = SystemFacts(
            engine=main.adapter.name,
            version=facts.version,
            target=main.model,
            draft=facts.draft,
            max_width=facts.max_width,
            template_sha256=None
            if facts.template is None
            else hashlib.sha256(facts.template.encode()).hexdigest()[:16],
            hardware={},
            details=details,
        )

    @property
    def facts(self) -> SystemFacts:
        return self._facts

    @property
    def effort(self) -> str | None:
        return None if self._effort == NO_EFFORT else self._effort

    def connection(self, setting: Setting) -> Connection:
        return self.main if setting.speculation or self.plain is None else self.plain

    def num_tokens(self, text: str) -> int | None:
        """By the server's own tokenizer, where it has a page for that."""
        if self.main.adapter.tokenize is None:
            return None
        path, name, more = self.main.adapter.tokenize
        page = self.main.client.page(path, {"model": self.main.model, name: text, **more})
        found = page.json if page is not None else None
        tokens = found.get("tokens") if isinstance(found, Mapping) else None
        return len(tokens) if isinstance(tokens, list) else None

    def check(self, setting: Setting) -> None:
        connection = self.connection(setting)
        adapter, url = connection.adapter, connection.client.url
        if not setting.speculation and self.plain is None and not adapter.can_switch:
            raise RequestError(
                f"{adapter.name} cannot leave out its draft for a request; start a second server without one and name "
                "it with --plain-url"
            )
        if setting.sampling.reasoning_effort is not None and self._effort is None:
            raise RequestError(
                f"{setting.sampling.name} asks for the highest reasoning effort, and a server does not tell its word "
                "for that; name it with --effort WORD, or --effort none for targets without"
            )
        known = connection.facts.max_width
        if setting.width is not None and known is not None and not adapter.can_switch and setting.width != known:
            raise RequestError(f"{url} runs width {known}, not {setting.width}; start it with that")
        key = (setting.speculation, setting.width)
        if key not in self._probed:
            connection.probe(setting, self.effort)
            self._probed.add(key)
        if setting.speculation and not connection.counts_requests and not connection.has_metrics:
            raise RequestError(
                f"{url} tells no acceptance of a request, and /metrics has no counters either: {adapter.advice}"
            )

    def warm_up(self, setting: Setting) -> None:
        """A few short requests at the setting's concurrency. Raises UnavailableError where one of them breaks."""
        for record in _Drive(
            self, [Job(PROBE)] * (setting.load.concurrency or 1), setting, most=PROBE_TOKENS
        ).records():
            if not record.is_whole:
                raise UnavailableError(
                    f"{self.connection(setting).client.url}: a warm-up request broke: {record.error}"
                )

    def run(self, jobs: Sequence[Job], setting: Setting) -> Iterator[RequestRecord]:
        """A record for each request as soon as it is finished. Closing the iterator breaks off what is in flight.

        Raises UnavailableError when nobody takes requests any more; a run started again goes on from there.
        """
        self.check(setting)
        yield from _Drive(self, list(jobs), setting).records()


@dataclass
class _Drive:
    """Holds conversations, in a thread with an event loop of its own."""

    server: Server
    jobs: list[Job]
    setting: Setting
    most: int | None = None
    done: queue.SimpleQueue[RequestRecord | BaseException | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.connection = self.server.connection(self.setting)
        self.num_open = len(self.jobs)
        self.num_gone = 0
        self.whole_run = WholeRun(self.connection)
        load, connection = self.setting.load, self.connection
        is_alone = load.concurrency == 1
        needs_growth = not connection.counts_requests or connection.adapter.counts_steps_apart
        self.by_growth = self.setting.speculation and is_alone and needs_growth and connection.has_metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_running = threading.Event()

    # ---- the caller's thread -----------------------------------------------------------------------------------------
    def records(self) -> Iterator[RequestRecord]:
        thread = threading.Thread(target=self._in_thread, name="bench-requests", daemon=True)
        thread.start()
        try:
            while (item := self.done.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._is_running.wait()
            if thread.is_alive() and self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    self._loop.call_soon_threadsafe(self._task.cancel)
            thread.join()

    def _in_thread(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.done.put(error)
        finally:
            self._is_running.set()
            self.done.put(None)

    # ---- its own -----------------------------------------------------------------------------------------------------
    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._is_running.set()
        self.began_s = time.perf_counter()
        async with self.connection.client.open() as http:
            await self.whole_run.begin(http)
            self.began_s = time.perf_counter()
            waiting = deque(
                zip(self.setting.load.arrivals_s(len(self.jobs), self.setting.seed), self.jobs, strict=True)
            )
            most = self.setting.load.concurrency
            if most is None:
                tasks = [asyncio.create_task(self._hold(http, job, at)) for at, job in waiting]
            else:
                tasks = [asyncio.create_task(self._work(http, waiting)) for _ in range(min(most, len(waiting)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    async def _work(self, http: httpx.AsyncClient, waiting: deque[tuple[float, Job]]) -> None:
        """Conversations one after the other, until there are none left."""
        while waiting:
            await self._hold(http, waiting.popleft()[1], None)

    async def _hold(self, http: httpx.AsyncClient, job: Job, at: float | None) -> None:
        """One conversation, from its arrival where it has one."""
        if at is not None:
            await asyncio.sleep(max(at - self.now_s(), 0.0))
        replies: list[str] = []
        for turn in range(len(job.prompt.turns)):
            sent_s = at if at is not None and not turn else self.now_s()
            record = await self._ask(http, job, turn, replies, sent_s)
            ends = not record.is_whole or turn + 1 == len(job.prompt.turns)
            self.num_open -= ends
            record = await self.whole_run.end(http, record) if not self.num_open else record
            self.done.put(record)
            if self.num_gone >= GONE_AFTER:
                raise UnavailableError(
                    f"{self.connection.client.url} took none of {self.num_gone} requests in a row; start it again, "
                    "then this command goes on where it was"
                )
            if ends:
                return
            replies.append(record.text or "")

    async def _ask(
        self, http: httpx.AsyncClient, job: Job, turn: int, replies: Sequence[str], sent_s: float
    ) -> RequestRecord:
        connection, setting = self.connection, self.setting
        most = self._max_new_tokens(job)
        path, body = connection.request(job, setting, turn, replies, most, self.server.effort)
        answer, error, counts, before = Answer(), None, None, None
        try:
            if self.by_growth:
                before = await self._counters(http)
                sent_s = self.now_s()  # after they were read
            await connection.client.ask(http, path, body, answer, self.now_s)
            counts = connection.counts(answer, setting)
            if before is not None:
                counts = await self._counts_by_growth(http, before, answer, counts)
            self.num_gone = 0
        except AnswerError as broken:
            error = broken.words
            self.num_gone = self.num_gone + 1 if broken.is_gone else 0
        record = self._record(job, turn, answer, counts, sent_s, error)
        self.whole_run.add(record)
        return record

    async def _counters(self, http: httpx.AsyncClient) -> dict[str, float]:
        found = await self.connection.read_counters(http)
        if found is None:
            raise AnswerError("/metrics could not be read before the request")
        return found

    async def _counts_by_growth(
        self, http: httpx.AsyncClient, before: dict[str, float], answer: Answer, own: Counts
    ) -> Counts:
        """With what /metrics grew by. Raises AnswerError where another client used the server meanwhile."""
        connection = self.connection
        grown = await connection.grown(http, before, 1, answer.num_emitted)
        if grown is None:
            raise AnswerError("/metrics could not be read after the request")
        if grown.is_of(1, answer.num_emitted) is False:
            raise AnswerError("the server's counters hold more or less than this request; is somebody else using it?")
        width = connection.width(self.setting)
        return connection.adapter.by_growth(own if own.has_acceptance else None, grown, answer, width)

    def _max_new_tokens(self, job: Job) -> int:
        limits = [self.setting.max_new_tokens, job.prompt.max_new_tokens, self.most]
        return min(limit for limit in limits if limit is not None)

    def _record(
        self, job: Job, turn: int, answer: Answer, counts: Counts | None, sent_s: float, error: str | None
    ) -> RequestRecord:
        prompt, setting = job.prompt, self.setting
        end_s = answer.end_s if error is None and answer.end_s is not None else self.now_s()
        ids = tuple(answer.token_ids or (event["id"] for event in answer.tokens if isinstance(event.get("id"), int)))
        nothing = Counts(num_steps=None, num_draft_tokens=None, num_accepted_draft_tokens=None, num_emitted_tokens=0)
        fields: dict[str, Any] = {}
        if counts is not None and error is None:
            said = answer.reasoning + "\0" + answer.text
            fields = {
                "num_thinking_tokens": answer.num_reasoning,
                "output_ids": ids if len(ids) == counts.num_emitted_tokens else None,
                "output_sha256": None if not answer.reasoning else hashlib.sha256(said.encode()).hexdigest()[:32],
                "text": answer.text,
                "raw": {name: numbers_of(value) for name, value in answer.numbers.items()},
            }
        return RequestRecord(
            dataset=prompt.dataset,
            prompt_id=prompt.id,
            cluster_id=prompt.cluster,
            turn=turn,
            sample=job.sample,
            speculation=setting.speculation,
            width=setting.width,
            sampling=setting.sampling.name,
            load=setting.load.name,
            seed=job.seed(setting, turn),
            max_new_tokens=self._max_new_tokens(job),
            finish_reason="error" if error is not None else "length" if answer.finish_reason == "length" else "stop",
            error=error,
            num_prompt_tokens=answer.num_prompt if error is None else None,
            counts=counts if counts is not None and error is None else nothing,
            sent_s=sent_s,
            first_token_s=None if answer.first_s is None else max(answer.first_s - sent_s, 0.0),
            total_s=max(end_s - sent_s, 0.0),
            engine=self.connection.adapter.name,
            engine_version=self.connection.facts.version,
            tags=prompt.tags,
            **fields,
        )
