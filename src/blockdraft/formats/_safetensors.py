"""What the safetensors files of a folder hold, read from their headers alone.

Owns: finding the weight files (one file, or shards with an index), checking that every file is whole, names
that stand in two files. Must not know: which tensors a draft has, torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4,
    "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: where it is, what it is called there, what it is. `rows`: only these of it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None


def unique_object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some JSON pairs. Raises ValueError if a key stands twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def refuse_constant(name: str) -> Any:
    """Raise ValueError: NaN and Infinity are not JSON."""
    raise ValueError(f"{name} is not a number that JSON has")


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ValueError (bad text, a key twice, NaN) or OSError."""
    return parse_json(path.read_text(encoding="utf-8"))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for anything that is not one, or is nested too deeply."""
    try:
        return json.loads(text, object_pairs_hook=unique_object, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def list_entries(folder: Path) -> list[Entry]:
    """Every tensor of the folder's weight files, by file and then by place in the file."""
    files = _weight_files(folder)
    entries: list[Entry] = []
    home: dict[str, Path] = {}
    for file in files:
        for entry in _file_entries(file):
            if entry.name in home:
                raise CheckpointError(
                    f"tensor {entry.name} stands in two files, {home[entry.name].name} and {file.name}: remove one"
                )
            home[entry.name] = file
            entries.append(entry)
    return entries


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / WEIGHTS, folder / INDEX
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if single.exists() and index.exists():
        raise CheckpointError(f"{folder} holds both {WEIGHTS} and {INDEX}: remove one of the two sets of weights")
    if single.exists():
        others = [name for name in present if name != WEIGHTS]
        if others:
            raise CheckpointError(f"{folder} holds {others[0]} beside {WEIGHTS}: remove one of the two sets of weights")
        return [single]
    if index.exists():
        return _indexed_files(folder, index, present)
    if present:
        raise CheckpointError(
            f"{folder} holds {present[0]} but neither {WEIGHTS} nor {INDEX}: rename it or add the index"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    pickles = [name for name in pickles if name != "mask_embedding.pt"]
    hint = f"; {pickles[0]} is not read, convert it to safetensors" if pickles else ""
    raise CheckpointError(f"no weights in {folder}: there is neither {WEIGHTS} nor {INDEX}{hint}")


def _indexed_files(folder: Path, index: Path, present: list[str]) -> list[Path]:
    try:
        weight_map = read_json(index)["weight_map"]
        owners = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{INDEX} of {folder} is not an index with a weight_map: {error}") from error
    names = sorted(set(owners.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {name!r}: it must be a .safetensors file of the same folder")
        if name not in present:
            raise CheckpointError(f"{INDEX} names {name}, which is missing in {folder}: fetch the checkpoint again")
    extra = [name for name in present if name not in names]
    if extra:
        raise CheckpointError(f"{folder} holds {extra[0]}, which {INDEX} does not name: remove it or index it")
    inside = {name: {entry.name for entry in _file_entries(folder / name)} for name in names}
    for tensor, name in owners.items():
        if tensor not in inside[name]:
            raise CheckpointError(f"{INDEX} says that {name} holds {tensor}: it does not")
    for name in names:
        for tensor in sorted(inside[name]):
            if tensor not in owners:
                raise CheckpointError(f"{name} holds {tensor}, which {INDEX} does not name")
            if owners[tensor] != name:
                raise CheckpointError(f"tensor {tensor} stands in two files, {owners[tensor]} and {name}: remove one")
    return [folder / name for name in names]


def _file_entries(file: Path) -> list[Entry]:
    """The header of one file. Raises CheckpointError if it is damaged or the file is cut short."""
    if not file.is_file():
        raise CheckpointError(f"{file} is not a file")
    total = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"{file} is not a safetensors file ({total} bytes, no header){_pointer_hint(file)}")
        if 8 + length > total:
            raise CheckpointError(f"{file} is cut short: its header needs {8 + length} bytes, it has {total}")
        text = stream.read(length)
    try:
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
        header.pop("__metadata__", None)
        spans = [_entry(file, name, value) for name, value in header.items()]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error
    data_bytes = total - 8 - length
    end = 0
    for start, stop, entry in sorted(spans, key=lambda span: span[:2]):
        if start != end:
            raise CheckpointError(f"{file} is damaged: {entry.name} starts at byte {start} of the data, not at {end}")
        end = stop
    if end > data_bytes:
        raise CheckpointError(f"{file} is cut short: its tensors need {end} bytes, {data_bytes} are there")
    if end < data_bytes:
        raise CheckpointError(f"{file} is damaged: {data_bytes - end} bytes follow its last tensor")
    return [entry for _, _, entry in spans]


def _entry(file: Path, name: str, value: Any) -> tuple[int, int, Entry]:
    dtype, shape = value["dtype"], tuple(value["shape"])
    start, stop = value["data_offsets"]
    if dtype not in _BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype!r}")
    numbers = (*shape, start, stop)
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError(f"tensor {name} has the shape {list(shape)} and the offsets {[start, stop]}")
    if (stop - start) * 8 != math.prod(shape) * _BITS[dtype]:
        raise ValueError(f"tensor {name} of shape {list(shape)} in {dtype} does not fill its {stop - start} bytes")
    return start, stop, Entry(file=file, name=name, dtype=dtype, shape=shape)


def _pointer_hint(file: Path) -> str:
    with file.open("rb") as stream:
        is_pointer = stream.read(20).startswith(b"version https://git")
    return ": it is a Git LFS pointer, fetch the file itself" if is_pointer else ""
