"""Conversations that the target answers turn by turn: what it is fed next, what a finished one leaves behind.

Owns how answers and given turns become sequences with a mask of written tokens, and the cut of endless repetition.
Knows no files.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from blockdraft.errors import RequestError
from blockdraft.targets.contract import Target
from blockdraft.targets.writing import Written, write
from blockdraft.text import Tokenizer
from blockdraft.train.corpus import TextSequence
from blockdraft.train.prompts import Conversation, Message

__all__ = ["AnswerSettings", "Answers", "Outcome", "generator_for", "loop_end"]

LOOP_TOKENS = 64
MAX_LOOP_PERIOD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """How answers are written. `seed` and a prompt's index fix what is sampled for it, whatever is beside it."""

    max_new_tokens: int
    max_length: int
    max_rows: int
    temperature: float
    top_p: float
    every_turn: bool
    seed: int
    taps_dtype: torch.dtype = torch.bfloat16


@dataclass(slots=True)
class Outcome:
    """What became of one prompt: sequences, or the reason why there are none (`is_error`: it could not be asked)."""

    index: int
    sequences: list[TextSequence] = field(default_factory=list)
    reason: str = ""
    is_error: bool = False
    detail: str = ""
    num_cut_loops: int = 0
    num_turns_left_out: int = 0

    @property
    def num_written(self) -> int:
        """Tokens of the target's in the sequences."""
        return sum(sum(one.written) for one in self.sequences)


@dataclass(slots=True)
class _Open:
    """A conversation under way. `ids` are fed next; `kept` is the sequence so far, not yet given out."""

    outcome: Outcome
    to_come: deque[list[Message]]
    messages: list[Message]
    ids: list[int]
    written: list[bool]
    kept: TextSequence | None = None
    turn: int = 0


class Answers:
    """The target's answers to many prompts, every turn of each; outcomes come in order of completion."""

    def __init__(self, target: Target, tokenizer: Tokenizer, settings: AnswerSettings) -> None:
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        self.stop_ids = frozenset(target.facts.eos_token_ids)
        self._open: dict[int, _Open] = {}
        self._again: deque[int] = deque()
        self._settled: list[Outcome] = []

    def run(self, prompts: Iterable[tuple[int, Conversation]]) -> Iterator[Outcome]:
        """One outcome for every prompt. Prompts are taken from the iterable when there is room for them."""
        settings = self.settings
        feed = _Feed(self, iter(prompts))
        while True:
            for index, written in write(
                self.target,
                feed,
                max_new_tokens=settings.max_new_tokens,
                stop_ids=self.stop_ids,
                temperature=settings.temperature,
                top_p=settings.top_p,
                generator_of=self._generator if settings.temperature else None,
                max_rows=settings.max_rows,
                taps_dtype=settings.taps_dtype,
            ):
                self._take(self._open[index], written)
                yield from self._drain()
            yield from self._drain()
            if not self._again:
                return

    def _drain(self) -> Iterator[Outcome]:
        settled, self._settled = self._settled, []
        yield from settled

    def _generator(self, index: int) -> torch.Generator:
        return generator_for(self.settings.seed, "answer", index, self._open[index].turn)

    def next_prompt(self, fresh: Iterator[tuple[int, Conversation]]) -> tuple[int, list[int]] | None:
        """A conversation to be gone on with, else a new one; None where there is none now."""
        if self._again:
            index = self._again.popleft()
            return index, self._open[index].ids
        for index, prompt in fresh:
            if self._begin(index, prompt):
                return index, self._open[index].ids
        return None

    def _begin(self, index: int, prompt: Conversation) -> bool:
        segments = prompt.segments(every_turn=self.settings.every_turn)
        outcome = Outcome(index)
        try:
            ids = self.tokenizer.chat_ids(segments[0], add_generation_prompt=True)
        except RequestError as error:
            outcome.reason, outcome.is_error, outcome.detail = "refused_by_template", True, str(error)
        else:
            if not self._has_room(ids):
                outcome.reason = "too_long"
        if outcome.reason:
            self._settled.append(outcome)
            return False
        self._open[index] = _Open(outcome, deque(segments[1:]), list(segments[0]), ids, [False] * len(ids))
        return True

    def _has_room(self, ids: Sequence[int]) -> bool:
        longest = min(self.settings.max_length, self.target.facts.max_length)
        return len(ids) + self.settings.max_new_tokens <= longest

    def _take(self, one: _Open, item: Written) -> None:
        """An answer has come: keep it, and go on with the conversation's next turn if there is one."""
        answer = item.ids[item.num_prompt :]
        is_ended = bool(answer) and answer[-1] in self.stop_ids
        body = answer[:-1] if is_ended else answer
        if not body:
            self._finish(one, reason="empty_answer")
            return
        length = len(item.ids)
        if not is_ended and (end := loop_end(answer)) is not None:
            length = item.num_prompt + end
            one.outcome.num_cut_loops += 1
        ids, written = item.ids[:length], [*one.written, *[True] * (length - item.num_prompt)]
        one.kept = TextSequence(ids, written, item.taps_SNE[:length], one.outcome.index)
        if not is_ended or not one.to_come:
            self._finish(one)
            return
        self._ask_again(one, body)

    def _ask_again(self, one: _Open, body: list[int]) -> None:
        """The next turn, as the chat template renders it after what was written.

        Where the template does not go on from the written ids (it drops earlier reasoning, or the text is cut into
        tokens in another way), what was written stays a sequence of its own and the next turn begins another.
        """
        assert one.kept is not None
        answer = {"role": "assistant", "content": self.tokenizer.decode(body)}
        messages = [*one.messages, answer, *one.to_come[0]]
        try:
            ids = self.tokenizer.chat_ids(messages, add_generation_prompt=True)
        except RequestError:
            ids = []
        if not ids or not self._has_room(ids):
            self._finish(one)
            return
        written = [False] * len(ids)
        if ids[: len(one.kept.ids)] == one.kept.ids:
            written[: len(one.kept.ids)] = one.kept.written
        else:
            one.outcome.sequences.append(one.kept)
            one.kept = None
        one.messages, one.ids, one.written = messages, ids, written
        one.to_come.popleft()
        one.turn += 1
        self._again.append(one.outcome.index)

    def _finish(self, one: _Open, reason: str = "") -> None:
        """Give out what there is; `reason` counts only where nothing was written."""
        if one.kept is not None:
            one.outcome.sequences.append(one.kept)
        if not one.outcome.sequences:
            one.outcome.reason = reason
        one.outcome.num_turns_left_out = len(one.to_come)
        del self._open[one.outcome.index]
        self._settled.append(one.outcome)


class _Feed(Iterator[tuple[int, list[int]]]):
    """What the target is asked next. It may end and go on again: an answer that comes in opens the next turn."""

    def __init__(self, answers: Answers, fresh: Iterator[tuple[int, Conversation]]) -> None:
        self.answers, self.fresh = answers, fresh

    def __next__(self) -> tuple[int, list[int]]:
        entry = self.answers.next_prompt(self.fresh)
        if entry is None:
            raise StopIteration
        return entry


def loop_end(answer: Sequence[int]) -> int | None:
    """Length of an answer up to the second period of the loop that it ends in; None where it ends in none.

    A loop is a tail of at least 64 tokens that repeats a period of at most 32 tokens three times or more.
    """
    for period in range(1, min(MAX_LOOP_PERIOD, len(answer) - 1) + 1):
        start = len(answer) - period
        while start > 0 and answer[start - 1] == answer[start - 1 + period]:
            start -= 1
        looped = len(answer) - start
        if looped >= max(LOOP_TOKENS, 3 * period):
            return start + 2 * period
    return None


def generator_for(seed: int, what: str, index: int, turn: int = 0) -> torch.Generator:
    """The random numbers of one prompt: the same whatever is written beside it, and by whom."""
    digest = hashlib.sha256(f"{seed} {what} {index} {turn}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
