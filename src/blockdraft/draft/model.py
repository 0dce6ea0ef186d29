"""The drafter: fused target taps in, hidden rows of a block out.

Owns the network. One block computation serves generation and training; they differ only in the closure that
attends: ``forward`` attends over a row's cache, a trainer passes its own closure to ``block_forward``.
DFlash, DFlash 2, DSpark and DSpine, on grouped-query or latent attention, are this one model with parts absent or
present by config.
Knows config only: no targets, no requests, no files.

Letters: B rows, C newly committed positions, L block length, G proposals (the rows that predict: all of them, or all
but the anchor's), N taps, E target width, D
draft width, H query heads, K kv heads, A width of queries and keys, W width of values, V vocabulary, M
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import DraftConfig
from blockdraft.draft.attention import attend_row
from blockdraft.draft.cache import DraftCache, visible_limit
from blockdraft.draft.conv import BlockConv
from blockdraft.draft.heads import (
    CandidateLists,
    CandidateSelector,
    FullLaw,
    Proposal,
    Table,
    top_candidates,
    walk,
)
from blockdraft.draft.injection import AdjacentInjection, rescored_walk
from blockdraft.draft.layer import Layer
from blockdraft.draft.markov import ConfidenceHead, MarkovHead, chain, each_alone
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotary, Rotation
from blockdraft.errors import CheckpointError
from blockdraft.packed import pack_linears_

__all__ = ["Attend", "CandidateLogits", "DraftModel"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q_BLHA, k_BLKA, v_BLKW) -> out_BLHW; q and k are already rotated to their positions."""

CandidateLogits = Callable[[Tensor, Tensor], Tensor]
"""(hidden_GD, ids_GM) -> [G, M]: the bare head on rows, of some ids each."""


class Weights(Protocol):
    """What ``DraftModel.from_checkpoint`` reads of a checkpoint: canonical tensor names."""

    @property
    def config(self) -> DraftConfig: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...


class DraftModel(nn.Module):
    """A drafter. Parameter names are the canonical names of its checkpoint, so ``state_dict`` is the
    checkpoint.
    """

    def __init__(
        self,
        config: DraftConfig,
        *,
        has_embedding: bool = False,
        has_head: bool = False,
        has_mask_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, width, bias=False)
        self.fc_norm: nn.ModuleList | None = None
        if config.has_tap_norms:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in config.target_layer_ids
            )
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in config.layers)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if config.selector is not None:
            self.candidate_selector = CandidateSelector(width, config.vocab_size, config.selector)
        self.markov_head: MarkovHead | None = None
        if config.markov is not None:
            self.markov_head = MarkovHead(width, config.vocab_size, config.markov)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence is not None:
            self.confidence_head = ConfidenceHead(width, config.confidence, config.markov)
        self.injection: AdjacentInjection | None = None
        self.transfer_codes: nn.Parameter | None = None
        if config.injection is not None:
            self.injection = AdjacentInjection(width, config.num_layers, config.injection)
            self.transfer_codes = nn.Parameter(torch.empty(config.vocab_size, config.injection.transfer_rank))
        self.embed_tokens = Table(config.vocab_size, width) if has_embedding else None
        is_reduced = config.draft_vocab_size is not None
        self.lm_head = Table(config.num_head_rows, width) if has_head or is_reduced else None
        self.head_ids: Tensor | None
        self.register_buffer("head_ids", torch.arange(config.num_head_rows) if is_reduced else None)
        self.mask_embedding = nn.Parameter(torch.empty(width)) if has_mask_embedding else None
        self._rotary = Rotary(config.rope, config.attention.rope_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, *, std: float = 0.02) -> None:
        """Start of training: normal weights, convolutions that pass through, heads and injections that add nothing."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std)
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, BlockConv):
                module.reset_to_identity()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        if self.candidate_selector is not None:
            self.candidate_selector.successor_codebook.zero_()
        if self.markov_head is not None:
            self.markov_head.markov_w2.weight.zero_()
        if self.injection is not None and self.transfer_codes is not None:
            for write in self.injection.writes:
                nn.init.zeros_(write.weight)  # type: ignore[arg-type]
            self.injection.predecessor_gate.weight.zero_()
            self.transfer_codes.copy_(F.normalize(self.transfer_codes, dim=-1))
        if self.mask_embedding is not None:
            self.mask_embedding.normal_(0.0, std)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Weights,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> DraftModel:
        """The model with a checkpoint's weights, ready for inference: no gradients
        (``requires_grad_(True)`` to train).

        Without ``dtype`` or ``device`` the tensors stay as they are. Missing, left-over and misshapen
        tensors are errors.
        """
        tensors = checkpoint.tensors
        with torch.device("meta"):
            model = cls(
                checkpoint.config,
                has_embedding="embed_tokens.weight" in tensors,
                has_head="lm_head.weight" in tensors,
                has_mask_embedding="mask_embedding" in tensors,
            )
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        _check_names(expected, tensors)
        loaded = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        model.load_state_dict(loaded, strict=True, assign=True)
        return model.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def max_length(self) -> int:
        """Positions the draft was made for: a block must end at or before it. Beyond it the caller stops
        drafting.
        """
        return self.config.max_position_embeddings

    @property
    def own_embedding(self) -> Tensor | None:
        """The checkpoint's own input embedding [V, D], None when the target's is used."""
        return None if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def own_head(self) -> Tensor | None:
        """The checkpoint's own output head [V, D], None when the target's is used. With a reduced vocabulary it has a
        row for each of ``head_ids``, which are the target's ids.
        """
        return None if self.lm_head is None else self.lm_head.weight

    def pack_(self, *, rows_hint: int | None = None) -> int:
        """The number of linear layers repacked for CPU inference, in place; no training afterwards (see
        ``packed``).
        """
        return pack_linears_(self, rows_hint=self.config.block_size if rows_hint is None else rows_hint)

    def noise(self, anchor_ids: Sequence[int] | Tensor, length: int, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """noise_BLD of B blocks [anchor, mask, ...], each ``length`` long.

        ``embed`` gives raw rows of the target's input embedding for ids; an embedding of the draft's own
        goes before it, and a learned mask embedding takes the mask id's place. ``input_embedding_scale`` is
        applied here, once.
        """
        anchors = torch.as_tensor(anchor_ids, dtype=torch.long, device=self.device)
        ids = F.pad(anchors, (0, 1), value=self.config.mask_token_id)
        own = self.own_embedding
        rows = (embed(ids) if own is None else F.embedding(ids, own)).to(dtype=self.dtype, device=self.device)
        if self.mask_embedding is not None:
            rows = torch.where((ids == self.config.mask_token_id)[:, None], self.mask_embedding, rows)
        if self.config.input_embedding_scale != 1.0:
            rows = rows * self.config.input_embedding_scale
        masks_BLD = rows[-1].expand(len(anchors), length - 1, -1)
        return torch.cat((rows[:-1, None], masks_BLD), dim=1)

    def fuse(self, taps_CNE: Tensor) -> Tensor:
        """context_CD of target taps in the order of ``target_layer_ids``; any leading axes."""
        expected = (self.config.num_taps, self.config.target_hidden_size)
        if tuple(taps_CNE.shape[-2:]) != expected:
            raise ValueError(f"taps of shape {tuple(taps_CNE.shape)}: the last two axes must be {expected}")
        if self.fc_norm is not None:
            taps_CNE = torch.stack([norm(taps_CNE[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        context_CD: Tensor = self.hidden_norm(self.fc(taps_CNE.flatten(-2)))
        return context_CD

    def rotation(self, positions_L: Tensor) -> Rotation:
        """cos and sin of any positions, for ``Layer.context_kv`` and ``Layer.block``."""
        return self._rotary.at(positions_L, dtype=self.dtype)

    def context_kv(self, layer_index: int, context_CD: Tensor, positions_C: Tensor) -> tuple[Tensor, Tensor]:
        """(k_CKA, v_CKW) of fused context rows in one layer, for ``block_forward``; any leading axes, gradients
        flow.
        """
        layer = self.layers[layer_index]
        assert isinstance(layer, Layer)
        return layer.context_kv(context_CD, self.rotation(positions_C), absorbed=False)

    def block_forward(
        self, noise_BLD: Tensor, positions_BL: Tensor, attention: Attend, anchor_ids_B: Tensor | None = None
    ) -> Tensor:
        """Rows of B separate blocks, as ``forward`` gives them, whose attention is the caller's; gradients flow.

        The caller multiplies scores by ``config.softmax_scale``.
        """
        return self._run(noise_BLD, self.rotation(positions_BL), attention, anchor_ids_B, absorbed=False)

    def _run(
        self, x_BLD: Tensor, rotation: Rotation, attention: Attend, anchor_ids_B: Tensor | None, *, absorbed: bool
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                return attention(index, q, k, v)

            x_BLD = layer.block(x_BLD, rotation, attend, absorbed=absorbed)
            if self.injection is not None and index < len(self.layers) - 1:
                x_BLD = self.injection(x_BLD, self._codes(anchor_ids_B, x_BLD), index)
        if self.injection is not None:
            return x_BLD
        hidden_BLD: Tensor = self.norm(x_BLD)
        return hidden_BLD

    def _codes(self, ids: Tensor | None, x: Tensor) -> Tensor:
        """What a token itself tells the row after it, [..., R]."""
        assert self.transfer_codes is not None and self.injection is not None and ids is not None
        return (self.injection.rank**0.5 * self.transfer_codes[ids]).to(x.dtype)

    def head_rows(self, x_BLD: Tensor, anchor_ids: Sequence[int] | Tensor) -> Tensor:
        """hidden_BLD that the output head reads, of the rows that ``forward`` gave: with injection, the last layer's
        message and the final norm are still to come; otherwise they are the same.
        """
        if self.injection is None:
            return x_BLD
        ids_B = torch.as_tensor(anchor_ids, dtype=torch.long, device=self.device)
        hidden_BLD: Tensor = self.norm(self.injection(x_BLD, self._codes(ids_B, x_BLD), len(self.layers) - 1))
        return hidden_BLD

    def new_cache(self) -> DraftCache:
        """An empty context for one row."""
        return DraftCache(self.config, dtype=self.dtype, device=self.device)

    def inject(self, taps_CNE: Tensor, cache: DraftCache) -> None:
        """Commit C more positions to ``cache``: [cache.num_positions, cache.num_positions + C)."""
        self.inject_rows([taps_CNE], [cache])

    @torch.no_grad()
    def inject_rows(self, taps: Sequence[Tensor], caches: Sequence[DraftCache]) -> None:
        """Commit the positions of taps[i], a [C_i, N, E], to caches[i]: all rows in one pass of each projection."""
        if len(taps) != len(caches) or len(set(map(id, caches))) != len(caches):
            raise ValueError(f"taps of {len(taps)} rows for {len(caches)} caches: one for each, no cache twice")
        limit = None if self.config.max_window is None else self.config.max_window - 1
        parts, rotations, counts, written = [], [], [], []
        for taps_CNE, cache in zip(taps, caches, strict=True):
            num_new = taps_CNE.shape[0]
            if num_new == 0:
                continue
            count = num_new if limit is None else min(num_new, limit)
            first = cache.num_positions + num_new - count
            parts.append(taps_CNE[num_new - count :])
            rotations.append(self._rotary.rows(first, count, dtype=self.dtype, device=self.device))
            counts.append(count)
            written.append((cache, num_new))
        if not written:
            return
        taps_CNE = parts[0] if len(parts) == 1 else torch.cat(parts)
        context_CD = self.fuse(taps_CNE.to(dtype=self.dtype, device=self.device))
        keys_values = self._context(context_CD, rotations, counts)
        for index, (cache, num_new) in enumerate(written):
            cache.append([pairs[index] for pairs in keys_values], num_new)

    def _context(
        self, context_CD: Tensor, rotations: Sequence[Rotation], counts: Sequence[int]
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Per layer and row, (k, v) of those of its positions that a later block can see; the rows stand in a line."""
        rows_CD = context_CD.split(list(counts))
        keys_values = []
        for layer, rule in zip(self.layers, self.config.layers, strict=True):
            assert isinstance(layer, Layer)
            seen = visible_limit(rule)
            skips = [0 if seen is None else max(0, count - seen) for count in counts]
            hidden_CD = torch.cat([row[skip:] for row, skip in zip(rows_CD, skips, strict=True)])
            cos, sin = (
                torch.cat([turn[skip:] for turn, skip in zip(turns, skips, strict=True)])
                for turns in zip(*rotations, strict=True)
            )
            k_CKA, v_CKW = layer.context_kv(hidden_CD, Rotation(cos, sin), absorbed=True)
            kept = [count - skip for count, skip in zip(counts, skips, strict=True)]
            keys_values.append(list(zip(k_CKA.split(kept), v_CKW.split(kept), strict=True)))
        return keys_values

    @torch.no_grad()
    def forward(
        self, noise_BLD: Tensor, caches: Sequence[DraftCache], anchor_ids: Sequence[int] | None = None
    ) -> Tensor:
        """hidden_BLD after the final norm; row b stands at [caches[b].num_positions, +L). Caches are only
        read.

        A draft with injection needs the anchors' ids, and gives its rows before the last message and the norm (see
        ``head_rows``): its candidates are scored from these.
        """
        anchor_ids_B = None if anchor_ids is None else torch.tensor(anchor_ids, device=self.device)
        length = noise_BLD.shape[1]
        rows = [
            self._rotary.rows(cache.num_positions, length, dtype=self.dtype, device=self.device) for cache in caches
        ]
        rotation = rows[0]
        if len(rows) > 1:
            rotation = Rotation(torch.stack([row.cos for row in rows]), torch.stack([row.sin for row in rows]))

        scale = self.config.softmax_scale

        def attention(index: int, q_BLHA: Tensor, k_BLKA: Tensor, v_BLKW: Tensor) -> Tensor:
            rule = self.config.layers[index]
            return torch.stack(
                [
                    attend_row(q_BLHA[b], k_BLKA[b], v_BLKW[b], cache.layer(index), rule, scale)
                    for b, cache in enumerate(caches)
                ]
            )

        return self._run(noise_BLD, rotation, attention, anchor_ids_B, absorbed=True)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Draft logits of raw head outputs: the output multiplier, then the soft cap."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.no_grad()
    def propose(
        self,
        hidden_LD: Tensor,
        anchor_id: int,
        logits_GV: Tensor,
        temperature: float,
        generator: torch.Generator | None,
        *,
        exclude_ids: Sequence[int] = (),
        min_confidence: float = 0.0,
        candidate_logits: CandidateLogits | None = None,
    ) -> Proposal:
        """G proposals for one block and the law they were drawn from.

        ``hidden_LD`` is the whole block, anchor row included, as ``forward`` gave it; ``logits_GV`` is the bare head
        on the rows that predict (multiplier and soft cap are applied here; both keep the order of ids). Temperature
        0, and DFlash at any temperature, gives fixed proposals with a one-hot law; otherwise each is drawn from
        softmax(score / temperature), over its candidates or, in DSpark, over all ids. ``exclude_ids`` are never
        proposed (the mask id, say): any q is lossless, so nothing is lost. Proposals end before the first row
        whose confidence is below ``min_confidence``. A draft with injection needs ``candidate_logits``.
        """
        hidden_GD = hidden_LD if self.config.predicts_from_anchor else hidden_LD[1:]
        assert logits_GV.shape[0] == hidden_GD.shape[0]
        if len(hidden_GD) == 0:
            return Proposal(ids_G=torch.empty(0, dtype=torch.long, device=hidden_LD.device), q=None)
        logits_GV = logits_GV if logits_GV.dtype == torch.float64 else logits_GV.float()
        if self.markov_head is not None or (self.config.family == "dspark" and temperature != 0.0):
            proposal = self._spark(hidden_GD, anchor_id, logits_GV, temperature, generator, exclude_ids)
        elif self.candidate_selector is not None:
            proposal = self._selected(hidden_GD, anchor_id, logits_GV, temperature, generator, exclude_ids)
        elif self.injection is not None:
            assert candidate_logits is not None, "a draft with injection scores its candidates with the head again"
            _, ids_GM = top_candidates(logits_GV, self._num_candidates, exclude_ids)
            rescore = self._rescore(hidden_GD, ids_GM, candidate_logits)
            ids_G, probs_GM = rescored_walk(rescore, ids_GM, anchor_id, temperature, generator)
            proposal = Proposal(ids_G, None if probs_GM is None else CandidateLists(ids_GM, probs_GM))
        else:
            proposal = Proposal(self._likeliest(logits_GV, exclude_ids), None)
        if min_confidence == 0.0 or self.confidence_head is None:
            return proposal
        return proposal.first(self._num_confident(hidden_GD, anchor_id, proposal.ids_G, min_confidence))

    def _likeliest(self, logits_GV: Tensor, exclude_ids: Sequence[int]) -> Tensor:
        """ids_G of the largest logits, as the target counts them."""
        if self.head_ids is None:
            return top_candidates(logits_GV, 1, exclude_ids)[1][:, 0]
        barred = torch.isin(self.head_ids, torch.tensor(exclude_ids, device=self.head_ids.device))
        rows_G = top_candidates(logits_GV, 1, barred.nonzero()[:, 0].tolist())[1][:, 0]
        return self.head_ids[rows_G]

    def _spark(
        self,
        hidden_GD: Tensor,
        anchor_id: int,
        logits_GV: Tensor,
        temperature: float,
        generator: torch.Generator | None,
        exclude_ids: Sequence[int],
    ) -> Proposal:
        """Laws over all ids: along the block with a Markov head, otherwise of each row alone."""
        logits_GV = self.scale_logits(logits_GV)
        if exclude_ids:
            logits_GV = logits_GV.clone()
            logits_GV[:, list(exclude_ids)] = -torch.inf
        if self.markov_head is None:
            ids_G, q_GV = each_alone(logits_GV, temperature, generator)
            return Proposal(ids_G, FullLaw(q_GV))
        ids_G, probs_GV = chain(self.markov_head, logits_GV, hidden_GD, anchor_id, temperature, generator)
        return Proposal(ids_G, None if probs_GV is None else FullLaw(probs_GV))

    @property
    def _num_candidates(self) -> int:
        assert self.config.injection is not None
        return self.config.injection.top_k

    def _selected(
        self,
        hidden_GD: Tensor,
        anchor_id: int,
        logits_GV: Tensor,
        temperature: float,
        generator: torch.Generator | None,
        exclude_ids: Sequence[int],
    ) -> Proposal:
        """The selector's walk over its candidates."""
        selector = self.candidate_selector
        assert selector is not None
        values_GM, ids_GM = top_candidates(logits_GV, selector.top_k, exclude_ids)
        anchor_1M = torch.full_like(ids_GM[:1], anchor_id)
        predecessors_GP = torch.cat((anchor_1M, ids_GM[:-1]))
        edges_GPM = selector.edges(hidden_GD, predecessors_GP, ids_GM)
        scores_GPM = self.scale_logits(values_GM)[:, None, :] + edges_GPM
        path, probs_GM = walk(scores_GPM, ids_GM, temperature, generator)
        index_G1 = torch.tensor(path, device=ids_GM.device)[:, None]
        ids_G = ids_GM.gather(1, index_G1)[:, 0]
        return Proposal(ids_G=ids_G, q=None if probs_GM is None else CandidateLists(ids_GM, probs_GM))

    def _rescore(self, x_GD: Tensor, ids_GM: Tensor, candidate_logits: CandidateLogits) -> Callable[..., Tensor]:
        """Scores of a row's candidates when the last message comes from the token really proposed before."""
        injection, last = self.injection, len(self.layers) - 1
        assert injection is not None

        def rescore(row: int, previous_id: Tensor) -> Tensor:
            x_1D = x_GD[row][None]
            written_1D = injection.write(
                x_1D, injection.readout(x_1D, last), self._codes(previous_id[None], x_1D), last
            )
            scores_1M = candidate_logits(self.norm(written_1D), ids_GM[row][None])
            scores_1M = self.scale_logits(scores_1M if scores_1M.dtype == torch.float64 else scores_1M.float())
            return scores_1M[0]

        return rescore

    def _num_confident(self, hidden_GD: Tensor, anchor_id: int, ids_G: Tensor, least: float) -> int:
        """How many rows stand before the first whose confidence is below ``least``."""
        assert self.confidence_head is not None and self.config.confidence is not None
        token_GR = None
        if self.config.confidence.reads_token:
            assert self.markov_head is not None
            anchor_1 = torch.tensor([anchor_id], device=ids_G.device)
            token_GR = self.markov_head.markov_w1.weight[torch.cat((anchor_1, ids_G[:-1]))]
        is_low_G = ~(self.confidence_head(hidden_GD, token_GR) >= least)
        return int((is_low_G.cumsum(dim=-1) == 0).sum())


def _check_names(expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    left_over = sorted(tensors.keys() - expected.keys())
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {shape}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    found = [
        f"{what}: {', '.join(names)}"
        for what, names in (("missing", missing), ("left over", left_over), ("misshapen", wrong))
        if names
    ]
    if found:
        raise CheckpointError("the checkpoint's tensors do not match its config: " + "; ".join(found))
