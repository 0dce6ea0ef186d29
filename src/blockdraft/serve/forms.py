"""Which form an answer must have: response_format, structured_outputs and the older guided_* fields, as one grammar.

Owns that at most one of them is given. What a grammar means, and what of a schema is refused, is text.grammar's.
"""

from __future__ import annotations

import json
from typing import Any

from blockdraft.engine import Engine
from blockdraft.errors import RequestError
from blockdraft.serve.errors import bad_request
from blockdraft.serve.wire import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from blockdraft.text import Grammar

__all__ = ["asked_form", "checked_form"]


def asked_form(fields: ChatRequest | CompletionRequest) -> tuple[str, Grammar] | None:
    """The field that asks for a form, and the grammar that it means; None where the text is free."""
    found: list[tuple[str, Any]] = []
    if fields.response_format is not None and not _is_free(fields.response_format):
        found.append(("response_format", fields.response_format))
    if fields.structured_outputs is not None:
        found.extend(_of_structured(fields.structured_outputs))
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if (value := getattr(fields, name)) is not None:
            found.append((name, value))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise bad_request(f"{names} are given, and an answer has one form; give one of them", param=found[1][0])
    if not found:
        return None
    name, value = found[0]
    try:
        return name, _grammar(name, value)
    except RequestError as error:
        raise bad_request(str(error), param=name) from None


def checked_form(form: tuple[str, Grammar], engine: Engine) -> Grammar:
    """The grammar, compiled and kept for the engine's thread, so that a bad one names its field. May take long."""
    name, grammar = form
    try:
        engine.grammars.compiled(grammar)
    except RequestError as error:
        raise bad_request(str(error), param=name) from None
    return grammar


def _is_free(given: ResponseFormat) -> bool:
    return not isinstance(given, JsonObjectFormat | JsonSchemaFormat)


def _of_structured(given: StructuredOutputs) -> list[tuple[str, Any]]:
    values = {"json": given.json_, "regex": given.regex, "choice": given.choice, "grammar": given.grammar}
    found = [(f"structured_outputs.{name}", value) for name, value in values.items() if value is not None]
    if given.json_object:
        found.append(("structured_outputs.json_object", True))
    if not found:
        raise bad_request(
            "structured_outputs asks for nothing; give one of json, regex, choice, grammar, json_object",
            param="structured_outputs",
        )
    return found


def _grammar(name: str, value: Any) -> Grammar:
    if isinstance(value, JsonObjectFormat) or name.endswith("json_object"):
        return Grammar.json_object()
    if isinstance(value, JsonSchemaFormat):
        return Grammar.json_schema(value.json_schema.schema_)
    if name.endswith("regex"):
        return Grammar.regex(value)
    if name.endswith("choice"):
        return Grammar.choice(value)
    if name.endswith("grammar"):
        return Grammar.lark(value)
    return Grammar.json_schema(_schema(value, name))


def _schema(value: Any, name: str) -> Any:
    """A schema; vLLM also takes it as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        raise bad_request(f"{name} is text that is no JSON; give the schema as an object", param=name) from None
    if not isinstance(parsed, dict | bool):
        raise bad_request(f"{name} is not a schema; give an object", param=name)
    return parsed
