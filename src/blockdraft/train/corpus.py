"""Text that the target wrote, with the hidden states the draft reads: reading, checking and batching of shards.

Owns the shard layout. Knows nothing of models or losses.

A shard is one safetensors file; sequences stand one after another:
    ids [total]               int32, prompt and answer of every sequence
    taps [total, N, E]        bfloat16 or float16; row t = outputs of the tapped layers at position t;
                              the last position of a sequence was never fed to the target: zeros, never read
    prompt_len [sequences]    int64; ids[:prompt_len] are given, the rest was written by the target
    len [sequences]           int64

Letters: B sequences, S positions (padded), N taps, E target width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.errors import CheckpointError

__all__ = ["Corpus", "CorpusBatch", "CorpusFacts"]

FACTS_FILE = "corpus.json"
SHARD_TENSORS = ("ids", "taps", "prompt_len", "len")


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """What a corpus was made from; a mismatch with the recipe at load is an error."""

    target: str
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int

    def write(self, folder: Path) -> None:
        payload = {**self.__dict__, "target_layer_ids": list(self.target_layer_ids)}
        (folder / FACTS_FILE).write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> CorpusFacts:
        path = folder / FACTS_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: not a corpus, it has no {FACTS_FILE}; write one first")
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "target_layer_ids": tuple(raw["target_layer_ids"])})


@dataclass(frozen=True, slots=True)
class CorpusBatch:
    """Padded sequences of one training step."""

    ids_BS: Tensor
    taps_BSNE: Tensor
    prompt_len_B: Tensor
    len_B: Tensor


@dataclass(frozen=True, slots=True)
class _Place:
    shard: int
    start: int
    length: int
    prompt_len: int


class Corpus:
    """All usable sequences below a folder; `rescan` picks up shards that a running writer has added."""

    def __init__(self, folder: Path, *, max_length: int) -> None:
        self.folder = folder
        self.facts = CorpusFacts.read(folder)
        self.max_length = max_length
        self._shards: list[tuple[Path, Tensor]] = []
        self._handles: list[object] = []
        self._places: list[_Place] = []
        self._seen: set[Path] = set()
        self.rescan()
        if not self._places:
            raise CheckpointError(f"{folder}: the corpus has no usable sequence (shards end in .safetensors)")

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_answer_tokens(self) -> int:
        return sum(place.length - place.prompt_len for place in self._places)

    def rescan(self) -> int:
        """Number of sequences added by shards that were not there before."""
        before = len(self._places)
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self._seen:
                self._add(path)
        return len(self._places) - before

    def _add(self, path: Path) -> None:
        handle = safe_open(str(path), framework="pt")
        if sorted(handle.keys()) != sorted(SHARD_TENSORS):
            raise CheckpointError(f"{path.name}: a shard holds {', '.join(SHARD_TENSORS)}; found {', '.join(handle.keys())}")
        shape = handle.get_slice("taps").get_shape()
        expected = [len(self.facts.target_layer_ids), self.facts.target_hidden_size]
        if list(shape[1:]) != expected:
            raise CheckpointError(f"{path.name}: taps have shape {shape[1:]} per position, the corpus says {expected}")
        self._seen.add(path)
        shard = len(self._handles)
        self._handles.append(handle)
        self._shards.append((path, handle.get_tensor("ids").long()))
        start = 0
        for length, prompt_len in zip(handle.get_tensor("len").tolist(), handle.get_tensor("prompt_len").tolist(), strict=True):
            if length <= self.max_length and length - prompt_len >= 3:
                self._places.append(_Place(shard, start, length, prompt_len))
            start += length

    def token_ids(self) -> Tensor:
        """Sorted distinct token ids that the target wrote or read."""
        return torch.cat([ids for _, ids in self._shards]).unique()

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        """The named sequences, zero-padded to the longest."""
        places = [self._places[i] for i in indices]
        longest = max(place.length for place in places)
        num_taps, width = len(self.facts.target_layer_ids), self.facts.target_hidden_size
        ids_BS = torch.zeros(len(places), longest, dtype=torch.long)
        taps_BSNE = torch.zeros(len(places), longest, num_taps, width)
        for row, place in enumerate(places):
            end = place.start + place.length
            ids_BS[row, : place.length] = self._shards[place.shard][1][place.start : end]
            taps = self._handles[place.shard].get_slice("taps")[place.start : end]  # type: ignore[attr-defined]
            taps_BSNE[row, : place.length] = taps
        return CorpusBatch(
            ids_BS,
            taps_BSNE,
            torch.tensor([place.prompt_len for place in places]),
            torch.tensor([place.length for place in places]),
        )
