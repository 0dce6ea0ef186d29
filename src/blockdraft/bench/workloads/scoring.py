"""Was the answer right? Exact rules on text, by name. Owns what counts as an answer; runs no code.

Scores stand beside acceptance because a fast wrong engine is worthless; they are no leaderboard's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from blockdraft.bench.system import Prompt
from blockdraft.bench.thinking import after_thinking

__all__ = ["score"]

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_LETTER = re.compile(r"(?i:answer)\s*:\s*[$\[(*]*\s*([A-D])\b")


def score(prompt: Prompt, text: str) -> Mapping[str, float]:
    """The scores of a reply, by name, each 0 or 1; nothing for a prompt without a scorer."""
    if prompt.scorer is None or not prompt.answers:
        return {}
    answer = after_thinking(text)
    if prompt.scorer == "needle":
        return {
            "exact": float(answer.strip().strip(".").strip() in prompt.answers),
            "contains": float(all(value.casefold() in answer.casefold() for value in prompt.answers)),
        }
    return {"correct": float(_is_right(prompt.scorer, answer, prompt.answers))}


def _is_right(scorer: str, text: str, answers: tuple[str, ...]) -> bool:
    if scorer == "number":
        found = boxed(text)
        numbers = _NUMBER.findall(text if found is None else found)
        return bool(numbers) and any(_as_number(numbers[-1]) == _as_number(answer) for answer in answers)
    if scorer == "boxed":
        found = boxed(text)
        return found is not None and _folded(found) in {_folded(answer) for answer in answers}
    assert scorer == "letter", scorer
    letters = _LETTER.findall(text)
    return bool(letters) and letters[-1] in answers


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...} of a text, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def _as_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def _folded(formula: str) -> str:
    """A formula without what does not change it: spaces, sizes of brackets, dollar signs."""
    for word in ("\\left", "\\right", "\\!", "\\,", "\\ ", "$", "\\dfrac", "\\tfrac"):
        formula = formula.replace(word, "\\frac" if word.endswith("frac") else "")
    return re.sub(r"\s+", "", formula).rstrip(".")
