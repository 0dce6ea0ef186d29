"""What a GPU is for a plan: memory, bandwidth, arithmetic. Numbers of data sheets, without sparsity.

`memory_bytes` is what the driver shows (nvidia-smi), where that is known, else the data sheet's round number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.errors import RequestError, shown

_COUNTED = re.compile(r"(\d+)\s*[xX]\s*([\w.-]+(?:[ _][\w.-]+)*)")
_MIB, _GB, _TB = 2**20, 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind. `bf16_flops`: dense operations a second, a multiply and an add being two."""

    name: str
    memory_bytes: float
    bandwidth_bytes_s: float
    bf16_flops: float
    source: str


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100",
            memory_bytes=81_920 * _MIB,
            bandwidth_bytes_s=2.039 * _TB,
            bf16_flops=312e12,
            source="NVIDIA A100 80GB SXM data sheet",
        ),
        Gpu(
            name="H100",
            memory_bytes=81_559 * _MIB,
            bandwidth_bytes_s=3.35 * _TB,
            bf16_flops=989e12,
            source="NVIDIA H100 SXM data sheet; memory as nvidia-smi shows it",
        ),
        Gpu(
            name="H200",
            memory_bytes=143_771 * _MIB,
            bandwidth_bytes_s=4.8 * _TB,
            bf16_flops=989e12,
            source="NVIDIA H200 SXM data sheet; memory as nvidia-smi shows it",
        ),
        Gpu(
            name="B200",
            memory_bytes=192 * _GB,
            bandwidth_bytes_s=8.0 * _TB,
            bf16_flops=2.25e15,
            source="NVIDIA HGX B200 data sheet",
        ),
        Gpu(
            name="B300",
            memory_bytes=288 * _GB,
            bandwidth_bytes_s=8.0 * _TB,
            bf16_flops=2.25e15,
            source="NVIDIA HGX B300 data sheet; arithmetic of the B200",
        ),
        Gpu(
            name="GB300",
            memory_bytes=288 * _GB,
            bandwidth_bytes_s=8.0 * _TB,
            bf16_flops=2.5e15,
            source="NVIDIA GB300 NVL72 data sheet",
        ),
        Gpu(
            name="MI300X",
            memory_bytes=192 * 1024 * _MIB,
            bandwidth_bytes_s=5.3 * _TB,
            bf16_flops=1307e12,
            source="AMD Instinct MI300X data sheet",
        ),
        Gpu(
            name="MI355X",
            memory_bytes=288 * _GB,
            bandwidth_bytes_s=8.0 * _TB,
            bf16_flops=2.5e15,
            source="AMD Instinct MI355X data sheet",
        ),
        Gpu(
            name="RTX3090",
            memory_bytes=24_576 * _MIB,
            bandwidth_bytes_s=936 * _GB,
            bf16_flops=71e12,
            source="NVIDIA GA102 white paper; memory as nvidia-smi shows it (noonghunna/club-3090 issue 294)",
        ),
        Gpu(
            name="RTX4090",
            memory_bytes=24_564 * _MIB,
            bandwidth_bytes_s=1008 * _GB,
            bf16_flops=165e12,
            source="NVIDIA Ada white paper; memory as nvidia-smi shows it",
        ),
        Gpu(
            name="RTX5090",
            memory_bytes=32_607 * _MIB,
            bandwidth_bytes_s=1792 * _GB,
            bf16_flops=209e12,
            source="NVIDIA Blackwell RTX white paper; memory as nvidia-smi shows it (noonghunna/club-3090 issue 474)",
        ),
    )
}


def read_gpus(text: str) -> tuple[int, Gpu]:
    """`8xH200` -> (8, that kind). Raises RequestError for a kind that the table does not hold."""
    found = _COUNTED.fullmatch(text.strip())
    if found is None or int(found[1]) < 1:
        raise RequestError(f"--gpus is {shown(text)}: give a count and a kind, as 8xH200")
    name = re.sub(r"[^A-Z0-9]", "", found[2].upper())
    if name not in GPUS:
        raise RequestError(f"--gpus names {shown(found[2])}: known are {', '.join(GPUS)}")
    return int(found[1]), GPUS[name]
