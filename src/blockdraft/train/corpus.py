"""Text that the target wrote, with the hidden states the draft reads: reading, checking and batching of shards.

Owns the shard layout. Knows nothing of models or losses.

A shard is one safetensors file and, written after it, a seal: a JSON file of the same name with its SHA-256. A shard
without a seal is unfinished and is not there. Sequences stand one after another:
    ids [total]               int32, every sequence with all its turns
    written [total]           bool, true where the target wrote the token
    taps [total, N, E]        bfloat16 or float16; row t = outputs of the stored layers at position t; the last position
                              of a sequence was never fed to the target: zeros, never read. Absent with online features
    len [sequences]           int64
    prompt [sequences]        int64, line of the corpus's prompts.jsonl that the sequence answers

Letters: B sequences, S positions (padded), N taps, E target width.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.train.corpus_facts import CorpusFacts
from blockdraft.train.files import file_sha256, write_text_atomically

__all__ = [
    "Corpus",
    "CorpusBatch",
    "CorpusFacts",
    "CorpusSource",
    "TextSequence",
    "assemble",
    "read_seal",
    "seal_of",
    "seal_shard",
    "write_shard",
]

SHARD_PATTERN = "*.safetensors"
MANIFEST_FILE = "manifest.json"
SHARD_TENSORS = ("ids", "len", "prompt", "taps", "written")
MIN_WRITTEN_TOKENS = 3
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class TextSequence:
    """One sequence of a shard. `taps_SNE` holds the stored layers; its last row is not used."""

    ids: list[int]
    written: list[bool]
    taps_SNE: Tensor
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class CorpusBatch:
    """Padded sequences of one training step; what lies past `len_B` is zero, not written and never trained.

    `last_BSE` is what the target's last layer put out, before its final norm; None where the corpus does not keep it.
    """

    ids_BS: Tensor
    taps_BSNE: Tensor
    written_BS: Tensor
    len_B: Tensor
    last_BSE: Tensor | None = None


class CorpusSource(Protocol):
    """What the trainer asks of a corpus, whether its taps are stored or computed."""

    @property
    def facts(self) -> CorpusFacts: ...

    @property
    def num_answer_tokens(self) -> int: ...

    @property
    def shard_names(self) -> list[str]: ...

    def __len__(self) -> int: ...

    def rescan(self) -> int: ...

    def use_shards(self, names: Sequence[str]) -> None: ...

    def token_ids(self) -> Tensor: ...

    def check_fits(self, config: DraftConfig) -> None: ...

    def batch(self, indices: Sequence[int]) -> CorpusBatch: ...


@dataclass(frozen=True, slots=True)
class _Place:
    shard: int
    start: int
    length: int
    num_written: int


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    handle: Any
    ids: Tensor
    written: Tensor


class Corpus:
    """All usable sequences below a folder; `rescan` picks up shards that a running writer has added.

    A sequence is usable if it has at most `max_length` tokens and at least three of them are the target's. Every
    shard's SHA-256 is checked when it is first opened.
    """

    def __init__(self, folder: Path, *, max_length: int) -> None:
        self.folder = folder
        self.facts = CorpusFacts.read(folder)
        self.max_length = max_length
        self._shards: list[_Shard] = []
        self._places: list[_Place] = []
        self.rescan()
        self._check_manifest()
        if not self._places:
            raise CheckpointError(
                f"{folder}: the corpus has no usable sequence ({len(self._shards)} shards; usable are sequences "
                f"of at most max_length {max_length} tokens with {MIN_WRITTEN_TOKENS} or more of the target's)"
            )

    def _check_manifest(self) -> None:
        """Nothing; a CheckpointError if the corpus is finished and a shard of it is not here."""
        path = self.folder / MANIFEST_FILE
        if not path.is_file():
            return
        try:
            names = list(json.loads(path.read_text(encoding="utf-8"))["shards"])
        except (OSError, ValueError, KeyError, TypeError):
            raise CheckpointError(f"{path} is not the manifest of a corpus; delete it, and {_ADVICE_ON}") from None
        if lost := sorted(set(names) - set(self.shard_names)):
            raise CheckpointError(
                f"{self.folder / lost[0]}: the manifest names this shard, put it back, or {_ADVICE_ON}"
            )

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote, over all usable sequences."""
        return sum(place.num_written for place in self._places)

    @property
    def shard_names(self) -> list[str]:
        """File names in the order in which they were found, which fixes the sequences' indices."""
        return [shard.name for shard in self._shards]

    def check_fits(self, config: DraftConfig) -> None:
        """Nothing; a ConfigError naming every number in which the corpus and the draft disagree."""
        self.facts.check_fits(config)

    def rescan(self) -> int:
        """Number of sequences added by shards that were not there before."""
        before = len(self._places)
        seen = set(self.shard_names)
        for path in sorted(self.folder.glob(SHARD_PATTERN)):
            if path.name not in seen and seal_of(path).is_file():
                self._add(path)
        return len(self._places) - before

    def use_shards(self, names: Sequence[str]) -> None:
        """Keep exactly these shards in this order (what a resumed run had); `rescan` finds the others again."""
        known = {shard.name: shard for shard in self._shards}
        self._shards, self._places = [], []
        for name in names:
            path = self.folder / name
            if name in known:
                self._place(known[name])
            elif path.is_file() and seal_of(path).is_file():
                self._add(path)
            else:
                raise CheckpointError(f"{path}: this shard was there when the run was saved; put it back")

    def _add(self, path: Path) -> None:
        seal = read_seal(path)
        tensors = [name for name in SHARD_TENSORS if name != "taps" or self.facts.has_taps]
        try:
            if seal["sha256"] != file_sha256(path):
                raise CheckpointError(
                    f"{path}: the shard is damaged, its SHA-256 is not the one in its seal; {_ADVICE}"
                )
            handle = safe_open(str(path), framework="pt")
            names = list(handle.keys())
            if sorted(names) != tensors:
                raise CheckpointError(
                    f"{path}: a shard of this corpus holds {', '.join(tensors)}; found {', '.join(names) or 'nothing'}"
                )
            ids, written = handle.get_tensor("ids").long(), handle.get_tensor("written")
            taps_shape = list(handle.get_slice("taps").get_shape()) if self.facts.has_taps else None
            shard = _Shard(path.name, handle, ids, written)
            self._check(path, shard, taps_shape, handle.get_tensor("len"), handle.get_tensor("prompt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: the shard is damaged ({error}); {_ADVICE}") from None
        self._place(shard)

    def _place(self, shard: _Shard) -> None:
        number, start = len(self._shards), 0
        self._shards.append(shard)
        before = [0, *shard.written.cumsum(0).tolist()]
        for length in shard.handle.get_tensor("len").tolist():
            num_written = before[start + length] - before[start]
            if length <= self.max_length and num_written >= MIN_WRITTEN_TOKENS:
                self._places.append(_Place(number, start, length, num_written))
            start += length

    def _check(self, path: Path, shard: _Shard, taps_shape: list[int] | None, lengths: Tensor, prompts: Tensor) -> None:
        facts, ids, written = self.facts, shard.ids, shard.written
        expected = [len(ids), len(facts.stored_layer_ids), facts.target_hidden_size]
        if taps_shape is not None and taps_shape != expected:
            raise CheckpointError(f"{path}: taps have shape {taps_shape}, ids and corpus.json say {expected}")
        is_whole = lengths.shape == prompts.shape and lengths.dim() == 1 and int(lengths.sum()) == len(ids)
        if not is_whole or written.shape != ids.shape or written.dtype != torch.bool or bool((lengths < 1).any()):
            raise CheckpointError(
                f"{path}: len, prompt and written do not add up to the shard's {len(ids)} tokens; {_ADVICE}"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < facts.vocab_size:
            raise CheckpointError(
                f"{path}: ids run from {int(ids.min())} to {int(ids.max())}; the target has 0 to {facts.vocab_size - 1}"
            )

    def token_ids(self) -> Tensor:
        """Sorted distinct token ids that the target wrote or read."""
        return torch.cat([shard.ids for shard in self._shards]).unique()

    def texts(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """ids_BS, written_BS and len_B of the named sequences, zero-padded to the longest; no taps are read."""
        places = [self._places[i] for i in indices]
        longest = max(place.length for place in places)
        ids_BS = torch.zeros(len(places), longest, dtype=torch.long)
        written_BS = torch.zeros(len(places), longest, dtype=torch.bool)
        for row, place in enumerate(places):
            shard, span = self._shards[place.shard], slice(place.start, place.start + place.length)
            ids_BS[row, : place.length] = shard.ids[span]
            written_BS[row, : place.length] = shard.written[span]
        return ids_BS, written_BS, torch.tensor([place.length for place in places])

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        """The named sequences, zero-padded to the longest; taps as float32. Needs a corpus with taps on disk."""
        facts = self.facts
        if not facts.has_taps:
            raise ConfigError(
                f'{self.folder} holds text without taps; set text.features to "online", or write a corpus with taps'
            )
        ids_BS, written_BS, len_B = self.texts(indices)
        stored_BSNE = torch.zeros(*ids_BS.shape, len(facts.stored_layer_ids), facts.target_hidden_size)
        for row, place in enumerate(self._places[i] for i in indices):
            taps = self._shards[place.shard].handle.get_slice("taps")
            stored_BSNE[row, : place.length] = taps[place.start : place.start + place.length]
        return assemble(facts, ids_BS, stored_BSNE, written_BS, len_B)


def assemble(facts: CorpusFacts, ids_BS: Tensor, stored_BSNE: Tensor, written_BS: Tensor, len_B: Tensor) -> CorpusBatch:
    """A batch from the outputs of the stored layers: the draft's taps, and the last layer where it is kept."""
    taps_BSNE = stored_BSNE[:, :, : len(facts.target_layer_ids)]
    last_BSE = None
    if facts.last_layer_id is not None:
        last_BSE = stored_BSNE[:, :, facts.stored_layer_ids.index(facts.last_layer_id)]
    return CorpusBatch(ids_BS, taps_BSNE, written_BS, len_B, last_BSE)


# ---- writing ---------------------------------------------------------------------------------------------------------
_ADVICE_ON = "let the corpus be written on"
_ADVICE = f"delete it and its seal, and {_ADVICE_ON}"


def write_shard(path: Path, sequences: Sequence[TextSequence], *, facts: CorpusFacts) -> dict[str, Any]:
    """Write a shard atomically, without its seal; the returned entries belong into that.

    Raises CheckpointError where float16 cannot hold a tap or the disk is full.
    """
    tensors = {
        "ids": torch.tensor([i for one in sequences for i in one.ids], dtype=torch.int32),
        "written": torch.tensor([flag for one in sequences for flag in one.written], dtype=torch.bool),
        "len": torch.tensor([len(one.ids) for one in sequences], dtype=torch.int64),
        "prompt": torch.tensor([one.prompt for one in sequences], dtype=torch.int64),
    }
    if facts.has_taps:
        dtype, layers = DTYPES[facts.features_dtype], len(facts.stored_layer_ids)
        pieces = [_closed(one.taps_SNE.to("cpu", dtype)) for one in sequences]
        tensors["taps"] = torch.cat(pieces) if pieces else torch.zeros(0, layers, facts.target_hidden_size, dtype=dtype)
        if not bool(torch.isfinite(tensors["taps"]).all()):
            advice = (
                'set text.features_dtype to "bfloat16"' if dtype == torch.float16 else "look at the target's numbers"
            )
            raise CheckpointError(f"{path}: a tap is not a finite {facts.features_dtype} number; {advice}")
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        for left in path.parent.glob(f"{path.stem}.*.tmp"):  # of a process that was killed: a shard has one writer
            left.unlink(missing_ok=True)
        temporary.touch()
        rights = temporary.stat().st_mode  # those that files have here: safetensors would let nobody else read it
        save_file(tensors, str(temporary))
        temporary.chmod(rights)
        sha256 = file_sha256(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error}); finished shards are kept: free some space, then run again"
        ) from None
    return {
        "sha256": sha256,
        "sequences": len(sequences),
        "tokens": len(tensors["ids"]),
        "written_tokens": int(tensors["written"].sum()),
    }


def _closed(taps_SNE: Tensor) -> Tensor:
    """The taps with zeros at the last position, whatever stood there: it is the next one to be fed."""
    return torch.cat([taps_SNE[:-1], torch.zeros_like(taps_SNE[-1:])])


def seal_of(path: Path) -> Path:
    """The seal that belongs to a shard."""
    return path.with_suffix(".json")


def seal_shard(path: Path, entries: dict[str, Any]) -> None:
    """Declare a shard finished. `entries` hold at least its sha256."""
    write_text_atomically(seal_of(path), json.dumps(entries, indent=1) + "\n")


def read_seal(path: Path) -> dict[str, Any]:
    """The entries of a shard's seal. Raises CheckpointError for one that is none."""
    seal = seal_of(path)
    try:
        entries = json.loads(seal.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{seal} cannot be read ({error}); {_ADVICE}") from None
    if not isinstance(entries, dict) or not isinstance(entries.get("sha256"), str):
        raise CheckpointError(f"{seal} is not the seal of a shard, it has no sha256; {_ADVICE}")
    return entries
