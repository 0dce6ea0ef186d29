"""From the folder of a Kimi-K3 checkpoint to a target that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from blockdraft.config import TapStream, is_kimi_k3
from blockdraft.errors import UnavailableError
from blockdraft.formats._safetensors import read_json
from blockdraft.packed import pack_linears_
from blockdraft.targets.contract import checked_taps

from .checkpoint import read, read_raw
from .config import KimiK3Config
from .target import KimiK3Target

__all__ = ["holds_kimi_k3", "load_kimi_k3"]


def holds_kimi_k3(folder: Path) -> bool:
    """Whether the config.json of a folder is one of Kimi K3; no where there is none that can be read."""
    try:
        raw = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and is_kimi_k3(raw)


def load_kimi_k3(
    folder: Path,
    tap_layer_ids: Sequence[int],
    *,
    tap_stream: TapStream,
    dtype: torch.dtype | None,
    device: torch.device,
    pack: bool | None,
) -> KimiK3Target:
    """The target of a folder. pack: linear layers in the CPU's own layout."""
    if pack and device.type != "cpu":
        raise UnavailableError(f"pack=True needs the CPU, this target is on {device}: pass pack=None")
    checked_taps(tap_layer_ids, KimiK3Config.from_dict(read_raw(folder)).num_layers)
    model, facts = read(folder, dtype=dtype, device=device)
    if pack or (pack is None and device.type == "cpu"):
        pack_linears_(model)
    return KimiK3Target(model, facts, tap_layer_ids, tap_stream=tap_stream)
