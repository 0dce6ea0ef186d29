"""Greedy text with the draft is the target's own, up to ties; the proof of a tie; and the same of a batch.

Owns the comparison of two texts: only their first difference counts (what follows has another context), and there an
independent judge says whether the two tokens were equally likely up to rounding.

Letters: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from blockdraft.engine import Completion, Request
from blockdraft.verify.chance import rate_seen
from blockdraft.verify.report import Check
from blockdraft.verify.system import System

__all__ = ["Judge", "Verdict", "check_batches", "check_greedy", "compared", "first_divergence"]

DIVERGED = "greedy text with the draft is not the target's own"
BATCHED = "greedy text depends on the rows beside it"
NOT_GREEDY = "plain greedy text is not the target's most likely continuation"
MIN_MARGIN = 1e-4  # logits; the judge's own rounding stays below it
_MAX_MARGIN = {2: 0.5, 4: 1e-2, 8: 1e-3}  # by bytes of a number: more than this is never called rounding


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says of two next tokens: the gap of its top two, and whether the two tokens are those."""

    margin: float
    are_top_two: bool

    @classmethod
    def of(cls, logits_V: Tensor, first: int, second: int) -> Verdict:
        top = logits_V.double().topk(2)
        return cls(float(top.values[0] - top.values[1]), {first, second} == set(top.indices.tolist()))

    def is_tie(self, margin: float) -> bool:
        return self.are_top_two and self.margin <= margin


@dataclass(frozen=True, slots=True)
class Judge:
    """Who decides on ties: logits [T, V] over a text, the name to report, and the gap up to which tokens tie."""

    name: str
    logits: Callable[[Sequence[int]], Tensor]
    margin: float

    @classmethod
    def measured(
        cls,
        name: str,
        logits: Callable[[Sequence[int]], Tensor],
        system: System,
        ids: Sequence[int],
        itemsize: int,
    ) -> Judge:
        """A judge whose margin is twice what rounding moves a logit (99.9th percentile), measured on a text.

        The system's target is fed the text at several lengths, as blocks of several lengths would be, and compared with
        itself and with the judge. The margin is not below what the judge itself can tell, and never more than the
        number format (`itemsize` bytes) can explain: a target that computes something else is no tie.
        """
        whole_TV = system.logits(ids).cpu().double()
        moved = [(whole_TV - logits(ids).cpu().double()).abs().flatten()]
        for length in sorted({max(1, len(ids) // 4), max(1, len(ids) // 2), max(1, len(ids) - 1)}):
            moved.append((system.logits(ids[:length])[-1].cpu().double() - whole_TV[length - 1]).abs())
        rounding = max(float(one.sort().values[int(0.999 * (len(one) - 1))]) for one in moved)
        return cls(name, logits, min(max(MIN_MARGIN, 2.0 * rounding), _MAX_MARGIN[itemsize]))


def first_divergence(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one text goes on where the other ends."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def compared(
    prompt_ids: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    judge: Callable[[Sequence[int]], Tensor],
    margin: float,
) -> tuple[Literal["identical", "tie", "failure"], dict[str, Any]]:
    """The outcome for two greedy texts of one prompt, and what is known of the place where they part."""
    at = first_divergence(first, second)
    if at is None:
        return "identical", {"num_compared": len(first)}
    found: dict[str, Any] = {"num_compared": at + 1, "position": at}
    if at >= min(len(first), len(second)):
        return "failure", found
    verdict = Verdict.of(judge([*prompt_ids, *first[:at]])[-1], first[at], second[at])
    found |= {"margin": verdict.margin, "are_top_two": verdict.are_top_two}
    return "tie" if verdict.is_tie(margin) else "failure", found


def check_greedy(
    system: System, prompts: Sequence[Sequence[int]], widths: Sequence[int], num_tokens: int, judge: Judge
) -> tuple[list[Check], list[Completion]]:
    """Plain text against the judge's own argmax, and text of every width against plain text; the plain texts too."""
    plain = [_alone(system, prompt, num_tokens, None) for prompt in prompts]
    checks = [_plain_check(prompts, plain, judge)]
    for width in widths:
        outcomes, details, num = [], [], 0
        for prompt, one in zip(prompts, plain, strict=True):
            other = _alone(system, prompt, num_tokens, width)
            outcome, found = compared(prompt, one.token_ids, other.token_ids, judge.logits, judge.margin)
            if outcome == "identical" and one.finish_reason != other.finish_reason:
                outcome, found = "failure", {**found, "finish": [one.finish_reason, other.finish_reason]}
            outcomes.append(outcome)
            num += found["num_compared"]
            if outcome != "identical":
                details.append({"outcome": outcome, **found})
        checks.append(_verdict(f"greedy identity, width {width}", outcomes, details, num, judge, DIVERGED))
    return checks, plain


def check_batches(
    system: System, prompts: Sequence[Sequence[int]], num_tokens: int, alone: Sequence[Completion], judge: Judge
) -> Check:
    """All prompts at once, speculating and plain rows mixed, against `alone`, their plain texts one at a time."""
    requests = [
        Request(
            prompt_ids=prompt,
            max_new_tokens=num_tokens,
            speculate=speculate,
            width=system.max_width if speculate else None,
        )
        for prompt in prompts
        for speculate in (True, False)
    ]
    outcomes, details, num = [], [], 0
    for index, done in enumerate(system.run(requests)):
        outcome, found = compared(
            prompts[index // 2], alone[index // 2].token_ids, done.token_ids, judge.logits, judge.margin
        )
        outcomes.append(outcome)
        num += found["num_compared"]
        if outcome != "identical":
            details.append({"outcome": outcome, **found})
    return _verdict("batch invariance", outcomes, details, num, judge, BATCHED)


def _alone(system: System, prompt: Sequence[int], num_tokens: int, width: int | None) -> Completion:
    request = Request(prompt_ids=prompt, max_new_tokens=num_tokens, speculate=width is not None, width=width)
    [done] = system.run([request])
    return done


def _plain_check(prompts: Sequence[Sequence[int]], plain: Sequence[Completion], judge: Judge) -> Check:
    """Every plain token is the judge's most likely one, or ties with it."""
    num = num_ties = 0
    wrong: list[dict[str, Any]] = []
    for number, (prompt, done) in enumerate(zip(prompts, plain, strict=True)):
        logits_TV = judge.logits([*prompt, *done.token_ids[:-1]])[len(prompt) - 1 :].double()
        for at, token in enumerate(done.token_ids):
            num += 1
            gap = float(logits_TV[at].max() - logits_TV[at, token])
            if gap > judge.margin:
                wrong.append({"prompt": number, "position": at, "margin": gap})
                break  # what follows is a text of its own, and stays one
            num_ties += gap > 0.0
    return Check(
        name="plain greedy text",
        outcome="failed" if wrong else "passed",
        finding=f"{num} tokens against the argmax of {judge.name}: {num_ties} ties, {len(wrong)} texts that leave it",
        reason=NOT_GREEDY if wrong else None,
        power=_rate_words(num),
        figures={"num_tokens": num, "num_ties": num_ties, "wrong": wrong},
    )


def _verdict(
    name: str, outcomes: Sequence[str], details: list[dict[str, Any]], num: int, judge: Judge, reason: str
) -> Check:
    num_failures = outcomes.count("failure")
    finding = (
        f"{outcomes.count('identical')} of {len(outcomes)} texts identical, {outcomes.count('tie')} part at ties "
        f"(up to {judge.margin:.2g} by {judge.name}), {num_failures} part without one; {num} tokens"
    )
    return Check(
        name=name,
        outcome="failed" if num_failures else "passed",
        finding=finding,
        reason=reason if num_failures else None,
        power=_rate_words(num),
        figures={"num_tokens": num, "tie_margin": judge.margin, "divergences": details},
    )


def _rate_words(num: int) -> str:
    return f"would have seen a fault that changes {rate_seen(num):.2g} of the tokens with probability 0.9"
