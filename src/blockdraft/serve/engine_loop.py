"""One thread that owns the engine: requests in by a queue, what each step gave out to asyncio.

Owns the engine between start and stop: nothing else calls it. Commands (submit, cancel) are applied between steps; a
step that breaks fails those that ran, and the thread goes on. Knows no HTTP.

Two sides: what is marked "asyncio" is touched in the event loop's thread only, what is marked "engine" in the engine's
only. What crosses over is a list of commands under a lock one way, and one call_soon_threadsafe a step the other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockdraft.engine import Completion, Engine, Request, Ticket, TokenEvent
from blockdraft.errors import BlockdraftError
from blockdraft.stats import EngineStats

__all__ = ["Done", "EngineLoop", "Failed", "LoopObserver", "QueueFullError", "Refused", "Step", "Submission", "Times"]

logger = logging.getLogger("blockdraft.serve")
MAX_FAILED_STEPS = 3  # so many in a row, and the engine counts as broken
SNAPSHOT_EVERY_S = 0.5
JOIN_S = 10.0


class QueueFullError(Exception):
    """As many choices run or wait as may."""

    def __init__(self, num_open: int, limit: int) -> None:
        super().__init__(f"{num_open} open of {limit}")
        self.num_open, self.limit = num_open, limit


# ---- what comes out ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine took the request; it waits for its turn."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step gave one choice. `num_drafted` is None for the prompt's first token."""

    events: Sequence[TokenEvent]
    num_drafted: int | None
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Times:
    """When a choice was submitted, first worked on, got its first token, and ended; monotonic seconds."""

    submitted_s: float
    started_s: float | None
    first_s: float | None
    ended_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The choice ended by itself, by its own error, or because it was cancelled."""

    completion: Completion
    times: Times


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot serve the request as it was asked for."""

    error: BlockdraftError


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended through no fault of its own."""

    message: str
    code: str


Message = Accepted | Step | Done | Refused | Failed


class LoopObserver:
    """What may be told of steps and endings (engine side); the base tells nobody."""

    def on_step(self, job: Job, step: Step) -> None: ...

    def on_end(self, job: Job, end: Done | Failed) -> None: ...

    def on_broken_step(self) -> None: ...


@dataclass(eq=False, slots=True)
class Job:
    """One choice on its way through the engine. The fields after `submitted_s` are the engine side's."""

    request: Request
    index: int
    submission: Submission
    submitted_s: float
    ticket: Ticket | None = None
    is_ended: bool = False
    started_s: float | None = None
    first_s: float | None = None
    num_sent: int = 0
    drafted_histogram: tuple[int, ...] = ()
    num_accepted: int = 0


@dataclass(eq=False)
class Submission:
    """The choices of one HTTP request; their messages come out of one inbox, each with the index of its choice."""

    loop: EngineLoop
    inbox: asyncio.Queue[tuple[int, Message]] = field(default_factory=asyncio.Queue)
    jobs: list[Job] = field(default_factory=list)
    num_open: int = 0
    timer: asyncio.TimerHandle | None = None

    def expire_in(self, seconds: float) -> None:
        """Let the reader of the inbox find an error there after so long (asyncio)."""
        late = Failed(f"the answer was not ready within this server's {seconds:g} s; ask for less", "request_timeout")
        self.timer = asyncio.get_running_loop().call_later(seconds, self.inbox.put_nowait, (0, late))

    async def next(self) -> tuple[int, Message]:
        """The next message of any choice (asyncio)."""
        return await self.inbox.get()

    def cancel(self) -> None:
        """End what is left of it between this engine step and the next (asyncio). Its messages are read by nobody."""
        if self.timer is not None:
            self.timer.cancel()
        if self.num_open:
            self.loop.cancel(self.jobs)


# ---- the loop ------------------------------------------------------------------------------------------------------
class EngineLoop:
    """Runs an engine in a thread of its own. `open_engine` makes the engine, or hands over one that is there."""

    def __init__(self, open_engine: Callable[[], Engine], *, max_queue: int, observer: LoopObserver) -> None:
        self._open_engine = open_engine
        self._max_queue = max_queue
        self._observer = observer
        self._lock = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._is_stopping = False
        self._active: list[Job] = []  # engine
        self._outbox: list[tuple[Job, Message]] = []  # engine
        self._num_open = 0  # asyncio
        self._idle = asyncio.Event()  # asyncio
        self._idle.set()
        self._num_failed_steps = 0
        self._snapshot_s = 0.0
        self.engine: Engine | None = None
        """For its constants (facts, config, tokenizer) only; set when it is ready."""
        self.stats = EngineStats()
        """A copy that is at most half a second old while steps run."""
        self._thread: threading.Thread | None = None

    # ---- asyncio side ------------------------------------------------------------------------------------------------
    async def start(self) -> Engine:
        """The engine, once the thread has it; what kept it from being loaded is raised here."""
        self._asyncio = asyncio.get_running_loop()
        ready: asyncio.Future[Engine] = self._asyncio.create_future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="blockdraft-engine", daemon=True)
        self._thread.start()
        return await ready

    @property
    def num_open(self) -> int:
        """Choices submitted and not ended."""
        return self._num_open

    @property
    def capacity(self) -> int:
        """Choices that may be open at once: rows of the engine and places in the queue."""
        assert self.engine is not None
        return self.engine.max_rows + self._max_queue

    @property
    def is_broken(self) -> bool:
        """Whether the last steps all failed, or the thread is gone: a new process would be better."""
        is_gone = self._thread is not None and not self._thread.is_alive() and not self._is_stopping
        return is_gone or self._num_failed_steps >= MAX_FAILED_STEPS

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Hand over the choices of one HTTP request; QueueFullError unless there is room for all."""
        if self._num_open + len(requests) > self.capacity:
            raise QueueFullError(self._num_open, self.capacity)
        submission = Submission(self, num_open=len(requests))
        now = time.monotonic()
        submission.jobs = [Job(request, index, submission, now) for index, request in enumerate(requests)]
        self._num_open += len(requests)
        self._idle.clear()
        self._tell(lambda: self._begin(submission.jobs))
        return submission

    def cancel(self, jobs: Sequence[Job]) -> None:
        self._tell(lambda: self._drop(jobs))

    async def wait_idle(self) -> None:
        """Until no choice is open."""
        await self._idle.wait()

    def fail_all(self, message: str, code: str) -> None:
        """End every open choice with an error."""
        self._tell(lambda: self._fail([*self._active], message, code))

    async def stop(self) -> None:
        """End the thread after the step that it is in; what is open fails."""
        with self._lock:
            self._is_stopping = True
            self._lock.notify()
        if self._thread is not None and self.engine is not None:  # loading is not waited for
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def _tell(self, command: Callable[[], None]) -> None:
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    def _deliver(self, batch: list[tuple[Job, Message]]) -> None:
        for job, message in batch:
            job.submission.inbox.put_nowait((job.index, message))
            if isinstance(message, Done | Refused | Failed):
                job.submission.num_open -= 1
                self._num_open -= 1
        if not self._num_open:
            self._idle.set()

    # ---- engine side -------------------------------------------------------------------------------------------------
    def _main(self, ready: asyncio.Future[Engine]) -> None:
        try:
            engine = self._open_engine()
            if engine.memory_limit is not None:  # measures what a position costs, now and not at the first request
                engine.bytes_needed(Request(prompt_ids=(0,), max_new_tokens=1))
        except BaseException as error:
            self._asyncio.call_soon_threadsafe(_fail_future, ready, error)
            return
        self.engine = engine
        self._asyncio.call_soon_threadsafe(ready.set_result, engine)
        while self._apply_commands():
            if self._active:
                self._step(engine)
            self._send(engine)
        self._fail([*self._active], "the server is stopping", "server_stopping")
        self._send(engine)

    def _apply_commands(self) -> bool:
        """Apply what came in since the last step, waiting for something where nothing runs; False: stop."""
        with self._lock:
            while not (self._commands or self._active or self._is_stopping):
                self._lock.wait()
            commands, self._commands = self._commands, []
            is_stopping = self._is_stopping
        for command in commands:
            command()
        return not is_stopping

    def _begin(self, jobs: Sequence[Job]) -> None:
        """Submit the choices of one request: all of them, or none where the engine refuses one."""
        assert self.engine is not None
        try:
            for job in jobs:
                self.engine.check(job.request)
            for job in jobs:
                job.ticket = self.engine.submit(job.request)
                self._active.append(job)
        except BlockdraftError as error:
            refusal = Refused(error)
            self._withdraw(jobs)
            self._end(jobs, lambda job: refusal)
        except Exception:
            logger.exception("a request could not be submitted")
            self._fail(jobs, "the request could not be submitted", "internal_error")
        else:
            self._outbox.append((jobs[0], Accepted()))

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Cancel what is still open of these."""
        assert self.engine is not None
        for job in jobs:
            if job.is_ended or job.ticket is None:
                continue
            self.engine.cancel(job.ticket)
            self._collect(job)

    def _step(self, engine: Engine) -> None:
        started = time.monotonic()
        try:
            engine.step()
        except Exception:
            logger.exception("an engine step broke; the requests in it fail")
            self._num_failed_steps += 1
            self._observer.on_broken_step()
            # those that ran; all where none is known to have run, so that the next step is another one
            broken = [job for job in self._active if job.ticket is not None and job.ticket.row is not None]
            self._fail(broken or [*self._active], "the engine failed while it worked on this request", "engine_failed")
        else:
            self._num_failed_steps = 0
        for job in [*self._active]:
            if job.started_s is None and job.ticket is not None and job.ticket.row is not None:
                job.started_s = started
            self._collect(job)

    def _collect(self, job: Job) -> None:
        """Put what is new of a choice into the outbox."""
        ticket = job.ticket
        assert ticket is not None
        row = ticket.row
        if row is not None and len(row.events) > job.num_sent:
            step = self._new_step(job, row.events[job.num_sent :], row.stats.drafted_histogram)
            self._observer.on_step(job, step)
            self._outbox.append((job, step))
        if ticket.completion is not None:
            self._end([job], lambda job: self._done(job, ticket))

    def _new_step(self, job: Job, events: list[TokenEvent], drafted: tuple[int, ...]) -> Step:
        assert job.ticket is not None and job.ticket.row is not None
        if job.first_s is None:
            job.first_s = time.monotonic()
        old = job.drafted_histogram + (0,) * (len(drafted) - len(job.drafted_histogram))
        num_drafted = next((n for n, (a, b) in enumerate(zip(old, drafted, strict=True)) if a != b), None)
        total = job.ticket.row.stats.num_accepted_draft_tokens
        step = Step(events, num_drafted, total - job.num_accepted)
        job.num_sent += len(events)
        job.drafted_histogram, job.num_accepted = drafted, total
        return step

    def _done(self, job: Job, ticket: Ticket) -> Done:
        assert ticket.completion is not None
        times = Times(job.submitted_s, job.started_s, job.first_s, time.monotonic())
        return Done(ticket.completion, times)

    def _fail(self, jobs: Sequence[Job], message: str, code: str) -> None:
        """End these with an error; rows that still run are cancelled."""
        self._withdraw(jobs)
        self._end(jobs, lambda job: Failed(message, code))

    def _withdraw(self, jobs: Sequence[Job]) -> None:
        """Free what these hold in the engine."""
        assert self.engine is not None
        for job in jobs:
            if job.ticket is not None and not job.ticket.is_finished:
                try:
                    self.engine.cancel(job.ticket)
                except Exception:
                    logger.exception("a row could not be freed")

    def _end(self, jobs: Sequence[Job], end: Callable[[Job], Done | Refused | Failed]) -> None:
        for job in jobs:
            if job.is_ended:
                continue
            job.is_ended = True
            if job in self._active:
                self._active.remove(job)
            message = end(job)
            if not isinstance(message, Refused):
                self._observer.on_end(job, message)
            self._outbox.append((job, message))

    def _send(self, engine: Engine) -> None:
        """Hand the outbox over, and now and then the engine's counters."""
        now = time.monotonic()
        if not self._active or now - self._snapshot_s > SNAPSHOT_EVERY_S:
            self.stats, self._snapshot_s = engine.stats(), now
        if self._outbox:
            batch, self._outbox = self._outbox, []
            try:
                self._asyncio.call_soon_threadsafe(self._deliver, batch)
            except RuntimeError:  # the event loop is closed: nobody is left to be told
                logger.debug("messages of %d choices have no reader left", len(batch))


def _fail_future(future: asyncio.Future[Engine], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
