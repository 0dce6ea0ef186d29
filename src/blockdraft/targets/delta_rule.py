"""Gated DeltaNet and Kimi delta attention of transformers, taken back without running their modules again.

The state behind the first positions of a forward follows from what the module put into its cache and its gates: the
convolution's inputs, and one decay and one learning rate of every head. Keys and values are convolved again, and the
recurrence

    S <- diag(exp(g)) S;  u = beta (v - k S);  S <- S + k^T u

is brought forward a few positions at once, through the triangular system in which each write depends on those before
it: no projection, no query and no output. Owns the table of modules whose gates are understood, and that arithmetic.
Must not know rows, recordings or forwards.

Letters: T positions, C of a chunk, H heads, A width of a key (of a decay 1 where all channels decay alike), W of a
value, P channels of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionLayer

__all__ = ["KNOWN", "DeltaMixer", "Gates", "brought_forward"]

_CHUNK = 16
_EPSILON = 1e-6  # of the norm of a key


@dataclass(frozen=True, slots=True)
class Gates:
    """The parts of a module that put out its gates, and how decays_1THA (logarithms) and betas_1TH follow from them."""

    names: tuple[str, ...]
    read: Callable[..., tuple[Tensor, Tensor]]


def _apart(module: Any, b_1TH: Tensor, a_1TH: Tensor) -> tuple[Tensor, Tensor]:
    betas_1TH = b_1TH.sigmoid()
    if getattr(module, "allow_neg_eigval", False):
        betas_1TH = betas_1TH * 2.0
    decays_1TH = -module.A_log.float().exp() * F.softplus(a_1TH.float() + module.dt_bias)
    return decays_1TH[..., None], betas_1TH


def _joint(module: Any, both: Tensor) -> tuple[Tensor, Tensor]:
    """Gates of the value heads that share a key head stand together, first all b, then all a."""
    by_key_head = both.unflatten(-1, (module.num_k_heads, 2, -1))
    return _apart(module, by_key_head[..., 0, :].flatten(-2), by_key_head[..., 1, :].flatten(-2))


def _by_channel(_module: Any, b_1TH: Tensor, decays_1THA: Tensor) -> tuple[Tensor, Tensor]:
    return decays_1THA, b_1TH.sigmoid()


_IN_PROJ = Gates(("in_proj_b", "in_proj_a"), _apart)
_KDA = Gates(("b_proj", "forget_gate"), _by_channel)
KNOWN: dict[str, Gates] = {
    "Qwen3NextGatedDeltaNet": Gates(("in_proj_ba",), _joint),
    "Qwen3_5GatedDeltaNet": _IN_PROJ,
    "Qwen3_5MoeGatedDeltaNet": _IN_PROJ,
    "Qwen4ExpTextGatedDeltaNet": _IN_PROJ,
    "LaraMiniGatedDeltaNet": _IN_PROJ,
    "OlmoHybridGatedDeltaNet": Gates(("b_proj", "a_proj"), _apart),
    "KimiLinearDeltaAttention": _KDA,
    "Glm5NextTextLinearAttention": _KDA,
    "BailingHybridDeltaAttention": _KDA,
}


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """One module of the table."""

    module: Any
    parts: tuple[nn.Module, ...]  # that put out its gates
    read: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> DeltaMixer | None:
        """The module, if it is one of those of transformers that the table names, with all weights in memory."""
        gates = KNOWN.get(type(module).__name__)
        if gates is None or not type(module).__module__.startswith("transformers.models."):
            return None
        if any(parameter.is_meta for parameter in module.parameters()):  # it fetches them when it runs
            return None
        if not all(hasattr(module, name) for name in gates.names):
            return None
        return cls(module, tuple(module.get_submodule(name) for name in gates.names), gates.read)

    @property
    def layer_index(self) -> int:
        return cast(int, self.module.layer_idx)

    def replay(self, layer: LinearAttentionLayer, inputs_1PT: Tensor, gates: list[Tensor]) -> None:
        """Bring the layer's states forward over these inputs of the convolution and outputs of the gates."""
        before_1HAW = layer.recurrent_states[0] if layer.has_previous_state[0] else None
        kernel, num_new = self.module.conv_kernel_size, inputs_1PT.shape[-1]
        window_1PT = layer.update_conv_state(inputs_1PT, 0, conv_kernel_size=kernel)
        keys_THA, values_THW = self._convolved(F.pad(window_1PT, (kernel - 1, 0))[..., 1 - kernel - num_new :])
        decays_1THA, betas_1TH = self.read(self.module, *gates)
        num_heads = values_THW.shape[1]
        keys_THA = keys_THA.repeat_interleave(num_heads // keys_THA.shape[1], dim=1)
        parts = (keys_THA, values_THW, decays_1THA[0], betas_1TH[0, ..., None])
        by_head = [part.transpose(0, 1).float() for part in parts]
        if before_1HAW is None:
            state_HAW = by_head[0].new_zeros((num_heads, keys_THA.shape[2], values_THW.shape[2]))
        else:
            state_HAW = before_1HAW[0].float()
        layer.update_recurrent_state(brought_forward(state_HAW, *by_head)[None], 0)

    def _convolved(self, window_1PT: Tensor) -> tuple[Tensor, Tensor]:
        """(keys_THA of length 1, values_THW); the window begins one kernel less one position before the first."""
        conv, module = self.module.conv1d, self.module
        num_values = getattr(module, "value_dim", 0) or module.qkv_dim
        num_keys = (conv.weight.shape[0] - num_values) // 2
        weight, bias = conv.weight[num_keys:], None if conv.bias is None else conv.bias[num_keys:]
        wide = window_1PT[:, num_keys:].to(weight.dtype)
        out_1PT = ACT2FN[module.activation](F.conv1d(wide, weight, bias, groups=weight.shape[0]))
        keys_TP, values_TP = out_1PT.to(window_1PT.dtype)[0].T.split([num_keys, num_values], dim=1)
        width = getattr(module, "head_k_dim", 0) or module.head_dim
        keys_THA = keys_TP.unflatten(1, (-1, width)).float()
        keys_THA = keys_THA * torch.rsqrt(keys_THA.square().sum(-1, keepdim=True) + _EPSILON)
        return keys_THA, values_TP.unflatten(1, (-1, getattr(module, "head_v_dim", 0) or width))


def brought_forward(
    state_HAW: Tensor, keys_HTA: Tensor, values_HTW: Tensor, decays_HTA: Tensor, betas_HT1: Tensor
) -> Tensor:
    """The state behind the last position."""
    parts = (part.split(_CHUNK, dim=1) for part in (keys_HTA, values_HTW, decays_HTA, betas_HT1))
    for chunk in zip(*parts, strict=True):
        state_HAW = _chunk(state_HAW, *chunk)
    return state_HAW


def _chunk(state_HAW: Tensor, keys_HCA: Tensor, values_HCW: Tensor, decays_HCA: Tensor, betas_HC1: Tensor) -> Tensor:
    since_HCA = decays_HCA.cumsum(1)
    wanted_HCW = (values_HCW - (keys_HCA * since_HCA.exp()) @ state_HAW) * betas_HC1
    between_HCCA = since_HCA[:, :, None] - since_HCA[:, None]
    is_earlier_CC = torch.ones(between_HCCA.shape[1:3], dtype=torch.bool, device=state_HAW.device).tril(-1)
    between_HCCA = between_HCCA.masked_fill(~is_earlier_CC[..., None], -torch.inf).exp()
    if between_HCCA.shape[-1] == 1:
        system_HCC = (keys_HCA @ keys_HCA.mT) * between_HCCA[..., 0] * betas_HC1
    else:
        faded_HCCA = between_HCCA.mul_(keys_HCA[:, None])
        system_HCC = (faded_HCCA @ keys_HCA[..., None])[..., 0] * betas_HC1
    writes_HCW = torch.linalg.solve_triangular(system_HCC, wanted_HCW, upper=False, unitriangular=True)
    # Summed from the end, so that the positions that count most are the most exact.
    later_HCA = F.pad(decays_HCA.flip(1).cumsum(1).flip(1)[:, 1:], (0, 0, 0, 1))
    faded_HAC = (keys_HCA * later_HCA.exp()).mT
    return torch.baddbmm(state_HAW * since_HCA[:, -1].exp()[..., None], faded_HAC, writes_HCW)
