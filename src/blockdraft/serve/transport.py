"""Bytes in and out: bodies with a limit and a time, server-sent events, and noticing that a client has gone.

Owns how ASGI messages are used. Knows no fields and no engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blockdraft.serve.errors import ApiError, bad_request

__all__ = ["DONE", "EventStream", "GoneError", "discard_body", "error_response", "event", "read_json", "unless_gone"]

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_MAX_DISCARDED_BYTES = 32 * 2**20
_DISCARD_S = 10.0


class GoneError(Exception):
    """The client closed the connection."""


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_ENCODER.encode(value)}\n\n".encode()


# ---- bodies --------------------------------------------------------------------------------------------------------
async def read_json(request: Request, *, max_bytes: int, timeout_s: float) -> Any:
    """The body as JSON. Errors: not JSON (400), of another type (415), too large (413), too slow (408)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        await discard_body(request.scope, request.receive)
        raise bad_request(
            f"the content-type is {kind or 'missing'}; send application/json", status=415, code="unsupported_media_type"
        )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        await discard_body(request.scope, request.receive)
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise bad_request(
            f"the body did not arrive within {timeout_s:g} s", status=408, code="request_timeout"
        ) from None
    return _parsed(body)


async def _read(request: Request, max_bytes: int) -> bytearray:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        body += message.get("body", b"")
        if len(body) > max_bytes:
            if message.get("more_body", False):
                await discard_body(request.scope, request.receive)
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return body


def _too_large(max_bytes: int) -> ApiError:
    return bad_request(f"the body is larger than {max_bytes} bytes", status=413, code="request_too_large")


def _parsed(body: bytearray) -> Any:
    try:
        text = body.decode("utf-8")
        parsed = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        if "\\ud" in text.lower():  # only an escape can bring half of a pair, and then any text or key may hold it
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        return parsed
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        message = f"the body holds {half}, half of a surrogate pair; give whole characters"
        raise bad_request(message, code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("an object has the same key twice")
    return made


async def discard_body(scope: Scope, receive: Receive) -> None:
    """Read what a client is still sending, within bounds, so that it hears the answer instead of a reset."""
    headers = dict(scope["headers"])
    if headers.get(b"expect", b"").lower() == b"100-continue":
        return
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and int(length) > _MAX_DISCARDED_BYTES:
        return
    num_bytes = 0
    try:
        async with asyncio.timeout(_DISCARD_S):
            while num_bytes <= _MAX_DISCARDED_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


# ---- answers -------------------------------------------------------------------------------------------------------
async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`; GoneError, with the work cancelled, as soon as the client is gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise GoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The source is closed when it ends, when the client leaves, and when it stops reading.

    A client that has left its buffers full for `stall_timeout_s` counts as gone; `on_gone` is called for one that went.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: AsyncGenerator[bytes, None], *, stall_timeout_s: float, on_gone: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._source = source
        self._stall_timeout_s = stall_timeout_s
        self._on_gone = on_gone
        self._since_s: float | None = None
        """When the piece that is being sent now was begun."""
        self._is_stalled = False
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        self._watch = asyncio.get_running_loop().call_later(self._stall_timeout_s, self._look_for_stall, sending)
        try:
            await unless_gone(receive, sending)
        except GoneError:
            self._on_gone()
        except asyncio.CancelledError:
            if not self._is_stalled:
                raise
            self._on_gone()
        finally:
            self._watch.cancel()
            await self._source.aclose()  # it may wait at a piece that was never sent

    def _look_for_stall(self, sending: asyncio.Future[None]) -> None:
        """End the sending where one piece has waited too long; look again later otherwise."""
        loop = asyncio.get_running_loop()
        waited_s = 0.0 if self._since_s is None else loop.time() - self._since_s
        if waited_s >= self._stall_timeout_s:
            self._is_stalled = True
            sending.cancel()
            return
        self._watch = loop.call_later(self._stall_timeout_s - waited_s, self._look_for_stall, sending)

    async def _send(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._source:
            self._since_s = clock()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._since_s = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
