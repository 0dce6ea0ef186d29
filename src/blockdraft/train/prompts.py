"""Where prompts come from: JSONL files, data sets of the hub, turns that the target wrote; what of them is used.

Owns the mapping of every source to conversations, what counts as the same prompt, and the split that keeps prompts out
of training. Knows no target; `datasets` is imported only where a data set of the hub is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.errors import ConfigError, RequestError, UnavailableError, shown
from blockdraft.text import check_messages, parse_chat_jsonl
from blockdraft.train.sections import HubRecipe

__all__ = ["Conversation", "Selection", "Tally", "conversation", "read_file", "read_hub", "row_messages", "select"]

Message = dict[str, str]
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
_NO_DATASETS = "data sets of the hub need an extra: pip install 'blockdraft[train]'"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt: messages of which the last one is a user's. `suffix` is what its source put after that one."""

    messages: tuple[Message, ...]
    source: str
    suffix: str = ""

    def user_texts(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def segments(self, *, every_turn: bool) -> list[list[Message]]:
        """The messages given before each answer of the target.

        With `every_turn` every assistant message that answers a user is left out, to be written by the target; without
        it they all are given, and only the last user message is answered.
        """
        if not every_turn:
            return [list(self.messages)]
        found: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] == "assistant" and any(given["role"] == "user" for given in found[-1]):
                found.append([])
            else:
                found[-1].append(message)
        return found


@dataclass(slots=True)
class Tally:
    """Why prompts were not used, counted; the first case of every reason in words."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str = "") -> None:
        """One more prompt that was not used for this reason."""
        self.counts[reason] += 1
        if example:
            self.examples.setdefault(reason, example)

    def merge(self, counts: Mapping[str, int], examples: Mapping[str, str]) -> None:
        """Another tally's counts; its examples where there is none yet."""
        self.counts.update(counts)
        for reason, example in examples.items():
            self.examples.setdefault(reason, example)


def conversation(messages: Sequence[Mapping[str, Any]], source: str, suffix: str = "") -> Conversation:
    """The conversation up to its last user message. Raises RequestError where there is none, or no sense in it."""
    plain = check_messages(messages)
    while plain and plain[-1]["role"] == "assistant":
        plain.pop()
    if not plain or plain[-1]["role"] != "user":
        raise RequestError("the conversation has no user message to be answered at its end")
    if suffix:
        plain[-1] = {"role": "user", "content": plain[-1]["content"] + suffix}
    return Conversation(tuple(plain), source, suffix)


def read_file(name: str) -> list[Conversation]:
    """The prompts of a JSONL file. Raises RequestError, naming the line, for one that cannot be meant."""
    try:
        # Not splitlines(): JSON strings may hold other line separators as they are.
        lines = Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts.files: {shown(name)} cannot be read ({error}); name JSONL files") from None
    try:
        found = parse_chat_jsonl(lines)
    except RequestError as error:
        raise RequestError(f"{name}: {error}") from None
    prompts = []
    for prompt in found:
        try:
            prompts.append(conversation(prompt.as_messages(), Path(name).name))
        except RequestError as error:
            raise RequestError(f"{name}: line {prompt.line}: {error}") from None
    return prompts


# ---- data sets of the hub --------------------------------------------------------------------------------------------
def read_hub(source: HubRecipe, tally: Tally) -> list[Conversation]:
    """The prompts of a data set of the hub, or of a local folder of data files.

    A row that cannot be meant is counted as refused; a data set of which no row is of use is an error.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise UnavailableError(_NO_DATASETS) from None
    name = f"{source.dataset}:{source.split}"
    try:
        rows: Any = load_dataset(source.dataset, source.config or None, split=source.split, streaming=source.limit > 0)
        taken = list(itertools.islice(rows, source.limit or None))
    except Exception as error:  # the library and the hub's client raise anything here
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnavailableError(
            f"data set {shown(name)} could not be read ({reason}); check prompts.hub and the network"
        ) from None
    return hub_conversations(taken, source, name, tally)


def hub_conversations(
    rows: Iterable[Mapping[str, Any]], source: HubRecipe, name: str, tally: Tally
) -> list[Conversation]:
    """The rows of a data set as conversations."""
    prompts: list[Conversation] = []
    refusal = "it is empty"
    for number, row in enumerate(rows):
        if source.field not in row:
            raise ConfigError(
                f"data set {shown(name)} has no column {source.field!r}; prompts.hub.field is one of {', '.join(row)}"
            )
        try:
            prompts.append(conversation(row_messages(row[source.field]), name, source.suffix))
        except RequestError as error:
            refusal = f"{name} row {number}: {error}"
            tally.add("refused_rows", refusal)
    if not prompts:
        raise RequestError(f"data set {shown(name)} gives no prompt: {refusal}")
    return prompts


def row_messages(value: Any) -> list[Message]:
    """The messages in a column's value: a text, or a list of {role, content} or {from, value}."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list | tuple):
        raise RequestError(f"a prompt is a text or a list of messages, not {type(value).__name__}")
    messages = []
    for number, entry in enumerate(value):
        where = f"message {number}"
        if not isinstance(entry, Mapping):
            raise RequestError(f"{where} must be an object, not {type(entry).__name__}")
        keys = ("role", "content") if "role" in entry else ("from", "value")
        role, content = entry.get(keys[0]), entry.get(keys[1])
        if role not in _ROLES:
            raise RequestError(f"{where}: role {role!r} given, allowed are {', '.join(_ROLES)}")
        if not isinstance(content, str):
            raise RequestError(f"{where}: {keys[1]} must be text, not {type(content).__name__}")
        messages.append({"role": _ROLES[role], "content": content})
    return messages


# ---- what is used ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Selection:
    """Prompts to be answered, and prompts kept out of training with the ids they are asked with."""

    train: list[Conversation]
    held_out: list[tuple[Conversation, list[int]]]


def select(
    conversations: Sequence[Conversation],
    *,
    num_held_out: int,
    every_turn: bool,
    exclude: Sequence[str],
    ids_of: Callable[[Conversation], list[int] | None],
    tally: Tally,
) -> Selection:
    """Every prompt once, without those in `exclude`; `num_held_out` of them are kept out of training.

    Prompts that begin with the same user message stand on the same side. The side is decided by a hash of that message
    alone, so new prompts never bring one that was trained on among the held-out ones. `ids_of` gives a prompt's ids,
    None for one that cannot be evaluated.
    """
    unwanted = {_folded(text) for text in exclude}
    once: dict[str, Conversation] = {}
    for one in conversations:
        if unwanted and not unwanted.isdisjoint(_spellings(one)):
            tally.add("excluded")
        elif (key := _key(one, every_turn)) in once:
            tally.add("duplicate")
        else:
            once[key] = one
    held_out: dict[str, tuple[Conversation, list[int]]] = {}
    for one in sorted(once.values(), key=lambda one: (_hash(_opening(one)), len(one.messages))):
        if len(held_out) == num_held_out:
            break
        if _opening(one) in held_out:
            continue
        asked = Conversation(tuple(one.segments(every_turn=every_turn)[0]), one.source, one.suffix)
        ids = ids_of(asked)
        if ids is not None:
            held_out[_opening(one)] = asked, ids
    train = [one for one in once.values() if _opening(one) not in held_out]
    for _ in range(len(once) - len(train)):
        tally.add("held_out")
    if len(held_out) < num_held_out or not train:
        raise ConfigError(
            f"prompts.held_out is {num_held_out}, and of {len(once)} different prompts {len(held_out)} can be kept out "
            f"and {len(train)} are left to train on; lower it, or give more prompts"
        )
    return Selection(train, list(held_out.values()))


def _key(one: Conversation, every_turn: bool) -> str:
    """Equal for prompts of which the target would be asked the same."""
    given = [(m["role"], _folded(m["content"])) for m in one.messages if not (every_turn and m["role"] == "assistant")]
    return json.dumps(given)


def _opening(one: Conversation) -> str:
    return _folded(one.user_texts()[0])


def _spellings(one: Conversation) -> set[str]:
    """Every user message as it is asked, and as it was before the source's suffix."""
    texts = one.user_texts()
    return {_folded(text) for text in texts} | {_folded(text.removesuffix(one.suffix)) for text in texts if one.suffix}


def _folded(text: str) -> str:
    """A text without what does not make it another prompt: spaces and capitals."""
    return " ".join(text.split()).casefold()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
