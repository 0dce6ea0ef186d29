"""Greedy text with speculation is the target's own text, whatever the draft does (cases S01, S03, S09, S15, S17)."""

from __future__ import annotations

import pytest
import torch

from blockdraft.accept import SamplingParams
from blockdraft.engine import Engine, Request
from blockdraft.errors import PairError, RequestError
from engine_kit import (
    Continuation,
    bigram_model,
    draft_config,
    hf_target,
    plain_ids,
    random_draft,
    run_one,
    tiny_model,
)

NO_STOP = frozenset()
PROMPT = [3, 7, 1, 12, 5]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def ar_text(model):
    return plain_ids(model, PROMPT, 60)


def engine_with(model, draft) -> Engine:
    return Engine(hf_target(model), draft)


def oracle(model, text, *, block_size=8, wrong=lambda step: None) -> Continuation:
    target = hf_target(model)
    config = draft_config(target.facts, block_size=block_size)
    target.close()
    return Continuation(config, [[*PROMPT, *text]], wrong=wrong)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("kind", ["v1", "v2", "sliding"])
def test_a_random_draft_changes_nothing(model, ar_text, width, kind):
    target = hf_target(model)
    config = draft_config(target.facts, v2=kind != "v1", window=6 if kind == "sliding" else None)
    engine = Engine(target, random_draft(config))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP, width=width)
    assert list(done.token_ids) == ar_text
    assert done.speculation.enabled and done.speculation.width == width
    assert done.stats.num_draft_tokens > 0


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3, 6])
def test_scripted_acceptance_is_counted_exactly(model, ar_text, width, wrong):
    engine = engine_with(model, oracle(model, ar_text, wrong=lambda step: wrong))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP, width=width)
    assert list(done.token_ids) == ar_text
    expected = width - 1 if wrong is None or wrong >= width - 1 else wrong
    full_steps = done.stats.accepted_histogram
    assert full_steps[expected] >= done.stats.num_steps - 1, full_steps


def test_random_scripts_hold_every_invariant_after_every_step(model, ar_text):
    generator = torch.Generator().manual_seed(3)
    script = torch.randint(0, 8, (80,), generator=generator).tolist()
    draft = oracle(model, ar_text, wrong=lambda step: script[step])
    target = hf_target(model)
    engine = Engine(target, draft)
    ticket = engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP))
    while not ticket.is_finished:
        engine.step()
        row = ticket.row
        assert row is not None
        if not ticket.is_finished:
            assert row.target_row.num_positions == len(row.ids) - 1
            assert row.num_fed == row.draft_cache.num_positions + row.num_pending == len(row.ids) - 1
        row.stats.check()
    assert list(ticket.completion.token_ids) == ar_text
    assert ticket.completion.stats.num_emitted_tokens == 60


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("width", [2, 4, 8])
def test_s01_an_end_id_anywhere_in_a_block_ends_the_text(model, ar_text, at, width):
    stop = frozenset({ar_text[at]})
    first = ar_text.index(ar_text[at])
    engine = engine_with(model, oracle(model, ar_text))
    seen = []
    for events in engine.stream(Request(prompt_ids=PROMPT, max_new_tokens=60, stop_ids=stop, width=width)):
        seen += [event.token_id for event in events]
    done = run_one(
        engine_with(model, oracle(model, ar_text)),
        prompt_ids=PROMPT,
        max_new_tokens=60,
        stop_ids=stop,
        width=width,
    )
    assert seen == list(done.token_ids) == ar_text[: first + 1]
    assert done.finish_reason == "stop" and done.stop == ar_text[at]


def test_s01_two_end_ids_and_one_as_the_bonus(model, ar_text):
    stop = frozenset({ar_text[8], ar_text[20]})
    first = min(ar_text.index(t) for t in stop)
    engine = engine_with(model, oracle(model, ar_text))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, stop_ids=stop)
    assert list(done.token_ids) == ar_text[: first + 1]
    bonus_at = 8  # first token, seven accepted, then the bonus
    engine = engine_with(bigram_model(lambda t: (t + 1) % 32), None)
    assert bonus_at == len(run_one(engine, prompt_ids=[1], max_new_tokens=8).token_ids)


def test_s01_the_bonus_token_is_the_end(monkeypatch):
    model = bigram_model(lambda t: (t + 1) % 32)
    text = plain_ids(model, [1], 30)
    target = hf_target(model)
    draft = Continuation(draft_config(target.facts), [[1, *text]])
    done = run_one(Engine(target, draft), prompt_ids=[1], max_new_tokens=30, stop_ids=frozenset({text[8]}), width=8)
    assert done.events[-1].kind == "bonus" and list(done.token_ids) == text[:9]
    assert done.stats.num_clipped_tokens == 0


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_s03_the_length_limit_is_exact_and_the_text_can_be_continued(model, ar_text, limit, width):
    engine = engine_with(model, oracle(model, ar_text))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=limit, stop_ids=NO_STOP, width=width)
    assert list(done.token_ids) == ar_text[:limit] and done.finish_reason == "length"
    again = Engine(hf_target(model), oracle(model, ar_text))
    more = run_one(again, prompt_ids=PROMPT + ar_text[:limit], max_new_tokens=30, stop_ids=NO_STOP, width=width)
    assert list(more.token_ids) == ar_text[limit : limit + 30]


def test_min_new_tokens_bans_the_end_until_then(model, ar_text):
    stop = frozenset({ar_text[2]})
    plain = Engine(hf_target(model))
    fields = {"prompt_ids": PROMPT, "max_new_tokens": 40, "min_new_tokens": 12, "stop_ids": stop}
    without = run_one(plain, **fields)
    assert len(without.token_ids) >= 12 and ar_text[2] not in without.token_ids[:11]
    for width in (2, 5, 8):
        target = hf_target(model)
        engine = Engine(target, random_draft(draft_config(target.facts)))
        assert run_one(engine, width=width, **fields).token_ids == without.token_ids


def test_s09_one_engine_serves_many_as_if_fresh(model, ar_text):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    long_prompt = [(7 * i) % 31 for i in range(60)]
    short_prompt = [4, 9]
    first = run_one(engine, prompt_ids=long_prompt, max_new_tokens=20, stop_ids=NO_STOP)
    stream = engine.stream(Request(prompt_ids=PROMPT, max_new_tokens=40, stop_ids=NO_STOP))
    next(stream)
    next(stream)
    stream.close()
    assert engine.num_running == 0 and engine.num_waiting == 0
    second = run_one(engine, prompt_ids=short_prompt, max_new_tokens=20, stop_ids=NO_STOP)
    for done, prompt in ((first, long_prompt), (second, short_prompt)):
        fresh_target = hf_target(model)
        fresh = run_one(
            Engine(fresh_target, random_draft(draft_config(fresh_target.facts))),
            prompt_ids=prompt,
            max_new_tokens=20,
            stop_ids=NO_STOP,
        )
        assert done.token_ids == fresh.token_ids == tuple(plain_ids(model, prompt, 20))
        assert done.stats.accepted_histogram == fresh.stats.accepted_histogram


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prefill_chunks_change_nothing(model, chunk):
    prompt = [(5 * i + 2) % 31 for i in range(50)]
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, window=9)), prefill_chunk_size=chunk)
    done = run_one(engine, prompt_ids=prompt, max_new_tokens=25, stop_ids=NO_STOP)
    assert list(done.token_ids) == plain_ids(model, prompt, 25)


def test_a_batch_of_mixed_requests_equals_each_alone(model):
    prompts = [[2, 3, 4], [(3 * i) % 31 for i in range(33)], [9], [1, 2] * 10, [30, 5]]
    options = [{}, {"width": 3}, {"speculate": False}, {"width": 8}, {"width": 5}]
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)), max_rows=3)
    requests = [
        Request(prompt_ids=p, max_new_tokens=20 + i, stop_ids=NO_STOP, **o)
        for i, (p, o) in enumerate(zip(prompts, options, strict=True))
    ]
    for done, request in zip(engine.run(requests), requests, strict=True):
        assert list(done.token_ids) == plain_ids(model, request.prompt_ids, request.max_new_tokens)


def test_s15_past_the_window_and_past_the_drafts_length():
    model = tiny_model(max_length=64)
    prompt = [(3 * i + 1) % 31 for i in range(20)]
    text = plain_ids(model, prompt, 40)
    target = hf_target(model)
    config = draft_config(target.facts, window=8, max_position_embeddings=32)
    engine = Engine(target, random_draft(config))
    done = run_one(engine, prompt_ids=prompt, max_new_tokens=40, stop_ids=NO_STOP)
    assert list(done.token_ids) == text
    assert not done.speculation.enabled and "maximum length is 32" in done.speculation.reason
    assert done.stats.num_draft_tokens > 0 and done.stats.num_plain_steps > 0
    full = draft_config(target.facts, window=8)
    script = Continuation(full, [[*prompt, *text]], wrong=lambda step: 0 if step == 0 else None)
    done = run_one(Engine(hf_target(model), script), prompt_ids=prompt, max_new_tokens=40, stop_ids=NO_STOP)
    assert list(done.token_ids) == text and done.speculation.enabled
    second = prompt + text[:20] + [4]
    real = Engine(hf_target(model), random_draft(full))
    done = run_one(real, prompt_ids=second, max_new_tokens=20, stop_ids=NO_STOP)
    assert list(done.token_ids) == plain_ids(model, second, 20)


def test_s15_a_prompt_longer_than_the_drafts_length_is_decoded_plainly_and_says_so():
    model = tiny_model(max_length=64)
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, max_position_embeddings=16)))
    prompt = [(3 * i + 1) % 31 for i in range(30)]
    done = run_one(engine, prompt_ids=prompt, max_new_tokens=10, stop_ids=NO_STOP)
    assert list(done.token_ids) == plain_ids(model, prompt, 10)
    assert done.stats.num_draft_tokens == 0 and "maximum length is 16" in done.speculation.reason


def test_s17_demanded_speculation_that_could_never_begin_is_an_error():
    target = hf_target(tiny_model(max_length=64))
    engine = Engine(target, random_draft(draft_config(target.facts, max_position_embeddings=16)))
    fields = {"prompt_ids": [1] * 14, "max_new_tokens": 10, "speculate": True, "stop_ids": NO_STOP}
    with pytest.raises(RequestError, match=r"demanded.*14 tokens.*maximum length of 16"):
        engine.submit(Request(**fields))
    done = run_one(engine, width=2, **fields)
    assert done.stats.num_draft_tokens > 0
    run_one(engine, **{**fields, "max_new_tokens": 1})  # the first token needs no block


def test_s17_off_is_off_and_visible(model, ar_text):
    draft = oracle(model, ar_text)
    engine = engine_with(model, draft)
    on, off = engine.run(
        [
            Request(prompt_ids=PROMPT, max_new_tokens=30, stop_ids=NO_STOP),
            Request(prompt_ids=PROMPT, max_new_tokens=30, stop_ids=NO_STOP, speculate=False),
        ]
    )
    assert on.token_ids == off.token_ids
    assert off.stats.num_draft_tokens == 0 and off.stats.num_steps == 29
    assert draft.calls == on.stats.num_steps - on.stats.num_plain_steps
    assert not off.speculation.enabled and "plain decoding" in off.speculation.reason
    assert on.speculation.enabled and on.speculation.reason is None


def test_s17_demanded_speculation_without_a_draft_is_an_error_and_optional_says_why(model):
    engine = Engine(hf_target(model), None, draft_off_reason="the draft was left out: it does not fit")
    with pytest.raises(RequestError, match=r"demanded.*does not fit"):
        engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=4, speculate=True))
    with pytest.raises(RequestError, match="width is 4"):
        engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=4, width=4))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=4)
    assert not done.speculation.enabled and "does not fit" in done.speculation.reason


def test_a_failed_request_leaves_nothing_behind(model):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    good = Request(prompt_ids=PROMPT, max_new_tokens=5)
    with pytest.raises(RequestError):
        engine.run([good, Request(prompt_ids=PROMPT, max_new_tokens=100_000)])
    assert engine.num_running == engine.num_waiting == 0


def _failing_for(target, monkeypatch, fails) -> None:
    """The target's forward raises whenever `fails(ids)` of the list of id vectors that it is given."""
    real = target.forward

    def forward(ids, *args, **kwargs):
        if fails([x.tolist() for x in ids]):
            raise MemoryError("no room")
        return real(ids, *args, **kwargs)

    monkeypatch.setattr(target, "forward", forward)


def test_a_step_that_breaks_off_ends_its_rows_and_leaves_the_engine_as_new(model, ar_text, monkeypatch):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    tickets = [
        engine.submit(Request(prompt_ids=p, max_new_tokens=30, stop_ids=NO_STOP)) for p in (PROMPT, PROMPT[::-1])
    ]
    engine.step()
    seen = [len(ticket.row.events) for ticket in tickets]
    with monkeypatch.context() as patch:
        # the second row fails to commit, when the first one has: neither may keep a part of the step
        patch.setattr(type(tickets[1].row), "commit", _committing_for(tickets[0].row))
        with pytest.raises(RuntimeError, match="broken off"):
            engine.step()
    assert engine.num_running == 0
    for ticket, count in zip(tickets, seen, strict=True):
        done = ticket.completion
        assert done is not None and done.finish_reason == "cancelled"
        assert len(done.token_ids) == len(done.events) == done.stats.num_emitted_tokens == count
        assert ticket.row.num_bytes == 0
    assert list(run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP).token_ids) == ar_text


def _committing_for(row):
    real = type(row).commit

    def commit(self, *args):
        if self is not row:
            raise RuntimeError("broken off")
        return real(self, *args)

    return commit


def test_a_prefill_that_fails_ends_its_own_request_only(model, ar_text, monkeypatch):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    first = engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP))
    engine.step()
    second = engine.submit(Request(prompt_ids=[1, 2, 3], max_new_tokens=5, stop_ids=NO_STOP))
    _failing_for(target, monkeypatch, lambda ids: [1, 2, 3] in ids)
    engine.step()
    assert second.is_finished and second.completion.finish_reason == "error"
    assert second.completion.error == "no room" and second.completion.token_ids == ()
    with pytest.raises(RequestError, match="no room"):
        next(engine.follow(second))
    for _ in engine.follow(first):
        pass
    assert list(first.completion.token_ids) == ar_text


def test_a_forward_that_fails_for_every_row_is_an_error_of_the_engine(model, monkeypatch):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    tickets = [engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=9, stop_ids=NO_STOP)) for _ in range(2)]
    engine.step()
    _failing_for(target, monkeypatch, lambda ids: True)
    with pytest.raises(MemoryError):
        engine.step()
    assert engine.num_running == 0
    assert [len(t.completion.token_ids) for t in tickets] == [1, 1]


def test_a_run_that_breaks_off_leaves_nothing_that_a_later_one_would_finish(model, ar_text, monkeypatch):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)), max_rows=1)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        _failing_for(target, patch, lambda ids: len(ids[0]) == 8)
        engine.run([Request(prompt_ids=PROMPT, max_new_tokens=30, stop_ids=NO_STOP)] * 3)
    assert engine.num_running == engine.num_waiting == 0
    assert list(run_one(engine, prompt_ids=PROMPT, max_new_tokens=60, stop_ids=NO_STOP).token_ids) == ar_text


def test_a_stream_that_was_never_begun_is_never_run(model):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts)))
    with pytest.raises(RequestError):
        engine.stream(Request(prompt_ids=PROMPT, max_new_tokens=100_000))
    stream = engine.stream(Request(prompt_ids=PROMPT, max_new_tokens=5))
    stream.close()
    assert engine.num_running == engine.num_waiting == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_gives_nan_is_refused_and_not_read_as_an_id(temperature):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    target = hf_target(model)
    with pytest.raises(RequestError, match=r"logits hold NaN after 5 tokens.*bfloat16"):
        run_one(
            Engine(target, random_draft(draft_config(target.facts))),
            prompt_ids=PROMPT,
            max_new_tokens=5,
            sampling=SamplingParams(temperature=temperature),
        )


@pytest.mark.parametrize("ends", [[31, 999], 999, -1, [7, -1]])
def test_end_ids_that_the_target_cannot_emit_do_not_matter(ends, ar_text):
    model = tiny_model()
    model.generation_config.eos_token_id = ends
    target = hf_target(model)
    assert set(target.facts.eos_token_ids) == {31, *({7} if ends == [7, -1] else ())}
    done = run_one(Engine(target), prompt_ids=PROMPT, max_new_tokens=5, min_new_tokens=5)
    assert len(done.token_ids) == 5


def test_a_minimum_length_with_every_id_a_stop_id_is_refused(model):
    everything = frozenset(range(32))
    with pytest.raises(RequestError, match="all 32 ids are stop ids"):
        run_one(Engine(hf_target(model)), prompt_ids=PROMPT, max_new_tokens=5, min_new_tokens=1, stop_ids=everything)
    assert (
        len(run_one(Engine(hf_target(model)), prompt_ids=PROMPT, max_new_tokens=5, stop_ids=everything).token_ids) == 1
    )


@pytest.mark.parametrize("stop_at", [3, 8, 11, None])
@pytest.mark.parametrize("limit", [9, 30])
def test_s01_s03_after_a_cut_the_states_hold_the_emitted_text_and_no_more(model, ar_text, stop_at, limit, monkeypatch):
    """The finished row, before it is freed: every token but the last one is in the target's and the draft's state."""
    engine = engine_with(model, oracle(model, ar_text))
    stop = NO_STOP if stop_at is None else frozenset({ar_text[stop_at]})
    kept = []
    monkeypatch.setattr(engine, "_retire", lambda ticket: kept.append(ticket))
    ticket = engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=limit, stop_ids=stop))
    while not kept:
        engine.step()
    row = ticket.row
    emitted = ar_text[:limit]
    if stop_at is not None and ar_text[stop_at] in emitted:
        emitted = emitted[: emitted.index(ar_text[stop_at]) + 1]
    assert row.ids == [*PROMPT, *emitted]
    assert row.target_row.num_positions == row.num_fed == len(row.ids) - 1
    assert row.draft_cache.num_positions + row.num_pending == row.num_fed
    row.stats.check()


@pytest.mark.parametrize("width", [9, 16])
def test_s06_a_width_above_the_trained_block_is_refused(model, width):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, block_size=8)))
    with pytest.raises(RequestError, match=f"width is {width}.*at most 8"):
        engine.submit(Request(prompt_ids=PROMPT, max_new_tokens=4, width=width))


def test_s07_a_mask_id_that_ends_the_text_needs_consent(model, ar_text):
    target = hf_target(model)
    draft = random_draft(draft_config(target.facts, mask_token_id=target.facts.eos_token_ids[0]))
    with pytest.raises(PairError, match="--allow-mask-is-eos"):
        Engine(target, draft)
    engine = Engine(target, draft, allow_mask_is_eos=True)
    assert list(run_one(engine, prompt_ids=PROMPT, max_new_tokens=30, stop_ids=NO_STOP).token_ids) == ar_text[:30]


def test_near_the_drafts_maximum_the_block_narrows_before_speculation_ends(model, ar_text):
    target = hf_target(model)
    engine = Engine(target, random_draft(draft_config(target.facts, max_position_embeddings=len(PROMPT) + 5)))
    done = run_one(engine, prompt_ids=PROMPT, max_new_tokens=20, stop_ids=NO_STOP)
    assert list(done.token_ids) == ar_text[:20] and not done.speculation.enabled
    assert max(i for i, n in enumerate(done.stats.drafted_histogram) if n) <= 4
    assert done.stats.num_draft_tokens > 0
