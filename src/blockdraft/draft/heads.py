"""From hidden rows and target logits to proposals: the plain head (DFlash) and the candidate selector
(DFlash 2). DSpark's heads are in ``markov``, DSpine's in ``injection``.

Owns candidate lists, the walk over them and the law q they were drawn from. Whatever q is, the accepting
side stays exact as long as q is the law that was really sampled, so q is never adjusted afterwards. Knows
config only: not requests, not what becomes of a proposal.

Letters: G = L - 1 proposals, L block length, V vocabulary, M candidates, P predecessors, R codebook rank, D
draft width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockdraft.config import SelectorConfig

__all__ = ["CandidateLists", "CandidateSelector", "FullLaw", "Proposal", "Table", "top_candidates", "uniform", "walk"]

_CHUNK = 64


@dataclass(frozen=True, slots=True)
class CandidateLists:
    """A q that is zero outside M ids per position: ``ids_GM`` distinct in each row, ``probs_GM`` float32."""

    ids_GM: Tensor
    probs_GM: Tensor


@dataclass(frozen=True, slots=True)
class FullLaw:
    """A q over the whole vocabulary: ``probs_GV``, each row given the proposals before it."""

    probs_GV: Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """``ids_G`` and the law each was drawn from given the ones before it; None = it had to be that id
    (one-hot).
    """

    ids_G: Tensor
    q: CandidateLists | FullLaw | None

    def first(self, count: int) -> Proposal:
        """The first ``count`` of them with their laws."""
        q = self.q
        if isinstance(q, CandidateLists):
            q = CandidateLists(q.ids_GM[:count], q.probs_GM[:count])
        elif q is not None:
            q = FullLaw(q.probs_GV[:count])
        return Proposal(ids_G=self.ids_G[:count], q=q)


class Table(nn.Module):
    """A matrix of one row per token under the name ``weight``: an embedding or a head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class CandidateSelector(nn.Module):
    """Scores of neighbouring tokens: how well a candidate follows its predecessor, weighted by the hidden
    row.
    """

    def __init__(self, width: int, vocab_size: int, selector: SelectorConfig) -> None:
        super().__init__()
        self.top_k = selector.top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, selector.rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, selector.rank))
        self.hidden_projection = nn.Linear(width, selector.rank, bias=False)

    def edges(self, hidden_GD: Tensor, predecessor_ids_GP: Tensor, candidate_ids_GM: Tensor) -> Tensor:
        """edge_GPM, float32 at least: what each predecessor adds to each candidate's logit; any leading
        axes.
        """
        weight_GR = self.hidden_projection(hidden_GD)
        left_GPR = self.predecessor_codebook[predecessor_ids_GP] * weight_GR.unsqueeze(-2)
        right_GMR = self.successor_codebook[candidate_ids_GM]
        if left_GPR.dtype in (torch.bfloat16, torch.float16):
            left_GPR, right_GMR = left_GPR.float(), right_GMR.float()
        edge_GPM: Tensor = left_GPR @ right_GMR.transpose(-1, -2)
        return edge_GPM


def top_candidates(logits_GV: Tensor, count: int, exclude_ids: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """(values_GM, ids_GM), M <= count: the largest logits, falling, equal ones by rising id, none excluded.

    Order and choice are fixed by the numbers alone, on every device, also where equal logits meet at the
    last place (in bfloat16 they often do). NaN is never chosen; in a
    large vocabulary it hides the chunk of ids it stands in, which costs acceptance only.
    """
    vocab_size = logits_GV.shape[-1]
    barred = sorted({int(token) for token in exclude_ids if 0 <= int(token) < vocab_size})
    wanted = min(count + len(barred), vocab_size)
    values, ids = _largest(logits_GV, wanted)
    order = values.argsort(dim=-1, descending=True, stable=True)
    values, ids = values.gather(-1, order), ids.gather(-1, order)
    if barred:
        is_barred = torch.isin(ids, torch.tensor(barred, device=ids.device)).to(torch.uint8)
        order = is_barred.argsort(dim=-1, stable=True)[:, : min(count, vocab_size - len(barred))]
        values, ids = values.gather(-1, order), ids.gather(-1, order)
    return values, ids


def _largest(logits_GV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and their ids, in rising order of id.

    A large vocabulary is read once, as the maximum of every chunk. The winners lie in the first ``count``
    chunks by (maximum, id): every larger logit fills one of them, and equal logits are taken by rising id.
    """
    num_chunks = logits_GV.shape[-1] // _CHUNK
    if num_chunks < 4 * count:
        values_GV = _without_nan(logits_GV)
        ids = _places_of_largest(values_GV, count)
        return values_GV.gather(-1, ids), ids
    chunks = torch.unflatten(logits_GV[:, : num_chunks * _CHUNK], -1, (num_chunks, _CHUNK))
    best = _places_of_largest(_without_nan(chunks.amax(dim=-1)), count)
    kept = chunks.gather(1, best[:, :, None].expand(-1, -1, _CHUNK)).flatten(1)
    values = _without_nan(torch.cat((kept, logits_GV[:, num_chunks * _CHUNK :]), dim=1))
    places = _places_of_largest(values, count)
    num_kept = count * _CHUNK
    chunk = best.gather(1, (places // _CHUNK).clamp_max(count - 1))
    in_rest = places - num_kept + num_chunks * _CHUNK
    return values.gather(-1, places), torch.where(places < num_kept, chunk * _CHUNK + places % _CHUNK, in_rest)


def _without_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _places_of_largest(x_GN: Tensor, count: int) -> Tensor:
    """Where the ``count`` largest of each row stand, in rising order; of equal ones the first."""
    last = x_GN.topk(count, dim=-1).values[:, -1:]
    above, equal = x_GN > last, x_GN == last
    room = count - above.sum(dim=-1, keepdim=True)
    is_kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    return is_kept.nonzero()[:, 1].view(-1, count)


def uniform(count: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """``count`` numbers of [0, 1): all that a block's draws need, whatever becomes of the block."""
    source = "cpu" if generator is None else generator.device
    return torch.rand(count, dtype=torch.float64, generator=generator, device=source).to(device)


def walk(
    scores_KPM: Tensor,
    counts: Sequence[int],
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator | None],
) -> tuple[Tensor, Tensor | None]:
    """(path_K, q_KM): one candidate index per position of blocks that stand one after another, and the law along it.

    ``scores_KPM[k, p, m]`` scores candidate m of a position after candidate p of the position before; the first
    position of each block (of ``counts`` positions) has the anchor as its only predecessor, in every column.
    Temperature 0 takes the first best candidate at each position; above it, each is drawn from
    softmax(score / temperature) by inverting its distribution function. Without such a block there is no q_KM.
    """
    next_KP = scores_KPM.argmax(dim=-1)
    drawn = [block for block, temperature in enumerate(temperatures) if temperature != 0.0]
    probs_KPM = None
    if drawn:
        probs_KPM, drawn_KP = _draws(scores_KPM, counts, temperatures, generators)
        is_drawn = torch.tensor([t != 0.0 for t, n in zip(temperatures, counts, strict=True) for _ in range(n)])
        next_KP = torch.where(is_drawn.to(next_KP.device)[:, None], drawn_KP, next_KP)
    steps: list[list[int]] = next_KP.tolist()  # the one wait for the device
    path, before, at = [], [], 0
    for count in counts:
        index = 0
        for step in steps[at : at + count]:
            before.append(index)
            index = step[index]
            path.append(index)
        at += count
    path_K = torch.tensor(path, device=next_KP.device)
    if probs_KPM is None:
        return path_K, None
    return path_K, probs_KPM[torch.arange(len(path)), before]


def _draws(
    scores_KPM: Tensor,
    counts: Sequence[int],
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator | None],
) -> tuple[Tensor, Tensor]:
    """(probs_KPM, next_KP): a candidate drawn after every predecessor; what stands at greedy blocks means nothing."""
    device = scores_KPM.device
    every = zip(counts, temperatures, generators, strict=True)
    zeros_K = torch.zeros(len(scores_KPM), dtype=torch.float64, device=device)
    numbers = [uniform(n, g, device) if t != 0.0 else zeros_K[:n] for n, t, g in every]
    scale = [t or 1.0 for t, n in zip(temperatures, counts, strict=True) for _ in range(n)]
    scaled_KPM = scores_KPM.float() / torch.tensor(scale, dtype=torch.float32, device=device)[:, None, None]
    probs_KPM = scaled_KPM.nan_to_num(nan=torch.finfo(torch.float32).min).softmax(dim=-1)
    below_KPM = probs_KPM.double().cumsum(dim=-1)
    aim_KP1 = torch.cat(numbers)[:, None, None] * below_KPM[:, :, -1:]
    next_KP = (below_KPM <= aim_KP1).sum(dim=-1).clamp_max(scores_KPM.shape[-1] - 1)
    return probs_KPM, next_KP
