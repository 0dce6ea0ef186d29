"""What stands before every route: keys, host names, and the record of each request that passes.

Owns who may ask. ASGI only: no body is read here but to be thrown away.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.serve.errors import ApiError, bad_request, server_error
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.transport import discard_body, error_response

__all__ = ["Gate", "note_facts"]

_OPEN_PATHS = ("/health", "/ready", "/version")
_KEYED_PREFIXES = ("/v1/", "/info", "/metrics", "/openapi.json")
access = logging.getLogger("blockdraft.access")
logger = logging.getLogger("blockdraft.serve")


def note_facts(scope: Scope, **facts: Any) -> None:
    """Add facts to the line of the access log of this request. Never texts of prompts, never keys."""
    scope.setdefault("blockdraft.facts", {}).update(facts)


class Gate:
    """Lets requests with an allowed host and a key through; records all; turns what breaks into an error object."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_error: Callable[[str], None]) -> None:
        self._app = app
        self._settings = settings
        self._on_error = on_error
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status: list[int] = []

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        try:
            await self._answer(scope, receive, noting, status)
        finally:
            self._log(scope, status, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, status: list[int]) -> None:
        error = self._refusal(scope)
        if error is not None:
            await discard_body(scope, receive)
            self._on_error(error.code or "error")
            await error_response(error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a request broke the server's own code")
            if status:  # the answer has begun: only cutting it off tells the client
                raise
            self._on_error("internal_error")
            await error_response(server_error("the server failed; its log says how"))(scope, receive, send)

    # ---- who may ask -------------------------------------------------------------------------------------------------
    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        if self._settings.allowed_hosts:
            host = _without_port(headers.get(b"host", b"").decode("latin-1"))
            if host.lower() not in self._settings.allowed_hosts:
                return bad_request(
                    f"the Host {host[:80]!r} is not one of this server's names; start it with --allow-host for it",
                    status=421,
                    code="wrong_host",
                )
        path: str = scope["path"]
        if not self._digests or path in _OPEN_PATHS or not path.startswith(_KEYED_PREFIXES):
            return None
        return self._key_refusal(headers.get(b"authorization", b""))

    def _key_refusal(self, header: bytes) -> ApiError | None:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        is_known = False
        for known in self._digests:  # all of them, so that the time does not tell which one comes close
            is_known |= hmac.compare_digest(digest, known)
        if scheme.lower() == b"bearer" and is_known:
            return None
        message = "this API key is not known" if header else "an API key is needed: Authorization: Bearer KEY"
        return ApiError(
            401,
            message,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    # ---- the record --------------------------------------------------------------------------------------------------
    def _log(self, scope: Scope, status: list[int], seconds: float) -> None:
        if not self._settings.has_access_log:
            return
        facts: dict[str, Any] = dict(scope.get("blockdraft.facts", {}))
        line = {
            "client": (scope.get("client") or ("", 0))[0],
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": 499 if facts.pop("is_gone", False) else (status[0] if status else 499),
            "seconds": round(seconds, 4),
            **facts,
        }
        access.info("%s", json.dumps(line))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
