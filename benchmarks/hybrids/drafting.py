"""The drafters of the tiny targets: which there are, and the trainer's own run of each from its recipe.

Owns what of a run goes into the result. The trainer is called as `blockdraft train` calls it: it lets the target answer
the prompts, passes its gates, trains, and exports.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import session
from blockdraft.errors import ConfigError

_SPENT = "cpu_seconds.json"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, and the stream of its taps that the drafter reads ("plain" where there is one)."""

    target: str
    stream: str

    @property
    def recipe(self) -> Path:
        return Path(__file__).with_name(f"{self.target}.toml")


PAIRS = (Pair("qwen3_5", "plain"), Pair("kimi_k3", "prefix"), Pair("kimi_k3", "attn_res"))


def train(
    pair: Pair,
    target: Path,
    prompts: Path,
    out: Path,
    changes: Sequence[str],
    say: Callable[[str], None],
    *,
    has_gates: bool = True,
) -> dict[str, Any]:
    """What the run of the pair's recipe in `out` was; the drafter is in `out`/draft. Goes on where it stopped."""
    from blockdraft.train.command import run_training
    from blockdraft.train.overrides import resolve_recipe
    from blockdraft.train.recipe import read_recipe

    places = [f"target.name={json.dumps(str(target))}", f"prompts.files=[{json.dumps(str(prompts))}]"]
    recipe = resolve_recipe(pair.recipe, [*places, f"draft.tap_stream={pair.stream}", *changes])
    if not (out / "draft").is_dir():
        begun = time.process_time()
        try:
            commit = session.run_facts(argparse.Namespace(device="cpu"))["commit"]
            run_training(recipe, None, None, out, has_gates=has_gates, commit=commit, on_progress=say)
        finally:
            _add(out, time.process_time() - begun)
    if read_recipe(out / "draft" / "recipe.toml") != recipe.recipe:
        raise ConfigError(f"{out} holds a drafter of another recipe; use another --work folder")
    record = json.loads((out / "draft" / "run.json").read_text("utf-8"))
    draft, optim = recipe.recipe.draft, recipe.recipe.optim
    return {
        "kind": "DFlash 2",
        "attention": "GQA" if draft.mla is None else "MLA",
        "num_layers": draft.num_layers,
        "target_layer_ids": list(draft.target_layer_ids),
        "block_size": draft.block_size,
        "answer_tokens": record["answer_tokens"],
        "steps": record["steps"],
        "sequences_per_step": optim.sequences_per_step,
        "blocks_per_sequence": optim.blocks_per_sequence,
        "cpu_seconds": round(_spent(out)),
        "commit": record["commit"],
    }


def _add(out: Path, seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / _SPENT).write_text(json.dumps(_spent(out) + seconds), encoding="utf-8")


def _spent(out: Path) -> float:
    """CPU seconds of all calls: text, gates and steps."""
    file = out / _SPENT
    return float(json.loads(file.read_text("utf-8"))) if file.is_file() else 0.0
