"""The application: routes, the life of the engine's thread, and nothing else.

What a request means is asked.py's, chat.py's and completions.py's; how an answer is made generation.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from blockdraft import __version__
from blockdraft.engine import Engine
from blockdraft.errors import BlockdraftError, ConfigError
from blockdraft.serve.engine_loop import EngineLoop
from blockdraft.serve.errors import ApiError, bad_request, from_validation, unavailable
from blockdraft.serve.gate import Gate
from blockdraft.serve.generation import respond
from blockdraft.serve.metrics import CONTENT_TYPE, Metrics
from blockdraft.serve.playground import add_page
from blockdraft.serve.preparing import prepare_chat, prepare_completion
from blockdraft.serve.schema import RESPONSES, add_schema, body_schema
from blockdraft.serve.service import Service
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.transport import GoneError, discard_body, error_response, read_json
from blockdraft.serve.wire import ChatRequest, CompletionRequest

__all__ = ["create_app"]


def create_app(engine: Engine | Callable[[], Engine], settings: ServerSettings) -> FastAPI:
    """The server's application around one engine, which nobody else may touch from then on.

    `engine` may be a function that loads it: it is called in the engine's thread while the server already answers
    /health, and 503 elsewhere. `app.state.service` is the running service.
    """
    if not callable(engine) and engine.max_waiting is not None:
        raise ConfigError("the server bounds its queue itself (max_queue); make the engine without max_waiting")
    metrics = Metrics(settings.model_name)
    loop = EngineLoop(engine if callable(engine) else lambda: engine, max_queue=settings.max_queue, observer=metrics)
    service = Service(loop, settings, metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        if not callable(engine):
            await service.started()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(
        title="blockdraft",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    _add_errors(app, metrics)
    _add_api(app, service)
    _add_state(app, service)
    if settings.has_page:
        add_page(app)
    add_schema(app, settings.model_name)
    app.add_middleware(Gate, settings=settings, on_error=metrics.reject)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


# ---- errors --------------------------------------------------------------------------------------------------------
def _add_errors(app: FastAPI, metrics: Metrics) -> None:
    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if request.url.path.startswith("/v1/"):  # not the probes of /health and /ready
            metrics.reject(error.code or "error")
        return error_response(error)

    async def of_library(request: Request, error: Exception) -> Response:
        metrics.reject("invalid_value")
        return error_response(bad_request(str(error)))

    async def of_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        await discard_body(request.scope, request.receive)
        path = request.url.path[:200]
        known = {
            404: (f"there is no {path}", "not_found"),
            405: (f"{request.method} is not for {path}", "method_not_allowed"),
        }
        message, code = known.get(error.status_code, (str(error.detail), "error"))
        metrics.reject(code)
        made = bad_request(message, status=error.status_code, code=code)
        made.headers = dict(error.headers or {})
        return error_response(made)

    async def of_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the access log shows it

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(BlockdraftError, of_library)
    app.add_exception_handler(HTTPException, of_route)
    app.add_exception_handler(GoneError, of_gone)


# ---- routes --------------------------------------------------------------------------------------------------------
def _add_api(app: FastAPI, service: Service) -> None:
    settings = service.settings

    async def body_of(request: Request, model: type[Any]) -> Any:
        service.check_ready()
        given = await read_json(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        try:
            fields = model.model_validate(given)
        except ValidationError as error:
            raise from_validation(error, given) from None
        except RecursionError:
            raise bad_request("the body is nested too deeply", code="invalid_json") from None
        service.check_model(fields.model)
        return fields

    @app.post("/v1/chat/completions", responses=RESPONSES["chat"], openapi_extra=body_schema("ChatRequest"))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        fields: ChatRequest = await body_of(request, ChatRequest)
        answer, requests = await asyncio.to_thread(prepare_chat, fields, service)
        return await respond(request, service.loop, settings, answer, requests)

    @app.post("/v1/completions", responses=RESPONSES["text"], openapi_extra=body_schema("CompletionRequest"))
    async def completions(request: Request) -> Response:
        """Continue texts."""
        fields: CompletionRequest = await body_of(request, CompletionRequest)
        answer, requests = await asyncio.to_thread(prepare_completion, fields, service)
        return await respond(request, service.loop, settings, answer, requests)

    @app.get("/v1/models", responses=RESPONSES["get"])
    async def models() -> dict[str, Any]:
        """The one model of this server."""
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{name:path}", responses=RESPONSES["get"])
    async def model(name: str) -> dict[str, Any]:
        """The same by its name."""
        service.check_model(name)
        return service.model_card()


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=RESPONSES["get"])
    async def health() -> dict[str, str]:
        """Whether the process lives and its engine works; 503: start a new one."""
        if service.loop.is_broken:
            raise unavailable("the engine fails at every step", code="engine_failed")
        return {"status": "ok"}

    @app.get("/ready", responses=RESPONSES["get"])
    async def ready() -> dict[str, str]:
        """Whether requests are taken now; 503 while loading, draining and where the engine fails."""
        service.check_ready()
        return {"status": "ready"}

    @app.get("/version", responses=RESPONSES["get"])
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/info", responses=RESPONSES["get"])
    async def info() -> dict[str, Any]:
        """The pair, and what this server allows."""
        service.check_loaded()
        return service.info()

    @app.get("/metrics", response_class=Response, responses=RESPONSES["metrics"])
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(service.loop), media_type=CONTENT_TYPE)
