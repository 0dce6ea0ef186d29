"""The running service: its phase, what it says of itself, and how it ends.

Owns the phases loading -> ready -> draining -> stopped, and what may be asked in which.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any, Literal

from blockdraft import __version__
from blockdraft.engine import Engine
from blockdraft.engine.adaptive import AdaptiveWidth
from blockdraft.errors import ConfigError
from blockdraft.serve.engine_loop import EngineLoop
from blockdraft.serve.errors import bad_request, unavailable
from blockdraft.serve.metrics import Metrics
from blockdraft.serve.settings import ServerSettings
from blockdraft.serve.spelling import Speller
from blockdraft.text import Tokenizer, why_no_grammars
from blockdraft.text.sections import ReplyFormat, find_reply_format, reply_format

__all__ = ["Phase", "Service"]

logger = logging.getLogger("blockdraft.serve")
Phase = Literal["loading", "ready", "draining", "stopped"]
_FLUSH_S = 2.0  # what streams get to send their last event


class Service:
    """One engine behind one API."""

    def __init__(self, loop: EngineLoop, settings: ServerSettings, metrics: Metrics) -> None:
        self.loop, self.settings, self.metrics = loop, settings, metrics
        self.phase: Phase = "loading"
        self._starting: asyncio.Task[None] | None = None
        self.created = int(time.time())
        self.tokenizing = threading.Lock()
        """Held while texts become ids: some tokenizers change themselves on the way."""
        self._speller: Speller | None = None
        self._reply_format: ReplyFormat | None = None

    # ---- life --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the engine's thread; ready when it has its engine."""
        self._starting = asyncio.create_task(self._start())

    async def started(self) -> None:
        """When the engine is there; what kept it from being loaded is raised."""
        assert self._starting is not None
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        engine = await self.loop.start()
        if engine.tokenizer is None:
            raise ConfigError("the engine has no tokenizer, and a server speaks text; make it with one")
        name = self.settings.reply_format
        self._reply_format = find_reply_format(engine.tokenizer) if name is None else reply_format(name)
        self._speller = Speller(engine.tokenizer)
        if self.phase == "loading":
            self.phase = "ready"

    async def drain(self) -> None:
        """Take no more requests; give those that run `drain_timeout_s`, then end them with an error."""
        self.phase = "draining"
        logger.warning("stopping: %d choices are open; a second signal ends them at once", self.loop.num_open)
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self.loop.wait_idle()
        except TimeoutError:
            logger.warning("%d choices did not end in time and are told so", self.loop.num_open)
            self.loop.fail_all("the server is stopping", "server_stopping")
            try:
                async with asyncio.timeout(_FLUSH_S):
                    await self.loop.wait_idle()
            except TimeoutError:
                logger.warning("the engine is in a step that does not end")

    async def stop(self) -> None:
        self.phase = "stopped"
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
        await self.loop.stop()

    # ---- what may be asked -------------------------------------------------------------------------------------------
    def check_loaded(self) -> None:
        if self.loop.engine is None:
            raise unavailable("the model is being loaded", code="loading")

    def check_ready(self) -> None:
        """Nothing; a 503 in every phase but one."""
        self.check_loaded()
        if self.phase != "ready":
            raise unavailable("the server is stopping and takes no more requests", code="server_stopping")
        if self.loop.is_broken:
            raise unavailable("the engine fails at every step", code="engine_failed")

    def check_model(self, name: str) -> None:
        own = self.settings.model_name
        if name != own:
            raise bad_request(
                f"there is no model {name[:100]!r}; this server has {own!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    # ---- the engine's constants --------------------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """For what does not change: facts, configuration, tokenizer."""
        assert self.loop.engine is not None
        return self.loop.engine

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer

    @property
    def why_no_grammars(self) -> str | None:
        """What keeps answers from being held to a form; None where nothing does."""
        return why_no_grammars(self.tokenizer)

    @property
    def speller(self) -> Speller:
        assert self._speller is not None
        return self._speller

    @property
    def reply_format(self) -> ReplyFormat:
        """How the target writes reasoning and tool calls."""
        assert self._reply_format is not None
        return self._reply_format

    # ---- what it says of itself --------------------------------------------------------------------------------------
    def model_card(self) -> dict[str, Any]:
        """The entry of /v1/models."""
        card: dict[str, Any] = {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockdraft",
        }
        if self.loop.engine is not None:
            card["max_model_len"] = self.engine.target.facts.max_length
        return card

    def info(self) -> dict[str, Any]:
        """The body of /info."""
        engine, settings = self.engine, self.settings
        draft = None if engine.draft is None else engine.draft.config
        return {
            "model": settings.model_name,
            "target_type": engine.target.facts.model_type,
            "draft": None if draft is None else describe_draft(engine),
            "draft_off_reason": engine.draft_off_reason if draft is None else None,
            "version": __version__,
            "max_width": None if draft is None else draft.max_width,
            "width_policy": "adaptive" if isinstance(engine.width_policy, AdaptiveWidth) else "fixed",
            "dtype": _plain(engine.target.dtype),
            "draft_dtype": None if engine.draft is None else _plain(engine.draft.dtype),
            "device": str(engine.target.device),
            "target_layer_ids": None if draft is None else list(draft.target_layer_ids),
            "num_target_layers": engine.target.facts.num_layers,
            "tap_stream": None if draft is None else (draft.tap_stream or "prefix"),
            "max_length": engine.target.facts.max_length,
            "max_rows": engine.max_rows,
            "memory_limit_bytes": engine.memory_limit,
            "reply_format": self.reply_format.name,
            "grammar": self.why_no_grammars is None,
            "limits": {
                "max_body_bytes": settings.max_body_bytes,
                "max_queue": settings.max_queue,
                "max_n": settings.max_n,
                "max_prompts": settings.max_prompts,
                "max_tokens": settings.max_tokens,
                "default_max_tokens": settings.default_max_tokens,
                "request_timeout_s": settings.request_timeout_s,
            },
        }


def describe_draft(engine: Engine) -> str:
    """One phrase for the draft: its kind and its size."""
    assert engine.draft is not None
    config = engine.draft.config
    kind = "DFlash 2" if config.conv is not None or config.selector is not None else "DFlash"
    return f"{kind}, {len(config.layers)} layers, block {config.block_size}"


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
