"""A few real training steps on random data of a recipe's shape: what a step takes on this machine.

Owns the decision whether a recipe fits this machine. The steps are the trainer's own; only text, taps and the rows that
a draft borrows are random, so no target is needed.

Letters: B sequences, S positions, N taps, E target width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.inspection import count_parameters, step_cost
from blockdraft.train.corpus import CorpusBatch, CorpusFacts
from blockdraft.train.head import FrozenHead
from blockdraft.train.loop import Trainer
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import EvaluationRecipe, Recipe

__all__ = ["RandomCorpus", "run_probe", "why_not"]

PROBE_STEPS = 20
MAX_PROBE_S = 60.0
# Slow on purpose: what a probe may cost is judged by these rates, nothing else is.
_FLOPS_PER_S = {"cpu": 2e10, "cuda": 2e13}
_MAX_EXPECTED_S = 900.0
_NUM_IDS = 8192
_NEVER = EvaluationRecipe(every_steps=0, num_prompts=0, max_new_tokens=0, width=0)


def run_probe(recipe: Recipe, config: DraftConfig) -> dict[str, Any]:
    """Seconds a step and for the whole training, or {"reason": why this machine was not asked}."""
    device = _device(recipe)
    reason = why_not(recipe, config, device)
    if reason is not None:
        return {"reason": reason}
    loss, num_steps = recipe.loss, recipe.optim.num_steps
    times = _step_times(recipe, config, device, whole_head=loss.full_head_from == 0)
    step_s = statistics.median(times)
    full_s = None
    if 0 < loss.full_head_from < 1:
        full_s = statistics.median(_step_times(recipe, config, device, whole_head=True))
    share = 0.0 if full_s is None else 1 - loss.full_head_from
    mean_s = step_s * (1 - share) + (full_s or 0.0) * share
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "steps": len(times),
        "seconds_per_step": step_s,
        "full_head_seconds_per_step": full_s,
        "blocks_per_second": recipe.optim.sequences_per_step * recipe.optim.blocks_per_sequence / mean_s,
        "training_seconds": mean_s * num_steps,
    }


def _device(recipe: Recipe) -> str:
    if recipe.optim.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return recipe.optim.device


def why_not(recipe: Recipe, config: DraftConfig, device: str, *, memory: int | None = None) -> str | None:
    """None where a probe fits this machine. `memory` stands in for its bytes."""
    if device == "cuda" and not torch.cuda.is_available():
        return 'optim.device is "cuda", and this machine has no GPU that PyTorch can use'
    needed, there = _step_bytes(recipe, config), _memory(device) if memory is None else memory
    if needed > there:
        return f"a step needs about {needed / 1e9:.3g} GB, and there are {there / 1e9:.3g} GB for it"
    flops = _step_flops(recipe, config)
    seconds = PROBE_STEPS * flops / _FLOPS_PER_S[device]
    if seconds > _MAX_EXPECTED_S:
        return (
            f"a step is about {flops / 1e12:.3g} TFLOP, so {PROBE_STEPS} of them would take {seconds / 60:.0f} minutes"
        )
    return None


def _memory(device: str) -> int:
    """Bytes that a probe may take: most of what a GPU has free, half of the main memory."""
    if device == "cuda":
        return int(0.8 * torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _step_bytes(recipe: Recipe, config: DraftConfig) -> int:
    """A generous count: weights, gradients, optimiser, borrowed rows, taps, logits, and what is kept of each block."""
    num_blocks = recipe.optim.sequences_per_step * recipe.optim.blocks_per_sequence
    chunk = min(num_blocks, recipe.loss.head_chunk_blocks or num_blocks)
    floats = 4 * count_parameters(config)["total"]
    floats += 2 * config.vocab_size * config.target_hidden_size
    floats += 3 * recipe.optim.sequences_per_step * recipe.max_length * config.num_taps * config.target_hidden_size
    floats += 3 * chunk * config.block_size * config.vocab_size
    per_row = 12 * config.hidden_size + 4 * config.intermediate_size
    floats += config.num_layers * num_blocks * config.block_size * per_row
    return 4 * floats


def _step_flops(recipe: Recipe, config: DraftConfig) -> float:
    """Forward and backward of a step's blocks and of their context, with the whole head."""
    flops, optim = step_cost(config)["flops"], recipe.optim
    per_block = sum(flops[name] for name in ("block", "attention", "head", "selector"))
    context = recipe.max_length * flops["inject_per_position"]
    return 3.0 * optim.sequences_per_step * (optim.blocks_per_sequence * per_block + context)


class _Enough(Exception):
    """The probe has seen enough steps."""


def _step_times(recipe: Recipe, config: DraftConfig, device: str, *, whole_head: bool) -> list[float]:
    """Seconds of each step but the first, which is not like the others."""
    times: list[float] = []
    started = time.perf_counter()

    def on_step(metrics: dict[str, Any]) -> None:
        times.append(metrics["step_s"])
        if len(times) > PROBE_STEPS or (len(times) > 3 and time.perf_counter() - started > MAX_PROBE_S):
            raise _Enough

    with tempfile.TemporaryDirectory() as folder:
        corpus = RandomCorpus(recipe, config)
        head = _random_head(config, seed=recipe.seed)
        trainer = Trainer(
            _probe_recipe(recipe, whole_head=whole_head), config, head, corpus, Path(folder), Parallel.single(device)
        )
        with contextlib.suppress(_Enough):
            trainer.run(on_step=on_step)
    return times[1:]


def _probe_recipe(recipe: Recipe, *, whole_head: bool) -> Recipe:
    """The recipe with its selector at work from the start, one phase of the head, and an end that is never reached."""
    loss = replace(recipe.loss, selector_start_step=0, full_head_from=1.0)
    if whole_head:
        loss = replace(loss, full_head_from=0.0, num_random_head_rows=0)
    return replace(
        recipe,
        save_every_steps=10**9,
        draft=replace(recipe.draft, initial="random", initial_layers=(), initial_draft=""),
        loss=loss,
        optim=replace(recipe.optim, num_steps=PROBE_STEPS + 2, sharding="none"),
        evaluation=_NEVER,
    )


def _random_head(config: DraftConfig, *, seed: int) -> FrozenHead:
    generator = torch.Generator().manual_seed(seed)
    rows_VE = torch.randn(config.vocab_size, config.target_hidden_size, generator=generator) * 0.02
    norm_E = torch.ones(config.target_hidden_size)
    return FrozenHead(rows_VE, norm_E, rows_VE, final_norm_eps=config.rms_norm_eps)


class RandomCorpus:
    """Texts as long as the recipe lets them be, made of random ids, with random taps; the answers are the ends."""

    def __init__(self, recipe: Recipe, config: DraftConfig) -> None:
        last = config.num_target_layers - 1 if recipe.loss.kind == "kl" else None
        self.facts = CorpusFacts(
            target="random numbers",
            weights_sha256="",
            tokenizer_sha256="",
            chat_template_sha256="",
            vocab_size=config.vocab_size,
            target_hidden_size=config.target_hidden_size,
            target_layer_ids=config.target_layer_ids,
            tap_stream=config.tap_stream or "plain",
            last_layer_id=last,
            features_dtype="bfloat16",
        )
        self._length = recipe.max_length
        self._num_written = min(self._length - 1, recipe.text.max_new_tokens)
        self._num_ids = min(config.vocab_size, _NUM_IDS)
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def __len__(self) -> int:
        return 64

    @property
    def num_answer_tokens(self) -> int:
        return len(self) * self._num_written

    @property
    def shard_names(self) -> list[str]:
        return []

    def rescan(self) -> int:
        return 0

    def use_shards(self, names: Sequence[str]) -> None:
        assert not names

    def token_ids(self) -> Tensor:
        return torch.arange(self._num_ids)

    def check_fits(self, config: DraftConfig) -> None:
        self.facts.check_fits(config)

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        shape = (len(indices), self._length)
        ids_BS = torch.randint(self._num_ids, shape, generator=self._generator)
        written_BS = torch.zeros(shape, dtype=torch.bool)
        written_BS[:, self._length - self._num_written :] = True
        width = self.facts.target_hidden_size
        taps_BSNE = torch.randn(*shape, len(self.facts.target_layer_ids), width, generator=self._generator)
        last_BSE = None if self.facts.last_layer_id is None else torch.randn(*shape, width, generator=self._generator)
        return CorpusBatch(ids_BS, taps_BSNE, written_BS, torch.full(shape[:1], self._length), last_BSE)
