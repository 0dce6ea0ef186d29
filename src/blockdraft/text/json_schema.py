"""Which words of JSON Schema can be kept to while a text is written, and how JSON is then spelled.

Owns the table of keywords and the walk over a schema that finds the first other one. What the values of a keyword mean,
and which combinations cannot be kept to, the compiler says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from blockdraft.errors import RequestError, shown
from blockdraft.text.prompts import hint

__all__ = ["MAX_DEPTH", "SPELLING", "check_schema"]

MAX_DEPTH = 64

SPELLING: Mapping[str, Any] = {
    # Bounded, or a text could go on for ever with nothing but blanks.
    "whitespace_pattern": r"[ \t\n\r]{1,64}",
    # One spelling for each character: with \u0061 or \/ a name that the schema knows could pass for another one.
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
    "coerce_one_of": False,
    "lenient": False,
}

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_OF_ONE = ("additionalProperties", "additionalItems", "items")
_OF_VALUES = (
    "type",
    "enum",
    "const",
    "required",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "$ref",
)
_KEPT = frozenset((*_OF_NAMES, *_OF_LISTS, *_OF_ONE, *_OF_VALUES))
_NOTES = frozenset(
    {
        "$id",
        "$schema",
        "$comment",
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
    }
)


def check_schema(schema: object) -> None:
    """Nothing; a RequestError that names the place and the first keyword that would not be kept to.

    Notes, which demand nothing of a value (``title``, ``default``, ``x-...``), may stand anywhere.
    """
    waiting: list[tuple[str, object, int]] = [("the schema", schema, 0)]
    while waiting:
        where, part, depth = waiting.pop()
        if isinstance(part, bool):
            continue
        if not isinstance(part, Mapping):
            raise RequestError(f"{where} is {_kind(part)}; a JSON schema is an object, true or false")
        if depth > MAX_DEPTH:
            raise RequestError(f"{where[:120]}... is nested more than {MAX_DEPTH} levels deep; use $defs and $ref")
        for word in part:
            if word not in _KEPT and word not in _NOTES and not _is_own_note(word):
                raise RequestError(
                    f"{where}: keyword {shown(word)} cannot be kept to while text is written{hint(word, _KEPT)}; "
                    "remove it"
                )
        waiting.extend((f"{where} at {name}", inner, depth + 1) for name, inner in _inner(where, part))


def _inner(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """(name, schema) of all schemas directly inside of one."""
    for word in _OF_NAMES:
        parts = schema.get(word, {})
        if not isinstance(parts, Mapping):
            raise RequestError(f"{where}: {word} is {_kind(parts)}; it must be an object of schemas")
        for name, part in parts.items():
            if not isinstance(name, str):
                raise RequestError(f"{where}: {word} has the name {name!r}; names are texts")
            yield f"{word}.{shown(name)}", part
    for word in _OF_LISTS:
        parts = schema.get(word, [])
        if not isinstance(parts, list | tuple):
            raise RequestError(f"{where}: {word} is {_kind(parts)}; it must be a list of schemas")
        yield from ((f"{word}[{index}]", part) for index, part in enumerate(parts))
    for word in _OF_ONE:
        part = schema.get(word, True)
        if word == "items" and isinstance(part, list | tuple):  # the tuples of drafts 4 to 7
            yield from ((f"items[{index}]", each) for index, each in enumerate(part))
        else:
            yield word, part


def _is_own_note(word: object) -> bool:
    """x-anything, but not the words by which a schema would change the compiler's settings."""
    return isinstance(word, str) and word.startswith("x-") and word != "x-guidance"


def _kind(value: object) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
