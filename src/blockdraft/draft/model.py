"""The drafter: fused target taps in, hidden rows of a block out.

Owns the network. One block computation serves generation and training; they differ only in the closure that
attends: ``forward`` attends over a row's cache, a trainer passes its own closure to ``block_forward``.
DFlash and DFlash 2, on grouped-query or latent attention, are this one model with parts absent or present by
config.
Knows config only: no targets, no requests, no files.

Letters: B rows, C newly committed positions, L block length, G = L - 1 proposals, N taps, E target width, D
draft width, H query heads, K kv heads, A width of queries and keys, W width of values, V vocabulary, M
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.draft.attention import Attention, attend_row
from blockdraft.draft.cache import DraftCache, visible_limit
from blockdraft.draft.conv import BlockConv, convolve
from blockdraft.draft.gqa import GroupedQueryAttention
from blockdraft.draft.heads import CandidateLists, CandidateSelector, Proposal, top_candidates, walk
from blockdraft.draft.mla import LatentAttention
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotary, Rotation
from blockdraft.errors import CheckpointError
from blockdraft.packed import pack_linears_

__all__ = ["Attend", "DraftModel"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q_BLHA, k_BLKA, v_BLKW) -> out_BLHW; q and k are already rotated to their positions."""


class Weights(Protocol):
    """What ``DraftModel.from_checkpoint`` reads of a checkpoint: canonical tensor names."""

    @property
    def config(self) -> DraftConfig: ...
    @property
    def tensors(self) -> dict[str, Tensor]: ...


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer. Both sublayers are wrapped in a block convolution when the config has one."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.attention_conv = BlockConv(config.hidden_size, config.conv) if config.conv is not None else None
        self.mlp_conv = BlockConv(config.hidden_size, config.conv) if config.conv is not None else None

    def context_kv(self, context_CD: Tensor, rotation: Rotation, *, absorbed: bool) -> tuple[Tensor, Tensor]:
        """(k_CKA, v_CKW) of committed positions; any leading axes."""
        attention: Attention = self.self_attn
        return attention.key_value(context_CD, rotation, absorbed=absorbed)

    def block(
        self,
        x_BLD: Tensor,
        rotation: Rotation,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        absorbed: bool,
    ) -> Tensor:
        """The layer's output for the rows of B separate blocks."""
        attention: Attention = self.self_attn

        def sublayer(u_BLD: Tensor) -> Tensor:
            q_BLHA = attention.query(u_BLD, rotation, absorbed=absorbed)
            k_BLKA, v_BLKW = attention.key_value(u_BLD, rotation, absorbed=absorbed)
            return attention.output(attend(q_BLHA, k_BLKA, v_BLKW), absorbed=absorbed)

        x_BLD = x_BLD + _wrapped(self.attention_conv, sublayer, self.input_layernorm(x_BLD))
        return x_BLD + _wrapped(self.mlp_conv, self.mlp, self.post_attention_layernorm(x_BLD))


def _attention(config: DraftConfig) -> GroupedQueryAttention | LatentAttention:
    if isinstance(config.attention, MlaConfig):
        return LatentAttention(config.attention, config.hidden_size, config.rms_norm_eps)
    return GroupedQueryAttention(config.attention, config.hidden_size, config.rms_norm_eps)


def _wrapped(conv: BlockConv | None, sublayer: Callable[[Tensor], Tensor], u_BLD: Tensor) -> Tensor:
    """The sublayer, or convolution, sublayer, convolution with both kernels made from the sublayer's normed
    input.
    """
    if conv is None:
        return sublayer(u_BLD)
    before, after = conv.kernels(u_BLD)
    return convolve(sublayer(convolve(u_BLD, before)), after)


class _Table(nn.Module):
    """A [V, D] matrix under the name ``weight``: an embedding or a head that the checkpoint brings itself."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


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
        self.embed_tokens = _Table(config.vocab_size, width) if has_embedding else None
        self.lm_head = _Table(config.vocab_size, width) if has_head else None
        self.mask_embedding = nn.Parameter(torch.empty(width)) if has_mask_embedding else None
        self._rotary = Rotary(config.rope, config.attention.rope_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, *, std: float = 0.02) -> None:
        """Start of training: normal weights, convolutions that pass through, a selector that adds nothing."""
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
        loaded = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
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
        """The checkpoint's own output head [V, D], None when the target's is used."""
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

    def block_forward(self, noise_BLD: Tensor, positions_BL: Tensor, attention: Attend) -> Tensor:
        """hidden_BLD of B separate blocks whose attention is the caller's; gradients flow.

        The caller multiplies scores by ``config.softmax_scale``.
        """
        return self._run(noise_BLD, self.rotation(positions_BL), attention, absorbed=False)

    def _run(self, x_BLD: Tensor, rotation: Rotation, attention: Attend, *, absorbed: bool) -> Tensor:
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                return attention(index, q, k, v)

            x_BLD = layer.block(x_BLD, rotation, attend, absorbed=absorbed)
        hidden_BLD: Tensor = self.norm(x_BLD)
        return hidden_BLD

    def new_cache(self) -> DraftCache:
        """An empty context for one row."""
        return DraftCache(self.config, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def inject(self, taps_CNE: Tensor, cache: DraftCache) -> None:
        """Commit C more positions to ``cache``: [cache.num_positions, cache.num_positions + C)."""
        num_new = taps_CNE.shape[0]
        if num_new == 0:
            return
        limit = None if self.config.max_window is None else self.config.max_window - 1
        num_fused = num_new if limit is None else min(num_new, limit)
        taps_CNE = taps_CNE[num_new - num_fused :].to(dtype=self.dtype, device=self.device)
        context_CD = self.fuse(taps_CNE)
        first = cache.num_positions + num_new - num_fused
        rotation = self._rotary.rows(first, num_fused, dtype=self.dtype, device=self.device)
        keys_values = []
        for layer, rule in zip(self.layers, self.config.layers, strict=True):
            assert isinstance(layer, Layer)
            seen = visible_limit(rule)
            skip = 0 if seen is None else max(0, num_fused - seen)
            turned = Rotation(rotation.cos[skip:], rotation.sin[skip:])
            keys_values.append(layer.context_kv(context_CD[skip:], turned, absorbed=True))
        cache.append(keys_values, num_new)

    @torch.no_grad()
    def forward(self, noise_BLD: Tensor, caches: Sequence[DraftCache]) -> Tensor:
        """hidden_BLD after the final norm; row b stands at [caches[b].num_positions, +L). Caches are only
        read.
        """
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

        return self._run(noise_BLD, rotation, attention, absorbed=True)

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
    ) -> Proposal:
        """G proposals for one block and the law they were drawn from.

        ``hidden_LD`` is the whole block, anchor row included; ``logits_GV`` is the bare head on rows 1 and up
        (multiplier and soft cap are applied here; both keep the order of ids). Temperature 0, and a model
        without selector at any temperature, gives fixed proposals with a one-hot law; otherwise each is drawn
        from softmax(score / temperature) over its candidates. ``exclude_ids`` are never proposed (the mask
        id, say): any q is lossless, so nothing is lost.
        """
        num_proposals = hidden_LD.shape[0] - 1
        assert logits_GV.shape[0] == num_proposals
        if num_proposals == 0:
            return Proposal(ids_G=torch.empty(0, dtype=torch.long, device=hidden_LD.device), q=None)
        selector = self.candidate_selector
        logits_GV = logits_GV if logits_GV.dtype == torch.float64 else logits_GV.float()
        count = 1 if selector is None else selector.top_k
        values_GM, ids_GM = top_candidates(logits_GV, count, exclude_ids)
        if selector is None:
            return Proposal(ids_G=ids_GM[:, 0], q=None)
        anchor_1M = torch.full_like(ids_GM[:1], anchor_id)
        predecessors_GP = torch.cat((anchor_1M, ids_GM[:-1]))
        edges_GPM = selector.edges(hidden_LD[1:], predecessors_GP, ids_GM)
        scores_GPM = self.scale_logits(values_GM)[:, None, :] + edges_GPM
        path, probs_GM = walk(scores_GPM, ids_GM, temperature, generator)
        index_G1 = torch.tensor(path, device=ids_GM.device)[:, None]
        ids_G = ids_GM.gather(1, index_G1)[:, 0]
        return Proposal(ids_G=ids_G, q=None if probs_GM is None else CandidateLists(ids_GM, probs_GM))


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
