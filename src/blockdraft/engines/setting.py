"""What is to be started: the pair, the engine's version, and the machine that it is started on.

Owns: `Setting`, the one value that every rule of an engine's table is asked about. Must not know: any engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import RequestError, shown
from blockdraft.inspection.engines import Facts

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")
_MACHINE = re.compile(r"(\d+)\s*[xX]\s*([\w.-]+)")


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """A version as its release numbers; what follows them (rc, dev, a local part) is kept in `text` only."""

    text: str

    def __post_init__(self) -> None:
        if _RELEASE.match(self.text) is None:
            raise RequestError(f"the engine's version is {shown(self.text)}: it must begin with numbers, as 0.32.0")

    @property
    def release(self) -> tuple[int, ...]:
        found = _RELEASE.match(self.text)
        assert found is not None
        numbers = [int(part) for part in found[1].split(".")]
        while len(numbers) > 1 and numbers[-1] == 0:
            numbers.pop()
        return tuple(numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.release == other.release

    def __lt__(self, other: Version) -> bool:
        return self.release < other.release

    def __hash__(self) -> int:
        return hash(self.release)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An engine as it was found: its version, and which of the files that its table asks for it holds.

    `is_assumed`: nobody looked, the version is the one that was given or that the table was read at.
    """

    version: Version
    features: Collection[str] = ()
    is_assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """GPUs of one node, and how many nodes alike."""

    num_gpus: int
    gpu: str | None
    num_nodes: int

    @property
    def total_gpus(self) -> int:
        return self.num_gpus * self.num_nodes


def read_machine(gpus: str | None, num_nodes: int) -> Machine:
    """`8xH200` (all nodes together) on so many nodes. None: one GPU of a kind that nobody named, per node."""
    if num_nodes < 1:
        raise RequestError(f"--nodes is {num_nodes}: at least 1")
    if gpus is None:
        return Machine(num_gpus=1, gpu=None, num_nodes=num_nodes)
    found = _MACHINE.fullmatch(gpus.strip())
    total = int(found[1]) if found else int(gpus) if gpus.strip().isdigit() else 0
    if total < 1:
        raise RequestError(f"--gpus is {shown(gpus)}: give a count and a kind, as 8xH200, all nodes together")
    if total % num_nodes:
        raise RequestError(f"--gpus {gpus} on --nodes {num_nodes}: every node must have the same number of GPUs")
    return Machine(num_gpus=total // num_nodes, gpu=found[2] if found else None, num_nodes=num_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One launch. Paths are what the engine is given: a folder or a hub id.

    `width`: positions that the target scores in a step, the anchor and the proposals. `tap_stream`: the stream of a
    Kimi K3 target that the draft means, None where nobody says. `head`: host:port where several nodes meet.
    """

    draft: Facts
    draft_path: str
    target_path: str
    target_raw: Mapping[str, Any]
    width: int
    tap_stream: TapStream | None
    machine: Machine
    installed: Installed
    host: str = "127.0.0.1"
    port: int = 8000
    tensor_parallel: int = 1
    draft_window: int | None = None
    context: int | None = None
    concurrency: int | None = None
    memory_fraction: float | None = None
    node_rank: int = 0
    head: str | None = None

    @property
    def target(self) -> TargetFacts:
        assert self.draft.target is not None, "a launch has a target"
        return self.draft.target

    @property
    def num_proposals(self) -> int:
        return self.width - 1

    @property
    def is_narrowed(self) -> bool:
        """Fewer positions than the draft was trained with."""
        return self.width < self.draft.config.max_width

    @property
    def is_dspark(self) -> bool:
        return self.draft.family == "dspark"

    @property
    def is_kimi_k3(self) -> bool:
        return self.draft.is_kimi_k3

    @property
    def needs_remote_code(self) -> bool:
        """The target's config points at Python files of its own."""
        return bool(self.target_raw.get("auto_map")) or self.target_raw.get("model_type") == "kimi_k3"

    @property
    def is_target_quantised(self) -> bool:
        text = self.target_raw.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, Mapping) else None
        return bool(self.target_raw.get("quantization_config") or nested)

    @property
    def is_multi_node(self) -> bool:
        return self.machine.num_nodes > 1
