"""The heads of DSpark: what the token before adds to a row's logits, and how likely a proposal is to stand.

Owns the Markov head in its three kinds, the walk along a block with the law of every draw, and the confidence head.
A row's confidence depends on the row and on the tokens before its own, never on the token it proposes: so to end the
proposals before the first row of low confidence is a stopping rule, which leaves the law of those that remain as it
was. Knows config only.

Letters: G proposals, D draft width, V vocabulary, R Markov rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import ConfidenceConfig, MarkovConfig
from blockdraft.draft.heads import Table, uniform

__all__ = ["ConfidenceHead", "MarkovHead", "at_temperature", "chain", "draw", "each_alone"]


class MarkovHead(nn.Module):
    """A bias over the vocabulary from the token before: vanilla, gated by the row, or with a running state."""

    def __init__(self, width: int, vocab_size: int, markov: MarkovConfig) -> None:
        super().__init__()
        rank = markov.rank
        self.markov_w1 = Table(vocab_size, rank)
        self.markov_w2 = Table(vocab_size, rank)
        self.gate_proj = nn.Linear(width + rank, rank) if markov.kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if markov.kind == "rnn" else None

    def start(self) -> Tensor:
        """state_1R before the first row of a block."""
        weight = self.markov_w1.weight
        return torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def step(self, state_1R: Tensor, previous_id: Tensor, hidden_D: Tensor) -> tuple[Tensor, Tensor]:
        """(state_1R, bias_V) of the next row, given the token before it."""
        token_1R, hidden_1D = self.markov_w1.weight[previous_id][None], hidden_D[None]
        if self.gate_proj is not None:
            token_1R = torch.sigmoid(self.gate_proj(torch.cat((hidden_1D, token_1R), dim=-1))) * token_1R
        elif self.joint_proj is not None:
            joint = self.joint_proj(torch.cat((state_1R, token_1R, hidden_1D), dim=-1))
            keep_1R, fresh_1R, out_1R = joint.chunk(3, dim=-1)
            keep_1R = torch.sigmoid(keep_1R)
            state_1R = keep_1R * state_1R + (1.0 - keep_1R) * torch.tanh(fresh_1R)
            token_1R = torch.tanh(out_1R)
        return state_1R, F.linear(token_1R, self.markov_w2.weight)[0]


class ConfidenceHead(nn.Module):
    """Predicted probability, per row, that its proposal stands."""

    def __init__(self, width: int, confidence: ConfidenceConfig, markov: MarkovConfig | None) -> None:
        super().__init__()
        rank = markov.rank if markov is not None and confidence.reads_token else 0
        self.proj = nn.Linear(width + rank, 1)

    def forward(self, hidden_GD: Tensor, token_GR: Tensor | None) -> Tensor:
        """confidence_G; ``token_GR`` is the Markov embedding of the token before each row, where it is read."""
        rows = hidden_GD if token_GR is None else torch.cat((hidden_GD, token_GR.to(hidden_GD.dtype)), dim=-1)
        logits_G: Tensor = self.proj(rows)[..., 0]
        return torch.sigmoid(logits_G if logits_G.dtype == torch.float64 else logits_G.float())


def at_temperature(scores_N: Tensor, temperature: float) -> Tensor:
    """``scores_N / temperature``, 0 leaves them; finite whatever came in, so that a softmax of them is a law."""
    if temperature != 0.0:
        scores_N = scores_N / temperature
    return scores_N.nan_to_num(nan=torch.finfo(scores_N.dtype).min)


def draw(probs_N: Tensor, number: Tensor) -> Tensor:
    """The index that ``number`` of [0, 1) falls on when ``probs_N`` stand end to end; never one of weight 0."""
    ends_N = probs_N.double().cumsum(dim=-1)
    index = (ends_N <= number * ends_N[-1]).sum()
    last = (torch.arange(len(probs_N), device=probs_N.device) * (probs_N > 0)).amax()
    return torch.minimum(index, last)


def chain(
    head: MarkovHead,
    logits_GV: Tensor,
    hidden_GD: Tensor,
    anchor_id: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor | None]:
    """(ids_G, q_GV): each token given the one before it, and the law each was drawn from (None: greedy, fixed).

    Greedy takes the largest logit, of equal ones the lowest id; otherwise a token is drawn from
    softmax(logits / temperature), the head's bias included.
    """
    count = logits_GV.shape[0]
    numbers_G = None if temperature == 0.0 else uniform(count, generator, logits_GV.device)
    state_1R, previous = head.start(), torch.tensor(anchor_id, device=logits_GV.device)
    ids, laws = [], []
    for row in range(count):
        state_1R, bias_V = head.step(state_1R, previous, hidden_GD[row])
        scores_V = at_temperature(logits_GV[row] + bias_V, temperature)
        if numbers_G is None:
            previous = scores_V.argmax()
        else:
            laws.append(scores_V.softmax(dim=-1))
            previous = draw(laws[-1], numbers_G[row])
        ids.append(previous)
    return torch.stack(ids), torch.stack(laws) if laws else None


def each_alone(logits_GV: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(ids_G, q_GV) of DSpark without a Markov head: each row drawn from softmax(logits / temperature) of its own."""
    q_GV = at_temperature(logits_GV, temperature).softmax(dim=-1)
    numbers_G = uniform(len(q_GV), generator, logits_GV.device)
    return torch.stack([draw(q_V, number) for q_V, number in zip(q_GV, numbers_G, strict=True)]), q_GV
