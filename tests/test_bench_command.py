"""`blockdraft bench` as a whole on a tiny pair: every table from one command, its files, comparisons, refusals."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from blockdraft.bench.journal import Journal, read_journal
from blockdraft.bench.record import RequestRecord
from blockdraft.bench.report import Document, to_card_section, to_csv, to_html, to_markdown
from blockdraft.bench.report.figures import figure_svg
from blockdraft.bench.table import Column, Figure, Series, Table, shown_cell
from blockdraft.bench.tables import lengths, matrix
from blockdraft.stats import Interval
from test_bench_estimates import scripted
from test_bench_record import changed
from tiny_pair import TinyPair, changed_copy, run_cli

FILES = ("json", "jsonl", "md", "csv", "html", "card.md")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows = [{"prompt": f"the quick fox {i}"} for i in range(3)] + [{"turns": ["a block", "of the dog"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def measured(tiny_pair: TinyPair, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of table A at two widths, and what was printed."""
    out = tmp_path_factory.mktemp("out")
    words = ["--sets", prompts, "--widths", "3,5", "--max-new-tokens", "20", "--concurrency", "2"]
    ran = run_cli("bench", *tiny_pair.arguments, *words, "--dtype", "float32", "--out", out)
    assert ran.code == 0, ran.err
    return out, ran.out


def report(folder: Path, stem: str) -> dict[str, Any]:
    found = json.loads((folder / f"{stem}.json").read_text())
    assert found["schema"] == "blockdraft.bench/1" and found["identities_hold"] is True
    for table in found["tables"]:
        keys = [column["key"] for column in table["columns"]]
        assert all(list(row) == keys for row in table["rows"]) and table["rows"]
    return found


def test_table_a_and_its_files(measured: tuple[Path, str]) -> None:
    out, printed = measured
    assert sorted(p.name for p in out.iterdir()) == sorted(f"table-A.{ending}" for ending in FILES)
    found = report(out, "table-A")
    first = found["tables"][0]
    assert [c["key"] for c in first["columns"]] == ["dataset", "prompts", "width 3", "width 5"]
    [row] = first["rows"]
    assert row["prompts"] == 4 and row["width 5"]["num_clusters"] == 4
    assert row["width 5"]["low"] <= row["width 5"]["estimate"] <= row["width 5"]["high"]
    assert {t["name"] for t in found["tables"]} == {"A", "compare", "names", "positions", "output"}
    assert "Acceptance length by data set and width" in printed and "custom" in printed
    assert str(out) not in (out / "table-A.json").read_text()  # nothing of this machine's folders
    records = list(read_journal(out / "table-A.jsonl").records.values())
    assert len(records) == 2 * 5
    by_hand = [r for r in records if r.width == 5]
    accepted = sum(r.counts.num_accepted_draft_tokens or 0 for r in by_hand)
    assert row["width 5"]["estimate"] == pytest.approx(1 + accepted / sum(r.counts.num_steps or 0 for r in by_hand))


def test_a_finished_run_is_reported_without_running(measured: tuple[Path, str], tmp_path: Path) -> None:
    out, printed = measured
    ran = run_cli("bench", "--report", out / "table-A.jsonl", "--out", tmp_path, "--name", "again")
    assert ran.code == 0 and ran.out == printed
    one, two = (json.loads(p.read_text()) for p in (out / "table-A.json", tmp_path / "again.json"))
    assert one == two


def test_two_runs_are_compared_on_the_same_prompts(measured: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = measured
    content = read_journal(out / "table-A.jsonl")
    for width in (3, 5):
        with Journal(tmp_path / f"w{width}.jsonl", content.settings or {}, {}) as journal:
            for record in content.records.values():
                if record.width == width:
                    journal.append(record)
    ran = run_cli("bench", "--compare", tmp_path / "w3.jsonl", tmp_path / "w5.jsonl", "--out", tmp_path, "--json")
    assert ran.code == 0, ran.err
    [table] = json.loads(ran.out)["tables"]
    [row] = table["rows"]
    assert row["prompts"] == 4 and row["same"] == 1.0
    assert row["difference"]["estimate"] == pytest.approx(row["second"]["estimate"] - row["first"]["estimate"])


def test_runs_that_asked_different_things_are_not_compared(measured: tuple[Path, str], tmp_path: Path) -> None:
    content = read_journal(measured[0] / "table-A.jsonl")
    settings = content.settings or {}
    [workload] = settings["workloads"]
    for change, message in (
        ({"max_new_tokens": 21}, "max_new_tokens"),
        ({"seed": 1}, "seed"),
        ({"workloads": [{**workload, "format_sha256": "x"}]}, "format_sha256"),
        ({"workloads": [{**workload, "prompts_sha256": "x"}]}, "prompts_sha256"),
    ):
        path = tmp_path / f"{message}.jsonl"
        with Journal(path, {**settings, **change}, {}) as journal:
            for record in content.records.values():
                journal.append(record)
        ran = run_cli("bench", "--compare", measured[0] / "table-A.jsonl", path, "--out", tmp_path)
        assert message in ran.refusal


def test_matrix_and_speed_and_replay(
    tiny_pair: TinyPair, prompts: Path, measured: tuple[Path, str], tmp_path: Path
) -> None:
    words = [*tiny_pair.arguments, "--dtype", "float32", "--out", tmp_path]
    ran = run_cli("bench", *words, "--table", "B", "--sets", prompts, "--limit", "3", "--max-new-tokens", "8")
    assert ran.code == 0, ran.err
    found = report(tmp_path, "table-B")
    assert [t["name"] for t in found["tables"]][:1] == ["B"] and found["notes"] == [
        "custom was cut to 3 of 4 prompts, evenly"
    ]
    ran = run_cli(
        "bench", *words, "--table", "speed", "--sets", prompts, "--concurrency", "1,2", "--max-new-tokens", "8"
    )
    assert ran.code == 0, ran.err
    table = report(tmp_path, "table-speed")["tables"][0]
    assert [(row["load"], row["mode"]) for row in table["rows"]] == [
        (f"{n} in flight", mode) for n in (1, 2) for mode in ("off", "width 5")
    ]
    assert all((row["speed_up"] is None) == (row["mode"] == "off") for row in table["rows"])
    ran = run_cli("bench", *words, "--replay", measured[0] / "table-A.jsonl", "--sets", prompts, "--widths", "5")
    assert ran.code == 0, ran.err
    replayed = report(tmp_path, "replay-table-A")["tables"][0]
    assert "replay" in replayed["title"] and replayed["rows"][0]["prompts"] == 4


def test_long_contexts(tiny_pair: TinyPair, tmp_path: Path) -> None:
    target = changed_copy(tiny_pair.target, tmp_path / "target", max_position_embeddings=2048)
    draft = changed_copy(tiny_pair.draft, tmp_path / "draft", max_position_embeddings=2048)
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"{i} the dog" for i in range(300)))
    words = ["--haystack", book, "--lengths", "2k", "--limit", "1", "--max-new-tokens", "12", "--dtype", "float32"]
    ran = run_cli("bench", draft, "--target", target, "--table", "C", *words, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    [table] = report(tmp_path / "out", "table-C")["tables"]
    assert [(row["length"], row["arm"]) for row in table["rows"]] == [("2k", "short"), ("2k", "long")]
    for row in table["rows"]:
        assert (row["exact"] is None) == (row["arm"] == "long") and row["contains"]["estimate"] == 0.0
        assert 1300 < row["prompt_tokens"]["estimate"] <= 2048 - 512


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "D"], "A, B, C, speed"),
        (["--table", "C"], "--haystack"),
        (["--table", "C", "--haystack", "x", "--sets", "own"], "drop --sets"),
        (["--lengths", "8k"], "table C"),
        (["--widths", "5,x"], "--widths"),
        (["--concurrency", "2", "--rate", "1"], "one of them"),
        (["--rate", "0"], "rate"),
        (["--format", "gsm8k"], "SET=NAME"),
        (["--max-new-tokens", "1"], "at least 2"),
        (["--report", "a", "--replay", "b"], "one of them"),
        (["--report", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(words: list[str], message: str) -> None:
    assert message in run_cli("bench", *words).refusal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--widths", "9"], "9"),
        (["--widths", "5,5"], "twice"),
        (["--sampling", "hot"], "production"),
        (["--samples", "2"], "all the same"),
        (["--sets", "gsm9k"], "gsm8k"),
        (["--format", "gsm8k=bare"], "not among the sets"),
        (["--sets", "specbench"], "--data"),
    ],
)
def test_what_a_pair_cannot_do_is_refused(tiny_pair: TinyPair, tmp_path: Path, words: list[str], message: str) -> None:
    ran = run_cli("bench", *tiny_pair.arguments, "--dtype", "float32", "--out", tmp_path, *words)
    assert ran.code == 2 and ran.out == "" and message in ran.err.splitlines()[-1], ran.err


# ---- the forms of a report -------------------------------------------------------------------------------------------
def document(records: list[RequestRecord]) -> Document:
    return Document(
        title="A <title> | & more",
        command="blockdraft bench",
        system={"engine": "e", "version": "1", "target": "t", "draft": None, "hardware": {}, "details": {}},
        settings={"samplings": [], "max_new_tokens": 16},
        workloads=[],
        runs=[],
        tables=[*lengths(records), *matrix(records)],
    )


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "onclick", "onload")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    reader = Reader()
    reader.feed(to_html(document(scripted())))
    assert reader.open == [] and reader.links == [] and "script" not in reader.tags
    assert reader.tags.count("svg") == 2 and reader.tags.count("table") == 2


def test_a_table_whose_counters_cannot_be_true_is_shown_nowhere() -> None:
    wrong = [changed(r, num_draft_tokens=8 * (r.counts.num_steps or 0)) for r in scripted()]
    bad = document(wrong)
    assert not bad.holds
    shown = (to_html(bad), to_markdown(bad), bad.to_json_text(), to_csv(bad.tables), to_card_section(bad))
    for text in shown:
        assert "3.818" not in text and "3.818" in to_markdown(document(scripted()))
    assert all("P &lt;= k S" in text or "P <= k S" in text for text in shown[:3])
    assert len(list(csv.reader(io.StringIO(shown[3])))) == 1
    assert "###" not in shown[4]


def test_markdown_and_csv_hold_the_same_numbers() -> None:
    good = document(scripted())
    rows = list(csv.DictReader(io.StringIO(to_csv(good.tables))))
    [one] = [r for r in rows if r["table"] == "A" and r["row"] == "gsm8k" and r["column"] == "width 8"]
    assert float(one["value"]) == pytest.approx(4.0) and one["num_clusters"] == "3"
    line = next(x for x in to_markdown(good).splitlines() if x.startswith("| gsm8k"))
    assert re.search(r"4\.000 \[", line)
    assert "A &lt;title> | & more" in to_markdown(good) or "# A <title>" in to_markdown(good)


@pytest.mark.parametrize(
    ("cell", "column", "want"),
    [
        (None, Column("x", "x"), "-"),
        (1319, Column("x", "x"), "1,319"),
        (0.456, Column("x", "x", unit="%", digits=0), "46 %"),
        (Interval(0.9, 0.7, 1.1, 0.95, 9), Column("x", "x", unit="%", digits=0), "90 % [70, 100]"),
        (Interval(1.2, 0.9, 1.5, 0.95, 9), Column("x", "x", digits=1, least=1.0), "1.2 [1.0, 1.5]"),
        (Interval(1.2, None, None, 0.95, 1), Column("x", "x", digits=1), "1.2 [only one]"),
        ("off", Column("x", "x"), "off"),
    ],
)
def test_cells(cell: Any, column: Column, want: str) -> None:
    assert shown_cell(cell, column) == want


def test_figures_place_values_where_they_belong() -> None:
    points = (("a", Interval(2.0, 1.5, 2.5, 0.95, 9)), ("b", 4.0))
    for kind in ("bars", "lines"):
        drawing = figure_svg(Figure(kind, "t <x>", "x", "y", (Series("s", points), Series("empty", ())), base=1.0))
        assert drawing.count("<title>t &lt;x&gt;</title>") == 1 and "empty" not in drawing
    dots = [float(y) for y in re.findall(r'cy="([\d.]+)"', drawing)]
    assert dots[0] > dots[1] and len(dots) == 2  # a larger number stands higher
    assert figure_svg(Figure("bars", "t", "x", "y", ())) == ""


def test_tables_with_nothing_in_them() -> None:
    assert lengths([]) == [] and matrix([]) == []
    assert isinstance(matrix(scripted())[0], Table)
