"""Continuous batching: who runs when, on how much memory, beside whom, and what a broken request does to the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdraft.accept import SamplingParams
from blockdraft.engine import Engine, Request, Ticket
from blockdraft.engine.decide import best_ids
from blockdraft.engine.row import MAX_PENDING
from blockdraft.engine.scheduler import AGEING_STEPS, Queue
from blockdraft.errors import RequestError
from engine_kit import draft_config, hf_target, plain_ids, random_draft, run_one, tiny_model

NO_STOP: frozenset[int] = frozenset()
PROMPT = [3, 7, 1, 12, 5]
LONG = [(7 * i + 2) % 31 for i in range(60)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    return plain_ids(model, PROMPT, 40)


def made(model: Any, **options: Any) -> Engine:
    target = hf_target(model)
    return Engine(target, random_draft(draft_config(target.facts)), **options)


def asked(prompt: list[int] = PROMPT, count: int = 10, **fields: Any) -> Request:
    return Request(prompt_ids=prompt, max_new_tokens=count, **{"stop_ids": NO_STOP, **fields})


def finish(engine: Engine) -> None:
    while engine.num_running or engine.num_waiting:
        engine.step()


def ids_of(ticket: Ticket) -> list[int]:
    assert ticket.completion is not None
    return list(ticket.completion.token_ids)


class Widths:
    """A policy with a script: the width of every row at each step, cut to what there is room for."""

    def __init__(self, *widths: int) -> None:
        self.widths, self.times, self.accepted = widths, [], []

    def choose(self, rows: Any, most: Any) -> list[int]:
        width = self.widths[len(self.times) % len(self.widths)]
        return [min(width, limit) for limit in most]

    def offers(self, rows: Any, widths: Any) -> list[None]:
        return [None] * len(rows)

    def record(self, rows: Any, widths: Any, num_accepted: Any, times: Any) -> None:
        self.times.append(times)
        self.accepted.append(list(num_accepted))


# ---- prompts beside running rows -------------------------------------------------------------------------------------
def test_one_forward_scores_blocks_and_feeds_a_part_of_a_prompt(
    model: Any, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(model, prefill_chunk_size=40, mixed_chunk_size=8)
    engine.run([asked(count=2)] * 2)  # whatever the target tries at first is done
    before = engine.stats()
    calls: list[list[int]] = []
    real = engine.target.forward

    def forward(ids: Any, rows: Any, **options: Any) -> Any:
        calls.append([len(x) for x in ids])
        return real(ids, rows, **options)

    monkeypatch.setattr(engine.target, "forward", forward)
    first = engine.submit(asked(count=40))
    engine.step()
    second = engine.submit(asked(LONG, 12, width=3))
    finish(engine)
    assert calls[0] == [5] and calls[1] == [8, 8] and calls[2] == [8, 8]
    assert all(len(call) == 1 or call[1] == 8 for call in calls[1:8])  # never more than the budget beside a block
    assert ids_of(first) == text and ids_of(second) == plain_ids(model, LONG, 12)
    after = engine.stats()
    num_prefilled = after.num_prefilled - before.num_prefilled
    assert num_prefilled == len(PROMPT) + len(LONG) and after.num_steps - before.num_steps == len(calls)
    assert after.num_scored - before.num_scored == sum(map(sum, calls)) - num_prefilled


def test_several_prompts_share_the_budget_in_turn(model: Any) -> None:
    engine = made(model, prefill_chunk_size=16)
    tickets = [engine.submit(asked(LONG[: 10 + i], 4)) for i in range(3)]
    engine.step()
    rows = [ticket.row for ticket in tickets]
    assert [0 if row is None else row.num_fed for row in rows] == [10, 6, 0]
    engine.check_integrity()
    finish(engine)
    assert [ids_of(t) for t in tickets] == [plain_ids(model, LONG[: 10 + i], 4) for i in range(3)]


# ---- order -----------------------------------------------------------------------------------------------------------
def test_lower_priorities_go_first_and_equal_ones_in_turn(model: Any) -> None:
    engine = made(model, max_rows=1)
    running = engine.submit(asked(count=3))
    engine.step()
    tickets = {name: engine.submit(asked(count=2, priority=p)) for name, p in (("a", 1), ("b", 0), ("c", 0), ("d", -2))}
    order: list[str] = []
    while len(order) < len(tickets):
        engine.step()
        order += [name for name, t in tickets.items() if t.row is not None and name not in order]
    assert order == ["d", "b", "c", "a"] and running.is_finished


def test_waiting_makes_up_for_priority() -> None:
    queue = Queue()
    late, early = Ticket(asked(priority=0)), Ticket(asked(priority=2))
    queue.join(early, 10)
    queue.join(late, 10 + 2 * AGEING_STEPS + 1)
    assert queue.head is early  # it has waited for two levels of priority, and a step more
    other = Ticket(asked(priority=0))
    queue.join(other, 10 + 2 * AGEING_STEPS - 1)
    assert [queue.pop() for _ in range(3)] == [other, early, late]
    assert not queue.leave(early) and len(queue) == 0


@pytest.mark.parametrize("priority", [1.5, True, "high", 10**7])
def test_a_priority_that_is_none_is_refused(priority: Any) -> None:
    with pytest.raises(RequestError, match="priority is"):
        asked(priority=priority)


def test_a_full_queue_refuses_and_run_waits_for_room(model: Any, text: list[int]) -> None:
    engine = made(model, max_rows=1, max_waiting=2)
    tickets = [engine.submit(asked(count=4)) for _ in range(2)]
    with pytest.raises(RequestError, match="2 requests are waiting and the queue takes 2"):
        engine.submit(asked())
    finish(engine)
    assert [ids_of(t) for t in tickets] == [text[:4]] * 2
    assert [list(done.token_ids) for done in engine.run([asked(count=3)] * 5)] == [text[:3]] * 5


# ---- cancelling ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 9])
def test_a_request_may_be_cancelled_in_any_state(model: Any, text: list[int], num_steps: int) -> None:
    """Waiting, before its prompt is fed, in the middle of it, and while it decodes."""
    engine = made(model, max_rows=2, mixed_chunk_size=16, prefill_chunk_size=16)
    first = engine.submit(asked(count=30))
    cancelled = engine.submit(asked(LONG, 30))
    for _ in range(num_steps):
        engine.step()
    engine.cancel(cancelled)
    assert cancelled.completion is not None and cancelled.completion.finish_reason == "cancelled"
    assert ids_of(cancelled) == plain_ids(model, LONG, 30)[: len(ids_of(cancelled))]
    assert num_steps < 9 or ids_of(cancelled)
    assert cancelled.row is not None and cancelled.row.num_bytes == 0
    engine.check_integrity()
    finish(engine)
    assert ids_of(first) == text[:30]
    assert engine.stats().num_cancelled == 1 and engine.stats().num_finished == 1


# ---- company ---------------------------------------------------------------------------------------------------------
def test_a_sampled_text_does_not_depend_on_its_company(model: Any) -> None:
    params = SamplingParams(temperature=1.1, top_p=0.95)
    requests = [asked(LONG[: 4 + 5 * i], 12, sampling=params, seed=i, width=(None, 3, 8)[i % 3]) for i in range(4)]
    requests += [asked(count=15), asked(LONG, 5, speculate=False)]
    together = made(model, max_rows=4, mixed_chunk_size=8).run(requests)
    for request, done in zip(requests, together, strict=True):
        alone = run_one(made(model), **{name: getattr(request, name) for name in request.__slots__})
        assert done.token_ids == alone.token_ids
        assert done.stats.accepted_histogram == alone.stats.accepted_histogram


# ---- widths from outside ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("widths", [(1,), (1, 1, 8), (8, 1, 3), (2, 1, 1, 1, 1, 7)])
def test_any_widths_give_the_same_text_and_lose_no_position_of_the_draft(
    model: Any, text: list[int], widths: tuple[int, ...]
) -> None:
    policy = Widths(*widths)
    engine = made(model, width_policy=policy)
    ticket = engine.submit(asked(count=40))
    while not ticket.is_finished:
        engine.step()
        engine.check_integrity()
    assert ids_of(ticket) == text
    stats = ticket.completion.stats
    assert sum(map(sum, policy.accepted)) == stats.num_accepted_draft_tokens
    assert sum(t.num_scored for t in policy.times) == stats.num_steps + stats.num_draft_tokens
    assert all(t.propose_s >= 0 and t.score_s >= 0 and t.commit_s > 0 for t in policy.times)


def test_a_block_after_plain_steps_is_the_block_of_an_eager_draft(model: Any) -> None:
    """The draft's context after many steps without it, brought up at once, proposes what it would have proposed."""
    lazy, eager = made(model, width_policy=Widths(*[1] * 9, 8)), made(model, width_policy=Widths(*[1] * 9, 8))
    pending: list[int] = []
    tickets = [engine.submit(asked(count=30)) for engine in (lazy, eager)]
    while not tickets[0].is_finished:
        lazy.step()
        eager.step()
        row = tickets[1].row
        assert row is not None and tickets[0].row is not None
        pending.append(tickets[0].row.num_pending)
        if row.draft_cache is not None and row.num_pending:
            for taps in row.pending_taps:  # position by position, as soon as they are known
                for tap_NE in taps:
                    eager.draft.inject(tap_NE[None], row.draft_cache)
            row.drop_pending()
    assert max(pending) >= 9
    first, second = (t.completion for t in tickets)
    assert first.token_ids == second.token_ids
    assert first.stats.drafted_histogram == second.stats.drafted_histogram
    assert first.stats.accepted_histogram == second.stats.accepted_histogram


def test_taps_that_wait_are_bounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.engine.row.MAX_PENDING", 12)
    assert MAX_PENDING == 256
    engine = made(model, width_policy=Widths(1))
    ticket = engine.submit(asked(LONG, 40))
    most = 0
    while not ticket.is_finished:
        engine.step()
        most = max(most, ticket.row.num_pending)
    assert most < 12


def test_a_seed_fixes_the_widths_of_a_sampled_request_and_of_no_other(model: Any) -> None:
    engine = made(model)
    hot = SamplingParams(temperature=1.0)
    fixed = [asked(seed=1, sampling=hot), asked(width=3)]
    free = [asked(), asked(seed=1), asked(sampling=hot)]
    assert [engine._new_row(r).has_fixed_width for r in (*fixed, *free)] == [True, True, False, False, False]


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_a_request_that_could_never_fit_is_refused_at_once(model: Any) -> None:
    need = made(model).bytes_needed(asked(LONG, 40))
    engine = made(model, memory_limit=need - 1)
    with pytest.raises(RequestError, match=r"60 tokens and max_new_tokens 40 need .* MiB .* memory_limit"):
        engine.submit(asked(LONG, 40))
    assert run_one(engine, prompt_ids=PROMPT, max_new_tokens=3).token_ids


def test_memory_is_set_aside_for_the_whole_length_and_the_head_of_the_line_is_not_passed(model: Any) -> None:
    big, small = asked(LONG, 50), asked(count=5)
    engine = made(model)
    engine = made(model, memory_limit=engine.bytes_needed(big) + engine.bytes_needed(small))
    tickets = [engine.submit(r) for r in (small, big, big, small)]
    seen = []
    while engine.num_running or engine.num_waiting:
        engine.step()
        engine.check_integrity()
        stats = engine.stats()
        assert stats.target_bytes + stats.draft_bytes <= stats.reserved_bytes <= engine.memory_limit
        seen.append(tuple(t.row is not None for t in tickets))
    assert (True, True, False, False) in seen and (True, True, False, True) not in seen
    assert all(ids_of(t) == plain_ids(model, t.request.prompt_ids, t.request.max_new_tokens) for t in tickets[:2])
    assert engine.stats().reserved_bytes == 0


@pytest.mark.parametrize("speculates", [True, False])
def test_a_row_never_holds_more_than_was_set_aside(model: Any, speculates: bool) -> None:
    """Grown in chunks and blocks, at every length, a row stays within the line that was measured."""
    engine = made(model, prefill_chunk_size=37)
    ticket = engine.submit(asked(LONG, 120, speculate=None if speculates else False))
    most = 0.0
    while not ticket.is_finished:
        engine.step()
        row = ticket.row
        assert row is not None
        most = max(most, row.num_bytes / engine.bytes_needed(ticket.request))
    assert 0.3 < most <= 1.0


# ---- broken requests -------------------------------------------------------------------------------------------------
def _with_nan_after(engine: Engine, monkeypatch: pytest.MonkeyPatch, end: list[int]) -> None:
    """The target's logits are NaN at the last of these ids in a row, wherever they come to stand there."""
    real, fed = engine.target.forward, {}

    def forward(ids: Any, rows: Any, **options: Any) -> Any:
        scored = real(ids, rows, **options)
        for x, row, answer in zip(ids, rows, scored, strict=True):
            before = fed.get(id(row), [])[: row.num_positions - len(x)]
            fed[id(row)] = after = [*before, *x.tolist()]
            count = len(answer.logits_TV)
            for index in range(count):
                stop = len(after) - count + index + 1
                if after[:stop] == end:
                    answer.logits_TV[index, 5] = float("nan")
        return scored

    monkeypatch.setattr(engine.target, "forward", forward)


@pytest.mark.parametrize("fields", [{}, {"num_logprobs": 1}, {"sampling": SamplingParams(repetition_penalty=1.01)}])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("width", [None, 8])
def test_a_request_that_breaks_ends_alone_with_the_text_that_was_good(
    model: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], at: int, width: int | None
) -> None:
    want = list(run_one(made(model), prompt_ids=PROMPT, max_new_tokens=9, stop_ids=NO_STOP, **fields).token_ids)
    engine = made(model)
    _with_nan_after(engine, monkeypatch, [*PROMPT, *want[:at]])
    speculate = {"speculate": False} if width is None else {"width": width}
    other = engine.submit(asked(LONG, 9))
    broken = engine.submit(asked(count=9, **fields, **speculate))
    finish(engine)
    assert ids_of(other) == plain_ids(model, LONG, 9) and other.completion.error is None
    done = broken.completion
    assert done is not None and done.finish_reason == "error" and "NaN" in done.error
    assert ids_of(broken) == want[:at] and f"after {5 + at} tokens" in done.error
    done.stats.check()
    assert engine.stats().num_failed == 1 and broken.row.num_bytes == 0
    with pytest.raises(RequestError, match="NaN"):
        engine.run([asked(count=9, **fields, **speculate)])
    assert engine.num_running == 0


def test_nan_where_no_text_comes_to_is_nobodys_fault(
    model: Any, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proposal that falls the target may say what it wants."""
    engine = made(model)
    real = engine.target.forward

    def forward(ids: Any, rows: Any, **options: Any) -> Any:
        scored = real(ids, rows, **options)
        for x, answer in zip(ids, scored, strict=True):
            chosen = answer.logits_TV.argmax(-1).tolist()
            good = 0
            while good < len(x) - 1 and chosen[good] == int(x[good + 1]):
                good += 1
            if len(x) == 8:
                answer.logits_TV[good + 1 :] = float("nan")
        return scored

    monkeypatch.setattr(engine.target, "forward", forward)
    assert list(run_one(engine, prompt_ids=PROMPT, max_new_tokens=40, stop_ids=NO_STOP).token_ids) == text
    hot = {"sampling": SamplingParams(temperature=0.01), "seed": 3}
    assert list(run_one(engine, prompt_ids=PROMPT, max_new_tokens=40, stop_ids=NO_STOP, **hot).token_ids) == text


def test_a_draft_whose_law_is_nan_ends_the_request_that_asked_for_it(
    model: Any, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = made(model)
    real = engine.draft.propose_rows

    def propose_rows(*args: Any, **options: Any) -> Any:
        proposals = real(*args, **options)
        for proposal in proposals:
            if proposal.q is not None:
                proposal.q.probs_GM[-1] = float("nan")
        return proposals

    monkeypatch.setattr(engine.draft, "propose_rows", propose_rows)
    greedy = engine.submit(asked(count=20))
    sampled = engine.submit(asked(count=20, sampling=SamplingParams(temperature=1.0), seed=1))
    finish(engine)
    assert ids_of(greedy) == text[:20]
    assert sampled.completion.finish_reason == "error" and "draft's probabilities" in sampled.completion.error
    assert len(ids_of(sampled)) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_best_ids_are_the_lowest_of_the_largest_and_nan_is_none(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 0.0, 3.0, 3.0], [0.0, float("nan"), 9.0, 0.0]], dtype=dtype)
    assert best_ids(logits).tolist() == [1, 0, -1]
    sparse = torch.full((2, 3), -torch.inf, dtype=dtype)
    sparse[1, 2] = 0.0
    assert best_ids(sparse).tolist() == [0, 2]


@pytest.mark.parametrize("name", ["max_rows", "max_waiting", "prefill_chunk_size", "mixed_chunk_size", "memory_limit"])
@pytest.mark.parametrize("value", [-1, 2.5, "8", True])
def test_limits_are_whole_numbers(model: Any, name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is"):
        Engine(hf_target(model), **{name: value})
