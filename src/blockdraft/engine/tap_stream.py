"""Which stream of its target a draft reads, where that is not plain: what was asked, declared, known or measured.

A wrong stream raises nothing and costs acceptance, so nothing is assumed: what nobody says is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from blockdraft.config import DraftConfig, TapStream, TargetFacts
from blockdraft.draft import DraftModel
from blockdraft.engine.core import Engine
from blockdraft.engine.request import Request
from blockdraft.errors import PairError
from blockdraft.formats.known_streams import known_stream
from blockdraft.stats import pooled_acceptance_length
from blockdraft.targets import Target
from blockdraft.targets.streams import with_tap_stream
from blockdraft.text import Tokenizer

__all__ = ["PROBE_TEXTS", "TapChoice", "choose_stream", "settle_stream"]

PROBE_TEXTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Explain in two sentences why the sky is blue.",
)
PROBE_NEW_TOKENS = 64
MIN_RATIO = 1.1  # of the two acceptance lengths: below it they do not tell the streams apart


@dataclass(frozen=True, slots=True)
class TapChoice:
    """The stream that was taken, and the pooled acceptance length on the probe with each."""

    stream: TapStream
    acceptance_lengths: dict[TapStream, float]

    def __str__(self) -> str:
        return f"tap_stream auto: took {self.stream} (acceptance length {_listed(self.acceptance_lengths)})"


def settle_stream(
    config: DraftConfig,
    facts: TargetFacts,
    source: str | Path,
    *,
    asked: TapStream | Literal["auto"] | None,
) -> TapStream | None:
    """The stream of a draft for this target; None where nobody need name it. For "auto", the one to begin with."""
    streams = facts.tap_streams
    if facts.has_plain_taps:
        if asked is not None:
            raise PairError(f"tap_stream is {asked!r}, and {facts.model_type} has one stream of taps: leave it out")
        return config.tap_stream
    if asked is not None and asked not in (streams if len(streams) == 1 else (*streams, "auto")):
        raise PairError(f"tap_stream is {asked!r}; taps of {facts.model_type} can be {', '.join(streams)}: name that")
    if asked == "auto":
        return streams[0]
    if asked is not None:
        return asked
    known = known_stream(source)
    if config.tap_stream is not None:
        return config.tap_stream
    if known is not None and not known.is_inferred:
        return known.stream
    hint = "" if known is None else f" ({known.stream} would fit: {known.ground})"
    auto = ", or auto, which measures both" if len(streams) > 1 else ", if its trainer says so"
    raise PairError(
        f"the draft {source} does not say which stream of {facts.model_type} it reads{hint}; name it with tap_stream "
        f"(--tap-stream on the command line): {', '.join(streams)}{auto}"
    )


def choose_stream(
    target: Target, draft: DraftModel, tokenizer: Tokenizer, *, allow_mask_is_eos: bool = False
) -> tuple[Target, TapChoice]:
    """The target with the stream on which the draft's proposals are accepted, which `draft` is then set to.

    Both are measured through the engine, greedily, on the same few prompts. Raises PairError where neither is clearly
    ahead.
    """
    requests = _probe(target, tokenizer)
    found: dict[TapStream, float] = {}
    for stream in target.facts.tap_streams:
        draft.config = replace(draft.config, tap_stream=stream)
        engine = Engine(with_tap_stream(target, stream), draft, allow_mask_is_eos=allow_mask_is_eos)
        length = pooled_acceptance_length([completion.stats for completion in engine.run(requests)])
        found[stream] = 1.0 if length is None else length
    best = max(found, key=lambda stream: found[stream])
    rest = max(length for stream, length in found.items() if stream != best)
    if found[best] < MIN_RATIO * rest:
        raise PairError(
            f"tap_stream auto cannot tell the streams apart: acceptance length {_listed(found)}; name the stream"
        )
    draft.config = replace(draft.config, tap_stream=best)
    return with_tap_stream(target, best), TapChoice(best, found)


def _probe(target: Target, tokenizer: Tokenizer) -> list[Request]:
    requests = []
    for text in PROBE_TEXTS:
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = tokenizer.chat_ids([{"role": "user", "content": text}], add_generation_prompt=True)
        room = min(PROBE_NEW_TOKENS, target.facts.max_length - len(ids))
        if room > 1:
            requests.append(Request(prompt_ids=ids, max_new_tokens=room, speculate=True))
    if not requests:
        raise PairError(
            f"tap_stream auto: none of its prompts fits a target of {target.facts.max_length} positions; "
            "name the stream"
        )
    return requests


def _listed(lengths: dict[TapStream, float]) -> str:
    return ", ".join(f"{stream} {length:.2f}" for stream, length in lengths.items())
