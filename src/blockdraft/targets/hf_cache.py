"""One row's cache for transformers models: keys and values written in place, rolled back by moving a counter.

The dynamic layers of transformers concatenate on every step, which copies the whole context, and its sliding
layers need a crop after every forward. The layers here take the same calls from the model code and work on
buffers with spare room. Recurrent and convolution states, and layers of a family's own class, are transformers' own;
how they are taken back is in ``recurrent.py``. Owns the choice of layers. Must not know models, taps or requests.

Shapes: S cached positions, T positions of one forward, K kv heads, A head width.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from blockdraft.errors import PairError

__all__ = [
    "STATES",
    "STATE_FLAGS",
    "IndexedLayer",
    "RowCache",
    "StateAndWholeLayer",
    "StateAndWindowLayer",
    "WholeLayer",
    "WindowLayer",
    "copied",
    "refusal",
    "tensors_in",
]

_MIN_SPARE = 64  # positions of spare room a new buffer has at least
STATES = ("conv_states", "recurrent_states")  # of a layer with state, by number
STATE_FLAGS = ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized")


class WholeLayer(DynamicLayer):
    """Full attention: every position stays. Buffers double when they are full."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        num_new = key_states.shape[-2]
        end = self._length + num_new
        if self._room is None or end > self._room[0].shape[-2]:
            spare = max(end, _MIN_SPARE)
            self._room = _moved(self._room, 0, self._length, end + spare, (key_states, value_states))
            self.is_initialized, self.device = True, key_states.device
        for buffer, new in zip(self._room, (key_states, value_states), strict=True):
            buffer.narrow(-2, self._length, num_new).copy_(new)
        self._length = end
        return self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        assert self._room is not None
        keys, values = self._room
        self.keys, self.values = keys.narrow(-2, 0, self._length), values.narrow(-2, 0, self._length)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self._length

    def take(self, other: WholeLayer, length: int) -> None:
        """Be a layer of the first ``length`` positions of another."""
        if other._room is None:
            return
        self._room = _moved(other._room, 0, length, length + max(length, _MIN_SPARE), other._room)
        self._length = length
        self.is_initialized, self.device = True, other.device
        self._show()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove positions (transformers' sign: zero or negative)."""
        assert -self._length <= tokens_to_remove <= 0
        self._length += tokens_to_remove
        if self._room is not None:
            self._show()

    @property
    def num_bytes(self) -> int:
        return 0 if self._room is None else sum(buffer.nbytes for buffer in self._room)


class WindowLayer(DynamicSlidingWindowLayer):
    """Sliding (or chunked) attention: keeps the window and what the last forward wrote.

    The first ``_end`` entries of the buffer are the row's last positions; older ones are dropped when it is
    full, which costs at most one move of a window per window of positions.
    """

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self._end = 0  # entries of the buffer in use; the row's last position is the last of them
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        num_new = key_states.shape[-2]
        num_seen = min(self._end, self.sliding_window - 1)  # what the first new query can look back on
        needed = num_seen + num_new
        size = 0 if self._room is None else self._room[0].shape[-2]
        spare = max(min(needed, self.sliding_window), _MIN_SPARE)
        if self._end + num_new > size or size > 4 * (needed + spare):
            first = self._end - num_seen
            self._room = _moved(self._room, first, num_seen, needed + spare, (key_states, value_states))
            self._end = num_seen
            self.is_initialized, self.device = True, key_states.device
        assert self._room is not None
        for buffer, new in zip(self._room, (key_states, value_states), strict=True):
            buffer.narrow(-2, self._end, num_new).copy_(new)
        self._end += num_new
        self.cumulative_length += num_new
        self.keys, self.values = (buffer.narrow(-2, self._end - needed, needed) for buffer in self._room)
        return self.keys, self.values

    def take(self, other: WindowLayer, length: int) -> None:
        """Be a layer of the first ``length`` positions of another; what its window still needs must be there."""
        end = other._end - (other.cumulative_length - length)
        num_seen = min(length, self.sliding_window - 1)
        assert num_seen <= end
        if other._room is None:
            return
        self._room = _moved(other._room, end - num_seen, num_seen, num_seen + max(num_seen, _MIN_SPARE), other._room)
        self._end, self.cumulative_length = num_seen, length
        self.is_initialized, self.device = True, other.device
        self.keys, self.values = (buffer.narrow(-2, 0, num_seen) for buffer in self._room)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove positions; they must belong to the last update."""
        assert -self._end <= tokens_to_remove <= 0
        self._end += tokens_to_remove
        self.cumulative_length += tokens_to_remove
        if self._room is not None:
            num_seen = min(self._end, self.sliding_window - 1)
            self.keys, self.values = (b.narrow(-2, self._end - num_seen, num_seen) for b in self._room)

    @property
    def num_bytes(self) -> int:
        return 0 if self._room is None else sum(buffer.nbytes for buffer in self._room)


class IndexedLayer(WholeLayer):
    """Sparse attention: next to keys and values stands one indexer entry for every position, in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        old = self.indexer_keys
        self.indexer_keys = indexer_key_states if old is None else torch.cat([old, indexer_key_states], dim=1)
        return self.indexer_keys

    def take(self, other: WholeLayer, length: int) -> None:
        super().take(other, length)
        assert isinstance(other, IndexedLayer)
        if other.indexer_keys is not None:
            self.indexer_keys = other.indexer_keys[:, :length].clone()
        if other.indexer_position_ids is not None:
            self.indexer_position_ids = other.indexer_position_ids[..., :length].clone()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.trim()

    def trim(self) -> None:
        """Have no more indexer entries than keys: a forward that stopped half way may have left some."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self._length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : self._length]

    @property
    def num_bytes(self) -> int:
        beside = [x for x in (self.indexer_keys, self.indexer_position_ids) if x is not None]
        return super().num_bytes + sum(x.nbytes for x in beside)


class StateAndWholeLayer(LinearAttentionLayer, WholeLayer):  # type: ignore[misc, override]
    """A recurrent mixer and full attention side by side. ``crop`` moves the attention's counter only."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        WholeLayer.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def crop(self, tokens_to_remove: int) -> None:
        WholeLayer.crop(self, tokens_to_remove)


class StateAndWindowLayer(LinearAttentionLayer, WindowLayer):  # type: ignore[misc, override]
    """A recurrent mixer and sliding attention side by side. ``crop`` moves the attention's counter only."""

    is_compileable = False

    def __init__(self, sliding_window: int, number_of_states: int = 1) -> None:
        WindowLayer.__init__(self, sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def crop(self, tokens_to_remove: int) -> None:
        WindowLayer.crop(self, tokens_to_remove)


class RowCache(DynamicCache):
    """The cache of one row, laid out as transformers lays it out for this configuration.

    Layers of classes that are not known here stay what they are; they can only be copied and put back whole.
    Raises PairError for a kind of layer that transformers does not know.
    """

    def __init__(self, config: Any, model_type: str) -> None:
        try:
            super().__init__(config=config)
        except KeyError as error:
            raise PairError(refusal(model_type, f"a cache layer of the unknown type {error}")) from error
        self.layers: list[Any] = [_own_layer(layer) for layer in self.layers]
        self.inputs: dict[int, Tensor] | None = None  # where set, the inputs of each layer's first convolution go here

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        if self.inputs is not None and state_idx == 0:
            self.inputs[layer_idx] = conv_states
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    @property
    def lengths(self) -> set[int]:
        """The different numbers of positions that attention layers hold: one between forwards, none without any."""
        return {layer.get_seq_length() for layer in self._attention}

    @property
    def states(self) -> list[LinearAttentionLayer]:
        """The layers that hold recurrent or convolution states, in order."""
        return [layer for layer in self.layers if type(layer) in _STATE_LAYERS]

    @property
    def others(self) -> list[Any]:
        """The layers of classes that are not known here."""
        return [layer for layer in self.layers if type(layer) not in _OWN_LAYERS]

    @property
    def num_bytes(self) -> int:
        held = [x for layer in self.states for x in (*layer.conv_states.values(), *layer.recurrent_states.values())]
        held += [x for layer in self.others for x in tensors_in(vars(layer))]
        return sum(layer.num_bytes for layer in self._attention) + sum(x.nbytes for x in held if x is not None)

    def shorten(self, length: int) -> None:
        """Bring every attention layer back to this many positions; layers that are already there stay."""
        for layer in self._attention:
            if layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())
            elif isinstance(layer, IndexedLayer):
                layer.trim()

    def take(self, other: RowCache, length: int) -> None:
        """Hold copies of the first ``length`` positions of another row's cache, and of its states as they are."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if isinstance(mine, WholeLayer | WindowLayer):
                mine.take(theirs, length)
            if type(mine) in _STATE_LAYERS:
                _take_states(mine, theirs)
            if type(mine) not in _OWN_LAYERS:
                vars(mine).update(copied(vars(theirs)))

    @property
    def drops_before(self) -> int | None:
        """Positions of which a layer may have dropped the first; None where every layer keeps all."""
        windows = [layer.sliding_window for layer in self.layers if isinstance(layer, WindowLayer)]
        return min(windows, default=None)

    @property
    def _attention(self) -> list[Any]:
        return [layer for layer in self.layers if isinstance(layer, WholeLayer | WindowLayer)]


def refusal(model_type: str, what: str) -> str:
    return (
        f"target family {model_type!r} has {what}, which this version cannot roll back exactly: use another target"
        " (attention-only ones all work, of the recurrent ones those in the table of the documentation)"
    )


def _own_layer(layer: Any) -> Any:
    # Exact types: a subclass may keep more state than keys and values.
    if type(layer) is DynamicLayer:
        return WholeLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return WindowLayer(layer.sliding_window)
    if type(layer) is DynamicIndexedLayer:
        return IndexedLayer()
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return StateAndWholeLayer(layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return StateAndWindowLayer(layer.sliding_window, layer.number_of_states)
    return layer


_STATE_LAYERS = (LinearAttentionLayer, StateAndWholeLayer, StateAndWindowLayer)
_OWN_LAYERS = (*_STATE_LAYERS, DummyLayer, WholeLayer, WindowLayer, IndexedLayer)


def copied(held: Any) -> Any:
    """A copy of what a layer holds, which nobody else writes into."""
    if isinstance(held, Tensor):
        return held.clone()
    if isinstance(held, dict):
        return {key: copied(x) for key, x in held.items()}
    if isinstance(held, list | tuple):
        return type(held)(map(copied, held))
    return deepcopy(held)


def tensors_in(held: Any) -> list[Tensor]:
    """Every tensor of what a layer holds."""
    if isinstance(held, Tensor):
        return [held]
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
    return [x for part in parts for x in tensors_in(part)]


def _take_states(mine: LinearAttentionLayer, theirs: LinearAttentionLayer) -> None:
    for name in STATES:
        setattr(mine, name, {i: None if x is None else x.clone() for i, x in getattr(theirs, name).items()})
    for name in (*STATE_FLAGS, "conv_kernel_size"):
        setattr(mine, name, dict(getattr(theirs, name)))
    mine.device, mine.dtype = theirs.device, theirs.dtype


def _moved(
    old: tuple[Tensor, Tensor] | None, first: int, count: int, size: int, like: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """New key and value buffers of ``size`` positions; entries [first, first + count) are carried over."""
    new = tuple(x.new_empty((*x.shape[:-2], size, x.shape[-1])) for x in like)
    if old is not None:
        for source, goal in zip(old, new, strict=True):
            goal.narrow(-2, 0, count).copy_(source.narrow(-2, first, count))
    return new[0], new[1]
