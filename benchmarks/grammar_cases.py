"""Random JSON schemas and regular expressions, the same for the same seed, and whether a text fits one.

Owns the generator. The judges are not the compiler that is judged: ``jsonschema_rs`` for schemas, ``re`` for patterns.
Everything is bounded, so that texts end.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from blockdraft.text import Grammar

_KEYS = ("name", "id", "größe", "名前", "tags", "a b", "x-y", 'say "hi"', "path/to", "🦊", "value", "Ünït", "n")
_WORDS = ("red", "blue", "São Paulo", "東京", "yes", "no", "naïve", "42", "a\\b", 'q"q', "line\nbreak")
_PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]{1,5}( [A-Z][a-z]{1,5})?$",
    r"^\d{3}-\d{2}$",
    "^(on|off)$",
    "[0-9]",
    "^#[0-9a-f]{6}$",
)
_FORMATS = ("date", "uuid", "ipv4", "duration")
_PIECES = ("[a-f]", "[0-9]", "[A-Z]", r"\d", "[^a-z\\n ]", "[a-cx-z]", "é", "日", "-", r"\.", "ab", "no", "[éü]", " ")
SUBJECTS = (
    "a person",
    "a city",
    "an invoice",
    "a recipe",
    "a book",
    "a planet",
    "a dog",
    "a code",
    "a train",
    "a song",
)


@dataclass(frozen=True)
class Case:
    """One grammar, what is asked for, and its judge."""

    kind: str
    source: str
    """The schema as JSON, or the pattern."""
    subject: str

    @property
    def grammar(self) -> Grammar:
        if self.kind == "regex":
            return Grammar.regex(self.source)
        return Grammar.json_schema(json.loads(self.source))

    def fits(self, text: str) -> bool:
        """Whether the whole text is one of the grammar's, by a judge of its own."""
        if self.kind == "regex":
            return re.fullmatch(self.source, text) is not None
        import jsonschema_rs

        try:
            value = json.loads(text)
        except ValueError:
            return False
        judge = jsonschema_rs.Draft202012Validator(json.loads(self.source), validate_formats=True)
        return bool(judge.is_valid(value))


def cases(count: int, *, seed: int) -> Iterator[Case]:
    """Schemas and patterns in turn."""
    rng = random.Random(seed)
    for index in range(count):
        subject = SUBJECTS[index % len(SUBJECTS)]
        if index % 2:
            yield Case("regex", pattern(rng), subject)
        else:
            yield Case("json_schema", json.dumps(schema(rng), ensure_ascii=False), subject)


def schema(rng: random.Random) -> dict[str, Any]:
    """An object at the top, mostly; sometimes with a definition that it refers to."""
    made = _object(rng, 2) if rng.random() < 0.85 else _any(rng, 2)
    if rng.random() < 0.2 and made.get("type") == "object":
        made["properties"]["ref"] = {"$ref": "#/$defs/part"}
        made["$defs"] = {"part": _any(rng, 1)}
    return made


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_integer, _number, _string, _string, _values, _simple]
    if depth > 0:
        makers += [_object, _array, _array, _either]
    return rng.choice(makers)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(_KEYS, rng.randint(1, 3))
    made: dict[str, Any] = {"type": "object", "properties": {key: _any(rng, depth - 1) for key in keys}}
    if rng.random() < 0.5:
        made["description"] = f"something with {keys[0]}"
    made["required"] = [key for key in keys if rng.random() < 0.7]
    made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        parts = [_any(rng, depth - 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": rng.randint(0, len(parts))}
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 1)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(2)]}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-200, 200)
    made: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if rng.random() < 0.3:
        made = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 90)}
    elif rng.random() < 0.2:
        made = {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice((2, 5, 25))}
    return made


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice((-1.5, 0, 0.25, 10, -273.15))
    return {"type": "number", "minimum": low, "maximum": low + rng.choice((0.5, 1, 99.75))}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.35:
        return {"type": "string", "pattern": rng.choice(_PATTERNS[:4] + _PATTERNS[5:])}
    if kind < 0.45:
        return {"type": "string", "pattern": _PATTERNS[4], "maxLength": rng.randint(2, 8)}
    if kind < 0.6:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    least = rng.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 10)}


def _values(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice([*_WORDS, 7, None, True, ["a", 1], {"k": "v"}])}
    return {"enum": rng.sample([*_WORDS, 1, -2.5, None, False, [], {"deep": [1, {"er": "ö"}]}], rng.randint(1, 5))}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def pattern(rng: random.Random) -> str:
    """Classes, repeats, alternations and groups."""
    return "".join(_term(rng, 2) for _ in range(rng.randint(1, 4)))


def _term(rng: random.Random, depth: int) -> str:
    kind = rng.random()
    if depth and kind < 0.25:
        branches = ("".join(_term(rng, depth - 1) for _ in range(rng.randint(1, 2))) for _ in range(rng.randint(2, 3)))
        inner = f"({'|'.join(branches)})"
    elif depth and kind < 0.35:
        inner = f"(?:{_term(rng, depth - 1)}{_term(rng, depth - 1)})"
    else:
        piece = rng.choice(_PIECES)
        inner = piece if len(piece.lstrip("\\")) == 1 or piece.startswith("[") else f"(?:{piece})"
    low = rng.randint(0, 2)
    repeat = rng.choice(("", "", "", "?", f"{{{low + 1}}}", f"{{{low},{low + rng.randint(1, 3)}}}"))
    return inner + repeat
