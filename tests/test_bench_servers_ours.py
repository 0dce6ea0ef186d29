"""This package's own server, really running, measured through its address: the counts of the engine in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockdraft import load
from blockdraft.bench.identities import examine
from blockdraft.bench.in_process import InProcess
from blockdraft.bench.record import WHOLE_RUN, RequestRecord
from blockdraft.bench.servers import Server, connect
from blockdraft.bench.system import Job, Load, Prompt, Setting, System, find_sampling
from serve_kit import MODEL, Running, running
from tiny_pair import TinyPair, run_cli

GREEDY = find_sampling("greedy")
PROMPTS = [
    Prompt(id="t-0", dataset="t", turns=("the quick fox",)),
    Prompt(id="t-1", dataset="t", turns=("a block", "of the target"), system="word"),
    Prompt(id="t-2", dataset="t", turns=("one step",), max_new_tokens=5),
    Prompt(id="t-3", dataset="t", turns=("raw text",), is_raw=True),
    Prompt(id="t-4", dataset="t", turns=("lazy dog",), stop=("e",)),
]


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair) -> Iterator[Running]:
    with running(load(tiny_pair.draft, tiny_pair.target, max_rows=4)) as made:
        yield made


@pytest.fixture(scope="module")
def at_url(server: Running) -> Server:
    return connect(server.url)


@pytest.fixture(scope="module")
def here(tiny_pair: TinyPair) -> InProcess:
    engine = load(tiny_pair.draft, tiny_pair.target, max_rows=4)
    return InProcess(engine, version="0", target="t", draft="d", hardware={}, details={})


def setting(**changes: Any) -> Setting:
    values = {
        "speculation": True,
        "width": 5,
        "sampling": GREEDY,
        "max_new_tokens": 20,
        "load": Load(concurrency=2),
    }
    return Setting(**{**values, **changes})


def held(system: System, how: Setting) -> list[RequestRecord]:
    system.check(how)
    return sorted(system.run([Job(prompt) for prompt in PROMPTS], how), key=lambda r: (r.prompt_id, r.turn))


def test_it_is_found_and_says_what_it_is(at_url: Server) -> None:
    facts = at_url.facts
    assert (facts.engine, facts.target, facts.max_width) == ("blockdraft", MODEL, 5)
    assert "DFlash 2" in str(facts.draft)


@pytest.mark.parametrize("changes", [{}, {"width": 3}, {"speculation": False, "width": None}])
def test_counts_are_those_of_the_engine(at_url: Server, here: InProcess, changes: dict[str, Any]) -> None:
    how = setting(**changes)
    theirs, ours = held(at_url, how), held(here, how)
    assert len(theirs) == len(ours) == 6 and examine(theirs).holds, examine(theirs).faults
    for one, two in zip(theirs, ours, strict=True):
        assert one.counts == two.counts
        assert (one.prompt_id, one.turn, one.seed, one.finish_reason) == (
            two.prompt_id,
            two.turn,
            two.seed,
            two.finish_reason,
        )
        assert (one.output_ids, one.text) == (two.output_ids, two.text)
        assert (one.num_prompt_tokens, one.max_new_tokens) == (two.num_prompt_tokens, two.max_new_tokens)
        assert one.first_token_s is not None and 0 < one.first_token_s <= one.total_s
    if how.speculation:
        [entry] = [r.raw[WHOLE_RUN] for r in theirs if WHOLE_RUN in r.raw]
        assert entry["nobody_else"] is True and entry["requests"] == entry["server"]


def test_sampled_texts_are_those_of_the_engine(at_url: Server, here: InProcess) -> None:
    hot = replace(find_sampling("production"), reasoning_effort=None)
    theirs, ours = (held(system, setting(sampling=hot)) for system in (at_url, here))
    assert [r.output_ids for r in theirs] == [r.output_ids for r in ours]
    assert [r.counts for r in theirs] == [r.counts for r in ours]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_readers_read_the_same(server: Running, at_url: Server, engine: str) -> None:
    """The server speaks vLLM's and SGLang's objects too; a step without proposals is none in vLLM's."""
    system = connect(server.url, engine=engine)
    fields = {"blockdraft": {}, "vllm": {}, "sglang": {"return_spec_tokens_details": True, "return_meta_info": True}}
    # It refuses fields that are not its own, such as vLLM's return_token_ids.
    system.main.adapter = type("Reader", (type(system.main.adapter),), {"body": lambda self, how: fields[engine]})()
    theirs, ours = held(system, setting(width=None)), held(at_url, setting(width=None))
    for one, two in zip(theirs, ours, strict=True):
        plain = sum(n == 0 for n in two.counts.per_step_drafted or ())
        num_steps = (two.counts.num_steps or 0) - (plain if engine == "vllm" else 0)
        assert one.text == two.text and one.counts.num_steps == num_steps
        assert one.counts.num_draft_tokens == two.counts.num_draft_tokens
        assert one.counts.num_accepted_draft_tokens == two.counts.num_accepted_draft_tokens
        assert one.counts.num_emitted_tokens == two.counts.num_emitted_tokens


def test_what_the_server_refuses_is_said_before_the_run(server: Running, tmp_path: Path) -> None:
    ran = run_cli("bench", "--url", server.url, "--widths", "900", "--limit", "1", "--out", tmp_path)
    assert ran.code == 2 and "a request in the way of blockdraft failed: the server answered 400" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(server: Running, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the quick fox {i}"}) + "\n" for i in range(3)))
    words = ["--url", server.url, "--sets", prompts, "--table", "speed", "--widths", "5", "--max-new-tokens", "8"]
    ran = run_cli("bench", *words, "--concurrency", "2", "--rounds", "1", "--out", tmp_path)
    assert ran.code == 0, ran.err
    assert f"blockdraft {at_version()}, model {MODEL}" in ran.err
    report = json.loads((tmp_path / "table-speed.json").read_text())
    assert report["system"]["engine"] == "blockdraft" and report["identities_hold"] is True
    assert {row["mode"] for row in report["tables"][0]["rows"]} == {"off", "width 5"}
    num_before = len((tmp_path / "table-speed.jsonl").read_text().splitlines())
    ran = run_cli("bench", *words, "--concurrency", "2", "--rounds", "1", "--out", tmp_path)
    assert ran.code == 0
    assert len((tmp_path / "table-speed.jsonl").read_text().splitlines()) == num_before + 1  # its own line, no record


def at_version() -> str:
    from blockdraft import __version__

    return __version__


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DRAFT", "--url", "http://127.0.0.1:9"], "DRAFT is about a pair in this process"),
        (["--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype is about a pair in this process"),
        (["--engine", "vllm"], "--engine is about a server; name it with --url"),
        (["--plain-url", "http://127.0.0.1:9"], "--plain-url is about a server"),
        (["--url", "http://127.0.0.1:9", "--replay", "x.jsonl"], "are five things"),
    ],
)
def test_what_does_not_go_together(words: list[str], said: str) -> None:
    ran = run_cli("bench", *words)
    assert ran.code == 2 and said in ran.err
