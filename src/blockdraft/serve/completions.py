"""POST /v1/completions: prompts as texts or ids, and the choices of its answer.

Owns what is special to this endpoint: echo, best_of, logprobs with offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockdraft.engine import TokenEvent
from blockdraft.serve.answers import Choice
from blockdraft.serve.errors import bad_request
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.spelling import Speller
from blockdraft.serve.wire import CompletionRequest
from blockdraft.text import StreamDecoder, Tokenizer

__all__ = ["DEFAULT_MAX_TOKENS", "NAMES", "TextChoice", "check_completion", "read_prompts"]

DEFAULT_MAX_TOKENS = 16  # OpenAI's
NAMES = ("text_completion", "text_completion")


def check_completion(fields: CompletionRequest) -> None:
    """Nothing; an error for fields that contradict each other."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise bad_request(
            f"best_of is {fields.best_of} and n is {fields.n or 1}; choices are not ranked here: leave best_of out",
            param="best_of",
            code="unsupported_parameter",
        )
    if fields.echo and fields.logprobs is not None:
        raise bad_request(
            "echo with logprobs is not supported: log-probabilities are of new tokens only; drop one of them",
            param="echo",
            code="unsupported_parameter",
        )


def read_prompts(fields: CompletionRequest, tokenizer: Tokenizer, settings: ServerSettings) -> list[list[int]]:
    """Token ids of every prompt. Slow for long texts: not for the event loop."""
    prompt = fields.prompt
    prompts: Sequence[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    if len(prompts) > settings.max_prompts:
        raise bad_request(f"{len(prompts)} prompts; at most {settings.max_prompts} in a request", param="prompt")
    has_texts = any(isinstance(item, str) for item in prompts)
    if fields.add_special_tokens is not None and not has_texts:
        raise bad_request("add_special_tokens has no effect on token ids; leave it out", param="add_special_tokens")
    with_special = fields.add_special_tokens is not False
    ids = [tokenizer.encode(item, with_special) if isinstance(item, str) else list(item) for item in prompts]
    for number, each in enumerate(ids):
        if not each:
            raise bad_request(f"prompt {number} is empty; give at least one token", param="prompt")
    return ids


class TextChoice(Choice):
    """A choice of a text completion."""

    def __init__(
        self,
        index: int,
        fields: CompletionRequest,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer,
        speller: Speller,
        echo: str,
    ) -> None:
        super().__init__(index, fields, stop_ids)
        self._speller = speller
        self._echo = echo
        self._text: list[str] = []
        self._wants_logprobs = fields.logprobs is not None
        # offsets by the tokens' own texts: what may become a stop string is held back from the answer's
        self._decoder = StreamDecoder(tokenizer) if self._wants_logprobs else None
        self._offset = 0
        self._logprobs: dict[str, list[Any]] = _no_logprobs()

    def _piece(self, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        text = self._take_echo() + "".join(event.text or "" for event in events)
        self._text.append(text)
        if not self._wants_logprobs:
            return {"text": text, "logprobs": None} if text else None
        return {"text": text, "logprobs": self._entries(events)}

    def _take_echo(self) -> str:
        echo, self._echo = self._echo, ""
        return echo

    def _entries(self, events: Sequence[TokenEvent]) -> dict[str, list[Any]]:
        assert self._decoder is not None
        fresh = _no_logprobs()
        for event in events:
            assert event.logprobs is not None
            fresh["text_offset"].append(self._offset)
            fresh["tokens"].append(self._speller.spell(event.token_id)[0])
            fresh["token_logprobs"].append(max(event.logprobs.logprob, -9999.0))
            fresh["top_logprobs"].append(self._speller.top_map(event.logprobs))
            self._offset += len(self._decoder.feed((event.token_id,)))
        for name, values in fresh.items():
            self._logprobs[name].extend(values)
        return fresh

    def _rest(self) -> dict[str, Any] | None:
        return None

    def _empty_piece(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _whole(self) -> dict[str, Any]:
        return {"text": "".join(self._text), "logprobs": self._logprobs if self._wants_logprobs else None}


def _no_logprobs() -> dict[str, list[Any]]:
    return {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
