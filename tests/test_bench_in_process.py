"""The engine as a system under test: live turns, loads, records that hold; runs that are broken off; replays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockdraft import Request, load
from blockdraft.bench.identities import examine
from blockdraft.bench.in_process import InProcess, template_settings
from blockdraft.bench.journal import Journal
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.replay import replay, texts_of
from blockdraft.bench.runner import Part, run_parts
from blockdraft.bench.system import Job, Load, Prompt, Setting, System, find_sampling
from blockdraft.bench.thinking import ThinkingMarks
from blockdraft.bench.workloads import Workload, load_workload
from blockdraft.errors import RequestError
from blockdraft.text import load_tokenizer
from tiny_pair import TinyPair

GREEDY = find_sampling("greedy")
PROMPTS = [
    Prompt(id="t-0", dataset="t", turns=("the quick fox",), tags={"category": "a"}),
    Prompt(id="t-1", dataset="t", turns=("a block", "of the target"), system="word"),
    Prompt(id="t-2", dataset="t", turns=("one step",), is_private=True),
    Prompt(id="t-3", dataset="t", turns=("lazy dog",), max_new_tokens=5),
    Prompt(id="t-4", dataset="t", turns=("raw text",), is_raw=True),
]


@pytest.fixture(scope="module")
def system(tiny_pair: TinyPair) -> InProcess:
    engine = load(tiny_pair.draft, tiny_pair.target, max_rows=4)
    return InProcess(engine, version="0", target="t", draft="d", hardware={}, details={"dtype": "float32"})


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "speculation": True,
        "width": 5,
        "sampling": GREEDY,
        "max_new_tokens": 24,
        "load": Load(concurrency=2),
    }
    return Setting(**{**values, **changes})


def workload(prompts: list[Prompt] = PROMPTS) -> Workload:
    return Workload(
        name="t",
        prompts=tuple(prompts),
        num_rows=len(prompts),
        format_name="turns",
        format_sha256="0",
        source="test",
        licence="",
    )


def held(system: InProcess, prompts: list[Prompt], how: Setting) -> dict[tuple[str, int], RequestRecord]:
    return {(r.prompt_id, r.turn): r for r in system.run([Job(prompt) for prompt in prompts], how)}


def test_it_is_a_system(system: InProcess) -> None:
    assert isinstance(system, System)
    assert system.facts.max_width == 5 and json.dumps(system.facts.to_json())
    assert system.num_tokens("the fox") == len(system.tokenizer.encode("the fox", add_special_tokens=False))


def test_records_are_the_engines_own_counters(system: InProcess) -> None:
    found = held(system, PROMPTS, setting())
    assert sorted(found) == [("t-0", 0), ("t-1", 0), ("t-1", 1), ("t-2", 0), ("t-3", 0), ("t-4", 0)]
    assert examine(list(found.values())).holds
    for record in found.values():
        RequestRecord.from_json(json.loads(json.dumps(record.to_json())))
        assert record.is_whole and record.first_token_s is not None and record.first_token_s <= record.total_s
        counts = record.counts
        assert counts.per_step_drafted is not None and len(counts.per_step_drafted) == counts.num_steps
        assert counts.stats(prefill_s=record.prefill_s or 0, decode_s=record.decode_s or 0) == replace_stats(record)
    tokenizer = system.tokenizer
    ids = tokenizer.chat_ids([{"role": "user", "content": "the quick fox"}])
    [done] = system.engine.run([Request(prompt_ids=ids, max_new_tokens=24, width=5)])
    first = found["t-0", 0]
    assert first.output_ids == done.token_ids and first.text == done.text and first.num_prompt_tokens == len(ids)
    assert first.counts.accepted_histogram == done.stats.accepted_histogram
    assert first.counts.num_clipped_tokens == done.stats.num_clipped_tokens
    assert found["t-3", 0].max_new_tokens == 5 and found["t-3", 0].counts.num_emitted_tokens <= 5
    assert found["t-4", 0].num_prompt_tokens == len(tokenizer.encode("raw text", add_special_tokens=True))


def replace_stats(record: RequestRecord) -> Any:
    from blockdraft.stats import RequestStats

    return RequestStats.from_json(record.raw["stats"])


def test_the_second_turn_follows_the_live_reply(system: InProcess) -> None:
    found = held(system, PROMPTS[1:2], setting())
    reply = found["t-1", 0].text
    messages = [
        {"role": "system", "content": "word"},
        {"role": "user", "content": "a block"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "of the target"},
    ]
    ids = system.tokenizer.chat_ids(messages)
    [done] = system.engine.run([Request(prompt_ids=ids, max_new_tokens=24, width=5)])
    assert found["t-1", 1].output_ids == done.token_ids and found["t-1", 1].cluster_id == "t-1"


def test_off_is_off_and_gives_the_same_text(system: InProcess) -> None:
    on = held(system, PROMPTS, setting(load=Load(concurrency=1)))
    off = held(system, PROMPTS, setting(speculation=False, width=None, load=Load(concurrency=3)))
    assert {key: r.output_ids for key, r in on.items()} == {key: r.output_ids for key, r in off.items()}
    assert all(r.counts.num_draft_tokens == 0 and r.counts.num_steps for r in off.values())
    assert examine(list(off.values())).holds


def test_an_open_loop_waits_for_its_arrivals(system: InProcess) -> None:
    how = setting(load=Load(rate=40.0), max_new_tokens=4)
    arrivals = how.load.arrivals_s(4, how.seed)
    found = held(system, [PROMPTS[i] for i in (0, 2, 3, 4)], how)
    assert sorted(r.sent_s for r in found.values()) == pytest.approx(arrivals)
    assert all(r.first_token_s is not None and r.first_token_s > 0 for r in found.values())


def test_sampled_runs_repeat_whatever_the_load(system: InProcess) -> None:
    hot = find_sampling("production")
    one = held(system, PROMPTS, setting(sampling=hot, load=Load(concurrency=1)))
    two = held(system, PROMPTS[::-1], setting(sampling=hot, load=Load(concurrency=4)))
    assert {key: r.output_ids for key, r in one.items()} == {key: r.output_ids for key, r in two.items()}
    assert len({r.seed for r in one.values()}) == len(one)


def test_what_cannot_be_served_is_a_record_of_an_error(system: InProcess) -> None:
    long = Prompt(id="t-9", dataset="t", turns=("dog " * 400, "never asked"))
    found = held(system, [long, PROMPTS[0]], setting())
    assert sorted(found) == [("t-0", 0), ("t-9", 0)]
    broken = found["t-9", 0]
    assert broken.finish_reason == "error" and "256" in (broken.error or "") and examine(list(found.values())).holds
    secret = held(system, [replace(long, is_private=True)], setting())["t-9", 0]
    assert secret.error == "the request was refused"
    with pytest.raises(RequestError, match="max_rows"):
        system.check(setting(load=Load(concurrency=9)))
    with pytest.raises(RequestError, match="width"):
        system.check(setting(width=9))


def test_closing_a_run_leaves_the_engine_idle(system: InProcess) -> None:
    policy = system.engine.width_policy
    run = system.run([Job(prompt) for prompt in PROMPTS], setting())
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert system.engine.num_running == 0 and system.engine.width_policy is policy
    system.engine.check_integrity()


# ---- runs ------------------------------------------------------------------------------------------------------------
def test_a_run_that_was_broken_off_goes_on(system: InProcess, tmp_path: Path) -> None:
    parts = [Part(workload(), setting()), Part(workload(), setting(width=3))]

    class Stop(Exception):
        pass

    def until(count: int) -> Callable[..., None]:
        seen = []

        def progress(what: str, done: int, total: int, record: RequestRecord | None) -> None:
            assert total == 10 and done <= total
            if record is not None:
                seen.append(record)
                if len(seen) == count:
                    raise Stop

        return progress

    path = tmp_path / "run.jsonl"
    for count in (3, 4):
        with pytest.raises(Stop), Journal(path, {"a": 1}, {}) as journal:
            run_parts(system, parts, journal, progress=until(count))
        assert system.engine.num_running == 0
    with Journal(path, {"a": 1}, {}) as journal:
        broken_off = run_parts(system, parts, journal)
    with Journal(tmp_path / "whole.jsonl", {"a": 1}, {}) as journal:
        whole = run_parts(system, parts, journal)
    assert [r.key for r in broken_off] == [r.key for r in whole] and len(whole) == 12
    assert [r.counts for r in broken_off] == [r.counts for r in whole]
    lines = path.read_text().count('"kind": "record"')
    with Journal(path, {"a": 1}, {}) as journal:
        run_parts(system, parts, journal)
    assert path.read_text().count('"kind": "record"') == lines  # nothing was left to do


def test_private_rows_leave_no_text_on_disk(system: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal(path, {}, {}) as journal:
        records = run_parts(system, [Part(workload(PROMPTS[2:4]), setting())], journal)
    private, open_ = records
    assert private.text is None and private.output_ids is None and private.output_sha256 and open_.text is not None
    [line] = [line for line in path.read_text().splitlines() if '"t-2"' in line]
    assert "one step" not in line and '"text"' not in line and "output_ids" not in line


def test_rounds_deal_the_prompts_out_and_samples_need_sampling(system: InProcess, tmp_path: Path) -> None:
    off = setting(speculation=False, width=None)
    with Journal(tmp_path / "run.jsonl", {}, {}) as journal:
        run_parts(system, [Part(workload(), off), Part(workload(), setting())], journal, num_rounds=2)
        order = [(r.tags["round"], r.speculation) for r in journal.content.records.values()]
    assert order == sorted(order) and {r for r, _ in order} == {0, 1}
    with pytest.raises(RequestError, match="all the same"), Journal(tmp_path / "b.jsonl", {}, {}) as journal:
        run_parts(system, [Part(workload(), setting())], journal, num_samples=2)
    with Journal(tmp_path / "c.jsonl", {}, {}) as journal:
        hot = setting(sampling=find_sampling("production"))
        records = run_parts(system, [Part(workload(PROMPTS[:1]), hot)], journal, num_samples=2)
    assert [r.sample for r in records] == [0, 1] and {r.cluster_id for r in records} == {"t-0"}


# ---- replay ----------------------------------------------------------------------------------------------------------
def test_a_replay_of_greedy_texts_counts_what_serving_counted(system: InProcess, tmp_path: Path) -> None:
    prompts = [p for p in PROMPTS if not p.is_private]
    with Journal(tmp_path / "run.jsonl", {}, {}) as journal:
        served = run_parts(system, [Part(workload(prompts), setting())], journal)
    texts = texts_of(system, workload(prompts), served, setting())
    assert len(texts) == len(served) == 5
    for num_rows in (1, 3):
        again = {(r.prompt_id, r.turn): r for r in replay(system, texts, width=5, num_rows=num_rows)}
        for record in served:
            other = again[record.prompt_id, record.turn]
            assert other.is_replay and other.output_ids == record.output_ids
            if record.finish_reason == "length":  # a stop inside a block is cut there, and is the text's end here
                assert other.counts.per_step_accepted == record.counts.per_step_accepted
                assert other.counts.num_draft_tokens == record.counts.num_draft_tokens
        assert examine(list(again.values())).holds
    narrow = list(replay(system, texts, width=3, num_rows=2))
    assert all(max(r.counts.per_step_drafted or (0,)) <= 2 for r in narrow)


def test_a_replay_refuses_other_prompts_and_missing_texts(system: InProcess) -> None:
    served = list(held(system, PROMPTS[:1], setting()).values())
    other = [replace(PROMPTS[0], turns=("another, longer question",))]
    with pytest.raises(RequestError, match="same target"):
        texts_of(system, workload(other), served, setting())
    with pytest.raises(RequestError, match="cannot be replayed"):
        list(replay(system, [(replace(served[0], output_ids=None), [1])], width=5, num_rows=1))


# ---- thinking, templates ---------------------------------------------------------------------------------------------
def test_thinking_is_counted_to_the_end_of_its_mark(tiny_pair: TinyPair) -> None:
    tokenizer = load_tokenizer(tiny_pair.target)
    marks = ThinkingMarks(tokenizer)

    def tokens(text: str) -> list[tuple[int, str]]:
        return [(i, tokenizer.decode([i])) for i in tokenizer.encode(text, add_special_tokens=False)]

    text = "<think>so</think> yes"
    found = marks.num_thinking([], tokens(text))
    assert found is not None and "".join(t for _, t in tokens(text)[:found]).startswith("<think>so</think>")
    assert "".join(t for _, t in tokens(text)[: found - 1]).find("</think>") < 0
    assert marks.num_thinking([], tokens("<think>never ends")) == len(tokens("<think>never ends"))
    opened = tokenizer.encode("<think>\n", add_special_tokens=False)
    assert marks.num_thinking(opened, tokens("so")) == len(tokens("so"))
    closed = tokenizer.encode("<think></think>\n", add_special_tokens=False)
    assert marks.num_thinking(closed, tokens("so")) is None and marks.num_thinking([], tokens("so")) is None


def test_the_highest_effort_is_the_templates_own_word() -> None:
    production = find_sampling("production")
    assert template_settings("{% if reasoning_effort == 'max' or 'high' %}", production) == {"reasoning_effort": "max"}
    assert template_settings("{{ thinking_effort or 'high' }}", production) == {"thinking_effort": "high"}
    assert template_settings("{% if enable_thinking %}", production) == {"enable_thinking": True}
    assert template_settings("plain", production) == {} == template_settings("enable_thinking", GREEDY)


def test_the_own_set_can_be_asked(system: InProcess) -> None:
    own = load_workload("own", limit=3)
    for prompt in own.prompts:
        assert system.turn_ids(prompt, 0, [], setting())
