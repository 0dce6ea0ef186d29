"""Text that a target writes for training, many rows at a time, with the outputs of the tapped layers.

Owns plain decoding of a batch that is always full: a row that ends makes room for the next prompt, whose ids go through
the target in the same pass as the others' next tokens. It is for making corpora; serving goes through the engine.

Letters: S positions of a row, N taps, E target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.errors import RequestError

from .contract import Row, Target

__all__ = ["Written", "write"]

_LIKELY = 256

GeneratorOf = Callable[[int], torch.Generator]


@dataclass(frozen=True, slots=True)
class Written:
    """One sequence: `ids` are prompt and answer; row t of `taps_SNE` was read at position t (the last one is zeros)."""

    ids: list[int]
    num_prompt: int
    taps_SNE: Tensor


@dataclass(slots=True, eq=False)
class _Writing:
    """A row under way; `num_fed` of its ids have been through the target."""

    index: int
    ids: list[int]
    num_prompt: int
    row: Row
    generator: torch.Generator | None
    num_fed: int = 0
    taps: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def _pass(target: Target, rows: list[_Writing], temperature: float, top_p: float, taps_dtype: torch.dtype) -> None:
    """One forward of all rows, and each row's next token."""
    fed = [torch.tensor(one.ids[one.num_fed :], dtype=torch.long) for one in rows]
    scored = target.forward(fed, [one.row for one in rows], num_logits=1)
    # A row's pieces are copies: views would keep the whole pass alive.
    taps = [result.taps_TNE.to(taps_dtype, copy=True).cpu() for result in scored]
    if temperature == 0:
        chosen = torch.cat([result.logits_TV for result in scored]).argmax(-1).tolist()
    else:
        chosen = [
            _sampled(r.logits_TV[0], temperature, top_p, one.generator) for r, one in zip(scored, rows, strict=True)
        ]
    for one, piece, token in zip(rows, taps, chosen, strict=True):
        one.taps.append(piece)
        one.num_fed = len(one.ids)
        one.ids.append(token)


def write(
    target: Target,
    prompts: Iterable[tuple[int, list[int]]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    temperature: float,
    top_p: float,
    generator_of: GeneratorOf | None,
    max_rows: int,
    taps_dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[int, Written]]:
    """(index, continuation) of every (index, prompt), in order of completion.

    A continuation ends with a stop id (kept) or at `max_new_tokens`. Temperature 0 is greedy; otherwise each row draws
    from the generator that `generator_of` gives for its index, so its text does not depend on the rows beside it.
    Prompts are taken one by one as rows become free, at most `max_rows` at once.
    """
    if max_rows < 1 or max_new_tokens < 1:
        raise RequestError(f"max_rows {max_rows}, max_new_tokens {max_new_tokens}: both must be at least 1")
    if temperature > 0 and generator_of is None:
        raise RequestError(f"temperature is {temperature:g}: sampling needs a generator for every prompt")
    source = iter(prompts)
    running: list[_Writing] = []
    is_open = True
    try:
        while True:
            while is_open and len(running) < max_rows:
                entry = next(source, None)
                if entry is None:
                    is_open = False
                else:
                    running.append(_begin(target, *entry, max_new_tokens, generator_of))
            if not running:
                return
            _pass(target, running, temperature, top_p, taps_dtype)
            ended = [o for o in running if o.ids[-1] in stop_ids or len(o.ids) - o.num_prompt == max_new_tokens]
            running = [one for one in running if one not in ended]
            for one in ended:
                target.free(one.row)
            for one in ended:
                yield one.index, _finished(one)
    finally:
        for one in running:
            target.free(one.row)


def _begin(
    target: Target, index: int, prompt: list[int], max_new_tokens: int, generator_of: GeneratorOf | None
) -> _Writing:
    if not prompt:
        raise RequestError("an empty prompt cannot be continued; leave it out")
    longest = len(prompt) + max_new_tokens
    if longest > target.facts.max_length:
        raise RequestError(
            f"a prompt and max_new_tokens need {longest} positions, the target has {target.facts.max_length}; "
            "leave the prompt out or lower max_new_tokens"
        )
    generator = None if generator_of is None else generator_of(index)
    return _Writing(index, list(prompt), len(prompt), target.new_row(), generator)


def _finished(one: _Writing) -> Written:
    taps_SNE = torch.cat(one.taps)
    last_1NE = taps_SNE.new_zeros(1, *taps_SNE.shape[1:])
    return Written(one.ids, one.num_prompt, torch.cat([taps_SNE, last_1NE]))


def _sampled(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> int:
    """A draw from the smallest set of likeliest ids that holds `top_p` of the mass."""
    probs_V = torch.softmax(logits_V.float().cpu() / temperature, -1)
    # Sorting the whole vocabulary for every token costs as much as a layer; the few likeliest nearly always suffice.
    likely, ids = probs_V.topk(min(_LIKELY, len(probs_V)))
    if float(likely.sum()) < top_p:
        likely, ids = probs_V.sort(descending=True)
    likely = likely * (likely.cumsum(-1) - likely < top_p)
    return int(ids[torch.multinomial(likely, 1, generator=generator)])
