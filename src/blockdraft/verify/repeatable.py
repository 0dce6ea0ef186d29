"""A seed gives one text: alone, in a batch, after other requests; different seeds and no seed give different ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from blockdraft.accept import SamplingParams
from blockdraft.engine import Request
from blockdraft.verify.chance import rate_seen
from blockdraft.verify.report import Check
from blockdraft.verify.system import System

__all__ = ["check_seeds"]

NOT_REPEATED = "the same seed gave another text"
NEIGHBOURS = "the text of a seed depends on the requests beside it"
IGNORED = "different seeds give the same text, although the target leaves a choice"
NOT_FRESH = "requests without a seed repeat each other"


def check_seeds(
    system: System, prompts: Sequence[Sequence[int]], num_tokens: int, *, num_seeds: int, seed: int, is_exact: bool
) -> Check:
    """`is_exact`: rounding is far too small to change a draw, so that a batch has to give the very same text."""
    source = random.Random(seed)
    requests = [
        Request(
            prompt_ids=prompts[n % len(prompts)],
            max_new_tokens=num_tokens,
            sampling=SamplingParams(temperature=1.0),
            seed=source.getrandbits(62),
            stop_ids=frozenset(),
            speculate=True,
            width=system.max_width,
        )
        for n in range(num_seeds)
    ]
    alone = [system.run([request])[0].token_ids for request in requests]
    others = [replace(request, seed=None, max_new_tokens=1 + n) for n, request in enumerate(requests)]
    mixed = [one for pair in zip(others, requests, strict=True) for one in pair]
    batched = [done.token_ids for done in system.run(mixed)][1::2]
    again = [system.run([request])[0].token_ids for request in requests]
    free = [done.token_ids for done in system.run([replace(requests[0], seed=None) for _ in requests])]
    reseeded = [done.token_ids for done in system.run([replace(requests[0], seed=r.seed) for r in requests])]
    num_again = sum(a == b for a, b in zip(alone, again, strict=True))
    num_batched = sum(a == b for a, b in zip(alone, batched, strict=True))
    faults = []
    if num_again < num_seeds:
        faults.append(NOT_REPEATED)
    if is_exact and num_batched < num_seeds:
        faults.append(NEIGHBOURS)
    if num_seeds > 1 and len(set(reseeded)) == 1:
        faults.append(IGNORED)
    if num_seeds > 1 and len(set(free)) == 1:
        faults.append(NOT_FRESH)
    note = "" if is_exact else " (not judged: rounding of this number format may change a draw)"
    return Check(
        name="seeds",
        outcome="failed" if faults else "passed",
        finding=f"{num_seeds} seeds: {num_again} repeated after others, {num_batched} the same in a batch{note}; "
        f"{len(set(reseeded))} different texts of as many seeds, {len(set(free))} without a seed",
        reason="; ".join(faults) or None,
        power=f"would have seen a fault in {rate_seen(num_seeds):.2g} of the texts with probability 0.9",
        figures={"num": num_seeds, "num_repeated": num_again, "num_same_in_batch": num_batched},
    )
