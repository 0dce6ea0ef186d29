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
from blockdraft.draft.heads import CandidateSelector, Proposal, Table
from blockdraft.draft.injection import AdjacentInjection
from blockdraft.draft.layer import Layer
from blockdraft.draft.markov import ConfidenceHead, MarkovHead
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.proposing import BlockRows, CandidateLogits, propose_rows
from blockdraft.draft.rope import Rotary, Rotation
from blockdraft.errors import CheckpointError
from blockdraft.packed import pack_linears_

__all__ = ["Attend", "CandidateLogits", "DraftModel"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q_BLHA, k_BLKA, v_BLKW) -> out_BLHW; q and k are already rotated to their positions."""


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
                x_BLD = self.injection(x_BLD, self.codes(anchor_ids_B, x_BLD), index)
        if self.injection is not None:
            return x_BLD
        hidden_BLD: Tensor = self.norm(x_BLD)
        return hidden_BLD

    def codes(self, ids: Tensor | None, x: Tensor) -> Tensor:
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
        hidden_BLD: Tensor = self.norm(self.injection(x_BLD, self.codes(ids_B, x_BLD), len(self.layers) - 1))
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
        """G proposals for one block and the law they were drawn from: ``propose_rows`` of one."""
        block = BlockRows(hidden_LD, anchor_id, temperature, generator, min_confidence)
        [proposal] = self.propose_rows([block], logits_GV, exclude_ids=exclude_ids, candidate_logits=candidate_logits)
        return proposal

    @torch.no_grad()
    def propose_rows(
        self,
        blocks: Sequence[BlockRows],
        logits_KV: Tensor,
        *,
        exclude_ids: Sequence[int] = (),
        candidate_logits: CandidateLogits | None = None,
    ) -> list[Proposal]:
        """One proposal per block, each as if it were alone.

        ``logits_KV`` is the bare head on the rows that predict, block after block (multiplier and soft cap are applied
        here; both keep the order of ids). Temperature 0, and DFlash at any temperature, gives fixed proposals with a
        one-hot law; otherwise each is drawn from softmax(score / temperature), over its candidates or, in DSpark, over
        all ids. ``exclude_ids`` are never proposed (the mask id, say): any q is lossless, so nothing is lost. A draft
        with injection needs ``candidate_logits``.
        """
        return propose_rows(self, blocks, logits_KV, exclude_ids, candidate_logits)


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
