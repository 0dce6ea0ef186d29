"""Checkpoint folders: config.json and weight files, read whole or not at all, written whole or not at all.

Owns: `Checkpoint`, the files of a folder, an atomic write, what a learned mask embedding looks like on disk.
A dialect is a `Layout`: its keys, its tensor names, and which tensors of its own a draft may carry in it.
Must not know: what any key or tensor means. torch is imported only where weights are loaded or saved.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blockdraft.config import DraftConfig, TargetFacts, require_int
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats._safetensors import WEIGHTS, Entry, list_entries, read_json
from blockdraft.formats._vocabulary import check_head_ids, ids_of_maps, maps_of_ids
from blockdraft.formats._zlab_tensors import (
    D2T,
    HEAD_IDS,
    MASK_EMBEDDING,
    T2D,
    TRANSFER_CODES,
    TRANSFER_READY,
    check_header,
    optional_tensors,
    some,
    split_fused,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "MASK_EMBEDDING_FILE",
    "Checkpoint",
    "Layout",
    "as_stored",
    "check_block_size",
    "check_values",
    "has_mask_embedding_file",
    "read_raw_config",
]

CONFIG = "config.json"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
_TAPS_KEYS = ("target_layer_ids", "aux_hidden_state_layer_ids")


@dataclass(slots=True)
class Checkpoint:
    """A draft as it stands on disk: its config and its tensors under canonical names.

    Canonical: no `model.` prefix, codebooks without `.weight`. Optional tensors: embed_tokens.weight [V, D],
    lm_head.weight [V, D], mask_embedding [D]. With a reduced vocabulary lm_head.weight has a row for each of its ids,
    and head_ids, of int64, says which of the target's ids they are.
    """

    config: DraftConfig
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class ConfigReader(Protocol):
    """The one meaning of a config.json. `target` settles what the dialect itself does not state."""

    def __call__(
        self,
        raw: Mapping[str, Any],
        *,
        allow_mask_is_eos: bool = False,
        fc_shape: tuple[int, ...] | None = None,
        target: TargetFacts | None = None,
    ) -> DraftConfig: ...


class ConfigWriter(Protocol):
    """The keys of a config, or a ConfigError that names what the dialect cannot express."""

    def __call__(self, config: DraftConfig, *, dtype: str = "bfloat16") -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One dialect of checkpoint folders.

    `detect` is asked with the config.json and the names of the tensors, if there are any. `own` names the
    optional tensors that have a place in it.
    """

    name: str
    label: str
    detect: Callable[[Mapping[str, Any], Collection[str]], bool]
    config_from_dict: ConfigReader
    config_to_dict: ConfigWriter
    canonical_name: Callable[[str], str]
    stored_name: Callable[[str], str]
    own: frozenset[str]

    def read_raw(self, source: Path | str) -> tuple[Any, Path | None]:
        """What a checkpoint says of itself, as it stands, and where its weights are; None for a bare config.json."""
        return read_raw_config(source)

    def read_config(
        self,
        source: Path | str,
        *,
        allow_mask_is_eos: bool = False,
        target: TargetFacts | None = None,
        block_size: int | None = None,
    ) -> DraftConfig:
        """The config of a checkpoint folder or of a bare config.json. `block_size`: of a file that states none."""
        raw, folder = read_raw_config(source)
        if block_size is not None and isinstance(raw, Mapping):
            raw = _with_block_size(raw, require_int("block_size", block_size))
        fc_shape = None
        if folder is not None and isinstance(raw, Mapping):
            fc_shape = self._fc_shape(folder, raw)
        return self.config_from_dict(raw, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape, target=target)

    def _fc_shape(self, folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The shape of fc.weight, looked up only where the message about missing taps needs it."""
        nest = raw.get("dflash_config")
        places = [raw, nest if isinstance(nest, Mapping) else {}]
        if any(key in place for place in places for key in _TAPS_KEYS):
            return None
        try:
            return self.read_header(folder).get("fc.weight", (None, None))[1]
        except CheckpointError:
            return None

    def read_header(
        self, folder: Path | str, config: DraftConfig | None = None
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Canonical name -> (safetensors dtype, shape) of a folder's weight files; needs no torch.

        With its `config`, a fused projection counts as the two that it holds.
        """
        entries = self._entries(Path(folder))
        if config is not None:
            entries = split_fused(config, entries)
        return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}

    def _entries(self, folder: Path) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        for entry in list_entries(folder):
            name = self.canonical_name(entry.name)
            if name in found:
                raise CheckpointError(f"{found[name].name} and {entry.name} are the same tensor: remove one of them")
            if name == MASK_EMBEDDING and has_mask_embedding_file(folder):
                raise CheckpointError(
                    f"{entry.name} stands in the weights and in {MASK_EMBEDDING_FILE}: remove one of them"
                )
            found[name] = entry
        return found

    def check(
        self, config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path | None = None
    ) -> None:
        """Raise CheckpointError if the tensors are not those of the config, or have no place in this dialect."""
        check_header(config, header)
        names = set(header)
        if folder is not None and has_mask_embedding_file(folder):
            names.add(MASK_EMBEDDING)
        homeless = sorted((names & set(optional_tensors(config))) - self.own)
        if homeless:
            raise CheckpointError(f"{some(homeless)}: {self.label} has no place for it")

    def check_vocabulary(self, config: DraftConfig) -> None:
        """Raise ConfigError for a reduced vocabulary where this dialect has no place for its ids."""
        if config.draft_vocab_size is not None and HEAD_IDS not in self.own:
            raise ConfigError(
                f"{self.label} cannot express a reduced draft vocabulary (draft_vocab_size {config.draft_vocab_size} "
                f"of {config.vocab_size}), a speculators checkpoint can"
            )

    def read(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        allow_mask_is_eos: bool = False,
        target: TargetFacts | None = None,
        block_size: int | None = None,
    ) -> Checkpoint:
        """The checkpoint of a folder, every tensor accounted for and finite. `dtype` None: as stored.

        `block_size`: of a file that states none.
        """
        folder = Path(folder)
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file: give the folder that holds config.json and {WEIGHTS}")
        config = self.read_config(folder, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size)
        given = self._entries(folder)
        entries = split_fused(config, given)
        self.check(config, {name: (entry.dtype, entry.shape) for name, entry in entries.items()}, folder)
        tensors = _load(entries)
        if config.draft_vocab_size is not None:
            tensors[HEAD_IDS] = ids_of_maps(tensors[HEAD_IDS], _load({T2D: given[T2D]})[T2D])
        if TRANSFER_READY in given and TRANSFER_CODES in tensors:
            _check_ready(_load({TRANSFER_READY: given[TRANSFER_READY]})[TRANSFER_READY], tensors[TRANSFER_CODES])
        if has_mask_embedding_file(folder):
            tensors[MASK_EMBEDDING] = _read_mask_embedding(folder / MASK_EMBEDDING_FILE, config)
        check_values(tensors)
        if dtype is not None:
            tensors = {name: as_stored(tensor, dtype) for name, tensor in tensors.items()}
        return Checkpoint(config=config, tensors=tensors)

    def write(
        self,
        folder: Path | str,
        checkpoint: Checkpoint,
        *,
        dtype: str | None = "bfloat16",
        overwrite: bool = False,
        verify: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the folder: all of it or nothing, by a temporary folder that is renamed at the end.

        `dtype` names the stored type (bfloat16, float16, float32, float64); None keeps each tensor's own.
        `overwrite` replaces a folder that holds nothing but an earlier checkpoint. `verify` is called with the
        written folder before it takes its place; if it raises, nothing is kept.
        """
        folder = Path(folder)
        self.check_vocabulary(checkpoint.config)
        tensors, stored = self._prepared(checkpoint, dtype)
        raw = self.config_to_dict(checkpoint.config, dtype=stored)
        _check_destination(folder, overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fresh, old = temporary / "new", temporary / "old"
            fresh.mkdir()
            mask = tensors.pop(MASK_EMBEDDING, None)
            named = {self.stored_name(name): tensor.clone() for name, tensor in tensors.items()}
            if HEAD_IDS in tensors:
                del named[HEAD_IDS]
                named[D2T], named[T2D] = maps_of_ids(tensors[HEAD_IDS], checkpoint.config.vocab_size)
            if TRANSFER_CODES in tensors:
                named[TRANSFER_READY] = tensors[TRANSFER_CODES].any()
            _write_files(fresh, named, raw, mask, checkpoint.config.mask_token_id)
            if verify is not None:
                verify(fresh)
            if folder.exists():
                os.rename(folder, old)
            os.rename(fresh, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _prepared(self, checkpoint: Checkpoint, dtype: str | None) -> tuple[dict[str, torch.Tensor], str]:
        import torch

        names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
        if dtype is not None and dtype not in names:
            raise CheckpointError(f"dtype is {dtype!r}: a checkpoint is stored in {', '.join(names)}")
        kind: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
        tensors = {
            name: as_stored(tensor.detach(), kind).to("cpu").contiguous() for name, tensor in checkpoint.tensors.items()
        }
        kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        stored = {**names, "int64": "I64"}
        header = {name: (stored.get(kinds[name], kinds[name]), tuple(tensor.shape)) for name, tensor in tensors.items()}
        self.check(checkpoint.config, header)
        check_values(tensors)
        if HEAD_IDS in tensors:
            check_head_ids(tensors[HEAD_IDS], checkpoint.config.vocab_size)
        return tensors, kinds["fc.weight"]


def read_raw_config(source: Path | str) -> tuple[Any, Path | None]:
    """The JSON value of a config.json and its folder; the folder is None if the file itself was given."""
    path = Path(source)
    if path.is_dir():
        file, folder = path / CONFIG, path
        if not file.is_file():
            state = "is empty" if not any(path.iterdir()) else "has no config.json"
            raise CheckpointError(f"{path} {state}: a checkpoint is a folder with config.json and {WEIGHTS}")
    elif path.is_file():
        file, folder = path, None
        if path.suffix != ".json":
            raise CheckpointError(f"{path} is not a config.json: give the folder of the checkpoint or its config.json")
    else:
        text = str(source)
        is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        hint = "a hub id is not fetched here, download it first" if is_id else "give a folder or a config.json"
        raise CheckpointError(f"{text} does not exist: {hint}")
    try:
        return read_json(file), folder
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a JSON file: {error}") from error


def _with_block_size(raw: Mapping[str, Any], block_size: int) -> Mapping[str, Any]:
    """The config with a block size that it lacks. Raises ConfigError if it states another."""
    nest = raw.get("dflash_config")
    for place in (raw, nest if isinstance(nest, Mapping) else {}):
        if place.get("block_size") is not None:
            check_block_size(place["block_size"], block_size)
            return raw
    return {**raw, "block_size": block_size}


def check_block_size(stated: object, given: int) -> None:
    """Raise ConfigError if a file states another block size than the one that is given for it."""
    if stated != given:
        raise ConfigError(
            f"block_size is {stated!r} in the file and given as {given}: leave the option out, it is for a file that "
            "states none (a request takes a narrower block by its width)"
        )


def has_mask_embedding_file(folder: Path) -> bool:
    """Whether a learned mask embedding lies beside the weights."""
    return os.path.lexists(folder / MASK_EMBEDDING_FILE)  # a link that leads nowhere is damage, not absence


def _load(entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    import safetensors

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        try:
            with safetensors.safe_open(file, framework="pt") as stream:
                for name, entry in entries.items():
                    if entry.file == file:
                        tensors[name] = _part(stream, entry)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return {name: tensors[name] for name in entries}


def _part(stream: Any, entry: Entry) -> torch.Tensor:
    if entry.rows is None:
        return stream.get_tensor(entry.name)
    begin, end = entry.rows
    return stream.get_slice(entry.name)[begin:end]


def check_values(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise CheckpointError for a tensor with NaN or infinity."""
    bad = sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if bad:
        raise CheckpointError(f"{len(bad)} tensors hold NaN or infinity: {some(bad)}; the checkpoint is damaged")
    if TRANSFER_CODES in tensors and not bool(tensors[TRANSFER_CODES].any()):
        raise CheckpointError(f"{TRANSFER_CODES} holds only zeros: its codes were never made from the target's head")


def as_stored(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor in another type, None its own; ids stay ids."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_ready(is_ready: torch.Tensor, codes: torch.Tensor) -> None:
    if not bool(is_ready) and bool(codes.any()):
        raise CheckpointError(
            f"{TRANSFER_READY} is false and {TRANSFER_CODES} is not zero: the file says that its codes were never made "
            "from the target's head; make them, or set the flag if they were"
        )


def _read_mask_embedding(file: Path, config: DraftConfig) -> torch.Tensor:
    """The vector [D] of a mask_embedding.pt: a bare tensor, or {embedding, mask_token_id}; ids must agree."""
    import torch

    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and all of them mean an unusable file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} cannot be read as plain tensors: {first}") from error
    if isinstance(value, dict):
        unknown = sorted(str(key) for key in value if key not in ("embedding", "mask_token_id"))
        if unknown or "embedding" not in value:
            found = ", ".join(str(key) for key in value)
            raise CheckpointError(f"{file} holds the keys {found}: expected are embedding and mask_token_id")
        given = value.get("mask_token_id", config.mask_token_id)
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            given = given.item()
        if given != config.mask_token_id:
            raise CheckpointError(
                f"mask_token_id is {given} in {file.name} and {config.mask_token_id} in config.json: make them equal"
            )
        value = value["embedding"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{file} does not hold a floating-point tensor")
    if value.shape == (1, config.hidden_size):
        value = value[0]
    if value.shape != (config.hidden_size,):
        raise CheckpointError(f"mask_embedding is {list(value.shape)} in {file}, expected {[config.hidden_size]}")
    return value


def _check_destination(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give a folder to write to")
    inside = sorted(path.name for path in folder.iterdir())
    if inside and not overwrite:
        raise CheckpointError(f"{folder} is not empty: choose another folder or overwrite explicitly")
    foreign = [name for name in inside if name not in (CONFIG, WEIGHTS, MASK_EMBEDDING_FILE)]
    if foreign:
        raise CheckpointError(f"{folder} holds {foreign[0]}, which is not part of a checkpoint: choose another folder")


def _write_files(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    raw: Mapping[str, Any],
    mask_embedding: torch.Tensor | None,
    mask_token_id: int,
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    if mask_embedding is not None:
        value = {"embedding": mask_embedding.clone(), "mask_token_id": mask_token_id}
        torch.save(value, folder / MASK_EMBEDDING_FILE)
    (folder / CONFIG).write_text(json.dumps(raw, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    _sync(folder.iterdir())


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
