"""Training in several processes: who they are, what they add up, and how they stop together.

Owns the process group. Without torchrun's variables there is one process and nothing here communicates. The maths of
a step stays that of one process with all the sequences: loss terms are divided by denominators summed over the
processes, and gradients are summed, not averaged.

Launch (a folder that all processes see; `optim.sequences_per_step` is per process):
    torchrun --nproc-per-node 8 -m blockdraft.cli train recipe.toml ... optim.sharding=ddp
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m blockdraft.cli train ...
sharding "ddp" keeps the whole draft in every process; "fsdp2" spreads weights, gradients and the optimiser's state,
layer by layer, for drafts that do not fit. The checkpoint is one file, the same for any number of processes: a run goes
on with another number as long as the sequences of a step, over all processes, stay as many.

A process that fails says why, in one line; the others end without a word (`OtherProcessFailed`). While the main
process alone evaluates or writes, the others wait for at most WAIT_TIMEOUT; anything else may take COLLECTIVE_TIMEOUT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError, UnavailableError
from blockdraft.train.optim import MuonAndAdamW

__all__ = ["SHARDINGS", "OtherProcessFailed", "Parallel"]

SHARDINGS = ("none", "ddp", "fsdp2")
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
WAIT_TIMEOUT = timedelta(hours=2)
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_FAILED = "failed"
_LAYER_METHODS = ("context_kv", "block")  # what the model calls of a layer
_LAUNCH = "torchrun --nproc-per-node N -m blockdraft.cli train ..."

T = TypeVar("T")


class OtherProcessFailed(UnavailableError):
    """Another process of this run has failed and says why; this one has nothing to add."""


class Parallel:
    """The processes of one run. `rank` 0 is the main one: it alone writes files and shows progress."""

    def __init__(self, *, rank: int, world_size: int, device: torch.device, store: Store | None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._store = store
        self._waiting = None if store is None else dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Parallel:
        """One process, which never communicates."""
        return cls(rank=0, world_size=1, device=torch.device(device), store=None)

    @classmethod
    def from_env(cls, device: str = "cpu") -> Parallel:
        """What torchrun's variables say; `single` where none is set. `device` is "cpu" (gloo) or "cuda" (nccl)."""
        given = [name for name in _VARIABLES if name in os.environ]
        if "RANK" not in given and "WORLD_SIZE" not in given:
            return cls.single(device)
        if len(given) < len(_VARIABLES):
            missing = ", ".join(name for name in _VARIABLES if name not in given)
            raise ConfigError(f"{', '.join(given)} are set, but not {missing}; start several processes by {_LAUNCH}")
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        try:
            store, rank, world_size = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
            dist.init_process_group(
                "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=COLLECTIVE_TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UnavailableError(
                f"the processes did not find each other at {address} ({_said(error)}); start them by {_LAUNCH}"
            ) from None
        return cls(rank=rank, world_size=world_size, device=place, store=PrefixStore("blockdraft", store))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Leave the group, after a run that has come to its end in every process."""
        if self._store is not None:
            self.barrier()
            dist.destroy_process_group()
            self._store = self._waiting = None

    # ---- shares and sums ---------------------------------------------------------------------------------------------
    def shard(self, items: Sequence[T]) -> list[T]:
        """This process's share: an equal run of `items`, in order; what is left over goes to the first processes."""
        least, over = divmod(len(items), self.world_size)
        start = self.rank * least + min(self.rank, over)
        return list(items[start : start + least + (self.rank < over)])

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor`, now the sum over all processes, in place. It must carry no gradient."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    # ---- agreement ---------------------------------------------------------------------------------------------------
    def barrier(self) -> None:
        """Wait, for at most WAIT_TIMEOUT, until every process is here."""
        if self.world_size > 1:
            dist.barrier(group=self._waiting)

    def agree(self, value: T) -> T:
        """The main process's `value` in every process: a decision is made once."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._waiting)
        return box[0]

    def on_main(self, call: Callable[[], T]) -> T:
        """`call()`'s result, made by the main process alone while the others wait; a small plain value."""
        return cast(T, self.agree(call() if self.is_main else None))

    def require_same(self, name: str, value: object) -> None:
        """Nothing; a ConfigError where the processes hold different values of what they must share."""
        if self.world_size == 1:
            return
        values: list[object] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._waiting)
        if other := [index for index, found in enumerate(values) if found != values[0]]:
            raise ConfigError(
                f"process {other[0]} has another {name} than process 0 ({values[other[0]]!r} instead of "
                f"{values[0]!r}); all processes must see the same files, of the same state"
            )

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A block that the main process runs before all others, since it may fetch or write what they then find."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()

    # ---- stopping together -------------------------------------------------------------------------------------------
    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which one process's failure ends all: the first to fail says why, the others raise
        OtherProcessFailed.
        """
        try:
            yield
        except Exception as error:
            if self.world_size == 1:
                raise
            first = self._first_to_fail()
            if first != self.rank:
                raise OtherProcessFailed(f"process {first} has failed, and says why") from error
            if _is_lost_peer(error):
                raise UnavailableError(
                    f"process {self.rank} lost touch with another process, which was killed or hangs ({_said(error)}); "
                    "the last checkpoint is whole: run again to go on from it"
                ) from None
            raise

    def _first_to_fail(self) -> int:
        """The process that failed first, which may be this one; this one too where it can no longer be told."""
        assert self._store is not None
        try:
            return int(self._store.compare_set(_FAILED, "", str(self.rank)))
        except RuntimeError:
            return self.rank

    # ---- one step ----------------------------------------------------------------------------------------------------
    def check_sharding(self, sharding: str) -> None:
        """Nothing; a ConfigError where `sharding` does not go with the way the processes were started."""
        if sharding not in SHARDINGS:
            raise ConfigError(f"optim.sharding is {sharding!r}; it must be one of {', '.join(SHARDINGS)}")
        if sharding == "none" and self.world_size > 1:
            raise ConfigError(
                f"optim.sharding is none, and {self.world_size} processes were started; "
                "set optim.sharding=ddp, or fsdp2 for a draft too large for one device"
            )
        if sharding != "none" and self._store is None:
            raise ConfigError(
                f"optim.sharding is {sharding}, and one process was started without torchrun; "
                f"start it by {_LAUNCH}, or set optim.sharding=none"
            )

    def wrap(self, model: DraftModel, forward: Callable[..., T], sharding: str, *, skips: bool) -> Callable[..., T]:
        """`forward`, to be called instead of it in every step: its result then takes part in `backward`.

        `model` is what `forward` computes with. Its parameters are spread here under "fsdp2", so the optimiser is made
        afterwards. Only what `backward` reaches may carry a gradient out of `forward`; whatever else it reads (the
        target's head) stays outside of the model. `skips`: in some steps a parameter gets no gradient at all.
        """
        self.check_sharding(sharding)
        if sharding == "none":
            return forward
        self.barrier()  # whoever is slow to load may take longer than COLLECTIVE_TIMEOUT
        step = _Step(model, forward)
        if sharding == "ddp":
            return DistributedDataParallel(step, find_unused_parameters=skips, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
            for name in _LAYER_METHODS:
                register_fsdp_forward_method(layer, name)
        fully_shard(step, mesh=mesh)
        return step

    def backward(self, loss: Tensor) -> None:
        """Gradients of the sum of all processes' `loss`: whole in every process, or its own part under "fsdp2"."""
        (loss * self.world_size).backward()  # both kinds of sharding average

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> Tensor:
        """The norm of the whole gradient before it is scaled down to at most `max_norm`."""
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        own = [_own_part(grad) for grad in grads]
        norm = torch.nn.utils.get_total_norm(own)
        if any(mine is not grad for mine, grad in zip(own, grads, strict=True)):
            norm = self.sum_(norm.square()).sqrt()
        torch._foreach_mul_(own, (max_norm / (norm + 1e-6)).clamp_max(1.0))
        return norm

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def whole(self, tree: Any) -> Any:
        """`tree` with every spread tensor put together, on the CPU of the main process (None in the others).

        Every process must call it.
        """
        if isinstance(tree, Mapping):
            return {key: self.whole(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self.whole(value) for value in tree)
        if not _is_spread(tree):
            return tree
        full = tree.full_tensor()
        return full.cpu() if self.is_main else None

    def whole_model(self, model: DraftModel) -> DraftModel:
        """`model`, or where it is spread a copy in one piece, in the main process (the others get the model itself).

        Every process must call it.
        """
        tensors = self.whole(model.state_dict())
        if not self.is_main or not any(_is_spread(parameter) for parameter in model.parameters()):
            return model
        return DraftModel.from_checkpoint(_Weights(model.config, tensors), device=self.device)

    def load_whole(
        self, model: nn.Module, optimiser: torch.optim.Optimizer | MuonAndAdamW, state: Mapping[str, Any]
    ) -> None:
        """Take over state["model"] and state["optimiser"], which are whole; each process keeps its own part."""
        mine, saved = model.state_dict(), state["optimiser"]
        model.load_state_dict({name: _spread_like(mine.get(name), value) for name, value in state["model"].items()})
        parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        moments = {
            index: {name: _spread_like(parameters[index], value) for name, value in entry.items()}
            for index, entry in saved["state"].items()
        }
        optimiser.load_state_dict({**saved, "state": moments})


@dataclass(frozen=True)
class _Weights:
    config: DraftConfig
    tensors: dict[str, Tensor]


class _Step(nn.Module):
    """A step's computation as a module, which is what torch's two ways of sharding wrap."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._compute = forward

    def forward(self, *args: Any) -> Any:
        return self._compute(*args)


def _is_spread(value: Any) -> bool:
    """Whether a value is a tensor of which this process holds a part (torch's DTensor, imported only where one is)."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def _own_part(tensor: Tensor) -> Tensor:
    part: Tensor = tensor.to_local() if _is_spread(tensor) else tensor  # type: ignore[attr-defined]
    return part


def _spread_like(own: Any, value: Any) -> Any:
    """This process's part of a whole tensor, where `own` is spread; other values as they are."""
    if not _is_spread(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _is_lost_peer(error: Exception) -> bool:
    """Whether an error is the network's: gloo's carry no kind of their own, only its name in the text."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _said(error: Exception) -> str:
    """The first sentence of a network's error, without the place in its source."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^]]*\] *", "", line).split(". ")[0][:120]
