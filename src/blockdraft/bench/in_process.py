"""The engine of this package as a system under test.

Owns how conversations are held by an engine in this process, and what is read off it for a record: the counters of each
step, times by one clock that stands still while a record is written.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockdraft.accept import SamplingParams
from blockdraft.bench.record import Counts, RequestRecord
from blockdraft.bench.system import Job, Prompt, Sampling, Setting, SystemFacts
from blockdraft.bench.thinking import ThinkingMarks
from blockdraft.engine import Engine, Request, Ticket
from blockdraft.errors import BlockdraftError, RequestError

if TYPE_CHECKING:
    from blockdraft.engine.row import RunningRow
    from blockdraft.engine.times import StepTimes
    from blockdraft.engine.width import WidthPolicy

__all__ = ["InProcess", "template_settings"]

WARM_UP_TOKENS = 12
WARM_UP_TEXT = "Count from one to twenty in words."
EFFORT_SETTINGS = ("reasoning_effort", "thinking_effort")
EFFORT_WORDS = ("max", "xhigh", "high")  # of templates, the highest first


def template_settings(template: str, sampling: Sampling) -> dict[str, Any]:
    """What a chat template has to be told for a sampling profile: its own highest word for "highest" effort.

    Nothing for a profile without effort, and for a template that knows neither an effort nor a switch for thinking.
    """
    effort = sampling.reasoning_effort
    if effort is None:
        return {}
    for name in EFFORT_SETTINGS:
        if name in template:
            words = [word for word in EFFORT_WORDS if f"'{word}'" in template or f'"{word}"' in template]
            return {name: effort if effort != "highest" else words[0] if words else "high"}
    return {"enable_thinking": True} if "enable_thinking" in template else {}


class InProcess:
    """An engine with its draft. `details` are further settings of the pair for the files, JSON values only."""

    def __init__(
        self,
        engine: Engine,
        *,
        version: str,
        target: str,
        draft: str | None,
        hardware: Mapping[str, Any],
        details: Mapping[str, Any],
    ) -> None:
        if engine.tokenizer is None:
            raise RequestError("the engine has no tokenizer, so that nothing can be asked; load the pair from folders")
        self.engine, self.tokenizer = engine, engine.tokenizer
        self._marks = ThinkingMarks(engine.tokenizer)
        template = engine.tokenizer.chat_template
        self._facts = SystemFacts(
            engine="blockdraft",
            version=version,
            target=target,
            draft=draft,
            max_width=None if engine.draft is None else engine.draft.config.max_width,
            template_sha256=None if template is None else hashlib.sha256(template.encode()).hexdigest()[:16],
            hardware=hardware,
            details={**details, "max_rows": engine.max_rows},
        )

    @property
    def facts(self) -> SystemFacts:
        return self._facts

    def num_tokens(self, text: str) -> int | None:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def check(self, setting: Setting) -> None:
        most = setting.load.concurrency
        if most is not None and most > self.engine.max_rows:
            raise RequestError(f"{most} requests in flight; the engine runs {self.engine.max_rows} at most (max_rows)")
        self.engine.check(self._request(Job(_warm_up_prompt()), setting, 0, [1], WARM_UP_TOKENS))

    def warm_up(self, setting: Setting) -> None:
        """A few short requests at the setting's width and concurrency."""
        ids = self._prompt_ids([{"role": "user", "content": WARM_UP_TEXT}], setting)
        request = self._request(Job(_warm_up_prompt()), setting, 0, ids, WARM_UP_TOKENS)
        self.engine.run([request] * (setting.load.concurrency or 1))

    def run(self, jobs: Sequence[Job], setting: Setting) -> Iterator[RequestRecord]:
        """A record for each request as soon as it is finished. Closing the iterator cancels what is in flight."""
        self.check(setting)
        policy = self.engine.width_policy
        log = StepLog(policy)
        self.engine.width_policy = log
        try:
            yield from _Drive(self, list(jobs), setting, log).records()
        finally:
            self.engine.width_policy = policy

    # ---- one request -------------------------------------------------------------------------------------------------
    def _prompt_ids(self, messages: Sequence[Mapping[str, str]], setting: Setting) -> list[int]:
        extra = template_settings(self.tokenizer.chat_template or "", setting.sampling)
        return self.tokenizer.chat_ids(messages, add_generation_prompt=True, **extra)

    def _request(
        self, job: Job, setting: Setting, turn: int, prompt_ids: Sequence[int], max_new_tokens: int
    ) -> Request:
        sampling = setting.sampling
        return Request(
            prompt_ids=prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k),
            stop_strings=job.prompt.stop,
            seed=job.seed(setting, turn),
            speculate=setting.speculation,
            width=setting.width,
        )

    def _begin(self, talk: _Talk, setting: Setting, sent_s: float) -> RequestRecord | None:
        """Submit a conversation's next turn. A record where the request was refused."""
        talk.sent_s, talk.first_s, talk.ticket, talk.prompt_ids = sent_s, None, None, []
        try:
            talk.prompt_ids = self.turn_ids(talk.job.prompt, talk.turn, talk.replies, setting)
            request = self._request(talk.job, setting, talk.turn, talk.prompt_ids, talk.max_new_tokens(setting))
            talk.ticket = self.engine.submit(request)
        except BlockdraftError as error:
            # What was refused may be quoted in the message, and rows of some sets may not be kept.
            words = "the request was refused" if talk.job.prompt.is_private else str(error)
            return self._record(talk, setting, sent_s, error=words, log=None)
        return None

    def turn_ids(self, prompt: Prompt, turn: int, replies: Sequence[str], setting: Setting) -> list[int]:
        """Ids of a prompt's turn, after the replies to the turns before it."""
        if prompt.is_raw:
            return self.tokenizer.encode(prompt.turns[0], add_special_tokens=True)
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        for asked, reply in zip(prompt.turns[:turn], replies, strict=True):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        return self._prompt_ids([*messages, {"role": "user", "content": prompt.turns[turn]}], setting)

    def _record(
        self, talk: _Talk, setting: Setting, now_s: float, *, error: str | None = None, log: StepLog | None
    ) -> RequestRecord:
        """What is known of a request that ended."""
        done = None if talk.ticket is None else talk.ticket.completion
        counts = Counts(num_steps=0, num_draft_tokens=0, num_accepted_draft_tokens=0, num_emitted_tokens=0)
        fields: dict[str, Any] = {}
        if done is not None:
            assert talk.ticket is not None and log is not None
            drafted, accepted = log.take(talk.ticket.row)
            most = None if self._facts.max_width is None else (setting.width or self._facts.max_width) - 1
            counts = Counts.of_stats(
                done.stats, per_step_drafted=drafted, per_step_accepted=accepted, max_draft_tokens=most
            )
            error = done.error
            raw: dict[str, Any] = {"stats": done.stats.to_json()}
            if setting.speculation and not done.speculation.enabled:
                raw["speculation_ended"] = done.speculation.reason
            fields = {
                "prefill_s": done.stats.prefill_s,
                "decode_s": done.stats.decode_s,
                "num_thinking_tokens": self._marks.num_thinking(
                    talk.prompt_ids, [(event.token_id, event.text or "") for event in done.events]
                ),
                "output_ids": done.token_ids,
                "text": done.text,
                "raw": raw,
            }
        prompt = talk.job.prompt
        return RequestRecord(
            dataset=prompt.dataset,
            prompt_id=prompt.id,
            cluster_id=prompt.cluster,
            turn=talk.turn,
            sample=talk.job.sample,
            speculation=setting.speculation,
            width=setting.width,
            sampling=setting.sampling.name,
            load=setting.load.name,
            seed=talk.job.seed(setting, talk.turn),
            max_new_tokens=talk.max_new_tokens(setting),
            finish_reason="error" if done is None else done.finish_reason,
            error=error,
            num_prompt_tokens=len(talk.prompt_ids) or None,
            counts=counts,
            sent_s=talk.sent_s,
            first_token_s=None if talk.first_s is None else talk.first_s - talk.sent_s,
            total_s=now_s - talk.sent_s,
            engine=self._facts.engine,
            engine_version=self._facts.version,
            tags=prompt.tags,
            **fields,
        )


def _warm_up_prompt() -> Prompt:
    return Prompt(id="warm-up", dataset="warm-up", turns=(WARM_UP_TEXT,))


# ---- conversations -----------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Talk:
    """A conversation in flight."""

    job: Job
    turn: int = 0
    replies: list[str] = field(default_factory=list)
    ticket: Ticket | None = None
    prompt_ids: Sequence[int] = ()
    sent_s: float = 0.0
    first_s: float | None = None

    def max_new_tokens(self, setting: Setting) -> int:
        own = self.job.prompt.max_new_tokens
        return setting.max_new_tokens if own is None else min(own, setting.max_new_tokens)

    def has_next(self, record: RequestRecord) -> bool:
        """Go on to the next turn, if there is one and this one ended well."""
        prompt = self.job.prompt
        if not record.is_whole or self.turn + 1 == len(prompt.turns):
            return False
        self.replies.append(record.text or "")
        self.turn += 1
        return True


class _Drive:
    """Holds conversations by stepping the engine."""

    def __init__(self, system: InProcess, jobs: list[Job], setting: Setting, log: StepLog) -> None:
        self.system, self.setting, self.log = system, setting, log
        self.arrivals = deque(zip(setting.load.arrivals_s(len(jobs), setting.seed), jobs, strict=True))
        self.talks: list[_Talk] = []
        self.clock = PausingClock()

    def records(self) -> Iterator[RequestRecord]:
        engine = self.system.engine
        try:
            while self.arrivals or self.talks:
                for record in self._arrive():
                    yield from self.clock.paused(record)
                if not self.talks:
                    self._wait()
                    continue
                engine.step()
                for record in self._finish(self.clock.now_s()):
                    yield from self.clock.paused(record)
        finally:
            for talk in self.talks:
                if talk.ticket is not None:
                    engine.cancel(talk.ticket)

    def _arrive(self) -> Iterator[RequestRecord]:
        """Begin the conversations whose time has come; records of those that were refused."""
        most = self.setting.load.concurrency
        while self.arrivals and (most is None or len(self.talks) < most):
            at, job = self.arrivals[0]
            if at > self.clock.now_s():
                return
            self.arrivals.popleft()
            # In an open loop a request counts from its arrival, however late the engine came to look.
            yield from self._begin(_Talk(job), at if most is None else self.clock.now_s())

    def _begin(self, talk: _Talk, sent_s: float) -> Iterator[RequestRecord]:
        refused = self.system._begin(talk, self.setting, sent_s)
        if refused is not None:
            yield refused
        else:
            self.talks.append(talk)

    def _finish(self, now_s: float) -> Iterator[RequestRecord]:
        """Records of the requests that this step ended; their conversations go on."""
        for talk in list(self.talks):
            ticket = talk.ticket
            assert ticket is not None
            if talk.first_s is None and ticket.row is not None and ticket.row.events:
                talk.first_s = now_s
            if not ticket.is_finished:
                continue
            record = self.system._record(talk, self.setting, now_s, log=self.log)
            self.talks.remove(talk)
            yield record
            if talk.has_next(record):
                yield from self._begin(talk, self.clock.now_s())

    def _wait(self) -> None:
        """Sleep until the next arrival."""
        if self.arrivals:
            time.sleep(max(self.arrivals[0][0] - self.clock.now_s(), 0.0))


class PausingClock:
    """Seconds since it was made, without those in which somebody else worked on a record."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._started

    def paused(self, record: RequestRecord) -> Iterator[RequestRecord]:
        """Hand a record out; the clock stands still until the next one is asked for."""
        began = time.perf_counter()
        yield record
        self._started += time.perf_counter() - began


# ---- what each step did ----------------------------------------------------------------------------------------------
class StepLog:
    """A width policy that leaves the choice to another one and writes down what every step of a row came to."""

    def __init__(self, policy: WidthPolicy) -> None:
        self._policy = policy
        self._steps: dict[RunningRow, list[tuple[int, int]]] = {}
        self._seen: dict[RunningRow, tuple[int, int, int]] = {}

    def choose(self, rows: Sequence[RunningRow], most: Sequence[int]) -> list[int]:
        return self._policy.choose(rows, most)

    def offers(self, rows: Sequence[RunningRow], widths: Sequence[int]) -> Sequence[Sequence[int] | None]:
        return self._policy.offers(rows, widths)

    def record(
        self, rows: Sequence[RunningRow], widths: Sequence[int], num_accepted: Sequence[int], times: StepTimes
    ) -> None:
        self._policy.record(rows, widths, num_accepted, times)
        for row in rows:
            stats = row.stats
            now = (stats.num_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens)
            before = self._seen.get(row, (0, 0, 0))
            if now[0] == before[0]:
                continue  # its step broke off and was not counted
            assert now[0] == before[0] + 1
            self._steps.setdefault(row, []).append((now[1] - before[1], now[2] - before[2]))
            self._seen[row] = now

    def take(self, row: RunningRow | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(proposals, accepted) by step of a finished row, which is forgotten."""
        steps = [] if row is None else self._steps.pop(row, [])
        if row is not None:
            self._seen.pop(row, None)
        return tuple(drafted for drafted, _ in steps), tuple(accepted for _, accepted in steps)
