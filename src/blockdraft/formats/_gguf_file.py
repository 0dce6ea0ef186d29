"""GGUF files as such: opened whole or not at all, one key's value, one tensor, a file written from keys and tensors.

Must not know: what any key or tensor of a draft means. The packages `gguf` and torch are imported only where needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.errors import CheckpointError, UnavailableError

if TYPE_CHECKING:
    import torch

__all__ = ["find_gguf", "open_gguf", "scalars", "tensor_of", "value_of", "write_gguf"]

SUFFIX = ".gguf"
_PROJECTOR = "mmproj"  # the vision part of a model, a file of its own beside it
TOKENIZER = "tokenizer."
_TOKENS = "tokenizer.ggml.tokens"


def find_gguf(source: Path | str) -> Path | None:
    """The GGUF file that `source` is, or the only one of a folder without a config.json; None if it is neither."""
    path = Path(source)
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.glob(f"*{SUFFIX}") if _PROJECTOR not in file.name.lower())
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files, {files[0].name} is the first: name one of them")
    return files[0] if files else None


def open_gguf(path: Path) -> Any:
    """The reader of a file that is whole. Raises CheckpointError for anything else."""
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file")
    try:
        import gguf
    except ImportError as error:
        raise UnavailableError("reading GGUF needs the package gguf: pip install gguf") from error
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # it raises many kinds here, and all of them mean an unusable file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path} is damaged or cut short: {first}") from error


def value_of(reader: Any, key: str) -> Any:
    """The value of a key, None if the file does not have it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def scalars(reader: Any) -> dict[str, Any]:
    """Every key but the lists of the tokenizer; the number of its tokens stands under `tokenizer.ggml.tokens`."""
    found = {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):  # of the file itself
            continue
        is_list = len(field.types) > 1
        if key == _TOKENS:
            found[key] = len(field.data)
        elif not (is_list and key.startswith(TOKENIZER)):
            found[key] = field.contents()
    return found


def tensor_of(entry: Any) -> torch.Tensor:
    """A copy of one tensor of a reader, in the type that it is stored in: F32, F16 or BF16."""
    import numpy as np
    import torch

    data = torch.from_numpy(np.array(entry.data))
    if entry.tensor_type.name == "BF16":
        data = data.view(torch.bfloat16)
    return data.reshape(tuple(int(size) for size in reversed(entry.shape)))


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer: Any) -> None:
    """A file of the architecture that `keys` name. `tokenizer`: the reader of a file whose tokenizer goes in.

    A key of the tokenizer that stands in `keys` is the one that counts. The tokenizer's chat templates are left out.
    """
    import gguf

    writer = gguf.GGUFWriter(path, keys["general.architecture"])
    kinds = gguf.GGUFValueType
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_key_value(key, value, kinds.ARRAY, sub_type=_kind(value[0], in_list=True))
        else:
            writer.add_key_value(key, value, _kind(value))
    for field in _tokenizer_fields(tokenizer):
        if field.name not in keys:
            sub_type = field.types[-1] if field.types[0] == kinds.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for name, tensor in tensors.items():
        _add_tensor(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(value: Any, *, in_list: bool = False) -> Any:
    """The type that the key has in a file of llama.cpp: counts are unsigned, but signed in a list."""
    import gguf

    kinds = gguf.GGUFValueType
    if isinstance(value, bool):
        return kinds.BOOL
    if isinstance(value, int):
        return kinds.INT32 if in_list else kinds.UINT32
    return kinds.FLOAT32 if isinstance(value, float) else kinds.STRING


def _tokenizer_fields(reader: Any) -> Iterator[Any]:
    for key, field in reader.fields.items():
        if key.startswith(TOKENIZER) and not key.startswith("tokenizer.chat_template"):
            yield field


def _add_tensor(writer: Any, name: str, tensor: torch.Tensor) -> None:
    import gguf
    import torch

    if tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.numpy())
