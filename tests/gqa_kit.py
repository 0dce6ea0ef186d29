"""A draft on grouped-query attention written again from the formulas alone: no cache, no table of positions.

A loop over rows, heads and keys in float64; the parts that latent attention shares come from `mla_kit`. Also the walk
of the candidate selector, one row after the other.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import mla_kit
from blockdraft.config import LayerConfig, RopeConfig
from blockdraft.draft import DraftModel


def angle_of(rope: RopeConfig, pair: int, width: int) -> float:
    """What a pair of dimensions turns by per position."""
    base = rope.theta ** (-2 * pair / width)
    numbers = rope.numbers
    if rope.kind == "default":
        return base
    factor, start = numbers["factor"], numbers["original_max_position_embeddings"]
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / base
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        smooth = min(max((start / wavelength - low) / (high - low), 0.0), 1.0)
        return (1 - smooth) * base / factor + smooth * base
    assert rope.kind == "yarn"

    def at(turns: float) -> float:
        return width * math.log(start / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    first = max(math.floor(at(numbers["beta_fast"])), 0)
    last = min(math.ceil(at(numbers["beta_slow"])), width - 1)
    share = min(max((pair - first) / (last - first), 0.0), 1.0)
    return base * (1 - share) + base / factor * share


def magnitude_of(rope: RopeConfig) -> float:
    """What YaRN multiplies cosine and sine by."""
    if rope.kind != "yarn" or rope.numbers["factor"] <= 1.0:
        return 1.0
    both = [
        0.1 * rope.numbers.get(name, 0.0) * math.log(rope.numbers["factor"]) + 1
        for name in ("mscale", "mscale_all_dim")
    ]
    given = rope.numbers.get("mscale") and rope.numbers.get("mscale_all_dim")
    return both[0] / both[1] if given else 0.1 * math.log(rope.numbers["factor"]) + 1


def turned(x: Tensor, position: int, rope: RopeConfig) -> Tensor:
    """Dimensions (j, j + half) turned by the position."""
    width, out = len(x), x.clone()
    scale = magnitude_of(rope)
    for pair in range(width // 2):
        angle = position * angle_of(rope, pair, width)
        a, b = x[pair], x[pair + width // 2]
        out[pair] = scale * (a * math.cos(angle) - b * math.sin(angle))
        out[pair + width // 2] = scale * (b * math.cos(angle) + a * math.sin(angle))
    return out


class FromScratch(mla_kit.FromScratch):
    """`hidden(taps, noise)` of one block over its whole context."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model)
        self.heads = model.config.attention
        self.scale = self.heads.head_dim**-0.5

    def rows(self, x: Tensor, name: str, norm: str | None, first: int) -> Tensor:
        """Heads of a projection at the positions from `first` on, [rows, heads, width]."""
        out = self.linear(x, name).view(x.shape[0], -1, self.heads.head_dim)
        if norm is None:
            return out
        out = self.norm(out, norm)
        spun = [torch.stack([turned(head, first + t, self.config.rope) for head in row]) for t, row in enumerate(out)]
        return torch.stack(spun)

    def attention(self, block: Tensor, context: Tensor, rule: LayerConfig, at: str) -> Tensor:
        start, length = context.shape[0], block.shape[0]
        both = torch.cat((context, block))
        queries = self.rows(block, f"{at}.q_proj", f"{at}.q_norm", start)
        keys = self.rows(both, f"{at}.k_proj", f"{at}.k_norm", 0)
        values = self.rows(both, f"{at}.v_proj", None, 0)
        shared = self.heads.num_heads // self.heads.num_kv_heads
        mixed = torch.zeros_like(queries)
        for row in range(length):
            here = start + row
            seen = [
                k
                for k in range(start + length)
                if not (rule.is_causal and k > here) and (rule.window is None or abs(here - k) < rule.window)
            ]
            for head in range(self.heads.num_heads):
                scores = torch.stack([queries[row, head] @ keys[k, head // shared] for k in seen]) * self.scale
                mixed[row, head] = scores.softmax(0) @ values[seen, head // shared]
        return self.linear(mixed.flatten(1), f"{at}.o_proj")

    def proposals(self, hidden_LD: Tensor, anchor_id: int, head_VD: Tensor) -> list[int]:
        """The greedy walk: of every row the candidate with the largest logit plus edge from the token before."""
        selector, previous, found = self.config.selector, anchor_id, []
        for row in hidden_LD[1:]:
            logits = row @ head_VD.T * self.config.output_multiplier
            cap = self.config.final_logit_softcapping
            logits = cap * torch.tanh(logits / cap) if cap else logits
            candidates = logits.topk(1 if selector is None else selector.top_k).indices.tolist()
            scores = {}
            for candidate in candidates:
                scores[candidate] = float(logits[candidate])
                if selector is not None:
                    before = self.state["candidate_selector.predecessor_codebook"][previous]
                    after = self.state["candidate_selector.successor_codebook"][candidate]
                    edge = self.linear(row, "candidate_selector.hidden_projection")
                    scores[candidate] += float((before * edge * after).sum())
            previous = max(scores, key=lambda candidate: scores[candidate])
            found.append(previous)
        return found
