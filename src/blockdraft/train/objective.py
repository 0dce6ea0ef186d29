"""What a step minimises: the blocks' losses as plain sums, and the metrics that come with them.

Owns the order head, slot weights, selector. A loss is a quotient of sums over all processes, so sums are added up
before the division (a mean of means would depend on how blocks are dealt out). Knows no files and no optimiser.

Letters: B sequences, S positions, K blocks per sequence, X = B*K, L block length, G = L-1, N taps, E target width,
D draft width, V rows of the restricted head, M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.train.blocks import Blocks, block_hidden
from blockdraft.train.head import FrozenHead
from blockdraft.train.losses import HeadRows, decay_weights, dpace_weights, prefix_sum, selector_loss
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import Recipe

__all__ = ["LossSums", "Objective"]

_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over one process's blocks. `parts`: differentiable numerator of each loss; `counts`: everything else.

    A loss is its part over the count of the same name, added up over all processes.
    """

    parts: dict[str, Tensor]
    counts: dict[str, Tensor]


class Objective:
    """The recipe's loss for one draft and one target's head."""

    def __init__(self, recipe: Recipe, model: DraftModel, head: FrozenHead) -> None:
        self.recipe, self.model, self.head = recipe, model, head
        self.rows: HeadRows | None = None
        self._head_rows_VE: Tensor | None = None

    def use_rows(self, rows: HeadRows) -> None:
        """Run the softmax over these rows of the head from now on."""
        dtype = torch.bfloat16 if self.recipe.optim.autocast == "bfloat16" else self.model.dtype
        self.rows, self._head_rows_VE = rows, self.head.head_VE[rows.ids_V].to(dtype)

    def sums(self, taps_BSNE: Tensor, blocks: Blocks) -> LossSums:
        """The sums of these blocks. Head rows must have been given."""
        length = blocks.ids_BKL.shape[-1]
        assert self.rows is not None and self._head_rows_VE is not None
        hidden_XLD = block_hidden(self.model, self.head.embed_VE, taps_BSNE, blocks)
        slots_XG = self.rows.index_of[blocks.ids_BKL.view(-1, length)[:, 1:]]
        weights_XG = blocks.weights_BKL.view(-1, length)[:, 1:] * (slots_XG >= 0)
        logits_XGV = self.model.scale_logits(F.linear(hidden_XLD[:, 1:], self._head_rows_VE)).float()
        nll_XG = self.rows.cross_entropy(logits_XGV, slots_XG)
        slot_weights_XG = self._slot_weights(nll_XG, weights_XG)
        sums = LossSums(
            parts={"loss": (nll_XG * slot_weights_XG).sum()},
            counts={
                "loss": slot_weights_XG.sum(),
                "blocks": torch.tensor(float(len(weights_XG))),
                "prefix": prefix_sum(logits_XGV.argmax(-1) == slots_XG, weights_XG),
            },
        )
        if self.model.candidate_selector is not None:
            self._add_selector(sums, hidden_XLD, logits_XGV, blocks, weights_XG, slot_weights_XG)
        return sums

    def total(self, sums: LossSums, step: int, parallel: Parallel) -> tuple[Tensor, dict[str, float]]:
        """(loss to differentiate, metrics over all processes) of 0-based `step`."""
        counts = parallel.sum_(torch.stack([count.detach() for count in sums.counts.values()]))
        values = parallel.sum_(torch.stack([part.detach() for part in sums.parts.values()]))
        count = dict(zip(sums.counts, counts, strict=True))
        loss = sums.parts["loss"] / count["loss"].clamp_min(_TINY)
        if "selector_loss" in sums.parts and step >= self.recipe.loss.selector_start_step:
            selected = sums.parts["selector_loss"] / count["selector_loss"].clamp_min(_TINY)
            loss = loss + self.recipe.loss.selector_weight * selected
        metrics = {
            name: float(value / count[name].clamp_min(_TINY)) for name, value in zip(sums.parts, values, strict=True)
        }
        for name in ("prefix", "selector_prefix", "oracle_prefix"):
            if name in count:
                metrics[name] = round(float(count[name] / count["blocks"]) + 1, 4)
        if "recall" in count:
            metrics["recall"] = float(count["recall"] / count["labels"].clamp_min(_TINY))
        return loss, metrics

    def _slot_weights(self, nll_XG: Tensor, weights_XG: Tensor) -> Tensor:
        loss = self.recipe.loss
        if loss.weighting == "dpace":
            return dpace_weights(nll_XG, weights_XG, loss.dpace_smoothing)
        return weights_XG * decay_weights(weights_XG.shape[-1], loss.decay_gamma)

    def _add_selector(
        self,
        sums: LossSums,
        hidden_XLD: Tensor,
        logits_XGV: Tensor,
        blocks: Blocks,
        weights_XG: Tensor,
        slot_weights_XG: Tensor,
    ) -> None:
        """The selector's loss, with the true token before each slot as predecessor, and its metrics."""
        selector, config = self.model.candidate_selector, self.model.config.selector
        assert self.rows is not None and config is not None and selector is not None
        ids_XL = blocks.ids_BKL.view(-1, blocks.ids_BKL.shape[-1])
        num_candidates = min(config.top_k, logits_XGV.shape[-1])
        unary_XGM, slots_XGM = logits_XGV.topk(num_candidates, dim=-1)
        candidates_XGM = self.rows.ids_V[slots_XGM]
        edge_XGM = selector.edges(hidden_XLD[:, 1:], ids_XL[:, :-1, None], candidates_XGM)[..., 0, :]
        nll_XG, hit_XG = selector_loss(unary_XGM, edge_XGM, candidates_XGM, ids_XL[:, 1:])
        picked_XG = candidates_XGM.gather(-1, (unary_XGM + edge_XGM).argmax(-1, keepdim=True))[..., 0]
        selected_XG = hit_XG * slot_weights_XG
        sums.parts["selector_loss"] = (nll_XG * selected_XG).sum()
        sums.counts.update(
            selector_loss=selected_XG.sum(),
            recall=(hit_XG * weights_XG).sum(),
            labels=weights_XG.sum(),
            selector_prefix=prefix_sum(picked_XG == ids_XL[:, 1:], weights_XG),
            oracle_prefix=prefix_sum(hit_XG > 0, weights_XG),
        )
