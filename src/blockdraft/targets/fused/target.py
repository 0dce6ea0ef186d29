"""The target itself: one unpadded pass over the new positions of all rows.

Every projection is one product over one matrix; only attention goes row by row. Rolling back moves a counter.

Letters: F new positions of all rows, T of one row, N taps, E target width, A head width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import PairError

from ..contract import Row, Scored, check_forward, checked_length
from .attention import FusedRow, Heads, Places
from .weights import Form, Norm, fused_layer, matrix

__all__ = ["FusedTarget", "can_fuse"]

_MODEL_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_STATIC_ROPES = ("default", "linear", "llama3", "yarn")


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


class FusedTarget:
    """A target that holds the fused weights of a transformers model; the model itself may be dropped afterwards.

    Raises PairError when the fused computation does not give the model's own logits on a short probe. With int8 weights
    it is another model by a little, and its texts are that model's.
    """

    tap_stream: TapStream = "prefix"
    can_truncate = True

    def __init__(
        self,
        model: Any,
        facts: TargetFacts,
        tap_layer_ids: Sequence[int],
        *,
        pack: bool,
        weights: Literal["int8"] | None = None,
    ) -> None:
        config, decoder = model.config, model.model
        form: Form = weights or ("packed" if pack else "plain")
        self.facts, self.tap_layer_ids = facts, tuple(tap_layer_ids)
        self._embedding: Tensor = decoder.embed_tokens.weight.detach()
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        attention = decoder.layers[0].self_attn
        self._heads = Heads(
            num_layers=len(decoder.layers),
            num_query=config.num_attention_heads,
            num_kv=config.num_key_value_heads,
            width=attention.head_dim,
            scale=attention.scaling,
            eps=config.rms_norm_eps,
        )
        self._rotary = decoder.rotary_emb
        self._turns_S2A: Tensor | None = None
        shape = self._heads
        self._layers = [fused_layer(layer, shape.num_query, shape.num_kv, shape.eps, form) for layer in decoder.layers]
        self._norm = Norm(decoder.norm.weight, shape.eps)
        self._head = matrix([model.lm_head], form)
        self._check_against(model, form)

    def new_row(self) -> Row:
        return FusedRow(self)

    def free(self, row: Row) -> None:
        owned = self._owned(row)
        owned.is_free, owned.room, owned.length, owned.num_last = True, None, 0, 0

    def copy(self, row: Row, length: int | None = None) -> Row:
        source = self._owned(row)
        kept = checked_length(source, length, can_truncate=self.can_truncate)
        made = FusedRow(self)
        if source.room is not None and kept:
            room = made.make_room(kept, self._heads, self._embedding)
            room[..., :kept, :] = source.room[..., :kept, :]
            made.length = kept
        return made

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row, all rows in one pass; on an error every row is as it was."""
        owned = [self._owned(row) for row in rows]
        check_forward(ids, owned, num_logits, max_length=self.facts.max_length)
        if not owned:
            return []
        order = sorted(range(len(ids)), key=lambda i: ids[i].shape[0])  # rows of one length are attended alike
        with torch.no_grad():
            found = self._run([ids[i].to(self.device) for i in order], [owned[i] for i in order], num_logits)
        scored: list[Any] = [None] * len(order)
        for i, one in zip(order, found, strict=True):
            owned[i].length += ids[i].shape[0]
            owned[i].num_last = ids[i].shape[0]
            scored[i] = one
        return scored

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
            return self._head(hidden)

    # ---- one pass ----------------------------------------------------------------------------------------------------
    def _run(self, ids: list[Tensor], rows: list[FusedRow], num_logits: int | None) -> list[Scored]:
        """What each row gives. Writes keys and values past the rows' lengths, which stay."""
        lengths = [x.shape[0] for x in ids]
        cos_F1A, sin_F1A = self._turns(rows, lengths)
        places = Places(self._heads, rows, lengths, cos_F1A, sin_F1A)
        x_FE = F.embedding(ids[0] if len(ids) == 1 else torch.cat(ids), self._embedding)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            mixed_FX = places.attend(index, layer.qkv(layer.input_norm(x_FE)), layer.head_norm)
            x_FE = layer.mlp(layer.out.plus(mixed_FX, x_FE))
            if index in self.tap_layer_ids:
                taps[index] = x_FE
        if self.tap_layer_ids:
            taps_FNE = torch.stack([taps[i] for i in self.tap_layer_ids], dim=1)
        else:
            taps_FNE = x_FE.new_empty((x_FE.shape[0], 0, x_FE.shape[1]))
        logits = self._logits_of(x_FE, lengths, num_logits)
        return [Scored(logits_TV=a, taps_TNE=b) for a, b in zip(logits, taps_FNE.split(lengths), strict=True)]

    def _logits_of(self, x_FE: Tensor, lengths: list[int], num_logits: int | None) -> list[Tensor]:
        if num_logits == 0:  # the head is a third of a small model: leave it out
            empty_0V = self._embedding.new_empty((0, self.facts.vocab_size))
            return [empty_0V for _ in lengths]
        kept = [count if num_logits is None else min(count, num_logits) for count in lengths]
        if kept != lengths:
            x_FE = torch.cat([x_TE[-count:] for x_TE, count in zip(x_FE.split(lengths), kept, strict=True)])
        return list(self._head(self._norm(x_FE)).split(kept))

    def _turns(self, rows: list[FusedRow], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """cos and signed sin [F, 1, A] of the new positions of all rows."""
        longest = max(row.length + count for row, count in zip(rows, lengths, strict=True))
        if self._turns_S2A is None or longest > self._turns_S2A.shape[0]:
            size = min(max(2 * longest, 512), max(self.facts.max_length, longest))
            positions = torch.arange(size, device=self.device)[None]
            cos, sin = self._rotary(self._embedding[:1], positions)
            sin[..., : sin.shape[-1] // 2].neg_()
            self._turns_S2A = torch.stack((cos[0], sin[0]), dim=1)
        places = [torch.arange(row.length, row.length + n) for row, n in zip(rows, lengths, strict=True)]
        turns_F2A = self._turns_S2A[torch.cat(places).to(self.device)]
        return turns_F2A[:, 0:1], turns_F2A[:, 1:2]

    # ---- checks ------------------------------------------------------------------------------------------------------
    def _owned(self, row: Row) -> FusedRow:
        if not isinstance(row, FusedRow) or row.owner is not self:
            raise ValueError("this row belongs to another target")
        return row

    def _check_against(self, model: Any, form: Form) -> None:
        """A few ids through both: a family that computes something else shows now and not in a request."""
        count = min(6, self.facts.max_length)
        ids_T = torch.arange(count, device=self.device) * max(1, self.facts.vocab_size // 7)
        with torch.no_grad():
            expected_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
        row = self.new_row()
        [scored] = self.forward([ids_T], [row])
        self.free(row)
        # Rounding only: a different formula is off by the logits' own size. By the median of the positions, since in
        # bfloat16 the first one, on which attention rests, is off by a quarter in transformers' own pass too.
        off_T = (scored.logits_TV - expected_TV).double().norm(dim=-1) / expected_TV.double().norm(dim=-1)
        error = float(off_T.median())
        eps = max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps)  # these models norm in float32 at least
        if form == "int8":
            eps = max(eps, 2.0**-5)
        if not error <= eps**0.5:
            raise PairError(
                f"target family {self.facts.model_type!r}: the fused computation is off by {error:.1%} from"
                " transformers' own; load it with fused=False"
            )
