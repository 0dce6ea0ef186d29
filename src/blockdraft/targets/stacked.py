"""The states of several rows in one tensor, for the modules of transformers that move them for a batch.

Owns the stacking and the taking apart. Must not know passes, modules or targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from .hf_cache import STATE_FLAGS, STATES, RowCache

__all__ = ["GroupCache"]


class _Layers:
    """The layers of several rows with state, stacked when a module asks for one, taken apart behind it."""

    def __init__(self, caches: Sequence[RowCache]) -> None:
        self._caches = caches
        self._stacked: dict[int, LinearAttentionLayer] = {}

    def __len__(self) -> int:
        return len(self._caches[0].layers)

    def __getitem__(self, index: int) -> Any:
        if index not in self._stacked:
            self._stacked[index] = _stacked([cache.layers[index] for cache in self._caches])
        return self._stacked[index]

    def take_apart(self) -> None:
        for index, layer in self._stacked.items():
            for number, cache in enumerate(self._caches):
                _unstack(layer, number, cache.layers[index])
        self._stacked = {}


class GroupCache(RowCache):
    """The cache of rows whose states are moved together, by modules that write nothing else."""

    def __init__(self, caches: Sequence[RowCache]) -> None:
        self.layers: Any = _Layers(caches)
        self.layer_class_to_replicate = None
        self.offloading = False
        self.inputs = None

    def take_apart(self) -> None:
        """Give the rows the states that the modules left. Those that they had stay as they were."""
        self.layers.take_apart()


def _stacked(layers: list[LinearAttentionLayer]) -> LinearAttentionLayer:
    """One layer with the states of several."""
    first = layers[0]
    made = LinearAttentionLayer(first.number_of_states)
    made.device, made.dtype = first.device, first.dtype
    for name in STATE_FLAGS:
        assert all(getattr(layer, name) == getattr(first, name) for layer in layers)
        setattr(made, name, dict(getattr(first, name)))
    for layer in layers:  # rows that were taken back to nothing know it, new ones do not
        made.conv_kernel_size.update({i: size for i, size in layer.conv_kernel_size.items() if size is not None})
    for name in STATES:
        of_layers = [getattr(layer, name) for layer in layers]
        setattr(made, name, {
            index: None if state is None else torch.cat([states[index] for states in of_layers])
            for index, state in of_layers[0].items()
        })  # fmt: skip
    return made


def _unstack(layer: LinearAttentionLayer, number: int, goal: LinearAttentionLayer) -> None:
    """Give a row its part of the stack."""
    for name in (*STATE_FLAGS, "conv_kernel_size"):
        setattr(goal, name, dict(getattr(layer, name)))
    for name in STATES:
        states = getattr(layer, name)
        setattr(goal, name, {i: None if x is None else x[number : number + 1] for i, x in states.items()})
    goal.device, goal.dtype = layer.device, layer.dtype
