"""What a run shows of itself: progress, figure, trackers, model card."""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blockdraft.errors import CheckpointError, ConfigError, UnavailableError
from blockdraft.train.card import render_card, write_card
from blockdraft.train.progress import TrainingProgress, evaluation_line
from blockdraft.train.report import FIGURE_FILE, draw_figure, read_metrics
from blockdraft.train.trackers import flat_numbers, open_tracking


def step_line(step: int, *, loss: float = 2.0, step_s: float = 0.5) -> dict[str, Any]:
    return {"step": step, "lr": 1e-3, "loss": loss, "prefix": 1.5, "recall": 0.4, "grad_norm": 1.0, "step_s": step_s}


def evaluation(step: int, value: float, best: int) -> dict[str, Any]:
    return {"step": step, "acceptance_length": value, "best_step": best, "evaluate_s": 4.0}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The metrics of 200 steps with four evaluations, as a run writes them."""
    lines: list[dict[str, Any]] = []
    for step in range(1, 201):
        line = step_line(step, loss=8 * math.exp(-step / 60) + 1 + 0.3 * math.sin(step))
        length = 1 + 1.5 * (1 - math.exp(-step / 80))
        line |= {"selector_loss": 1.4 * math.exp(-step / 90), "lr": 1e-3 * min(1, step / 20, (201 - step) / 60)}
        line |= {"prefix": length, "selector_prefix": length * 1.08, "oracle_prefix": length * 1.6}
        lines.append(line)
        if step % 50 == 0:
            lines.append(evaluation(step, length * 0.95, step))
    low_high = {"estimate": 2.4, "low": 2.2, "high": 2.6}
    lines[-1] = {**lines[-1], "acceptance_length": low_high}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


# ---- progress --------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_at_the_first_step_every_twentieth_and_the_last_with_means_between() -> None:
    lines: list[str] = []
    with TrainingProgress(45, say=lines.append, stream=io.StringIO()) as progress:
        for step in range(1, 46):
            progress(step_line(step, loss=float(step)))
    assert [line.split("  ")[0] for line in lines] == ["step 1/45", "step 20/45", "step 40/45", "step 45/45"]
    assert "loss 1.000" in lines[0] and "loss 11.000" in lines[1] and "loss 43.000" in lines[3]
    assert lines[1].endswith("0:00:12 left") and lines[3].endswith("0:00:00 left")


def test_a_resumed_run_speaks_at_its_own_first_step() -> None:
    lines: list[str] = []
    progress = TrainingProgress(45, say=lines.append, start_step=30, stream=io.StringIO())
    for step in (31, 32):
        progress(step_line(step))
    assert [line.split("  ")[0] for line in lines] == ["step 31/45"]


def test_the_time_left_counts_the_evaluations_too() -> None:
    progress = TrainingProgress(100, say=lambda _line: None, evaluate_every=30, stream=io.StringIO())
    progress(step_line(1, step_s=2.0))
    assert progress.left_s(1) == pytest.approx(99 * 2.0)  # none was measured yet
    progress(evaluation(30, 2.0, 30))
    assert progress.left_s(30) == pytest.approx(70 * 2.0 + 3 * 4.0)  # those at 60, 90 and the last step
    assert progress.left_s(100) == 0.0


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (evaluation(50, 2.34567, 50), "step 50: acceptance length 2.346 (best)"),
        (evaluation(50, 2.0, 20), "step 50: acceptance length 2.000 (best at step 20)"),
        (
            {"step": 3, "acceptance_length": {"estimate": 2.0, "low": 1.9, "high": 2.1}},
            "step 3: acceptance length 2.000 [1.900, 2.100]",
        ),
        ({"step": 3, "acceptance_length": {"estimate": 2.0, "low": None}}, "step 3: acceptance length 2.000"),
    ],
)
def test_the_line_of_an_evaluation(metrics: dict[str, Any], line: str) -> None:
    assert evaluation_line(metrics) == line
    lines: list[str] = []
    TrainingProgress(60, say=lines.append, stream=io.StringIO())(metrics)
    assert lines == [line]


def test_on_a_terminal_a_bar_takes_the_place_of_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    terminal, lines = Terminal(), []
    with TrainingProgress(4, say=lines.append, start_step=1, stream=terminal) as progress:
        progress(step_line(2, loss=1.25))
        progress(evaluation(2, 2.5, 2))
        progress.say("a line beside the bar")
        progress(step_line(4))
    text = terminal.getvalue()
    assert lines == []
    assert "step 2: acceptance length 2.500 (best)" in text and "a line beside the bar" in text
    assert "4/4" in text and "served acceptance length 2.500" in text and "left" in text
    assert text.endswith("\x1b[?25h") or text.rstrip().endswith("4/4") or "\x1b[?25h" in text  # the cursor is back


# ---- the figure ------------------------------------------------------------------------------------------------------
def test_the_figure_is_drawn_from_the_metrics_alone(run_folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `train` brings it")
    said: list[str] = []
    path = draw_figure(run_folder, say=said.append)
    assert path == run_folder / FIGURE_FILE and said == []
    assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in run_folder.iterdir()) == ["metrics.jsonl", FIGURE_FILE]


def test_a_run_of_one_step_and_one_without_a_step_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `train` brings it")
    for text in ("", json.dumps(step_line(1)) + "\n"):
        (tmp_path / "metrics.jsonl").write_text(text)
        assert draw_figure(tmp_path, say=pytest.fail) is not None


def test_without_matplotlib_one_line_says_so(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    assert draw_figure(run_folder, say=said.append) is None
    [line] = said
    assert "matplotlib is not installed" in line and 'pip install "blockdraft[train]"' in line
    assert not (run_folder / FIGURE_FILE).exists()


def test_metrics_are_split_and_a_torn_last_line_is_left_out(run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "lo')
    steps, evaluations = read_metrics(run_folder)
    assert [line["step"] for line in steps] == list(range(1, 201))
    assert [line["step"] for line in evaluations] == [50, 100, 150, 200]


def test_an_evaluation_s_interval_comes_from_its_own_file(run_folder: Path) -> None:
    found = [{"step": step, "acceptance_length": {"estimate": 2.0, "low": 1.8, "high": 2.2 + run}, "positions": []}
             for run, step in ((0, 50), (1, 50), (0, 999))]  # fmt: skip
    (run_folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    _, evaluations = read_metrics(run_folder)
    assert evaluations[0]["acceptance_length"] == {"estimate": 2.0, "low": 1.8, "high": 3.2}  # the latest of step 50
    assert evaluations[0]["best_step"] == 50 and isinstance(evaluations[1]["acceptance_length"], float)
    assert len(evaluations) == 4


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1.0}', '{"step": "x"}'])
def test_damaged_metrics_are_named_by_their_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step_line(1))}\n{line}\n")
    with pytest.raises(CheckpointError, match="line 2 is not a line of metrics"):
        read_metrics(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path)


# ---- trackers --------------------------------------------------------------------------------------------------------
class Service(ModuleType):
    """A stand-in for a service that is not installed here: the calls it gets, and a failure on demand."""

    def __init__(self, name: str, *, fails_at: int | None = None) -> None:
        super().__init__(name)
        self.calls: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route")
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))


def opened(name: str, folder: Path, said: list[str]):
    return open_tracking(name, project="p", run_name="r", recipe={"seed": 1}, folder=folder, say=said.append)


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_every_line_goes_to_the_service_as_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, said = Service(name), []
    monkeypatch.setitem(sys.modules, name, service)
    tracking = opened(name, tmp_path, said)
    tracking({"step": 7, "loss": 1.5, "note": "text", "by": {"a": 1, "b": [2.0, None]}, "is_it": True})
    tracking.close()
    (_, options), logged, finished = service.calls
    assert options["project"] == "p" and options["name"] == "r" and options["config"] == {"seed": 1}
    assert logged == ("log", 7, {"loss": 1.5, "by/a": 1.0, "by/b/1": 2.0})
    assert finished == ("finish",) and said == []


def test_a_service_that_fails_is_named_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, said = Service("wandb", fails_at=2), []
    monkeypatch.setitem(sys.modules, "wandb", service)
    tracking = opened("wandb", tmp_path, said)
    for step in (1, 2, 3):
        tracking(step_line(step))
    tracking.close()
    assert said == ["wandb failed (ConnectionError: no route); the run goes on without it"]
    assert [call[0] for call in service.calls] == ["init", "log"]


def test_what_is_not_installed_or_not_known_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UnavailableError, match="trackio is not installed; pip install trackio"):
        opened("trackio", tmp_path, [])
    with pytest.raises(ConfigError, match="'mlflow' is not known; there are trackio, wandb, tensorboard"):
        opened("mlflow", tmp_path, [])


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="not a dependency")
    said: list[str] = []
    tracking = opened("tensorboard", tmp_path, said)
    tracking(step_line(3))
    tracking.close()
    assert said == [] and list((tmp_path / "tensorboard" / "r").glob("events.*"))


def test_only_numbers_are_flattened() -> None:
    assert flat_numbers({"a": {"b": {"c": 1}}, "d": [1, {"e": 2}], "f": "x", "g": None, "h": False}) == {
        "a/b/c": 1.0,
        "d/1": 1.0,
        "d/2/e": 2.0,
    }


# ---- the card --------------------------------------------------------------------------------------------------------
RUN = {
    "what": "A drafter for tests",
    "target": "someone/target-1b",
    "license": "apache-2.0",
    "steps": 2500,
    "corpus": {"answer_tokens": 257462, "decoding": "greedy"},
    "seconds": 4826.25,
    "commit": None,
    "notes": ["The run was resumed twice."],
}


def acceptance_result(weights: bytes) -> dict[str, Any]:
    summary = {
        "mean_output_tokens": 211.9,
        "pooled_acceptance_length": {"estimate": 2.4758, "low": 2.3748, "high": 2.5767},
        "conditional_acceptance_by_position": [0.5444, 0.641, None],
    }
    return {
        "settings": {
            "target": {"name": "t"},
            "dtype": "float32",
            "max_new_tokens": 256,
            "sampling": {"greedy": {}, "sampled": {"temperature": 1.0, "top_p": 0.95}},
        },
        "runs": [
            {
                "date_utc": "2026-01-02 03:04",
                "commit": "0123456789abcdef",
                "is_dirty": False,
                "machine": {"cpu": "a CPU"},
                "versions": {"torch": "2"},
            }
        ],
        "rows": [{"set": "gsm8k", "sampling": "greedy", "width": 8, "num_prompts": 200, "acceptance": summary}],
        "draft_file_sha256": {"model.safetensors": hashlib.sha256(weights).hexdigest()},
    }


@pytest.fixture
def draft_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "my-draft"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "run.json").write_text(json.dumps(RUN))
    return folder


def test_the_card_shows_what_the_files_hold(draft_folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "acceptance.json"
    result.write_text(json.dumps(acceptance_result(b"weights")))
    text = write_card(draft_folder, [result]).read_text("utf-8")
    assert text.startswith("---\nlibrary_name: blockdraft\n")
    assert "license: apache-2.0\nbase_model: someone/target-1b\n" in text
    assert "# my-draft\n\nA drafter for tests.\n" in text
    assert "| GSM8K test | greedy | 8 | 200 | 212 | 2.48 [2.37, 2.58] | 54 64 - |" in text
    assert "sampled: temperature 1 top_p 0.95" in text and "commit 0123456789<" in text
    assert "| `steps` | 2,500 |" in text and "| `corpus.answer_tokens` | 257,462 |" in text
    assert "| `seconds` | 4826.25 |" in text and "| `commit` | None |" in text
    assert "- The run was resumed twice." in text


def test_every_number_of_the_card_is_in_a_file(draft_folder: Path) -> None:
    """With other numbers in the files the card has other numbers, and nothing else in it changes."""
    other = json.loads((draft_folder / "run.json").read_text()) | {"steps": 99, "seconds": 1.5}
    one, two = (render_card(run, [], name="n").splitlines() for run in (RUN, other))
    changed = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
    assert changed == [("| `steps` | 2,500 |", "| `steps` | 99 |"), ("| `seconds` | 4826.25 |", "| `seconds` | 1.5 |")]
    assert not any(word in render_card({}, [], name="n") for word in ("##  ", "None", "nan"))


def test_an_evaluation_of_the_run_is_shown_too(draft_folder: Path) -> None:
    found = {
        "acceptance_length": {"estimate": 2.0, "low": 1.5, "high": 2.5},
        "base_acceptance_length": 1.9,
        "oracle_acceptance_length": 3.25,
        "miss_rate": 0.25,
        "misrank_rate": 0.5,
        "full_rate": 0.25,
        "num_prompts": 8,
        "width": 5,
    }
    (draft_folder / "run.json").write_text("{}")
    text = write_card(draft_folder, [found]).read_text("utf-8")
    assert "| 8 held-out prompts, width 5, greedy |  |" in text
    assert "| acceptance length [95 %] | 2.00 [1.50, 2.50] |" in text
    assert "| best path in its lists, at the same steps | 3.25 |" in text
    assert "| blocks lost because another in the list was picked | 50.0 % |" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(acceptance_result(b"other weights")), "measured with another drafter"),
        (json.dumps({"comparisons": []}), "is no result"),
        (json.dumps({"acceptance_length": None, "miss_rate": None}), "lacks what a card shows"),
        ("[]", "holds a list"),
        ("nonsense", "is not JSON"),
    ],
)
def test_results_that_cannot_be_shown_are_refused(draft_folder: Path, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(CheckpointError, match=words):
        write_card(draft_folder, [tmp_path / "result.json"])
    assert not (draft_folder / "README.md").exists()


def test_a_draft_without_a_record_gets_no_card(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        write_card(tmp_path)
