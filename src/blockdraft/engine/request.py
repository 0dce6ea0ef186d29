"""What goes into the engine and what comes out of it: requests, token events, completions.

Owns the meaning of a request's fields and their bounds. Knows no model and no HTTP; stop strings are carried for
text.StopScanner, which alone understands them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.accept import SamplingParams, TokenLogprobs, check_number
from blockdraft.errors import RequestError
from blockdraft.stats import RequestStats
from blockdraft.text import Grammar, check_stop

__all__ = ["Completion", "FinishReason", "Request", "Speculation", "TokenEvent", "TokenKind"]

TokenKind = Literal["first", "accepted", "bonus"]
MAX_PRIORITY = 1_000_000
FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to be continued.

    `speculate`: True demands the draft (an error where there is none), False forbids it, None uses it where there is
    one. `width` counts what a step lets the target score (the anchor and the proposals), from 2 to what the draft was
    trained for: its `block_size`, or one more where its anchor's row predicts too; None is the trained one.
    `min_confidence` ends a block's proposals before the first whose predicted acceptance is below it (DSpark's
    confidence head; 0 never does). `stop_ids` None means the target's own end ids; an empty set means none.
    `num_logprobs` None reports no log-probabilities, n reports the emitted id's and the n most likely ones.
    `priority`: lower is served first (any whole number; equal ones in the order of submission).
    `grammar`: what the text must look like; end ids come only where it may end, and nothing else where it must. A text
    that max_new_tokens or a stop string cuts is the beginning of such a text.
    `visible_special_tokens`: special tokens that the text shows (their texts; others are left out of it).
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    min_new_tokens: int = 0
    stop_ids: frozenset[int] | None = None
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None
    speculate: bool | None = None
    width: int | None = None
    min_confidence: float = 0.0
    num_logprobs: int | None = None
    priority: int = 0
    grammar: Grammar | None = None
    visible_special_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"sampling is a {type(self.sampling).__name__}; give SamplingParams")
        object.__setattr__(self, "prompt_ids", _checked_ids("prompt_ids", self.prompt_ids))
        if not self.prompt_ids:
            raise RequestError("the prompt is empty; give at least one token")
        _count("max_new_tokens", self.max_new_tokens, least=1)
        _count("min_new_tokens", self.min_new_tokens, least=0)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}, above max_new_tokens {self.max_new_tokens}; lower it"
            )
        if self.stop_ids is not None:
            object.__setattr__(self, "stop_ids", frozenset(_checked_ids("stop_ids", self.stop_ids)))
        if not isinstance(self.stop_strings, Iterable):
            raise RequestError(f"stop_strings is {self.stop_strings!r}; give a list of texts")
        object.__setattr__(self, "stop_strings", check_stop(self.stop_strings))
        if self.seed is not None:
            _count("seed", self.seed, least=0)
            if self.seed >= 2**63:
                raise RequestError(f"seed is {self.seed}; it must be below 2**63")
        if self.speculate is not None and not isinstance(self.speculate, bool):
            raise RequestError(f"speculate is {self.speculate!r}; it is true, false or not given")
        if self.width is not None:
            _count("width", self.width, least=2)
            if self.speculate is False:
                raise RequestError(f"width is {self.width} while speculation is off; drop one of the two")
        object.__setattr__(
            self, "min_confidence", check_number("min_confidence", self.min_confidence, 0.0, 1.0, "0 never cuts")
        )
        if self.speculate is False and self.min_confidence > 0.0:
            raise RequestError(
                f"min_confidence is {self.min_confidence:g} while speculation is off; drop one of the two"
            )
        visible = self.visible_special_tokens
        if not isinstance(visible, tuple) or not all(isinstance(text, str) and text for text in visible):
            raise RequestError(f"visible_special_tokens is {visible!r}; give a tuple of the tokens' texts")
        if self.num_logprobs is not None:
            _count("num_logprobs", self.num_logprobs, least=0)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise RequestError(
                f"grammar is a {type(self.grammar).__name__}; give a Grammar, such as Grammar.regex(...)"
            )
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise RequestError(
                f"priority is {self.priority!r}; it must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
            )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token: `kind` is "first" (from the prefill), "accepted" (a proposal that stood) or "bonus" (the
    target's own token that ends a step). `step` counts steps from 1; the first token has step 0. `text` is what became
    certain with this token (often empty inside a character, or while a stop string may be forming); the texts of all
    events joined are the completion's text. It is None where the engine has no tokenizer."""

    token_id: int
    kind: TokenKind
    step: int
    text: str | None
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Whether the draft was used for a request, and if not (or no longer), why."""

    enabled: bool
    width: int | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a request gave. `token_ids` ends with the stop id or with the id that completed a stop string.

    `text` is None where the engine has no tokenizer. `stop` is the id or string that ended it. `error` says, where
    `finish_reason` is "error", what broke this request; the tokens before that are good.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    stop: int | str | None
    error: str | None
    events: tuple[TokenEvent, ...]
    stats: RequestStats
    speculation: Speculation


def _count(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def _checked_ids(name: str, ids: Iterable[int]) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)):
        raise RequestError(f"{name} is text; give token ids, or encode it first")
    if not isinstance(ids, Iterable):
        raise RequestError(f"{name} is {ids!r}; give a list of token ids")
    ids = tuple(ids)
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise RequestError(f"{name} holds {token_id!r}; token ids are whole numbers from 0")
    return ids
