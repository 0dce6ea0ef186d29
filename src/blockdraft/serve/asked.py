"""From the fields of a request to the engine's: sampling, stops, limits, seeds, speculation.

Owns the meaning of every field that both endpoints share, and of n choices. Knows no HTTP and no prompt format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.accept import SamplingParams
from blockdraft.engine import Request
from blockdraft.serve.errors import bad_request, context_length_exceeded
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.wire import GenerationFields

__all__ = ["DEFAULT_TEMPERATURE", "choice_seed", "engine_requests", "num_choices", "request_fields"]

DEFAULT_TEMPERATURE = 1.0


def num_choices(fields: GenerationFields, settings: ServerSettings) -> int:
    """n; an error above what the server allows."""
    n = fields.n or 1
    if n > settings.max_n:
        raise bad_request(f"n is {n}; this server gives at most {settings.max_n} choices", param="n")
    return n


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index` of a prompt: the request's own for the first, one derived from both for the others."""
    if seed is None or index == 0:
        return seed
    digest = hashlib.sha256(f"blockdraft choice {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def request_fields(fields: GenerationFields, *, num_logprobs: int | None) -> dict[str, Any]:
    """What all choices have in common: the engine's fields but for prompt, length limit and seed."""
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options needs stream true", param="stream_options")
    given = fields.speculation
    top_k = fields.top_k if fields.top_k and fields.top_k > 0 else None
    sampling = SamplingParams(
        temperature=DEFAULT_TEMPERATURE if fields.temperature is None else fields.temperature,
        top_k=top_k,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=_biases(fields.logit_bias or {}),
    )
    stop = fields.stop or ()
    return {
        "sampling": sampling,
        "min_new_tokens": fields.min_tokens or 0,
        "stop_strings": (stop,) if isinstance(stop, str) else tuple(stop),
        "num_logprobs": num_logprobs,
        "priority": fields.priority or 0,
        "speculate": None if given is None else given.enabled,
        "width": None if given is None else given.width,
    }


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for word, bias in given.items():
        if int(word) in biases:
            raise bad_request(f"logit_bias names id {int(word)} twice; give one of the two", param="logit_bias")
        biases[int(word)] = bias
    return biases


def stop_ids(fields: GenerationFields, eos_ids: Sequence[int]) -> frozenset[int]:
    """The ids that end a choice: the target's own unless ignored, and those of the request."""
    own = () if fields.ignore_eos else eos_ids
    return frozenset([*own, *(fields.stop_token_ids or ())])


def length_limit(
    given: int | None, default: int, num_prompt: int, window: int, settings: ServerSettings, *, param: str, where: str
) -> int:
    """New tokens of a choice: what was asked for, or the default or what the window leaves, whichever is less."""
    room = window - num_prompt
    if room < 1:
        raise context_length_exceeded(window, num_prompt, None, param=where)
    if given is None:
        return min(default, room) if settings.max_tokens is None else min(default, room, settings.max_tokens)
    if settings.max_tokens is not None and given > settings.max_tokens:
        raise bad_request(f"{param} is {given}; this server gives at most {settings.max_tokens}", param=param)
    if given > room:
        raise context_length_exceeded(window, num_prompt, given, param=where)
    return given


def engine_requests(
    prompts: Sequence[Sequence[int]], n: int, seed: int | None, limits: Sequence[int], common: Mapping[str, Any]
) -> list[Request]:
    """n requests per prompt, those of a prompt in a row; equal choices of equal prompts have equal seeds."""
    return [
        Request(prompt_ids=prompt, max_new_tokens=limit, seed=choice_seed(seed, index), **common)
        for prompt, limit in zip(prompts, limits, strict=True)
        for index in range(n)
    ]
