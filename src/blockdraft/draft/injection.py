"""Adjacent injection (DSpine): after every layer each row of a block takes a message from the row before it.

Owns the readouts, gates and writes, and the second scoring of candidates: the last layer's message is made again from
the token that was really proposed before, and the row's candidates are scored anew. The anchor's row is never written
to; what it tells its successor is a fixed code of its token. Knows config only.

Letters: B rows, L block length, G proposals, D draft width, R transfer rank, M candidates, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockdraft.config import InjectionConfig
from blockdraft.draft.heads import uniform
from blockdraft.draft.markov import at_temperature, draw
from blockdraft.draft.norm import wide_dtype

__all__ = ["AdjacentInjection", "Rescore", "rescored_walk"]

Rescore = Callable[[int, Tensor], Tensor]
"""(row g, id before it) -> score_M of that row's candidates."""


class AdjacentInjection(nn.Module):
    """The messages of all layers; readouts and writes are a layer's own, message and gates are shared."""

    def __init__(self, width: int, num_layers: int, injection: InjectionConfig) -> None:
        super().__init__()
        rank, size = injection.transfer_rank, injection.message_size
        self.rank = rank
        self.readouts = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.writes = nn.ModuleList(nn.Linear(size, width, bias=False) for _ in range(num_layers))
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def readout(self, x_D: Tensor, layer: int) -> Tensor:
        """What a row tells its successor, and asks its predecessor with, [..., R]: of length sqrt(R)."""
        x_R = self.readouts[layer](x_D)
        unit_R = F.normalize(x_R.to(wide_dtype(x_R.dtype)), dim=-1)
        return (math.sqrt(self.rank) * unit_R).to(x_D.dtype)

    def write(self, x_D: Tensor, own_R: Tensor, before_R: Tensor, layer: int) -> Tensor:
        """``x_D`` with the gated message of the row before, in proportion to its own root mean square."""
        gate = torch.sigmoid(self.receiver_gate(own_R) + self.predecessor_gate(before_R) + self.bias)
        delta_D = self.writes[layer](gate * self.message(before_R))
        wide_D = x_D.to(wide_dtype(x_D.dtype))
        scale_1 = wide_D.pow(2).mean(dim=-1, keepdim=True).sqrt().to(x_D.dtype)
        return x_D + scale_1 * delta_D

    def forward(self, x_BLD: Tensor, anchor_BR: Tensor, layer: int) -> Tensor:
        """Rows 1 and up with their message; ``anchor_BR`` is the code of each anchor's token."""
        own_BLR = self.readout(x_BLD, layer)
        before_BGR = torch.cat((anchor_BR[:, None], own_BLR[:, 1:-1]), dim=1)
        written = self.write(x_BLD[:, 1:], own_BLR[:, 1:], before_BGR[:, : x_BLD.shape[1] - 1], layer)
        return torch.cat((x_BLD[:, :1], written), dim=1)


def rescored_walk(
    rescore: Rescore, ids_GM: Tensor, anchor_id: int, temperature: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """(ids_G, q_GM): each row's candidates scored after the token really proposed before, None: greedy, fixed."""
    count = ids_GM.shape[0]
    numbers_G = None if temperature == 0.0 else uniform(count, generator, ids_GM.device)
    previous = torch.tensor(anchor_id, device=ids_GM.device)
    ids, laws = [], []
    for row in range(count):
        scores_M = at_temperature(rescore(row, previous), temperature)
        if numbers_G is None:
            place = scores_M.argmax()
        else:
            laws.append(scores_M.softmax(dim=-1))
            place = draw(laws[-1], numbers_G[row])
        previous = ids_GM[row][place]
        ids.append(previous)
    return torch.stack(ids), torch.stack(laws) if laws else None
