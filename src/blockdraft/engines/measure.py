"""What a running engine is asked over HTTP: is it ready, what does it answer, how much does it accept.

Each engine counts acceptance somewhere else; what comes out is one number whose formula is named.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.engines.rules import How
from blockdraft.errors import UnavailableError, shown

_QUICK_S = 10.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the engine is ours: no proxy between
_COUNTER = re.compile(r"^(\w+:spec_decode_num_(?:drafts|accepted_tokens|draft_tokens)(?:_total)?)(?:\{[^}]*\})? (\S+)$")
_REQUEST_STATS = re.compile(r"RequestStats\(.*?output_tokens=(\d+).*?acc_len=([\d.]+|None)")

# Worked sums and short programs: what every drafter was trained on. Written for this purpose.
PROMPTS = (
    "A gardener plants 14 rows of 23 tulips and 6 rows of 18 daffodils. How many bulbs are that? Show each step.",
    "Write a Python function that returns the prime factors of an integer, smallest first, with a short docstring.",
    "A train covers 276 km in 3 hours. At that speed, how far does it travel in 7.5 hours? Show each step.",
    "Write a Python class for a stack of integers with push, pop and the largest value in constant time.",
    "A shop lowers a price of 85 euros by 20 percent, then raises it by 15 percent. What does it cost? Show each step.",
    "Explain in five numbered steps how to make a pot of tea.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Tokens per step over all probes. `formula` names the definition."""

    length: float
    formula: str
    num_steps: int
    num_accepted: int


class Client:
    """A running engine at one address."""

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        self._base = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def is_ready(self, path: str) -> bool:
        """Whether a GET answers 200; anything else, a refused connection included, is not ready."""
        try:
            with _OPENER.open(
                urllib.request.Request(self._base + path, headers=self._headers), timeout=_QUICK_S
            ) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError, ValueError):
            return False

    def model(self) -> str:
        """The name under which the engine serves its target."""
        body = json.loads(self._get("/v1/models"))
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UnavailableError(f"{self._base}/v1/models names no model: {shown(body)}") from None

    def metrics(self) -> dict[str, float]:
        """Sums of the speculation counters of /metrics, over all their labels, `_total` cut off."""
        sums: dict[str, float] = {}
        for line in self._get("/metrics").splitlines():
            found = _COUNTER.match(line)
            if found is not None:
                name = found[1].partition(":")[2].removesuffix("_total")
                sums[name] = sums.get(name, 0.0) + float(found[2])
        return sums

    def chat(self, model: str, prompt: str, *, num_tokens: int, timeout_s: float) -> Mapping[str, Any]:
        """The whole reply to one prompt, greedy."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": num_tokens,
            "return_meta_info": True,  # SGLang's own; the others ignore it
        }
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self._base}/v1/chat/completions", data=data, headers=self._headers)
        reply = json.loads(self._open(request, timeout_s))
        if not isinstance(reply, dict) or not reply.get("choices"):
            raise UnavailableError(f"{self._base}/v1/chat/completions answered without a choice: {shown(reply)}")
        return reply

    def _get(self, path: str) -> str:
        return self._open(urllib.request.Request(self._base + path, headers=self._headers), _QUICK_S)

    def _open(self, request: urllib.request.Request, timeout_s: float) -> str:
        try:
            with _OPENER.open(request, timeout=timeout_s) as reply:
                return str(reply.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            reason = shown(error.read(400).decode("utf-8", "replace"), 160)
            raise UnavailableError(f"{request.full_url} answered {error.code}: {reason}") from None
        except (urllib.error.URLError, OSError) as error:
            raise UnavailableError(f"{request.full_url} did not answer: {shown(error)}") from None


def probe(
    client: Client,
    how: How,
    *,
    num_prompts: int,
    num_tokens: int,
    timeout_s: float,
    settle_s: float,
    log: Sequence[str],
) -> Acceptance:
    """Send prompts one after the other and say how much was accepted.

    `log` is the engine's output so far, which goes on growing; counters and log may lag by `settle_s`. Raises
    UnavailableError if the engine does not answer, or answers without a trace of speculation.
    """
    model = client.model()
    before = client.metrics() if how == "counters" else {}
    start = len(log)
    replies = [
        client.chat(model, prompt, num_tokens=num_tokens, timeout_s=timeout_s) for prompt in PROMPTS[:num_prompts]
    ]
    if how == "replies":
        return from_replies(replies)
    time.sleep(settle_s)
    if how == "counters":
        return from_counters(before, client.metrics())
    return from_log(log[start:])


def from_replies(replies: Sequence[Mapping[str, Any]]) -> Acceptance:
    """SGLang: steps and accepted proposals of each reply, in its meta_info."""
    steps = accepted = 0
    for reply in replies:
        choice = reply["choices"][0]
        meta = choice.get("meta_info") or reply.get("meta_info") or {}
        steps += int(meta.get("spec_verify_ct") or 0)
        accepted += int(meta.get("spec_num_correct_drafts") or 0)
    return _pooled(steps, accepted)


def from_counters(before: Mapping[str, float], after: Mapping[str, float]) -> Acceptance:
    """vLLM: what its counters grew by."""
    steps = after.get("spec_decode_num_drafts", 0.0) - before.get("spec_decode_num_drafts", 0.0)
    accepted = after.get("spec_decode_num_accepted_tokens", 0.0) - before.get("spec_decode_num_accepted_tokens", 0.0)
    return _pooled(round(steps), round(accepted))


def from_log(lines: Sequence[str]) -> Acceptance:
    """TokenSpeed: output tokens C of each request and its (C - 1) / S, rounded to two digits."""
    steps = tokens = 0.0
    for line in lines:
        found = _REQUEST_STATS.search(line)
        if found is not None and found[2] != "None" and float(found[2]) > 0:
            emitted = int(found[1]) - 1
            tokens += emitted
            steps += emitted / float(found[2])
    if steps <= 0:
        raise UnavailableError(_NO_TRACE)
    return Acceptance(
        length=tokens / steps,
        formula="Σ(C-1)/ΣS",
        num_steps=round(steps),
        num_accepted=round(tokens - steps),
    )


_NO_TRACE = (
    "the probes were answered without a single step of the draft: speculation is off, or its counters are elsewhere; "
    "look for its start in the log above"
)


def _pooled(steps: int, accepted: int) -> Acceptance:
    if steps <= 0:
        raise UnavailableError(_NO_TRACE)
    return Acceptance(length=1 + accepted / steps, formula="1 + ΣA/ΣS", num_steps=steps, num_accepted=accepted)
