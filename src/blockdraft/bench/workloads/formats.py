"""How a row of a data set becomes a prompt: the formats of public harnesses, by name, each with its hash.

Owns the wording around a row. The same rows under two formats give acceptance lengths that differ by more than two
drafts do, so every result names its format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.errors import RequestError, shown

__all__ = ["FORMATS", "Format", "find_format"]


@dataclass(frozen=True, slots=True)
class Format:
    """One wording. `template` has {fields} of a row (or of what sets.py makes of it); `used_by` says who asks so.

    `system` is a system message, `stop` ends the text, `is_raw` continues it without a chat template. `num_turns` None
    asks all turns of a row.
    """

    name: str
    template: str
    used_by: str
    system: str | None = None
    stop: tuple[str, ...] = ()
    is_raw: bool = False
    num_turns: int | None = None

    @property
    def sha256(self) -> str:
        """Short hash of everything that changes what is asked."""
        parts = (self.template, self.system or "", "\n".join(self.stop), str(self.is_raw), str(self.num_turns))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_OPTIONS = "{question}\n\nA) {A}\nB) {B}\nC) {C}\nD) {D}"

# By data set, the default first.
FORMATS: Mapping[str, tuple[Format, ...]] = {
    "gsm8k": (
        Format("boxed", "{question}" + _BOXED, "z-lab, SpecForge benchmark"),
        Format("bare", "{question}", "AIPerf"),
        Format(
            "five-shot",
            "{shots}Question: {question}\nAnswer:",
            "SpecForge bench_eagle3; here the five rows of the shots are not asked",
            stop=("Question",),
            is_raw=True,
        ),
    ),
    "math500": (
        Format("boxed", "{problem}" + _BOXED, "z-lab, evalscope"),
        Format("bare", "{problem}", "AIPerf"),
    ),
    "humaneval": (
        Format(
            "fenced",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{prompt}\n```",
            "z-lab",
        ),
        Format("bare", "{prompt}", "SpecForge, AIPerf"),
    ),
    "mbpp": (
        Format("bare", "{prompt}", "z-lab"),
        Format(
            "tests",
            "You are an expert Python programmer, and here is your task: {prompt} Your code should pass these tests:"
            "\n\n{tests}\n[BEGIN]\n",
            "SpecForge bench_eagle3",
            stop=("[DONE]",),
        ),
    ),
    "mtbench": (
        Format("turns", "{turn}", "FastChat: the second turn follows the live first reply"),
        Format("first-turn", "{turn}", "z-lab and SpecForge against servers", num_turns=1),
    ),
    "specbench": (
        Format("turns", "{turn}", "Spec-Bench"),
        Format("first-turn", "{turn}", "harnesses that ask one turn", num_turns=1),
    ),
    "aime26": (
        Format("boxed", "{problem}" + _BOXED, "the boxed form of the other sets"),
        Format(
            "matharena",
            "Put your final answer within \\boxed{{}}. The answer is an integer between 0 and 999 inclusive."
            "\n\n{problem}",
            "MathArena",
        ),
        Format(
            "evalscope",
            "Solve the following math problem step by step. Put your answer inside \\boxed{{}}.\n\n{problem}\n\n"
            "Remember to put your answer inside \\boxed{{}}.",
            "evalscope, TokenSpeed CI",
        ),
    ),
    "gpqa": (
        Format(
            "simple-evals",
            "Answer the following multiple choice question. The last line of your response should be of the form "
            "'Answer: $LETTER' (without quotes), where LETTER is one of ABCD. Think step by step before answering."
            "\n\n" + _OPTIONS,
            "simple-evals",
        ),
        Format(
            "evalscope",
            "Answer the following multiple choice question. The last line of your response should be of the form "
            "'ANSWER: [LETTER]', where [LETTER] is one of A, B, C, D. Think step by step before answering."
            "\n\n" + _OPTIONS,
            "evalscope",
        ),
    ),
    "speedbench": (
        Format("turns", "{turn}", "SPEED-Bench: successive user turns with live replies"),
        Format("first-turn", "{turn}", "vLLM and SGLang benchmark clients", num_turns=1),
    ),
    "own": (Format("turns", "{turn}", "blockdraft"),),
    "custom": (Format("turns", "{turn}", "blockdraft"),),
}


def find_format(dataset: str, name: str | None) -> Format:
    """The format of that name, or the default of the data set."""
    known = FORMATS[dataset]
    if name is None:
        return known[0]
    for one in known:
        if one.name == name:
            return one
    raise RequestError(
        f"{dataset} has no prompt format {shown(name)}; there are {', '.join(one.name for one in known)}"
    )
