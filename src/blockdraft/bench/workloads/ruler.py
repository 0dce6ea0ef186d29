"""Retrieval from long contexts: RULER's multi-key task over natural paragraphs, and an arm with long answers.

Owns how a context is put together. Differences to the generator of RULER, all on purpose: needles stand between
paragraphs, every sample begins at an offset of its own (so that no prefix is cached and no two contexts share one), no
paragraph comes twice in a context (repetition inflates acceptance), and the order of needles is each sample's own.
A needle answer takes a handful of steps, so that its acceptance is mostly that of the last step: the long arm asks for
a long answer about the same context.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockdraft.bench.system import Prompt
from blockdraft.bench.workloads.sources import need_text, read_rows
from blockdraft.errors import ConfigError, RequestError

__all__ = ["ARMS", "RULER_SHA256", "Haystack", "make_contexts", "read_haystack"]

NUM_KEYS = 4
SHORT_TOKENS, LONG_TOKENS = 128, 512
TEMPLATE_TOKENS = 64  # left for the chat template
ARMS = ("short", "long")
_NEEDLE = "One of the special magic numbers for {key} is: {value}."
_OPENING = "Some special magic numbers are hidden within the following text. Remember them: you will be asked for one."
_ASKED = {
    "short": "What is the special magic number for {key} mentioned in the text above? Answer with the number alone.",
    "long": (
        "What is the special magic number for {key} mentioned in the text above? Give the number, quote the paragraphs "
        "right before and after it, and then explain in at least 300 words what happens around that place in the text."
    ),
}
_ADJECTIVES = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow opal plain quiet rusty silent"
    " tidy urban vivid windy young zesty bright coarse distant early frosty golden humble"
)
_NOUNS = (
    "anchor basket candle dagger engine falcon garden hammer island jacket kettle ladder market needle orchard pencil"
    " quarry ribbon saddle tunnel umbrella valley window yard zipper bridge castle drawer feather goblet harbour"
    " lantern"
)
RULER_SHA256 = hashlib.sha256("\0".join((_NEEDLE, _OPENING, *_ASKED.values())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Haystack:
    """Paragraphs of a text in their order, each with its number of tokens."""

    paragraphs: tuple[str, ...]
    num_tokens: tuple[int, ...]
    sha256: str


def read_haystack(path: Path, num_tokens: Callable[[str], int | None]) -> Haystack:
    """The paragraphs of a .jsonl of {"text": ...}, or of a plain text whose paragraphs blank lines part."""
    if path.suffix in (".jsonl", ".json"):
        texts = [need_text(row, "text", str(path), i) for i, row in enumerate(read_rows(path))]
    else:
        try:
            content = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ConfigError(f"the haystack {path} cannot be read: {reason}") from None
        texts = [" ".join(part.split()) for part in content.replace("\r\n", "\n").split("\n\n")]
        texts = [text for text in texts if text]
    unique = list(dict.fromkeys(texts))
    counts = [num_tokens(text) for text in unique]
    if not unique or any(count is None for count in counts):
        raise ConfigError(f"the haystack {path} has no paragraphs, or this system cannot count tokens")
    digest = hashlib.sha256(json.dumps(unique).encode()).hexdigest()[:16]
    return Haystack(tuple(unique), tuple(count or 0 for count in counts), digest)


def make_contexts(
    haystack: Haystack,
    *,
    length: int,
    count: int,
    arm: str,
    seed: int,
    num_tokens: Callable[[str], int | None],
) -> list[Prompt]:
    """`count` samples whose prompt and answer take at most `length` tokens together, and nearly so many.

    Sample i begins at an offset of its own and hides the number that is asked for at its own depth, both spread evenly.
    The arms differ in the question and the length of the answer. Raises ConfigError where the text is too short.
    """
    room = length - LONG_TOKENS - TEMPLATE_TOKENS  # in both arms, so that they read the same contexts
    if room < 256:
        raise RequestError(f"a context of {length} tokens leaves no room for text; take at least 1k")
    num_paragraphs = len(haystack.paragraphs)
    if count > num_paragraphs:
        raise ConfigError(f"{count} samples need as many paragraphs to begin at; the haystack has {num_paragraphs}")
    depths = [(i + 0.5) / count for i in range(count)]
    random.Random(f"{seed}:depths:{length}").shuffle(depths)
    prompts = []
    for i, depth in enumerate(depths):
        source = random.Random(f"{seed}:{length}:{i}")
        sample = _Sample.draw(source, depth)
        begin = i * num_paragraphs // count
        text, num_used = _fitted(haystack, begin, room, sample, arm, num_tokens)
        prompts.append(
            Prompt(
                id=f"ruler-{length}-{arm}-{i}",
                dataset="ruler",
                cluster=f"ruler-{length}-{i}",
                turns=(text,),
                answers=(sample.values[sample.asked],),
                scorer="needle",
                max_new_tokens=SHORT_TOKENS if arm == "short" else LONG_TOKENS,
                tags={"length": length, "arm": arm, "depth": round(depth, 4), "num_paragraphs": num_used},
            )
        )
    return prompts


@dataclass(frozen=True, slots=True)
class _Sample:
    """Keys, their values, where each is hidden (a share of the text), and which one is asked for."""

    keys: tuple[str, ...]
    values: tuple[str, ...]
    depths: tuple[float, ...]
    asked: int

    @classmethod
    def draw(cls, source: random.Random, depth: float) -> _Sample:
        names = source.sample([f"{one}-{two}" for one in _ADJECTIVES.split() for two in _NOUNS.split()], NUM_KEYS)
        values = source.sample(range(1_000_000, 10_000_000), NUM_KEYS)
        asked = source.randrange(NUM_KEYS)
        depths = [source.random() for _ in range(NUM_KEYS)]
        depths[asked] = depth
        return cls(tuple(names), tuple(map(str, values)), tuple(depths), asked)

    def text(self, paragraphs: Sequence[str], arm: str) -> str:
        needles: dict[int, list[str]] = {}
        for key, value, depth in zip(self.keys, self.values, self.depths, strict=True):
            place = round(depth * len(paragraphs))
            needles.setdefault(place, []).append(_NEEDLE.format(key=key, value=value))
        parts = [_OPENING]
        for i in range(len(paragraphs) + 1):
            parts += needles.get(i, [])
            parts += paragraphs[i : i + 1]
        parts.append(_ASKED[arm].format(key=self.keys[self.asked]))
        return "\n\n".join(parts)


def _fitted(
    haystack: Haystack,
    begin: int,
    room: int,
    sample: _Sample,
    arm: str,
    num_tokens: Callable[[str], int | None],
) -> tuple[str, int]:
    """The longest text from paragraph `begin` on, around the end of the book, that takes at most `room` tokens."""
    total = len(haystack.paragraphs)
    order = [(begin + i) % total for i in range(total)]

    def text_of(count: int) -> str:
        return sample.text([haystack.paragraphs[at] for at in order[:count]], arm)

    def fits(count: int) -> bool:
        return (num_tokens(text_of(count)) or 0) <= room

    used, estimate = 0, num_tokens(text_of(0)) or 0
    while used < total and estimate + haystack.num_tokens[order[used]] + 1 <= room:
        estimate += haystack.num_tokens[order[used]] + 1  # one for the blank line; the whole is counted below
        used += 1
    while used and not fits(used):
        used -= 1
    while used < total and fits(used + 1):
        used += 1
    if used == total:
        raise ConfigError(
            f"the haystack is used up below {room} tokens, and no paragraph comes twice; name a longer text"
        )
    if used == 0:
        raise ConfigError(f"not one paragraph fits into {room} tokens; name another haystack or a greater length")
    return text_of(used), used
