"""What a step minimises: the blocks' losses as plain sums, and the metrics that come with them.

Owns the order head, slot weights, selector. A loss is a quotient of sums over all processes, so sums are added up
before the division (a mean of means would depend on how blocks are dealt out). Knows no files and no optimiser.

Letters: B sequences, S positions, K blocks per sequence, X = B*K, L block length, G = L-1, Q = X*G, N taps, E target
width, D draft width, V rows of the head, M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.train.blocks import Blocks, block_hidden
from blockdraft.train.head import FrozenHead, HeadRows, LogitScale, SlotLosses, Teacher, slot_losses
from blockdraft.train.losses import decay_weights, dpace_weights, prefix_sum, selector_loss
from blockdraft.train.parallel import Parallel
from blockdraft.train.recipe import Recipe

__all__ = ["LossSums", "Objective"]

_TINY = 1e-6
# Metrics that are quotients of counts.
_SHARES = {"recall": "labels", "teacher_agrees": "labels", "nll": "labels"}
_PREFIXES = ("prefix", "selector_prefix", "oracle_prefix")


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over one process's blocks. `parts`: differentiable numerator of each loss; `counts`: everything else.

    A loss is its part over the count of the same name, added up over all processes.
    """

    parts: dict[str, Tensor]
    counts: dict[str, Tensor]


class Objective:
    """The recipe's loss for one draft and one target's head. `dtype` is the precision of the head's products."""

    def __init__(self, recipe: Recipe, model: DraftModel, head: FrozenHead, *, dtype: torch.dtype) -> None:
        self.recipe, self.model, self.dtype = recipe, model, dtype
        self.rows: HeadRows | None = None
        self._head, self._device = head, model.device
        self._embed_VE = head.embed_VE.to(self._device)
        self._final_norm_E = head.final_norm_E.to(self._device)
        self._rows: HeadRows | None = None
        self._rows_VE: Tensor | None = None
        config = model.config
        self._scale = LogitScale(config.output_multiplier, config.final_logit_softcapping)
        if recipe.loss.kind == "kl" and head.final_norm_eps is None:
            raise ConfigError(
                'loss.kind is "kl", which needs the target\'s final norm, and it was not found; set loss.kind=ce'
            )

    def use_rows(self, rows: HeadRows) -> None:
        """Run the softmax over these rows of the head from now on."""
        self.rows, self._rows = rows, rows.to(self._device)
        rows_VE = self._head.head_VE if rows.is_in_order else self._head.head_VE[rows.ids_V]
        self._rows_VE = rows_VE.to(device=self._device, dtype=self.dtype)

    def sums(self, taps_BSNE: Tensor, blocks: Blocks, step: int, last_BSE: Tensor | None = None) -> LossSums:
        """The sums of these blocks at 0-based `step`. Head rows must have been given.

        `last_BSE`, what the target's last layer put out, is what a teacher's distribution is made of.
        """
        assert self._rows is not None and self._rows_VE is not None
        length = blocks.ids_BKL.shape[-1]
        hidden_XLD = block_hidden(self.model, self._embed_VE, taps_BSNE, blocks)
        labels_XG = self._rows.index_of[blocks.ids_BKL.view(-1, length)[:, 1:]]
        weights_XG = blocks.weights_BKL.view(-1, length)[:, 1:] * (labels_XG >= 0)
        hidden_XGD = hidden_XLD[:, 1:]
        selector = self.model.config.selector
        slots = slot_losses(
            hidden_XGD.flatten(0, 1),
            self._rows_VE,
            self._rows,
            labels_XG.flatten(),
            num_candidates=1 if selector is None else selector.top_k,
            scale=self._scale,
            chunk=self.recipe.loss.head_chunk_blocks * (length - 1),
            teacher=self._teacher(last_BSE, blocks),
        )
        slot_weights_XG = self._slot_weights(slots.nll_Q.view_as(weights_XG), weights_XG)
        sums = LossSums(
            parts={"loss": (slots.loss_Q.view_as(weights_XG) * slot_weights_XG).sum()},
            counts={
                "loss": slot_weights_XG.sum(),
                "blocks": weights_XG.new_tensor(len(weights_XG)),
                "labels": weights_XG.sum(),
                "prefix": prefix_sum(slots.slots_QM[:, 0].view_as(labels_XG) == labels_XG, weights_XG),
            },
        )
        if slots.agrees_Q is not None:
            sums.counts["nll"] = (slots.nll_Q.view_as(weights_XG) * weights_XG).sum()
            sums.counts["teacher_agrees"] = (slots.agrees_Q.view_as(weights_XG) * weights_XG).sum()
        if selector is not None:
            is_trained = self._is_selector_trained(step)
            with torch.set_grad_enabled(torch.is_grad_enabled() and is_trained):
                self._add_selector(sums, hidden_XGD, slots, blocks, weights_XG, slot_weights_XG)
        return sums

    def total(self, sums: LossSums, step: int, parallel: Parallel) -> tuple[Tensor, dict[str, float]]:
        """(this process's part of the loss to differentiate, metrics over all processes) of 0-based `step`."""
        names = [*sums.parts, *sums.counts]
        values = torch.stack([value.detach() for value in (*sums.parts.values(), *sums.counts.values())])
        whole = parallel.sum_(values)
        count = dict(zip(names[len(sums.parts) :], whole[len(sums.parts) :], strict=True))
        loss = sums.parts["loss"] / count["loss"].clamp_min(_TINY)
        if "selector_loss" in sums.parts and self._is_selector_trained(step):
            selected = sums.parts["selector_loss"] / count["selector_loss"].clamp_min(_TINY)
            loss = loss + self.recipe.loss.selector_weight * selected
        number = dict(zip(names[len(sums.parts) :], whole[len(sums.parts) :].tolist(), strict=True))
        metrics = {
            name: value / max(number[name], _TINY)
            for name, value in zip(sums.parts, whole[: len(sums.parts)].tolist(), strict=True)
        }
        for name in _PREFIXES:
            if name in number:
                metrics[name] = round(number[name] / number["blocks"] + 1, 4)
        for name, of in _SHARES.items():
            if name in number:
                metrics[name] = number[name] / max(number[of], _TINY)
        return loss, metrics

    def _is_selector_trained(self, step: int) -> bool:
        loss = self.recipe.loss
        return loss.selector_weight > 0 and step >= loss.selector_start_step

    def _slot_weights(self, nll_XG: Tensor, weights_XG: Tensor) -> Tensor:
        loss = self.recipe.loss
        if loss.weighting == "dpace":
            return dpace_weights(nll_XG, weights_XG, loss.dpace_smoothing)
        if loss.weighting == "decay":
            return weights_XG * decay_weights(weights_XG.shape[-1], loss.decay_gamma).to(weights_XG.device)
        assert loss.weighting == "none", loss.weighting
        return weights_XG

    def _teacher(self, last_BSE: Tensor | None, blocks: Blocks) -> Teacher | None:
        """The target's final rows at the position before each label: what it would say there."""
        if self.recipe.loss.kind == "ce":
            return None
        if last_BSE is None:
            raise ConfigError(
                'loss.kind is "kl", and the corpus does not keep the target\'s last layer; write one for this recipe'
            )
        positions_BKG = blocks.positions_BKL[..., :-1].clamp_max(last_BSE.shape[1] - 1)
        width = last_BSE.shape[-1]
        places_BQE = positions_BKG.flatten(1)[..., None].expand(-1, -1, width)
        rows_QE = last_BSE.gather(1, places_BQE).flatten(0, 1).to(self.model.dtype)
        eps = self._head.final_norm_eps
        normed_QE = F.rms_norm(rows_QE, (width,), self._final_norm_E.to(rows_QE.dtype), eps)
        return Teacher(normed_QE, self.recipe.loss.kl_temperature)

    def _add_selector(
        self,
        sums: LossSums,
        hidden_XGD: Tensor,
        slots: SlotLosses,
        blocks: Blocks,
        weights_XG: Tensor,
        slot_weights_XG: Tensor,
    ) -> None:
        """The selector's loss, with the true token before each slot as predecessor, and its metrics."""
        selector = self.model.candidate_selector
        assert self._rows is not None and selector is not None
        ids_XL = blocks.ids_BKL.view(-1, blocks.ids_BKL.shape[-1])
        unary_XGM = slots.values_QM.unflatten(0, weights_XG.shape)
        if self.recipe.loss.selector_detached:
            unary_XGM, hidden_XGD = unary_XGM.detach(), hidden_XGD.detach()
        candidates_XGM = self._rows.ids_V[slots.slots_QM].view_as(unary_XGM)
        edge_XGM = selector.edges(hidden_XGD, ids_XL[:, :-1, None], candidates_XGM)[..., 0, :]
        nll_XG, hit_XG = selector_loss(unary_XGM, edge_XGM, candidates_XGM, ids_XL[:, 1:])
        picked_XG = candidates_XGM.gather(-1, (unary_XGM + edge_XGM).argmax(-1, keepdim=True))[..., 0]
        selected_XG = hit_XG * slot_weights_XG
        sums.parts["selector_loss"] = (nll_XG * selected_XG).sum()
        sums.counts.update(
            selector_loss=selected_XG.sum(),
            recall=(hit_XG * weights_XG).sum(),
            selector_prefix=prefix_sum(picked_XG == ids_XL[:, 1:], weights_XG),
            oracle_prefix=prefix_sum(hit_XG > 0, weights_XG),
        )
