"""Servers of other engines as systems under test: recorded answers, wrong units, whole runs, what breaks on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench_server_kit import RECORDINGS, WORD, A, C, P, S, Scripted, playing
from blockdraft.bench.command import Options, make_plan, measure
from blockdraft.bench.identities import examine, faults_of_record, faults_of_run
from blockdraft.bench.journal import Journal, read_journal
from blockdraft.bench.record import WHOLE_RUN, RequestRecord
from blockdraft.bench.runner import Part, run_parts
from blockdraft.bench.servers import ENGINES, Server, connect
from blockdraft.bench.servers.answer import Answer
from blockdraft.bench.servers.detect import evidence
from blockdraft.bench.servers.prometheus import growth, read_metrics
from blockdraft.bench.system import Job, Load, Prompt, Setting, System, find_sampling
from blockdraft.bench.workloads import Workload
from blockdraft.errors import RequestError, UnavailableError

GREEDY = find_sampling("greedy")
PROMPTS = [Prompt(id=f"t-{i}", dataset="t", turns=(f"question {i}",), tags={"i": i}) for i in range(4)]
ONE = Load(concurrency=1)


def setting(**changes: Any) -> Setting:
    values = {"speculation": True, "width": None, "sampling": GREEDY, "max_new_tokens": 64, "load": ONE}
    return Setting(**{**values, **changes})


def workload(prompts: list[Prompt]) -> Workload:
    return Workload(
        name="t",
        prompts=tuple(prompts),
        num_rows=len(prompts),
        format_name="turns",
        format_sha256="0",
        source="t",
        licence="",
    )


def asked(server: Server, how: Setting, prompts: list[Prompt] = PROMPTS) -> list[RequestRecord]:
    server.check(how)
    return list(server.run([Job(prompt) for prompt in prompts], how))


@pytest.fixture(scope="module", params=sorted(RECORDINGS))
def played(request: pytest.FixtureRequest) -> Iterator[tuple[Scripted, Server]]:
    with playing(Scripted(request.param)) as scripted:
        yield scripted, connect(scripted.url + "/v1")


# ------------------------------------------------------------------------------------------------------- formats


def test_every_engine_gives_the_same_record(played: tuple[Scripted, Server]) -> None:
    scripted, server = played
    assert isinstance(server, System) and server.facts.engine == scripted.engine
    assert json.dumps(server.facts.to_json())
    found = asked(server, setting())
    assert [r.prompt_id for r in found] == [prompt.id for prompt in PROMPTS]
    for record in found:
        counts = record.counts
        assert (counts.num_steps, counts.num_draft_tokens, counts.num_accepted_draft_tokens) == (S, P, A)
        assert counts.num_emitted_tokens == C and record.finish_reason == "stop" and record.num_prompt_tokens == 20
        assert record.text == WORD * C and WORD.strip() not in json.dumps(record.raw)
        assert record.first_token_s is not None and 0 < record.first_token_s <= record.total_s
        assert RequestRecord.from_json(json.loads(json.dumps(record.to_json()))) == replace(
            record, output_ids=record.output_ids
        )
    assert examine(found).holds, examine(found).faults
    derived = scripted.engine == "tensorrt_llm"
    assert {r.counts.steps_source for r in found} == {"derived" if derived else "counted"}


def test_positions_where_an_engine_tells_them(played: tuple[Scripted, Server]) -> None:
    scripted, server = played
    [record] = asked(server, setting(), PROMPTS[:1])
    accepted = record.counts.accepted_histogram
    tells = scripted.engine in ("vllm", "sglang", "mistral_rs")
    assert (accepted is not None) == tells
    if accepted is not None:
        assert [*accepted, 0][:8] == [0, 0, 1, 1, 0, 1, 0, 1]
    # By position only with proposals too: vLLM's own object, or a depth that is known.
    assert record.counts.has_positions == (scripted.recording in ("vllm", "vllm detailed", "sglang", "sglang old"))


def test_more_in_flight(played: tuple[Scripted, Server]) -> None:
    """Answers with counters stand alone; without, the run's counters are all there is, and say whose they are."""
    scripted, server = played
    found = asked(server, setting(load=Load(concurrency=3)))
    last = found[-1].raw.get(WHOLE_RUN)
    silent = scripted.recording in ("vllm silent", "tokenspeed silent", "mistral_rs")
    assert all(r.counts.has_acceptance != silent for r in found)
    assert examine(found).holds, examine(found).faults
    if scripted.engine in ("sglang", "tensorrt_llm"):
        assert last is None
        return
    assert last["num_requests"] == 4 and last["server"] == {
        "num_steps": 4 * S,
        "num_draft_tokens": 4 * P,
        "num_accepted_draft_tokens": 4 * A,
    }
    known = scripted.engine in ("vllm", "llama_cpp")
    assert last["nobody_else"] is (True if known else None)


def test_the_table_of_evidence() -> None:
    assert set(ENGINES) == {"blockdraft", "vllm", "sglang", "tokenspeed", "llama_cpp", "mistral_rs", "tensorrt_llm"}
    card = {"data": [{"id": "m", "owned_by": "vllm"}]}
    assert list(evidence(card, "")) == ["vllm"]
    assert list(evidence({}, "# HELP vllm:x\nmistralrs_sequences_running 1")) == ["mistral_rs"]
    assert set(evidence(card, "sglang:num_running_reqs 0\n")) == {"vllm", "sglang"}
    assert evidence({"data": [{"id": "m", "owned_by": "organization-owner"}]}, "process_cpu_seconds_total 1") == {}


def test_an_engine_is_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench_server_kit import OWNERS

    monkeypatch.setitem(OWNERS, "sglang", "somebody")
    with playing(Scripted("sglang")) as scripted:
        with pytest.raises(RequestError, match=r"cannot be told .* --engine: blockdraft, vllm"):
            connect(scripted.url)
        assert connect(scripted.url, engine="sglang").facts.engine == "sglang"
        with pytest.raises(RequestError, match="engine 'triton' is unknown"):
            connect(scripted.url, engine="triton")
        with pytest.raises(RequestError, match=r"no model 'x'; it has m"):
            connect(scripted.url, engine="sglang", model="x")
    with pytest.raises(UnavailableError, match="does not answer"):
        connect(scripted.url)
    with pytest.raises(RequestError, match="give an address such as"):
        connect("127.0.0.1:8000")
    with pytest.raises(RequestError, match="BLOCKDRAFT_API_KEY"):
        connect("http://name:word@127.0.0.1:8000")


# --------------------------------------------------------------------------------------------------- wrong units


def reread(record: RequestRecord, recording: str, change: dict[str, Any], *, width: int | None = 8) -> RequestRecord:
    """The record that the engine's adapter makes of a recording whose counters were changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change.get(name, changed(item)) for name, item in value.items()}
        return value

    answer = Answer()
    for number, chunk in enumerate(RECORDINGS[recording]):
        answer.take({**changed(chunk), "choices": [changed(c) for c in chunk["choices"]]}, float(number))
    counts = ENGINES[recording.split()[0]].counts(answer, width)
    assert counts is not None
    return replace(record, counts=counts)


@pytest.fixture(scope="module")
def real() -> RequestRecord:
    """A record of a whole request, whose counts are to be replaced."""
    with playing(Scripted("sglang")) as scripted:
        [record] = asked(connect(scripted.url), setting(), PROMPTS[:1])
    return record


@pytest.mark.parametrize(
    ("recording", "change", "fault"),
    [
        ("vllm", {"num_draft_tokens": P + S}, "P <= k S"),  # rows of the block instead of proposals
        ("vllm", {"draft_acceptance_rate": A / (P + S)}, "the rate that is stated"),  # 12.5 % low
        ("vllm", {"num_accepted_draft_tokens": A + S}, "weighted sum of the accepted histogram"),  # with the bonus
        ("vllm", {"num_spec_steps": S + 1}, "sum of the accepted histogram = S"),  # the prefill as a step
        ("vllm", {"mean_acceptance_length": C / S}, "the length that is stated"),
        ("sglang", {"spec_num_proposed_drafts": P + S}, "P = k S"),
        ("sglang", {"spec_accept_rate": A / (P + S)}, "the rate that is stated"),
        ("sglang", {"spec_num_correct_drafts": A + S}, "weighted sum of the accepted histogram"),
        ("sglang old", {"spec_verify_ct": S - 1}, "P = k S"),
        ("tokenspeed", {"accept_draft_tokens": 1 + (C - 1) / S}, "the length that is stated"),  # + 1, as if no bonus
        ("tokenspeed", {"accept_draft_tokens": C / S}, "the length that is stated"),  # the prefill's token in it
        ("tensorrt_llm", {"acceptance_rate": A / (P + S)}, "the rate that is stated"),
        ("tensorrt_llm", {"total_draft_tokens": P + S}, "P <= k S"),
        ("llama_cpp", {"draft_n": P + S}, "P <= k S"),
    ],
)
def test_a_wrong_unit_is_caught(real: RequestRecord, recording: str, change: dict[str, Any], fault: str) -> None:
    assert faults_of_record(reread(real, recording, {})) == []
    assert any(found.startswith(fault) for found in faults_of_record(reread(real, recording, change)))


def test_a_prefill_that_is_counted_is_caught_over_a_run(real: RequestRecord) -> None:
    """One record cannot tell it from a last step that was cut; ten in a row can."""
    change = {"spec_num_correct_drafts": A + 1, "spec_correct_drafts_histogram": None, "spec_accept_rate": None}
    wrong = reread(real, "sglang", change)
    assert faults_of_record(wrong) == []
    [fault] = faults_of_run([replace(wrong, prompt_id=str(i)) for i in range(10)])
    assert "is the token of the prefill counted" in fault


def test_rows_of_the_block_are_no_proposals() -> None:
    names = ENGINES["tokenspeed"].counters
    assert names is not None and names.counts_rows
    before = {"tokenspeed:spec_decode_num_drafts": 1.0, "tokenspeed:spec_decode_num_draft_tokens": 8.0}
    after = {name: value * 5 for name, value in before.items()}
    assert growth(names, before, after, 1).num_draft_tokens == 4 * 7
    assert growth(replace(names, counts_rows=False), before, after, 1).num_draft_tokens == 4 * 8


def test_samples_are_summed_over_ranks() -> None:
    text = 'a_total{rank="0"} 2\na_total{rank="1"} 3.0\na_created{rank="0"} 9\nb{position="1"} 1e1\n# c 4\nd NaNs\n'
    assert read_metrics(text) == {"a": 5.0, "b[1]": 10.0}


def test_requests_must_add_up_to_the_servers_counters() -> None:
    with playing(Scripted("vllm")) as scripted:
        found = asked(connect(scripted.url), setting())
    entry = found[-1].raw[WHOLE_RUN]
    assert entry["nobody_else"] is True and entry["requests"] == entry["server"]
    wrong = {**entry, "server": {**entry["server"], "num_steps": 4 * S + 2}}
    [fault] = faults_of_run([*found[:-1], replace(found[-1], raw={WHOLE_RUN: wrong})])
    assert fault == f"the sum over 4 requests = the server's counter: num_steps {4 * S}, {4 * S + 2}"
    shared = {**wrong, "nobody_else": False}
    assert faults_of_run([*found[:-1], replace(found[-1], raw={WHOLE_RUN: shared})]) == []


# ------------------------------------------------------------------------------------------------- what is refused


def test_acceptance_that_cannot_be_read_is_refused() -> None:
    with playing(Scripted("vllm silent", has_metrics=False)) as scripted:
        with pytest.raises(RequestError, match=r"tells no acceptance of a request.*per-request-spec-decode-metrics"):
            connect(scripted.url).check(setting())
        assert len(scripted.bodies) == 1  # one request was enough to know


def test_somebody_else_at_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockdraft.bench.servers.connection.SETTLE_S", 0.1)
    with playing(Scripted("vllm silent", others_per_request=1)) as scripted:
        found = asked(connect(scripted.url), setting(), PROMPTS[:2])
        assert [r.finish_reason for r in found] == ["error"] * 2
        assert "is somebody else using it?" in str(found[0].error)
        found = asked(connect(scripted.url), setting(load=Load(concurrency=2)), PROMPTS[:2])
        assert found[-1].raw[WHOLE_RUN]["nobody_else"] is False


def test_plain_decoding_needs_a_second_server() -> None:
    off = setting(speculation=False)
    with (
        playing(Scripted("vllm")) as one,
        playing(Scripted("vllm silent")) as two,
        playing(Scripted("sglang")) as other,
    ):
        with pytest.raises(RequestError, match="--plain-url"):
            connect(one.url).check(off)
        with pytest.raises(RequestError, match="needs the same engine"):
            connect(one.url, plain_url=other.url)
        server = connect(one.url, plain_url=two.url)
        found = asked(server, off, PROMPTS[:1]) + asked(server, setting(), PROMPTS[:1])
        assert [len(one.bodies), len(two.bodies)] == [2, 2]  # of each, one to look
    plain, speculated = (r.counts for r in found)
    assert (plain.num_steps, plain.num_draft_tokens, plain.steps_source) == (C - 1, 0, "derived")
    assert speculated.num_steps == S and examine(found).holds
    # A "plain" server that speculates is found out.
    with playing(Scripted("vllm")) as one, playing(Scripted("vllm")) as two:
        found = asked(connect(one.url, plain_url=two.url), off, PROMPTS[:1])
    assert any("speculation is off" in fault for fault in examine(found).faults)


def test_a_width_that_does_not_run_is_refused() -> None:
    for recording in ("sglang", "vllm"):
        with playing(Scripted(recording)) as scripted:
            with pytest.raises(RequestError, match="runs width 8, not 5"):
                connect(scripted.url).check(setting(width=5))
            connect(scripted.url).check(setting(width=8))


def test_what_is_asked() -> None:
    hot = setting(sampling=find_sampling("production"))
    prompts = [
        Prompt(id="a", dataset="t", turns=("one", "two"), system="be short", stop=("END",), max_new_tokens=9),
        Prompt(id="b", dataset="t", turns=("raw text",), is_raw=True),
    ]
    with playing(Scripted("llama_cpp")) as scripted:
        with pytest.raises(RequestError, match="--effort WORD"):
            connect(scripted.url).check(hot)
        found = asked(connect(scripted.url, effort="high"), hot, prompts)
        _, first, second, raw = scripted.bodies
        asked(connect(scripted.url, effort="none"), hot, prompts[1:])
        assert "reasoning_effort" not in scripted.bodies[-1]
    assert [(r.prompt_id, r.turn) for r in found] == [("a", 0), ("a", 1), ("b", 0)]
    # Cuts that llama.cpp makes unless it is told not to.
    assert {name: first[name] for name in ("temperature", "top_p", "top_k", "min_p")} == {
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
    }
    assert first["seed"] == found[0].seed and second["seed"] == found[1].seed != first["seed"]
    assert first["max_tokens"] == 9 and first["stop"] == ["END"] and first["reasoning_effort"] == "high"
    system, asked_first = {"role": "system", "content": "be short"}, {"role": "user", "content": "one"}
    assert first["messages"] == [system, asked_first]
    reply = {"role": "assistant", "content": WORD * C}
    assert second["messages"] == [system, asked_first, reply, {"role": "user", "content": "two"}]
    assert raw["prompt"] == "raw text" and "messages" not in raw


def test_without_httpx_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UnavailableError, match=r"needs httpx.*pip install 'blockdraft\[bench\]'"):
        connect("http://127.0.0.1:9")


# ------------------------------------------------------------------------------------------------ loads and breaks


def test_an_open_loop_counts_from_the_arrival() -> None:
    how = setting(load=Load(rate=60.0))
    with playing(Scripted("sglang")) as scripted:
        found = asked(connect(scripted.url), how)
    assert sorted(r.sent_s for r in found) == pytest.approx(how.load.arrivals_s(4, how.seed))
    assert all(r.first_token_s is not None and r.first_token_s > 0 for r in found)


BREAKS = {
    "question 0": ("429", "the server answered 429 (overloaded)"),
    "question 1": ("500", "the server answered 500 (overloaded)"),
    "question 2": ("no JSON", "a chunk of the stream is no JSON"),
    "question 3": ("other shape", "another shape than OpenAI's"),
    "question 4": ("no usage", "has no usage"),
    "question 5": ("cut", "the connection broke"),
    "question 6": ("error", "ended the stream with an error"),
    "question 7": ("no end", "without a finish reason"),
}


def test_what_breaks_is_recorded_and_held_again(tmp_path: Path) -> None:
    prompts = [Prompt(id=f"t-{i}", dataset="t", turns=(f"question {i}",)) for i in range(10)]
    part = Part(workload(prompts), setting(load=Load(concurrency=2)))
    path = tmp_path / "run.jsonl"
    with playing(Scripted("sglang", broken={text: how for text, (how, _) in BREAKS.items()})) as scripted:
        server = connect(scripted.url)
        with Journal(path, {}, {}) as journal:
            found = {r.prompt_id: r for r in run_parts(server, [part], journal)}
        for number in range(10):
            record = found[f"t-{number}"]
            _, words = BREAKS.get(f"question {number}", ("", ""))
            assert record.is_whole != bool(words), record.error
            assert words in (record.error or "")
            assert record.error is None or ("question" not in record.error and WORD.strip() not in record.error)
        scripted.broken.clear()
        num_before = len(scripted.bodies)
        with Journal(path, {}, {}) as journal:
            again = run_parts(server, [part], journal)
        assert all(r.is_whole for r in again) and len(again) == 10 and examine(again).holds
        assert len(scripted.bodies) == num_before + 2 + 8  # two to warm up; what was whole is not asked again


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    prompts = [Prompt(id=f"t-{i}", dataset="t", turns=(f"question {i}",)) for i in range(12)]
    part = Part(workload(prompts), setting())
    path = tmp_path / "run.jsonl"
    with playing(Scripted("sglang", die_at=6)) as scripted:
        server = connect(scripted.url)
        port = int(scripted.url.rsplit(":", 1)[1])
        with (
            Journal(path, {}, {}) as journal,
            pytest.raises(UnavailableError, match="took none of 3 requests in a row"),
        ):
            run_parts(server, [part], journal)
    kept = list(read_journal(path).records.values())
    assert sum(r.is_whole for r in kept) == 3 and sum(not r.is_whole for r in kept) == 4
    with playing(Scripted("sglang"), port) as scripted, Journal(path, {}, {}) as journal:
        found = run_parts(connect(scripted.url), [part], journal)
    assert len(found) == 12 and all(r.is_whole for r in found)


def test_a_run_that_is_broken_off_ends_at_once() -> None:
    with playing(Scripted("sglang")) as scripted:
        records = connect(scripted.url).run([Job(prompt) for prompt in PROMPTS * 20], setting())
        next(records)
        records.close()  # type: ignore[attr-defined]
        assert len(scripted.bodies) < 100


def test_a_report_of_whole_run_counters(tmp_path: Path) -> None:
    with playing(Scripted("mistral_rs")) as scripted:
        server = connect(scripted.url)
        options = Options(table="A", loads=[Load(concurrency=2)], limit=4)
        plan = make_plan(options, server)
        document = measure(plan, server, tmp_path / "a.jsonl", command="x", where={}, progress=lambda *_: None)
    [note] = [line for line in document.notes if "requests tell no acceptance" in line]
    assert f"1 + A / S is {1 + A / S:.3f}" in note and "nobody else used it is not known" in note
