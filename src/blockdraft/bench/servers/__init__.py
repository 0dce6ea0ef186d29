"""Any OpenAI-compatible server as a system under test.

`connect` finds out which engine answers at an address (detect.py) and gives a `Server` (server.py), which is a
`bench.system.System`. What an engine reports of a request, and in which unit, is in one adapter file for each engine;
`exam` is what `verify --url` asks.
"""

from __future__ import annotations

from blockdraft.bench.servers.detect import ENGINES, connect
from blockdraft.bench.servers.server import Server

__all__ = ["ENGINES", "Server", "connect"]
