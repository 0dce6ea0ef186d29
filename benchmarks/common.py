"""What the measuring scripts share: prompts, one greedy run, work files that survive a kill, results.

Owns the files a measurement reads and writes. Statistics of requests are blockdraft.stats; only the interval of a
median, which the package has no use for, is defined here.
"""

from __future__ import annotations

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
_FILES = {"gsm8k": Path("gsm8k") / "test.jsonl", "mtbench": Path("mtbench") / "question.jsonl"}


# ---- prompts -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Prompt:
    """A question of a set; `id` is "gsm8k-0" (row of the test file) or "mtbench-81" (question id)."""

    id: str
    text: str

    @property
    def set(self) -> str:
        return self.id.rpartition("-")[0]


def load_prompts(data: Path, name: str, count: int) -> list[Prompt]:
    """The first `count` prompts of a set: GSM8K test questions with the boxed suffix, or MT-Bench first turns."""
    file = data / _FILES[name]
    if not file.is_file():
        raise ConfigError(f"--data {data}: {_FILES[name]} is not there; name the folder that holds it")
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()[:count]]
    if name == "gsm8k":
        return [Prompt(f"gsm8k-{index}", row["question"] + BOXED) for index, row in enumerate(rows)]
    return [Prompt(f"mtbench-{row['question_id']}", row["turns"][0]) for row in rows]


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


def median_interval(values: Sequence[float], *, seed: int = 0, num_draws: int = 10000) -> dict[str, Any]:
    """The median of `values` with the 95 % percentile interval of its bootstrap over them."""
    source = random.Random(seed)
    draws = sorted(median(source.choices(values, k=len(values))) for _ in range(num_draws))
    low, high = draws[math.floor(0.025 * num_draws)], draws[math.ceil(0.975 * num_draws) - 1]
    bounds = (low, high) if len(values) > 1 else (None, None)
    return {"estimate": median(values), "low": bounds[0], "high": bounds[1], "level": 0.95}
