"""Small DSpark and DSpine drafts, and what they compute written again from the formulas alone.

The second pass is loops over rows, heads and keys: no cache, no batch, no code of the package.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import (
    ConfidenceConfig,
    DraftConfig,
    GqaConfig,
    InjectionConfig,
    LayerConfig,
    MarkovConfig,
    RopeConfig,
)
from blockdraft.draft import DraftModel
from mla_kit import FromScratch as FromScratchLatent

WIDTH, TAP_WIDTH, VOCAB = 24, 32, 32
FULL, CAUSAL, SLIDING = (
    LayerConfig(is_causal=False, window=None),
    LayerConfig(is_causal=True, window=None),
    LayerConfig(is_causal=True, window=5),
)
KINDS = ("vanilla", "gated", "rnn")


def spark_config(kind: str | None = "vanilla", **changes: Any) -> DraftConfig:
    """A draft of two layers whose every row predicts; `kind` None: without a Markov head."""
    return replace(
        DraftConfig(
            hidden_size=WIDTH,
            intermediate_size=20,
            vocab_size=VOCAB,
            rms_norm_eps=1e-6,
            max_position_embeddings=256,
            attention=GqaConfig(num_heads=4, num_kv_heads=2, head_dim=6, has_bias=False),
            layers=(FULL, FULL),
            rope=RopeConfig(theta=1e4),
            block_size=4,
            mask_token_id=3,
            target_layer_ids=(0, 2),
            num_target_layers=3,
            target_hidden_size=TAP_WIDTH,
            predicts_from_anchor=True,
            markov=None if kind is None else MarkovConfig(rank=5, kind=kind),  # type: ignore[arg-type]
            confidence=ConfidenceConfig(reads_token=kind is not None),
        ),
        **changes,
    )


def spine_config(**changes: Any) -> DraftConfig:
    spine = {
        "predicts_from_anchor": False,
        "markov": None,
        "confidence": None,
        "layers": (CAUSAL, CAUSAL),
        "injection": InjectionConfig(transfer_rank=7, message_size=5, top_k=4),
    }
    return spark_config(**{**spine, **changes})


def random_model(config: DraftConfig, *, seed: int = 0, own: bool = True) -> DraftModel:
    """Random weights in float64, large enough that nothing in it is without effect."""
    torch.manual_seed(seed)
    model = DraftModel(config, has_embedding=own, has_head=own).double().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name and parameter.dim() == 1 else 0.0, 0.5)
        if name == "confidence_head.proj.weight":
            parameter.mul_(0.2)  # confidences between 0 and 1, not at the ends
    return model


class FromScratch(FromScratchLatent):
    """The forward pass of one block on grouped queries, its heads, and the law of its proposals."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model)
        self.scale = self.config.attention.head_dim**-0.5

    def turned(self, x: Tensor, position: int) -> Tensor:
        """Dimensions (j, j + A/2) turned by the position."""
        half, out = len(x) // 2, x.clone()
        for pair in range(half):
            angle = position * self.config.rope.theta ** (-2 * pair / len(x))
            a, b = x[pair], x[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def attention(self, block: Tensor, context: Tensor, rule: LayerConfig, at: str) -> Tensor:
        shape = self.config.attention
        start, length = context.shape[0], block.shape[0]
        both = torch.cat((context, block))
        queries = self.norm(self.linear(block, f"{at}.q_proj").view(length, shape.num_heads, -1), f"{at}.q_norm")
        keys = self.norm(self.linear(both, f"{at}.k_proj").view(len(both), shape.num_kv_heads, -1), f"{at}.k_norm")
        values = self.linear(both, f"{at}.v_proj").view(len(both), shape.num_kv_heads, -1)
        mixed = torch.zeros_like(queries)
        for row in range(length):
            here = start + row
            seen = [
                k
                for k in range(len(both))
                if not (rule.is_causal and k > here) and (rule.window is None or abs(here - k) < rule.window)
            ]
            for head in range(shape.num_heads):
                pair = head // (shape.num_heads // shape.num_kv_heads)
                query = self.turned(queries[row, head], here)
                scores = torch.stack([query @ self.turned(keys[k, pair], k) for k in seen])
                mixed[row, head] = (scores * self.scale).softmax(0) @ values[seen, pair]
        return self.linear(mixed.flatten(1), f"{at}.o_proj")

    def layer(self, x: Tensor, context: Tensor, index: int) -> Tensor:
        at = f"layers.{index}"
        u = self.norm(x, f"{at}.input_layernorm")
        x = x + self.attention(u, context, self.config.layers[index], f"{at}.self_attn")
        u = self.norm(x, f"{at}.post_attention_layernorm")
        gate = self.linear(u, f"{at}.mlp.gate_proj")
        return x + self.linear(gate * gate.sigmoid() * self.linear(u, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")

    # ---- adjacent injection ----
    def told(self, row: Tensor, index: int) -> Tensor:
        rank = self.config.injection.transfer_rank
        out = self.linear(row, f"injection.readouts.{index}")
        return out * math.sqrt(rank) / out.pow(2).sum().sqrt()

    def code(self, token: int) -> Tensor:
        return math.sqrt(self.config.injection.transfer_rank) * self.state["transfer_codes"][token]

    def written(self, row: Tensor, before: Tensor, index: int) -> Tensor:
        gate = self.linear(self.told(row, index), "injection.receiver_gate")
        gate = torch.sigmoid(gate + self.linear(before, "injection.predecessor_gate") + self.state["injection.bias"])
        message = self.linear(gate * self.linear(before, "injection.message"), f"injection.writes.{index}")
        return row + row.norm() / math.sqrt(len(row)) * message

    def spine_rows(self, taps: Tensor, noise: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """(rows before the last message, rows that the head reads)."""
        context = self.norm(self.linear(taps.flatten(1), "fc"), "hidden_norm")
        x = noise
        for index in range(self.config.num_layers):
            x = before = self.layer(x, context, index)
            rows = [x[0]]
            for j in range(1, len(x)):
                told = self.code(anchor) if j == 1 else self.told(x[j - 1], index)
                rows.append(self.written(x[j], told, index))
            x = torch.stack(rows)
        return before, self.norm(x, "norm")

    # ---- what is proposed ----
    def head(self, rows: Tensor) -> Tensor:
        out = rows @ self.state["lm_head.weight"].T * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return out if cap is None else cap * torch.tanh(out / cap)

    def biases(self, rows: Tensor, before: list[int]) -> list[Tensor]:
        """The Markov head's addition to each row, given the token before it."""
        w1, w2 = self.state["markov_head.markov_w1.weight"], self.state["markov_head.markov_w2.weight"]
        kind, rank = self.config.markov.kind, self.config.markov.rank
        memory, out = torch.zeros(rank, dtype=torch.float64), []
        for row, token in zip(rows, before, strict=False):
            known = w1[token]
            if kind == "gated":
                known = torch.sigmoid(self.linear(torch.cat((row, known)), "markov_head.gate_proj")) * known
            if kind == "rnn":
                both = self.linear(torch.cat((memory, known, row)), "markov_head.joint_proj")
                keep, fresh, known = both[:rank].sigmoid(), both[rank : 2 * rank].tanh(), both[2 * rank :].tanh()
                memory = keep * memory + (1 - keep) * fresh
            out.append(w2 @ known)
        return out

    def spark_law(self, rows: Tensor, before: list[int], temperature: float) -> Tensor:
        """Law of the row after the tokens `before` (anchor first), the mask never proposed."""
        index = len(before) - 1
        scores = self.head(rows)[index]
        if self.config.markov is not None:
            scores = scores + self.biases(rows[: index + 1], before)[index]
        scores[self.config.mask_token_id] = -math.inf
        return (scores / temperature).softmax(0)

    def spine_law(self, before_rows: Tensor, rows: Tensor, before: list[int], temperature: float) -> Tensor:
        """The same for the row's candidates; `rows` and `before_rows` without the anchor's."""
        index = len(before) - 1
        plain = self.head(rows)[index]
        plain[self.config.mask_token_id] = -math.inf
        candidates = plain.topk(self.config.injection.top_k).indices
        again = self.written(before_rows[index], self.code(before[-1]), self.config.num_layers - 1)
        scores = torch.full_like(plain, -math.inf)
        scores[candidates] = self.head(self.norm(again, "norm"))[candidates]
        return (scores / temperature).softmax(0)

    def confidence(self, row: Tensor, token: int) -> float:
        if self.config.confidence.reads_token:
            row = torch.cat((row, self.state["markov_head.markov_w1.weight"][token]))
        return float(torch.sigmoid(self.linear(row, "confidence_head.proj"))[0])
