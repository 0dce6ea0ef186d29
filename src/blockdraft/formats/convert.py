"""From any dialect to any other: read whole, written whole, read back and compared.

Owns: what counts as the same checkpoint. Must not know: any dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.config import TargetFacts
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import DIALECTS, FILE_DIALECTS, Checkpoint, find_dialect
from blockdraft.formats._gguf_file import find_gguf
from blockdraft.formats._keys import words
from blockdraft.formats._layout import as_stored, read_raw_config

__all__ = ["Conversion", "convert"]

# What a config.json may say beside the draft itself: ids of a text, a mask by its text, settings of training.
_BESIDE = words(
    "bos_token_id eos_token_id pad_token_id unk_token_id mask_token num_anchors max_anchors confidence_head_alpha "
    "ce_weight alignment_weight alignment_warmup_steps replacement_layers replacement_probability "
    "replacement_hold_ratio replacement_end_ratio candidate_mass_threshold"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was done: from which dialect to which, how many tensors, as what they are stored.

    `left_out`: keys of the source's config.json beside the draft itself that were not written.
    """

    source_dialect: str
    dialect: str
    num_tensors: int
    dtypes: tuple[str, ...]
    left_out: tuple[str, ...]


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
    block_size: int | None = None,
) -> Conversion:
    """Write `source` to `destination` in another dialect. `dtype` None keeps every tensor as it is.

    Raises ConfigError or CheckpointError for what the dialect cannot express; then nothing is written. `target`
    settles what the source does not state (the target's layers and vocabulary). `target_file` is the target's GGUF,
    whose tokenizer goes into a draft of the dialect gguf. `block_size` is for a source that states none.
    """
    if dialect not in DIALECTS and dialect not in FILE_DIALECTS:
        raise ConfigError(f"--to is {dialect!r}: there are {', '.join([*DIALECTS, *FILE_DIALECTS])}")
    if Path(source).resolve() == Path(destination).resolve():
        raise CheckpointError(f"{destination} is the source itself: choose another folder")
    found = find_dialect(source)
    wanted = DIALECTS[dialect] if dialect in DIALECTS else FILE_DIALECTS[dialect].of_target(target_file)
    checkpoint = found.read(source, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size)

    def verify(folder: Path) -> None:
        _compare(checkpoint, wanted.read(folder, allow_mask_is_eos=allow_mask_is_eos), dtype)

    wanted.write(destination, checkpoint, dtype=dtype, overwrite=overwrite, verify=verify)
    weights = [tensor for tensor in checkpoint.tensors.values() if tensor.is_floating_point()]
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights}
    return Conversion(
        source_dialect=found.name,
        dialect=wanted.name,
        num_tensors=len(checkpoint.tensors),
        dtypes=(dtype,) if dtype is not None else tuple(sorted(kinds)),
        left_out=tuple(sorted(_beside(source) - _beside(destination))),
    )


def _beside(place: Path | str) -> frozenset[str]:
    """Which keys beside the draft itself a config.json gives, at top level or in one of its objects."""
    if find_gguf(place) is not None:
        return frozenset()
    raw: Mapping[str, Any] = read_raw_config(place)[0]
    objects = [raw, *(value for value in raw.values() if isinstance(value, Mapping))]
    return frozenset(key for values in objects for key in _BESIDE if values.get(key) is not None)


def _compare(given: Checkpoint, back: Checkpoint, dtype: str | None) -> None:
    """Raise CheckpointError if what was read back is not what was given, bit for bit in the stored type."""
    import torch

    if back.config != given.config:
        raise CheckpointError("the config read back is not the one that was written: nothing is kept")
    kind: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
    wrong = [
        name
        for name, tensor in given.tensors.items()
        if name not in back.tensors or not torch.equal(back.tensors[name], as_stored(tensor, kind))
    ]
    if wrong or len(back.tensors) != len(given.tensors):
        raise CheckpointError(f"the tensors read back are not those that were written ({wrong[:4]}): nothing is kept")
