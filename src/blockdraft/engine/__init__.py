"""Requests on a target with a draft: one step function, one continuous batch."""

from __future__ import annotations

from blockdraft.engine.core import Engine, Ticket
from blockdraft.engine.load import load
from blockdraft.engine.request import Completion, Request, Speculation, TokenEvent

__all__ = ["Completion", "Engine", "Request", "Speculation", "Ticket", "TokenEvent", "load"]
