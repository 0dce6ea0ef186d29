"""The Kimi-K3 text model in plain torch: modules that carry the published names, and one pass over many rows.

The new positions of all rows stand one after another in one matrix, without padding; only what looks back goes row by
row, through a `Memory` per row. Norms, routing, activations, mixtures and delta attention are computed in float32 or
wider whatever the weights are. Must not know rows of a target, files or drafts.

Letters: F new positions of all rows, T of one row, S positions that one row sees, D width, I MLP width, H heads,
R latent width of attention, N and E a head's key from it and the shared key, Q = R + E, W value width, A width of a
delta head, P = 3 H A, K kernel size, X experts, L latent width of experts, G experts of a token, M values of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.config import TapStream

from .config import KimiK3Config
from .delta import DeltaState, Tape, convolve, scan
from .experts import Experts

__all__ = ["KimiK3Model", "Memory"]

_LORA_EPS = 1e-6  # of the two norms inside latent attention, whatever the config says of the others
_L2_EPS = 1e-6
_MAX_SCORES = 1 << 26  # attention scores held at once


class Memory:
    """What one row remembers. This one remembers nothing: a whole text from its beginning, for training."""

    def latents(self, layer: int, new_TQ: Tensor) -> Tensor:
        """[S, Q] of all positions of the row, the new ones last."""
        return new_TQ

    def delta(self, layer: int) -> DeltaState | None:
        """The state of a delta layer, None before the first position."""
        return None


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


class Row(nn.Module):
    """One vector that is stored as a matrix of one row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))


class HeadMatrices(nn.Linear):
    """A linear layer whose weight is also read per head, so that it has to stay as it is (see ``packed``)."""


class Kernels(nn.Module):
    """One kernel per channel."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, size) * size**-0.5)


def mix(prefix_FD: Tensor, bank: Sequence[Tensor], proj: Row, norm: Norm) -> Tensor:
    """The running sum and the sums of the blocks before it, weighted by a softmax over the scores of each."""
    if not bank:
        return prefix_FD
    values_MFD = wide(torch.stack((*bank, prefix_FD)))
    scorer_D = wide(norm.weight) * wide(proj.weight[0])
    scores_MF = F.rms_norm(values_MFD, values_MFD.shape[-1:], None, norm.eps) @ scorer_D
    return torch.einsum("mf,mfd->fd", scores_MF.softmax(0), values_MFD).to(prefix_FD.dtype)


class MLP(nn.Module):
    def __init__(self, config: KimiK3Config, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self._bounds = config.situ_beta, config.situ_linear_beta

    def forward(self, x_FD: Tensor) -> Tensor:
        out_FD: Tensor = self.down_proj(situ(self.gate_proj(x_FD), self.up_proj(x_FD), *self._bounds))
        return out_FD


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """beta tanh(gate / beta) sigmoid(gate) times linear_beta tanh(up / linear_beta)."""
    wide_gate, wide_up = wide(gate), wide(up)
    bounded = beta * torch.tanh(wide_gate / beta) * torch.sigmoid(wide_gate)
    return (bounded * (linear_beta * torch.tanh(wide_up / linear_beta))).to(gate.dtype)


class Router(nn.Module):
    """Which experts a token goes to: the bias chooses, the scores without it weigh."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        moe = config.moe
        self.weight = nn.Parameter(torch.randn(moe.num_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)
        self._top_k, self._renormalises, self._scale = moe.top_k, moe.renormalises, moe.scale

    def forward(self, x_FD: Tensor) -> tuple[Tensor, Tensor]:
        """(ids_FG, weights_FG)."""
        scores_FX = torch.sigmoid(wide(x_FD) @ wide(self.weight).T)
        ids_FG = (scores_FX + self.e_score_correction_bias).topk(self._top_k, dim=-1).indices
        weights_FG = scores_FX.gather(1, ids_FG)
        if self._renormalises:
            weights_FG = weights_FG / (weights_FG.sum(-1, keepdim=True) + 1e-20)
        return ids_FG, weights_FG * self._scale


class SparseMoe(nn.Module):
    """Experts on a latent of the input, and one MLP of all shared experts on the input itself."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        moe = config.moe
        self.gate = Router(config)
        self.experts = Experts(moe.num_experts, moe.latent_size, moe.intermediate_size, is_packed=moe.is_packed)
        self.shared_experts = MLP(config, moe.intermediate_size * moe.num_shared)
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, moe.latent_size, bias=False)
        self.routed_expert_norm = Norm(moe.latent_size, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(moe.latent_size, config.hidden_size, bias=False)
        self._bounds = config.situ_beta, config.situ_linear_beta

    def forward(self, x_FD: Tensor) -> Tensor:
        ids_FG, weights_FG = self.gate(x_FD)
        latent_FL = self.routed_expert_down_proj(x_FD)
        sum_FL = torch.zeros_like(wide(latent_FL))
        for expert in ids_FG.unique().tolist():
            rows, slots = (ids_FG == expert).nonzero(as_tuple=True)
            gate, up, down = (self.experts.matrix(name, expert, latent_FL.dtype) for name in ("w1", "w3", "w2"))
            part = latent_FL[rows]
            out = F.linear(situ(F.linear(part, gate), F.linear(part, up), *self._bounds), down)
            sum_FL = sum_FL.index_add(0, rows, wide(out) * weights_FG[rows, slots, None])
        routed_FL = self.routed_expert_norm(sum_FL.to(latent_FL.dtype))
        out_FD: Tensor = self.routed_expert_up_proj(routed_FL) + self.shared_experts(x_FD)
        return out_FD


class DeltaAttention(nn.Module):
    """KDA with a bounded decay and a gate of full rank."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        kda, width = config.kda, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, config.kda_width, bias=False) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Kernels(config.kda_width, kda.kernel_size) for _ in range(3))
        self.f_a_proj = nn.Linear(width, kda.head_dim, bias=False)
        self.f_b_proj = nn.Linear(kda.head_dim, config.kda_width, bias=False)
        self.A_log = nn.Parameter(torch.empty(kda.num_heads).uniform_(1.0, 16.0).log())
        self.dt_bias = nn.Parameter(torch.zeros(config.kda_width))
        self.b_proj = nn.Linear(width, kda.num_heads, bias=False)
        self.g_proj = nn.Linear(width, config.kda_width, bias=False)
        self.o_norm = Norm(kda.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(config.kda_width, width, bias=False)
        self._kda = kda

    def forward(
        self, x_FD: Tensor, layer: int, memories: Sequence[Memory], lengths: list[int]
    ) -> tuple[Tensor, list[Tape]]:
        """(out_FD, what each row's positions did)."""
        heads = (self._kda.num_heads, self._kda.head_dim)
        inputs_FP = torch.cat((self.q_proj(x_FD), self.k_proj(x_FD), self.v_proj(x_FD)), dim=-1)
        rates_FHA = (wide(self.f_b_proj(self.f_a_proj(x_FD))) + self.dt_bias).unflatten(-1, heads)
        decays_FHA = self._kda.lower_bound * torch.sigmoid(wide(self.A_log).exp()[:, None] * rates_FHA)
        betas_FH = torch.sigmoid(wide(self.b_proj(x_FD)))
        weight_PK = wide(torch.cat([m.weight for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])[:, 0])
        outs, tapes = [], []
        parts = zip(memories, *(x.split(lengths) for x in (inputs_FP, decays_FHA, betas_FH)), strict=True)
        for memory, inputs_TP, decays_THA, betas_TH in parts:
            before = memory.delta(layer) or self._nothing(inputs_TP, decays_THA)
            window_TP = torch.cat((before.tail_KP, inputs_TP))
            q_THA, k_THA, v_THA = (
                convolve(window_TP, weight_PK).to(decays_THA.dtype).unflatten(-1, (3, *heads)).unbind(1)
            )
            q_THA, k_THA = _unit(q_THA) * self._kda.head_dim**-0.5, _unit(k_THA)
            out_THA, writes_THA, state_HAA = scan(before.state_HAW, q_THA, k_THA, v_THA, decays_THA, betas_TH)
            after = DeltaState(state_HAA, window_TP[inputs_TP.shape[0] :])
            outs.append(out_THA)
            tapes.append(Tape(before, after, window_TP, k_THA, decays_THA, writes_THA))
        gate_FHA = torch.sigmoid(wide(self.g_proj(x_FD))).unflatten(-1, heads)
        out_FD: Tensor = self.o_proj((self.o_norm(torch.cat(outs)) * gate_FHA).flatten(-2).to(x_FD.dtype))
        return out_FD, tapes

    def _nothing(self, inputs_TP: Tensor, decays_THA: Tensor) -> DeltaState:
        """Before the first position: an empty state, zeros in front of the text."""
        heads, width = self._kda.num_heads, self._kda.head_dim
        tail = self._kda.kernel_size - 1
        return DeltaState(decays_THA.new_zeros((heads, width, width)), inputs_TP.new_zeros((tail, inputs_TP.shape[1])))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)


class LatentAttention(nn.Module):
    """Attention to one latent and one shared key per position, without rotation; what was gathered is gated."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        heads, width = config.num_heads, config.hidden_size
        self._split = config.qk_nope_head_dim, config.qk_rope_head_dim
        self._value, self._rank, self._heads = config.v_head_dim, config.kv_lora_rank, heads
        self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
        self.q_a_layernorm = Norm(config.q_lora_rank, _LORA_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * sum(self._split), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, _LORA_EPS)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = HeadMatrices(config.kv_lora_rank, expanded, bias=False)
        self.g_proj = nn.Linear(width, heads * config.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=False)

    def forward(self, x_FD: Tensor, layer: int, memories: Sequence[Memory], lengths: list[int]) -> Tensor:
        keys_HNR, values_HWR = self.kv_b_proj.weight.unflatten(0, (self._heads, -1)).split(
            [self._split[0], self._value], dim=1
        )
        queries_FHA = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_FD))).unflatten(-1, (self._heads, -1))
        plain_FHN, shared_FHE = queries_FHA.split(self._split, dim=-1)
        # The matrix that makes a head's keys is applied to its queries, so that all heads share one key per position.
        queries_FHQ = torch.cat((torch.einsum("fhn,hnr->fhr", plain_FHN, keys_HNR), shared_FHE), dim=-1)
        latent_FR, key_FE = self.kv_a_proj_with_mqa(x_FD).split([self._rank, self._split[1]], dim=-1)
        seen_FQ = torch.cat((self.kv_a_layernorm(latent_FR), key_FE), dim=-1)
        gathered = []
        parts = zip(memories, queries_FHQ.split(lengths), seen_FQ.split(lengths), strict=True)
        for memory, queries_THQ, new_TQ in parts:
            gathered.append(self._attend(queries_THQ, memory.latents(layer, new_TQ)))
        out_FHW = torch.einsum("fhr,hwr->fhw", torch.cat(gathered), values_HWR)
        gated = wide(out_FHW.flatten(-2)) * torch.sigmoid(wide(self.g_proj(x_FD)))
        out_FD: Tensor = self.o_proj(gated.to(x_FD.dtype))
        return out_FD

    def _attend(self, queries_THQ: Tensor, seen_SQ: Tensor) -> Tensor:
        """[T, H, R] latents that the heads gathered; the queries are those of the last T positions."""
        first = seen_SQ.shape[0] - queries_THQ.shape[0]
        count = max(1, _MAX_SCORES // (self._heads * seen_SQ.shape[0]))
        outs = []
        for part_THQ in queries_THQ.split(count):
            last = first + part_THQ.shape[0]
            scores_HTS = torch.einsum("thq,sq->hts", part_THQ, seen_SQ[:last]) * sum(self._split) ** -0.5
            is_later_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=seen_SQ.device).triu(first + 1)
            weights_HTS = wide(scores_HTS).masked_fill(is_later_TS, -torch.inf).softmax(-1).to(seen_SQ.dtype)
            outs.append(torch.einsum("hts,sr->thr", weights_HTS, seen_SQ[:last, : self._rank]))
            first = last
        return torch.cat(outs)


class Layer(nn.Module):
    def __init__(self, config: KimiK3Config, index: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: nn.Module = (DeltaAttention if index in config.kda.layers else LatentAttention)(config)
        self.is_dense = index < config.moe.num_dense_layers
        if self.is_dense:
            self.mlp = MLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = SparseMoe(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res_norm, self.mlp_res_norm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res_proj, self.mlp_res_proj = Row(width), Row(width)


class Decoder(nn.Module):
    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_proj = Row(config.hidden_size)


class KimiK3Model(nn.Module):
    """The text model. Names are the published ones without `language_model.`, but experts are three stacks a layer."""

    def __init__(self, config: KimiK3Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """logits_BTV of whole texts, with gradients."""
        lengths = [ids_BT.shape[1]] * ids_BT.shape[0]
        hidden_FD, _, _ = self.run(ids_BT.flatten(), [Memory() for _ in lengths], lengths)
        logits_BTV: Tensor = self.lm_head(hidden_FD).unflatten(0, ids_BT.shape)
        return logits_BTV

    def run(
        self,
        ids_F: Tensor,
        memories: Sequence[Memory],
        lengths: list[int],
        *,
        taps: Sequence[int] = (),
        stream: TapStream = "prefix",
    ) -> tuple[Tensor, list[Tensor], dict[int, list[Tape]]]:
        """(what the head reads [F, D], the taps [F, D] in their order, per delta layer what each row did).

        A tap of the stream "prefix" is the running sum behind its layer, one of "attn_res" what the next layer's
        attention makes of it and of the blocks before (behind the last layer: what the final norm reads).
        """
        decoder = self.model
        prefix_FD: Tensor = decoder.embed_tokens(ids_F)
        bank: list[Tensor] = []
        kept: dict[int, Tensor] = {}
        tapes: dict[int, list[Tape]] = {}
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, Layer)
            mixed_FD = mix(prefix_FD, bank, layer.self_attention_res_proj, layer.self_attention_res_norm)
            if stream == "attn_res" and index - 1 in taps:
                kept[index - 1] = mixed_FD
            u_FD = layer.input_layernorm(mixed_FD)
            if isinstance(layer.self_attn, DeltaAttention):
                out_FD, tapes[index] = layer.self_attn(u_FD, index, memories, lengths)
            else:
                out_FD = layer.self_attn(u_FD, index, memories, lengths)
            if index % self.config.block_size == 0:
                bank.append(prefix_FD)
                prefix_FD = out_FD
            else:
                prefix_FD = prefix_FD + out_FD
            u_FD = layer.post_attention_layernorm(mix(prefix_FD, bank, layer.mlp_res_proj, layer.mlp_res_norm))
            prefix_FD = prefix_FD + (layer.mlp if layer.is_dense else layer.block_sparse_moe)(u_FD)
            if stream == "prefix" and index in taps:
                kept[index] = prefix_FD
        mixed_FD = mix(prefix_FD, bank, decoder.output_attn_res_proj, decoder.output_attn_res_norm)
        if stream == "attn_res" and len(decoder.layers) - 1 in taps:
            kept[len(decoder.layers) - 1] = mixed_FD
        return decoder.norm(mixed_FD), [kept[tap] for tap in taps], tapes
