"""`verify --url`: a correct server passes, and one that ignores what it is asked fails with the right reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_server_kit import Scripted, playing
from blockdraft import load
from blockdraft.bench.servers import connect, exam
from blockdraft.bench.servers.connection import Connection
from blockdraft.bench.system import Prompt
from serve_kit import Running, running
from tiny_pair import TinyPair, run_cli

PROMPTS = [Prompt(id=f"t-{i}", dataset="t", turns=(f"the quick fox {i}",)) for i in range(3)]
Body = dict[str, Any]


@pytest.fixture(scope="module")
def server(tiny_pair: TinyPair) -> Iterator[Running]:
    with running(load(tiny_pair.draft, tiny_pair.target, max_rows=2)) as made:
        yield made


def test_a_correct_server_passes(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(exam.SIZES, "quick", (2, 24))
    out = tmp_path / "report.json"
    ran = run_cli("verify", "--url", server.url, "--out", out)
    assert ran.code == 0, ran.out
    found = json.loads(out.read_text())
    assert {c["name"]: c["outcome"] for c in found["checks"]} == {
        "greedy identity": "passed",
        "seeds": "passed",
        "stops and lengths": "passed",
        "sampled tokens": "not run",
    }
    assert "by chance" not in ran.out and " proposals: 2 equal" in ran.out
    assert found["subject"]["engine"].startswith("blockdraft ") and found["checks"][0]["figures"]["num_ties"] == 0


def more_tokens(body: Body) -> None:
    body["max_tokens"] += 1


def other_text_with_the_draft(body: Body) -> None:
    if body["speculation"]["enabled"]:
        body["repetition_penalty"] = 5.0


def one_seed(body: Body) -> None:
    body.update({"seed": 1} if "seed" in body else {})


def other_lengths_other_text(body: Body) -> None:
    if body["max_tokens"] == 4:
        body["repetition_penalty"] = 5.0


@pytest.mark.parametrize(
    ("ignores", "name", "reason"),
    [
        (lambda body: body.pop("seed", None), "seeds", exam.NOT_REPEATED),
        (one_seed, "seeds", exam.IGNORED),
        (more_tokens, "stops and lengths", exam.WRONG_LENGTH),
        (lambda body: body.pop("stop", None), "stops and lengths", exam.BEYOND_STOP),
        (other_lengths_other_text, "stops and lengths", exam.NOT_A_PREFIX),
        (other_text_with_the_draft, "greedy identity", exam.DIVERGED),
    ],
)
def test_a_broken_server_fails(
    server: Running,
    monkeypatch: pytest.MonkeyPatch,
    ignores: Callable[[Body], object],
    name: str,
    reason: str,
) -> None:
    """The server is the real one; what it would ignore is changed on the way to it."""
    request = Connection.request

    def changed(self: Connection, *given: Any) -> tuple[str, Body]:
        path, body = request(self, *given)
        ignores(body)
        return path, body

    monkeypatch.setattr(Connection, "request", changed)
    found = exam.examine_server(connect(server.url), PROMPTS[:2], num_tokens=16, budget="quick", seed=0)
    assert not found.has_passed and found.check(name).outcome == "failed"
    assert reason in str(found.check(name).reason)


def test_texts_without_a_proposal_say_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Connection.request

    def without(self: Connection, *given: Any) -> tuple[str, Body]:
        path, body = request(self, *given)
        return path, body | {"speculation": {"enabled": False, "tokens": True}}

    monkeypatch.setattr(Connection, "request", without)
    found = exam.examine_server(connect(server.url), PROMPTS[:1], num_tokens=8, budget="quick", seed=0)
    assert found.check("greedy identity").outcome == "not run"


def test_a_tie_is_the_two_likeliest_tokens_close_together() -> None:
    def answer(*tokens: tuple[str, list[tuple[str, float]]]) -> exam.Answer:
        made = exam.Answer()
        for token, top in tokens:
            entry = {"token": token, "top_logprobs": [{"token": t, "logprob": p} for t, p in top]}
            made.logprobs.append(entry)
        return made

    plain = answer(("a", [("a", -0.1), ("b", -3.0)]), ("c", [("c", -0.7), ("d", -0.72)]))
    assert exam._divergence(answer(("a", []), ("d", [])), plain) == (1, pytest.approx(0.02))
    assert exam._divergence(answer(("a", []), ("e", [])), plain) == (1, None)
    assert exam._divergence(answer(("b", []), ("x", [])), plain) == (0, pytest.approx(2.9))
    assert exam._divergence(answer(), answer()) == (None, None)


def test_without_a_plain_server_greedy_identity_is_not_run() -> None:
    with playing(Scripted("sglang")) as scripted:
        found = exam.examine_server(connect(scripted.url), PROMPTS[:1], num_tokens=16, budget="quick", seed=0)
    check = found.check("greedy identity")
    assert check.outcome == "not run" and "--plain-url" in str(check.reason)
    # One answer to everything is no answer to a limit.
    assert not found.has_passed and exam.WRONG_LENGTH in str(found.check("stops and lengths").reason)
