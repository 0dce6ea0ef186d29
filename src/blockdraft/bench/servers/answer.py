"""One streamed answer as it comes in: text, tokens, the numbers that engines put beside them, when what came.

Owns the shape of OpenAI's chunks. What the numbers mean is the adapters'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "AnswerError", "numbers_of", "whole"]

NUMBER_FIELDS = ("metrics", "timings", "meta_info", "sglext", "request_perf_metrics", "avg_decoded_tokens_per_iter")
"""Where engines put counters: at the root of a chunk, or in its choice."""
LIST_NAMES = ("histogram", "per_step", "per_pos")


class AnswerError(Exception):
    """A request that broke. The words quote nothing of what was asked or answered; `detail` may.

    `is_gone`: nobody listens at the address any more.
    """

    def __init__(self, words: str, *, detail: str = "", is_gone: bool = False) -> None:
        super().__init__(words)
        self.words, self.detail, self.is_gone = words, detail, is_gone


@dataclass(slots=True)
class Answer:
    """What is known of an answer. Seconds are the caller's clock; `token_ids` stay empty where a server sends none.

    `tokens` are this package's own events, `numbers` the last that came of each of NUMBER_FIELDS, `logprobs` OpenAI's
    entry of every token, where they were asked for.
    """

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    tokens: list[Mapping[str, Any]] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    end_s: float | None = None

    def take(self, chunk: object, now_s: float) -> None:
        """Add a chunk. Raises AnswerError for one of another shape than OpenAI's."""
        try:
            if not isinstance(chunk, Mapping):
                raise TypeError
            if chunk.get("error"):
                raise AnswerError("the server ended the stream with an error", detail=_message(chunk))
            self._take_numbers(chunk)
            if isinstance(chunk.get("usage"), Mapping):
                self.usage = chunk["usage"]
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, now_s)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise AnswerError("a chunk of the stream has another shape than OpenAI's") from None

    def _take_choice(self, choice: Mapping[str, Any], now_s: float) -> None:
        self._take_numbers(choice)
        delta = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        ids = choice.get("token_ids") or ()
        events = choice.get("tokens") or ()
        if self.first_s is None and (text or reasoning or ids or events):
            self.first_s = now_s
        self.text += text
        self.reasoning += reasoning
        self.token_ids.extend(int(token_id) for token_id in ids)
        self.logprobs.extend((choice.get("logprobs") or {}).get("content") or ())
        self.tokens.extend(event for event in events if isinstance(event, Mapping))
        if choice.get("finish_reason"):
            self.finish_reason, self.end_s = str(choice["finish_reason"]), now_s

    def _take_numbers(self, place: Mapping[str, Any]) -> None:
        self.numbers |= {name: place[name] for name in NUMBER_FIELDS if place.get(name) is not None}

    # ---- when it has ended -------------------------------------------------------------------------------------------
    @property
    def num_emitted(self) -> int:
        """C, by the server's own count: the first token and an end token are among them."""
        usage = self.usage or {}
        if "completion_tokens" not in usage:
            raise AnswerError("the answer has no usage; the server must honour stream_options.include_usage")
        return whole(usage["completion_tokens"], "usage.completion_tokens")

    @property
    def num_prompt(self) -> int | None:
        found = (self.usage or {}).get("prompt_tokens")
        return None if found is None else whole(found, "usage.prompt_tokens")

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of thinking, where the server counts them and there were some."""
        details = (self.usage or {}).get("completion_tokens_details")
        found = details.get("reasoning_tokens") if isinstance(details, Mapping) else None
        return None if found is None else whole(found, "reasoning_tokens") or None

    def object_of(self, *path: str) -> Mapping[str, Any]:
        """The object of numbers at a path; empty where there is none."""
        found: Any = self.numbers
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def check_whole(self) -> None:
        """Nothing; an AnswerError where the stream broke off or ended in a way that is none of ours."""
        if self.finish_reason is None:
            raise AnswerError("the stream ended without a finish reason")
        if self.finish_reason not in ("stop", "length", "tool_calls"):
            reason = self.finish_reason if self.finish_reason.isidentifier() else "?"
            raise AnswerError(f"the answer ended with the finish reason {reason[:40]}")


def whole(value: object, name: str) -> int:
    """A counter, as a whole number >= 0. Raises AnswerError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise AnswerError(f"{name} is no whole number >= 0")
    return int(value)


def numbers_of(value: Any) -> Any:
    """What may be kept of an engine's fields: numbers, and lists of counters. No texts and no ids."""
    if isinstance(value, Mapping):
        kept = {}
        for name, item in value.items():
            is_list = isinstance(item, list)
            if is_list and any(word in name for word in LIST_NAMES):
                kept[name] = [x for x in item if isinstance(x, int | float)]
            elif isinstance(item, Mapping | int | float):
                kept[name] = numbers_of(item)
        return kept
    return value if isinstance(value, int | float) else None


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    found = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(found).split())[:200]
