"""What is asked: data sets by name, each with its prompt format and the hash of what is asked.

Owns which workloads there are and how a run gets one. Rows come from files, the hub or this package (`sources`), their
wording from `formats`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.bench.system import Prompt
from blockdraft.bench.workloads.formats import find_format
from blockdraft.bench.workloads.ruler import ARMS, RULER_SHA256, make_contexts, read_haystack
from blockdraft.bench.workloads.sets import make_prompts
from blockdraft.bench.workloads.sources import PLACES, own_rows, read_rows, read_set
from blockdraft.errors import RequestError, shown

__all__ = ["DATASETS", "MATRIX", "Workload", "load_ruler", "load_workload"]

DATASETS = (*PLACES, "own")
# The ten of the matrix; what cannot be had here is left out by name, never silently.
MATRIX = ("gsm8k", "math500", "humaneval", "mbpp", "mtbench", "specbench", "aime26", "gpqa", "speedbench", "own")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of one data set, and what has to stand beside their numbers."""

    name: str
    prompts: tuple[Prompt, ...]
    num_rows: int
    """Of the whole set, before it was cut."""
    format_name: str
    format_sha256: str
    source: str
    licence: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Short hash of ids, turns and everything else that is asked, in order."""
        asked = [[p.id, p.turns, p.system, p.is_raw, p.stop, p.max_new_tokens] for p in self.prompts]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "num_prompts": len(self.prompts),
            "num_prompts_of_the_set": self.num_rows,
            "format": self.format_name,
            "format_sha256": self.format_sha256,
            "prompts_sha256": self.sha256,
            "source": self.source,
            "licence": self.licence,
            **self.details,
        }


def load_workload(
    name: str,
    *,
    data: Path | None = None,
    format_name: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Workload:
    """A data set by name, or the JSONL file of that path ("custom": lines with prompt, turns or messages).

    `limit` prompts are taken evenly over the whole set, so that all its categories are there. Raises RequestError for
    an unknown name, UnavailableError for a set that cannot be had.
    """
    if limit is not None and limit < 1:
        raise RequestError(f"the number of prompts is {limit}; it must be at least 1")
    is_file = name not in DATASETS
    if is_file and not (name.endswith((".jsonl", ".jsonl.gz")) and Path(name).is_file()):
        raise RequestError(f"data set {shown(name)} is unknown; there are {', '.join(DATASETS)}, or name a .jsonl file")
    dataset = "custom" if is_file else name
    wording = find_format(dataset, format_name)
    if is_file:
        rows, source, licence = read_rows(Path(name)), Path(name).name, "the user's own"
    elif name == "own":
        rows, source, licence = own_rows(), "blockdraft", "Apache-2.0"
    else:
        hub = PLACES[name].hub
        rows = read_set(name, data, None)
        source = "files" if data is not None or hub is None else f"hub: {hub[0]}"
        licence = PLACES[name].licence
    prompts = make_prompts(dataset, rows, wording, seed=seed)
    return Workload(
        name=dataset,
        prompts=tuple(spread(prompts, limit)),
        num_rows=len(prompts),
        format_name=wording.name,
        format_sha256=wording.sha256,
        source=source,
        licence=licence,
    )


def load_ruler(
    haystack: Path,
    *,
    lengths: Sequence[int],
    count: int,
    seed: int,
    num_tokens: Callable[[str], int | None],
    arms: Sequence[str] = ARMS,
) -> Workload:
    """Retrieval at these lengths, `count` contexts of each, asked once in every arm."""
    text = read_haystack(haystack, num_tokens)
    prompts = [
        prompt
        for length in lengths
        for arm in arms
        for prompt in make_contexts(text, length=length, count=count, arm=arm, seed=seed, num_tokens=num_tokens)
    ]
    return Workload(
        name="ruler",
        prompts=tuple(prompts),
        num_rows=len(prompts),
        format_name="multi-key, between paragraphs",
        format_sha256=RULER_SHA256,
        source=haystack.name,
        licence="of the text",
        details={"haystack_sha256": text.sha256, "lengths": list(lengths), "arms": list(arms)},
    )


def spread(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """`limit` prompts, evenly over all."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]
