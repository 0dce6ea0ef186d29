"""OpenAI's error object: which status, type, code and param stand for what went wrong.

Owns every word of an error answer's frame, and how a wrong body's first fault is named. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

__all__ = [
    "ApiError",
    "bad_request",
    "context_length_exceeded",
    "from_validation",
    "queue_full",
    "server_error",
    "unavailable",
]


class ApiError(Exception):
    """An answer that is an error. `code` is a word for programs, `param` the field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _writable(" ".join(message.split()))
        self.kind, self.code = kind, code
        self.param = None if param is None else _writable(param)
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def _writable(text: str) -> str:
    """A text that may quote half of a surrogate pair, as one that UTF-8 can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def bad_request(
    message: str, *, param: str | None = None, code: str | None = "invalid_value", status: int = 400
) -> ApiError:
    return ApiError(status, message, kind="invalid_request_error", code=code, param=param)


def context_length_exceeded(window: int, num_prompt: int, max_tokens: int | None, *, param: str) -> ApiError:
    """The prompt, alone or with the answer asked for, is longer than the target's window."""
    asked = f"{num_prompt} tokens" if max_tokens is None else f"{num_prompt} tokens and {max_tokens} new ones"
    return bad_request(
        f"this model's maximum context length is {window} tokens, and the prompt has {asked}; shorten one of them",
        param=param,
        code="context_length_exceeded",
    )


def queue_full(num_open: int, limit: int) -> ApiError:
    return ApiError(
        429,
        f"{num_open} choices run or wait and this server takes {limit}; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": "1"},
    )


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, headers={"retry-after": "5"})


def server_error(message: str, *, code: str = "internal_error", status: int = 500) -> ApiError:
    return ApiError(status, message, kind="server_error", code=code)


# ---- wrong bodies --------------------------------------------------------------------------------------------------
_UNSUPPORTED, _UNKNOWN = "unsupported", "unknown"  # types of the faults that fields.py finds; they name their field


def from_validation(error: ValidationError, given: object) -> ApiError:
    """The error of the first fault in a body; of the branches of a union, the one that came furthest."""
    faults = error.errors(include_url=False, include_input=False)
    depth = max(len(fault["loc"]) for fault in faults)
    deepest = [fault for fault in faults if len(fault["loc"]) == depth]
    known = [fault for fault in deepest if fault["type"] == _UNSUPPORTED]
    fault = (known or deepest)[0]
    place = _param(fault["loc"], given)
    if not fault["loc"] and fault["type"] not in (_UNSUPPORTED, _UNKNOWN, "missing"):
        return bad_request("the body must be a JSON object", code="invalid_type")
    same = known[:1] or [other for other in deepest if _param(other["loc"], given) == place]
    words = list(dict.fromkeys(str(other["msg"]) for other in same))
    codes = {"missing": "missing_required_parameter", _UNKNOWN: "unknown_parameter"}
    code = {**codes, _UNSUPPORTED: "unsupported_parameter"}.get(str(fault["type"]), "invalid_type")
    where = f"{place}: " if place else ""
    field = str(fault.get("ctx", {}).get("field", ""))
    param = ".".join(part for part in (place, field) if part) or None
    return bad_request(where + "; or ".join(words), param=param, code=code)


def _param(location: Sequence[int | str], given: object) -> str | None:
    """The place as a path such as messages[0].content; labels that pydantic puts in for unions are left out."""
    path, current = "", given
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(part, int) and isinstance(current, list):
            path += f"[{part}]"
            current = current[part] if part < len(current) else None
        elif isinstance(part, str) and isinstance(current, dict) and (part in current or (is_last and _is_name(part))):
            path += f".{part}" if path else part
            current = current.get(part)
    return path or None


def _is_name(part: str) -> bool:
    """Whether a part of a location is a field, not a label such as `list[TextPart]` or `str`."""
    return part.isidentifier() and part not in ("str", "int", "float", "bool", "list", "dict")
