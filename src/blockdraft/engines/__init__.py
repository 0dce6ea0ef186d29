"""Production engines: check a pair, build the command, start it, see that it runs what was meant.

Owns: one table of rules per engine, and what is done with them. Must not know: torch, how a draft computes.
"""

from __future__ import annotations

from blockdraft.engines.assemble import ENGINES, Launch, Wish, find_engine, prepare, read_fitting
from blockdraft.engines.cards import Card, Floor, card_at, floor_of
from blockdraft.engines.command import Command, render
from blockdraft.engines.launch import Conduct, run_launch

__all__ = [
    "ENGINES",
    "Card",
    "Command",
    "Conduct",
    "Floor",
    "Launch",
    "Wish",
    "card_at",
    "find_engine",
    "floor_of",
    "prepare",
    "read_fitting",
    "render",
    "run_launch",
]
