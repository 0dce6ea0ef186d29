"""The keys and values of each row, and one forward's attention over them.

A row's keys and values lie in a buffer of its own, so that no row is padded to the length of another: a loop over the
rows, with everything but the attention itself done once for all of them, costs a tenth more than one call over a common
padded buffer where all rows are equally long, and less where they are not.

Letters: B rows, F new positions of all rows, T of one row, S positions of a row in its cache, H query heads, K kv
heads, A head width, P = H / K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..contract import Row

__all__ = ["FusedRow", "Heads", "Places", "capacity"]

_SPARE = 64  # positions
_SPARE_SHARE = 16
_MAX_GROUPED = 32  # new positions of a row; beyond it a mask for every query head costs more than the keys read again


def capacity(num_positions: int) -> int:
    """Positions that a buffer has room for when it is made for ``num_positions``: a sixteenth more, at least 64.

    So at most 1/64 of what a row has read of its cache is ever copied on the way to a larger buffer.
    """
    return num_positions + max(_SPARE, num_positions // _SPARE_SHARE)


@dataclass(frozen=True, slots=True)
class Heads:
    """What all layers' attention has in common."""

    num_layers: int
    num_query: int
    num_kv: int
    width: int
    scale: float
    eps: float

    @property
    def group(self) -> int:
        return self.num_query // self.num_kv


class FusedRow(Row):
    """Keys and values [layers, 2, K, S, A] of one row; ``num_last`` positions came with the last forward."""

    def __init__(self, owner: object) -> None:
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

    def make_room(self, num_new: int, heads: Heads, like: Tensor) -> Tensor:
        """The row's buffer, with room for ``num_new`` positions more."""
        end = self.length + num_new
        if self.room is None or end > self.room.shape[-2]:
            room = like.new_empty((heads.num_layers, 2, heads.num_kv, capacity(end), heads.width))
            if self.room is not None:
                room[..., : self.length, :] = self.room[..., : self.length, :]
            self.room = room
        return self.room


class _Group:
    """Rows with the same number of new positions, which stand in a line: [start, start + B * T) of all."""

    def __init__(self, heads: Heads, queries_FHA: Tensor, rows: Sequence[FusedRow], length: int) -> None:
        self.heads, self.length = heads, length
        assert all(row.room is not None for row in rows)
        ends = [row.length + length for row in rows]
        rooms: list[Any] = [row.room for row in rows]
        self.keys = [room[:, 0:1, :, :end].unbind() for room, end in zip(rooms, ends, strict=True)]
        self.values = [room[:, 1:2, :, :end].unbind() for room, end in zip(rooms, ends, strict=True)]
        is_half = queries_FHA.device.type == "cpu" and queries_FHA.dtype == torch.bfloat16
        # One query a head is a vector product in bfloat16 on the CPU, faster than a matrix of the P heads of a group.
        self.is_grouped = heads.group > 1 and length <= _MAX_GROUPED and not (is_half and length == 1)
        query_BTHA = queries_FHA.unflatten(0, (len(rows), length))
        if self.is_grouped:
            query_BTHA = query_BTHA.unflatten(2, (heads.num_kv, heads.group))
            self.query = query_BTHA.permute(0, 2, 3, 1, 4)  # [B, K, P, T, A]
        else:
            self.query = query_BTHA.transpose(1, 2)  # [B, H, T, A]
        self.is_fresh = length > _MAX_GROUPED and not any(row.length for row in rows)
        self.masks = [None] * len(rows) if length == 1 or self.is_fresh else self._masks(ends)

    def _masks(self, ends: Sequence[int]) -> list[Tensor | None]:
        """Additive masks of new positions over all of a row's: views of that of the longest row."""
        like, longest = self.query, max(ends)
        mask_TS = like.new_zeros((self.length, longest))
        future = torch.ones((self.length, self.length), dtype=torch.bool, device=like.device).triu(1)
        mask_TS[:, longest - self.length :].masked_fill_(future, -torch.inf)
        if self.is_grouped:
            mask_TS = mask_TS.repeat(self.heads.group, 1)
        return [mask_TS[:, longest - end :] for end in ends]

    def attend(self, index: int) -> Tensor:
        """[B * T, H * A] of layer ``index``, from the queries as they are now."""
        settings: dict[str, Any] = {"scale": self.heads.scale, "is_causal": self.is_fresh}
        query = self.query
        if self.is_grouped:  # the query heads of one kv head become rows, so that keys are read once
            query = query.reshape(len(self.keys), self.heads.num_kv, -1, self.heads.width)
        else:
            settings["enable_gqa"] = self.heads.group > 1
        outs = [
            F.scaled_dot_product_attention(q, keys[index], values[index], attn_mask=mask, **settings)
            for q, keys, values, mask in zip(query.split(1), self.keys, self.values, self.masks, strict=True)
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if self.is_grouped:
            return out.unflatten(2, (self.heads.group, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class Places:
    """Where the new positions of one forward go and what they read: made once, used by every layer.

    Rows with the same number of new positions must be neighbours. ``cos_F1A`` and ``sin_F1A`` turn them; the first half
    of the sines has its sign changed.
    """

    def __init__(
        self,
        heads: Heads,
        rows: Sequence[FusedRow],
        lengths: Sequence[int],
        cos_F1A: Tensor,
        sin_F1A: Tensor,
    ) -> None:
        self.heads, self.cos_F1A, self.sin_F1A = heads, cos_F1A, sin_F1A
        rooms = [row.make_room(count, heads, cos_F1A) for row, count in zip(rows, lengths, strict=True)]
        self._num_turned = heads.num_query + heads.num_kv
        self._heads_FXA = cos_F1A.new_empty((sum(lengths), self._num_turned + heads.num_kv, heads.width))
        new_F2KA = self._heads_FXA[:, heads.num_query :].unflatten(1, (2, heads.num_kv))
        self._new = new_F2KA.split(list(lengths))
        slots = [
            room[..., row.length : row.length + count, :].permute(0, 3, 1, 2, 4).unbind()
            for row, count, room in zip(rows, lengths, rooms, strict=True)
        ]
        self._slots = list(zip(*slots, strict=True))  # by layer: [T, 2, K, A] of each row
        self._groups, start = [], 0
        for length, pairs in groupby(zip(lengths, rows, strict=True), key=itemgetter(0)):
            members = [row for _, row in pairs]
            end = start + length * len(members)
            self._groups.append(_Group(heads, self._heads_FXA[start:end, : heads.num_query], members, length))
            start = end

    def attend(self, index: int, qkv_FX: Tensor, head_norm: Tensor | None) -> Tensor:
        """[F, H * A] of layer ``index``; its new keys and values are written behind the others of their rows."""
        width, count = self.heads.width, self._num_turned
        all_FXA = qkv_FX.unflatten(-1, (-1, width))
        plain_FXA = all_FXA[:, :count]
        if head_norm is not None:
            plain_FXA = F.rms_norm(plain_FXA, (width,), None, self.heads.eps) * head_norm
        swapped_FXA = plain_FXA.roll(width // 2, -1)
        torch.addcmul(plain_FXA * self.cos_F1A, swapped_FXA, self.sin_F1A, out=self._heads_FXA[:, :count])
        self._heads_FXA[:, count:] = all_FXA[:, count:]
        torch._foreach_copy_(self._slots[index], self._new)
        outs = [group.attend(index) for group in self._groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)
