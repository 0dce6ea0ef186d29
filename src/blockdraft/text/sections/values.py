"""Arguments that a format writes as plain text, as the values that the tool's JSON schema asks for.

Owns the conversion; knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blockdraft.errors import RequestError, shown

__all__ = ["parameters_of", "typed_value", "value_types"]

_MAX_DEPTH = 16
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_KINDS = {"True": "boolean", "False": "boolean", "true": "boolean", "false": "boolean", "null": "null", "None": "null"}
_TYPE_OF = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The JSON schema of each tool's arguments by the tool's name, from OpenAI's form of a list of tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise RequestError(f"tools[{number}] must be an object with type and function, which has a name")
        schema = function.get("parameters")
        if name in found or not isinstance(schema, Mapping | None):
            raise RequestError(f"tools[{number}]: {shown(name)} is given twice, or its parameters are no JSON schema")
        found[name] = schema or {}
    return found


def typed_value(text: str, schema: Mapping[str, Any], name: str) -> Any:
    """The value of argument `name` that was written as this text.

    Text stays text where the schema allows text (but null where it allows that too and the text says so), and where
    it is not what the schema asks for: then whoever validates the arguments says so. Without a type in the schema,
    JSON is read as JSON and anything else is text.
    """
    types = value_types((schema.get("properties") or {}).get(name), schema)
    word = text.strip()
    if types is not None and "string" in types:
        return None if "null" in types and word in ("null", "None") else text
    if types is not None and _KINDS.get(word) in types:
        return _WORDS[word]
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinite, which cannot be written
    except (ValueError, RecursionError):
        return text
    if types is None or _type_of(value) in types or (_type_of(value) == "integer" and "number" in types):
        return value
    return text


def value_types(schema: object, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Names of the JSON types that a schema allows; None where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "type" in schema:
        given = schema["type"]
        return frozenset([given] if isinstance(given, str) else given) if isinstance(given, str | list) else None
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(map(_type_of, values))
    if isinstance(schema.get("$ref"), str):
        return value_types(_resolve(schema["$ref"], root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            found = [value_types(part, root, depth + 1) for part in schema[key]]
            return None if None in found else frozenset().union(*(part for part in found if part is not None))
    parts = [value_types(part, root, depth + 1) for part in schema.get("allOf", ())]
    known = [part for part in parts if part is not None]
    return frozenset.intersection(*known) if known else None


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference into the same schema points at; None for any other."""
    found: object = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    return "null" if value is None else _TYPE_OF[type(value)]


def _refuse_constant(word: str) -> None:
    raise ValueError(word)
