"""The loop of a rival in its own process: a line of JSON in, a line of JSON out. Standard library only.

What the rival's libraries print goes to stderr. A failure is an answer too: its last line, as the rival said it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[str, Sequence[int], int], dict[str, Any]]
"""(how, prompt ids, number of new tokens) -> ids, num_steps (after the prefill), prefill_s, decode_s."""


def serve(start: Callable[[dict[str, Any]], tuple[Generate, dict[str, Any]]]) -> None:
    """Answer requests until stdin ends. `start` gets the settings and gives the way to generate, and facts to tell."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    generate = _answer(answers, lambda: start(json.loads(sys.argv[1])))
    if generate is None:
        raise SystemExit(1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = generate(asked["how"], asked["prompt_ids"], asked["max_new_tokens"])
        except Exception as error:  # whatever the rival raises is what is reported
            answer = {"error": said(error)}
        answers.write(json.dumps(answer) + "\n")


def _answer(answers: Any, start: Callable[[], tuple[Generate, dict[str, Any]]]) -> Generate | None:
    try:
        generate, facts = start()
    except Exception as error:
        answers.write(json.dumps({"error": said(error)}) + "\n")
        return None
    answers.write(json.dumps({"ready": facts}) + "\n")
    return generate


def said(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class ForwardTimes:
    """Counts the forward passes of a torch module and remembers when the first one ended."""

    def __init__(self, module: Any) -> None:
        self.num_passes, self.first_end = 0, 0.0
        module.register_forward_hook(self._after)

    def _after(self, _module: Any, _given: Any, _result: Any) -> None:
        self.num_passes += 1
        if self.num_passes == 1:
            self.first_end = time.perf_counter()

    def timed(self, run: Callable[[], Sequence[int]]) -> dict[str, Any]:
        """What `run` gives, its passes after the first, and its time up to the first pass's end and after it."""
        self.num_passes = 0
        begin = time.perf_counter()
        ids = run()
        end = time.perf_counter()
        return {
            "ids": list(ids),
            "num_steps": self.num_passes - 1,
            "prefill_s": self.first_end - begin,
            "decode_s": end - self.first_end,
        }
