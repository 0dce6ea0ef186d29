"""From a parsed request to its answer: submit the choices, gather or stream them, and what may go wrong on the way.

Owns the time limit of a request, its cancellation, and which error an ending becomes. Knows both endpoints through
Answer alone.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from blockdraft.engine import Request
from blockdraft.serve.answers import Answer
from blockdraft.serve.engine_loop import Done, EngineLoop, Failed, QueueFullError, Refused, Step, Submission
from blockdraft.serve.errors import ApiError, bad_request, queue_full, server_error
from blockdraft.serve.gate import note_facts
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.transport import DONE, EventStream, GoneError, event, unless_gone

__all__ = ["respond"]

logger = logging.getLogger("blockdraft.serve")


async def respond(
    http: HttpRequest, loop: EngineLoop, settings: ServerSettings, answer: Answer, requests: Sequence[Request]
) -> Response:
    """The answer of these choices, streamed or whole. Raises ApiError, and GoneError where nobody waits any more."""
    if len(requests) > loop.capacity:
        raise bad_request(f"{len(requests)} choices; this server takes {loop.capacity} at a time", param="n")
    try:
        submission = loop.submit(requests)
    except QueueFullError as error:
        raise queue_full(error.num_open, error.limit) from None
    submission.expire_in(settings.request_timeout_s)
    _note(http.scope, answer)
    if answer.frame.fields.stream:
        return await _streamed(http, submission, settings, answer)
    try:
        await unless_gone(http.receive, _gather(submission, answer))
    except GoneError:
        note_facts(http.scope, is_gone=True)
        raise
    finally:
        submission.cancel()
        _note(http.scope, answer)
    return JSONResponse(answer.body())


async def _gather(submission: Submission, answer: Answer) -> None:
    while submission.num_open or not submission.inbox.empty():
        index, message = await submission.next()
        if isinstance(message, Step):
            answer.take(index, message)
        elif isinstance(message, Done):
            _check_done(message)
            answer.finish(index, message)
        elif isinstance(message, Refused | Failed):
            raise _error_of(message)


async def _streamed(http: HttpRequest, submission: Submission, settings: ServerSettings, answer: Answer) -> Response:
    """The stream, once the engine has taken the request: what it refuses is an error answer, not an event."""
    try:
        index, message = await unless_gone(http.receive, submission.next())
        if isinstance(message, Refused | Failed):
            raise _error_of(message)
    except BaseException as error:
        submission.cancel()
        if isinstance(error, GoneError):
            note_facts(http.scope, is_gone=True)
        raise
    return EventStream(
        _events(http.scope, submission, answer, (index, message)),
        stall_timeout_s=settings.stall_timeout_s,
        on_gone=lambda: note_facts(http.scope, is_gone=True),
    )


async def _events(
    scope: Scope, submission: Submission, answer: Answer, first: tuple[int, Any]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; whatever ends it early frees its rows."""
    index, message = first
    try:
        while True:
            if isinstance(message, Step):
                chunks = answer.chunks_of_step(index, message)
            elif isinstance(message, Done):
                _check_done(message)
                chunks = answer.chunks_of_end(index, message)
            elif isinstance(message, Refused | Failed):
                raise _error_of(message)
            else:
                chunks = []
            # what a step gave several choices goes out in one write
            if chunks:
                yield b"".join(map(event, chunks))
            if not submission.num_open and submission.inbox.empty():
                yield DONE
                return
            index, message = await submission.next()
    except ApiError as error:
        note_facts(scope, error=error.code)
        yield event(error.body(), "error")
    except Exception:
        logger.exception("a stream broke the server's own code")
        note_facts(scope, error="internal_error")
        yield event(server_error("the server failed; its log says how").body(), "error")
    finally:
        submission.cancel()
        _note(scope, answer)


# ---- endings -------------------------------------------------------------------------------------------------------
def _error_of(message: Refused | Failed) -> ApiError:
    if isinstance(message, Refused):
        return bad_request(str(message.error))
    status = {"server_stopping": 503, "request_timeout": 504}.get(message.code, 500)
    return server_error(message.message, code=message.code, status=status)


def _check_done(done: Done) -> None:
    """Nothing; an error for a choice that did not end by itself."""
    completion = done.completion
    if completion.finish_reason == "error":
        raise server_error(completion.error or "the request broke", code="request_failed")
    if completion.finish_reason == "cancelled":
        raise server_error("the request was cancelled", code="cancelled")


def _note(scope: Scope, answer: Answer) -> None:
    """What the access log says of a generation."""
    fields = answer.frame.fields
    done = [choice.done.completion for choice in answer.choices if choice.done is not None]
    facts: dict[str, Any] = {
        "id": answer.frame.id,
        "stream": bool(fields.stream),
        "choices": len(answer.choices),
        "prompt_tokens": sum(answer.frame.num_prompt_tokens),
        "completion_tokens": sum(len(each.token_ids) for each in done),
        "steps": sum(each.stats.num_steps for each in done),
    }
    named: Mapping[str, Any] = {} if fields.user is None else {"user": fields.user}
    note_facts(scope, **facts, **named)
