"""Prompts: formats with hashes, rows of files, private rows, contexts with needles, scores."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from blockdraft.bench.system import Prompt
from blockdraft.bench.workloads import DATASETS, load_ruler, load_workload
from blockdraft.bench.workloads.formats import FORMATS
from blockdraft.bench.workloads.ruler import TEMPLATE_TOKENS, read_haystack
from blockdraft.bench.workloads.scoring import boxed, score
from blockdraft.errors import BlockdraftError, ConfigError, RequestError, UnavailableError


def words(text: str) -> int:
    return len(text.split())


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(shared_dir: Path) -> Path:
    folder = shared_dir / "data"
    if not (folder / "gsm8k" / "test.jsonl").is_file():
        pytest.skip("the files of the data sets are not here")
    return folder


# ---- sets ------------------------------------------------------------------------------------------------------------
def test_the_own_set_has_40_prompts_of_five_kinds() -> None:
    own = load_workload("own")
    assert len(own.prompts) == 40 and len({p.turns for p in own.prompts}) == 40
    categories = [p.tags["category"] for p in own.prompts]
    assert {c: categories.count(c) for c in categories} == dict.fromkeys(
        ("maths", "code", "writing", "knowledge", "text"), 8
    )
    assert sum(len(p.turns) == 2 for p in own.prompts) >= 5
    few = load_workload("own", limit=5)
    assert [p.tags["category"] for p in few.prompts] == ["maths", "code", "writing", "knowledge", "text"]
    assert few.num_rows == 40 and few.sha256 != own.sha256 == load_workload("own").sha256


@pytest.mark.parametrize(
    ("name", "count", "turns"),
    [
        ("gsm8k", 1319, {1}),
        ("math500", 500, {1}),
        ("humaneval", 164, {1}),
        ("mbpp", 257, {1}),
        ("mtbench", 80, {2}),
        ("specbench", 480, {1, 2}),
    ],
)
def test_sets_from_files(data: Path, name: str, count: int, turns: set[int]) -> None:
    found = load_workload(name, data=data)
    assert len(found.prompts) == count and {len(p.turns) for p in found.prompts} == turns
    assert not any(p.is_private for p in found.prompts)
    assert found.to_json()["num_prompts_of_the_set"] == count
    for wording in FORMATS[name][1:]:
        other = load_workload(name, data=data, format_name=wording.name)
        assert other.format_sha256 != found.format_sha256 and other.sha256 != found.sha256


def test_wordings_as_the_harnesses_have_them(data: Path) -> None:
    gsm8k = load_workload("gsm8k", data=data, limit=1).prompts[0]
    assert gsm8k.turns[0].endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert gsm8k.answers == ("18",)
    shots = load_workload("gsm8k", data=data, format_name="five-shot")
    assert shots.num_rows == 1314 and shots.prompts[0].is_raw and shots.prompts[0].stop == ("Question",)
    assert shots.prompts[0].turns[0].count("Question: ") == 6 and shots.prompts[0].turns[0].endswith("\nAnswer:")
    human = load_workload("humaneval", data=data, limit=1).prompts[0]
    assert "```python\nfrom typing import List" in human.turns[0] and human.turns[0].endswith("\n```")
    tests = load_workload("mbpp", data=data, format_name="tests", limit=1).prompts[0]
    assert "assert " in tests.turns[0] and tests.turns[0].endswith("[BEGIN]\n") and tests.stop == ("[DONE]",)
    assert load_workload("mtbench", data=data, format_name="first-turn").prompts[0].turns[1:] == ()


def test_hashes_of_formats_are_all_different() -> None:
    for formats in FORMATS.values():
        assert len({one.sha256 for one in formats}) == len(formats)


def test_rows_of_gpqa_are_shuffled_private_and_never_quoted(tmp_path: Path) -> None:
    names = ["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]
    rows = [dict(zip(names, [f"SECRET {i}?", f"right {i}", "w1", "w2", "w3"], strict=True)) for i in range(40)]
    path = tmp_path / "gpqa" / "gpqa_diamond.csv"
    path.parent.mkdir()

    def write() -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)

    write()
    found = load_workload("gpqa", data=tmp_path)
    assert all(p.is_private and p.turns[0].count(f"right {i}") == 1 for i, p in enumerate(found.prompts))
    letters = [p.answers[0] for p in found.prompts]
    assert {letters.count(letter) for letter in "ABCD"} <= set(range(4, 19))
    for p, letter in zip(found.prompts, letters, strict=True):
        assert f"{letter}) right" in p.turns[0]
    assert letters == [p.answers[0] for p in load_workload("gpqa", data=tmp_path).prompts]
    assert letters != [p.answers[0] for p in load_workload("gpqa", data=tmp_path, seed=1).prompts]
    assert "SECRET" not in json.dumps(found.to_json())
    rows[3]["Incorrect Answer 2"] = ""
    write()
    with pytest.raises(ConfigError) as error:
        load_workload("gpqa", data=tmp_path)
    assert "SECRET" not in str(error.value) and "row 3" in str(error.value)


def test_placeholders_of_speed_bench_are_refused(tmp_path: Path) -> None:
    good = {"question_id": "a", "category": "coding", "turns": ["Do this", "and that"]}
    write_jsonl(tmp_path / "qualitative.jsonl", [good])
    assert load_workload("speedbench", data=tmp_path).prompts[0].turns == ("Do this", "and that")
    bad = {**good, "question_id": "b", "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING X"]}
    write_jsonl(tmp_path / "qualitative.jsonl", [good, bad])
    with pytest.raises(RequestError, match="row 1 is a placeholder"):
        load_workload("speedbench", data=tmp_path)


def test_custom_files(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": "one"},
        {"id": "x", "turns": ["a", "b"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answers": ["7"]},
    ]
    path = write_jsonl(tmp_path / "mine.jsonl", rows)
    one, two, three = load_workload(str(path)).prompts
    assert (one.id, two.id, three.id) == ("custom-0", "custom-x", "custom-2")
    assert (one.turns, two.turns, three.turns, three.system) == (("one",), ("a", "b"), ("u",), "s")
    for bad, message in (
        ({"messages": [{"role": "assistant", "content": "x"}]}, "replies are live"),
        ({"turns": [" "]}, "not empty"),
        ({"question": "x"}, "prompt"),
        ({"id": True, "prompt": "x"}, "id must be"),
    ):
        write_jsonl(path, [bad])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match=message):
            load_workload(str(path))
    write_jsonl(path, [{"id": 1, "prompt": "x"}, {"id": 1, "prompt": "y"}])
    with pytest.raises(ConfigError, match="same id"):
        load_workload(str(path))
    path.write_text('{"prompt": "x"}\n{"prompt"\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_workload(str(path))


def test_what_cannot_be_had_is_named_in_one_line(tmp_path: Path) -> None:
    for name in DATASETS:
        if name != "own":
            with pytest.raises(UnavailableError, match=name) as error:
                load_workload(name, data=tmp_path)
            assert "\n" not in str(error.value)
    for call, message in (
        (lambda: load_workload("gsm9k"), "gsm8k"),
        (lambda: load_workload("own", format_name="x"), "turns"),
        (lambda: load_workload("own", limit=0), "at least 1"),
        (lambda: load_workload("specbench"), "--data"),
    ):
        with pytest.raises(BlockdraftError, match=message):
            call()


# ---- long contexts ---------------------------------------------------------------------------------------------------
@pytest.fixture
def haystack(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [
        {"text": f"Paragraph {i} " + "lorem ipsum dolor " * (5 + i % 9)} for i in range(400)
    ]
    return write_jsonl(tmp_path / "book.jsonl", rows)


def test_contexts_fill_their_length_and_hide_what_is_asked(haystack: Path) -> None:
    found = load_ruler(haystack, lengths=[2048, 4096], count=6, seed=3, num_tokens=words)
    assert len(found.prompts) == 2 * 2 * 6 and len({p.id for p in found.prompts}) == 24
    texts = [p.turns[0] for p in found.prompts if p.tags["arm"] == "short" and p.tags["length"] == 2048]
    begins = {text.split("\n\n")[1 + (text.split("\n\n")[1].startswith("One of"))] for text in texts}
    assert len(begins) == 6  # no two samples share a beginning
    for prompt in found.prompts:
        text, room = prompt.turns[0], int(prompt.tags["length"]) - 512 - TEMPLATE_TOKENS
        parts = text.split("\n\n")
        paragraphs = [part for part in parts if part.startswith("Paragraph")]
        assert room - 45 <= words(text) <= room and len(paragraphs) == len(set(paragraphs))
        needles = [part for part in parts if part.startswith("One of the special magic numbers")]
        [value] = prompt.answers
        [asked] = [n for n in needles if value in n]
        assert len(needles) == 4 and asked.split(" for ")[1].split(" is: ")[0] in parts[-1]
        before = sum(part.startswith("Paragraph") for part in parts[: parts.index(asked)])
        assert abs(before / len(paragraphs) - float(prompt.tags["depth"])) < 1.5 / len(paragraphs)
    depths = sorted({float(p.tags["depth"]) for p in found.prompts})
    assert depths == pytest.approx([(i + 0.5) / 6 for i in range(6)], abs=1e-3)
    short, long = (next(p for p in found.prompts if p.id == f"ruler-2048-{arm}-2") for arm in ("short", "long"))
    assert short.cluster == long.cluster and short.answers == long.answers
    assert (short.max_new_tokens, long.max_new_tokens) == (128, 512)
    again = load_ruler(haystack, lengths=[2048, 4096], count=6, seed=3, num_tokens=words)
    assert again.sha256 == found.sha256


def test_a_text_that_would_repeat_is_refused(haystack: Path) -> None:
    with pytest.raises(ConfigError, match="used up"):
        load_ruler(haystack, lengths=[131072], count=2, seed=0, num_tokens=words)
    with pytest.raises(RequestError, match="no room"):
        load_ruler(haystack, lengths=[512], count=2, seed=0, num_tokens=words)


def test_plain_texts_are_read_by_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One\nline.\n\nTwo.\n\n\n\nTwo.\n")
    found = read_haystack(path, words)
    assert found.paragraphs == ("One line.", "Two.") and found.num_tokens == (2, 1)
    with pytest.raises(ConfigError):
        read_haystack(tmp_path / "none.txt", words)


# ---- scores ----------------------------------------------------------------------------------------------------------
def asked(scorer: str, *answers: str) -> Prompt:
    return Prompt(id="x-0", dataset="x", turns=("?",), scorer=scorer, answers=answers)


@pytest.mark.parametrize(
    ("scorer", "answer", "text", "want"),
    [
        ("number", "18", "so 9 + 9 = \\boxed{18}.", 1.0),
        ("number", "1234", "It is 1,234", 1.0),
        ("number", "36.5", "36.50 euros", 1.0),
        ("number", "18", "18 is wrong, it is 19", 0.0),
        ("number", "18", "none", 0.0),
        ("number", "70", "<think>\\boxed{1}</think> 70", 1.0),
        ("boxed", "\\frac{1}{2}", "thus $\\boxed{\\dfrac{1}{2}}$", 1.0),
        ("boxed", "\\frac{1}{2}", "thus 1/2", 0.0),
        ("letter", "C", "Answer: A ... no.\nAnswer: (C)", 1.0),
        ("letter", "C", "ANSWER: [C]", 1.0),
        ("letter", "C", "I think C", 0.0),
    ],
)
def test_scores(scorer: str, answer: str, text: str, want: float) -> None:
    assert score(asked(scorer, answer), text) == {"correct": want}


def test_scores_of_needles_and_of_prompts_without_answers() -> None:
    needle = asked("needle", "1234567")
    assert score(needle, " 1234567.\n") == {"exact": 1.0, "contains": 1.0}
    assert score(needle, "The number is 1234567") == {"exact": 0.0, "contains": 1.0}
    assert score(needle, "7654321") == {"exact": 0.0, "contains": 0.0}
    assert score(Prompt(id="x", dataset="x", turns=("?",)), "a") == {}
    assert boxed("\\boxed{a{b}c} and \\boxed{d") is None and boxed("\\boxed{a{b}c}") == "a{b}c"
