"""The training loop of a drafter: steps, metrics, evaluations, checkpoints that a killed run resumes from.

The block computation is the draft's own; only the attention closure differs from serving (blocks.py), so what is
trained is what is served. Knows no target, only the rows of it that the draft borrows.

Letters: B sequences, S positions, N taps, E target width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats.zlab import config_to_dict
from blockdraft.train.blocks import Blocks, sample_blocks
from blockdraft.train.corpus import Corpus
from blockdraft.train.head import FrozenHead
from blockdraft.train.initial import initialise_draft
from blockdraft.train.losses import HeadRows
from blockdraft.train.objective import Objective
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import Recipe
from blockdraft.train.state import (
    BEST_FILE,
    METRICS_FILE,
    STATE_FILE,
    append_metrics,
    check_same_run,
    read_best,
    read_state,
    trim_metrics,
    write_state,
)

__all__ = ["BEST_FILE", "METRICS_FILE", "STATE_FILE", "FrozenHead", "Trainer", "initialise_draft", "read_state"]

ROWS_EVERY_STEPS = 25

OnStep = Callable[[dict[str, Any]], None]


class Trainer:
    """One run in one folder. Goes on from the last checkpoint in it, if there is one.

    `best` is (step, acceptance length) of the best evaluation so far; its weights lie in best.pt.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: DraftConfig,
        head: FrozenHead,
        corpus: Corpus,
        folder: Path,
        parallel: Parallel | None = None,
    ) -> None:
        corpus.facts.check_fits(config)
        self.recipe, self.config, self.head, self.corpus, self.folder = recipe, config, head, corpus, folder
        self.parallel = parallel or Parallel.single()
        self.model = initialise_draft(config, head, seed=recipe.seed)
        self.objective = Objective(recipe, self.model, head)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.step = 0
        self.num_blocks_seen = 0
        self.best: tuple[int, float] | None = None
        self._order: list[int] = []
        optim = recipe.optim
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.learning_rate,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        if (folder / STATE_FILE).is_file():
            self._load(folder / STATE_FILE)
        self._corpus_ids = corpus.token_ids()

    # ---- the run -------------------------------------------------------------------------------------------------
    def run(
        self,
        *,
        on_step: OnStep | None = None,
        on_evaluate: Callable[[Trainer], float | None] | None = None,
        stop_after: int | None = None,
    ) -> None:
        """Train up to the recipe's last step (or to step `stop_after`), checkpointing on the way and at the end.

        `on_evaluate` gives an acceptance length every `evaluation.every_steps` and after the last step of the recipe.
        """
        num_steps = self.recipe.optim.num_steps
        last = num_steps if stop_after is None else min(stop_after, num_steps)
        lines = trim_metrics(self.folder, self.step)
        evaluated = max((line["step"] for line in lines if "acceptance_length" in line), default=0)
        while True:
            if on_evaluate is not None and evaluated < self.step and self._is_evaluated(self.step):
                self._evaluate(on_evaluate, on_step)
                evaluated = self.step
            if self.step >= last:
                return
            started = time.perf_counter()
            metrics = self.train_step()
            metrics["step_s"] = round(time.perf_counter() - started, 4)
            self._append_metrics(metrics)
            if on_step is not None:
                on_step(metrics)
            if self.step % self.recipe.save_every_steps == 0 or self.step == last or self._is_evaluated(self.step):
                self.save()

    def _is_evaluated(self, step: int) -> bool:
        evaluation = getattr(self.recipe, "evaluation", None)
        due = evaluation is not None and step % evaluation.every_steps == 0
        return due or step == self.recipe.optim.num_steps

    def _evaluate(self, on_evaluate: Callable[[Trainer], float | None], on_step: OnStep | None) -> None:
        started = time.perf_counter()
        value = on_evaluate(self)
        if value is None:
            return
        if self.best is None or value > self.best[1]:
            self.best = (self.step, value)
            self._save_best()
        line = {
            "step": self.step,
            "acceptance_length": round(value, 4),
            "best_step": self.best[0],
            "evaluate_s": round(time.perf_counter() - started, 4),
        }
        self._append_metrics(line)

    # ---- one step ------------------------------------------------------------------------------------------------
    def train_step(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics. Raises ConfigError before a weight is touched by a NaN."""
        recipe = self.recipe
        if self.step % ROWS_EVERY_STEPS == 0:
            if self.corpus.rescan():
                self._corpus_ids = self.corpus.token_ids()
            self._draw_rows()
        batch = self.corpus.batch(self._next_sequences(recipe.optim.sequences_per_step))
        blocks = sample_blocks(
            batch.ids_BS,
            batch.prompt_len_B,
            batch.len_B,
            num_blocks=recipe.optim.blocks_per_sequence,
            block_size=recipe.draft.block_size,
            generator=self.generator,
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.optim.autocast == "bfloat16"):
            loss, metrics = self.loss(batch.taps_BSNE, blocks)
        self._require_finite("loss", loss)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optim.max_grad_norm)
        self._require_finite("gradient's norm", norm)
        lr = recipe.optim.lr_at(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.step += 1
        self.num_blocks_seen += blocks.anchors_BK.numel()
        return {
            "step": self.step,
            "blocks": self.num_blocks_seen,
            "sequences": len(self.corpus),
            "lr": lr,
            "grad_norm": round(float(norm), 4),
            **metrics,
        }

    def loss(self, taps_BSNE: Tensor, blocks: Blocks) -> tuple[Tensor, dict[str, float]]:
        """Total loss of the blocks at the present step and its metrics. Head rows must have been drawn."""
        return self.objective.total(self.objective.sums(taps_BSNE, blocks), self.step, self.parallel)

    def _require_finite(self, name: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            raise ConfigError(
                f"step {self.step + 1}: the {name} is {value.item()}; lower optim.learning_rate "
                f"({self.recipe.optim.learning_rate:g}) or look for bad numbers in the corpus; no weight was changed"
            )

    # ---- data order and head rows --------------------------------------------------------------------------------
    def _next_sequences(self, count: int) -> list[int]:
        picked: list[int] = []
        while len(picked) < count:
            if not self._order:
                self._order = torch.randperm(len(self.corpus), generator=self.generator).tolist()
            picked.append(self._order.pop())
        return picked

    def _draw_rows(self) -> None:
        num_random = self.recipe.loss.num_random_head_rows
        self.objective.use_rows(HeadRows.draw(self._corpus_ids, self.config.vocab_size, num_random, self.generator))

    # ---- on disk -------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state atomically: a kill at any moment, or a full disk, leaves the previous checkpoint whole."""
        rows = self.objective.rows
        state = {
            **self._weights(),
            "num_blocks_seen": self.num_blocks_seen,
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "order": self._order,
            "rows": None if rows is None else rows.__dict__,
            "shards": self.corpus.shard_names,
        }
        write_state(self.folder / STATE_FILE, state)

    def _save_best(self) -> None:
        assert self.best is not None
        write_state(self.folder / BEST_FILE, {**self._weights(), "acceptance_length": self.best[1]})

    def _weights(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "recipe": self.recipe.to_dict(),
            "config": config_to_dict(self.config, dtype="float32"),
        }

    def _load(self, path: Path) -> None:
        state = read_state(path)
        check_same_run(path, state, self.recipe.to_dict(), config_to_dict(self.config, dtype="float32"))
        try:
            if "shards" in state:
                self.corpus.use_shards(state["shards"])
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.generator.set_state(state["generator"])
            self.step, self.num_blocks_seen = int(state["step"]), int(state["num_blocks_seen"])
            self._order = list(state["order"])
            if state["rows"] is not None:
                self.objective.use_rows(HeadRows(**state["rows"]))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0][:160]
            raise CheckpointError(
                f"{path}: the training state is of another draft, or damaged ({reason}); use another folder"
            ) from None
        best = self.folder / BEST_FILE
        if best.is_file():
            kept = read_best(best)
            self.best = (int(kept["step"]), float(kept["acceptance_length"]))

    def _append_metrics(self, metrics: dict[str, Any]) -> None:
        append_metrics(self.folder, metrics)
