"""Checkpoints of the z-lab dialect: DFlash and DFlash 2 on grouped-query or latent attention, read and written.

Owns: that this dialect is the one that is meant when a config shows no sign of another. Its config.json is
resolved in `_zlab_config`, tensors are accounted for in `_zlab_tensors`, files are `_layout`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.formats._layout import MASK_EMBEDDING_FILE, Checkpoint, Layout, read_raw_config
from blockdraft.formats._zlab_config import config_from_dict, config_to_dict
from blockdraft.formats._zlab_tensors import (
    HEAD_IDS,
    MASK_EMBEDDING,
    canonical_name,
    check_header,
    expected_tensors,
    optional_tensors,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "HEAD_IDS",
    "LAYOUT",
    "MASK_EMBEDDING",
    "MASK_EMBEDDING_FILE",
    "Checkpoint",
    "check_header",
    "config_from_dict",
    "config_to_dict",
    "expected_tensors",
    "optional_tensors",
    "read",
    "read_config",
    "read_header",
    "read_raw_config",
    "write",
]


def _detect(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return "dflash_config" in raw


def _config(
    raw: Mapping[str, Any],
    *,
    allow_mask_is_eos: bool = False,
    fc_shape: tuple[int, ...] | None = None,
    target: TargetFacts | None = None,
) -> DraftConfig:
    return config_from_dict(raw, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


LAYOUT = Layout(
    name="z-lab",
    label="the z-lab layout",
    detect=_detect,
    config_from_dict=_config,
    config_to_dict=config_to_dict,
    canonical_name=canonical_name,
    stored_name=lambda name: name,
    own=frozenset({"embed_tokens.weight", "lm_head.weight", MASK_EMBEDDING}),
)


def read_config(source: Path | str, *, allow_mask_is_eos: bool = False) -> DraftConfig:
    """The config of a checkpoint folder or of a bare config.json."""
    return LAYOUT.read_config(source, allow_mask_is_eos=allow_mask_is_eos)


def read_header(folder: Path | str, config: DraftConfig | None = None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name -> (safetensors dtype, shape) of a folder's weight files; needs no torch.

    With its `config`, a fused projection counts as the two that it holds.
    """
    return LAYOUT.read_header(folder, config)


def read(folder: Path | str, *, dtype: torch.dtype | None = None, allow_mask_is_eos: bool = False) -> Checkpoint:
    """The checkpoint of a folder, every tensor accounted for and finite. `dtype` None: as stored."""
    return LAYOUT.read(folder, dtype=dtype, allow_mask_is_eos=allow_mask_is_eos)


def write(
    folder: Path | str, checkpoint: Checkpoint, *, dtype: str | None = "bfloat16", overwrite: bool = False
) -> None:
    """Write the published layout: all of it or nothing. `dtype` None keeps each tensor's own.

    `overwrite` replaces a folder that holds nothing but an earlier checkpoint.
    """
    LAYOUT.write(folder, checkpoint, dtype=dtype, overwrite=overwrite)
