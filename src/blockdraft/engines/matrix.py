"""Which draft runs in which version of which engine: every cell is worked out from the rule tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from blockdraft.engines.assemble import ENGINES, examine
from blockdraft.engines.rules import Engine, Value
from blockdraft.engines.setting import Installed, Machine, Setting, Version
from blockdraft.engines.versions import check_version
from blockdraft.errors import UnavailableError
from blockdraft.inspection.engines import Facts

# Columns of the matrix: a version, and the features that its build lacks.
BUILDS: Mapping[str, tuple[tuple[str, frozenset[str]], ...]] = {
    "sglang": (("0.5.16", frozenset()), ("0.5.23", frozenset())),
    "vllm": (("0.27.1", frozenset()), ("0.28.0", frozenset()), ("0.32.0", frozenset())),
    "tokenspeed": (("0.1.0", frozenset({"dflash2"})), ("0.1.0", frozenset())),
}
_WORDS = {"refused": "fails", "lower_acceptance": "less", "unknown": "unknown", "note": "works"}
_BY_GRAVITY = ("refused", "unknown", "lower_acceptance", "note")


@dataclass(frozen=True, slots=True)
class Cell:
    """`word` is works, less, unknown or fails; `reasons` are the rules behind it, each with its source."""

    word: str
    reasons: tuple[str, ...]


def judge(engine: Engine, facts: Facts, version: str, lacks: frozenset[str]) -> Cell:
    """What one build of an engine does with a draft: its version first, then the rules, the gravest alone."""
    setting = _bare_setting(engine, facts, version, lacks)
    try:
        check_version(engine, setting)
    except UnavailableError as error:
        return Cell("fails", (str(error).rpartition("; ")[0],))  # what to do about it comes last
    rules = examine(engine, facts)
    for level in _BY_GRAVITY:
        reasons = tuple(
            f"{engine.label}: {rule['text']} [{rule['source']}]" for rule in rules if rule["level"] == level
        )
        if reasons:
            return Cell(_WORDS[level], reasons)
    return Cell("works", ())


def _bare_setting(engine: Engine, facts: Facts, version: str, lacks: frozenset[str]) -> Setting:
    return Setting(
        draft=facts,
        draft_path="DRAFT",
        target_path="TARGET",
        target_raw={},
        width=facts.config.max_width,
        tap_stream=facts.config.tap_stream,
        machine=Machine(num_gpus=1, gpu=None, num_nodes=1),
        installed=Installed(version=Version(version), features=frozenset(engine.features) - lacks, is_assumed=True),
    )


def document(drafts: Mapping[str, Facts]) -> str:
    """The whole of docs/engines.md. `drafts`: what stands in the rows, by name."""
    parts = [_INTRODUCTION, *_matrix(drafts)]
    for engine in ENGINES.values():
        parts += _engine(engine)
    return "\n".join(parts) + "\n"


_INTRODUCTION = """# What production engines do with a draft

Written by `python -m benchmarks.engines --write docs/engines.md` from the tables that `blockdraft launch` works with
(`src/blockdraft/engines/`, `src/blockdraft/inspection/engines/`); a test compares the two. [deploy.md](deploy.md) shows
how to use them.
"""


def _matrix(drafts: Mapping[str, Facts]) -> Iterator[str]:
    notes: dict[str, int] = {}
    columns = [(engine, version, lacks) for engine in ENGINES.values() for version, lacks in BUILDS[engine.name]]
    heads = [f"{engine.label} {version}{' without dflash2.py' if lacks else ''}" for engine, version, lacks in columns]
    yield "## Draft x engine x version\n"
    yield f"| draft | family | {' | '.join(heads)} |"
    yield "| --- " * (len(heads) + 2) + "|"
    for name, facts in drafts.items():
        cells = []
        for engine, version, lacks in columns:
            cell = judge(engine, facts, version, lacks)
            marks = [str(notes.setdefault(reason, len(notes) + 1)) for reason in cell.reasons]
            cells.append(f"{cell.word} <sup>{' '.join(marks)}</sup>" if marks else cell.word)
        yield f"| {name} | {_family(facts)} | {' | '.join(cells)} |"
    yield _LEGEND
    yield from (f"{number}. {reason}" for reason, number in notes.items())
    yield ""


_LEGEND = """
works: with what the notes say. less: the text is right, less is accepted. unknown: not read. fails: it does not start,
or not with this draft. The rules behind a cell were read at the version that the engine's own section names; an older
column says only what is known to be missing there. SGLang and TokenSpeed skip tensors that they do not know without a
word, vLLM refuses them.
"""


def _family(facts: Facts) -> str:
    kind = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark", "dspine": "DSpine"}[facts.family]
    return f"{kind}{' MLA' if facts.is_mla else ''}"


def _engine(engine: Engine) -> Iterator[str]:
    yield f"## {engine.label}\n"
    yield f"Read at {engine.read}. Ready when `GET {engine.ready_path}` answers 200 [{engine.ready_source}]."
    yield f"Acceptance is counted in {_HOW[engine.acceptance]} [{engine.acceptance_source}].\n"
    yield from _table(
        ("needs", "oldest version", "file", "source"),
        [
            (one.text, one.oldest or "none known", engine.features.get(one.feature or "", ""), one.source)
            for one in engine.supports
        ],
    )
    yield "### Flags\n"
    yield from _table(
        ("flag", "another value of yours", "why", "source"),
        [(f"`{flag.name}`", _yours(flag.is_fixed, flag.option), flag.why, flag.source) for flag in engine.flags]
        + [(f"`{one.name}`", "set before the start", one.why, one.source) for one in engine.variables],
    )
    if engine.forbidden:
        yield "### Refused with a draft\n"
        yield from _table(
            ("flag", "but for", "why", "source"),
            [(_code(one.names), _code(one.allowed), one.text, one.source) for one in engine.forbidden],
        )
    yield "### Lines of the log\n"
    yield from _table(
        ("line", "means", "source"),
        [(f"`{_escaped(one.pattern.pattern)}`", one.what, one.source) for one in engine.readings]
        + [
            (f"`{_escaped(one.pattern.pattern)}`", f"{'stops it: ' if one.is_fatal else ''}{one.text}", one.source)
            for one in engine.alarms
        ],
    )


_HOW = {
    "replies": "the replies' `meta_info`",
    "counters": "the counters of `/metrics`",
    "log": "the log's line for each request",
}


def _yours(is_fixed: bool, option: str | None) -> str:
    if option is not None:
        return f"refused: `{option}`"
    return "refused" if is_fixed else "replaces it"


def _code(words: Sequence[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[Value]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "| --- " * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""
