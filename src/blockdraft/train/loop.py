"""The training loop of a drafter: steps, metrics, checkpoints that a killed run resumes from.

Owns the optimiser's state on disk. The block computation is the draft's own; only the attention closure differs from
serving (blocks.py), so what is trained is what is served.

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
from blockdraft.train.blocks import Blocks, block_attention, sample_blocks
from blockdraft.train.corpus import Corpus
from blockdraft.train.losses import decay_weights, dpace_weights, selector_loss, weighted_mean
from blockdraft.train.recipe import Recipe

__all__ = ["FrozenHead", "Trainer", "initialise_draft"]

STATE_FILE = "state.pt"
METRICS_FILE = "metrics.jsonl"


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


@dataclass(frozen=True)
class HeadRows:
    """Rows of the output head a step's softmax runs over: all ids of the corpus, and a fresh random sample of the rest.

    `log_weight_V` corrects for the sampling, so that the partition function is estimated without bias: log(rest/drawn)
    on drawn rows, 0 on the others.
    """

    ids_V: Tensor
    log_weight_V: Tensor
    index_of: Tensor

    @classmethod
    def draw(cls, kept: Tensor, vocab_size: int, num_random: int, generator: torch.Generator) -> HeadRows:
        is_rest = torch.ones(vocab_size, dtype=torch.bool)
        is_rest[kept] = False
        rest = is_rest.nonzero()[:, 0]
        drawn = rest[torch.randperm(len(rest), generator=generator)[:num_random]]
        ids = torch.cat([kept, drawn])
        log_weight = torch.zeros(len(ids))
        if len(drawn):
            log_weight[len(kept) :] = float(torch.log(torch.tensor(len(rest) / len(drawn))))
        index_of = torch.full((vocab_size,), -1)
        index_of[ids] = torch.arange(len(ids))
        return cls(ids, log_weight, index_of)


class Trainer:
    """One run in one folder. `run()` goes on from the last checkpoint in it, if there is one."""

    def __init__(self, recipe: Recipe, config: DraftConfig, head: FrozenHead, corpus: Corpus, folder: Path) -> None:
        self.recipe, self.config, self.head, self.corpus, self.folder = recipe, config, head, corpus, folder
        folder.mkdir(parents=True, exist_ok=True)
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
        self._corpus_ids = corpus.token_ids()
        self._rows: HeadRows | None = None
        self._head_rows_VE: Tensor | None = None
        state = folder / STATE_FILE
        if state.is_file():
            self._load(state)

    # ---- one step -------------------------------------------------------------------------------------------------
    def run(self, *, on_step: Callable[[dict[str, Any]], None] | None = None, stop_after: int | None = None) -> None:
        """Train up to the recipe's number of steps (or `stop_after`), checkpointing on the way and at the end."""
        last = self.recipe.optim.num_steps if stop_after is None else min(stop_after, self.recipe.optim.num_steps)
        while self.step < last:
            started = time.perf_counter()
            metrics = self.train_step()
            metrics["step_s"] = round(time.perf_counter() - started, 4)
            with (self.folder / METRICS_FILE).open("a", encoding="utf-8") as sink:
                sink.write(json.dumps(metrics) + "\n")
            if on_step is not None:
                on_step(metrics)
            if self.step % self.recipe.save_every_steps == 0 or self.step == last:
                self.save()

    def train_step(self) -> dict[str, Any]:
        """One optimiser step; returns its metrics. Raises FloatingPointError before any weight is touched by a NaN."""
        recipe = self.recipe
        if self.step % 25 == 0:
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
        if not torch.isfinite(loss):
            raise FloatingPointError(f"step {self.step}: the loss is {loss.item()}; lower optim.learning_rate")
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optim.max_grad_norm)
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
        """Total loss of the blocks and its metrics (all as plain floats)."""
        num_rows, num_blocks, length = blocks.ids_BKL.shape
        hidden_XLD = self._hidden(taps_BSNE, blocks)
        labels_XG = blocks.ids_BKL.view(-1, length)[:, 1:]
        weights_XG = blocks.weights_BKL.view(-1, length)[:, 1:]
        assert self._rows is not None and self._head_rows_VE is not None
        slots_XG = self._rows.index_of[labels_XG]
        weights_XG = weights_XG * (slots_XG >= 0)
        logits_XGV = self.model.scale_logits(F.linear(hidden_XLD[:, 1:], self._head_rows_VE)).float()
        weighted_XGV = logits_XGV + self._rows.log_weight_V
        nll_XG = F.cross_entropy(weighted_XGV.flatten(0, 1), slots_XG.clamp_min(0).flatten(), reduction="none")
        nll_XG = nll_XG.view_as(weights_XG)
        slot_weights_XG = self._slot_weights(nll_XG, weights_XG)
        loss = weighted_mean(nll_XG, slot_weights_XG)
        metrics = {"loss": float(loss.detach())}
        base_XG = logits_XGV.argmax(-1) == slots_XG
        metrics["prefix"] = _prefix_length(base_XG, weights_XG)
        if self.config.selector is not None:
            selected, more = self._selector(hidden_XLD, logits_XGV, blocks, weights_XG, slot_weights_XG)
            metrics.update(more)
            if self.step >= self.recipe.loss.selector_start_step:
                loss = loss + self.recipe.loss.selector_weight * selected
        return loss, metrics

    def _hidden(self, taps_BSNE: Tensor, blocks: Blocks) -> Tensor:
        length = blocks.ids_BKL.shape[-1]
        context_BSD = self.model.fuse(taps_BSNE)
        positions_S = torch.arange(context_BSD.shape[1])
        context = [self.model.context_kv(i, context_BSD, positions_S) for i in range(self.config.num_layers)]
        noise_ids = blocks.ids_BKL.view(-1, length).clone()
        noise_ids[:, 1:] = self.config.mask_token_id
        noise_XLD = F.embedding(noise_ids, self.head.embed_VE).float() * self.config.input_embedding_scale
        attend = block_attention(self.config.layers, context, blocks, self.config.attention.head_dim**-0.5)
        return self.model.block_forward(noise_XLD, blocks.positions_BKL.view(-1, length), attend)

    def _slot_weights(self, nll_XG: Tensor, weights_XG: Tensor) -> Tensor:
        loss = self.recipe.loss
        if loss.weighting == "dpace":
            return dpace_weights(nll_XG, weights_XG, loss.dpace_smoothing)
        return weights_XG * decay_weights(weights_XG.shape[-1], loss.decay_gamma)

    def _selector(
        self, hidden_XLD: Tensor, logits_XGV: Tensor, blocks: Blocks, weights_XG: Tensor, slot_weights_XG: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        selector = self.model.candidate_selector
        assert self._rows is not None and self.config.selector is not None and selector is not None
        ids_XL = blocks.ids_BKL.view(-1, blocks.ids_BKL.shape[-1])
        unary_XGM, slots_XGM = logits_XGV.topk(self.config.selector.top_k, dim=-1)
        candidates_XGM = self._rows.ids_V[slots_XGM]
        edge_XGM = selector.edges(hidden_XLD[:, 1:], ids_XL[:, :-1, None], candidates_XGM)[..., 0, :]
        nll_XG, hit_XG = selector_loss(unary_XGM, edge_XGM, candidates_XGM, ids_XL[:, 1:])
        picked_XG = candidates_XGM.gather(-1, (unary_XGM + edge_XGM).argmax(-1, keepdim=True))[..., 0]
        metrics = {
            "selector_loss": float(weighted_mean(nll_XG, hit_XG * slot_weights_XG).detach()),
            "recall": float(weighted_mean(hit_XG, weights_XG)),
            "selector_prefix": _prefix_length(picked_XG == ids_XL[:, 1:], weights_XG),
            "oracle_prefix": _prefix_length(hit_XG > 0, weights_XG),
        }
        return weighted_mean(nll_XG, hit_XG * slot_weights_XG), metrics

    # ---- data order and head rows ------------------------------------------------------------------------------------
    def _next_sequences(self, count: int) -> list[int]:
        picked = []
        while len(picked) < count:
            if not self._order:
                self._order = torch.randperm(len(self.corpus), generator=self.generator).tolist()
            picked.append(self._order.pop())
        return picked

    def _draw_rows(self) -> None:
        rows = HeadRows.draw(
            self._corpus_ids, self.config.vocab_size, self.recipe.loss.num_random_head_rows, self.generator
        )
        self._rows = rows
        dtype = torch.bfloat16 if self.recipe.optim.autocast == "bfloat16" else torch.float32
        self._head_rows_VE = self.head.head_VE[rows.ids_V].to(dtype)

    # ---- checkpoints ---------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state atomically: a kill at any moment leaves the previous checkpoint whole."""
        state = {
            "step": self.step,
            "num_blocks_seen": self.num_blocks_seen,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generator": self.generator.get_state(),
            "order": self._order,
            "rows": None if self._rows is None else self._rows.__dict__,
            "recipe": self.recipe.to_dict(),
        }
        temporary = self.folder / (STATE_FILE + ".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.folder / STATE_FILE)

    def _load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.step, self.num_blocks_seen = state["step"], state["num_blocks_seen"]
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.generator.set_state(state["generator"])
        self._order = state["order"]
        if state["rows"] is not None:
            self._rows = HeadRows(**state["rows"])
            dtype = torch.bfloat16 if self.recipe.optim.autocast == "bfloat16" else torch.float32
            self._head_rows_VE = self.head.head_VE[self._rows.ids_V].to(dtype)


def _prefix_length(right_XG: Tensor, weights_XG: Tensor) -> float:
    """Mean over blocks of the leading run of right proposals, plus the bonus; teacher-forced, so only a proxy."""
    run = torch.cumprod(right_XG.float() * weights_XG, -1).sum(-1)
    return round(float(run.mean()) + 1, 4)
