"""`--url` of `bench` and `verify`: a server instead of a pair, and what does not go together with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from blockdraft.cli.show import note
from blockdraft.errors import RequestError

if TYPE_CHECKING:
    from blockdraft.bench.servers import Server

__all__ = ["check_no_server", "connect_to", "pair_options"]


def connect_to(url: str, named: Mapping[str, Any], of_pair: Mapping[str, Any]) -> Server:
    """The server, by `named`: engine, model, plain_url, effort. Raises RequestError for options of a pair beside it.

    `of_pair` holds those options, None or False where they were not given.
    """
    for option, value in of_pair.items():
        if value not in (None, False):
            raise RequestError(f"{option} is about a pair in this process; with --url the server has its own")
    from blockdraft.bench.servers import connect

    server = connect(url, **named)
    facts = server.facts
    note(f"{server.main.client.url}: {facts.engine} {facts.version}, model {facts.target}")
    return server


def check_no_server(named: Mapping[str, Any]) -> None:
    """Nothing; a RequestError where options about a server were given without one."""
    for option, value in named.items():
        if value is not None:
            raise RequestError(f"--{option.replace('_', '-')} is about a server; name it with --url")


def pair_options(
    draft: str | None, target: str | None, threads: int | None, settings: Mapping[str, Any], *, dtype: str
) -> dict[str, Any]:
    """Options of a pair by their names, None or False where they stand at their defaults (`dtype` is one)."""
    given: dict[str, Any] = {"DRAFT": draft, "--target": target, "--threads": threads}
    defaults = {"dtype": dtype, "device": "cpu"}
    return given | {
        f"--{name.replace('_', '-')}": None if value == defaults.get(name) else value
        for name, value in settings.items()
    }
