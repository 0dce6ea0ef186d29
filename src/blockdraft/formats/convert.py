"""From any dialect to any other: read whole, written whole, read back and compared.

Owns: what counts as the same checkpoint. Must not know: any dialect.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from blockdraft.config import TargetFacts
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import DIALECTS, FILE_DIALECTS, Checkpoint, find_dialect

__all__ = ["Conversion", "convert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was done: from which dialect to which, how many tensors, as what they are stored."""

    source_dialect: str
    dialect: str
    num_tensors: int
    dtypes: tuple[str, ...]


def convert(
    source: Path | str,
    destination: Path | str,
    dialect: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    allow_mask_is_eos: bool = False,
    target: TargetFacts | None = None,
    target_file: Path | None = None,
) -> Conversion:
    """Write `source` to `destination` in another dialect. `dtype` None keeps every tensor as it is.

    Raises ConfigError or CheckpointError for what the dialect cannot express; then nothing is written. `target`
    settles what the source does not state (the target's layers and vocabulary). `target_file` is the target's GGUF,
    whose tokenizer goes into a draft of the dialect gguf.
    """
    if dialect not in DIALECTS and dialect not in FILE_DIALECTS:
        raise ConfigError(f"--to is {dialect!r}: there are {', '.join([*DIALECTS, *FILE_DIALECTS])}")
    if Path(source).resolve() == Path(destination).resolve():
        raise CheckpointError(f"{destination} is the source itself: choose another folder")
    found = find_dialect(source)
    wanted = DIALECTS[dialect] if dialect in DIALECTS else FILE_DIALECTS[dialect].of_target(target_file)
    checkpoint = found.read(source, allow_mask_is_eos=allow_mask_is_eos, target=target)

    def verify(folder: Path) -> None:
        _compare(checkpoint, wanted.read(folder, allow_mask_is_eos=allow_mask_is_eos), dtype)

    wanted.write(destination, checkpoint, dtype=dtype, overwrite=overwrite, verify=verify)
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in checkpoint.tensors.values()}
    return Conversion(
        source_dialect=found.name,
        dialect=wanted.name,
        num_tensors=len(checkpoint.tensors),
        dtypes=(dtype,) if dtype is not None else tuple(sorted(kinds)),
    )


def _compare(given: Checkpoint, back: Checkpoint, dtype: str | None) -> None:
    """Raise CheckpointError if what was read back is not what was given, bit for bit in the stored type."""
    import torch

    if back.config != given.config:
        raise CheckpointError("the config read back is not the one that was written: nothing is kept")
    kind: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
    wrong = [
        name
        for name, tensor in given.tensors.items()
        if name not in back.tensors or not torch.equal(back.tensors[name], tensor.to(kind or tensor.dtype))
    ]
    if wrong or len(back.tensors) != len(given.tensors):
        raise CheckpointError(f"the tensors read back are not those that were written ({wrong[:4]}): nothing is kept")
