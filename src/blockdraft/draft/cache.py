"""What a draft keeps of committed positions, per layer, append-only: keys and values, or latents.

Owns the buffers of one row: preallocated, grown by doubling, and for a sliding layer compacted so that only
positions that a later query can see are kept. Nothing of a block ever enters, hence nothing is ever rolled
back. Knows config only, no model.

Letters: C newly committed positions, S positions kept, K kv heads (1 for latents), A key width, W value width,
N parts kept: keys and values, or only keys where the values are the first W columns of them.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from blockdraft.config import AttentionConfig, DraftConfig, LayerConfig, MlaConfig

__all__ = ["DraftCache"]

_FIRST_SLOTS = 64


class _LayerStore:
    """The last positions of one layer: slots [begin, end) of a buffer."""

    def __init__(self, limit: int | None, shape: AttentionConfig, dtype: torch.dtype, device: torch.device):
        self.limit = limit
        self.begin = 0
        self.end = 0
        if isinstance(shape, MlaConfig):
            sizes, self.value_width = (1, 1, 0, shape.num_cached), shape.kv_lora_rank
        else:
            sizes, self.value_width = (2, shape.num_kv_heads, 0, shape.head_dim), shape.head_dim
        self.buffer_NKSA = torch.empty(sizes, dtype=dtype, device=device)

    def append(self, k_CKA: Tensor, v_CKW: Tensor) -> None:
        count = k_CKA.shape[0]
        if self.limit is not None:
            self.begin = max(self.begin, self.end + count - self.limit)
        if self.end + count > self.buffer_NKSA.shape[2]:
            self._make_room(count)
        slots = slice(self.end, self.end + count)
        self.buffer_NKSA[0, :, slots] = k_CKA.transpose(0, 1)
        if self.buffer_NKSA.shape[0] > 1:
            self.buffer_NKSA[1, :, slots] = v_CKW.transpose(0, 1)
        self.end += count

    def _make_room(self, count: int) -> None:
        """Move what stays visible to the front of a buffer of twice the need; amortised O(1) per position."""
        start = min(self.begin, self.end)  # begin lies beyond end when the new positions fill the window alone
        kept = self.buffer_NKSA[:, :, start : self.end]
        num_kept = kept.shape[2]
        size = max(2 * (num_kept + count), _FIRST_SLOTS)
        if size > self.buffer_NKSA.shape[2]:
            shape = list(self.buffer_NKSA.shape)
            shape[2] = size
            fresh = self.buffer_NKSA.new_empty(shape)
            fresh[:, :, :num_kept] = kept
            self.buffer_NKSA = fresh
        else:
            self.buffer_NKSA[:, :, :num_kept] = kept.clone()
        self.begin, self.end = self.begin - start, num_kept

    def copy(self, num_dropped: int) -> _LayerStore:
        """The store as it was before its last ``num_dropped`` positions came; see ``holds``."""
        made = copy.copy(self)
        end = self.end - num_dropped
        begin = 0 if self.limit is None else max(0, end - self.limit)
        made.buffer_NKSA = self.buffer_NKSA[:, :, begin:end].clone()
        made.begin, made.end = 0, end - begin
        return made

    def holds(self, num_dropped: int, num_left: int) -> bool:
        """Whether what a query after the first ``num_left`` positions sees is still in the buffer."""
        seen = num_left if self.limit is None else min(num_left, self.limit)
        return self.end - num_dropped >= seen

    def view(self) -> tuple[Tensor, Tensor]:
        kept = self.buffer_NKSA[:, :, self.begin : self.end]
        return kept[0], kept[-1, ..., : self.value_width]


class DraftCache:
    """One row's draft context. Made by ``DraftModel.new_cache`` and written by ``DraftModel.inject`` only."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._stores = [_LayerStore(visible_limit(layer), config.attention, dtype, device) for layer in config.layers]
        self._num_positions = 0

    @property
    def num_positions(self) -> int:
        """Committed positions so far, which is also the next position to be written."""
        return self._num_positions

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, spare slots included."""
        return sum(store.buffer_NKSA.nbytes for store in self._stores)

    def can_copy(self, length: int) -> bool:
        """Whether every layer still holds what a block after the first ``length`` positions can see."""
        dropped = self._num_positions - length
        return length >= 0 and dropped >= 0 and all(store.holds(dropped, length) for store in self._stores)

    def copy(self, length: int | None = None) -> DraftCache:
        """An independent cache of the first ``length`` positions, all by default; this one is left as it is.

        Raises ValueError where a window has dropped what that length needs (see ``can_copy``).
        """
        kept = self._num_positions if length is None else length
        if not self.can_copy(kept):
            raise ValueError(
                f"cannot copy {kept} of {self._num_positions} positions: a cache keeps no more of the past than its"
                " windows need, and nothing of the future"
            )
        made = copy.copy(self)
        made._num_positions = kept
        made._stores = [store.copy(self._num_positions - kept) for store in self._stores]
        return made

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views (k_KSA, v_KSW) of the last S committed positions that a later query can still see."""
        return self._stores[index].view()

    def append(self, keys_values: list[tuple[Tensor, Tensor]], num_positions: int) -> None:
        """Commit ``num_positions`` more positions: per layer (k_CKA, v_CKW) of the last C of them.

        A layer may leave out leading positions that its window hides from every later query, no others.
        """
        assert len(keys_values) == len(self._stores)
        for store, (k_CKA, v_CKW) in zip(self._stores, keys_values, strict=True):
            count = k_CKA.shape[0]
            assert count == num_positions or (store.limit is not None and store.limit <= count <= num_positions)
            if count < num_positions:
                store.begin = store.end = 0  # everything older is out of sight
            store.append(k_CKA, v_CKW)
        self._num_positions += num_positions


def visible_limit(layer: LayerConfig) -> int | None:
    """How many committed positions a later block can see at most: a row sees itself and window - 1 before
    it.
    """
    return None if layer.window is None else layer.window - 1
