"""The record of a request: strict JSON both ways, identities that catch wrong adapters and units, a journal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.bench.identities import examine, faults_of_record, faults_of_run
from blockdraft.bench.journal import Journal, read_journal
from blockdraft.bench.record import Counts, RequestRecord
from blockdraft.bench.system import Job, Load, Prompt, Setting, find_sampling
from blockdraft.errors import ConfigError, RequestError
from blockdraft.stats import pooled_acceptance_length, survival_by_position


def record(
    steps: list[tuple[int, int]], emitted: int | None = None, *, prompt: str = "own-0", **changes: Any
) -> RequestRecord:
    """A record of steps (drafted, accepted), as an engine that tells everything gives it."""
    drafted, accepted = [d for d, _ in steps], [a for _, a in steps]
    committed = 1 + len(steps) + sum(accepted)
    counts = Counts(
        num_steps=len(steps),
        num_draft_tokens=sum(drafted),
        num_accepted_draft_tokens=sum(accepted),
        num_emitted_tokens=committed if emitted is None else emitted,
        num_clipped_tokens=0 if emitted is None else committed - emitted,
        per_step_accepted=tuple(accepted),
        per_step_drafted=tuple(drafted),
        max_draft_tokens=7,
    )
    values: dict[str, Any] = {
        "dataset": "own",
        "prompt_id": prompt,
        "cluster_id": prompt,
        "turn": 0,
        "sample": 0,
        "speculation": True,
        "width": 8,
        "sampling": "greedy",
        "load": "closed:1",
        "seed": None,
        "max_new_tokens": 4096,
        "finish_reason": "stop",
        "error": None,
        "num_prompt_tokens": 20,
        "counts": counts,
        "sent_s": 0.5,
        "first_token_s": 0.25,
        "total_s": 1.25,
        "engine": "blockdraft",
        "engine_version": "0",
    }
    return RequestRecord(**{**values, **changes})


STEPS = [(7, 3), (7, 0), (7, 7), (2, 2), (0, 0)]


def changed(base: RequestRecord, **counts: Any) -> RequestRecord:
    return replace(base, counts=replace(base.counts, **counts))


# ---- JSON ------------------------------------------------------------------------------------------------------------
def test_a_record_comes_back_equal() -> None:
    one = record(STEPS, num_thinking_tokens=3, output_ids=(1, 2), tags={"length": "8k", "depth": 0.5}, raw={"a": [1]})
    assert RequestRecord.from_json(json.loads(json.dumps(one.to_json()))) == one
    bare = replace(one, counts=Counts(**dict.fromkeys(SPECULATIVE), num_emitted_tokens=4), output_ids=None, raw={})
    assert RequestRecord.from_json(json.loads(json.dumps(bare.to_json()))) == bare
    assert not bare.counts.has_acceptance and not bare.counts.has_positions


SPECULATIVE = ("num_steps", "num_draft_tokens", "num_accepted_draft_tokens")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"turn": -1}, "turn"),
        ({"turn": True}, "turn"),
        ({"total_s": float("nan")}, "total_s"),
        ({"total_s": "1"}, "total_s"),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"speculation": 1}, "speculation"),
        ({"tags": {"a": [1]}}, "tags"),
        ({"scores": {"exact": "yes"}}, "scores"),
        ({"acceptance": 3.0}, "acceptance"),
        ({"schema": "other/1"}, "schema"),
        ({"counts": {"num_emitted_tokens": 1.0}}, "num_emitted_tokens"),
        ({"counts": {}}, "num_emitted_tokens"),
        ({"counts": {"num_emitted_tokens": 1, "per_step_accepted": [1, -1]}}, "per_step_accepted"),
        ({"counts": {"num_emitted_tokens": 1, "steps_source": "guessed"}}, "steps_source"),
        ({"counts": 3}, "counts"),
    ],
)
def test_a_record_is_strict(change: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        RequestRecord.from_json({**record(STEPS).to_json(), **change})
    assert "\n" not in str(error.value)


def test_a_missing_field_and_another_kind_are_named() -> None:
    raw = record(STEPS).to_json()
    del raw["engine"]
    with pytest.raises(ConfigError, match="engine"):
        RequestRecord.from_json(raw)
    with pytest.raises(ConfigError, match="list"):
        RequestRecord.from_json([raw])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 7).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), min_size=1, max_size=9),
    st.data(),
)
def test_steps_and_histograms_give_the_same_estimates(steps: list[tuple[int, int]], data: st.DataObject) -> None:
    emitted = 1 + len(steps) + sum(a for _, a in steps) - data.draw(st.integers(0, min(steps[-1][1], 7)))
    one = record(steps, emitted)
    assert faults_of_record(one) == []
    one.counts.stats().check()
    accepted, drafted, full = one.counts.histograms()
    two = changed(
        one,
        per_step_accepted=None,
        per_step_drafted=None,
        accepted_histogram=accepted,
        drafted_histogram=drafted,
        full_histogram=full,
    )
    assert faults_of_record(two) == [] and two.counts.stats() == one.counts.stats()


def test_a_fixed_depth_stands_for_a_histogram_of_drafted_steps() -> None:
    one = record([(7, 3), (7, 7), (7, 0)])
    two = changed(
        one,
        per_step_accepted=None,
        per_step_drafted=None,
        accepted_histogram=(1, 0, 0, 1, 0, 0, 0, 1),
        has_fixed_depth=True,
    )
    assert two.counts.has_positions and two.counts.stats() == one.counts.stats()
    assert survival_by_position([two.stats()]) == survival_by_position([one.stats()])


# ---- identities ------------------------------------------------------------------------------------------------------
def test_a_true_record_has_no_faults() -> None:
    for one in (record(STEPS), record(STEPS[:3], 1 + 3 + 10 - 5), record([], 1)):
        assert faults_of_record(one) == []
    off = record([(0, 0)] * 4, speculation=False, width=None)
    assert faults_of_record(off) == []


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"num_draft_tokens": 8 * 5}, "P <= k S"),  # the block's rows as proposals: the rate is 12.5 % low
        ({"num_draft_tokens": 23, "has_fixed_depth": True}, "P = k S"),
        ({"num_accepted_draft_tokens": 12 + 5}, "weighted|1 [+] S|by step"),  # the bonus token as accepted
        ({"num_steps": 6}, "by step"),  # the prefill as a step
        ({"num_emitted_tokens": 19}, "nowhere"),
        ({"num_emitted_tokens": 5}, "min\\(A, k\\)"),
        ({"num_clipped_tokens": 2}, "cut away"),
        ({"reported_acceptance_length": 4.4}, "length that is stated"),
        ({"reported_acceptance_rate": 12 / 40}, "rate that is stated"),
        ({"per_step_accepted": (3, 0, 7, 0, 2)}, "every step accepts"),
        ({"accepted_histogram": (2, 0, 1, 1)}, "accepted histogram"),
        ({"drafted_histogram": (1, 0, 1, 0, 0, 0, 0, 2)}, "drafted histogram"),
    ],
)
def test_wrong_counters_are_caught(counts: dict[str, Any], words: str) -> None:
    import re

    found = faults_of_record(changed(record(STEPS), **counts))
    assert any(re.search(words, fault) for fault in found), found


def test_wrong_times_splits_and_limits_are_caught() -> None:
    assert "first token" in faults_of_record(record(STEPS, first_token_s=2.0))[0]
    assert "thinking" in faults_of_record(record(STEPS, num_thinking_tokens=99))[0]
    assert "limit" in faults_of_record(record(STEPS, max_new_tokens=17))[0]
    assert "speculation is off" in faults_of_record(record(STEPS, speculation=False))[0]


def test_a_prefill_token_counted_as_accepted_is_seen_in_many_records() -> None:
    """Engines that tell sums only: each record alone looks like one whose last step was cut by one token."""

    def sums_only(one: RequestRecord, extra: int) -> RequestRecord:
        a = one.counts.num_accepted_draft_tokens
        assert a is not None
        gone = dict.fromkeys(("per_step_accepted", "per_step_drafted", "num_clipped_tokens"))
        return changed(one, **gone, num_accepted_draft_tokens=a + extra)

    right = [record([(7, 3), (7, i % 5)], prompt=f"own-{i}") for i in range(12)]
    assert examine([sums_only(one, 0) for one in right]).holds
    wrong = [sums_only(one, 1) for one in right]
    assert all(faults_of_record(one) == [] for one in wrong)
    verdict = examine(wrong)
    assert not verdict.holds and "prefill" in verdict.faults[0]
    assert faults_of_run(wrong[:5]) == []


def test_failed_requests_are_counted_and_not_checked() -> None:
    broken = record(STEPS, 3, finish_reason="error", error="x")
    idle = record([], 1)
    verdict = examine([record(STEPS), broken, idle])
    assert verdict.holds and (verdict.num_failed, verdict.num_without_steps, verdict.num_checked) == (1, 1, 2)
    assert examine([changed(record(STEPS), num_steps=7)] * 3).faults[0].endswith("(3 of 3 records)")


def test_the_published_example_of_a_cut_last_step() -> None:
    """S 43, A 63, C 106: one token was committed beyond the end; 1 + A / S is 2.465."""
    one = record([(7, 0)])
    one = changed(
        one,
        num_steps=43,
        num_accepted_draft_tokens=63,
        num_draft_tokens=43 * 7,
        num_emitted_tokens=106,
        num_clipped_tokens=1,
        per_step_accepted=None,
        per_step_drafted=None,
        has_fixed_depth=True,
    )
    assert faults_of_record(one) == []
    assert pooled_acceptance_length([one.stats()]) == pytest.approx(1 + 63 / 43)


# ---- settings --------------------------------------------------------------------------------------------------------
def test_settings_refuse_what_cannot_be_meant() -> None:
    greedy = find_sampling("greedy")
    with pytest.raises(RequestError, match="width"):
        Setting(speculation=False, width=5, sampling=greedy, max_new_tokens=8, load=Load(1))
    for wrong in ({}, {"concurrency": 1, "rate": 1.0}, {"concurrency": 0}, {"rate": -1.0}):
        with pytest.raises(RequestError):
            Load(**wrong)
    with pytest.raises(RequestError, match="production"):
        find_sampling("hot")
    production = find_sampling("production")
    assert (production.temperature, production.top_p, production.top_k) == (1.0, 0.95, None)


def test_seeds_depend_on_what_is_asked_alone() -> None:
    prompt = Prompt(id="own-0", dataset="own", turns=("a", "b"))
    sampled = Setting(
        speculation=True, width=8, sampling=find_sampling("production"), max_new_tokens=8, load=Load(concurrency=4)
    )
    seeds = {Job(prompt, sample).seed(sampled, turn) for sample in range(3) for turn in range(2)}
    assert len(seeds) == 6
    narrow = replace(sampled, width=5, load=Load(rate=2.0))
    assert Job(prompt, 0).seed(narrow, 1) == Job(prompt, 0).seed(sampled, 1)
    assert Job(prompt, 0).seed(replace(sampled, sampling=find_sampling("greedy")), 0) is None


def test_arrivals_are_poisson_and_repeat() -> None:
    times = Load(rate=4.0).arrivals_s(4000, seed=1)
    assert times == Load(rate=4.0).arrivals_s(4000, seed=1) != Load(rate=4.0).arrivals_s(4000, seed=2)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.06) and variance == pytest.approx(0.0625, rel=0.15)
    assert Load(concurrency=8).arrivals_s(3, seed=1) == [0.0, 0.0, 0.0]


# ---- the journal -----------------------------------------------------------------------------------------------------
SETTINGS = {"sets": ["own"], "widths": [8]}


def test_a_journal_goes_on_behind_a_torn_line_and_keeps_the_last_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    with Journal(path, SETTINGS, {"at": 1}) as journal:
        journal.append(record(STEPS, prompt="own-0"))
        journal.append(record(STEPS, prompt="own-1"))
    path.write_bytes(path.read_bytes()[:-20])
    with Journal(path, SETTINGS, {"at": 2}) as journal:
        assert [one.prompt_id for one in journal.content.records.values()] == ["own-0"]
        journal.append(record(STEPS[:2], prompt="own-0"))
    content = read_journal(path)
    assert content.settings == SETTINGS and content.runs == [{"at": 1}, {"at": 2}]
    [one] = content.records.values()
    assert one.counts.num_steps == 2


def test_journals_of_other_settings_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Journal(path, SETTINGS, {}) as journal:
        journal.append(record(STEPS))
    with pytest.raises(ConfigError, match="another widths"):
        Journal(path, {**SETTINGS, "widths": [5]}, {})
    good = path.read_bytes()
    for bad in (b"{}\n", b"[1]\n", b'{"kind": "x"}\n', b'{"kind": "record", "a": 1}\n', b"\n"):
        path.write_bytes(good + bad)
        with pytest.raises(ConfigError, match="line 3"):
            read_journal(path)
    with pytest.raises(ConfigError, match="missing"):
        read_journal(tmp_path / "missing.jsonl")


def test_parts_are_put_together(tmp_path: Path) -> None:
    for part in range(2):
        with Journal(tmp_path / f"part{part}.jsonl", SETTINGS, {"part": part}) as journal:
            journal.append(record(STEPS, prompt=f"own-{part}"))
    content = read_journal(tmp_path.glob("part*.jsonl"))
    assert len(content.records) == 2 and len(content.runs) == 2


WRITER = """
import sys
sys.path[:0] = {path!r}
from test_bench_record import STEPS, SETTINGS, record
from blockdraft.bench.journal import Journal
from pathlib import Path
with Journal(Path({file!r}), SETTINGS, {{}}) as journal:
    for number in range(len(journal.content.records), 10_000):
        journal.append(record(STEPS, prompt=f"own-{{number}}"))
        print(number, flush=True)
"""


def test_nothing_that_was_acknowledged_is_lost_by_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    code = WRITER.format(path=[str(Path(__file__).parent)], file=str(file))
    told = -1
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert process.stdout is not None
        for _ in range(25):
            told = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        told = int(rest[-1]) if rest and rest[-1].isdigit() else told
        process.wait()
        numbers = sorted(int(one.prompt_id.split("-")[1]) for one in read_journal(file).records.values())
        assert numbers == list(range(len(numbers)))
        assert told < len(numbers)
    assert len(read_journal(file).runs) == 2
