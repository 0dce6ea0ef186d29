"""The training loop of a drafter: steps, metrics, evaluations, checkpoints that a killed run resumes from.

The block computation is the draft's own; only the attention closure differs from serving (blocks.py), so what is
trained is what is served. Knows no target, only the rows of it that the draft borrows.

Letters: B sequences, S positions, N taps, E target width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats.zlab import config_to_dict
from blockdraft.train.blocks import Blocks, sample_blocks, step_generator
from blockdraft.train.corpus import CorpusBatch, CorpusSource
from blockdraft.train.head import FrozenHead, HeadRows
from blockdraft.train.initial import initialise_draft
from blockdraft.train.objective import Objective
from blockdraft.train.optim import make_optimiser, noisy_taps, resolve_autocast, resolve_device
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

    `best` is (step, acceptance length) of the best evaluation so far; its weights lie in best.pt. Evaluations of other
    prompts, lengths or widths, which a resumed run may ask for, do not count beside it.
    Every process of a run has its Trainer and calls the same methods at the same time; the main one alone writes files.
    `served` is the draft in one piece for `on_evaluate`: the trained model itself, or a copy where that is spread.
    `autocast` ("bfloat16" or "none") is what the recipe's "auto" came to on the machine where the run began.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: DraftConfig,
        head: FrozenHead,
        corpus: CorpusSource,
        folder: Path,
        parallel: Parallel | None = None,
        initial_layers: Sequence[Mapping[str, Tensor]] = (),
        initial_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        corpus.check_fits(config)
        self.recipe, self.config, self.head, self.corpus, self.folder = recipe, config, head, corpus, folder
        optim = recipe.optim
        self.parallel = parallel or Parallel.single(resolve_device(optim))
        self.device = self.parallel.device
        self.autocast = resolve_autocast(optim, self.device)
        self.model = self.served = self._fresh_draft(initial_layers, initial_tensors)
        self.objective = Objective(recipe, self.model, head, dtype=self._product_dtype)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.step = 0
        self.num_blocks_seen = 0
        self.best: tuple[int, float] | None = None
        self._order: list[int] = []
        is_idle_at_times = recipe.loss.selector_start_step > 0 or recipe.loss.selector_weight == 0
        skips = config.selector is not None and is_idle_at_times
        self._forward = self.parallel.wrap(self.model, self.loss, optim.sharding, skips=skips)
        self.optimiser = make_optimiser(self.model, optim)
        if (folder / STATE_FILE).is_file():
            self._load(folder / STATE_FILE)
        self.parallel.require_same("step to go on from", self.step)
        self._use_main_shards()

    def _fresh_draft(
        self, initial_layers: Sequence[Mapping[str, Tensor]], initial_tensors: Mapping[str, Tensor] | None
    ) -> DraftModel:
        draft = self.recipe.draft
        is_resumed = (self.folder / STATE_FILE).is_file()
        if len(initial_layers) != len(draft.initial_layers) and not is_resumed:
            raise ConfigError(
                f"draft.initial_layers is {list(draft.initial_layers)}, and the tensors of {len(initial_layers)} "
                "target layers are given"
            )
        if (initial_tensors is None) == bool(draft.initial_draft) and not is_resumed:
            given = "none" if initial_tensors is None else "some"
            raise ConfigError(f"draft.initial_draft is {draft.initial_draft!r}, and {given} of its tensors are given")
        model = initialise_draft(
            self.config,
            self.head,
            seed=self.recipe.seed,
            has_mask_embedding=draft.learned_mask_embedding,
            layers=() if is_resumed else initial_layers,
            tensors=None if is_resumed else initial_tensors,
        )
        return model.to(self.device)

    @property
    def corpus_size(self) -> tuple[int, int]:
        """Sequences and tokens that the target wrote, in the shards in use."""
        return len(self.corpus), self.corpus.num_answer_tokens

    @property
    def _product_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast == "bfloat16" else self.model.dtype

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
        `on_step` gets every line of metrics, a step's or an evaluation's. Both are called in the main process only.
        """
        num_steps = self.recipe.optim.num_steps
        last = num_steps if stop_after is None else min(stop_after, num_steps)
        evaluated = self.parallel.on_main(self._last_evaluated)
        while True:
            if on_evaluate is not None and evaluated < self.step and self._is_evaluated(self.step):
                self._evaluate(on_evaluate, on_step)
                evaluated = self.step
            if self.step >= last:
                return
            started = time.perf_counter()
            metrics = self.train_step()
            metrics["step_s"] = round(time.perf_counter() - started, 4)
            self._tell(metrics, on_step)
            if self.step % self.recipe.save_every_steps == 0 or self.step == last or self._is_evaluated(self.step):
                self.save()

    def _is_evaluated(self, step: int) -> bool:
        every = self.recipe.evaluation.every_steps
        return step == self.recipe.optim.num_steps or (every > 0 and step % every == 0)

    def _evaluate(self, on_evaluate: Callable[[Trainer], float | None], on_step: OnStep | None) -> None:
        started = time.perf_counter()
        self.served = self.parallel.whole_model(self.model)
        value = self.parallel.on_main(lambda: on_evaluate(self))
        self.served = self.model
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
        self._tell(line, on_step)

    def _tell(self, line: dict[str, Any], on_step: OnStep | None) -> None:
        if self.parallel.is_main:
            append_metrics(self.folder, line)
            if on_step is not None:
                on_step(line)

    def _last_evaluated(self) -> int:
        lines = trim_metrics(self.folder, self.step)
        if self.best is None:  # what was evaluated cannot be compared any more, or its weights are gone
            return 0
        return max((line["step"] for line in lines if "acceptance_length" in line), default=0)

    # ---- one step ------------------------------------------------------------------------------------------------
    def train_step(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics. Raises ConfigError before a weight is touched by a NaN."""
        recipe = self.recipe
        self._renew_rows()
        picked = self._next_sequences(recipe.optim.sequences_per_step * self.parallel.world_size)
        batch, blocks = self._batch(picked)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast == "bfloat16"):
            loss, metrics = self._forward(batch.taps_BSNE, blocks, batch.last_BSE)
        self._require_finite("loss", self.parallel.sum_(loss.detach().clone()))
        self.optimiser.zero_grad(set_to_none=True)
        self.parallel.backward(loss)
        norm = self.parallel.clip_grad_norm_(self.model, recipe.optim.max_grad_norm)
        self._require_finite("gradient's norm", norm)
        lr = recipe.optim.lr_at(self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.step += 1
        self.num_blocks_seen += len(picked) * recipe.optim.blocks_per_sequence
        chosen = {"autocast": self.autocast} if recipe.optim.autocast == "auto" else {}
        return {
            "step": self.step,
            "blocks": self.num_blocks_seen,
            "sequences": len(self.corpus),
            "lr": lr,
            "grad_norm": round(float(norm), 4),
            **metrics,
            **chosen,
        }

    def _batch(self, picked: Sequence[int]) -> tuple[CorpusBatch, Blocks]:
        """This process's share of the step's sequences, on its device, and their blocks."""
        recipe = self.recipe
        places = self.parallel.shard(range(len(picked)))
        batch = self.corpus.batch([picked[place] for place in places])
        batch = CorpusBatch(
            ids_BS=batch.ids_BS.to(self.device),
            taps_BSNE=batch.taps_BSNE.to(self.device),
            written_BS=batch.written_BS.to(self.device),
            len_B=batch.len_B.to(self.device),
            last_BSE=None if batch.last_BSE is None else batch.last_BSE.to(self.device),
        )
        generators = [step_generator(recipe.seed, self.step, place) for place in places]
        blocks = sample_blocks(
            batch.ids_BS,
            batch.written_BS,
            num_blocks=recipe.optim.blocks_per_sequence,
            block_size=recipe.draft.block_size,
            generators=generators,
        )
        if recipe.optim.taps_noise:
            noisy = noisy_taps(batch.taps_BSNE, batch.len_B, recipe.optim.taps_noise, generators)
            batch = replace(batch, taps_BSNE=noisy)
        return batch, blocks

    def loss(
        self, taps_BSNE: Tensor, blocks: Blocks, last_BSE: Tensor | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """(these blocks' part of the loss at the present step, metrics over all processes). Needs head rows drawn."""
        sums = self.objective.sums(taps_BSNE, blocks, self.step, last_BSE)
        return self.objective.total(sums, self.step, self.parallel)

    def _require_finite(self, name: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            raise ConfigError(
                f"step {self.step + 1}: the {name} is {value.item()}; lower optim.learning_rate "
                f"({self.recipe.optim.learning_rate:g}) or look for bad numbers in the corpus; no weight was changed"
            )

    # ---- data order and head rows --------------------------------------------------------------------------------
    def _use_main_shards(self) -> None:
        """Make a sequence's index mean the same in every process, also while a writer adds shards."""
        names = self.parallel.agree(self.corpus.shard_names)
        if names != self.corpus.shard_names:
            self.corpus.use_shards(names)
        self.parallel.require_same("number of sequences in the corpus", len(self.corpus))
        self._corpus_ids = self.corpus.token_ids()

    def _next_sequences(self, count: int) -> list[int]:
        picked: list[int] = []
        while len(picked) < count:
            if not self._order:
                self._order = torch.randperm(len(self.corpus), generator=self.generator).tolist()
            picked.append(self._order.pop())
        return picked

    def _renew_rows(self) -> None:
        """Look for new shards and draw head rows anew every few steps; in the last phase all rows are used."""
        is_due = self.step % ROWS_EVERY_STEPS == 0
        if is_due and self.parallel.on_main(self.corpus.rescan):
            if not self.parallel.is_main:
                self.corpus.rescan()
            self._use_main_shards()
        rows, loss, vocab_size = self.objective.rows, self.recipe.loss, self.config.vocab_size
        if loss.full_head_from < 1 and self.step >= round(loss.full_head_from * self.recipe.optim.num_steps):
            if rows is None or not rows.is_whole:
                self.objective.use_rows(HeadRows.whole(vocab_size))
        elif is_due:
            drawn = HeadRows.draw(self._corpus_ids, vocab_size, loss.num_random_head_rows, self.generator)
            self.objective.use_rows(drawn)

    # ---- on disk -------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state atomically: a kill at any moment, or a full disk, leaves the previous checkpoint whole."""
        rows = self.objective.rows
        state = {
            **self._weights(),
            "optimiser": self.parallel.whole(self.optimiser.state_dict()),
            "num_blocks_seen": self.num_blocks_seen,
            "num_processes": self.parallel.world_size,
            "generator": self.generator.get_state(),
            "order": self._order,
            "rows": None if rows is None else rows.__dict__,
            "shards": self.corpus.shard_names,
            "corpus_size": self.corpus_size,
            "autocast": self.autocast,
        }
        self.parallel.on_main(lambda: write_state(self.folder / STATE_FILE, state))

    def _save_best(self) -> None:
        assert self.best is not None
        state = {**self._weights(), "acceptance_length": self.best[1]}
        self.parallel.on_main(lambda: write_state(self.folder / BEST_FILE, state))

    def _weights(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.parallel.whole(self.model.state_dict()),
            "recipe": self.recipe.to_dict(),
            "config": config_to_dict(self.config, dtype="float32"),
        }

    def _load(self, path: Path) -> None:
        state = read_state(path)
        recipe, config = self.recipe.to_dict(), config_to_dict(self.config, dtype="float32")
        check_same_run(path, state, recipe, config, num_processes=self.parallel.world_size)
        try:
            if "shards" in state:
                self.corpus.use_shards(state["shards"])
            self.parallel.load_whole(self.model, self.optimiser, state)
            self.generator.set_state(state["generator"])
            self.step, self.num_blocks_seen = int(state["step"]), int(state["num_blocks_seen"])
            self._order = list(state["order"])
            self.autocast = state.get("autocast", self.autocast)
            self.objective.dtype = self._product_dtype
            if state["rows"] is not None:
                self.objective.use_rows(HeadRows(**state["rows"]))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0][:160]
            raise CheckpointError(
                f"{path}: the training state is of another draft, or damaged ({reason}); use another folder"
            ) from None
        if self.corpus_size != state.get("corpus_size", self.corpus_size):
            raise ConfigError(
                f"{path} was begun with another corpus: {list(state['corpus_size'])} sequences and written tokens in "
                f"the same shards, now {list(self.corpus_size)}; name the old one, or train into another folder"
            )
        best = self.folder / BEST_FILE
        if best.is_file():
            kept = read_best(best)
            if self.recipe.evaluation.is_comparable(kept["recipe"]["evaluation"]):
                self.best = (int(kept["step"]), float(kept["acceptance_length"]))
