"""Where a text's thinking section ends, in tokens. Owns the marks that targets close it with. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.text import Tokenizer

__all__ = ["THINKING_MARKS", "ThinkingMarks", "after_thinking"]

# (opens, closes), as chat templates write them.
THINKING_MARKS = (
    ("<think>", "</think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_TAIL = 16  # last prompt tokens in which a template may have opened the section


class ThinkingMarks:
    """Finds the end of thinking in emitted tokens, by its id where it is one token, by its text elsewhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._single: dict[str, int] = {}
        for mark in {mark for pair in THINKING_MARKS for mark in pair}:
            ids = tokenizer.encode(mark, add_special_tokens=False)
            if len(ids) == 1:
                self._single[mark] = ids[0]

    def num_thinking(self, prompt_ids: Sequence[int], tokens: Sequence[tuple[int, str]]) -> int | None:
        """Emitted tokens up to and including the end of thinking; all of them where it never ends.

        `tokens` are (id, text that became certain with it). None where nothing opened or closed a section.
        """
        for opens, closes in THINKING_MARKS:
            if (end := self._end(closes, tokens)) is not None:
                return end
            if self._is_open(opens, closes, prompt_ids, tokens):
                return len(tokens)
        return None

    def _end(self, mark: str, tokens: Sequence[tuple[int, str]]) -> int | None:
        single, text = self._single.get(mark), ""
        for count, (token_id, piece) in enumerate(tokens, start=1):
            text = (text + piece)[-len(mark) - len(piece) :]
            if token_id == single or mark in text:
                return count
        return None

    def _is_open(self, opens: str, closes: str, prompt_ids: Sequence[int], tokens: Sequence[tuple[int, str]]) -> bool:
        if any(token_id == self._single.get(opens, -1) for token_id, _ in tokens[:4]):
            return True
        start = "".join(piece for _, piece in tokens[:_TAIL]).lstrip()
        tail = self._tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False)
        return start.startswith(opens) or tail.rfind(opens) > tail.rfind(closes)


def after_thinking(text: str) -> str:
    """The answer: what stands behind the thinking section; the whole text where no mark closes one."""
    for _, closes in THINKING_MARKS:
        _, mark, after = text.partition(closes)
        if mark:
            return after
    return text
