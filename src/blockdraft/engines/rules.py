"""What an engine's table may say: flags, variables, versions, lines of its log. No rule of any engine stands here.

Every entry names its source. A source that was read in the engine's own files says which version; one that was only
seen in a thread, a card or another project's script says so; "not verified" means that nobody was seen to do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.engines.setting import Setting

Value = str | int | float | tuple[str, ...] | None
How = Literal["replies", "counters", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of our command. `value` gives its words, an empty tuple for a bare switch, None to leave it out.

    `is_fixed`: it follows from the pair, so another value of the user's is an error, and `option` is the one of ours
    that changes it, if any. Otherwise it is a recommendation, and the user's own value replaces it.
    """

    name: str
    value: Callable[[Setting], Value]
    why: str
    source: str
    aliases: tuple[str, ...] = ()
    is_fixed: bool = True
    option: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable, None to leave it alone."""

    name: str
    value: Callable[[Setting], str | None]
    why: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A flag that the user may not give with a draft; `allowed`: the values that are harmless after all."""

    names: tuple[str, ...]
    allowed: tuple[str, ...]
    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What drafts need of the engine: the oldest version known to run them, and a file that such a build holds.

    `oldest` None: no release was seen that does. `feature`: a key of the table's `features`.
    """

    name: str
    when: Callable[[Setting], bool]
    oldest: str | None
    text: str
    source: str
    feature: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A line of the log that says what the engine understood.

    `what` is taps, width, mask, stream or window; `read` turns the match into our words: layer ids from 0,
    positions that the target scores, an id, `prefix` or `attn_res`, positions.
    """

    what: Literal["taps", "width", "mask", "stream", "window"]
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], object]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A line of the log that should not be there. `is_fatal`: going on would serve something else than was asked."""

    pattern: re.Pattern[str]
    text: str
    is_fatal: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLines:
    """How the engine runs on several nodes: a command that a node runs before it, or `is_replaced` in its place."""

    source: str
    before: Callable[[Setting], Sequence[str] | None] = lambda setting: None
    is_replaced: Callable[[Setting], bool] = lambda setting: False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine: everything `launch` knows of it.

    `label`: its name in the rule tables of `inspect`. `distributions`: what pip calls it. `features`: name -> file
    inside its package. `acceptance`: where accepted proposals are counted, see measure.py. `fixed_width`: where it was
    read that the draft's own width is the only one it takes, None where a narrower one is served too.
    """

    name: str
    label: str
    read: str
    distributions: tuple[str, ...]
    package: str
    program: str
    head: Callable[[Setting], Sequence[str]]
    flags: tuple[Flag, ...]
    supports: tuple[Support, ...]
    readings: tuple[Reading, ...]
    alarms: tuple[Alarm, ...]
    ready_path: str
    ready_source: str
    acceptance: How
    acceptance_source: str
    nodes: NodeLines
    variables: tuple[Variable, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()
    features: dict[str, str] = field(default_factory=dict)
    default_port: int = 8000
    fixed_width: str | None = None


def numbers(text: str) -> tuple[int, ...]:
    """The integers in a printed list."""
    return tuple(int(word) for word in re.findall(r"-?\d+", text))
