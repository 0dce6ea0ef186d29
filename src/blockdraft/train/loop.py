"""The training loop of a drafter: steps, metrics, checkpoints that a killed run resumes from.

Owns the optimiser's state on disk. The block computation is the draft's own; only the attention closure differs from
serving (blocks.py), so what is trained is what is served. Knows no target, only the rows of it that the draft borrows.

Letters: B sequences, S positions, K blocks per sequence, X = B*K, L block length, G = L-1, N taps, E target width,
D draft width, V rows of the restricted head, M candidates.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats.zlab import config_to_dict
from blockdraft.train.blocks import Blocks, block_hidden, sample_blocks
from blockdraft.train.corpus import Corpus
from blockdraft.train.losses import (
    HeadRows,
    decay_weights,
    dpace_weights,
    prefix_length,
    selector_loss,
    weighted_mean,
)
from blockdraft.train.recipe import Recipe, differing_keys

__all__ = ["METRICS_FILE", "STATE_FILE", "FrozenHead", "Trainer", "initialise_draft", "read_state"]

STATE_FILE = "state.pt"
METRICS_FILE = "metrics.jsonl"
ROWS_EVERY_STEPS = 25
MAY_DIFFER = frozenset({"optim.num_steps", "save_every_steps"})
_STATE_KEYS = ("step", "num_blocks_seen", "model", "optimiser", "generator", "order", "rows", "recipe")


@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding rows, final norm weight and output rows. Embedding and output may be one tensor (tied)."""

    embed_VE: Tensor
    final_norm_E: Tensor
    head_VE: Tensor


def initialise_draft(config: DraftConfig, head: FrozenHead, *, seed: int) -> DraftModel:
    """A fresh draft from `seed`; a fresh DFlash 2 draft proposes what a DFlash draft of the same linear weights would.

    The final norm starts as the target's own, since both stand before the same output head.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config)
    with torch.no_grad():
        model.norm.weight.copy_(head.final_norm_E)
    return model


def read_state(path: Path) -> dict[str, Any]:
    """What `Trainer.save` wrote. Raises CheckpointError for a file that is not a whole training state."""
    advice = "delete it to start anew, or put an earlier one back"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and all of them mean an unusable file
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: the training state is damaged ({reason}); {advice}") from None
    if not isinstance(state, dict) or not all(key in state for key in _STATE_KEYS):
        raise CheckpointError(f"{path}: not a training state, {', '.join(_STATE_KEYS)} belong in it; {advice}")
    return state


class Trainer:
    """One run in one folder. Goes on from the last checkpoint in it, if there is one."""

    def __init__(self, recipe: Recipe, config: DraftConfig, head: FrozenHead, corpus: Corpus, folder: Path) -> None:
        corpus.facts.check_fits(config)
        self.recipe, self.config, self.head, self.corpus, self.folder = recipe, config, head, corpus, folder
        self.model = initialise_draft(config, head, seed=recipe.seed)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.step = 0
        self.num_blocks_seen = 0
        self._order: list[int] = []
        optim = recipe.optim
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.learning_rate,
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._rows: HeadRows | None = None
        self._head_rows_VE: Tensor | None = None
        if (folder / STATE_FILE).is_file():
            self._load(folder / STATE_FILE)
        self._corpus_ids = corpus.token_ids()

    # ---- one step ------------------------------------------------------------------------------------------------
    def run(self, *, on_step: Callable[[dict[str, Any]], None] | None = None, stop_after: int | None = None) -> None:
        """Train up to the recipe's last step (or to step `stop_after`), checkpointing on the way and at the end."""
        num_steps = self.recipe.optim.num_steps
        last = num_steps if stop_after is None else min(stop_after, num_steps)
        self._trim_metrics()
        while self.step < last:
            started = time.perf_counter()
            metrics = self.train_step()
            metrics["step_s"] = round(time.perf_counter() - started, 4)
            self._append_metrics(metrics)
            if on_step is not None:
                on_step(metrics)
            if self.step % self.recipe.save_every_steps == 0 or self.step == last:
                self.save()

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

    def _require_finite(self, name: str, value: Tensor) -> None:
        if not torch.isfinite(value):
            raise ConfigError(
                f"step {self.step + 1}: the {name} is {value.item()}; lower optim.learning_rate "
                f"({self.recipe.optim.learning_rate:g}) or look for bad numbers in the corpus; no weight was changed"
            )

    def loss(self, taps_BSNE: Tensor, blocks: Blocks) -> tuple[Tensor, dict[str, float]]:
        """Total loss of the blocks and its metrics (all as plain floats). Head rows must have been drawn."""
        length = blocks.ids_BKL.shape[-1]
        assert self._rows is not None and self._head_rows_VE is not None
        hidden_XLD = block_hidden(self.model, self.head.embed_VE, taps_BSNE, blocks)
        slots_XG = self._rows.index_of[blocks.ids_BKL.view(-1, length)[:, 1:]]
        weights_XG = blocks.weights_BKL.view(-1, length)[:, 1:] * (slots_XG >= 0)
        logits_XGV = self.model.scale_logits(F.linear(hidden_XLD[:, 1:], self._head_rows_VE)).float()
        nll_XG = self._rows.cross_entropy(logits_XGV, slots_XG)
        slot_weights_XG = self._slot_weights(nll_XG, weights_XG)
        loss = weighted_mean(nll_XG, slot_weights_XG)
        metrics = {
            "loss": float(loss.detach()),
            "prefix": prefix_length(logits_XGV.argmax(-1) == slots_XG, weights_XG),
        }
        if self.config.selector is not None:
            selected, more = self._selector(hidden_XLD, logits_XGV, blocks, weights_XG, slot_weights_XG)
            metrics.update(more)
            if self.step >= self.recipe.loss.selector_start_step:
                loss = loss + self.recipe.loss.selector_weight * selected
        return loss, metrics

    def _slot_weights(self, nll_XG: Tensor, weights_XG: Tensor) -> Tensor:
        loss = self.recipe.loss
        if loss.weighting == "dpace":
            return dpace_weights(nll_XG, weights_XG, loss.dpace_smoothing)
        return weights_XG * decay_weights(weights_XG.shape[-1], loss.decay_gamma)

    def _selector(
        self,
        hidden_XLD: Tensor,
        logits_XGV: Tensor,
        blocks: Blocks,
        weights_XG: Tensor,
        slot_weights_XG: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """The selector's loss, with the true token before each slot as predecessor, and its metrics."""
        selector = self.model.candidate_selector
        assert self._rows is not None and self.config.selector is not None and selector is not None
        ids_XL = blocks.ids_BKL.view(-1, blocks.ids_BKL.shape[-1])
        num_candidates = min(self.config.selector.top_k, logits_XGV.shape[-1])
        unary_XGM, slots_XGM = logits_XGV.topk(num_candidates, dim=-1)
        candidates_XGM = self._rows.ids_V[slots_XGM]
        edge_XGM = selector.edges(hidden_XLD[:, 1:], ids_XL[:, :-1, None], candidates_XGM)[..., 0, :]
        nll_XG, hit_XG = selector_loss(unary_XGM, edge_XGM, candidates_XGM, ids_XL[:, 1:])
        picked_XG = candidates_XGM.gather(-1, (unary_XGM + edge_XGM).argmax(-1, keepdim=True))[..., 0]
        loss = weighted_mean(nll_XG, hit_XG * slot_weights_XG)
        return loss, {
            "selector_loss": float(loss.detach()),
            "recall": float(weighted_mean(hit_XG, weights_XG)),
            "selector_prefix": prefix_length(picked_XG == ids_XL[:, 1:], weights_XG),
            "oracle_prefix": prefix_length(hit_XG > 0, weights_XG),
        }

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
        self._use_rows(HeadRows.draw(self._corpus_ids, self.config.vocab_size, num_random, self.generator))

    def _use_rows(self, rows: HeadRows) -> None:
        dtype = torch.bfloat16 if self.recipe.optim.autocast == "bfloat16" else self.model.dtype
        self._rows, self._head_rows_VE = rows, self.head.head_VE[rows.ids_V].to(dtype)

    # ---- on disk -------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state atomically: a kill at any moment, or a full disk, leaves the previous checkpoint whole."""
        state = {
            "step": self.step,
            "num_blocks_seen": self.num_blocks_seen,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "order": self._order,
            "rows": None if self._rows is None else self._rows.__dict__,
            "recipe": self.recipe.to_dict(),
            "config": config_to_dict(self.config, dtype="float32"),
            "shards": self.corpus.shard_names,
        }
        path = self.folder / STATE_FILE
        temporary = path.with_name(STATE_FILE + ".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as sink:
                torch.save(state, sink)
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(temporary, path)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            kept = "the previous checkpoint is whole" if path.is_file() else "there is no checkpoint yet"
            raise CheckpointError(
                f"{path}: step {self.step} could not be saved ({error}); {kept}; free some space, then run again"
            ) from None

    def _load(self, path: Path) -> None:
        state = read_state(path)
        self._check_same_run(path, state)
        try:
            if "shards" in state:
                self.corpus.use_shards(state["shards"])
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.generator.set_state(state["generator"])
            self.step, self.num_blocks_seen = int(state["step"]), int(state["num_blocks_seen"])
            self._order = list(state["order"])
            if state["rows"] is not None:
                self._use_rows(HeadRows(**state["rows"]))
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0][:160]
            raise CheckpointError(
                f"{path}: the training state is of another draft, or damaged ({reason}); use another folder"
            ) from None

    def _check_same_run(self, path: Path, state: dict[str, Any]) -> None:
        keys = [key for key in differing_keys(state["recipe"], self.recipe.to_dict()) if key not in MAY_DIFFER]
        if not keys and "config" in state:
            keys = differing_keys(state["config"], config_to_dict(self.config, dtype="float32"), "config.")
        if keys:
            raise ConfigError(
                f"{path} was begun with another recipe or target: {', '.join(keys)} differ; "
                "go on with the old ones, or train into another folder"
            )

    def _append_metrics(self, metrics: dict[str, Any]) -> None:
        path = self.folder / METRICS_FILE
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as sink:
                sink.write(json.dumps(metrics) + "\n")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written ({error}); free some space, then run again") from None

    def _trim_metrics(self) -> None:
        """Drop what an earlier, killed run wrote past its checkpoint: those steps are done again."""
        path = self.folder / METRICS_FILE
        if not path.is_file():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.step]
        if len(kept) < len(lines):
            temporary = path.with_name(METRICS_FILE + ".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, path)
