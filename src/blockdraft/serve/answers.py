"""What goes back: whole bodies and chunks of both endpoints, made from the same pieces.

Owns the frame of an answer and what both endpoints put into a choice. A choice takes what each engine step gave it and
says what a chunk would carry; the whole answer is those pieces joined, so streaming and not streaming cannot differ.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blockdraft import __version__
from blockdraft.engine import TokenEvent
from blockdraft.serve import numbers
from blockdraft.serve.engine_loop import Done, Step
from blockdraft.serve.numbers import StepLog
from blockdraft.serve.wire import GenerationFields

__all__ = ["Answer", "Choice", "Frame"]

FINGERPRINT = f"blockdraft-{__version__}"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What an answer knows before its first token."""

    model: str
    fields: GenerationFields
    num_prompt_tokens: Sequence[int]
    """Of each prompt."""
    id: str
    service_tier: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @staticmethod
    def new_id(prefix: Literal["chatcmpl", "cmpl"]) -> str:
        return f"{prefix}-{uuid.uuid4().hex}"


class Choice(ABC):
    """One choice as it grows. `take` and `finish` return the choice object of a chunk, None where there is nothing."""

    def __init__(self, index: int, fields: GenerationFields, stop_ids: frozenset[int]) -> None:
        self.index = index
        self.log = StepLog()
        self.done: Done | None = None
        self._wants_tokens = fields.speculation is not None and fields.speculation.tokens
        self._stop_ids = stop_ids
        self._tokens: list[dict[str, Any]] = []

    def take(self, step: Step) -> dict[str, Any] | None:
        """What one engine step adds."""
        self.log.add(step)
        piece = self._piece(step.events)
        if self._wants_tokens:
            tokens = [_token(event, step) for event in step.events]
            self._tokens.extend(tokens)
            piece = {**(piece or self._empty_piece()), "tokens": tokens}
        return None if piece is None else {"index": self.index, "finish_reason": None, **piece}

    def finish(self, done: Done) -> list[dict[str, Any]]:
        """What the end adds: text that was held back, where there is any, and the finish reason."""
        self.done = done
        rest = self._rest()
        pieces = [] if rest is None else [{"index": self.index, "finish_reason": None, **rest}]
        last = {**self._empty_piece(), "finish_reason": self._reason(), "stop_reason": self._stop_reason()}
        return [*pieces, {"index": self.index, **last}]

    def whole(self) -> dict[str, Any]:
        """The choice object of an answer in one piece."""
        made = {"index": self.index, **self._whole(), "finish_reason": self._reason()}
        made["stop_reason"] = self._stop_reason()
        return {**made, "tokens": self._tokens} if self._wants_tokens else made

    def _reason(self) -> str:
        assert self.done is not None
        return self.done.completion.finish_reason

    def _stop_reason(self) -> str | int | None:
        """The stop string, or the id of `stop_token_ids`, that ended it; null for the target's own end."""
        assert self.done is not None
        stop = self.done.completion.stop
        return stop if isinstance(stop, str) or stop in self._stop_ids else None

    @abstractmethod
    def _piece(self, events: Sequence[TokenEvent]) -> dict[str, Any] | None:
        """What these events add to the answer, as parts of a chunk's choice."""

    @abstractmethod
    def _rest(self) -> dict[str, Any] | None:
        """The same for what was held back to the end."""

    @abstractmethod
    def _empty_piece(self) -> dict[str, Any]:
        """Parts of a chunk's choice that add nothing."""

    @abstractmethod
    def _whole(self) -> dict[str, Any]:
        """Parts of the choice of an answer in one piece."""


def _token(event: TokenEvent, step: Step) -> dict[str, Any]:
    width = None if step.num_drafted is None else step.num_drafted + 1
    return {"id": event.token_id, "text": event.text, "kind": event.kind, "step": event.step, "width": width}


class Answer:
    """An answer of one or more choices. `names` are the object names of a whole answer and of a chunk."""

    def __init__(self, frame: Frame, choices: Sequence[Choice], names: tuple[str, str]) -> None:
        self.frame = frame
        self.choices = choices
        self._names = names
        fields = frame.fields
        self._has_usage = fields.stream_options is not None and fields.stream_options.include_usage
        self._num_finished = 0

    def _framed(self, name: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        frame = self.frame
        made = {
            "id": frame.id,
            "object": name,
            "created": frame.created,
            "model": frame.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
            **more,
        }
        return made if frame.service_tier is None else {**made, "service_tier": frame.service_tier}

    # ---- streamed ----------------------------------------------------------------------------------------------------
    def chunks_of_step(self, index: int, step: Step) -> list[dict[str, Any]]:
        piece = self.choices[index].take(step)
        return [] if piece is None else [self._chunk([piece])]

    def chunks_of_end(self, index: int, done: Done) -> list[dict[str, Any]]:
        """The last chunks of a choice, and after the last choice the chunk of numbers, if asked for."""
        pieces = self.choices[index].finish(done)
        chunks = [self._chunk([piece]) for piece in pieces]
        self._num_finished += 1
        is_last = self._num_finished == len(self.choices)
        if is_last:
            if self.frame.fields.speculation is not None:
                chunks[-1]["metrics"] = self._metrics()
            if not self._has_usage:
                chunks[-1].update(self._sglang())
            else:
                chunks.append(self._framed(self._names[1], [], **self._numbers()))
        return chunks

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._framed(self._names[1], choices, **({"usage": None} if self._has_usage else {}))

    # ---- in one piece ------------------------------------------------------------------------------------------------
    def take(self, index: int, step: Step) -> None:
        self.choices[index].take(step)

    def finish(self, index: int, done: Done) -> None:
        self.choices[index].finish(done)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        return self._framed(self._names[0], [choice.whole() for choice in self.choices], **self._numbers())

    # ---- numbers -----------------------------------------------------------------------------------------------------
    def _numbers(self) -> dict[str, Any]:
        usage = numbers.usage(sum(self.frame.num_prompt_tokens), self._done(), self._num_reasoning())
        return {"usage": usage, "metrics": self._metrics(), **self._sglang()}

    def _done(self) -> list[Done]:
        return [choice.done for choice in self.choices if choice.done is not None]

    def _num_reasoning(self) -> int | None:
        """Tokens of reasoning sections; None where this answer has no such thing."""
        return None

    def _metrics(self) -> dict[str, Any] | None:
        """Of an answer of one choice; null for several, as vLLM has it."""
        if len(self.choices) > 1:
            return None
        [choice] = self.choices
        assert choice.done is not None
        return numbers.metrics(choice.done, choice.log)

    def _sglang(self) -> dict[str, Any]:
        """What SGLang's readers ask for; a list with an entry per choice where there are several."""
        fields, made = self.frame.fields, {}
        if fields.return_meta_info:
            per_prompt = len(self.choices) // len(self.frame.num_prompt_tokens)
            infos = [
                numbers.meta_info(self.frame.id, self.frame.num_prompt_tokens[choice.index // per_prompt], choice.done)
                for choice in self.choices
                if choice.done is not None
            ]
            made["meta_info"] = infos[0] if len(infos) == 1 else infos
        if fields.return_spec_tokens_details:
            details = [numbers.spec_details(done) for done in self._done()]
            made["sglext"] = {"spec_tokens_details": details[0] if len(details) == 1 else details}
        return made
