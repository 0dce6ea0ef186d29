"""Rows of a data set, from a folder of files, from the hub, or from this package.

Owns where each set is found, by which name, and that a file is what it should be. Messages never quote a row.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from blockdraft.errors import ConfigError, RequestError, UnavailableError

__all__ = ["PLACES", "Place", "Row", "need", "need_text", "own_rows", "read_rows", "read_set", "refuse_placeholders"]

Row = Mapping[str, Any]
_NO_DATASETS = (
    "data sets of the hub need the package datasets (pip install 'blockdraft[bench]'), or name files with --data DIR"
)
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # of SPEED-Bench rows that forbid redistribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a set is: file names under the data folder, the first that is there; the hub's id, config and split."""

    files: tuple[str, ...]
    hub: tuple[str, str | None, str] | None
    num_rows: int | None
    licence: str


PLACES: Mapping[str, Place] = {
    "gsm8k": Place(files=("gsm8k/test.jsonl",), hub=("openai/gsm8k", "main", "test"), num_rows=1319, licence="MIT"),
    "math500": Place(
        files=("math500/test.jsonl",), hub=("HuggingFaceH4/MATH-500", None, "test"), num_rows=500, licence="MIT"
    ),
    "humaneval": Place(
        files=("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl"),
        hub=("openai/openai_humaneval", None, "test"),
        num_rows=164,
        licence="MIT",
    ),
    "mbpp": Place(
        files=("mbpp/sanitized-mbpp.json", "mbpp/sanitized-mbpp.jsonl"),
        hub=("google-research-datasets/mbpp", "sanitized", "test"),
        num_rows=257,
        licence="CC BY 4.0",
    ),
    "mtbench": Place(
        files=("mtbench/question.jsonl",),
        hub=("HuggingFaceH4/mt_bench_prompts", None, "train"),
        num_rows=80,
        licence="Apache-2.0",
    ),
    "specbench": Place(files=("specbench/question.jsonl",), hub=None, num_rows=480, licence="Apache-2.0"),
    "aime26": Place(
        files=("aime26/test.jsonl", "aime26.jsonl"),
        hub=("math-ai/aime26", None, "test"),
        num_rows=30,
        licence="problem text (c) MAA",
    ),
    "gpqa": Place(
        files=("gpqa/gpqa_diamond.csv", "gpqa_diamond.csv"),
        hub=("Idavidrein/gpqa", "gpqa_diamond", "train"),
        num_rows=198,
        licence="CC BY 4.0; its authors ask that rows are not published",
    ),
    "speedbench": Place(
        files=("speedbench/qualitative.jsonl", "qualitative.jsonl"),
        hub=None,
        num_rows=880,
        licence="NVIDIA Evaluation Dataset License",
    ),
}


def read_set(name: str, data: Path | None, limit: int | None) -> list[Row]:
    """The rows of a set: from `data` where it is given, else from the hub. Raises UnavailableError."""
    place = PLACES[name]
    if data is not None:
        for file in place.files:
            if (data / file).is_file():
                return read_rows(data / file)
        raise UnavailableError(
            f"{name}: {data} holds none of {', '.join(place.files)}; put it there"
            + ("" if place.hub is None else ", or leave out --data to take it from the hub")
        )
    if place.hub is None:
        raise UnavailableError(f"{name} is on no hub; put {place.files[0]} into a folder and name that with --data")
    return _from_hub(name, *place.hub, limit=limit)


def _from_hub(name: str, dataset: str, config: str | None, split: str, *, limit: int | None) -> list[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UnavailableError(_NO_DATASETS) from None
    try:
        rows: Any = load_dataset(dataset, config, split=split)
        return list(itertools.islice(rows, limit))
    except Exception as error:  # the library and the hub's client raise anything here
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UnavailableError(
            f"{name}: {dataset} could not be read from the hub ({reason}); gated sets need a login; or use --data DIR"
        ) from None


def read_rows(path: Path) -> list[Row]:
    """The rows of a .json, .jsonl, .jsonl.gz or .csv file. Raises ConfigError, naming the line."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}"
        ) from None
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    try:
        if path.suffix == ".json":
            return _objects(path, json.loads(text))
        # Not splitlines(): JSON strings may hold other line separators as they are.
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        rows = []
        for number, line in lines:
            at = f"{path} line {number}"
            rows.append(json.loads(line))
    except ValueError:
        where = f"{path}" if path.suffix == ".json" else at
        raise ConfigError(f"{where} is not valid JSON; repair it") from None
    return _objects(path, rows)


def _objects(path: Path, rows: object) -> list[Row]:
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{path} must hold a list of objects, at least one")
    return rows


def own_rows() -> list[Row]:
    """The prompts that the package carries."""
    file = resources.files("blockdraft") / "bench" / "workloads" / "own.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]


def need(row: Row, field: str, name: str, number: int) -> Any:
    """A field of a row, or a ConfigError that names the row by its number alone."""
    if field not in row:
        raise ConfigError(f"{name} row {number} has no field {field!r}; is this the right file?")
    return row[field]


def need_text(row: Row, field: str, name: str, number: int) -> str:
    value = need(row, field, name, number)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{name} row {number}: {field} must be a text that is not empty")
    return value


def refuse_placeholders(turns: Sequence[str], number: int) -> None:
    """SPEED-Bench's files of the hub lack the text of rows that forbid redistribution."""
    if any(PLACEHOLDER in turn.upper() for turn in turns):
        raise RequestError(
            f"speedbench row {number} is a placeholder: the file of the hub lacks rows that forbid redistribution; "
            "make the whole file with NVIDIA's own preparation script first"
        )
