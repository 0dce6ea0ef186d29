"""Multi-head latent attention: the keys and values of all heads come from one latent per position.

Owns its two forms, which are one function. Expanded: every head gets keys and values of its own, made from
the latent (training). Absorbed: the matrices that would make them are applied to the queries before and to the
result after, so that all heads share the latent itself as their one key and value, and only it is kept
(serving). Knows config only.

Letters: L rows, D draft width, H heads, R latent width (kv_lora_rank), N and E width of a head without and with
positions (qk_nope_head_dim, qk_rope_head_dim), A = N + E, W value width (v_head_dim), F = R + E.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdraft.config import MlaConfig
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotation, rotate

__all__ = ["LatentAttention"]


class _HeadMatrices(nn.Linear):
    """A linear layer whose weight is also read per head, so that it has to stay as it is (see ``packed``)."""


class LatentAttention(nn.Module):
    """The projections of one layer. Rotary pairs are neighbouring dimensions (2j, 2j+1)."""

    def __init__(self, shape: MlaConfig, width: int, eps: float) -> None:
        super().__init__()
        self.shape = shape
        num_queries = shape.num_heads * shape.qk_head_dim
        rank = shape.q_lora_rank
        self.q_proj = nn.Linear(width, num_queries, bias=False) if rank is None else None
        self.q_a_proj = nn.Linear(width, rank, bias=shape.has_bias) if rank is not None else None
        self.q_a_layernorm = RMSNorm(rank, eps) if rank is not None else None
        self.q_b_proj = nn.Linear(rank, num_queries, bias=False) if rank is not None else None
        self.kv_a_proj_with_mqa = nn.Linear(width, shape.num_cached, bias=shape.has_bias)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps)
        num_expanded = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        self.kv_b_proj = _HeadMatrices(shape.kv_lora_rank, num_expanded, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.v_head_dim, width, bias=shape.has_bias)

    def query(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> Tensor:
        """q_LHA of block rows, or q_LHF in the absorbed form."""
        q_LHA = self._queries(x_LD).unflatten(-1, (self.shape.num_heads, -1))
        plain_LHN, turned_LHE = q_LHA.split([self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim], dim=-1)
        if absorbed:
            plain_LHN = torch.einsum("...hn,hnr->...hr", plain_LHN, self._matrices()[0])
        return torch.cat((plain_LHN, rotate(_halves(turned_LHE), rotation)), dim=-1)

    def key_value(self, x_LD: Tensor, rotation: Rotation, *, absorbed: bool) -> tuple[Tensor, Tensor]:
        """(k_LHA, v_LHW) of context features or of block rows; absorbed (k_L1F, v_L1R), and v is a part of k."""
        shape = self.shape
        latent_LR, turned_LE = self.kv_a_proj_with_mqa(x_LD).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        latent_LR = self.kv_a_layernorm(latent_LR)
        turned_L1E = rotate(_halves(turned_LE).unsqueeze(-2), rotation)
        if absorbed:
            k_L1F = torch.cat((latent_LR.unsqueeze(-2), turned_L1E), dim=-1)
            return k_L1F, k_L1F[..., : shape.kv_lora_rank]
        both_LHA = self.kv_b_proj(latent_LR).unflatten(-1, (shape.num_heads, -1))
        k_LHN, v_LHW = both_LHA.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        turned_LHE = turned_L1E.expand(*turned_L1E.shape[:-2], shape.num_heads, -1)
        return torch.cat((k_LHN, turned_LHE), dim=-1), v_LHW

    def output(self, out_LHW: Tensor, *, absorbed: bool) -> Tensor:
        """x_LD of what the heads gathered: values, or latents (out_LHR) in the absorbed form."""
        if absorbed:
            out_LHW = torch.einsum("...hr,hwr->...hw", out_LHW, self._matrices()[1])
        x_LD: Tensor = self.o_proj(out_LHW.flatten(-2))
        return x_LD

    def _queries(self, x_LD: Tensor) -> Tensor:
        if self.q_proj is not None:
            queries: Tensor = self.q_proj(x_LD)
            return queries
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_LD)))
        return queries

    def _matrices(self) -> tuple[Tensor, Tensor]:
        """Per head, what makes its keys [H, N, R] and its values [H, W, R] from a latent."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.shape.num_heads, -1))
        keys_HNR, values_HWR = weight.split([self.shape.qk_nope_head_dim, self.shape.v_head_dim], dim=1)
        return keys_HNR, values_HWR


def _halves(x: Tensor) -> Tensor:
    """Even dimensions, then odd ones: pairs (2j, 2j+1) become the pairs (j, j + E/2) that ``rotate`` turns.

    Queries and keys are reordered alike, so scores do not change.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
