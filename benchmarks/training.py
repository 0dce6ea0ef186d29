"""What does a training step cost, and where does it go? Blocks a second, peak memory, time by part, growth.

  python -m benchmarks.training [RECIPE] [key=value ...] [--corpus DIR]

Random text and taps of the recipe's shape stand in for a corpus unless --corpus names one. Every measurement runs in a
process of its own (the peak of a process never falls):
  throughput   steps of the recipe as it is; with a restricted head also the phase over the whole vocabulary
  profile      torch.profiler over a few steps; a backward operation counts for the part whose forward made it
  growth       steps with the whole head at two vocabularies x two lengths x two numbers of blocks
Timed: it wants a quiet machine. Stages that are in the result with the same settings are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import common, session
from blockdraft.errors import ConfigError, UnavailableError

RESULT = "training.json"
STAGES = ("throughput", "profile", "growth")
GROWTH = {"vocab_size": (1, 2), "max_length": (1, 2), "blocks_per_sequence": (1, 2)}
_ONE = "--one"
_FLOAT32 = 4
_ATTENTION = "attention"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="smollm2-135m", help="ready recipe or .toml file")
    parser.add_argument("changes", nargs="*", metavar="key=value")
    parser.add_argument("--corpus", type=Path, help="folder of a written corpus")
    parser.add_argument("--steps", type=int, default=20, help="timed steps after the first (default 20)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    parser.add_argument(_ONE, dest="one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(run_one(json.loads(options.one))))
        return 0
    if unknown := [name for name in options.stages.split(",") if name not in STAGES]:
        raise ConfigError(f"--stages names {unknown[0]!r}; there are {', '.join(STAGES)}")
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    from blockdraft.train.overrides import resolve_recipe

    resolved = resolve_recipe(options.recipe, options.changes)
    spec = {
        "recipe": Path(options.recipe).name,
        "changes": options.changes,
        "corpus": None if options.corpus is None else options.corpus.name,
        "threads": options.threads,
        "steps": options.steps,
    }
    call = spec | {"recipe": options.recipe, "corpus": None if options.corpus is None else str(options.corpus)}
    path = options.results / RESULT
    result = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if result.get("settings") != spec:
        result = {"what": "what a training step costs, and where it goes", "settings": spec, "stages": {}}
    result["recipe"] = resolved.recipe.to_dict()
    stages = {
        "throughput": lambda: _throughput(call, resolved.recipe),
        "profile": lambda: _in_process(call | {"profile": True, "steps": 3}),
        "growth": lambda: _growth(call, result, path),
    }
    for name in options.stages.split(","):
        if name in result["stages"]:
            session.note(f"{name}: there already")
            continue
        session.note(name)
        before = session.load_average()
        found = stages[name]()
        facts = session.run_facts(argparse.Namespace(device="cpu"))
        result["stages"][name] = {**found, "run": facts, "load_average": [before, session.load_average()]}
        common.write_json(path, result)
        print(json.dumps({name: found}, indent=1))
    return 0


def _throughput(call: Mapping[str, Any], recipe: Any) -> dict[str, Any]:
    found = {"as the recipe begins": _in_process(call)}
    if 0 < recipe.loss.full_head_from < 1:
        found["over the whole vocabulary"] = _in_process({**call, "whole_head": True})
    return {"phases": found}


def _growth(call: Mapping[str, Any], result: dict[str, Any], path: Path) -> dict[str, Any]:
    """Every combination of the factors, and what two factors together take beyond the sum of each alone.

    Every point is in the result file as soon as it is measured.
    """
    points = result.setdefault("growth_so_far", [])
    for factors in product(*GROWTH.values()):
        grown = dict(zip(GROWTH, factors, strict=True))
        if any(point["grown"] == grown for point in points):
            continue
        found = _in_process({**call, "corpus": None, "whole_head": True, "steps": 4, "grown": grown})
        points.append({"grown": grown, **found})
        common.write_json(path, result)
        session.note(f"{grown}: {found['step_bytes'] / 2**20:.0f} MiB, {found['step_s']:.2f} s")
    del result["growth_so_far"]
    return {"points": points, "together": [_together(points, name) for name in ("max_length", "blocks_per_sequence")]}


def _together(points: Sequence[Mapping[str, Any]], other: str) -> dict[str, Any]:
    """The part of memory and time that grows with the vocabulary times `other`, and what one float each would be."""
    rest = next(name for name in GROWTH if name not in ("vocab_size", other))

    def at(vocab: int, length: int) -> Mapping[str, Any]:
        wanted = {"vocab_size": vocab, other: length, rest: 1}
        return next(point for point in points if point["grown"] == wanted)

    corners = [at(2, 2), at(2, 1), at(1, 2), at(1, 1)]
    high, low = corners[0], corners[3]
    counted = "num_tokens" if other == "max_length" else "num_slots"
    rows, columns = (high[name] - low[name] for name in ("vocab_size", counted))

    def beyond(key: str) -> float:
        a, b, c, d = (corner[key] for corner in corners)
        return a - b - c + d

    return {
        "vocabulary_times": other,
        "bytes_beyond_the_sum": beyond("step_bytes"),
        "bytes_of_one_float_each": rows * columns * _FLOAT32,
        "seconds_beyond_the_sum": beyond("step_s"),
        "seconds_of_the_smallest": low["step_s"],
    }


def _in_process(spec: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement in a process of its own, whose freed memory goes back to the system at once."""
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": str(spec["threads"]),
    }
    command = [sys.executable, "-m", "benchmarks.training", _ONE, json.dumps(spec)]
    done = subprocess.run(command, cwd=session.ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UnavailableError(f"a measurement ended with code {done.returncode}: {reason}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- one measurement -------------------------------------------------------------------------------------------------
def run_one(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Steps of one shape: seconds, blocks a second, peak memory; by part where `profile` is asked for."""
    import torch

    torch.set_num_threads(spec["threads"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(spec, Path(folder))
        trainer.train_step()  # the optimiser's state, and what is prepared once
        before, reset = resident_bytes(), reset_peak()
        if spec.get("profile"):
            return profile_steps(trainer, spec["steps"])
        seconds = []
        for _ in range(spec["steps"]):
            started = time.perf_counter()
            trainer.train_step()
            seconds.append(time.perf_counter() - started)
    optim, config = trainer.recipe.optim, trainer.config
    num_blocks = optim.sequences_per_step * optim.blocks_per_sequence
    peak = peak_bytes() if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": median(seconds),
        "slowest_step_s": max(seconds),
        "blocks_per_s": num_blocks / median(seconds),
        "peak_bytes": peak,
        "step_bytes": peak - before,
        "vocab_size": config.vocab_size,
        "num_blocks": num_blocks,
        "num_slots": num_blocks * (config.block_size - 1),
        "num_tokens": optim.sequences_per_step * trainer.recipe.max_length,
        "head_rows": len(trainer.objective.rows.ids_V),
        "autocast": trainer.autocast,
    }


def make_trainer(spec: Mapping[str, Any], folder: Path) -> Any:
    """A trainer of the recipe's shape, grown by the spec's factors, with the selector at work from the start."""
    from blockdraft.train import probe
    from blockdraft.train.corpus import Corpus
    from blockdraft.train.loop import Trainer
    from blockdraft.train.overrides import resolve_recipe
    from blockdraft.train.plan import facts_for

    recipe = resolve_recipe(spec["recipe"], spec["changes"]).recipe
    facts, _ = facts_for(recipe)
    grown = spec.get("grown", {})
    config = recipe.draft.config(facts)
    config = replace(config, vocab_size=config.vocab_size * grown.get("vocab_size", 1))
    recipe = probe._probe_recipe(recipe, whole_head=bool(spec.get("whole_head")))
    optim = replace(
        recipe.optim,
        num_steps=10**6,
        device="cpu",
        blocks_per_sequence=recipe.optim.blocks_per_sequence * grown.get("blocks_per_sequence", 1),
    )
    length = recipe.max_length * grown.get("max_length", 1)
    target = replace(recipe.target, facts=None)
    recipe = replace(recipe, optim=optim, max_length=length, target=target)
    corpus = (
        probe.RandomCorpus(recipe, config)
        if spec["corpus"] is None
        else Corpus(Path(spec["corpus"]), max_length=length)
    )
    head = probe._random_head(config, seed=recipe.seed)
    return Trainer(recipe, config, head, corpus, folder)


def resident_bytes() -> int:
    return _status("VmRSS")


def peak_bytes() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError(f"/proc/self/status has no {name}; measure on Linux")


def reset_peak() -> bool:
    """Start the process's peak anew; False where the system does not let it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


# ---- the profile -----------------------------------------------------------------------------------------------------
def _parts() -> list[tuple[Any, str, str]]:
    """(owner, attribute, part): what is timed under which name. The innermost part counts."""
    from blockdraft.draft import DraftModel
    from blockdraft.train import blocks, loop, objective
    from blockdraft.train.parallel import Parallel

    return [
        (loop.Trainer, "_batch", "data and anchors"),
        (DraftModel, "fuse", "context: fuse, keys and values"),
        (DraftModel, "context_kv", "context: fuse, keys and values"),
        (DraftModel, "block_forward", "block layers"),
        (blocks, "block_attention", _ATTENTION),
        (objective, "slot_losses", "head and its gradient"),
        (objective.Objective, "_add_selector", "selector"),
        (Parallel, "clip_grad_norm_", "optimiser"),
    ]


def profile_steps(trainer: Any, num_steps: int) -> dict[str, Any]:
    """Seconds a step by part, from the profiler's events."""
    import torch

    restore: list[Callable[[], None]] = []
    for owner, name, part in _parts():
        restore.append(_wrap(owner, name, part))
    step = trainer.optimiser.step
    trainer.optimiser.step = _ranged(step, "optimiser")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for _ in range(num_steps):
                with torch.profiler.record_function("part:other"):
                    trainer.train_step()
    finally:
        trainer.optimiser.step = step
        for undo in restore:
            undo()
    parts = by_part(profiler.events())
    total = sum(parts.values())
    return {
        "steps": num_steps,
        "seconds_per_step": total / num_steps,
        "parts": {
            name: {"seconds": value / num_steps, "share": value / total}
            for name, value in sorted(parts.items(), key=lambda item: -item[1])
        },
    }


def _wrap(owner: Any, name: str, part: str) -> Callable[[], None]:
    original = getattr(owner, name)
    setattr(owner, name, _ranged(original, part))
    return lambda: setattr(owner, name, original)


def _ranged(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """The function in a range of that name; what makes the attention makes one in such a range too."""
    from torch.profiler import record_function

    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(f"part:{part}"):
            made = function(*arguments, **options)
        return _ranged(made, part) if part == _ATTENTION and callable(made) else made

    return call


def by_part(events: Sequence[Any]) -> dict[str, float]:
    """Seconds by part: of each range what no inner range and no backward node takes, and the backward nodes of its
    forward operations. Together they are the whole of the outermost ranges."""
    ranges = sorted(
        (e for e in events if e.name.startswith("part:")), key=lambda e: (e.time_range.start, -e.time_range.end)
    )
    nodes = [e for e in events if e.name.startswith("autograd::engine::evaluate_function")]
    part_of = _parts_of_sequence_numbers(events, ranges)
    seconds: dict[str, float] = {}

    def add(part: str, microseconds: float) -> None:
        seconds[part] = seconds.get(part, 0.0) + microseconds / 1e6

    for at, outer in enumerate(ranges):
        add(_part(outer), _length(outer))
        inside = (e for e in reversed(ranges[:at]) if _holds(e, outer))
        if (parent := next(inside, None)) is not None:
            add(_part(parent), -_length(outer))
    for node in nodes:
        is_sum = "AccumulateGrad" in node.name
        part = "optimiser" if is_sum else part_of.get(node.sequence_nr, "other")
        add(part, _length(node))
        add("other", -_length(node))  # backward runs inside the outermost range only
    return seconds


def _parts_of_sequence_numbers(events: Sequence[Any], ranges: Sequence[Any]) -> dict[int, str]:
    """The innermost range in which a forward operation with this number ran."""
    found: dict[int, str] = {}
    is_backward = 1
    for event in events:
        if event.sequence_nr < 0 or event.scope == is_backward or event.name.startswith(("part:", "autograd::")):
            continue
        around = [e for e in ranges if e.thread == event.thread and _holds(e, event)]
        if around:
            found.setdefault(event.sequence_nr, _part(max(around, key=lambda e: e.time_range.start)))
    return found


def _part(event: Any) -> str:
    return str(event.name).removeprefix("part:")


def _holds(outer: Any, inner: Any) -> bool:
    return bool(outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end)


def _length(event: Any) -> float:
    return float(event.time_range.end - event.time_range.start)


if __name__ == "__main__":
    session.finish(main)
