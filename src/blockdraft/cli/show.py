"""What the command line shows: text as it is committed, one line of numbers, a comparison, JSON.

Owns wording and colours. Knows completions, no options.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from blockdraft.engine import Completion, Engine, Request

COLOURS = {"first": "36", "accepted": "32", "bonus": "33"}
MEANINGS = {"accepted": "accepted proposals", "bonus": "the target's own tokens", "first": "first token"}
LEGEND = ", ".join(f"\x1b[{COLOURS[kind]}m{meaning}\x1b[0m" for kind, meaning in MEANINGS.items())


def note(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr, flush=True)


class FetchProgress:
    """What a first-time fetch is doing: a bar on a terminal, a line for each stage elsewhere."""

    def __init__(self) -> None:
        self._line = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, line: str, done: float) -> None:
        if sys.stderr.isatty():
            self._draw(line, done)
        elif line != self._line:
            note(line)
        self._line = line

    def _draw(self, line: str, done: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        if self._bar is None:
            columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(line, total=1.0)
        assert self._task is not None
        self._bar.update(self._task, completed=done, description=line)
        if done >= 1.0:
            self.close()

    def close(self) -> None:
        """Take the bar off the terminal, finished or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def watch(engine: Engine, request: Request, *, explain: bool) -> Completion:
    """Print the text as it is committed, then one line of numbers on stderr. `explain`: name the colours first."""
    ticket = engine.submit(request)
    speculates = engine.draft is not None and request.speculate is not False
    coloured = speculates and has_colours(sys.stdout)
    if coloured and explain and has_colours(sys.stderr):
        note(LEGEND)
    for events in engine.follow(ticket):
        for event in events:
            if event.text:
                print(painted(event.text, event.kind) if coloured else event.text, end="", flush=True)
    print(flush=True)
    completion = ticket.completion
    assert completion is not None
    note(f"[{_summary(completion, is_plain_wanted=request.speculate is False)}]")
    return completion


def has_colours(stream: TextIO) -> bool:
    """Whether coloured text is wanted there: a terminal, and nothing in the environment against it."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, kind: str) -> str:
    """The text in its colour, line by line: no colour reaches over a line end."""
    return "\n".join(f"\x1b[{COLOURS[kind]}m{part}\x1b[0m" if part.strip() else part for part in text.split("\n"))


def _summary(completion: Completion, *, is_plain_wanted: bool) -> str:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    stats, speculation = completion.stats, completion.speculation
    parts = [f"{stats.num_emitted_tokens} tokens in {stats.num_steps} steps"]
    if speculation.enabled or stats.num_draft_tokens:
        per_step = committed_acceptance_length([stats])
        if per_step is not None:
            parts[0] += f", {per_step:.2f} a step"
        used = f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} proposals accepted"
        parts.append(used if speculation.width is None else f"{used} (width {speculation.width})")
    speed = decode_tok_per_s([stats])
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    parts.append(f"prefill {stats.prefill_s * 1000:.0f} ms")
    if not speculation.enabled and not is_plain_wanted:
        parts.append(f"no draft: {speculation.reason}")
    if completion.finish_reason == "length":
        parts.append("length limit")
    return "; ".join(parts)


def compare_ways(engine: Engine, requests: list[Request]) -> None:
    from blockdraft.stats import committed_acceptance_length, decode_tok_per_s

    plain, drafted = [], []
    for number, request in enumerate(requests):
        note("--- plain decoding")
        plain.append(watch(engine, replace(request, speculate=False, width=None, min_confidence=0.0), explain=False))
        note("--- with the draft")
        drafted.append(watch(engine, replace(request, speculate=True), explain=number == 0))
    same = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    is_greedy = requests[0].sampling.is_greedy
    if not is_greedy:
        verdict = "two samples of one distribution"
    elif same == len(requests):
        verdict = "the same text"
    else:
        verdict = f"the same text for {same} of {len(requests)} prompts"
    rates = [decode_tok_per_s([c.stats for c in side]) for side in (plain, drafted)]
    steps = committed_acceptance_length([c.stats for c in drafted])
    if steps is not None and rates[0] and rates[1]:
        ratio = rates[1] / rates[0]
        verdict += f"; {steps:.2f} tokens a step; {rates[0]:.1f} tok/s plain, {rates[1]:.1f} with the draft"
        verdict += f" ({ratio:.2f}x)"
    note(f"--- {verdict}")
    if is_greedy and same < len(requests):
        note("    greedy texts part where two tokens are equal up to rounding; --dtype float64 is the judge")


def as_json_object(completion: Completion) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop": completion.stop,
        "stats": completion.stats.to_json(),
        "speculation": {
            "enabled": completion.speculation.enabled,
            "width": completion.speculation.width,
            "reason": completion.speculation.reason,
        },
    }
    if any(event.logprobs is not None for event in completion.events):
        shown["logprobs"] = [
            {
                "token_id": event.token_id,
                "kind": event.kind,
                "logprob": event.logprobs.logprob,
                "top": [list(pair) for pair in event.logprobs.top],
            }
            for event in completion.events
            if event.logprobs is not None
        ]
    return shown
