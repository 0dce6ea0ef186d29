"""Texts end where they should: at the length limit, at the first stop id, at a stop string, not before the minimum.

The rules are checked on each text by itself, so that they hold whatever the text says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockdraft.accept import SamplingParams
from blockdraft.engine import Completion, Request
from blockdraft.verify.chance import rate_seen
from blockdraft.verify.report import Check
from blockdraft.verify.system import System

__all__ = ["check_cuts"]

BEYOND_STOP = "text goes on after a stop id"
BEYOND_LIMIT = "text is longer than its limit"
SHORT = "text ends before its limit without a stop"
TOO_EARLY = "text stops before its least length"
WRONG_WORD = "the finish reason is not what ended the text"
BEYOND_STRING = "text goes on after, or still holds, a stop string"


def check_cuts(system: System, prompt: Sequence[int], *, seed: int, num_stops: int) -> Check:
    """Every length from 1 to past two blocks, and stops at as many places of greedy and of sampled texts."""
    width = system.max_width
    faults: dict[str, int] = {}
    num = 0
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
        base = Request(
            prompt_ids=prompt,
            max_new_tokens=max(num_stops, 2 * width + 2),
            sampling=sampling,
            seed=seed,
            stop_ids=frozenset(),
            speculate=True,
            width=width,
        )
        [text] = system.run([base])
        requests = [replace(base, max_new_tokens=length) for length in range(1, 2 * width + 3)]
        stops = list(dict.fromkeys(text.token_ids))[:num_stops]
        requests += [replace(base, stop_ids=frozenset((stop,))) for stop in stops]
        requests += [
            replace(base, stop_ids=frozenset(stops[:2]), min_new_tokens=least)
            for least in (1, width - 1, width, width + 1)
        ]
        pieces = _pieces(text)
        requests += [replace(base, stop_strings=(piece,)) for piece in pieces]
        for request, done in zip(requests, system.run(requests), strict=True):
            num += 1
            if fault := _fault(request, done):
                faults[fault] = faults.get(fault, 0) + 1
    return Check(
        name="stops and lengths",
        outcome="failed" if faults else "passed",
        finding=f"{num} requests with a limit, a stop id, a stop string or a least length: "
        f"{sum(faults.values())} wrong",
        reason="; ".join(sorted(faults)) or None,
        power=f"would have seen a fault in {rate_seen(num):.2g} of such requests with probability 0.9",
        figures={"num": num, "faults": faults},
    )


def _pieces(done: Completion) -> list[str]:
    """Stop strings that the text holds: from its middle, of one and of several characters."""
    text = done.text or ""
    cuts = [(len(text) // 3, 1), (len(text) // 2, 4), (2 * len(text) // 3, 7)]
    return list(dict.fromkeys(piece for start, size in cuts if (piece := text[start : start + size]).strip()))


def _fault(request: Request, done: Completion) -> str | None:
    """The rule that a completion breaks."""
    ids = done.token_ids
    stops = request.stop_ids or frozenset()
    least = request.min_new_tokens
    ends = [index for index, token in enumerate(ids) if token in stops and index + 1 >= max(1, least)]
    if any(token in stops for token in ids[: max(0, least - 1)]):
        return TOO_EARLY
    if len(ids) > request.max_new_tokens:
        return BEYOND_LIMIT
    if ends and ends[0] != len(ids) - 1:
        return BEYOND_STOP
    if ends:
        return None if done.finish_reason == "stop" and done.stop == ids[-1] else WRONG_WORD
    if request.stop_strings:
        if any(piece in (done.text or "") for piece in request.stop_strings):
            return BEYOND_STRING
        if done.finish_reason == "stop":
            return None if done.stop in request.stop_strings else WRONG_WORD
    if len(ids) < request.max_new_tokens:
        return SHORT
    return None if done.finish_reason == "length" else WRONG_WORD
