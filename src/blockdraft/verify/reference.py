"""The independent reading of a target: the model class of `transformers`, one whole text at a time, no cache.

No code of ours is in its way from ids to logits. It costs memory (eight bytes a parameter in float64) and time, so it
is loaded once, and where it cannot be loaded the exam says so.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.errors import UnavailableError

__all__ = ["Reference", "float64_model", "load_reference"]


def float64_model(folder: Path) -> Any:
    """The checkpoint as `transformers` itself reads it, float64, eager attention."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


class Reference:
    """Logits of a model of `transformers`.

    Weights and products are float64; norms and rotary angles stay float32 inside `transformers`: about 1e-5 in a logit.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[T, V] float64 over a text."""
        result: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return result.double()


def load_reference(folder: Path) -> Reference:
    """Raises UnavailableError, in one line, where there is no such reading of this checkpoint on this machine."""
    needed = _float64_bytes(folder)
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > 0.8 * has:
        raise UnavailableError(
            f"the target in float64 needs {needed / 2**30:.0f} GiB and this machine has {has / 2**30:.0f}"
        )
    try:
        return Reference(float64_model(folder))
    except Exception as error:  # a family that transformers does not know fails in ways of its own
        text = " ".join(str(error).split())[:160]
        raise UnavailableError(f"transformers has no reading of its own of this target ({text})") from error


def _float64_bytes(folder: Path) -> int:
    """About eight bytes for every two of the weight files (they hold two or four a number)."""
    return 4 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
