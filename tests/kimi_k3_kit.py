"""Small Kimi-K3 models, and their forward pass written again from the formulas alone.

The second pass reads tensors by their published names and knows no cache, no chunks, no absorbed matrices and no
batches: loops over tokens, heads, keys and experts.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import TapStream, TargetFacts
from blockdraft.targets.kimi_k3 import KimiK3Config, KimiK3Model, KimiK3Target, published_tensors

VOCAB, WIDTH, LAYERS, BLOCK, MAX_LENGTH = 50, 32, 9, 4, 256
MLA_HEADS, NOPE, SHARED, VALUE, LATENT, Q_LORA = 3, 6, 4, 5, 10, 12
KDA_HEADS, KDA_DIM, KERNEL, LOWER = 3, 8, 4, -5.0
EXPERTS, TOP_K, EXPERT_LATENT, EXPERT_WIDTH = 6, 2, 32, 32
BETA, LINEAR_BETA, EPS, LORA_EPS = 4.0, 25.0, 1e-5, 1e-6
FULL_LAYERS = [4, 8, 9]  # from 1, and the last one too
TINY: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",
    "vision_config": {"patch_size": 14},
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": MLA_HEADS,
        "num_key_value_heads": MLA_HEADS,
        "hidden_act": "situ",
        "activation_situ_beta": BETA,
        "activation_situ_linear_beta": LINEAR_BETA,
        "rms_norm_eps": EPS,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": SHARED,
        "v_head_dim": VALUE,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOP_K,
        "num_shared_experts": 2,
        "moe_intermediate_size": EXPERT_WIDTH,
        "routed_expert_hidden_size": EXPERT_LATENT,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "attn_res_block_size": BLOCK,
        "num_nextn_predict_layers": 0,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in FULL_LAYERS],
            "full_attn_layers": FULL_LAYERS,
            "num_heads": KDA_HEADS,
            "head_dim": KDA_DIM,
            "short_conv_kernel_size": KERNEL,
            "use_full_rank_gate": True,
            "gate_lower_bound": LOWER,
        },
    },
}


def published() -> dict[str, Any]:
    """The published config of the 93 layers."""
    full = [*range(4, 93, 4), 93]
    raw = edited(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=33792,
        num_hidden_layers=93,
        num_attention_heads=96,
        num_key_value_heads=96,
        max_position_embeddings=1048576,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=896,
        num_experts_per_token=16,
        moe_intermediate_size=3072,
        routed_expert_hidden_size=3584,
        attn_res_block_size=12,
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        },
        linear_kda_layers=[layer for layer in range(1, 94) if layer not in full],
        linear_full_attn_layers=full,
        linear_num_heads=96,
        linear_head_dim=128,
    )
    return {**raw, "eos_token_id": 163586, "pad_token_id": 163839}


def edited(**changes: Any) -> dict[str, Any]:
    """A deep copy of the tiny config with other settings of its text part; `linear_x` is x of its linear_attn_config,
    the value `...` removes a key."""
    raw = copy.deepcopy(TINY)
    for key, value in changes.items():
        text = raw["text_config"]
        place = text["linear_attn_config"] if key.startswith("linear_") else text
        name = key.removeprefix("linear_")
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return raw


def tiny_model(*, seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 0.3, **changes: Any) -> KimiK3Model:
    """A random model in which every part matters: norms, biases and scorers too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = KimiK3Model(KimiK3Config.from_dict(edited(**changes))).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.normal_(1.0, 0.2)
                elif name.endswith(("res_proj.weight", "dt_bias")):
                    parameter.normal_(0.0, 0.5)
                elif name.endswith("correction_bias"):
                    parameter.normal_(0.0, 0.1)
                elif not name.endswith("A_log"):
                    parameter.normal_(0.0, scale)
    return model.to(dtype)


def tiny_target(
    taps: tuple[int, ...] = (), *, stream: TapStream = "prefix", seed: int = 0, **changes: Any
) -> KimiK3Target:
    facts = TargetFacts.from_config(edited(**changes))
    return KimiK3Target(tiny_model(seed=seed, **changes), facts, taps, tap_stream=stream)


def tensors_of(model: KimiK3Model) -> dict[str, Tensor]:
    """Published name -> tensor: the stacks of experts taken apart by hand."""
    result: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        before, marker, stack = name.partition(".experts.")
        if marker:
            for expert in range(EXPERTS):
                result[f"language_model.{before}.experts.{expert}.{stack}.weight"] = tensor[expert]
        else:
            result[f"language_model.{name}"] = tensor
    assert set(result) == set(published_tensors(model.config))
    return result


class FromScratch:
    """One model's forward pass from the formulas: `run(ids)` fills `logits`, `prefix` and `mixture` (by layer)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str) -> Tensor:
        return self.tensors[f"language_model.{name}"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.get(f"{name}.weight").T

    def norm(self, x: Tensor, name: str, eps: float = EPS) -> Tensor:
        mean: Tensor = (x * x).mean(-1, keepdim=True)
        return x / (mean + eps).sqrt() * self.get(f"{name}.weight")

    @staticmethod
    def situ(gate: Tensor, up: Tensor) -> Tensor:
        return BETA * (gate / BETA).tanh() * gate.sigmoid() * (LINEAR_BETA * (up / LINEAR_BETA).tanh())

    def mlp(self, x: Tensor, at: str) -> Tensor:
        hidden = self.situ(self.linear(x, f"{at}.gate_proj"), self.linear(x, f"{at}.up_proj"))
        return self.linear(hidden, f"{at}.down_proj")

    def moe(self, x_TD: Tensor, at: str) -> Tensor:
        rows = []
        for x in x_TD:
            scores = (self.get(f"{at}.gate.weight") @ x).sigmoid()
            choice = scores + self.get(f"{at}.gate.e_score_correction_bias")
            chosen = sorted(range(EXPERTS), key=lambda e, c=choice: -float(c[e]))[:TOP_K]
            total = sum(float(scores[e]) for e in chosen)
            latent = self.linear(x, f"{at}.routed_expert_down_proj")
            mixed = torch.zeros(EXPERT_LATENT, dtype=x.dtype)
            for e in chosen:
                hidden = self.situ(
                    self.linear(latent, f"{at}.experts.{e}.w1"), self.linear(latent, f"{at}.experts.{e}.w3")
                )
                mixed = mixed + self.linear(hidden, f"{at}.experts.{e}.w2") * (float(scores[e]) / total)
            routed = self.linear(self.norm(mixed, f"{at}.routed_expert_norm"), f"{at}.routed_expert_up_proj")
            rows.append(routed + self.mlp(x, f"{at}.shared_experts"))
        return torch.stack(rows)

    def kda(self, x_TD: Tensor, at: str) -> Tensor:
        length = x_TD.shape[0]
        signals = {}
        for part in "qkv":
            raw, kernel = self.linear(x_TD, f"{at}.{part}_proj"), self.get(f"{at}.{part}_conv1d.weight")[:, 0]
            out = torch.zeros_like(raw)
            for t in range(length):
                for tap in range(KERNEL):
                    if t - tap >= 0:
                        out[t] += raw[t - tap] * kernel[:, KERNEL - 1 - tap]
            signals[part] = (out * out.sigmoid()).view(length, KDA_HEADS, KDA_DIM)
        rate = self.linear(self.linear(x_TD, f"{at}.f_a_proj"), f"{at}.f_b_proj") + self.get(f"{at}.dt_bias")
        rate = rate.view(length, KDA_HEADS, KDA_DIM)
        beta = self.linear(x_TD, f"{at}.b_proj").sigmoid()
        gate = self.linear(x_TD, f"{at}.g_proj").sigmoid().view(length, KDA_HEADS, KDA_DIM)
        mixed = torch.zeros(length, KDA_HEADS, KDA_DIM, dtype=x_TD.dtype)
        for head in range(KDA_HEADS):
            state = torch.zeros(KDA_DIM, KDA_DIM, dtype=x_TD.dtype)
            for t in range(length):
                q, k, v = (signals[part][t, head] for part in "qkv")
                q, k = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(KDA_DIM), k / math.sqrt(float(k @ k) + 1e-6)
                decay = (LOWER * (self.get(f"{at}.A_log")[head].exp() * rate[t, head]).sigmoid()).exp()
                state = decay[:, None] * state
                state = state + torch.outer(k, float(beta[t, head]) * (v - k @ state))
                mixed[t, head] = q @ state
        return self.linear((self.norm(mixed, f"{at}.o_norm") * gate).flatten(1), f"{at}.o_proj")

    def mla(self, x_TD: Tensor, at: str) -> Tensor:
        length = x_TD.shape[0]
        low = self.norm(self.linear(x_TD, f"{at}.q_a_proj"), f"{at}.q_a_layernorm", LORA_EPS)
        queries = self.linear(low, f"{at}.q_b_proj").view(length, MLA_HEADS, NOPE + SHARED)
        both = self.linear(x_TD, f"{at}.kv_a_proj_with_mqa")
        latent = self.norm(both[:, :LATENT], f"{at}.kv_a_layernorm", LORA_EPS)
        expanded = self.linear(latent, f"{at}.kv_b_proj").view(length, MLA_HEADS, NOPE + VALUE)
        gathered = torch.zeros(length, MLA_HEADS, VALUE, dtype=x_TD.dtype)
        for head in range(MLA_HEADS):
            for t in range(length):
                keys = torch.cat((expanded[: t + 1, head, :NOPE], both[: t + 1, LATENT:]), dim=1)
                weights = (keys @ queries[t, head] / math.sqrt(NOPE + SHARED)).softmax(0)
                gathered[t, head] = weights @ expanded[: t + 1, head, NOPE:]
        return self.linear(gathered.flatten(1) * self.linear(x_TD, f"{at}.g_proj").sigmoid(), f"{at}.o_proj")

    def mix(self, values: list[Tensor], at: str) -> Tensor:
        proj = self.get(f"{at}_proj.weight")[0]
        scores = torch.stack([self.norm(value, f"{at}_norm") @ proj for value in values]).softmax(0)
        return sum((score[:, None] * value for score, value in zip(scores, values, strict=True)), torch.zeros(()))

    def run(self, ids: Tensor) -> FromScratch:
        total = self.get("model.embed_tokens.weight")[ids]
        done: list[Tensor] = []
        self.prefix: dict[int, Tensor] = {}
        self.mixture: dict[int, Tensor] = {}
        for layer in range(LAYERS):
            at = f"model.layers.{layer}"
            seen = self.mix([*done, total], f"{at}.self_attention_res") if done else total
            self.mixture[layer - 1] = seen
            attend = self.mla if layer + 1 in FULL_LAYERS else self.kda
            out = attend(self.norm(seen, f"{at}.input_layernorm"), f"{at}.self_attn")
            if layer % BLOCK == 0:
                done, total = [*done, total], out
            else:
                total = total + out
            u = self.norm(self.mix([*done, total], f"{at}.mlp_res"), f"{at}.post_attention_layernorm")
            total = total + (self.mlp(u, f"{at}.mlp") if layer == 0 else self.moe(u, f"{at}.block_sparse_moe"))
            self.prefix[layer] = total
        last = self.mixture[LAYERS - 1] = self.mix([*done, total], "model.output_attn_res")
        self.logits = self.linear(self.norm(last, "model.norm"), "lm_head")
        return self
