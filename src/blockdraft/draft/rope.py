"""Rotary positions: the frequencies of every supported kind and the tables made from them.

Owns the half-split rotation (pairs j, j + A/2). Positions are absolute and zero-based. Knows config only.

Letters: L positions, A head width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.config import RopeConfig
from blockdraft.draft.norm import wide_dtype

__all__ = ["Rotary", "Rotation", "rope_frequencies", "rotate"]


class Rotation(NamedTuple):
    """cos and signed sin of some positions, [..., L, 1, A]: the axis of width 1 runs over heads."""

    cos: Tensor
    sin: Tensor


def rotate(x_LHA: Tensor, rotation: Rotation) -> Tensor:
    """``x_LHA`` (any leading axes) turned by its positions."""
    first, second = x_LHA.chunk(2, dim=-1)
    return torch.addcmul(x_LHA * rotation.cos, torch.cat((second, first), dim=-1), rotation.sin)


def rope_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(angle per position of each pair [A/2], factor on cos and sin), computed in ``dtype`` on the CPU."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").to(dtype) / head_dim
    base = 1.0 / (rope.theta**steps)
    numbers = rope.numbers
    if rope.kind == "default":
        return base, 1.0
    if rope.kind == "linear":
        return base / numbers["factor"], 1.0
    if rope.kind == "llama3":
        return _llama3(base, numbers), 1.0
    assert rope.kind == "yarn", rope.kind
    return _yarn(base, rope)


def _llama3(base: Tensor, numbers: dict[str, float]) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended by wavelength."""
    slow, fast, factor = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"]
    turns = numbers["original_max_position_embeddings"] * base / (2 * math.pi)
    blend = ((turns - slow) / (fast - slow)).clamp(0.0, 1.0)
    return base * (blend + (1.0 - blend) / factor)


def _yarn(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Pairs that turn often are kept, pairs that turn less than once are stretched, a ramp lies between."""
    pairs = base.shape[0]
    numbers = rope.numbers
    width, factor = 2 * pairs, numbers["factor"]

    def pair_of(turns: float) -> float:
        reach = numbers["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return width * math.log(reach) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(numbers["beta_fast"])), 0)
    high: float = min(math.ceil(pair_of(numbers["beta_slow"])), width - 1)
    if high == low:
        high += 0.001
    ramp = ((torch.arange(pairs, dtype=base.dtype, device="cpu") - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = base * (1.0 - ramp) + base / factor * ramp
    return frequencies, _yarn_magnitude(rope)


def _yarn_magnitude(rope: RopeConfig) -> float:
    numbers = rope.numbers
    if "attention_factor" in numbers:
        return numbers["attention_factor"]

    mscale, all_dim = numbers.get("mscale", 0.0), numbers.get("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return rope.magnitude(mscale) / rope.magnitude(all_dim)
    return rope.magnitude(1.0)


class Rotary:
    """cos and sin by position. The table grows by doubling when a later position is asked for."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._rope = rope
        self._head_dim = head_dim
        self._frequencies: dict[torch.dtype, tuple[Tensor, float]] = {}
        self._tables: dict[tuple[torch.dtype, torch.device], Rotation] = {}

    def rows(self, start: int, length: int, *, dtype: torch.dtype, device: torch.device) -> Rotation:
        """The rotation of positions [start, start + length), a view of the table."""
        end = start + length
        table = self._tables.get((dtype, device))
        if table is None or table.cos.shape[0] < end:
            size = max(end, 256, 0 if table is None else 2 * table.cos.shape[0])
            table = self.at(torch.arange(size, device=device), dtype=dtype)
            self._tables[dtype, device] = table
        return Rotation(table.cos[start:end], table.sin[start:end])

    def at(self, positions_L: Tensor, *, dtype: torch.dtype) -> Rotation:
        """The rotation of any positions, any leading axes; the same numbers as ``rows``."""
        wide = wide_dtype(dtype)
        if wide not in self._frequencies:
            self._frequencies[wide] = rope_frequencies(self._rope, self._head_dim, wide)
        frequencies, factor = self._frequencies[wide]
        if frequencies.device != positions_L.device:
            frequencies = frequencies.to(positions_L.device)
            self._frequencies[wide] = frequencies, factor
        angles = positions_L[..., None, None].to(wide) * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return Rotation(torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype))
