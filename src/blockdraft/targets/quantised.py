"""Targets whose weights are stored, or made when they are loaded, in fewer bits than their numbers.

Owns what each method needs, what its checkpoints cannot be asked for, and the refusal of a target whose scores of a
block depend on more than the ids before it. What a quantised layer computes is the method's own affair.

Shapes: T positions fed to the target, V vocabulary rows.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blockdraft.errors import CheckpointError, PairError, UnavailableError

from .contract import Target

__all__ = [
    "QUANTIZE_MODES",
    "QuantizeMode",
    "bitsandbytes_config",
    "check_dtype",
    "check_independence",
    "check_method",
    "is_dense",
    "method_of",
    "run_once",
    "settle_dense_",
]

QuantizeMode = Literal["int8", "nf4"]
QUANTIZE_MODES: tuple[QuantizeMode, ...] = ("int8", "nf4")

# By the method's name in a checkpoint: the module that reads it, and what is installed to have it.
_NEEDED: Mapping[str, tuple[str, str]] = {
    "bitsandbytes": ("bitsandbytes", "'blockdraft[bitsandbytes]'"),
    "compressed-tensors": ("compressed_tensors", "'blockdraft[compressed-tensors]'"),
    "torchao": ("torchao", "torchao"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "awq": ("gptqmodel", "gptqmodel"),
    "gptq": ("gptqmodel", "gptqmodel"),
    "hqq": ("hqq", "hqq"),
}
_NUM_ASKED, _NUM_KEPT = 12, 6  # ids of a forward, and those of them that stay while the others change
_NUM_TRIALS = 4
_MAX_ERROR = 1e-4  # relative to the largest logit; the same product twice is equal to the last bit, experts nearly so
_MAX_ERROR_HALF = 2e-2  # of a number format of two bytes


def method_of(config: Any) -> str | None:
    """The method that a configuration of transformers says its weights are quantised by."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        text = config.get_text_config(decoder=True)
        found = getattr(text, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method))


def check_method(method: str, name: str) -> None:
    """Raise CheckpointError for a method that transformers does not know: it would leave the weights as they are.

    Raise UnavailableError where the package that reads this method's weights is not installed.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    if not {method, f"{method}_4bit"} & set(AUTO_QUANTIZER_MAPPING):
        raise CheckpointError(
            f"target {name} is quantised by {method!r}, which transformers does not read: take another checkpoint of it"
        )
    module, package = _NEEDED.get(method, ("", ""))
    if module and not _is_there(module):
        raise UnavailableError(
            f"target {name} is quantised by {method}, which needs a package that is not here: pip install {package}"
        )


def bitsandbytes_config(mode: QuantizeMode, dtype: torch.dtype) -> Any:
    """How bitsandbytes is to quantise plain weights while they are loaded; the head stays as it is.

    int8 without outlier columns: those are chosen over all ids of a forward, so a score would depend on its neighbours.
    """
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    if mode == "int8":
        return make(load_in_8bit=True, llm_int8_threshold=0.0)
    return make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def is_dense(model: nn.Module) -> bool:
    """Whether every weight is a plain tensor of floating numbers and every module runs its class's own forward."""
    if any("forward" in vars(module) for module in model.modules()):
        return False
    return all(
        type(tensor) in (nn.Parameter, Tensor)
        and type(tensor.data) is Tensor
        and (tensor.is_floating_point() and tensor.itemsize > 1)
        and not tensor.is_meta
        for tensor in model.parameters()
    )


def settle_dense_(model: Any) -> None:
    """Take the quantisation off the configuration of a model whose weights were all made plain when they were read."""
    if method_of(model.config) is not None and is_dense(model):
        for config in (model.config, model.config.get_text_config(decoder=True)):
            if hasattr(config, "quantization_config"):
                del config.quantization_config


def check_dtype(model: Any, asked: torch.dtype | None, name: str) -> None:
    """Raise CheckpointError where a method kept its own number format beside the quantised weights."""
    stored = model.get_input_embeddings().weight.dtype
    if asked is not None and stored != asked:
        raise CheckpointError(
            f"target {name} was asked for in {_word(asked)}, and a {method_of(model.config)} checkpoint stays in the"
            f" {_word(stored)} that it was written in: ask for {_word(stored)}, or for what is stored (dtype auto)"
        )


def run_once(model: Any, name: str) -> None:
    """Run a quantised model once, whole: a method may unpack its weights then, and parts are run alone later.

    Raises CheckpointError where its layers cannot run on this device, or in these sizes.
    """
    ids_11 = torch.zeros((1, 1), dtype=torch.long, device=model.get_input_embeddings().weight.device)
    try:
        with torch.no_grad():
            model(input_ids=ids_11, use_cache=False)
    except Exception as error:  # kernels raise anything, assertions included
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise CheckpointError(
            f"target {name} is quantised by {method_of(model.config)}, whose layers cannot run it here ({reason}): try"
            " another device, or a checkpoint of another method"
        ) from error


def check_independence(target: Target, model: Any, name: str) -> None:
    """Raise PairError where what is scored at a position depends on ids that come after it.

    Activations that are scaled over a whole forward do that. A block is then not scored as its ids one by one would be,
    and no text is the target's own. Two forwards of the same length show it: they differ behind the position only.
    """
    threshold = _outlier_threshold(model)
    if threshold:
        raise PairError(
            f"target {name} is int8 of bitsandbytes with the outlier threshold {threshold:g}, which picks columns over"
            " all ids of a forward: a block is scored otherwise than its ids alone; run it without a draft, or give"
            " the plain weights with --quantize int8, which has no threshold"
        )
    limit = _MAX_ERROR_HALF if target.dtype.itemsize < 4 else _MAX_ERROR
    error = max(_dependence(target, seed) for seed in range(_NUM_TRIALS))
    if error > limit:
        raise PairError(
            f"target {name} ({method_of(model.config)}) scores a position by ids behind it too (off by {error:.1e}):"
            " its activations are scaled over a whole forward; run it without a draft, or take a checkpoint that"
            " scales them by token"
        )


def _dependence(target: Target, seed: int) -> float:
    draw = torch.Generator().manual_seed(seed)
    kept_T = torch.randint(target.facts.vocab_size, (_NUM_KEPT,), generator=draw)
    logits = []
    for _ in range(2):
        others_T = torch.randint(target.facts.vocab_size, (_NUM_ASKED - _NUM_KEPT,), generator=draw)
        row = target.new_row()
        [scored] = target.forward([torch.cat([kept_T, others_T])], [row])
        target.free(row)
        logits.append(scored.logits_TV[:_NUM_KEPT].double())
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


def _outlier_threshold(model: nn.Module) -> float:
    states: Sequence[Any] = [getattr(module, "state", None) for module in model.modules()]
    return max((float(getattr(state, "threshold", None) or 0.0) for state in states if state is not None), default=0.0)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
