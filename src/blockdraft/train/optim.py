"""Where and how precisely a run computes, and its optimiser. The schedule is the recipe's own (`OptimRecipe.lr_at`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import UnavailableError
from blockdraft.train.recipe import OptimRecipe

__all__ = [
    "MuonAndAdamW",
    "count_muon_parameters",
    "has_fast_bfloat16",
    "is_muon_matrix",
    "make_optimiser",
    "noisy_taps",
    "resolve_autocast",
    "resolve_device",
]

_NEVER_DECAYED = ("base_kernel", "_codebook")
_TABLES = (
    "_codebook",
    "transfer_codes",
    "markov_w1.weight",
    "markov_w2.weight",
    "embed_tokens.weight",
    "lm_head.weight",
)


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


class MuonAndAdamW:
    """Muon on the matrices between hidden rows, AdamW on all else, as one optimiser with one state.

    Muon (torch.optim.Muon) gives the step of a matrix orthogonal directions of one size, scaled so that AdamW's
    learning rates fit (`match_rms_adamw`). Parameters are numbered through, Muon's first.
    """

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], optim: OptimRecipe) -> None:
        muon = torch.optim.Muon(
            list(matrices), lr=optim.learning_rate, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, _adamw([(others, 0.0)], optim))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """One state: numbers of parameters go on from part to part."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for part in self.parts:
            own, first = part.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + index: entry for index, entry in own["state"].items()}
            groups += [
                {**group, "params": [first + index for index in group["params"]]} for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError where its groups are other ones."""
        groups = list(saved["param_groups"])
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the saved optimiser has other groups of parameters")
        for part in self.parts:
            own, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = [index for group in own for index in group["params"]]
            first = min(numbers)
            part.load_state_dict(
                {
                    "state": {index - first: saved["state"][index] for index in numbers if index in saved["state"]},
                    "param_groups": [{**one, "params": [index - first for index in one["params"]]} for one in own],
                }
            )


def is_muon_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon moves it: a matrix that maps hidden rows to hidden rows; not tables, kernels, norms or a gate."""
    return parameter.dim() == 2 and min(parameter.shape) > 1 and not name.endswith(_TABLES) and "conv." not in name


def count_muon_parameters(config: DraftConfig) -> int:
    """Numbers that Muon moves in a draft of this config: it keeps one moment of each, AdamW two."""
    with torch.device("meta"):
        named = DraftModel(config).named_parameters()
    return sum(parameter.numel() for name, parameter in named if is_muon_matrix(name, parameter))


def make_optimiser(model: DraftModel, optim: OptimRecipe) -> torch.optim.AdamW | MuonAndAdamW:
    """The recipe's optimiser; weight decay concerns matrices only: not norms, biases, base kernels, codebooks, masks.

    With "muon" it concerns the matrices that Muon moves.
    """
    named = list(model.named_parameters())
    if optim.kind == "muon":
        matrices = [parameter for name, parameter in named if is_muon_matrix(name, parameter)]
        return MuonAndAdamW(matrices, [p for name, p in named if not is_muon_matrix(name, p)], optim)
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in named:
        is_decayed = parameter.dim() == 2 and not name.endswith(_NEVER_DECAYED)
        (decayed if is_decayed else others).append(parameter)
    return _adamw([(decayed, optim.weight_decay), (others, 0.0)], optim)


def _adamw(groups: Sequence[tuple[Sequence[Tensor], float]], optim: OptimRecipe) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [{"params": list(parameters), "weight_decay": decay} for parameters, decay in groups],
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
