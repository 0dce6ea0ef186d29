"""A server process: the socket, the signals, and how it ends.

Owns the first SIGTERM (take no more, drain, end what is left with an error, exit 0) and the second (end at once).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from blockdraft.errors import UnavailableError
from blockdraft.serve.service import Service
from blockdraft.serve.settings import ServerSettings

__all__ = ["bind", "serve_forever"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_M_ARENA_MAX = -8  # of mallopt, malloc.h
_CLOSE_S = 3  # until connections that are open without a request are cut


def bind(host: str, port: int) -> socket.socket:
    """A listening address; UnavailableError where it cannot be had. Port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from None
    made.set_inheritable(True)
    return made


def serve_forever(
    app: FastAPI, settings: ServerSettings, address: socket.socket, *, on_ready: Callable[[Service], None]
) -> int:
    """Serve until a signal; the exit code. What kept the engine from being loaded is raised."""
    _share_one_heap()
    _log_to_stderr()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="on",
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=_CLOSE_S,
        timeout_keep_alive=30,
    )
    server = _Server(config, app.state.service, on_ready)
    server.run(sockets=[address])
    if server.load_error is not None:
        raise server.load_error
    code = 143 if server.force_exit else 0
    if app.state.service.loop.is_alive:  # it loads, or is in a step; the interpreter must not go away under it
        sys.stderr.flush()
        os._exit(code)
    return code


def _share_one_heap() -> None:
    """Let all threads allocate from one heap, where the C library is glibc.

    The engine's thread would get heaps of its own, 64 MiB each, that are hardly ever handed back: memory grew by one of
    them every few minutes under load.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _log_to_stderr() -> None:
    """A JSON line for each request, and what the server has to say of itself as it is."""
    for name, level in (("blockdraft.access", logging.INFO), ("blockdraft.serve", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.handlers = [logging.StreamHandler()]


class _Server(uvicorn.Server):
    """uvicorn's, with our own meaning of signals."""

    def __init__(self, config: uvicorn.Config, service: Service, on_ready: Callable[[Service], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._num_signals = 0
        self.load_error: BaseException | None = None

    async def main_loop(self) -> None:
        watching = asyncio.create_task(self._watch_start())
        await super().main_loop()
        watching.cancel()

    async def _watch_start(self) -> None:
        """Say that it is ready; end it where the engine could not be loaded."""
        try:
            await self._service.started()
        except asyncio.CancelledError:  # told to stop before it was ready
            raise
        except BaseException as error:
            self.load_error = error
            self.should_exit = True
            return
        self._on_ready(self._service)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1 and self._service.phase == "ready":
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            return
        self.force_exit = self._num_signals > 1
        self.should_exit = True

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True
