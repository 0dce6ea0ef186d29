"""The Kimi-K3 text model as a target, in plain torch: no kernels of others, no remote code.

One file each for what a config says (config), the delta attention (delta), the experts (experts), the model (model),
checkpoints (checkpoint) and the target with its rows (target).
"""

from __future__ import annotations

from .checkpoint import Counts, count_parameters, empty_model, published_tensors, read, write
from .config import KimiK3Config
from .loading import holds_kimi_k3, load_kimi_k3
from .model import KimiK3Model
from .target import KimiK3Target

__all__ = [
    "Counts",
    "KimiK3Config",
    "KimiK3Model",
    "KimiK3Target",
    "count_parameters",
    "empty_model",
    "holds_kimi_k3",
    "load_kimi_k3",
    "published_tensors",
    "read",
    "write",
]
