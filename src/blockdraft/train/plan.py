"""What a recipe comes to before anything is run: parameters, bytes, tokens, blocks, and the time of a short probe.

Owns the arithmetic and its presentation. Reads no network: the facts of the target are those of its files, where it is
at hand, and the recipe's own otherwise. Whatever depends on text that is not written yet is an upper bound.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.errors import ConfigError, shown
from blockdraft.inspection import count_parameters, read_target_facts
from blockdraft.train.optim import count_muon_parameters
from blockdraft.train.overrides import ResolvedRecipe
from blockdraft.train.recipe import Recipe

__all__ = ["BUILTIN_TARGET", "Plan", "facts_for", "make_plan", "sizes_of", "target_folder"]

BUILTIN_TARGET = "smollm2-135m"
_FLOAT32_BYTES = 4
_FEATURE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A resolved recipe and what it comes to. `probe` says what a step takes here, or why that was not tried."""

    resolved: ResolvedRecipe
    facts: TargetFacts
    facts_from: str
    sizes: dict[str, Any]
    probe: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON."""
        return {
            "name": self.resolved.name,
            "changes": list(self.resolved.changes),
            "recipe": self.resolved.recipe.to_dict(),
            "facts_from": self.facts_from,
            "facts": asdict(self.facts),
            **self.sizes,
            "probe": self.probe,
        }

    def to_text(self) -> str:
        """The recipe as TOML, then the numbers as its comments: the whole reads back as a recipe file."""
        lines = [f"facts      {self.facts_from}", *_size_lines(self.sizes), *_probe_lines(self.probe)]
        return self.resolved.to_toml() + "\n" + "".join(f"# {line}\n" for line in lines)


def make_plan(
    resolved: ResolvedRecipe,
    *,
    target: str | Path | None = None,
    probe: Callable[[Recipe, DraftConfig], dict[str, Any]] | None = None,
) -> Plan:
    """The plan of a recipe for its own target, or for `target`. `probe` None takes real steps, where they fit."""
    facts, source = facts_for(resolved.recipe, target)
    config = resolved.recipe.draft.config(facts)
    if probe is None:
        from blockdraft.train.probe import run_probe

        probe = run_probe
    sizes = sizes_of(resolved.recipe, config)
    return Plan(resolved=resolved, facts=facts, facts_from=source, sizes=sizes, probe=probe(resolved.recipe, config))


# ---- facts -----------------------------------------------------------------------------------------------------------
def target_folder(name: str | Path) -> Path | None:
    """The folder (or config.json) of a target that is on this machine, None where it would have to be fetched."""
    text = str(name)
    if text == BUILTIN_TARGET:
        from blockdraft.targets.smollm2 import TARGET_NAME, default_cache_dir

        folder = default_cache_dir().expanduser() / TARGET_NAME
        return folder if (folder / "config.json").is_file() else None
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        kept = try_to_load_from_cache(text, "config.json")
    except HFValidationError:
        return None
    return Path(kept).parent if isinstance(kept, str) else None


def facts_for(recipe: Recipe, target: str | Path | None = None) -> tuple[TargetFacts, str]:
    """(facts of the recipe's target or of `target`, where they come from), without a network."""
    name = recipe.target.name if target is None else target
    folder = target_folder(name)
    if folder is not None:
        facts = read_target_facts(folder)
        recipe.target.check_facts(facts)
        return facts, f"{folder}"
    if target is not None:
        raise ConfigError(
            f"target {shown(target)} is not on this machine, and a plan fetches nothing; name a folder, or leave "
            "--target out to plan with the recipe's own facts"
        )
    if recipe.target.facts is None:
        raise ConfigError(
            f"target {shown(name)} is not on this machine, and the recipe has no [target.facts]; add them, or name the "
            "target's folder (--target)"
        )
    return recipe.target.facts, "the recipe's own; the target is not on this machine"


# ---- arithmetic ------------------------------------------------------------------------------------------------------
def sizes_of(recipe: Recipe, config: DraftConfig) -> dict[str, Any]:
    """Every number of the plan that needs no run, as plain JSON. Steps are those of one process."""
    parts = count_parameters(config)
    parts["mask_embedding"] = config.hidden_size if recipe.draft.learned_mask_embedding else 0
    trainable = parts["total"] = parts["total"] + parts["mask_embedding"]
    text = _text(recipe)
    per_token = _feature_bytes_per_token(recipe, config)
    optim = recipe.optim
    with_one_moment = 0 if optim.kind == "adamw" else count_muon_parameters(config)
    blocks = optim.num_steps * optim.sequences_per_step * optim.blocks_per_sequence
    sequences = optim.num_steps * optim.sequences_per_step
    return {
        "parameters": parts,
        "trainable_parameters": trainable,
        "frozen_parameters": 2 * config.vocab_size * config.target_hidden_size,
        "train_bytes": {
            "weights": _FLOAT32_BYTES * trainable,
            "gradients": _FLOAT32_BYTES * trainable,
            "optimiser": _FLOAT32_BYTES * (2 * trainable - with_one_moment),
        },
        "text": text,
        "features": {
            "where": recipe.text.features,
            "bytes_per_token": per_token,
            "bytes_at_most": None if text["tokens_at_most"] is None else per_token * text["tokens_at_most"],
        },
        "steps": {
            "sharding": optim.sharding,
            "num_steps": optim.num_steps,
            "sequences": sequences,
            "passes_at_least": None if not text["sequences_at_most"] else sequences / text["sequences_at_most"],
            "blocks": blocks,
            "labels_at_most": blocks * (config.block_size - 1),
        },
        "head": _head(recipe, config),
    }


def _text(recipe: Recipe) -> dict[str, Any]:
    """Prompts and tokens; None where a source does not say before it is read how much it holds."""
    prompts, text = recipe.prompts, recipe.text
    counts = [prompts.self_written, *(_lines(Path(name)) for name in prompts.files)]
    counts += [source.limit or None for source in prompts.hub]
    known = [count for count in counts if count is not None]
    num_prompts = sum(known) if len(known) == len(counts) else None
    if num_prompts is None:
        return dict.fromkeys(("prompts", "sequences_at_most", "tokens_at_most", "written_tokens_at_most"), None)
    left = max(0, num_prompts - prompts.held_out)
    longest = recipe.max_length
    return {
        "prompts": num_prompts,
        "sequences_at_most": left,
        "tokens_at_most": left * longest,
        "written_tokens_at_most": left * (longest if text.every_turn else text.max_new_tokens),
    }


def _lines(path: Path) -> int | None:
    if not path.is_file():
        return None
    with path.open("rb") as stream:
        return sum(bool(line.strip()) for line in stream)


def _feature_bytes_per_token(recipe: Recipe, config: DraftConfig) -> int:
    """Taps of a position, and the last layer's output where the loss needs a teacher."""
    if recipe.text.features == "online":
        return 0
    last = config.num_target_layers - 1
    needs_last = recipe.loss.kind == "kl" and last not in config.target_layer_ids
    return (config.num_taps + needs_last) * config.target_hidden_size * _FEATURE_BYTES


def _head(recipe: Recipe, config: DraftConfig) -> dict[str, Any]:
    """What the output head of a step holds in float32 at once, with a softmax over the whole vocabulary."""
    num_blocks = recipe.optim.sequences_per_step * recipe.optim.blocks_per_sequence
    slots = config.block_size - 1
    chunk = min(num_blocks, recipe.loss.head_chunk_blocks or num_blocks)
    return {
        "rows_at_most": config.vocab_size,
        "blocks_per_chunk": chunk,
        "logits_bytes_at_most": chunk * slots * config.vocab_size * _FLOAT32_BYTES,
        "gradient_bytes": num_blocks * slots * config.hidden_size * _FLOAT32_BYTES,
        "weight_bytes": config.vocab_size * config.hidden_size * _FLOAT32_BYTES,
    }


# ---- words -----------------------------------------------------------------------------------------------------------
def _size_lines(sizes: Mapping[str, Any]) -> list[str]:
    parts, train, text = sizes["parameters"], sizes["train_bytes"], sizes["text"]
    by_part = ", ".join(f"{name} {count:,}" for name, count in parts.items() if name != "total" and count)
    features, steps, head = sizes["features"], sizes["steps"], sizes["head"]
    lines = [
        f"parameters {parts['total']:,}, all trained: {by_part}",
        f"training   {_bytes(train['weights'])} of float32 weights, {_bytes(train['optimiser'])} of optimiser, "
        f"{_bytes(train['gradients'])} of gradients",
        f"frozen     at most {sizes['frozen_parameters']:,} borrowed: the target's embedding and head",
    ]
    if text["prompts"] is None:
        lines.append("text       unknown: a source of prompts is not there yet, or has no limit")
    else:
        lines.append(
            f"text       {text['prompts']:,} prompts, {text['sequences_at_most']:,} to train on: at most "
            f"{text['tokens_at_most']:,} tokens, {text['written_tokens_at_most']:,} of them written by the target"
        )
    if features["where"] == "online":
        lines.append("features   none stored, computed inside the step")
    else:
        whole = features["bytes_at_most"]
        total = "unknown in all" if whole is None else f"at most {_bytes(whole)} in all"
        lines.append(f"features   {features['bytes_per_token']:,} bytes a token, {total}")
    passes = steps["passes_at_least"]
    often = "" if passes is None else f", {passes:.2g} passes over the text or more"
    return [
        *lines,
        f"steps      {steps['num_steps']:,}: {steps['sequences']:,} sequences{often}, {steps['blocks']:,} blocks, "
        f"at most {steps['labels_at_most']:,} labels{_of_each(steps['sharding'])}",
        f"head       {head['blocks_per_chunk']:,} blocks at a time: at most {_bytes(head['logits_bytes_at_most'])} of "
        f"logits, {_bytes(head['gradient_bytes'])} of gradients kept, {_bytes(head['weight_bytes'])} of rows",
    ]


def _of_each(sharding: str) -> str:
    return "" if sharding == "none" else f" by each process of {sharding}"


def _probe_lines(probe: Mapping[str, Any]) -> list[str]:
    if "reason" in probe:
        return [f"time       not probed: {probe['reason']}"]
    full = probe["full_head_seconds_per_step"]
    with_full = "" if full is None else f", {full:.3g} s with the whole head"
    return [
        f"time       {probe['seconds_per_step']:.3g} s a step{with_full} (median of {probe['steps']}, "
        f"{probe['device']}, {probe['threads']} threads): {_duration(probe['training_seconds'])} of training, "
        f"{probe['blocks_per_second']:,.0f} blocks/s",
        "           on random data; writing the text, online taps and evaluations come on top",
    ]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
