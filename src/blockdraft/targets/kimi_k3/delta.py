"""Kimi delta attention without its projections: the short convolution, the recurrence, and how it is taken back.

The recurrence decays a state per key channel, reads it with the key, and writes what the value has more than was read:

    S <- diag(exp(g)) S;  u = beta (v - k S);  S <- S + k^T u;  out = q S

A few tokens are computed at once: what each writes depends on what the ones before it wrote through a triangular
system, and every exponent in it is a sum of logarithms of decays, at most 0, so nothing can overflow. Once the writes u
are known the state after any prefix is one weighted sum of them, which is all that taking back costs: no projection,
no convolution and no recurrence is run again.

Letters: T positions, C of a chunk, H heads, A width of a key, W of a value, P channels, K kernel size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DeltaState", "Tape", "convolve", "scan"]

_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DeltaState:
    """What one row keeps of its past for one layer: the state, and the last inputs of the convolution."""

    state_HAW: Tensor
    tail_KP: Tensor  # K - 1 positions

    @property
    def num_bytes(self) -> int:
        return self.state_HAW.nbytes + self.tail_KP.nbytes


@dataclass(frozen=True, slots=True)
class Tape:
    """The last forward pass of one row through one layer: the state before it, and what its tokens did to it."""

    before: DeltaState
    after: DeltaState
    window_TP: Tensor  # the convolution's inputs, K - 1 positions of the past in front
    keys_THA: Tensor
    decays_THA: Tensor  # logarithms
    writes_THW: Tensor

    @property
    def num_bytes(self) -> int:
        parts = (self.window_TP, self.keys_THA, self.decays_THA, self.writes_THW)
        return self.before.num_bytes + sum(part.nbytes for part in parts)

    def state_after(self, kept: int) -> DeltaState:
        """The state after the first `kept` tokens of that pass."""
        if kept == self.keys_THA.shape[0]:
            return self.after
        if kept == 0:
            return self.before
        decays_THA = self.decays_THA[:kept]
        # Summed from the end, so that the tokens that count most are the most exact.
        since_THA = decays_THA.flip(0).cumsum(0).flip(0)
        later_THA = torch.cat((since_THA[1:], torch.zeros_like(since_THA[:1])))
        state_HAW = _written(self.before.state_HAW, since_THA[0], self.keys_THA[:kept], later_THA, self.writes_THW)
        num_tail = self.before.tail_KP.shape[0]
        return DeltaState(state_HAW, self.window_TP[kept : kept + num_tail])


def convolve(window_TP: Tensor, weight_PK: Tensor) -> Tensor:
    """[T, P], SiLU of the causal convolution of each channel; the window has K - 1 positions more than T."""
    kernel = weight_PK.shape[1]
    count = window_TP.shape[0] - kernel + 1
    wide_TP = window_TP.to(weight_PK.dtype)
    out_TP = wide_TP[:count] * weight_PK[:, 0]
    for tap in range(1, kernel):
        out_TP = torch.addcmul(out_TP, wide_TP[tap : tap + count], weight_PK[:, tap])
    return F.silu(out_TP)


def scan(
    state_HAW: Tensor, q_THA: Tensor, k_THA: Tensor, v_THW: Tensor, decays_THA: Tensor, betas_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(out_THW, writes_THW, the state behind the last token)."""
    outs, writes = [], []
    parts = zip(*(x.split(_CHUNK) for x in (q_THA, k_THA, v_THW, decays_THA, betas_TH)), strict=True)
    for q_CHA, k_CHA, v_CHW, decays_CHA, betas_CH in parts:
        out_CHW, writes_CHW, state_HAW = _chunk(state_HAW, q_CHA, k_CHA, v_CHW, decays_CHA, betas_CH)
        outs.append(out_CHW)
        writes.append(writes_CHW)
    return torch.cat(outs), torch.cat(writes), state_HAW


def _chunk(
    state_HAW: Tensor, q_CHA: Tensor, k_CHA: Tensor, v_CHW: Tensor, decays_CHA: Tensor, betas_CH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    since_CHA = decays_CHA.cumsum(0)
    between_CCHA = since_CHA[:, None] - since_CHA[None]
    is_later_CC = torch.ones(between_CCHA.shape[:2], dtype=torch.bool, device=q_CHA.device).triu(1)
    faded_CCHA = k_CHA[None] * between_CCHA.masked_fill(is_later_CC[..., None, None], -torch.inf).exp()
    by_key_HCC = torch.einsum("iha,ijha->hij", k_CHA, faded_CCHA)
    by_query_HCC = torch.einsum("iha,ijha->hij", q_CHA, faded_CCHA)
    reach_CHA = since_CHA.exp()
    read_CHW = torch.einsum("iha,haw->ihw", k_CHA * reach_CHA, state_HAW)
    wanted_HCW = ((v_CHW - read_CHW) * betas_CH[..., None]).transpose(0, 1)
    system_HCC = by_key_HCC.tril(-1) * betas_CH.T[..., None]
    writes_HCW = torch.linalg.solve_triangular(system_HCC, wanted_HCW, upper=False, unitriangular=True)
    writes_CHW = writes_HCW.transpose(0, 1)
    out_CHW = torch.einsum("iha,haw->ihw", q_CHA * reach_CHA, state_HAW) + (by_query_HCC @ writes_HCW).transpose(0, 1)
    return out_CHW, writes_CHW, _written(state_HAW, since_CHA[-1], k_CHA, since_CHA[-1] - since_CHA, writes_CHW)


def _written(state_HAW: Tensor, decay_HA: Tensor, k_THA: Tensor, later_THA: Tensor, writes_THW: Tensor) -> Tensor:
    """The state decayed by `decay` plus every write at its key, each decayed by what came later."""
    faded_HAT = (k_THA * later_THA.exp()).permute(1, 2, 0)
    writes_HTW = writes_THW[: k_THA.shape[0]].transpose(0, 1)
    return torch.baddbmm(state_HAW * decay_HA.exp()[..., None], faded_HAT, writes_HTW)
