"""The OpenAPI document: bodies and answers of every route, from the models of the wire.

Owns the document only; requests are checked against the models themselves.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from blockdraft.serve.wire import ChatRequest, CompletionRequest

__all__ = ["RESPONSES", "add_schema", "body_schema"]

_REF = "#/components/schemas/"
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _answer(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": name},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}},
            "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
        },
    }


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ERROR}}}


_STATE: dict[int | str, dict[str, Any]] = {
    401: _error("API key missing or unknown"),
    404: _error("Not here"),
    421: _error("Wrong Host"),
    503: _error("Loading, draining or broken"),
}
_WORK: dict[int | str, dict[str, Any]] = {
    **_STATE,
    400: _error("Wrong request"),
    408: _error("The body came too slowly"),
    413: _error("Body too large"),
    415: _error("Not application/json"),
    429: _error("Queue full"),
    500: _error("A fault of the server"),
    504: _error("Took too long"),
}


def _work(name: str) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": _answer(name)}, "text/event-stream": {"schema": {"type": "string"}}}
    return {**_WORK, 200: {"description": "The answer, or its events where stream is true", "content": content}}


RESPONSES: dict[str, dict[int | str, dict[str, Any]]] = {
    "chat": _work("chat.completion"),
    "text": _work("text_completion"),
    "get": _STATE,
    "metrics": {**_STATE, 200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {}}}}},
}


def body_schema(name: str) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": _REF + name}}}}}


def add_schema(app: FastAPI, model_name: str) -> None:
    """Make the application's document, with the models of the bodies in it."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            modes: Any = [(ChatRequest, "validation"), (CompletionRequest, "validation")]
            _, definitions = models_json_schema(modes, ref_template=_REF + "{model}")
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            for name in ("ChatRequest", "CompletionRequest"):
                schemas[name]["properties"]["model"] = {"const": model_name}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
