"""Kept prefixes: a request that begins as an earlier one did has the text, and the proposals, of one that did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdraft.engine import Completion, Engine, Request
from blockdraft.engine.prefix import _as_bytes, _common
from engine_kit import draft_config, hf_target, plain_ids, random_draft, run_one, tiny_model
from tiny_hybrids import tiny_hybrid

NO_STOP: frozenset[int] = frozenset()
SYSTEM = [(7 * i + 2) % 31 for i in range(40)]
ROOM = 2**24


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def made(model: Any, *, window: int | None = None, draft: bool = True, **options: Any) -> Engine:
    target = hf_target(model)
    config = draft_config(target.facts, window=window, mask_token_id=target.facts.vocab_size - 2)
    return Engine(target, random_draft(config) if draft else None, **{"prefix_cache_bytes": ROOM, **options})


def one(engine: Engine, prompt: list[int], count: int = 20, **fields: Any) -> Completion:
    done = run_one(engine, prompt_ids=prompt, max_new_tokens=count, **{"stop_ids": NO_STOP, **fields})
    engine.check_integrity()
    return done


def same(done: Completion, fresh: Completion) -> None:
    """The text, and what was proposed and accepted: so the draft's context is the same as well."""
    assert done.token_ids == fresh.token_ids
    assert done.stats.accepted_histogram == fresh.stats.accepted_histogram
    assert done.stats.drafted_histogram == fresh.stats.drafted_histogram
    assert fresh.stats.num_cached_prompt_tokens == 0


# ---- targets whose rows can be cut -----------------------------------------------------------------------------------
@pytest.mark.parametrize("shared", [8, 23, 40])
def test_a_common_beginning_is_not_computed_again(model: Any, shared: int) -> None:
    engine = made(model)
    one(engine, [*SYSTEM, 5, 6, 7])
    prompt = [*SYSTEM[:shared], 9, 8, 3, 1]
    done = one(engine, prompt)
    same(done, one(made(model, prefix_cache_bytes=0), prompt))
    assert done.stats.num_cached_prompt_tokens == shared
    assert list(done.token_ids) == plain_ids(model, prompt, 20)


def test_the_next_turn_of_a_conversation_begins_where_the_last_one_ended(model: Any) -> None:
    engine, prompt = made(model), list(SYSTEM)
    for turn in range(3):
        done = one(engine, prompt, 12)
        same(done, one(made(model, prefix_cache_bytes=0), prompt, 12))
        # the last token of a text is not fed: nothing has been asked about what follows it
        assert done.stats.num_cached_prompt_tokens == (0 if turn == 0 else len(prompt) - 4 - 1)
        prompt = [*prompt, *done.token_ids, 4, turn, 11, 2]
    stats = engine.stats()
    assert stats.num_prefixes == 1, "each turn holds those before it"
    assert stats.num_prefix_hits == 2 and stats.num_prefix_lookups == 3


def test_the_same_prompt_again_feeds_its_last_token_only(model: Any) -> None:
    engine = made(model)
    first, again = one(engine, SYSTEM), one(engine, SYSTEM)
    same(again, first)
    assert again.stats.num_cached_prompt_tokens == len(SYSTEM) - 1


def test_a_row_that_still_runs_is_a_beginning_too(model: Any) -> None:
    engine = made(model)
    first = engine.submit(Request(prompt_ids=SYSTEM, max_new_tokens=30, stop_ids=NO_STOP))
    for _ in range(3):
        engine.step()
    prompt = [*SYSTEM, 9, 9]
    second = engine.submit(Request(prompt_ids=prompt, max_new_tokens=20, stop_ids=NO_STOP))
    while not (first.is_finished and second.is_finished):
        engine.step()
        engine.check_integrity()
    assert second.completion.stats.num_cached_prompt_tokens >= len(SYSTEM) - 1
    assert list(first.completion.token_ids) == plain_ids(model, SYSTEM, 30)
    assert list(second.completion.token_ids) == plain_ids(model, prompt, 20)


def test_a_cancelled_request_leaves_what_it_had_computed(model: Any) -> None:
    engine = made(model, prefill_chunk_size=16)
    ticket = engine.submit(Request(prompt_ids=SYSTEM, max_new_tokens=30))
    engine.step()
    engine.cancel(ticket)
    done = one(engine, SYSTEM)
    assert done.stats.num_cached_prompt_tokens == 16
    same(done, one(made(model, prefix_cache_bytes=0), SYSTEM))


def test_states_without_the_drafts_context_serve_plain_requests_only(model: Any) -> None:
    engine = made(model)
    one(engine, SYSTEM, speculate=False)
    assert one(engine, SYSTEM, speculate=False).stats.num_cached_prompt_tokens == len(SYSTEM) - 1
    done = one(engine, SYSTEM)
    assert done.stats.num_cached_prompt_tokens == 0 and done.stats.num_draft_tokens > 0
    assert one(engine, SYSTEM).stats.num_cached_prompt_tokens == len(SYSTEM) - 1
    assert engine.stats().num_prefixes == 1, "states with the draft's context take the place of those without"
    assert one(engine, SYSTEM, speculate=False).stats.num_cached_prompt_tokens == len(SYSTEM) - 1


def test_a_row_that_goes_on_does_not_change_what_was_kept(model: Any) -> None:
    engine = made(model)
    one(engine, SYSTEM, 4)
    for tail in ([1, 2], [3], [1, 2, 5], []):
        prompt = [*SYSTEM, *tail]
        same(one(engine, prompt), one(made(model, prefix_cache_bytes=0), prompt))


@pytest.mark.parametrize("window", [6, 60])
def test_a_draft_with_windows_begins_where_it_still_holds_what_it_can_see(model: Any, window: int) -> None:
    engine = made(model, window=window)
    one(engine, [*SYSTEM, 5, 6, 7])
    for prompt in ([*SYSTEM, 5, 6, 7, 8, 8], [*SYSTEM[:20], 9, 8], [*SYSTEM, 5, 6, 7]):
        done = one(engine, prompt)
        same(done, one(made(model, window=window, prefix_cache_bytes=0), prompt))
    assert done.stats.num_cached_prompt_tokens == len(prompt) - 1
    assert engine.stats().num_prefix_hits >= 2


# ---- targets with recurrent state ------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["qwen3_next", "lfm2"])
def hybrid(request: pytest.FixtureRequest) -> Any:
    return tiny_hybrid(request.param, std=0.2)


def test_recurrent_states_begin_at_whole_snapshots_only(hybrid: Any) -> None:
    engine = made(hybrid, prefix_snapshot_every=16)
    prompt = [*SYSTEM, 5, 6, 7]
    done = one(engine, prompt)
    expected = {
        tuple(prompt): len(prompt) - 1,  # the snapshot before the last token
        (*prompt, *done.token_ids[:-1], 3, 4): len(prompt) + 19,  # the end of the text
        (*SYSTEM[:30], 1, 2): 16,  # a boundary
        (*SYSTEM[:12], 1, 2): 0,
    }
    for again, length in expected.items():
        fresh = one(made(hybrid, prefix_cache_bytes=0), list(again))
        hit = one(engine, list(again))
        same(hit, fresh)
        assert hit.stats.num_cached_prompt_tokens == length
        assert list(hit.token_ids) == plain_ids(hybrid, again, 20)


# ---- bounds ----------------------------------------------------------------------------------------------------------
def test_the_least_recently_used_go_first_and_the_bound_holds(model: Any) -> None:
    prompts = [[i] * 3 + SYSTEM[3:] for i in range(1, 5)]
    engine = made(model)
    one(engine, prompts[0])
    size = engine.stats().prefix_bytes
    engine = made(model, prefix_cache_bytes=3 * size)
    for index in (0, 1, 2, 0, 3):  # the fourth pushes out the second: the first was used again
        one(engine, prompts[index])
        assert engine.stats().prefix_bytes <= 3 * size
    cached = {i: one(engine, prompts[i], 1).stats.num_cached_prompt_tokens for i in (0, 2, 3)}
    assert set(cached.values()) == {len(SYSTEM) - 1}
    assert one(engine, prompts[1], 1).stats.num_cached_prompt_tokens == 0


def test_too_little_room_for_one_keeps_none_and_0_is_off(model: Any) -> None:
    for room in (0, 100):
        engine = made(model, prefix_cache_bytes=room)
        for _ in range(2):
            assert one(engine, SYSTEM).stats.num_cached_prompt_tokens == 0
        assert engine.stats().prefix_bytes == engine.stats().num_prefixes == 0


def test_kept_prefixes_make_room_for_a_request(model: Any) -> None:
    need = made(model).bytes_needed(Request(prompt_ids=SYSTEM, max_new_tokens=20))
    engine = made(model, memory_limit=need)
    for prompt in (SYSTEM, [9, *SYSTEM[1:]], SYSTEM):
        done = one(engine, prompt)
        assert list(done.token_ids) == plain_ids(model, prompt, 20)
        stats = engine.stats()
        assert stats.reserved_bytes + stats.prefix_bytes <= need and stats.num_prefixes == 1


def test_room_is_made_of_other_states_than_those_that_the_request_begins_with(model: Any) -> None:
    first, other = SYSTEM, [9, *SYSTEM[1:]]
    engine = made(model)
    one(engine, first)
    size = engine.stats().prefix_bytes
    need = engine.bytes_needed(Request(prompt_ids=SYSTEM, max_new_tokens=20))
    engine = made(model, memory_limit=need + size)
    one(engine, first)
    one(engine, other)
    assert engine.stats().num_prefixes == 2
    assert one(engine, first).stats.num_cached_prompt_tokens == len(SYSTEM) - 1  # the older one


def test_a_broken_request_leaves_nothing_and_clearing_lets_go(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made(model)
    real = engine.target.forward

    def forward(*args: Any, **options: Any) -> Any:
        scored = real(*args, **options)
        for answer in scored:
            answer.logits_TV.fill_(float("nan"))
        return scored

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "forward", forward)
        ticket = engine.submit(Request(prompt_ids=SYSTEM, max_new_tokens=5))
        engine.step()
        assert ticket.completion.finish_reason == "error" and engine.stats().num_prefixes == 0
    one(engine, SYSTEM)
    assert engine.stats().prefix_bytes > 0
    engine.clear_prefixes()
    assert engine.stats().prefix_bytes == engine.stats().num_prefixes == 0
    assert one(engine, SYSTEM).stats.num_cached_prompt_tokens == 0


@pytest.mark.parametrize("seed", range(5))
def test_common_beginnings_are_counted_in_ids(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    one_ids, other_ids = (torch.randint(0, 2, (n,), generator=generator).tolist() for n in (9, 6))
    other_ids = [*one_ids[: seed + 1], *other_ids]
    slow = next((i for i, (a, b) in enumerate(zip(one_ids, other_ids, strict=False)) if a != b), 9)
    assert _common(_as_bytes(one_ids), _as_bytes(other_ids)) == slow
    assert _common(_as_bytes([300]), _as_bytes([301])) == 0 == _common(b"", _as_bytes(one_ids))
