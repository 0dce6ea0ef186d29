"""Small drafts on latent attention, and their forward pass written again from the formulas alone.

The second pass knows no cache, no absorbed form and no table of positions: a loop over rows, heads and keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.config import ConvConfig, DraftConfig, LayerConfig, MlaConfig, RopeConfig, SelectorConfig
from blockdraft.draft import DraftCache, DraftModel

WIDTH, NUM_TAPS, VOCAB = 32, 2, 50
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 6, 4, 5, 10

FULL, SLIDING, FULL_CAUSAL, SLIDING_BOTH = (
    LayerConfig(is_causal=False, window=None),
    LayerConfig(is_causal=True, window=5),
    LayerConfig(is_causal=True, window=None),
    LayerConfig(is_causal=False, window=5),
)
LAYOUTS: dict[str, tuple[LayerConfig, ...]] = {
    "sliding both ways and full": (SLIDING_BOTH, FULL),
    "block-causal sliding": (SLIDING, SLIDING),
    "causal": (FULL_CAUSAL, SLIDING),
    "default mix": (SLIDING, FULL),
    "full": (FULL,),
    "window 1": (LayerConfig(is_causal=True, window=1), SLIDING),
}
PLAIN = RopeConfig(theta=1e4)
YARN = RopeConfig(
    theta=5e4,
    kind="yarn",
    params=(("factor", 8.0), ("original_max_position_embeddings", 32.0), ("mscale", 1.0), ("mscale_all_dim", 1.0)),
)


def make_config(
    layers: Sequence[LayerConfig],
    *,
    q_lora_rank: int | None = 12,
    rope: RopeConfig = YARN,
    is_v2: bool = True,
    has_bias: bool = False,
    has_tap_norms: bool = False,
) -> DraftConfig:
    return DraftConfig(
        hidden_size=WIDTH,
        intermediate_size=40,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        attention=MlaConfig(
            num_heads=HEADS,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            has_bias=has_bias,
        ),
        layers=tuple(layers),
        rope=rope,
        block_size=8,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        target_hidden_size=WIDTH,
        conv=ConvConfig(kernel_size=2, group_size=8) if is_v2 else None,
        selector=SelectorConfig(rank=4, top_k=3) if is_v2 else None,
        has_tap_norms=has_tap_norms,
    )


def make_model(config: DraftConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, **own: bool) -> DraftModel:
    torch.manual_seed(seed)
    model = DraftModel(config, **own).to(dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.25)
    return model


def make_taps(count: int) -> Tensor:
    return torch.randn(count, NUM_TAPS, WIDTH, dtype=torch.float64)


def make_noise(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, WIDTH, dtype=torch.float64)


def filled(model: DraftModel, taps: Tensor, pieces: Sequence[int]) -> DraftCache:
    cache = model.new_cache()
    for piece in torch.split(taps, list(pieces)):
        model.inject(piece, cache)
    return cache


def angle_of(rope: RopeConfig, pair: int) -> float:
    """What a pair of the rotated part turns by per position."""
    base = rope.theta ** (-2 * pair / ROPE)
    if rope.kind == "default":
        return base
    numbers = rope.numbers

    def at(turns: float) -> float:
        reach = numbers["original_max_position_embeddings"] / (2 * math.pi * turns)
        return ROPE * math.log(reach) / (2 * math.log(rope.theta))

    low, high = max(math.floor(at(32.0)), 0), min(math.ceil(at(1.0)), ROPE - 1)
    share = min(max((pair - low) / (high - low), 0.0), 1.0)
    return base * (1 - share) + base / numbers["factor"] * share


def turned(x: Tensor, position: int, rope: RopeConfig) -> Tensor:
    """Dimensions (2j, 2j+1) turned by the position."""
    out = x.clone()
    for pair in range(ROPE // 2):
        angle = position * angle_of(rope, pair)
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


class FromScratch:
    """One draft's forward pass from the formulas: `hidden(taps, noise)` of one block over its whole context."""

    def __init__(self, model: DraftModel) -> None:
        self.config = model.config
        self.state = {name: tensor.double() for name, tensor in model.state_dict().items()}
        factor = self.config.rope.numbers.get("factor", 1.0)
        self.scale = (NOPE + ROPE) ** -0.5 * (0.1 * math.log(factor) + 1.0) ** 2

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean: Tensor = x.pow(2).mean(-1, keepdim=True)
        return x / (mean + self.config.rms_norm_eps).sqrt() * self.state[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    def conv(self, x: Tensor, u: Tensor, side: int, name: str) -> Tensor:
        conv, length = self.config.conv, x.shape[0]
        if conv is None:
            return x
        kernels = self.linear(u, f"{name}.kernel_projection").view(length, 2, conv.kernel_size, -1)
        out = torch.zeros_like(x)
        for t in range(length):
            for tap in range(min(conv.kernel_size, t + 1)):
                part = kernels[t, side, tap].repeat_interleave(conv.group_size)
                out[t] += (self.state[f"{name}.base_kernel"][side, tap] + part) * x[t - tap]
        return out

    def attention(self, block: Tensor, context: Tensor, rule: LayerConfig, at: str) -> Tensor:
        start, length = context.shape[0], block.shape[0]
        if self.config.attention.q_lora_rank is None:
            queries = self.linear(block, f"{at}.q_proj")
        else:
            rows = self.norm(self.linear(block, f"{at}.q_a_proj"), f"{at}.q_a_layernorm")
            queries = self.linear(rows, f"{at}.q_b_proj")
        queries = queries.view(length, HEADS, NOPE + ROPE)
        latent = self.linear(torch.cat((context, block)), f"{at}.kv_a_proj_with_mqa")
        both = self.linear(self.norm(latent[:, :LATENT], f"{at}.kv_a_layernorm"), f"{at}.kv_b_proj")
        both = both.view(start + length, HEADS, NOPE + VALUE)
        shared = torch.stack([turned(latent[t, LATENT:], t, self.config.rope) for t in range(start + length)])
        mixed = torch.zeros(length, HEADS, VALUE, dtype=torch.float64)
        for row in range(length):
            here = start + row
            seen = [
                k
                for k in range(start + length)
                if not (rule.is_causal and k > here) and (rule.window is None or abs(here - k) < rule.window)
            ]
            for head in range(HEADS):
                plain, spun = queries[row, head, :NOPE], turned(queries[row, head, NOPE:], here, self.config.rope)
                scores = torch.stack([plain @ both[k, head, :NOPE] + spun @ shared[k] for k in seen])
                mixed[row, head] = (scores * self.scale).softmax(0) @ both[seen, head, NOPE:]
        return self.linear(mixed.flatten(1), f"{at}.o_proj")

    def hidden(self, taps: Tensor, noise_LD: Tensor) -> Tensor:
        if self.config.has_tap_norms:
            taps = torch.stack([self.norm(taps[:, n], f"fc_norm.{n}") for n in range(NUM_TAPS)], dim=1)
        context = self.norm(self.linear(taps.flatten(1), "fc"), "hidden_norm")
        x = noise_LD
        for index, rule in enumerate(self.config.layers):
            at = f"layers.{index}"
            u = self.norm(x, f"{at}.input_layernorm")
            block = self.conv(u, u, 0, f"{at}.attention_conv")
            y = self.attention(block, context, rule, f"{at}.self_attn")
            x = x + self.conv(y, u, 1, f"{at}.attention_conv")
            u = self.norm(x, f"{at}.post_attention_layernorm")
            a = self.conv(u, u, 0, f"{at}.mlp_conv")
            gate = self.linear(a, f"{at}.mlp.gate_proj")
            y = self.linear(gate * gate.sigmoid() * self.linear(a, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
            x = x + self.conv(y, u, 1, f"{at}.mlp_conv")
        return self.norm(x, "norm")
