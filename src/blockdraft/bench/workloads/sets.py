"""The rows of every data set as prompts. Owns ids, turns, answers and tags; the wording is formats.py's."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from blockdraft.bench.system import Prompt
from blockdraft.bench.workloads.formats import Format
from blockdraft.bench.workloads.sources import Row, need, need_text, refuse_placeholders
from blockdraft.errors import ConfigError

__all__ = ["MAKERS", "make_prompts"]

_NUM_SHOTS = 5
_MBPP_TEST = range(11, 511)  # task ids of the test split
_LETTERS = "ABCD"


def make_prompts(dataset: str, rows: Sequence[Row], wording: Format, *, seed: int) -> list[Prompt]:
    """All prompts of a set, in the order of its file."""
    prompts = MAKERS[dataset](rows, wording, seed)
    ids = [prompt.id for prompt in prompts]
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{dataset}: two rows have the same id; is the file put together of two?")
    return prompts


def _one(dataset: str, name: object, wording: Format, fields: Mapping[str, Any], **more: Any) -> Prompt:
    """A prompt of one turn."""
    return Prompt(
        id=f"{dataset}-{name}",
        dataset=dataset,
        turns=(wording.template.format(**fields),),
        system=wording.system,
        is_raw=wording.is_raw,
        stop=wording.stop,
        **more,
    )


def _gsm8k(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    texts = [need_text(row, "question", "gsm8k", i) for i, row in enumerate(rows)]
    answers = [need_text(row, "answer", "gsm8k", i) for i, row in enumerate(rows)]
    shots, first = "", 0
    if "{shots}" in wording.template:
        first = _NUM_SHOTS
        pairs = zip(texts[:first], answers[:first], strict=True)
        shots = "".join(f"Question: {q}\nAnswer: {a}\n\n" for q, a in pairs)
    return [
        _one(
            "gsm8k",
            i,
            wording,
            {"question": texts[i], "shots": shots},
            answers=(answers[i].rpartition("####")[2].strip().replace(",", ""),),
            scorer="number",
        )
        for i in range(first, len(rows))
    ]


def _math500(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    prompts = []
    for i, row in enumerate(rows):
        tags = {"level": row["level"]} if isinstance(row.get("level"), int) else {}
        fields = {"problem": need_text(row, "problem", "math500", i)}
        answers = (need_text(row, "answer", "math500", i),)
        prompts.append(_one("math500", i, wording, fields, answers=answers, scorer="boxed", tags=tags))
    return prompts


def _humaneval(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    return [
        _one(
            "humaneval",
            str(need_text(row, "task_id", "humaneval", i)).rpartition("/")[2],
            wording,
            {"prompt": need_text(row, "prompt", "humaneval", i)},
        )
        for i, row in enumerate(rows)
    ]


def _mbpp(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    prompts = []
    for i, row in enumerate(rows):
        number = need(row, "task_id", "mbpp", i)
        if number not in _MBPP_TEST:
            continue  # the file holds all splits
        text = need_text(row, "prompt" if "prompt" in row else "text", "mbpp", i)
        tests = "\n".join(need(row, "test_list", "mbpp", i))
        prompts.append(_one("mbpp", number, wording, {"prompt": text, "tests": tests}))
    return prompts


def _aime26(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    return [
        _one(
            "aime26",
            i,
            wording,
            {"problem": need_text(row, "problem", "aime26", i)},
            answers=(str(need(row, "answer", "aime26", i)).strip(),),
            scorer="number",
        )
        for i, row in enumerate(rows)
    ]


def _gpqa(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
    """Options in an order of their own for every row, which the seed decides; nothing of a row may be kept."""
    prompts = []
    names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    for i, row in enumerate(rows):
        options = [need_text(row, name, "gpqa", i).strip() for name in names]
        order = random.Random(f"{seed}:gpqa:{i}").sample(range(4), 4)
        fields = {letter: options[at] for letter, at in zip(_LETTERS, order, strict=True)}
        fields["question"] = need_text(row, "Question", "gpqa", i).strip()
        answer = (_LETTERS[order.index(0)],)
        prompts.append(_one("gpqa", i, wording, fields, answers=answer, scorer="letter", is_private=True))
    return prompts


def _turned(dataset: str, key: str) -> Callable[[Sequence[Row], Format, int], list[Prompt]]:
    """Of sets whose rows are user turns: `turns`, `messages` without replies, or one `prompt`."""

    def make(rows: Sequence[Row], wording: Format, seed: int) -> list[Prompt]:
        prompts = []
        for i, row in enumerate(rows):
            turns, system = _turns(dataset, row, i)
            if dataset == "speedbench":
                refuse_placeholders(turns, i)
            name = row.get(key, i)
            if not isinstance(name, str | int) or isinstance(name, bool):
                raise ConfigError(f"{dataset} row {i}: {key} must be a text or a number")
            answers = row.get("answers", [])
            prompts.append(
                Prompt(
                    id=f"{dataset}-{_slug(name)}",
                    dataset=dataset,
                    turns=tuple(wording.template.format(turn=turn) for turn in turns[: wording.num_turns]),
                    system=system,
                    answers=tuple(map(str, answers)),
                    scorer="number" if answers else None,
                    tags={"category": row["category"]} if isinstance(row.get("category"), str) else {},
                )
            )
        return prompts

    return make


def _slug(name: str | int) -> str:
    return re.sub(r"\s+", "-", str(name).strip())


def _turns(dataset: str, row: Row, number: int) -> tuple[list[str], str | None]:
    """The user turns of a row, and its system message."""
    system: Any = None
    found: Any = []
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise ConfigError(f"{dataset} row {number}: messages must be a list of objects with role and content")
        for message in messages:
            if message.get("role") == "system" and not found and system is None:
                system = message.get("content")
            elif message.get("role") == "user":
                found.append(message.get("content"))
            else:
                raise ConfigError(
                    f"{dataset} row {number}: messages may hold a system message first and user turns; replies are live"
                )
    elif "turns" in row or ("prompt" in row and isinstance(row["prompt"], list)):
        found = row["turns"] if "turns" in row else row["prompt"]
    else:
        found = [need(row, "prompt", dataset, number)]
    is_text = isinstance(found, list | tuple) and all(isinstance(turn, str) and turn.strip() for turn in found)
    if not is_text or not found or not isinstance(system, str | None):
        raise ConfigError(f"{dataset} row {number}: every turn must be a text that is not empty")
    return list(found), system


MAKERS: Mapping[str, Callable[[Sequence[Row], Format, int], list[Prompt]]] = {
    "gsm8k": _gsm8k,
    "math500": _math500,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
    "mtbench": _turned("mtbench", "question_id"),
    "specbench": _turned("specbench", "question_id"),
    "aime26": _aime26,
    "gpqa": _gpqa,
    "speedbench": _turned("speedbench", "question_id"),
    "own": _turned("own", "id"),
    "custom": _turned("custom", "id"),
}
