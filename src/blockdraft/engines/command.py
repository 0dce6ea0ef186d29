"""The command of one launch: what the table asks for, merged with what the user adds, and why each word is there."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockdraft.engines.rules import Engine, Flag
from blockdraft.engines.setting import Setting
from blockdraft.errors import RequestError, shown

_COLUMNS = 118


@dataclass(frozen=True, slots=True)
class Word:
    """One flag as it stands in the command, with its reason; `source` None: the user gave it."""

    name: str
    values: tuple[str, ...]
    why: str
    source: str | None

    def words(self) -> tuple[str, ...]:
        return (self.name, *self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`before`: a command that the node runs first. `head`: the program. All words are shell words, unquoted."""

    engine: Engine
    version: str
    before: tuple[str, ...] | None
    head: tuple[str, ...]
    flags: tuple[Word, ...]
    variables: tuple[Word, ...]

    @property
    def argv(self) -> list[str]:
        return [*self.head, *(word for flag in self.flags for word in flag.words())]

    @property
    def environment(self) -> dict[str, str]:
        return {variable.name: variable.values[0] for variable in self.variables}


def build_command(engine: Engine, setting: Setting, extra: Sequence[str]) -> Command:
    """The command of a setting; `extra` are the user's own words for the engine.

    Raises RequestError where a word of the user's contradicts one that follows from the pair.
    """
    given = list(_split(extra))
    for words in given:
        _refuse_forbidden(engine, words)
    flags: list[Word] = []
    for flag in engine.flags:
        value = flag.value(setting)
        if value is None:
            continue
        values = value if isinstance(value, tuple) else (str(value),)
        theirs = next((words for words in given if words[0] in (flag.name, *flag.aliases)), None)
        if theirs is None:
            flags.append(Word(flag.name, values, flag.why, flag.source))
            continue
        given.remove(theirs)
        if theirs[1:] == values:
            flags.append(Word(flag.name, values, flag.why, flag.source))
        elif flag.is_fixed:
            raise RequestError(_contradiction(flag, values, theirs))
        else:
            asked = " ".join(values) or "the switch"
            flags.append(Word(theirs[0], theirs[1:], f"yours; {asked} would be recommended: {flag.why}", None))
    flags += [Word(words[0], words[1:], "yours", None) for words in given]
    variables = []
    for variable in engine.variables:
        text = variable.value(setting)
        if text is not None:
            variables.append(Word(variable.name, (text,), variable.why, variable.source))
    before = engine.nodes.before(setting)
    return Command(
        engine=engine,
        version=str(setting.installed.version),
        before=None if before is None else tuple(before),
        head=tuple(engine.head(setting)),
        flags=tuple(flags),
        variables=tuple(variables),
    )


def extra_value(extra: Sequence[str], name: str) -> str | None:
    """The one value that the user's own words give a flag, None if they do not."""
    for words in _split(extra):
        if words[0] == name and len(words) == 2:
            return words[1]
    return None


def _split(extra: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The user's words, flag by flag: `--a=b` becomes two words, underscores in names become dashes."""
    current: list[str] = []
    for word in extra:
        if word.startswith("-") and not _is_number(word):
            if current:
                yield tuple(current)
            name, equals, value = word.partition("=")
            current = [name.replace("_", "-"), *([value] if equals else [])]
        elif current:
            current.append(word)
        else:
            raise RequestError(f"{shown(word)} belongs to no flag: what goes to the engine must begin with --")
    if current:
        yield tuple(current)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _refuse_forbidden(engine: Engine, words: tuple[str, ...]) -> None:
    for rule in engine.forbidden:
        if words[0] in rule.names and not (len(words) == 2 and words[1] in rule.allowed):
            raise RequestError(f"{' '.join(words)} cannot be given to {engine.label} with a draft: {rule.text}")


def _contradiction(flag: Flag, values: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    ours = " ".join((flag.name, *values))
    change = f"change it with {flag.option}" if flag.option is not None else "it follows from the pair; leave it out"
    return f"{' '.join(theirs)} contradicts {ours} ({flag.why}): {change}"


def render(command: Command, *, is_replaced: bool = False) -> str:
    """The command as shell lines that can be pasted, then a comment for each word: why it is there, and its source.

    `is_replaced`: this node runs what stands before the command, and not the command.
    """
    lines = []
    if command.before is not None:
        lines.append(shlex.join(command.before))
    if not is_replaced:
        lines += [f"export {word.name}={shlex.quote(word.values[0])}" for word in command.variables]
        parts = [shlex.join(command.head), *(shlex.join(flag.words()) for flag in command.flags)]
        lines.append(" \\\n  ".join(parts))
        lines.append("")
        for word in (*command.variables, *command.flags):
            lines += _comment(word)
    return "\n".join(lines) + "\n"


def _comment(word: Word) -> list[str]:
    source = "" if word.source is None else f" [{word.source}]"
    return textwrap.wrap(
        f"{word.name}: {word.why}{source}",
        _COLUMNS,
        initial_indent="# ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )
