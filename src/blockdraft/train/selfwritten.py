"""Prompts that the target makes up: it continues its chat template's open user turn.

Owns how a user turn is opened with given words, and which finished turns are of use. Knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.errors import ConfigError
from blockdraft.text import Tokenizer

__all__ = ["MIN_CHARACTERS", "OwnTurn", "finished_turn", "open_turn_ids"]

MIN_CHARACTERS = 12
_PROBES = ("Alpha", "First")  # no first and no last token in common


@dataclass(frozen=True, slots=True)
class OwnTurn:
    """A user turn that the target wrote, or (`text` None) why it is of no use."""

    text: str | None
    reason: str


def open_turn_ids(tokenizer: Tokenizer, opening: str) -> list[int]:
    """Ids of the chat template up to a user turn that begins with `opening` and is not closed."""
    if opening != opening.rstrip():
        raise ConfigError(
            f"prompts.openings: {opening!r} ends in a space, which belongs to the next word; leave it out"
        )
    one, other = (_turn(tokenizer, probe) for probe in _PROBES)
    closing = _common_end(one, other)
    if not opening:
        opened = one[: _common_start(one, other)]
        kept = bool(opened)
    else:
        whole = _turn(tokenizer, opening)
        opened = whole[: len(whole) - len(closing)]
        kept = whole[len(opened) :] == closing and tokenizer.decode(opened).endswith(opening)
    if not kept or not closing:
        raise ConfigError(
            f"the target's chat template does not keep a user turn that begins with {opening!r} as it is; "
            "self-written prompts need a template that does: change prompts.openings, or give prompts in files"
        )
    return opened


def finished_turn(tokenizer: Tokenizer, opening: str, answer: Sequence[int], stop_ids: frozenset[int]) -> OwnTurn:
    """The whole turn with its opening. One that is unfinished, very short or has control tokens is of no use."""
    if not answer or answer[-1] not in stop_ids:
        return OwnTurn(None, "unfinished")
    body = list(answer[:-1])
    if not tokenizer.special_ids.isdisjoint(body):
        return OwnTurn(None, "control_tokens")
    text = (opening + tokenizer.decode(body)).strip()
    if len(text) < MIN_CHARACTERS or not tokenizer.decode(body).strip():
        return OwnTurn(None, "too_short")
    return OwnTurn(text, "")


def _turn(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.chat_ids([{"role": "user", "content": text}], add_generation_prompt=False)


def _common_start(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


def _common_end(one: Sequence[int], other: Sequence[int]) -> list[int]:
    length = _common_start(one[::-1], other[::-1])
    return list(one[len(one) - length :])
