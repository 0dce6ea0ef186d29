"""Checkpoint dialects: one module each, which reads and writes names and nesting on disk, no maths.

The table is explicit. A checkpoint's dialect is found by what its files say; where nothing points to another one it
is z-lab's, whose messages then say what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import dspark, gguf, native, speculators, torchspec, zlab
from blockdraft.formats._gguf_file import find_gguf
from blockdraft.formats._layout import Checkpoint, Layout, read_raw_config
from blockdraft.formats._safetensors import list_entries

if TYPE_CHECKING:
    import torch

__all__ = [
    "DIALECTS",
    "FILE_DIALECTS",
    "Checkpoint",
    "Layout",
    "find_dialect",
    "read",
    "read_config",
    "read_header",
    "write",
]

# Of folders; dialects of single files stand beside them.
DIALECTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (zlab.LAYOUT, speculators.LAYOUT, native.LAYOUT, torchspec.LAYOUT, dspark.DEEPSPEC, dspark.KIMI)
}
FILE_DIALECTS: Mapping[str, gguf.GgufLayout] = {gguf.LAYOUT.name: gguf.LAYOUT}


def find_dialect(source: Path | str) -> Layout:
    """The dialect of a checkpoint folder, a bare config.json or a GGUF file. Raises ConfigError if two are mixed."""
    if find_gguf(source) is not None:
        return gguf.LAYOUT
    raw, folder = read_raw_config(source)
    if not isinstance(raw, Mapping):
        return zlab.LAYOUT
    try:
        names = [entry.name for entry in list_entries(folder)] if folder is not None else []
    except CheckpointError:
        names = []  # no weights, or damaged ones: whoever reads them says so
    found = [layout for layout in DIALECTS.values() if layout is not zlab.LAYOUT and layout.detect(raw, names)]
    if len(found) > 1:
        both = " and ".join(layout.name for layout in found)
        raise ConfigError(f"this config.json mixes the dialects {both}: remove the keys of one of them")
    return found[0] if found else zlab.LAYOUT


def read(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    allow_mask_is_eos: bool = False,
    target: TargetFacts | None = None,
    block_size: int | None = None,
) -> Checkpoint:
    """The checkpoint of a folder in whatever dialect, every tensor accounted for and finite.

    `target` settles what some dialects leave open (the target's layers and vocabulary). `dtype` None: as stored.
    `block_size` is for a file that states none; beside another one that it states it is an error.
    """
    path = Path(folder)
    layout = zlab.LAYOUT if path.is_file() and find_gguf(path) is None else find_dialect(path)
    return layout.read(path, dtype=dtype, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size)


def read_config(
    source: Path | str,
    *,
    allow_mask_is_eos: bool = False,
    target: TargetFacts | None = None,
    block_size: int | None = None,
) -> DraftConfig:
    """The config of a checkpoint folder or of a bare config.json in whatever dialect."""
    return find_dialect(source).read_config(
        source, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size
    )


def read_header(folder: Path | str, config: DraftConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name -> (safetensors dtype, shape) of a folder's weight files, checked against the config.

    Needs no torch. A learned mask embedding in a file beside the weights is not among them.
    """
    layout = find_dialect(folder)
    header = layout.read_header(folder, config)
    layout.check(config, header, Path(folder))
    return header


def write(
    folder: Path | str,
    checkpoint: Checkpoint,
    *,
    dialect: str = "z-lab",
    dtype: str | None = "bfloat16",
    overwrite: bool = False,
    target: Path | None = None,
) -> None:
    """Write a folder or file of a dialect, all of it or nothing; what it cannot express is refused by name.

    `target` is the GGUF of the target, for the dialect gguf alone.
    """
    _of_name(dialect, target).write(folder, checkpoint, dtype=dtype, overwrite=overwrite)


def _of_name(name: str, target: Path | None) -> Layout:
    """The dialect of a name. `target`: the file of a target, for a dialect whose files hold its tokenizer."""
    if name in FILE_DIALECTS:
        return FILE_DIALECTS[name].of_target(target)
    if target is not None:
        raise ConfigError(f"a target is given, but {name} takes nothing from one: only gguf does")
    if name not in DIALECTS:
        raise ConfigError(f"the dialect is {name!r}: there are {', '.join([*DIALECTS, *FILE_DIALECTS])}")
    return DIALECTS[name]
