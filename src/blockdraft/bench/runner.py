"""A run: settings times data sets on one system, every record in the journal before the next one is made.

Owns the order of work, what is still to be done after a crash, and what of a reply may be kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from blockdraft.bench.journal import Journal
from blockdraft.bench.record import PROCESS_TAG, ROUND_TAG, RequestRecord
from blockdraft.bench.system import Job, Prompt, Setting, System
from blockdraft.bench.workloads import Workload
from blockdraft.bench.workloads.scoring import score
from blockdraft.errors import RequestError

__all__ = ["Part", "Progress", "check_parts", "kept", "run_parts"]

Progress = Callable[[str, int, int, RequestRecord | None], None]
"""(what is running, requests done, requests in all, the record that was just made)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One data set under one setting."""

    workload: Workload
    setting: Setting


def run_parts(
    system: System,
    parts: Sequence[Part],
    journal: Journal,
    *,
    num_samples: int = 1,
    num_rounds: int = 1,
    progress: Progress = lambda *_: None,
) -> list[RequestRecord]:
    """All records of these parts, those of the journal included.

    With several rounds the prompts are dealt out to them, and each round goes through all parts: what changes on the
    machine meanwhile then touches all settings alike. Everything is checked before anything runs. Conversations of
    which a turn is missing, or that broke, are held again from their beginning.
    """
    check_parts(system, [part.setting for part in parts], num_samples=num_samples, num_rounds=num_rounds)
    total = sum(len(part.workload.prompts) for part in parts) * num_samples
    done = 0
    warmed: set[str] = set()
    for number in range(num_rounds):
        for part in parts:
            jobs = [Job(p, s) for p in part.workload.prompts[number::num_rounds] for s in range(num_samples)]
            left = [job for job in jobs if not _is_done(job, part.setting, journal)]
            done += len(jobs) - len(left)
            if not left:
                continue
            what = f"{part.workload.name}, {part.setting.name}"
            progress(what, done, total, None)
            if part.setting.name not in warmed:
                system.warm_up(part.setting)
                warmed.add(part.setting.name)
            prompts = {job.prompt.id: job.prompt for job in left}
            for record in system.run(left, part.setting):
                prompt = prompts[record.prompt_id]
                journal.append(kept(record, prompt, number=number, process=len(journal.content.runs)))
                done += record.turn + 1 == len(prompt.turns) or not record.is_whole
                progress(what, done, total, record)
    return list(_records(parts, journal, num_samples))


def check_parts(system: System, settings: Sequence[Setting], *, num_samples: int, num_rounds: int) -> None:
    """Nothing; a RequestError for what this system cannot run, or what would measure the same thing twice."""
    if num_samples < 1 or num_rounds < 1:
        raise RequestError(f"samples {num_samples}, rounds {num_rounds}: both must be at least 1")
    for setting in settings:
        if num_samples > 1 and setting.sampling.temperature == 0.0:
            raise RequestError(f"{num_samples} samples of greedy text are all the same; take one")
        system.check(setting)


def kept(record: RequestRecord, prompt: Prompt, *, number: int, process: int) -> RequestRecord:
    """The record as it goes to disk: scored, hashed, and without text where none may be kept."""
    text = record.text
    scores = dict(record.scores)
    if text is not None and record.is_whole and record.turn + 1 == len(prompt.turns):
        scores |= score(prompt, text)
    digest = record.output_sha256
    if digest is None and (record.output_ids is not None or text is not None):
        said = text if record.output_ids is None else " ".join(map(str, record.output_ids))
        digest = hashlib.sha256((said or "").encode()).hexdigest()[:32]
    tags = {**record.tags, ROUND_TAG: number, PROCESS_TAG: process}
    made = replace(record, scores=scores, output_sha256=digest, tags=tags)
    return replace(made, text=None, output_ids=None) if prompt.is_private else made


def _is_done(job: Job, setting: Setting, journal: Journal) -> bool:
    return all(found is not None and found.is_whole for found in _turns(job, setting, journal))


def _turns(job: Job, setting: Setting, journal: Journal) -> Iterator[RequestRecord | None]:
    head = (job.prompt.dataset, setting.speculation, setting.width, setting.sampling.name, setting.load.name)
    for turn in range(len(job.prompt.turns)):
        yield journal.content.records.get((*head, job.prompt.id, job.sample, turn))


def _records(parts: Sequence[Part], journal: Journal, num_samples: int) -> Iterator[RequestRecord]:
    for part in parts:
        for prompt in part.workload.prompts:
            for sample in range(num_samples):
                found = _turns(Job(prompt, sample), part.setting, journal)
                yield from (record for record in found if record is not None)
