"""The Llama, Mistral, Qwen2 and Qwen3 families as a target without per-layer overhead: many rows in one pass.

The new positions of all rows stand one after another in one matrix, without padding, so every projection is one
product; only attention goes row by row, over keys and values that lie where they were written. Query, key and value
projections are one matrix, gate and up another. Rolling back moves a counter. Owns these weights and buffers; the
transformers model is needed only while this one is made. Must not know drafts or requests.

Letters: F new positions of all rows, T of one row, S positions of a row in its cache, N taps, E target width, I MLP
width, H query heads, K kv heads, A head width, P = H / K, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import PairError
from blockdraft.packed import PackedLinear, can_pack

from .contract import Row, Scored, check_forward

__all__ = ["FusedTarget", "can_fuse"]

_MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")
_MIN_SPARE = 64  # positions of spare room a new buffer has at least
_ROWS_HINT = 16
_MAX_GROUPED_QUERIES = 32  # beyond it (prefill) repeating the keys costs less than a mask for every query head


def can_fuse(model: Any) -> bool:
    """Whether this transformers model is one that ``FusedTarget`` computes: its class, positions, windows, weights."""
    config = model.config
    if type(model).__name__ not in _MODEL_CLASSES or not type(model).__module__.startswith("transformers."):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    layer_types = set(getattr(config, "layer_types", None) or ())
    is_windowed = getattr(config, "sliding_window", None) is not None and (
        "sliding_attention" in layer_types or not layer_types
    )
    return (
        rope.get("rope_type", "default") in _STATIC_ROPES
        and not is_windowed
        and layer_types <= {"full_attention"}
        and config.hidden_act == "silu"
        and not hasattr(config, "quantization_config")
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, fused. ``head_norm`` [H + K, A] multiplies normalised query and key heads, where there is."""

    input_norm: Tensor
    qkv: nn.Module
    head_norm: Tensor | None
    out: nn.Module
    mlp_norm: Tensor
    gate_up: nn.Module
    down: nn.Module


class _FusedRow(Row):
    """Keys and values [layers, 2, K, S, A] of one row; ``num_last`` positions came with the last forward."""

    def __init__(self, owner: FusedTarget) -> None:
        self.owner = owner
        self.is_free = False
        self.room: Tensor | None = None
        self.length = 0
        self.num_last = 0

    @property
    def num_positions(self) -> int:
        return self.length

    @property
    def num_bytes(self) -> int:
        return 0 if self.room is None else self.room.nbytes

    @property
    def was_freed(self) -> bool:
        return self.is_free


class FusedTarget:
    """A target that holds the fused weights of a transformers model; the model itself may be dropped afterwards.

    Raises PairError when the fused computation does not give the model's own logits on a short probe.
    """

    tap_stream: TapStream = "prefix"

    def __init__(self, model: Any, facts: TargetFacts, tap_layer_ids: Sequence[int], *, pack: bool) -> None:
        config = model.config
        self.facts, self.tap_layer_ids = facts, tuple(tap_layer_ids)
        decoder = model.model
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        attention = decoder.layers[0].self_attn
        self._num_heads: int = config.num_attention_heads
        self._num_kv: int = config.num_key_value_heads
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self._eps: float = config.rms_norm_eps
        self._rotary = decoder.rotary_emb
        self._tables: tuple[Tensor, Tensor] | None = None
        self._layers = [self._fused_layer(layer, pack) for layer in decoder.layers]
        self._norm: Tensor = decoder.norm.weight.detach()
        self._head = _linear([model.lm_head], pack)
        self._check_against(model)

    def new_row(self) -> Row:
        return _FusedRow(self)

    def free(self, row: Row) -> None:
        owned = self._owned(row)
        owned.is_free, owned.room, owned.length, owned.num_last = True, None, 0, 0

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row, all rows in one pass; on an error every row is as it was."""
        owned = [self._owned(row) for row in rows]
        check_forward(ids, owned, num_logits, max_length=self.facts.max_length)
        if not owned:
            return []
        lengths = [x.shape[0] for x in ids]
        with torch.no_grad():
            logits, taps_FNE = self._run(torch.cat([x.to(self.device) for x in ids]), owned, lengths, num_logits)
        for row, count in zip(owned, lengths, strict=True):
            row.length += count
            row.num_last = count
        return [
            Scored(logits_TV=logits_TV, taps_TNE=taps_TNE)
            for logits_TV, taps_TNE in zip(logits, taps_FNE.split(lengths), strict=True)
        ]

    @property
    def can_truncate(self) -> bool:
        return True

    def copy(self, row: Row, length: int | None = None) -> Row:
        source = self._owned(row)
        if source.is_free:
            raise ValueError("this row was freed")
        kept = source.length if length is None else length
        if not 0 <= kept <= source.length:
            raise ValueError(f"cannot copy {kept} positions of a row that has {source.length}")
        made = _FusedRow(self)
        if source.room is not None and kept:
            self._make_room(made, kept)
            assert made.room is not None
            made.room[..., :kept, :] = source.room[..., :kept, :]
            made.length = kept
        return made

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        if len(rows) != len(keep):
            raise ValueError(f"rollback of {len(rows)} rows was given {len(keep)} numbers to keep")
        owned = [self._owned(row) for row in rows]
        for row, kept in zip(owned, keep, strict=True):
            if row.is_free or not 0 <= kept <= row.num_last:
                raise ValueError(f"cannot keep {kept} positions: the last forward left {row.num_last}")
        for row, kept in zip(owned, keep, strict=True):
            row.length -= row.num_last - kept
            row.num_last = kept

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return F.embedding(ids.to(self.device), self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self._head(hidden))

    # ---- one pass ----------------------------------------------------------------------------------------------------
    def _run(
        self, ids_F: Tensor, rows: list[_FusedRow], lengths: list[int], num_logits: int | None
    ) -> tuple[list[Tensor], Tensor]:
        """(logits [., V] of each row, taps_FNE). Writes keys and values past the rows' lengths, which stay."""
        for row, count in zip(rows, lengths, strict=True):
            self._make_room(row, count)
        cos_F1A, sin_F1A = self._rotation(rows, lengths)
        masks = [self._mask(row.length, count) for row, count in zip(rows, lengths, strict=True)]
        x_FE = F.embedding(ids_F, self._embedding)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            u_FE = F.rms_norm(x_FE, x_FE.shape[-1:], layer.input_norm, self._eps)
            heads_FHA, v_FKA = self._heads(layer, u_FE, cos_F1A, sin_F1A)
            out_FHA = torch.empty_like(heads_FHA[:, : self._num_heads])
            start = 0
            for row, count, mask in zip(rows, lengths, masks, strict=True):
                span = slice(start, start + count)
                out_FHA[span] = self._attend(row, index, heads_FHA[span], v_FKA[span], mask)
                start += count
            x_FE = x_FE + layer.out(out_FHA.flatten(-2))
            u_FE = F.rms_norm(x_FE, x_FE.shape[-1:], layer.mlp_norm, self._eps)
            gate_FI, up_FI = layer.gate_up(u_FE).chunk(2, dim=-1)
            x_FE = x_FE + layer.down(F.silu(gate_FI) * up_FI)
            if index in self.tap_layer_ids:
                taps[index] = x_FE
        if self.tap_layer_ids:
            taps_FNE = torch.stack([taps[i] for i in self.tap_layer_ids], dim=1)
        else:
            taps_FNE = x_FE.new_empty((x_FE.shape[0], 0, x_FE.shape[1]))
        return self._logits_of(x_FE, lengths, num_logits), taps_FNE

    def _heads(self, layer: _Layer, u_FE: Tensor, cos_F1A: Tensor, sin_F1A: Tensor) -> tuple[Tensor, Tensor]:
        """(rotated query heads and, behind them, key heads [F, H + K, A]; v_FKA)."""
        num_rotated = self._num_heads + self._num_kv
        all_FHA = layer.qkv(u_FE).unflatten(-1, (-1, self._head_dim))
        heads_FHA = all_FHA[:, :num_rotated]
        if layer.head_norm is not None:
            heads_FHA = F.rms_norm(heads_FHA, (self._head_dim,), None, self._eps) * layer.head_norm
        low_FHA, high_FHA = heads_FHA.chunk(2, dim=-1)
        turned_FHA = torch.cat((-high_FHA, low_FHA), dim=-1)
        return torch.addcmul(heads_FHA * cos_F1A, turned_FHA, sin_F1A), all_FHA[:, num_rotated:]

    def _attend(self, row: _FusedRow, index: int, heads_THA: Tensor, v_TKA: Tensor, mask: Tensor | None) -> Tensor:
        """out_THA of one row's new positions; their keys and values are written behind the row's others."""
        assert row.room is not None
        num_new, num_kv, group = heads_THA.shape[0], self._num_kv, self._num_heads // self._num_kv
        room_2KSA = row.room[index]
        end = row.length + num_new
        room_2KSA[0, :, row.length : end] = heads_THA[:, self._num_heads :].transpose(0, 1)
        room_2KSA[1, :, row.length : end] = v_TKA.transpose(0, 1)
        keys_KSA, values_KSA = room_2KSA[0, :, :end], room_2KSA[1, :, :end]
        q_THA = heads_THA[:, : self._num_heads]
        if num_new > _MAX_GROUPED_QUERIES:
            out_HTA = F.scaled_dot_product_attention(
                q_THA.transpose(0, 1)[None],
                keys_KSA.repeat_interleave(group, dim=0)[None],
                values_KSA.repeat_interleave(group, dim=0)[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self._scale,
            )[0]
            return out_HTA.transpose(0, 1)
        # The query heads of one kv head become rows, so that keys are read once and never repeated.
        q_KPTA = q_THA.view(num_new, num_kv, group, self._head_dim).permute(1, 2, 0, 3)
        q_KQA = q_KPTA.reshape(num_kv, group * num_new, self._head_dim)
        out_KQA = F.scaled_dot_product_attention(
            q_KQA[None], keys_KSA[None], values_KSA[None], attn_mask=mask, scale=self._scale
        )[0]
        out_KPTA = out_KQA.view(num_kv, group, num_new, self._head_dim)
        return out_KPTA.permute(2, 0, 1, 3).reshape(num_new, self._num_heads, self._head_dim)

    def _mask(self, num_before: int, num_new: int) -> Tensor | None:
        """Additive mask of a row's new positions over all of its positions; None where attention needs none."""
        is_prefill = num_new > _MAX_GROUPED_QUERIES
        if num_new == 1 or (is_prefill and num_before == 0):
            return None
        mask_TS = torch.zeros((num_new, num_before + num_new), dtype=self.dtype, device=self.device)
        future = torch.ones((num_new, num_new), dtype=torch.bool, device=self.device).triu(1)
        mask_TS[:, num_before:].masked_fill_(future, -torch.inf)
        return mask_TS if is_prefill else mask_TS.repeat(self._num_heads // self._num_kv, 1)

    def _logits_of(self, x_FE: Tensor, lengths: list[int], num_logits: int | None) -> list[Tensor]:
        if num_logits == 0:  # the head is a third of a small model: leave it out
            empty_0V = self._embedding.new_empty((0, self.facts.vocab_size))
            return [empty_0V for _ in lengths]
        kept = [count if num_logits is None else min(count, num_logits) for count in lengths]
        if kept != lengths:
            x_FE = torch.cat([x_TE[-count:] for x_TE, count in zip(x_FE.split(lengths), kept, strict=True)])
        logits_FV = self._head(F.rms_norm(x_FE, x_FE.shape[-1:], self._norm, self._eps))
        return list(logits_FV.split(kept))

    def _rotation(self, rows: list[_FusedRow], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """cos and sin [F, 1, A] of the new positions of all rows."""
        longest = max(row.length + count for row, count in zip(rows, lengths, strict=True))
        if self._tables is None or longest > self._tables[0].shape[0]:
            size = min(max(2 * longest, 512), max(self.facts.max_length, longest))
            positions = torch.arange(size, device=self.device)[None]
            cos, sin = self._rotary(self._embedding[:1], positions)
            self._tables = cos[0], sin[0]
        spans = [slice(row.length, row.length + count) for row, count in zip(rows, lengths, strict=True)]
        cos_FA, sin_FA = (torch.cat([table[span] for span in spans]) for table in self._tables)
        return cos_FA[:, None], sin_FA[:, None]

    def _make_room(self, row: _FusedRow, num_new: int) -> None:
        end = row.length + num_new
        if row.room is not None and end <= row.room.shape[-2]:
            return
        shape = (len(self._layers), 2, self._num_kv, end + max(end, _MIN_SPARE), self._head_dim)
        room = torch.empty(shape, dtype=self.dtype, device=self.device)
        if row.room is not None:
            room[..., : row.length, :] = row.room[..., : row.length, :]
        row.room = room

    # ---- checks and making -------------------------------------------------------------------------------------------
    def _owned(self, row: Row) -> _FusedRow:
        if not isinstance(row, _FusedRow) or row.owner is not self:
            raise ValueError("this row belongs to another target")
        return row

    def _fused_layer(self, layer: Any, pack: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            ones = attention.q_norm.weight.new_ones((1, self._head_dim))
            weights = (attention.q_norm.weight * ones).expand(self._num_heads, -1)
            head_norm = torch.cat([weights, (attention.k_norm.weight * ones).expand(self._num_kv, -1)]).detach()
        return _Layer(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], pack),
            head_norm=head_norm,
            out=_linear([attention.o_proj], pack),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=_linear([mlp.gate_proj, mlp.up_proj], pack),
            down=_linear([mlp.down_proj], pack),
        )

    def _check_against(self, model: Any) -> None:
        """A few ids through both: a family that computes something else shows now and not in a request."""
        count = min(6, self.facts.max_length)
        ids_T = torch.arange(count, device=self.device) * max(1, self.facts.vocab_size // 7)
        with torch.no_grad():
            expected_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
        row = self.new_row()
        [scored] = self.forward([ids_T], [row])
        self.free(row)
        error = float((scored.logits_TV - expected_TV).abs().max())
        # Rounding only (these models norm in float32 at least): a different formula is off by the logits' own size.
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)
        limit = float(expected_TV.abs().max()) * eps**0.5
        if not error <= limit:
            raise PairError(
                f"target family {self.facts.model_type!r}: the fused computation is off by {error:.2g} from"
                " transformers' own; load it with fused=False"
            )


def _linear(parts: Sequence[Any], pack: bool) -> nn.Module:
    """The parts below each other as one linear layer, packed for the CPU where asked and possible."""
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    has_bias = any(part.bias is not None for part in parts)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        biases = [p.weight.new_zeros(p.weight.shape[0]) if p.bias is None else p.bias.detach() for p in parts]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return PackedLinear(joined, rows_hint=_ROWS_HINT) if pack and can_pack(joined) else joined
