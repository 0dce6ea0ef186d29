"""Replay: one fixed text, and what each drafter would have had accepted on the way through it.

Owns teacher forcing. It takes the noise of different texts out of a comparison of drafters: all of them walk along the
same tokens. What is counted: the draft proposes greedily, proposals stand as far as they are the text's next tokens,
and the text's own token follows. For a greedy text that is what serving gives; for a sampled one it is not (there
acceptance depends on p and q), so that records are marked as replays and never mixed with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from blockdraft.bench.in_process import InProcess, PausingClock, StepLog
from blockdraft.bench.record import Counts, RequestRecord
from blockdraft.bench.system import Load, Setting
from blockdraft.bench.workloads import Workload
from blockdraft.engine import Request
from blockdraft.engine.decide import Decision
from blockdraft.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from blockdraft.draft import Proposal
    from blockdraft.engine import Ticket
    from blockdraft.engine.row import RunningRow

__all__ = ["replay", "texts_of"]


def texts_of(
    system: InProcess, workload: Workload, records: Sequence[RequestRecord], setting: Setting
) -> list[tuple[RequestRecord, list[int]]]:
    """The records of a workload with the ids of their prompts, as this system's target is asked.

    Raises RequestError for a record without its text, and for one whose prompt had another length: another target.
    """
    by_key = {(r.prompt_id, r.sample, r.turn): r for r in records if r.is_whole}
    found = []
    for prompt in workload.prompts:
        for sample in sorted({r.sample for r in records if r.prompt_id == prompt.id}):
            replies: list[str] = []
            for turn in range(len(prompt.turns)):
                record = by_key.get((prompt.id, sample, turn))
                if record is None:
                    break
                ids = system.turn_ids(prompt, turn, replies, setting)
                if record.num_prompt_tokens not in (None, len(ids)) or record.text is None:
                    raise RequestError(
                        f"{prompt.id} had a prompt of {record.num_prompt_tokens} tokens, here {len(ids)}; replay "
                        "texts of the same target and prompts, kept with their text"
                    )
                found.append((record, ids))
                replies.append(record.text)
    return found


def replay(
    system: InProcess, texts: Sequence[tuple[RequestRecord, Sequence[int]]], *, width: int | None, num_rows: int
) -> Iterator[RequestRecord]:
    """A record for each text: (the record it was made in, the ids of its prompt).

    A text of one id takes no step and gives no record. Raises RequestError for a record without output ids, and for an
    engine without a draft.
    """
    engine = system.engine
    if engine.draft is None:
        raise RequestError("a replay measures a draft, and this engine has none; name one")
    for record, _ in texts:
        if record.output_ids is None:
            raise RequestError(f"{record.prompt_id} was kept without its ids, so that it cannot be replayed")
    given: dict[int, Sequence[int]] = {}
    decide, policy = engine.decide, engine.width_policy
    log = StepLog(policy)
    engine.decide, engine.width_policy = _Forced(given), log
    left, clock = list(texts), PausingClock()
    running: list[tuple[RequestRecord, Ticket, Request, float]] = []
    try:
        while left or running:
            while left and len(running) < num_rows:
                source, prompt_ids = left.pop(0)
                assert source.output_ids is not None
                if len(source.output_ids) < 2:
                    continue
                request = Request(
                    prompt_ids=prompt_ids,
                    max_new_tokens=len(source.output_ids),
                    stop_ids=frozenset(),
                    speculate=True,
                    width=width,
                )
                given[id(request)] = source.output_ids
                running.append((source, engine.submit(request), request, clock.now_s()))
            if not running:
                return
            engine.step()
            for entry in [entry for entry in running if entry[1].is_finished]:
                running.remove(entry)
                del given[id(entry[2])]
                yield from clock.paused(_record(system, entry, width, num_rows, log, clock.now_s()))
    finally:
        engine.decide, engine.width_policy = decide, policy
        for _, ticket, _, _ in running:
            engine.cancel(ticket)


class _Forced:
    """A decision that follows the given texts, by the identity of each row's request."""

    def __init__(self, given: dict[int, Sequence[int]]) -> None:
        self._given = given

    def __call__(
        self, rows: Sequence[RunningRow], proposals: Sequence[Proposal | None], logits: Sequence[Tensor]
    ) -> list[Decision]:
        return [self._follow(row, proposal) for row, proposal in zip(rows, proposals, strict=True)]

    def _follow(self, row: RunningRow, proposal: Proposal | None) -> Decision:
        text, at = self._given[id(row.request)], row.num_emitted
        ids = [] if proposal is None else proposal.ids_G.tolist()
        accepted = 0
        while accepted < len(ids) and at + accepted + 1 < len(text) and ids[accepted] == text[at + accepted]:
            accepted += 1
        return Decision(list(text[at : at + accepted + 1]), accepted)


def _record(
    system: InProcess,
    entry: tuple[RequestRecord, Ticket, Request, float],
    width: int | None,
    num_rows: int,
    log: StepLog,
    now_s: float,
) -> RequestRecord:
    source, ticket, _, sent_s = entry
    done = ticket.completion
    assert done is not None
    drafted, accepted = log.take(ticket.row)
    assert done.error is not None or done.token_ids == source.output_ids
    most = None if system.facts.max_width is None else (width or system.facts.max_width) - 1
    return replace(
        source,
        speculation=True,
        width=width,
        load=Load(concurrency=num_rows).name,
        finish_reason="error" if done.error is not None else source.finish_reason,
        error=done.error,
        counts=Counts.of_stats(done.stats, per_step_drafted=drafted, per_step_accepted=accepted, max_draft_tokens=most),
        sent_s=sent_s,
        first_token_s=None,
        total_s=now_s - sent_s,
        engine=system.facts.engine,
        engine_version=system.facts.version,
        prefill_s=None,
        decode_s=None,
        scores={},
        raw={"replay_of": source.engine},
        is_replay=True,
    )
