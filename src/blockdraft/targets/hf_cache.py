"""One row's keys and values for transformers models: written in place, rolled back by moving a counter.

The dynamic layers of transformers concatenate on every step, which copies the whole context, and its sliding
layers need a crop after every forward. The layers here take the same calls from the model code and work on
buffers with spare room. Owns the choice of layers that can be rolled back exactly, and the refusal of all
others. Must not know models, taps or requests.

Shapes: S cached positions, T positions of one forward, K kv heads, A head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from blockdraft.errors import PairError

__all__ = ["RowCache", "WholeLayer", "WindowLayer"]

_MIN_SPARE = 64  # positions of spare room a new buffer has at least


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


class RowCache(DynamicCache):
    """The cache of one row, laid out as transformers lays it out for this configuration.

    Raises PairError when any layer's state cannot be rolled back exactly.
    """

    def __init__(self, config: Any, model_type: str) -> None:
        try:
            super().__init__(config=config)
        except KeyError as error:
            raise PairError(refusal(model_type, f"a cache layer of the unknown type {error}")) from error
        self.layers: list[Any] = [_own_layer(layer, model_type) for layer in self.layers]

    @property
    def lengths(self) -> set[int]:
        """The different numbers of positions that the layers hold: exactly one between forwards."""
        return {layer.get_seq_length() for layer in self.layers if not isinstance(layer, DummyLayer)}

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers if not isinstance(layer, DummyLayer))

    def shorten(self, length: int) -> None:
        """Bring every layer back to this many positions; layers that are already there stay."""
        for layer in self.layers:
            if not isinstance(layer, DummyLayer) and layer.get_seq_length() > length:
                layer.crop(length - layer.get_seq_length())


def refusal(model_type: str, what: str) -> str:
    return (
        f"target family {model_type!r} has {what}, which cannot be rolled back exactly by this version"
        " (recurrent and sparse targets come in a later version): use an attention-only target"
    )


def _own_layer(layer: Any, model_type: str) -> Any:
    # Exact types: a subclass may keep more state than keys and values.
    if type(layer) is DynamicLayer:
        return WholeLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return WindowLayer(layer.sliding_window)
    if type(layer) is DummyLayer:
        return layer
    raise PairError(refusal(model_type, f"layer state of the kind {type(layer).__name__}"))


def _moved(
    old: tuple[Tensor, Tensor] | None, first: int, count: int, size: int, like: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """New key and value buffers of ``size`` positions; entries [first, first + count) are carried over."""
    new = tuple(x.new_empty((*x.shape[:-2], size, x.shape[-1])) for x in like)
    if old is not None:
        for source, goal in zip(old, new, strict=True):
            goal.narrow(-2, 0, count).copy_(source.narrow(-2, first, count))
    return new[0], new[1]
