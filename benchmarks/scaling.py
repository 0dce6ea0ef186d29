"""What does more training bring? Acceptance of states of one or several runs on the same held-out prompts.

  python -m benchmarks.scaling keep RUN --every 500       copies a training run's state whenever it has passed 500 more
                                                          steps, into RUN/kept, until the run is over
  python -m benchmarks.scaling measure --data DIR --run v2=RUN_A --run v1=RUN_B --against v1=v2
                                                          serves 40 GSM8K and 20 MT-Bench prompts with every state

A run is a folder of a training run (its kept states and its last one), any folder of .pt states, one .pt file, or an
exported drafter. --against A=B gives the paired difference of B's last state to A's. A killed run goes on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common, evaluated, session
from blockdraft import stats as st
from blockdraft.errors import CheckpointError, ConfigError

SETS = {"gsm8k": 40, "mtbench": 20}
RESULT = "scaling.json"
KEPT = "kept"
POLL_S = 5.0


def main() -> int:
    if sys.argv[1:2] == ["keep"]:
        return _keep_main(sys.argv[2:])
    if sys.argv[1:2] != ["measure"]:
        raise ConfigError("name what to do: keep RUN --every N, or measure --data DIR --run NAME=RUN ...")
    parser = session.parser(__doc__)
    evaluated.add_options(parser)
    parser.add_argument("--run", type=_named, action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--against", type=_named, action="append", default=[], metavar="A=B")
    options = parser.parse_args(sys.argv[2:])
    points = [point for name, path in options.run for point in points_of(name, Path(path))]
    return measure(options, points)


def _named(text: str) -> tuple[str, str]:
    name, mark, value = text.partition("=")
    if not name or not mark or not value:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


# ---- points ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Point:
    """One state of one run. `label` is its name in the work file."""

    run: str
    path: Path
    step: int
    blocks: int | None
    answer_tokens: int | None
    digest: str

    @property
    def label(self) -> str:
        return f"{self.run}@{self.step}.{self.digest}"


def points_of(name: str, path: Path) -> list[Point]:
    """The states below `path` by rising step; a step that is there twice is taken once."""
    if (path / "config.json").is_file():
        record = _json(path / "run.json")
        digest = _digest(path / "model.safetensors")
        return [Point(name, path, record.get("steps", 0), record.get("blocks"), record.get("answer_tokens"), digest)]
    if path.is_file():
        files = [path]
    else:
        kept = sorted((path / KEPT).glob("*.pt"))
        files = [*kept, path / "state.pt"] if kept or (path / "state.pt").is_file() else sorted(path.glob("*.pt"))
    tokens = _json(path / "draft" / "run.json").get("answer_tokens")
    found: dict[int, Point] = {}
    for file in files:
        if file.is_file():
            state = read_weights(file)
            blocks = state.get("num_blocks_seen", _blocks_at(path, state["step"]))
            point = Point(name, file, state["step"], blocks, state.get("answer_tokens", tokens), _digest(file))
            found.setdefault(point.step, point)
    if not found:
        raise CheckpointError(f"{path}: no state of a run in it; name the folder of a run, a .pt file or a drafter")
    return [found[step] for step in sorted(found)]


def read_weights(path: Path) -> dict[str, Any]:
    """A training state, or what `keep` wrote: at least step, model and config."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds here, and all of them mean an unusable file
        raise CheckpointError(f"{path}: the state is damaged ({type(error).__name__}); leave it out") from None
    if not isinstance(state, dict) or not {"step", "model", "config"} <= state.keys():
        raise CheckpointError(f"{path}: no state of a run, step, model and config belong in it; leave it out")
    return state


def _blocks_at(folder: Path, step: int) -> int | None:
    """Blocks seen at a step, from the metrics of the run."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        return None
    for line in metrics.read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["step"] == step and "blocks" in entry:
            return int(entry["blocks"])
    return None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure(options: argparse.Namespace, points: Sequence[Point]) -> int:
    names = {name for name, _ in options.run}
    if unknown := [name for pair in options.against for name in pair if name not in names]:
        raise ConfigError(f"--against names {unknown[0]!r}, which no --run does")
    prompts = {
        name: common.load_prompts(options.data, name, min(count, options.limit or count))
        for name, count in SETS.items()
    }
    everything = [prompt for members in prompts.values() for prompt in members]
    settings = {key: value for key, value in session.settings(options).items() if key != "draft"}
    settings |= {"width": options.width}
    path = options.work / f"scaling.{options.dtype}.w{options.width}.jsonl"
    work = common.Work.open(path, settings, session.run_facts(options))
    targets: dict[Any, Any] = {}
    entries = []
    for point in points:
        config, tensors = _weights(point)
        if any((prompt.id, point.label) not in work.records for prompt in everything):
            taps = config.target_layer_ids, config.tap_stream
            if taps not in targets:
                targets[taps] = evaluated.load_target_for(options, config)
            evaluated.evaluate(options, work, point.label, everything, *targets[taps], config, tensors)
        entries.append(_entry(options, work, point, prompts, config))
    result = {
        "what": "acceptance of states of training runs on the same held-out prompts",
        "formulas": evaluated.formulas(),
        "settings": settings,
        "prompts_sha256": {name: common.prompts_digest(members) for name, members in prompts.items()},
        "runs": work.runs,
        "points": entries,
        "differences": [_difference(work, points, prompts, a, b) for a, b in options.against],
    }
    common.write_json(options.results / RESULT, result)
    return 0


def _weights(point: Point) -> tuple[Any, Mapping[str, Any]]:
    from blockdraft.formats import zlab

    if point.path.is_dir():
        checkpoint = zlab.read(point.path)
        return checkpoint.config, checkpoint.tensors
    state = read_weights(point.path)
    return zlab.config_from_dict(state["config"]), state["model"]


def _entry(
    options: argparse.Namespace,
    work: common.Work,
    point: Point,
    prompts: Mapping[str, Sequence[common.Prompt]],
    config: Any,
) -> dict[str, Any]:
    sets = {}
    for name, members in prompts.items():
        found = evaluated.result_of(options, [work.records[p.id, point.label] for p in members], config)
        evaluated.print_line(f"{point.run} step {point.step}, {name}", found)
        sets[name] = evaluated.shown(found)
    return {
        "run": point.run,
        "step": point.step,
        "blocks": point.blocks,
        "proposals_trained": None if point.blocks is None else point.blocks * (config.block_size - 1),
        "answer_tokens": point.answer_tokens,
        "state_sha256": point.digest,
        "draft": {
            "kind": "DFlash" if config.selector is None else "DFlash 2",
            "num_layers": config.num_layers,
            "block_size": config.block_size,
        },
        "sets": sets,
    }


def _difference(
    work: common.Work, points: Sequence[Point], prompts: Mapping[str, Sequence[common.Prompt]], first: str, second: str
) -> dict[str, Any]:
    """Pooled acceptance length of the last state of `second` minus that of `first`, paired by prompt."""
    labels = [[point.label for point in points if point.run == name][-1] for name in (first, second)]
    found: dict[str, Any] = {"first": labels[0], "second": labels[1], "sets": {}}
    for name, members in prompts.items():
        ids = [prompt.id for prompt in members]
        sides = [[st.RequestStats.from_json(work.records[i, label]["stats"]) for i in ids] for label in labels]
        interval = st.paired_difference(*sides, first_clusters=ids, second_clusters=ids)
        found["sets"][name] = common.interval_json(interval)
        if interval is not None:
            print(f"{second} - {first}, {name}: {interval.estimate:+.3f} [{interval.low}, {interval.high}]")
    return found


# ---- keeping states --------------------------------------------------------------------------------------------------
def _keep_main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a training run that goes on")
    parser.add_argument("--every", type=int, required=True, help="steps between two kept states")
    options = parser.parse_args(words)
    if options.every < 1:
        raise ConfigError(f"--every is {options.every}; it is a number of steps, 1 or more")
    seen, is_over = 0.0, False
    while not is_over:
        state = options.folder / "state.pt"
        changed = state.stat().st_mtime if state.is_file() else 0.0
        if changed != seen:
            seen = changed
            is_over = keep_state(options.folder, options.every)
        else:
            time.sleep(POLL_S)
    return 0


def keep_state(folder: Path, every: int) -> bool:
    """Copy the weights of the run's state if it is `every` steps past the last copy, or the last; True when last."""
    from blockdraft.train.state import write_state

    state = read_weights(folder / "state.pt")
    done = [int(path.stem.rpartition("-")[2]) for path in (folder / KEPT).glob("state-*.pt")]
    is_last = state["step"] >= state["recipe"]["optim"]["num_steps"]
    if state["step"] // every > max(done, default=0) // every or (is_last and state["step"] not in done):
        names = ("step", "num_blocks_seen", "model", "recipe", "config")
        write_state(folder / KEPT / f"state-{state['step']:07d}.pt", {name: state[name] for name in names})
        session.note(f"kept step {state['step']}")
    return is_last


if __name__ == "__main__":
    session.finish(main)
