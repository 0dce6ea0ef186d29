"""`verify --url`: what can be told of a server from outside: greedy texts with and without the draft, seeds, cuts.

Owns these checks and the judgement of ties. What needs the target's distributions (acceptance against its closed form,
sampled tokens, entropy) cannot be asked of a server and is not examined here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.bench.servers.answer import Answer, AnswerError
from blockdraft.bench.servers.server import Server
from blockdraft.bench.system import Job, Load, Prompt, Sampling, Setting
from blockdraft.errors import UnavailableError
from blockdraft.verify.chance import rate_seen
from blockdraft.verify.report import Check, Report

__all__ = ["SIZES", "examine_server"]

SIZES = {"quick": (8, 48), "thorough": (40, 160)}  # prompts, tokens
GREEDY = Sampling(name="greedy", temperature=0.0)
HOT = Sampling(name="hot", temperature=1.0)
TIE_MARGIN = 0.5  # nats between the two most likely tokens that 16-bit rounding may turn round; in float32:
TIE_MARGIN_FLOAT32 = 1e-2
DIVERGED = "greedy text with the draft is not that without"
NOT_REPEATED = "the same seed gave another text"
IGNORED = "different seeds give the same text"
WRONG_LENGTH = "a text does not have the tokens that its limit leaves"
NOT_A_PREFIX = "a text with a smaller limit is not the beginning of that with a larger one"
WRONG_REASON = "the finish reason is not what ended the text"
BEYOND_STOP = "text goes on after, or still holds, a stop string"
NOT_SEEN = Check(
    name="sampled tokens",
    outcome="not run",
    finding="",
    reason="a server does not give the distributions that its tokens must follow; examine the pair in this process",
)


@dataclass(frozen=True, slots=True)
class _Asker:
    """Asks one thing at a time, in the way of a setting."""

    server: Server
    prompts: Sequence[Prompt]

    def setting(self, *, speculation: bool = True, sampling: Sampling = GREEDY, seed: int = 0) -> Setting:
        load = Load(concurrency=1)
        return Setting(speculation=speculation, width=None, sampling=sampling, max_new_tokens=1, load=load, seed=seed)

    def ask(self, prompt: Prompt, setting: Setting, num_tokens: int, **fields: Any) -> Answer:
        """Raises UnavailableError where the request breaks."""
        connection = self.server.connection(setting)
        path, body = connection.request(Job(prompt), setting, 0, (), num_tokens, self.server.effort)
        answer = Answer()
        try:
            connection.ask_alone(path, {**body, **fields}, answer)
        except AnswerError as error:
            raise UnavailableError(f"{connection.client.url}: a request broke: {error.words}: {error.detail}") from None
        return answer


def examine_server(server: Server, prompts: Sequence[Prompt], *, num_tokens: int, budget: str, seed: int) -> Report:
    """Raises UnavailableError where a request breaks; that is no finding about losslessness."""
    began = time.perf_counter()
    asker = _Asker(server, prompts)
    checks = (_greedy(asker, num_tokens), _seeds(asker, num_tokens, seed), _cuts(asker), NOT_SEEN)
    facts = server.facts
    subject = {"server": server.main.client.url, "engine": f"{facts.engine} {facts.version}", "model": facts.target}
    return Report(subject=subject, budget=budget, alpha=0.0, checks=checks, seconds=time.perf_counter() - began)


# ---- greedy texts ----------------------------------------------------------------------------------------------------
def _greedy(asker: _Asker, num_tokens: int) -> Check:
    name = "greedy identity"
    server = asker.server
    if server.plain is None and not server.main.adapter.can_switch:
        reason = f"{server.main.adapter.name} cannot leave out its draft for a request; name a server without one with "
        return Check(name=name, outcome="not run", finding="", reason=reason + "--plain-url")
    margin = TIE_MARGIN_FLOAT32 if server.main.facts.dtype == "float32" else TIE_MARGIN
    num, num_ties, wrong = 0, 0, []
    num_texts, proposals = len(asker.prompts), []
    for prompt in asker.prompts:
        fields = {"logprobs": True, "top_logprobs": 2}
        on, off = (asker.ask(prompt, asker.setting(speculation=x), num_tokens, **fields) for x in (True, False))
        num += off.num_emitted
        proposals.append(server.main.counts(on, asker.setting()).num_draft_tokens)
        if _said(on) == _said(off):
            continue
        at, gap = _divergence(on, off)
        if gap is not None and gap <= margin:
            num_ties += 1
        else:
            wrong.append({"prompt": prompt.id, "token": at, "gap": gap})
    told = [number for number in proposals if number is not None]
    if told and not any(told):
        return Check(name=name, outcome="not run", finding="", reason="no text had a proposal in it; is there a draft?")
    drafted = f"{sum(told)} proposals" if told else "whether the draft ran is not told"
    return Check(
        name=name,
        outcome="failed" if wrong else "passed",
        finding=f"{num_texts} texts, {num} tokens, {drafted}: {num_texts - num_ties - len(wrong)} equal, {num_ties} "
        f"part at a tie (the two likeliest tokens, at most {margin:g} apart), {len(wrong)} differ otherwise",
        reason=DIVERGED if wrong else None,
        power=f"would have seen a fault in {rate_seen(num):.2g} of the tokens with probability 0.9",
        figures={"num_texts": num_texts, "num_tokens": num, "num_ties": num_ties, "differing": wrong},
    )


def _said(answer: Answer) -> tuple[str, str, str | None]:
    return answer.reasoning, answer.text, answer.finish_reason


def _divergence(on: Answer, off: Answer) -> tuple[int | None, float | None]:
    """(token at which two texts part, gap of the plain one's two likeliest tokens if they are these two)."""
    for at, (one, two) in enumerate(zip(on.logprobs, off.logprobs, strict=False)):
        if _name(one) == _name(two):
            continue
        top = sorted(two.get("top_logprobs") or (), key=lambda entry: -float(entry["logprob"]))[:2]
        if len(top) < 2 or {_name(entry) for entry in top} != {_name(one), _name(two)}:
            return at, None
        return at, float(top[0]["logprob"]) - float(top[1]["logprob"])
    return None, None


def _name(entry: Any) -> str:
    return f"{entry.get('token')}{entry.get('bytes')}"


# ---- seeds -----------------------------------------------------------------------------------------------------------
def _seeds(asker: _Asker, num_tokens: int, seed: int) -> Check:
    """The same seed again after others, and as many seeds of one prompt."""
    numbers = range(seed, seed + len(asker.prompts))
    settings = [asker.setting(sampling=HOT, seed=number) for number in numbers]
    texts = [_said(asker.ask(p, how, num_tokens)) for p, how in zip(asker.prompts, settings, strict=True)]
    again = [_said(asker.ask(p, how, num_tokens)) for p, how in zip(asker.prompts, settings, strict=True)]
    num_again = sum(one == two for one, two in zip(texts, again, strict=True))
    different = {_said(asker.ask(asker.prompts[0], how, num_tokens)) for how in settings}
    faults = [NOT_REPEATED] if num_again < len(texts) else []
    if len(settings) > 1 and len(different) == 1:
        faults.append(IGNORED)
    return Check(
        name="seeds",
        outcome="failed" if faults else "passed",
        finding=f"{len(texts)} seeds: {num_again} repeated; {len(different)} different texts of {len(settings)} seeds",
        reason="; ".join(faults) or None,
        power=f"would have seen a fault in {rate_seen(len(texts)):.2g} of the texts with probability 0.9",
        figures={"num": len(texts), "num_repeated": num_again, "num_different": len(different)},
    )


# ---- stops and lengths -----------------------------------------------------------------------------------------------
def _cuts(asker: _Asker) -> Check:
    """Every length from 1 to past two blocks, and stop strings of the greedy text: it must be cut, not changed."""
    width = asker.server.main.facts.max_width or 8
    how, longest = asker.setting(), 2 * width + 2
    faults: dict[str, int] = {}
    num = 0
    for prompt in asker.prompts[:2]:
        whole = asker.ask(prompt, how, longest)
        answers = [(n, asker.ask(prompt, how, n)) for n in range(1, longest)]
        found = [fault for n, answer in answers if (fault := _length_fault(answer, whole, n))]
        for stop in _pieces(whole.text):
            answer = asker.ask(replace(prompt, stop=(stop,)), how, longest)
            num += 1
            if answer.text != whole.text[: whole.text.index(stop)] or stop in answer.text:
                found.append(BEYOND_STOP)
            elif answer.finish_reason != "stop":
                found.append(WRONG_REASON)
        num += len(answers)
        for fault in found:
            faults[fault] = faults.get(fault, 0) + 1
    return Check(
        name="stops and lengths",
        outcome="failed" if faults else "passed",
        finding=f"{num} requests with a limit or a stop string: {sum(faults.values())} wrong",
        reason="; ".join(sorted(faults)) or None,
        power=f"would have seen a fault in {rate_seen(num):.2g} of such requests with probability 0.9",
        figures={"num": num, "faults": faults},
    )


def _length_fault(answer: Answer, whole: Answer, limit: int) -> str | None:
    said, all_of_it = answer.reasoning + answer.text, whole.reasoning + whole.text
    if answer.num_emitted != min(limit, whole.num_emitted):
        return WRONG_LENGTH
    # The last token of a cut text may hold a part of a character, which is shown as its replacement.
    if not all_of_it.startswith(said.rstrip("\ufffd")):
        return NOT_A_PREFIX
    if (answer.finish_reason == "length") != (limit < whole.num_emitted or whole.finish_reason == "length"):
        return WRONG_REASON
    return None


def _pieces(text: str) -> list[str]:
    """Stop strings that a text holds: from its middle, of one and of several characters."""
    cuts = [(len(text) // 3, 1), (len(text) // 2, 4), (2 * len(text) // 3, 7)]
    return list(dict.fromkeys(piece for start, size in cuts if (piece := text[start : start + size]).strip()))
