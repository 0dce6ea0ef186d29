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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from blockdraft.config import DraftConfig, require_int
from blockdraft.errors import CheckpointError, ConfigError

__all__ = ["Corpus", "CorpusBatch", "CorpusFacts"]

FACTS_FILE = "corpus.json"
SHARD_TENSORS = ("ids", "taps", "prompt_len", "len")
MIN_ANSWER_TOKENS = 3


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """What a corpus was made from; a mismatch with the recipe at load is an error."""

    target: str
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.target, str):
            raise ConfigError(f"target is {self.target!r}: it must be the target's name")
        if not isinstance(self.target_layer_ids, list | tuple):
            raise ConfigError(f"target_layer_ids is {self.target_layer_ids!r}: it must be a list of layers")
        for tap in self.target_layer_ids:
            require_int("an entry of target_layer_ids", tap, least=0)
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        require_int("target_hidden_size", self.target_hidden_size)
        require_int("vocab_size", self.vocab_size)

    def write(self, folder: Path) -> None:
        """Write corpus.json into a corpus folder."""
        payload = {**self.__dict__, "target_layer_ids": list(self.target_layer_ids)}
        (folder / FACTS_FILE).write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> CorpusFacts:
        """The facts of a corpus folder. Raises CheckpointError where there are none or they make no sense."""
        path = folder / FACTS_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder}: not a corpus, it has no {FACTS_FILE}; write one first")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON ({error}); write the corpus anew") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(raw, dict) or sorted(raw) != sorted(known):
            found = ", ".join(raw) if isinstance(raw, dict) else type(raw).__name__
            raise CheckpointError(f"{path} must hold {', '.join(known)}; found {found}")
        try:
            return cls(**raw)
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None

    def check_fits(self, config: DraftConfig) -> None:
        """Nothing; a ConfigError naming every number in which the corpus and the draft disagree."""
        pairs = (
            ("target_layer_ids", list(self.target_layer_ids), list(config.target_layer_ids)),
            ("target_hidden_size", self.target_hidden_size, config.target_hidden_size),
            ("vocab_size", self.vocab_size, config.vocab_size),
        )
        wrong = [f"{name} {mine} instead of {asked}" for name, mine, asked in pairs if mine != asked]
        if wrong:
            raise ConfigError(
                f"the corpus (written by {self.target}) has {', '.join(wrong)}; "
                "write a corpus for this recipe and target, or name the ones it was made for"
            )


@dataclass(frozen=True, slots=True)
class CorpusBatch:
    """Padded sequences of one training step; what lies past `len_B` is zero and is never trained."""

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


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    handle: Any
    ids: Tensor


class Corpus:
    """All usable sequences below a folder; `rescan` picks up shards that a running writer has added.

    A sequence is usable if it has at most `max_length` tokens and at least three of them are the target's.
    """

    def __init__(self, folder: Path, *, max_length: int) -> None:
        self.folder = folder
        self.facts = CorpusFacts.read(folder)
        self.max_length = max_length
        self._shards: list[_Shard] = []
        self._places: list[_Place] = []
        self.rescan()
        if not self._places:
            raise CheckpointError(
                f"{folder}: the corpus has no usable sequence ({len(self._shards)} shards; usable are sequences "
                f"of at most max_length {max_length} tokens with {MIN_ANSWER_TOKENS} or more of the target's)"
            )

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote, over all usable sequences."""
        return sum(place.length - place.prompt_len for place in self._places)

    @property
    def shard_names(self) -> list[str]:
        """File names in the order in which they were found, which fixes the sequences' indices."""
        return [shard.name for shard in self._shards]

    def rescan(self) -> int:
        """Number of sequences added by shards that were not there before."""
        before = len(self._places)
        seen = set(self.shard_names)
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name not in seen:
                self._add(path)
        return len(self._places) - before

    def use_shards(self, names: Sequence[str]) -> None:
        """Keep exactly these shards in this order (what a resumed run had); `rescan` finds the others again."""
        self._shards, self._places = [], []
        for name in names:
            path = self.folder / name
            if not path.is_file():
                raise CheckpointError(f"{path}: this shard was there when the run was saved; put it back")
            self._add(path)

    def _add(self, path: Path) -> None:
        try:
            handle = safe_open(str(path), framework="pt")
            names = list(handle.keys())
            if sorted(names) != sorted(SHARD_TENSORS):
                raise CheckpointError(
                    f"{path}: a shard holds {', '.join(SHARD_TENSORS)}; found {', '.join(names) or 'nothing'}"
                )
            ids = handle.get_tensor("ids").long()
            lengths, prompts = handle.get_tensor("len"), handle.get_tensor("prompt_len")
            taps_shape = list(handle.get_slice("taps").get_shape())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: the shard is damaged ({error}); delete it, or write it again") from None
        self._check(path, ids, taps_shape, lengths, prompts)
        shard, start = len(self._shards), 0
        self._shards.append(_Shard(path.name, handle, ids))
        for length, prompt_len in zip(lengths.tolist(), prompts.tolist(), strict=True):
            if length <= self.max_length and length - prompt_len >= MIN_ANSWER_TOKENS:
                self._places.append(_Place(shard, start, length, prompt_len))
            start += length

    def _check(self, path: Path, ids: Tensor, taps_shape: list[int], lengths: Tensor, prompts: Tensor) -> None:
        facts = self.facts
        expected = [len(ids), len(facts.target_layer_ids), facts.target_hidden_size]
        if taps_shape != expected:
            raise CheckpointError(f"{path}: taps have shape {taps_shape}, ids and corpus.json say {expected}")
        is_whole = lengths.shape == prompts.shape and lengths.dim() == 1 and int(lengths.sum()) == len(ids)
        if not is_whole or bool((prompts < 0).any()) or bool((prompts > lengths).any()):
            raise CheckpointError(
                f"{path}: len and prompt_len do not add up to the shard's {len(ids)} tokens; write it again"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < facts.vocab_size:
            raise CheckpointError(
                f"{path}: ids run from {int(ids.min())} to {int(ids.max())}; the target has 0 to {facts.vocab_size - 1}"
            )

    def token_ids(self) -> Tensor:
        """Sorted distinct token ids that the target wrote or read."""
        return torch.cat([shard.ids for shard in self._shards]).unique()

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        """The named sequences, zero-padded to the longest; taps as float32."""
        places = [self._places[i] for i in indices]
        longest = max(place.length for place in places)
        num_taps, width = len(self.facts.target_layer_ids), self.facts.target_hidden_size
        ids_BS = torch.zeros(len(places), longest, dtype=torch.long)
        taps_BSNE = torch.zeros(len(places), longest, num_taps, width)
        for row, place in enumerate(places):
            shard, span = self._shards[place.shard], slice(place.start, place.start + place.length)
            ids_BS[row, : place.length] = shard.ids[span]
            taps_BSNE[row, : place.length] = shard.handle.get_slice("taps")[span]
        return CorpusBatch(
            ids_BS,
            taps_BSNE,
            torch.tensor([place.prompt_len for place in places]),
            torch.tensor([place.length for place in places]),
        )
