"""What steps cost on this machine: measured at start-up with real steps, kept in the cache folder.

Owns the measurement, its time limit, and what a stored table must agree with to be used again. What is stored is a
table of times; anything that could change them is part of its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch

from blockdraft.draft import DraftModel
from blockdraft.engine.costs import CostModel, StepSample, fit
from blockdraft.engine.request import Request
from blockdraft.engine.row import RunningRow
from blockdraft.engine.step import Chunk, decode_step
from blockdraft.errors import BlockdraftError, CheckpointError
from blockdraft.targets import Target

__all__ = ["CostKey", "cost_key", "measure_costs", "stored_costs"]

LIMIT_S = 2.5  # begun steps end after it, so that the whole takes a little more
REPEATS = 3
LEAST_CONTEXT, MOST_CONTEXT = 128, 8192  # positions that context is measured with
CONTEXT_SHARE = 0.05  # of a step that context must take for its cost to be told from noise
_LAYOUT = 1  # of the stored file; another number is measured anew
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 14


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure_costs(target: Target, draft: DraftModel, *, max_rows: int, limit_s: float | None = None) -> CostModel:
    """The costs of this pair's steps here and now, in about `limit_s` (LIMIT_S) seconds at most.

    The points of the table are gone through in the order of their importance, again and again until time is up; each
    counts with the median of its measurements. What a point will take is foreseen from those before it.
    """
    return _Probe(target, draft, max_rows, LIMIT_S if limit_s is None else limit_s).run()


def grid(max_rows: int, max_width: int) -> list[tuple[int, int]]:
    """(rows, width) of the table's points, the most important first."""
    middle = (max_width + 2) // 2
    sizes = [1]
    while 2 * sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    if sizes[-1] < max_rows:
        sizes.append(max_rows)
    fours = [n for n in sizes if n in (4, 16, 64, max_rows)]
    points = [(1, 1), (1, max_width), (1, 2), (1, middle), (2, 1)]
    points += [(n, 1) for n in fours]
    points += [(n, w) for n in fours for w in (middle, max_width)]
    points += [(n, w) for n in sizes for w in (1, 2, middle, max_width)]
    return list(dict.fromkeys(point for point in points if point[1] <= max_width and point[0] <= max_rows))


@dataclass
class _Probe:
    target: Target
    draft: DraftModel
    max_rows: int
    limit_s: float
    rows: list[RunningRow] = field(default_factory=list)
    found: dict[tuple[int, int], list[StepSample]] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @torch.inference_mode()
    def run(self) -> CostModel:
        points = grid(self.max_rows, self._max_width)
        try:
            self._row_count(1)
            self._step(1, 1)  # the first of all steps sets up what all others use
            for repeat in range(REPEATS):
                for point in points:
                    if self._is_affordable(*point, is_first=repeat == 0):
                        self._measure(*point)
            context_s = self._context_cost()
        finally:
            for row in self.rows:
                if row.target_row is not None:
                    self.target.free(row.target_row)
        medians = [_median(samples) for samples in self.found.values()]
        return fit(medians, context_s=context_s)

    @property
    def _max_width(self) -> int:
        longest = min(self.target.facts.max_length, self.draft.max_length)
        return max(1, min(self.draft.config.max_width, longest // 4))

    @property
    def _left_s(self) -> float:
        return self.limit_s - (time.perf_counter() - self.started)

    def _is_affordable(self, num_rows: int, width: int, *, is_first: bool) -> bool:
        """Whether a step of this size ends in time; the first two points are always measured."""
        if len(self.found) < 2:
            return True
        if not is_first and (num_rows, width) not in self.found:
            return False
        size = num_rows * width
        near = min(self.found, key=lambda point: abs(point[0] * point[1] - size))
        per_step = max(s.score_s + s.other_s + s.propose_s for s in self.found[near])
        return self._left_s > per_step * max(size / (near[0] * near[1]), 1.0) * (2.0 if is_first else 1.0)

    def _measure(self, num_rows: int, width: int) -> None:
        self._row_count(num_rows)
        sample = self._step(num_rows, width)
        known = self.found.setdefault((num_rows, width), [])
        known.append(sample)
        if len(known) == 1 and self._left_s > 4.0 * (sample.score_s + sample.propose_s):
            known[0] = self._step(num_rows, width)  # a first step of a shape makes what the next ones find ready

    def _row_count(self, count: int) -> None:
        """Have so many rows, each with one position fed and room for more; rows that are full are replaced."""
        longest = min(self.target.facts.max_length, self.draft.max_length)
        for at, row in enumerate(self.rows):
            if row.num_fed + 2 * self._max_width >= longest and row.target_row is not None:
                self.target.free(row.target_row)
                self.rows[at] = self._new_row(longest)
        while len(self.rows) < count:
            self.rows.append(self._new_row(longest))
        fresh = [row for row in self.rows if row.num_unfed]
        if fresh:
            decode_step([], [], self.target, self.draft, [Chunk(row, row.num_unfed) for row in fresh])
        for row in self.rows:
            if row.is_finished:
                raise CheckpointError(f"the target cannot be measured: {row.error or 'it ends every text'}")

    def _new_row(self, longest: int) -> RunningRow:
        vocab_size, mask = self.target.facts.vocab_size, self.draft.config.mask_token_id
        token = next(i for i in range(vocab_size // 2, vocab_size) if i != mask)
        request = Request(prompt_ids=(token,), max_new_tokens=longest - 1, stop_ids=frozenset())
        return RunningRow(
            request=request,
            stop_ids=frozenset(),
            width=self._max_width,
            scanner=None,
            speculation_reason=None,
            target_row=self.target.new_row(),
            draft_cache=self.draft.new_cache(),
        )

    def _step(self, num_rows: int, width: int) -> StepSample:
        rows = self.rows[:num_rows]
        num_injected = sum(row.num_pending for row in rows) if width > 1 else 0
        times, _ = decode_step(rows, [width] * num_rows, self.target, self.draft)
        is_drafting = width > 1
        return StepSample(
            num_rows=num_rows,
            num_scored=num_rows * width,
            context=sum(row.num_fed for row in rows),
            num_passes=1 if is_drafting else 0,
            num_drafting=num_rows if is_drafting else 0,
            num_proposals=num_rows * (width - 1) if is_drafting else 0,
            num_injected=num_injected,
            score_s=times.score_s,
            other_s=times.accept_s + times.commit_s,
            propose_s=times.propose_s if is_drafting else 0.0,
        )

    def _context_cost(self) -> float:
        """Seconds per position of context, as far as it can be told from noise in the time that is left; else 0.

        Where it is 0 the running correction finds what the context of the served requests adds.
        """
        base = _median(self.found[1, 1])
        row = self.rows[0]
        state = row.target_row
        assert state is not None
        longest = min(self.target.facts.max_length, self.draft.max_length)
        last, last_s = max((n * w, _median(samples).score_s) for (n, w), samples in self.found.items())
        affordable = int(self._left_s / 4.0 * last / last_s)
        size = min(MOST_CONTEXT, affordable, longest - row.num_fed - 2 * self._max_width)
        if size < LEAST_CONTEXT:
            return 0.0
        ids_T = torch.full((size,), row.ids[0], dtype=torch.long)
        [scored] = self.target.forward([ids_T], [state], num_logits=0)
        self.target.rollback([state], [size])
        row.ids[1:1] = [row.ids[0]] * size  # the row's own books follow, so that it can go on
        row.num_prompt += size
        row.feed(scored.taps_TNE)
        longer = _median([self._step(1, 1) for _ in range(REPEATS)])
        extra_s = longer.score_s - base.score_s
        if extra_s < CONTEXT_SHARE * base.score_s:
            return 0.0
        return extra_s / (longer.context - base.context)


def _median(samples: Sequence[StepSample]) -> StepSample:
    """One sample with the medians of the times."""
    first = samples[0]
    return StepSample(
        num_rows=first.num_rows,
        num_scored=first.num_scored,
        context=round(median(s.context for s in samples)),
        num_passes=first.num_passes,
        num_drafting=first.num_drafting,
        num_proposals=first.num_proposals,
        num_injected=round(median(s.num_injected for s in samples)),
        score_s=median(s.score_s for s in samples),
        other_s=median(s.other_s for s in samples),
        propose_s=median(s.propose_s for s in samples),
    )


# ---- the stored table ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class CostKey:
    """Everything that a table of times depends on, as text."""

    facts: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()[:16]


def cost_key(
    target: Target,
    draft: DraftModel,
    *,
    target_folder: Path,
    draft_folder: Path,
    max_rows: int,
    options: Mapping[str, object],
) -> CostKey:
    """The key of this pair as it is loaded in this process; `options` are settings that the parts do not show."""
    device = target.device
    is_gpu = device.type == "cuda"
    facts = {
        "layout": _LAYOUT,
        "machine": torch.cuda.get_device_name(device) if is_gpu else _cpu_model(),
        "capability": torch.cuda.get_device_capability(device) if is_gpu else torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtypes": f"{target.dtype} {draft.dtype}",
        "target": f"{type(target).__name__} {_digest(target_folder)}",
        "draft": _digest(draft_folder),
        "max_rows": max_rows,
        "options": json.dumps(dict(options), sort_keys=True, default=str),
        "python": platform.python_version(),
        "versions": " ".join(f"{name} {version(name)}" for name in ("blockdraft", "torch", "transformers")),
        "system": f"{platform.system()} {platform.release()}",
    }
    return CostKey(tuple((name, str(value)) for name, value in facts.items()))


def stored_costs(key: CostKey, target: Target, draft: DraftModel, *, max_rows: int, cache_dir: Path) -> CostModel:
    """The table that was measured for this key before, or one measured now and stored. A damaged file is made anew."""
    path = cache_dir / "costs" / f"{key.name}.json"
    with contextlib.suppress(OSError, ValueError, BlockdraftError):
        raw = json.loads(path.read_text("utf-8"))
        if isinstance(raw, dict) and raw.get("key") == [list(fact) for fact in key.facts]:
            return CostModel.from_json(raw.get("model"))
    model = measure_costs(target, draft, max_rows=max_rows)
    with contextlib.suppress(OSError):  # a folder that cannot be written costs a measurement at every start, no more
        _write(path, json.dumps({"key": key.facts, "model": model.to_json()}, indent=1) + "\n")
    return model


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)


def _digest(folder: Path) -> str:
    """Of a checkpoint: names, sizes, dates and samples of its weights, and its config."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf"), *folder.glob("config.json")]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} {path.stat().st_mtime_ns}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(i * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _cpu_model() -> str:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
