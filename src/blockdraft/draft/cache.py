"""Keys and values of committed positions, per layer, append-only.

Owns the buffers of one row: preallocated, grown by doubling, and for a sliding layer compacted so that only
positions that a later query can see are kept. Nothing of a block ever enters, hence nothing is ever rolled
back. Knows config only, no model.

Letters: C newly committed positions, S positions kept, K kv heads, A head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.config import DraftConfig, LayerConfig

__all__ = ["DraftCache"]

_FIRST_SLOTS = 64


class _LayerStore:
    """The last positions of one layer: slots [begin, end) of a buffer."""

    def __init__(self, limit: int | None, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.limit = limit
        self.begin = 0
        self.end = 0
        self.buffer_2KSA = torch.empty((2, num_kv_heads, 0, head_dim), dtype=dtype, device=device)

    def append(self, k_CKA: Tensor, v_CKA: Tensor) -> None:
        count = k_CKA.shape[0]
        if self.limit is not None:
            self.begin = max(self.begin, self.end + count - self.limit)
        if self.end + count > self.buffer_2KSA.shape[2]:
            self._make_room(count)
        slots = slice(self.end, self.end + count)
        self.buffer_2KSA[0, :, slots] = k_CKA.transpose(0, 1)
        self.buffer_2KSA[1, :, slots] = v_CKA.transpose(0, 1)
        self.end += count

    def _make_room(self, count: int) -> None:
        """Move what stays visible to the front of a buffer of twice the need; amortised O(1) per position."""
        start = min(self.begin, self.end)  # begin lies beyond end when the new positions fill the window alone
        kept = self.buffer_2KSA[:, :, start : self.end]
        num_kept = kept.shape[2]
        size = max(2 * (num_kept + count), _FIRST_SLOTS)
        if size > self.buffer_2KSA.shape[2]:
            shape = list(self.buffer_2KSA.shape)
            shape[2] = size
            fresh = self.buffer_2KSA.new_empty(shape)
            fresh[:, :, :num_kept] = kept
            self.buffer_2KSA = fresh
        else:
            self.buffer_2KSA[:, :, :num_kept] = kept.clone()
        self.begin, self.end = self.begin - start, num_kept

    def view(self) -> tuple[Tensor, Tensor]:
        kept = self.buffer_2KSA[:, :, self.begin : self.end]
        return kept[0], kept[1]


class DraftCache:
    """One row's draft context. Made by ``DraftModel.new_cache`` and written by ``DraftModel.inject`` only."""

    def __init__(self, config: DraftConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = config.attention
        self._stores = [
            _LayerStore(visible_limit(layer), shape.num_kv_heads, shape.head_dim, dtype, device)
            for layer in config.layers
        ]
        self._num_positions = 0

    @property
    def num_positions(self) -> int:
        """Committed positions so far, which is also the next position to be written."""
        return self._num_positions

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, spare slots included."""
        return sum(store.buffer_2KSA.nbytes for store in self._stores)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Views (k_KSA, v_KSA) of the last S committed positions that a later query can still see."""
        return self._stores[index].view()

    def append(self, keys_values: list[tuple[Tensor, Tensor]], num_positions: int) -> None:
        """Commit ``num_positions`` more positions: per layer (k_CKA, v_CKA) of the last C of them.

        A layer may leave out leading positions that its window hides from every later query, no others.
        """
        assert len(keys_values) == len(self._stores)
        for store, (k_CKA, v_CKA) in zip(self._stores, keys_values, strict=True):
            count = k_CKA.shape[0]
            assert count == num_positions or (store.limit is not None and store.limit <= count <= num_positions)
            if count < num_positions:
                store.begin = store.end = 0  # everything older is out of sight
            store.append(k_CKA, v_CKA)
        self._num_positions += num_positions


def visible_limit(layer: LayerConfig) -> int | None:
    """How many committed positions a later block can see at most: a row sees itself and window - 1 before
    it.
    """
    return None if layer.window is None else layer.window - 1
