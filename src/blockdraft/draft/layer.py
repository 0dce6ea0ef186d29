"""One decoder layer of a draft: attention and MLP, each wrapped in a block convolution when the config has one.

Knows config only: attention itself is the caller's closure.

Letters: B rows, C newly committed positions, L block length, D draft width, H query heads, K kv heads, A width of
queries and keys, W width of values.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.draft.attention import Attention
from blockdraft.draft.conv import BlockConv, convolve
from blockdraft.draft.gqa import GroupedQueryAttention
from blockdraft.draft.mla import LatentAttention
from blockdraft.draft.norm import RMSNorm
from blockdraft.draft.rope import Rotation

__all__ = ["Layer"]


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer. Both sublayers are wrapped in a block convolution when the config has one."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.attention_conv = BlockConv(config.hidden_size, config.conv) if config.conv is not None else None
        self.mlp_conv = BlockConv(config.hidden_size, config.conv) if config.conv is not None else None

    def context_kv(self, context_CD: Tensor, rotation: Rotation, *, absorbed: bool) -> tuple[Tensor, Tensor]:
        """(k_CKA, v_CKW) of committed positions; any leading axes."""
        attention: Attention = self.self_attn
        return attention.key_value(context_CD, rotation, absorbed=absorbed)

    def block(
        self,
        x_BLD: Tensor,
        rotation: Rotation,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        *,
        absorbed: bool,
    ) -> Tensor:
        """The layer's output for the rows of B separate blocks."""
        attention: Attention = self.self_attn

        def sublayer(u_BLD: Tensor) -> Tensor:
            q_BLHA = attention.query(u_BLD, rotation, absorbed=absorbed)
            k_BLKA, v_BLKW = attention.key_value(u_BLD, rotation, absorbed=absorbed)
            return attention.output(attend(q_BLHA, k_BLKA, v_BLKW), absorbed=absorbed)

        x_BLD = x_BLD + _wrapped(self.attention_conv, sublayer, self.input_layernorm(x_BLD))
        return x_BLD + _wrapped(self.mlp_conv, self.mlp, self.post_attention_layernorm(x_BLD))


def _attention(config: DraftConfig) -> GroupedQueryAttention | LatentAttention:
    if isinstance(config.attention, MlaConfig):
        return LatentAttention(config.attention, config.hidden_size, config.rms_norm_eps)
    return GroupedQueryAttention(config.attention, config.hidden_size, config.rms_norm_eps)


def _wrapped(conv: BlockConv | None, sublayer: Callable[[Tensor], Tensor], u_BLD: Tensor) -> Tensor:
    """The sublayer, or convolution, sublayer, convolution with both kernels made from the sublayer's normed
    input.
    """
    if conv is None:
        return sublayer(u_BLD)
    before, after = conv.kernels(u_BLD)
    return convolve(sublayer(convolve(u_BLD, before)), after)
