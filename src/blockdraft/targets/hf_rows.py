"""Many rows in one pass of a transformers model, although a pass of it knows one cache and one length.

The new positions of all rows stand one after another in one sequence, without padding, so that every weight is read
once. What looks back is done apart: keys and values are written into each row's own cache at that row's positions, each
row attends by itself under the mask that the model makes for it, and modules that move states run once for all rows
with as many new positions, their states stacked. Where a model's attention cannot be split inside, its modules run row
by row; where that fails too, there is no such pass.
Owns one pass and the taking over of the modules for it. Must not know families, taps or requests.

Shapes: F new positions of all rows, T of one row, S positions that a row sees, K kv heads, H heads, A head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from .hf_cache import IndexedLayer, RowCache, WholeLayer
from .recurrent import Mixers, Undo
from .stacked import GroupCache

__all__ = ["WAYS", "Joint", "OfRows", "Part", "Way", "masks_of_rows", "running", "take_over"]

Way = Literal["attention", "latents", "modules"]
"""Where rows part: inside attention, inside it with what the cache gives joined to one tensor, or around its module."""
WAYS: tuple[Way, ...] = ("attention", "latents", "modules")


class OfRows(tuple[Any, ...]):
    """One thing for each row of a pass, where a model hands on one thing for all."""

    __slots__ = ()


class _Sizes(int):
    """A length that a model asks a cache for, and what it is for each row: new, seen, first query, first key."""

    rows: tuple[tuple[int, int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One row of a pass: its positions are [start, start + count) of the sequence."""

    cache: RowCache
    undo: Undo | None
    length: int  # positions before
    start: int
    count: int

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.count)


class _IndexedOfRows:
    """A layer of sparse attention, whose position ids a model keeps by itself: those of all rows, then the new ones."""

    def __init__(self, joint: Joint, index: int) -> None:
        self._joint, self._index = joint, index
        self._of_rows: list[IndexedLayer] = [part.cache.layers[index] for part in joint.parts]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_rows[0], name)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        held = [x for layer in self._of_rows if (x := layer.indexer_position_ids) is not None]
        return torch.cat(held, -1) if held else None

    @indexer_position_ids.setter
    def indexer_position_ids(self, given: Tensor) -> None:
        past, new = given.split([given.shape[-1] - self._joint.num_fed, self._joint.num_fed], -1)
        lengths = [0 if (x := layer.indexer_position_ids) is None else x.shape[-1] for layer in self._of_rows]
        self._joint.pasts = lengths
        for layer, of_past, part in zip(self._of_rows, past.split(lengths, -1), self._joint.parts, strict=True):
            layer.indexer_position_ids = torch.cat((of_past, new[..., part.span]), -1)


class _JointCache(DynamicCache):
    """What the model is given as its cache."""

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self.layers: list[Any] = [
            _IndexedOfRows(joint, index) if isinstance(layer, IndexedLayer) else layer
            for index, layer in enumerate(joint.parts[0].cache.layers)
        ]
        self.layer_class_to_replicate = None
        self.offloading = False

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._joint.write(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(part.length for part in self._joint.parts)

    def get_query_offset(self, *_args: Any) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        sizes = _Sizes(query_length)
        sizes.rows = tuple(_sizes(part, layer_idx) for part in self._joint.parts)
        return sizes, 0

    def update_conv_state(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise NotImplementedError("states outside the modules that move them")

    def update_recurrent_state(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise NotImplementedError("states outside the modules that move them")

    def update_indexer(self, *_args: Any, **_kwargs: Any) -> Tensor:
        raise NotImplementedError("an indexer outside the modules that write keys")


_running: ContextVar[Joint | None] = ContextVar("blockdraft_joint_pass", default=None)


def running() -> Joint | None:
    """The pass of many rows that runs now."""
    return _running.get()


class Joint:
    """One pass of these rows."""

    def __init__(self, parts: Sequence[Part], mixers: Mixers | None, way: Way, config: Any, like: Tensor) -> None:
        """``like`` has the model's number format and is where its masks are made."""
        self.parts, self._mixers, self._way, self._config, self._like = tuple(parts), mixers, way, config, like
        self.num_fed = sum(part.count for part in parts)
        self.cache = _JointCache(self)
        self.is_inside = False  # of a module that runs for some of the rows
        self.pasts: list[int] = []  # of each row, where a model keeps position ids by itself
        self._lengths: list[int] = []  # keys of each row, of the layer that was written last
        self._causal: OfRows | None = None
        groups: dict[tuple[int, bool], list[int]] = {}
        for index, part in enumerate(parts):
            groups.setdefault((part.count, part.length == 0), []).append(index)
        self._groups = [_Group(indices, GroupCache([parts[i].cache for i in indices])) for indices in groups.values()]

    @contextmanager
    def runs(self) -> Iterator[None]:
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)

    # ---- attention ---------------------------------------------------------------------------------------------------
    def write(self, keys_1KFA: Tensor, values_1KFA: Tensor, layer: int) -> tuple[Any, Any]:
        """(keys, values) that each row sees in this layer."""
        found = [
            part.cache.update(keys_1KFA[..., part.span, :], values_1KFA[..., part.span, :], layer)
            for part in self.parts
        ]
        keys, values = (OfRows(one) for one in zip(*found, strict=True))
        self._lengths = [x.shape[-2] for x in keys]
        return (torch.cat(keys, -2), torch.cat(values, -2)) if self._way == "latents" else (keys, values)

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Any]],
        module: nn.Module,
        query_1HFA: Tensor,
        keys: Any,
        values: Any,
        masks: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """out_1FHA: each row's queries over its own keys."""
        if isinstance(keys, Tensor):
            keys, values = keys.split(self._lengths, dim=-2), values.split(self._lengths, dim=-2)
        if not isinstance(masks, OfRows):
            raise NotImplementedError("a mask that the model made by itself")
        positions, outs = kwargs.pop("position_ids", None), []
        for part, keys_1KSA, values_1KSA, mask in zip(self.parts, keys, values, masks, strict=True):
            if positions is not None:
                kwargs["position_ids"] = _cut(positions, part, self.num_fed)
            query_1HTA = query_1HFA[:, :, part.span]
            out_1THA, _ = attention(module, query_1HTA, keys_1KSA, values_1KSA, mask, *args, **kwargs)
            outs.append(out_1THA)
        return torch.cat(outs, dim=1), None

    # ---- modules -----------------------------------------------------------------------------------------------------
    def run(self, module: nn.Module, plain: Callable[..., Any], mask_at: int | None, args: Any, kwargs: Any) -> Any:
        """What a module puts out for all positions, run for groups of rows or for one row after another."""
        is_mixer = self._mixers is not None and module in self._mixers.modules
        if self.is_inside or (self._way != "modules" and not is_mixer):
            return plain(*args, **kwargs)
        self.is_inside = True
        try:
            if is_mixer:
                return _joined(self._run_groups(module, plain, args, kwargs))
            return _joined(self._run_rows(plain, mask_at, args, kwargs))
        finally:
            self.is_inside = False

    def _run_rows(self, plain: Callable[..., Any], mask_at: int | None, args: Any, kwargs: Any) -> list[Any]:
        if mask_at is not None and mask_at < len(args):
            args = (*args[:mask_at], self._masks(args[mask_at]), *args[mask_at + 1 :])
        elif "attention_mask" in kwargs:
            kwargs = {**kwargs, "attention_mask": self._masks(kwargs["attention_mask"])}
        outs = []
        for index in range(len(self.parts)):
            of_row = partial(self._of_row, index)
            outs.append(plain(*map(of_row, args), **{name: of_row(x) for name, x in kwargs.items()}))
        return outs

    def _of_row(self, index: int, given: Any) -> Any:
        part = self.parts[index]
        if given is self.cache:
            return part.cache
        if isinstance(given, OfRows):
            return given[index]
        if type(given) in (tuple, list):
            return type(given)(self._of_row(index, x) for x in given)
        if not isinstance(given, Tensor):
            return given
        num_past = sum(self.pasts)
        if num_past and given.dim() >= 2 and given.shape[1] == num_past + self.num_fed:
            past, new = given.split([num_past, self.num_fed], 1)
            return torch.cat((past.split(self.pasts, 1)[index], new[:, part.span]), 1)
        return _cut(given, part, self.num_fed)

    def _run_groups(self, module: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        assert self._mixers is not None
        outs: list[Any] = [None] * len(self.parts)
        for group in self._groups:
            of_group = partial(self._of_group, group)
            given = [of_group(x) for x in args], {name: of_group(x) for name, x in kwargs.items()}
            calls: list[Any] = []
            undos = [self.parts[index].undo for index in group.indices]
            if all(undo is not None and undo.is_noting for undo in undos):
                with self._mixers.recording(calls, group.cache):
                    self._mixers.note(module, *given)
                    out = plain(*given[0], **given[1])
            else:
                out = plain(*given[0], **given[1])
            group.cache.take_apart()
            for number, (index, undo) in enumerate(zip(group.indices, undos, strict=True)):
                outs[index] = _row_of(out, number, len(group.indices))
                for call in calls:
                    assert undo is not None
                    undo.note(call.of_row(number, len(group.indices), self.parts[index].cache))
        return outs

    def _of_group(self, group: _Group, given: Any) -> Any:
        if given is self.cache:
            return group.cache
        if isinstance(given, OfRows):
            raise NotImplementedError("one thing for each row, given to a module that moves states")
        if type(given) in (tuple, list):
            return type(given)(self._of_group(group, x) for x in given)
        if not isinstance(given, Tensor) or given.dim() == 0:
            return given
        if given.dim() < 2 or given.shape[:2] != (1, self.num_fed):
            raise NotImplementedError(f"a tensor of shape {tuple(given.shape)}, given to a module that moves states")
        return torch.cat([given[:, self.parts[index].span] for index in group.indices])

    def _masks(self, given: Any) -> Any:
        """A mask for each row, or one by position.

        Where the model's backend makes none for rows it is a causal one: no layer of it drops positions.
        """
        if isinstance(given, OfRows) or (isinstance(given, Tensor) and given.dim() == 2):
            return given
        if self._causal is None:
            layers = self.parts[0].cache.layers
            index = next(i for i, layer in enumerate(layers) if isinstance(layer, WholeLayer))
            make = AttentionMaskInterface()[self._config._attn_implementation]
            self._causal = OfRows(
                make(
                    batch_size=1,
                    q_length=num_new,
                    kv_length=num_seen,
                    q_offset=first_query,
                    kv_offset=first_key,
                    mask_function=causal_mask_function,
                    allow_is_causal_skip=not isinstance(layers[index], IndexedLayer),
                    dtype=self._like.dtype,
                    config=self._config,
                    device=self._like.device,
                )
                for num_new, num_seen, first_query, first_key in (_sizes(part, index) for part in self.parts)
            )
        return self._causal


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with as many new positions each, all of them with a past or all without."""

    indices: list[int]
    cache: GroupCache


def masks_of_rows(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of masks for transformers that makes one for each row in a pass of many."""

    def masks(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(seen := kwargs.get("kv_length"), _Sizes):
            return make(*args, **kwargs)
        found = []
        for num_new, num_seen, first_query, first_key in seen.rows:
            sizes = {"q_length": num_new, "kv_length": num_seen, "q_offset": first_query, "kv_offset": first_key}
            found.append(make(*args, **{**kwargs, **sizes}))
        return OfRows(found)

    return masks


# ---- taking over the modules of a model ------------------------------------------------------------------------------
@dataclass(slots=True)
class _Hold:
    """What was changed in a model, for as many targets as need it. It lies in the model itself, to go with it."""

    put_back: list[Callable[[], None]]
    num_users: int = 1


_HOLD = "_blockdraft_hold"


def take_over(
    model: nn.Module, modules: Sequence[nn.Module], also: Callable[[], Callable[[], None] | None]
) -> Callable[[], None]:
    """Let these modules ask the pass that runs how they are run, and do ``also``; the result undoes both.

    Outside of a pass of many rows the model does what it did. Targets on one model share it: what the first one did
    is undone when the last one lets go.
    """
    if _HOLD in vars(model):
        vars(model)[_HOLD].num_users += 1
    else:
        undo = also()
        vars(model)[_HOLD] = _Hold([*map(_take_over, modules), *([undo] if undo else [])])
    hold: _Hold = vars(model)[_HOLD]

    def let_go() -> None:
        hold.num_users -= 1
        if not hold.num_users:
            for put_back in hold.put_back:
                put_back()
            del vars(model)[_HOLD]

    return let_go


def _take_over(module: nn.Module) -> Callable[[], None]:
    plain: Callable[..., Any] = module.forward
    was_own = "forward" in vars(module)  # of accelerate, for example
    names = list(inspect.signature(plain).parameters)
    mask_at = names.index("attention_mask") if "attention_mask" in names else None

    def forward(*args: Any, **kwargs: Any) -> Any:
        joint = running()
        return plain(*args, **kwargs) if joint is None else joint.run(module, plain, mask_at, args, kwargs)

    module.forward = forward

    def put_back() -> None:
        if was_own:
            module.forward = plain
        else:
            del module.forward

    return put_back


# ---- tensors and states ----------------------------------------------------------------------------------------------
def _sizes(part: Part, layer: int) -> tuple[int, int, int, int]:
    """(new positions, positions seen, first query, first key) of a row in a layer, before it is written."""
    of_layer = part.cache.layers[layer]
    if not hasattr(of_layer, "get_mask_sizes"):
        return part.count, part.length + part.count, part.length, 0
    num_seen, first_key = of_layer.get_mask_sizes(part.count)
    return part.count, num_seen, part.cache.get_query_offset(layer), first_key


def _cut(given: Tensor, part: Part, num_fed: int) -> Tensor:
    """A row's part of a tensor over all positions."""
    if given.dim() == 0:
        return given
    if given.dim() >= 2 and given.shape[1] == num_fed:
        return given[:, part.span]
    if given.dim() == 3 and given.shape[1:] == (1, num_fed):  # positions of several kinds
        return given[..., part.span]
    if given.dim() == 1 and given.shape[0] == num_fed:
        return given[part.span]
    raise NotImplementedError(f"a tensor of shape {tuple(given.shape)} for {num_fed} positions")


def _joined(outs: list[Any]) -> Any:
    """What a module puts out for all positions, from what it put out for each row."""
    first = outs[0]
    if isinstance(first, Tensor):
        if first.dim() < 2 or any(x.shape[2:] != first.shape[2:] for x in outs):
            return OfRows(outs)
        return torch.cat(outs, dim=1)
    if isinstance(first, tuple):
        return tuple(_joined(list(x)) for x in zip(*outs, strict=True))
    return first if first is None else OfRows(outs)


def _row_of(out: Any, number: int, num_rows: int) -> Any:
    """One row of what a module put out for a group."""
    if isinstance(out, tuple):
        return tuple(_row_of(x, number, num_rows) for x in out)
    if not isinstance(out, Tensor):
        return out
    if out.dim() == 0 or out.shape[0] != num_rows:
        raise NotImplementedError(f"an output of shape {tuple(out.shape)} for {num_rows} rows")
    return out[number : number + 1]
