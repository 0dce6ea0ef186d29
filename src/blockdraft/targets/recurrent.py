"""Taking back recurrent and convolution states, which hold no positions that could be cut off.

Before a forward one copy is made of every state of the row. To keep the first positions of that forward, the copies
are put back and the modules that move the states run again, alone, on the kept part of what they were given: their
inputs depend on kept positions only, so they need no other layer. Modules whose recurrence is understood
(``delta_rule.py``) are not run again, only that recurrence is. A forward of very many positions keeps its ids instead
of those inputs and is run again whole, and so is every forward of a model with cache layers of its own class, which are
copied and put back as they are. Nothing is run before the row's next forward asks for it.
Owns which modules move states, their inputs, and the copies. Must not know families, taps or requests.

Shapes: T positions of one forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import LinearAttentionLayer

from .delta_rule import DeltaMixer
from .hf_cache import STATE_FLAGS, STATES, RowCache, copied, tensors_in

__all__ = ["Mixers", "Undo", "Watched", "watched"]

_MAX_RECORDED = 256  # positions; beyond it (prefill) the inputs of every mixer would be as large as a cache
_NUM_TRIED = 7  # positions of the forward that shows what the mixers are given: no usual number of heads
_STATE_CALLS = ("update_conv_state", "update_recurrent_state")
_POSITION_CALLS = ("update", "update_indexer")
_MAX_ERROR = 1e-5  # of a recurrence against the module's own, relative to the largest number of the state
_MAX_ERROR_HALF = 1e-2  # in a number format of two bytes: keys and values may be rounded to a neighbour


@dataclass(frozen=True, slots=True)
class _Call:
    """One run of a module that moves states: what it was given."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor))

    def is_by_position(self, num_fed: int) -> bool:
        """Whether every tensor that the module was given can be cut to its first positions."""
        try:
            for given in (*self.args, *self.kwargs.values()):
                _cut(given, 1, num_fed)
        except ValueError:
            return False
        return True

    def of_row(self, number: int, num_rows: int, cache: RowCache) -> _Call:
        """The part of one of the rows that the module was run for together, with the row's own cache."""

        def part(given: Any) -> Any:
            if isinstance(given, RowCache):
                return cache
            if isinstance(given, tuple | list):
                return type(given)(map(part, given))
            if not isinstance(given, Tensor) or given.dim() == 0:
                return given
            assert given.shape[0] == num_rows
            return given[number : number + 1]

        kwargs = {name: part(x) for name, x in self.kwargs.items()}
        return _Call(self.module, tuple(map(part, self.args)), kwargs)

    def repeat(self, keep: int, num_fed: int) -> None:
        """Run the module again on the first ``keep`` of ``num_fed`` positions."""
        args = [_cut(x, keep, num_fed) for x in self.args]
        self.module(*args, **{name: _cut(x, keep, num_fed) for name, x in self.kwargs.items()})


@dataclass(frozen=True, slots=True)
class _DeltaCall:
    """One run of a module whose recurrence is understood: what it put into the cache, and its gates."""

    delta: DeltaMixer
    cache: RowCache
    inputs: dict[int, Tensor]  # of the convolution, by layer; none for the single position of a row with a past
    gates: dict[int, Tensor] = field(default_factory=dict)  # in the order of the delta's parts

    @property
    def num_bytes(self) -> int:
        inputs = self.inputs.get(self.delta.layer_index)
        return sum(x.nbytes for x in self.gates.values()) + (0 if inputs is None else inputs.nbytes)

    def is_by_position(self, num_fed: int) -> bool:
        return all(x.shape[1] == num_fed for x in self.gates.values())

    def of_row(self, number: int, _num_rows: int, cache: RowCache) -> _DeltaCall:
        """The part of one of the rows that the module was run for together, with the row's own cache."""
        span = slice(number, number + 1)
        inputs, gates = ({key: x[span] for key, x in part.items()} for part in (self.inputs, self.gates))
        return _DeltaCall(self.delta, cache, inputs, gates)

    def repeat(self, keep: int, _num_fed: int) -> None:
        """Bring the states forward over the first ``keep`` positions."""
        index = self.delta.layer_index
        gates = [self.gates[part][:, :keep] for part in range(len(self.delta.parts))]
        self.delta.replay(self.cache.layers[index], self.inputs[index][..., :keep], gates)


@dataclass(slots=True)
class _Recording:
    owner: Mixers
    cache: RowCache
    calls: list[_Call | _DeltaCall]


# Not a field: hooks of two targets on one model, or of two threads, must not see each other.
_recording: ContextVar[_Recording | None] = ContextVar("blockdraft_recording", default=None)


class Mixers:
    """The modules of a model that move recurrent or convolution states, found by watching two forwards.

    ``can_repeat``: they can be run again alone. Otherwise (one of them writes keys as well, or was given what is not
    laid out by position) the whole forward is.
    """

    def __init__(self, model: nn.Module, run: Callable[[Tensor, RowCache], Any], cache: RowCache) -> None:
        self._run = run
        seen = watched(model, cache, run)
        self.modules, self.seen = seen.movers, seen
        self.can_repeat = seen.can_repeat and not cache.others
        self.deltas: dict[nn.Module, DeltaMixer] = {}
        self._handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self.modules]
        if not self.can_repeat:
            return
        self.deltas = {module: delta for module in self.modules if (delta := DeltaMixer.of(module))}
        handles = self._watch_gates()
        calls = self._agreeing(cache) if self.deltas else None
        if calls is None:
            for handle in handles:
                handle.remove()
            self.deltas, handles = {}, []
            calls = self._try(cache)
        self._handles += handles
        self.can_repeat = all(call.is_by_position(_NUM_TRIED) for call in calls)

    def _watch_gates(self) -> list[RemovableHandle]:
        return [
            part.register_forward_hook(partial(self._note_gate, delta, index))
            for delta in self.deltas.values()
            for index, part in enumerate(delta.parts)
        ]

    def _try(self, cache: RowCache) -> list[_Call | _DeltaCall]:
        """What is noted of one forward."""
        calls: list[_Call | _DeltaCall] = []
        with self.recording(calls, cache):
            self._run(torch.arange(_NUM_TRIED)[None], cache)
        return calls

    def _agreeing(self, cache: RowCache) -> list[_Call | _DeltaCall] | None:
        """What is noted of one forward, if the recurrences of ``deltas`` lead to the states that it left."""
        copies = [_Copy.of(layer) for layer in cache.states]
        try:
            calls = self._try(cache)
            wanted = [_Copy.of(layer) for layer in cache.states]
            for copy in copies:
                copy.put_back()
            for call in calls:
                call.repeat(_NUM_TRIED, _NUM_TRIED)
        except Exception:  # a release that changed such a module: it is run again, as any other
            return None
        return calls if all(one.agrees(_Copy.of(one.layer)) for one in wanted) else None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def run_again(self, ids_1T: Tensor, cache: RowCache) -> None:
        self._run(ids_1T, cache)

    @contextmanager
    def recording(self, calls: list[_Call | _DeltaCall], cache: RowCache) -> Iterator[None]:
        """Within, what the modules are given is noted in ``calls``, in a forward with this cache."""
        token = _recording.set(_Recording(self, cache, calls))
        cache.inputs = {} if self.deltas else None
        try:
            yield
        finally:
            cache.inputs = None
            _recording.reset(token)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recording = _recording.get()
        if recording is not None and recording.owner is self:
            self.note(module, args, kwargs)

    def note(self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note what a module is given, within a ``recording`` of these mixers."""
        recording = _recording.get()
        assert recording is not None
        delta, inputs = self.deltas.get(module), recording.cache.inputs
        if delta is None or inputs is None:
            recording.calls.append(_Call(module, tuple(args), dict(kwargs)))
        else:
            recording.calls.append(_DeltaCall(delta, recording.cache, inputs))

    def _note_gate(self, delta: DeltaMixer, index: int, _part: nn.Module, _args: Any, output: Tensor) -> None:
        recording = _recording.get()
        if recording is None or recording.owner is not self:
            return
        call = recording.calls[-1]
        assert isinstance(call, _DeltaCall) and call.delta is delta
        call.gates[index] = output


@dataclass(frozen=True, slots=True)
class _Copy:
    """The states of one layer before a forward."""

    layer: LinearAttentionLayer
    tensors: dict[tuple[str, int], Tensor | None]
    flags: dict[str, dict[int, Any]]

    @classmethod
    def of(cls, layer: LinearAttentionLayer, *, is_replaced: bool = False) -> _Copy:
        """``is_replaced``: the forward will give the layer other tensors and leave those that it has alone."""
        tensors = {
            (name, index): state if state is None or is_replaced else state.clone()
            for name in STATES
            for index, state in getattr(layer, name).items()
        }
        return cls(layer, tensors, {name: dict(getattr(layer, name)) for name in STATE_FLAGS})

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values() if x is not None)

    def put_back(self) -> None:
        """The layer as it was. The copy stays as it is: mixers write into the states that they find."""
        for (name, index), state in self.tensors.items():
            getattr(self.layer, name)[index] = None if state is None else state.clone()
        for name, flags in self.flags.items():
            getattr(self.layer, name).update(flags)

    def agrees(self, other: _Copy) -> bool:
        """Whether another copy of the layer holds the same up to rounding."""
        return self.flags == other.flags and all(
            _is_close(state, other.tensors[name]) for name, state in self.tensors.items()
        )


@dataclass(frozen=True, slots=True)
class _WholeCopy:
    """All that a layer of a class that is not known here held before a forward."""

    layer: Any
    held: dict[str, Any]

    @classmethod
    def of(cls, layer: Any) -> _WholeCopy:
        return cls(layer, copied(vars(layer)))

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in tensors_in(self.held))

    def put_back(self) -> None:
        vars(self.layer).clear()
        vars(self.layer).update(copied(self.held))


class Undo:
    """What one row needs to take its last forward back, any number of times, to fewer and fewer positions."""

    def __init__(self, mixers: Mixers, cache: RowCache, length: int = 0) -> None:
        """Of a row whose cache holds ``length`` positions."""
        self._mixers, self._cache = mixers, cache
        self._copies: list[_Copy | _WholeCopy] = []
        self._ids_1T: Tensor | None = None
        self._start = self._end = length
        self._is_stale = False
        self._calls: list[_Call | _DeltaCall] = []

    @property
    def num_fed(self) -> int:
        """Positions of the forward that began last."""
        return 0 if self._ids_1T is None else self._ids_1T.shape[1]

    @property
    def num_bytes(self) -> int:
        """The copies and the recorded inputs."""
        return sum(copy.num_bytes for copy in self._copies) + sum(call.num_bytes for call in self._calls)

    def begin(self, ids_1T: Tensor, *, is_replaced: bool = False) -> None:
        """Bring the states up to date and copy them: a forward of these ids follows.

        ``is_replaced``: a forward that gives the layers other tensors, so that holding on to these is enough.
        """
        self.settle()
        copies: list[_Copy | _WholeCopy] = [_Copy.of(one, is_replaced=is_replaced) for one in self._cache.states]
        copies += map(_WholeCopy.of, self._cache.others)
        self._copies, self._calls, self._ids_1T = copies, [], ids_1T
        self._start, self._end = self._end, self._end + ids_1T.shape[1]

    def recording(self) -> AbstractContextManager[None]:
        """Surrounds the forward that follows ``begin``."""
        return self._mixers.recording(self._calls, self._cache) if self.is_noting else nullcontext()

    @property
    def is_noting(self) -> bool:
        """Whether what the mixers are given in the forward that began last is noted."""
        return self._mixers.can_repeat and self.num_fed <= _MAX_RECORDED

    def note(self, call: _Call | _DeltaCall) -> None:
        self._calls.append(call)

    def shorten(self, length: int) -> None:
        """Have the states of the first ``length`` positions of the row; the work is done when they are needed."""
        if length == self._end:
            return
        assert self._start <= length < self._end
        self._end, self._is_stale = length, True

    def settle(self) -> None:
        """Do what ``shorten`` put off. Interrupted, it starts again from the copies the next time."""
        if not self._is_stale:
            return
        keep = self._end - self._start
        for copy in self._copies:
            copy.put_back()
        if keep and self._calls:
            for call in self._calls:
                call.repeat(keep, self.num_fed)
        elif keep:
            assert self._ids_1T is not None
            self._cache.shorten(self._start)
            self._mixers.run_again(self._ids_1T[:, :keep], self._cache)
        self._is_stale = False


def _is_close(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    limit = _MAX_ERROR if one.dtype.itemsize >= 4 else _MAX_ERROR_HALF
    return bool((one - other).abs().max() <= limit * one.abs().max())


def _cut(given: Any, keep: int, num_fed: int) -> Any:
    """The part of an argument that belongs to the first ``keep`` positions; rows are one, positions come second."""
    if isinstance(given, tuple | list):
        return type(given)(_cut(x, keep, num_fed) for x in given)
    if not isinstance(given, Tensor) or given.dim() == 0:
        return given
    if given.dim() >= 2 and given.shape[1] == num_fed:
        return given[:, :keep]
    if given.dim() == 1 and given.shape[0] == num_fed:
        return given[:keep]
    raise ValueError(f"a mixer was given a tensor of shape {tuple(given.shape)} for {num_fed} positions")


@dataclass(frozen=True, slots=True)
class Watched:
    """The modules of a model that write into its cache, none inside another of its kind."""

    movers: list[nn.Module]  # of states
    writers: list[nn.Module]  # of keys and values
    can_repeat: bool  # whether the movers write no keys
    are_apart: bool  # nor the writers move states


def watched(model: nn.Module, cache: RowCache, run: Callable[[Tensor, RowCache], Any]) -> Watched:
    """Who writes what in a forward of one id."""
    stack: list[nn.Module] = []
    movers: dict[nn.Module, None] = {}
    writers: dict[nn.Module, None] = {}

    def noted(name: str) -> Callable[..., Any]:
        real = getattr(cache, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            (movers if name in _STATE_CALLS else writers).setdefault(stack[-1])
            return real(*args, **kwargs)

        return call

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        stack.pop()

    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda m, _args: stack.append(m)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    for name in (*_STATE_CALLS, *_POSITION_CALLS):
        setattr(cache, name, noted(name))
    try:
        run(torch.zeros((1, 1), dtype=torch.long), cache)
    finally:
        for name in (*_STATE_CALLS, *_POSITION_CALLS):
            delattr(cache, name)
        for handle in handles:
            handle.remove()
    outer = _outermost(movers)
    can_repeat = not any(writer in _parts(outer) for writer in writers)
    return Watched(outer, _outermost(writers), can_repeat, can_repeat and not any(m in _parts(writers) for m in outer))


def _parts(modules: Iterable[nn.Module]) -> set[nn.Module]:
    return {part for module in modules for part in module.modules()}


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    inside = {part for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if module not in inside]
