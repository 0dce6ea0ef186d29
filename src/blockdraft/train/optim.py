"""Where and how precisely a run computes, and its optimiser. The schedule is the recipe's own (`OptimRecipe.lr_at`)."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdraft.draft import DraftModel
from blockdraft.errors import UnavailableError
from blockdraft.train.recipe import OptimRecipe

__all__ = ["has_fast_bfloat16", "make_optimiser", "noisy_taps", "resolve_autocast", "resolve_device"]

_NEVER_DECAYED = ("base_kernel", "_codebook")


def resolve_device(optim: OptimRecipe) -> torch.device:
    """The device that the recipe asks for; "auto" is the first GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if optim.device == "cuda" and not has_gpu:
        raise UnavailableError('optim.device is "cuda", and torch sees no GPU here; set optim.device=cpu')
    return torch.device("cuda" if has_gpu and optim.device != "cpu" else "cpu")


def resolve_autocast(optim: OptimRecipe, device: torch.device) -> str:
    """ "bfloat16" or "none"; "auto" is bfloat16 where the device multiplies it fast."""
    if optim.autocast != "auto":
        return optim.autocast
    return "bfloat16" if has_fast_bfloat16(device) else "none"


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products have instructions of their own here; without them a CPU takes ten times as long."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))


def make_optimiser(model: DraftModel, optim: OptimRecipe) -> torch.optim.AdamW:
    """AdamW whose weight decay concerns matrices only: not norms, biases, base kernels, codebooks, mask embedding."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_decayed = parameter.dim() == 2 and not name.endswith(_NEVER_DECAYED)
        (decayed if is_decayed else others).append(parameter)
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        fused=True,
    )


def noisy_taps(taps_BSNE: Tensor, len_B: Tensor, share: float, generators: list[torch.Generator]) -> Tensor:
    """The taps plus Gaussian noise whose deviation is `share` of each row's own root mean square.

    Each sequence draws from its own generator, which lies on the CPU, as much as it is long: padding changes nothing.
    """
    noise_BSNE = torch.zeros(taps_BSNE.shape)
    for row, (length, generator) in enumerate(zip(len_B.tolist(), generators, strict=True)):
        torch.randn(noise_BSNE[row, :length].shape, generator=generator, out=noise_BSNE[row, :length])
    size_BSN1 = taps_BSNE.square().mean(-1, keepdim=True).sqrt()
    return torch.addcmul(taps_BSNE, size_BSN1, noise_BSNE.to(taps_BSNE), value=share)
