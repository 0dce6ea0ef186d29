"""What the measuring scripts share: prompts, one greedy run, work files that survive a kill, results.

Owns the files a measurement reads and writes. Statistics of requests are blockdraft.stats; only the interval of a
median, which the package has no use for, is defined here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import random
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from blockdraft import stats as st
from blockdraft.errors import ConfigError

if TYPE_CHECKING:
    from blockdraft.engine import Engine

PLAIN = "plain"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
MBPP_TRAIN = range(601, 975)  # task ids that a corpus may be written from
LOOP_TOKENS, LOOP_PERIODS = 64, range(1, 33)
_FILES = {
    "gsm8k": Path("gsm8k") / "test.jsonl",
    "mbpp": Path("mbpp") / "sanitized-mbpp.json",
    "mtbench": Path("mtbench") / "question.jsonl",
    "humaneval": Path("humaneval") / "HumanEval.jsonl.gz",
}
_CHAT_FILE = Path(__file__).with_name("chat_prompts.json")


# ---- prompts -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Prompt:
    """A question of a set; `id` is "gsm8k-0" (row of the test file), "mtbench-81" (question id), "mbpp-2" (task id)."""

    id: str
    text: str

    @property
    def set(self) -> str:
        return self.id.rpartition("-")[0]


def load_prompts(data: Path, name: str, count: int) -> list[Prompt]:
    """The first `count` prompts of a set, in the order of its file.

    gsm8k: test questions with the boxed suffix; mbpp: bare prompts of the sanitized set, its training tasks left out;
    mtbench: first turns; humaneval: the stub in one sentence and a fence; chat: benchmarks/chat_prompts.json.
    """
    if name == "chat":
        texts = json.loads(_CHAT_FILE.read_text("utf-8"))["prompts"]
        return [Prompt(f"chat-{index}", text) for index, text in enumerate(texts[:count])]
    file = data / _FILES[name]
    if not file.is_file():
        raise ConfigError(f"--data {data}: {_FILES[name]} is not there; name the folder that holds it")
    rows = _rows(file)
    if name == "mbpp":
        rows = [row for row in rows if row["task_id"] not in MBPP_TRAIN]
    return [_prompt(name, index, row) for index, row in enumerate(rows[:count])]


def _rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .json, .jsonl or .jsonl.gz file."""
    if file.suffix == ".json":
        rows: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))
        return rows
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text("utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _prompt(name: str, index: int, row: dict[str, Any]) -> Prompt:
    if name == "gsm8k":
        return Prompt(f"gsm8k-{index}", row["question"] + BOXED)
    if name == "mbpp":
        return Prompt(f"mbpp-{row['task_id']}", row["prompt"])
    if name == "humaneval":
        return Prompt(f"humaneval-{index}", HUMANEVAL.format(**row))
    return Prompt(f"mtbench-{row['question_id']}", row["turns"][0])


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """Short SHA-256 of ids and texts, in order."""
    text = json.dumps([[prompt.id, prompt.text] for prompt in prompts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mode_name(width: int | None) -> str:
    return PLAIN if width is None else f"w{width}"


def generate(engine: Engine, prompt: Prompt, width: int | None, max_new_tokens: int) -> dict[str, Any]:
    """Greedy ids, finish reason and counters of one run; `width` None is plain decoding by the same engine."""
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    ids = engine.tokenizer.chat_ids([{"role": "user", "content": prompt.text}], add_generation_prompt=True)
    asked = Request(prompt_ids=ids, max_new_tokens=max_new_tokens, speculate=width is not None, width=width)
    [done] = engine.run([asked])
    if done.speculation.enabled != (width is not None):
        raise ConfigError(f"{prompt.id}: speculation stopped: {done.speculation.reason}; shorten the run")
    stats = done.stats.to_json()
    return {"prompt_ids": ids, "ids": list(done.token_ids), "finish": done.finish_reason, "stats": stats}


def generate_all(
    work: Work,
    prompts: Sequence[Prompt],
    widths: Sequence[int | None],
    max_new_tokens: int,
    load: Callable[[], Engine],
    skip: Container[tuple[str, str]] = (),
) -> None:
    """Run and record every prompt in every mode that has no record yet and is not among `skip`."""
    keys = [(p, w) for p in prompts for w in widths if (p.id, mode_name(w)) not in skip]
    todo = [(p, w) for p, w in keys if (p.id, mode_name(w)) not in work.records]
    engine = load() if todo else None
    for number, (prompt, width) in enumerate(todo, start=1):
        assert engine is not None
        work.append(prompt.id, mode_name(width), generate(engine, prompt, width, max_new_tokens))
        print(f"\r{number} of {len(todo)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def part_of(prompts: Sequence[Prompt], part: tuple[int, int]) -> list[Prompt]:
    """Every n-th prompt from the i-th on, for part i/n: parts take about equally long."""
    return list(prompts[part[0] - 1 :: part[1]])


# ---- work files ----------------------------------------------------------------------------------------------------
@dataclass
class Work:
    """Records of a JSONL work file by (prompt id, mode). `settings` must be equal in everything that is put together;
    `runs` says when and where each process that wrote records ran."""

    settings: dict[str, Any] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    records: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    path: Path | None = None
    run: dict[str, Any] | None = None

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], run: dict[str, Any]) -> Work:
        """The file's records, ready for more; a torn last line is cut off, other settings are an error."""
        work = cls()
        if path.exists():
            work, size = _read(path)
            os.truncate(path, size)
            check_settings(settings, work.settings, path.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        work.settings, work.path, work.run = settings, path, run
        return work

    def append(self, prompt: str, mode: str, values: dict[str, Any]) -> None:
        """Put a record on disk before returning; the first one of a process is preceded by its settings."""
        assert self.path is not None
        record = {"prompt": prompt, "mode": mode, **values}
        with self.path.open("a", encoding="utf-8") as file:
            if self.run is not None:
                file.write(json.dumps({"settings": self.settings, "run": self.run}) + "\n")
                self.runs.append(self.run)
                self.run = None
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records[prompt, mode] = record

    def require(self, keys: Iterable[tuple[str, str]]) -> None:
        """Nothing; a ConfigError if one of these records is not there."""
        wanted = list(keys)
        if missing := [key for key in wanted if key not in self.records]:
            raise ConfigError(
                f"{len(missing)} of {len(wanted)} records are missing, the first is {missing[0]}; run the rest first"
            )


def merge(paths: Iterable[Path]) -> Work:
    """All records of several work files of equal settings; a pair (prompt, mode) may be in one of them only."""
    merged = Work()
    for path in sorted(paths):
        work, _ = _read(path)
        if work.settings is None:
            continue
        if merged.settings is not None:
            check_settings(merged.settings, work.settings, path.name)
        if twice := set(merged.records) & set(work.records):
            raise ConfigError(f"{path.name}: {min(twice)} is in another work file too; remove one of the two")
        merged.settings = work.settings
        merged.runs += work.runs
        merged.records |= work.records
    if merged.settings is None:
        raise ConfigError("no records found; run the measurement first")
    return merged


def _read(path: Path) -> tuple[Work, int]:
    """The records, and the number of bytes up to the end of the last whole line."""
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    work = Work()
    for number, line in enumerate(content[:size].splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise ConfigError(f"{path.name} line {number} is damaged; delete that line") from None
        if "settings" in entry:
            if work.settings is not None:
                check_settings(work.settings, entry["settings"], path.name)
            work.settings = entry["settings"]
            work.runs.append(entry["run"])
        else:
            work.records[entry["prompt"], entry["mode"]] = entry
    return work, size


def check_settings(wanted: dict[str, Any], found: dict[str, Any] | None, name: str) -> None:
    """Nothing; a ConfigError naming the settings that differ."""
    if found is not None and found != wanted:
        keys = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        raise ConfigError(f"{name}: made with another {', '.join(keys)}; use another --work folder")


def write_json(path: Path, content: object) -> None:
    """Write a result; a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


# ---- numbers -------------------------------------------------------------------------------------------------------
def interval_json(interval: st.Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high, "level": interval.level}


def acceptance_summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Acceptance of one mode over prompts, each its own cluster; the keys name the formulas of blockdraft.stats."""
    requests = [st.RequestStats.from_json(record["stats"]) for record in records]
    finishes = [record["finish"] for record in records]
    return {
        "num_requests": len(requests),
        "num_steps": sum(r.num_steps for r in requests),
        "num_emitted_tokens": sum(r.num_emitted_tokens for r in requests),
        "mean_output_tokens": fmean(r.num_emitted_tokens for r in requests),
        "finish_reasons": {reason: finishes.count(reason) for reason in sorted(set(finishes))},
        "pooled_acceptance_length": interval_json(st.pooled_acceptance_length_interval(requests)),
        "committed_acceptance_length": st.committed_acceptance_length(requests),
        "mean_acceptance_length": st.mean_acceptance_length(requests),
        "survival_by_position": st.survival_by_position(requests),
        "conditional_acceptance_by_position": st.conditional_acceptance_by_position(requests),
    }


def loops(ids: Sequence[int]) -> bool:
    """Whether a text ends in a loop: its last 64 tokens repeat with a period of at most 32.

    Small targets fall into loops under greedy decoding, and every drafter is good at them.
    """
    tail = list(ids[-LOOP_TOKENS:])
    return len(tail) == LOOP_TOKENS and any(tail[period:] == tail[:-period] for period in LOOP_PERIODS)


def median_interval(values: Sequence[float], *, seed: int = 0, num_draws: int = 10000) -> dict[str, Any]:
    """The median of `values` with the 95 % percentile interval of its bootstrap over them."""
    source = random.Random(seed)
    draws = sorted(median(source.choices(values, k=len(values))) for _ in range(num_draws))
    low, high = draws[math.floor(0.025 * num_draws)], draws[math.ceil(0.975 * num_draws) - 1]
    bounds = (low, high) if len(values) > 1 else (None, None)
    return {"estimate": median(values), "low": bounds[0], "high": bounds[1], "level": 0.95}
