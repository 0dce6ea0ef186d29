"""From words to a launch that can start: both configs read, every rule of the pair and of the engine checked.

Nothing is started here. What cannot run is one error; what may come out differently is a note, or an error that a word
of the user's lifts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, TapStream
from blockdraft.engines.command import Command, build_command
from blockdraft.engines.rules import Engine
from blockdraft.engines.setting import Installed, Machine, Setting, read_machine
from blockdraft.engines.sglang import SGLANG
from blockdraft.engines.tokenspeed import TOKENSPEED
from blockdraft.engines.versions import assumed, check_version, find_installed, find_program
from blockdraft.engines.vllm import VLLM
from blockdraft.errors import ConfigError, PairError, RequestError, UnavailableError, shown
from blockdraft.formats import find_dialect, zlab
from blockdraft.formats.known_streams import known_stream
from blockdraft.formats.source import locate
from blockdraft.inspection import inspect_checkpoint, read_target_facts
from blockdraft.inspection.engines import Facts, examine_engines

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (SGLANG, VLLM, TOKENSPEED)}
_ABOUT_US = {"recurrent_state"}  # rules of the pair that are about what this package's own engine can do


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for. `extra`: words for the engine itself. `is_own_build`: the engine is no release."""

    engine: str
    draft: str
    target: str
    extra: tuple[str, ...] = ()
    width: int | None = None
    tap_stream: TapStream | None = None
    draft_window: int | None = None
    gpus: str | None = None
    tensor_parallel: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    head: str | None = None
    context: int | None = None
    concurrency: int | None = None
    memory_fraction: float | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    block_size: int | None = None
    environment: Path | None = None
    engine_version: str | None = None
    is_own_build: bool = False
    is_degraded_allowed: bool = False
    allow_mask_is_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launch that every rule lets through. `rules`: what `inspect` knows of this engine and draft."""

    engine: Engine
    setting: Setting
    command: Command
    program: str | None
    rules: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def find_engine(name: str) -> Engine:
    """The table of an engine by its name."""
    if name not in ENGINES:
        raise RequestError(f"no engine {shown(name)}: there are {', '.join(ENGINES)}")
    return ENGINES[name]


def prepare(wish: Wish, *, is_started: bool) -> Launch:
    """Check everything that can be known before a start. `is_started` false: the engine need not be installed here."""
    engine = find_engine(wish.engine)
    machine = read_machine(wish.gpus, wish.num_nodes)
    _check_nodes(wish, machine)
    program, installed = _engine_here(engine, wish, is_started=is_started)
    facts, target_raw = read_pair(wish)
    setting = _setting(engine, wish, facts, target_raw, machine, installed)
    _check_width(engine, setting)
    rules = examine(engine, facts)
    notes = _judge(engine, setting, rules, wish)
    if not wish.is_own_build:
        check_version(engine, setting)
    command = build_command(engine, setting, wish.extra)
    return Launch(
        engine=engine, setting=setting, command=command, program=program, rules=tuple(rules), notes=tuple(notes)
    )


def examine(engine: Engine, facts: Facts) -> list[Mapping[str, Any]]:
    """The rules of `inspect` that concern this draft in this engine."""
    [found] = [report for report in examine_engines(facts) if report["engine"] == engine.label]
    rules: list[Mapping[str, Any]] = found["rules"]
    return rules


def _engine_here(engine: Engine, wish: Wish, *, is_started: bool) -> tuple[str | None, Installed]:
    if wish.engine_version is not None and not is_started:
        return None, assumed(engine, wish.engine_version)
    try:
        program = find_program(engine, wish.environment)
        return program, find_installed(engine, program)
    except UnavailableError:
        if is_started or wish.environment is not None:
            raise
        return None, assumed(engine, None)


def read_pair(wish: Wish) -> tuple[Facts, Mapping[str, Any]]:
    """The draft as an engine meets it, and the target's config.json. Raises PairError if the two do not fit."""
    facts, target_raw = read_fitting(
        wish.draft, wish.target, allow_mask_is_eos=wish.allow_mask_is_eos, block_size=wish.block_size
    )
    stream = _tap_stream(wish, facts)
    if stream is not None:
        facts = dataclasses.replace(facts, config=dataclasses.replace(facts.config, tap_stream=stream))
    return facts, target_raw


def read_fitting(
    draft_name: str, target_name: str, *, allow_mask_is_eos: bool, block_size: int | None
) -> tuple[Facts, Mapping[str, Any]]:
    """A draft as its files describe it, and the target's config.json. Raises PairError if the two do not fit."""
    draft = locate(draft_name, what="draft", config_only=True)
    target_place = locate(target_name, what="target", config_only=True)
    if target_place.suffix == ".gguf":
        raise PairError(f"the target {target_name} is a GGUF file: give the folder or hub id it is of")
    report = inspect_checkpoint(
        draft,
        target_place,
        allow_mask_is_eos=allow_mask_is_eos,
        block_size=block_size,
        name=draft_name,
        target_name=target_name,
    )
    failed = [
        f"{rule['name']}: {rule['detail']}"
        for rule in report["pair"]["rules"]
        if rule["verdict"] == "fail" and rule["name"] not in _ABOUT_US
    ]
    if failed:
        raise PairError(f"this draft does not fit this target: {'; '.join(failed)}")
    target = read_target_facts(target_place)
    layout = find_dialect(draft)
    config = layout.read_config(draft, allow_mask_is_eos=allow_mask_is_eos, target=target, block_size=block_size)
    raw, _ = layout.read_raw(draft)
    own = report["weights"]["own"] if report["weights"] is not None else []
    facts = Facts(config=config, dialect=layout.name, raw=raw, own=own, target=target)
    target_raw, _ = zlab.read_raw_config(target_place)
    return facts, target_raw


def _tap_stream(wish: Wish, facts: Facts) -> TapStream | None:
    """What the file says, else what the user says, else what is known of the draft by its name."""
    declared, asked = facts.config.tap_stream, wish.tap_stream
    if asked is not None and not facts.is_kimi_k3:
        raise ConfigError(f"--tap-stream {asked}: engines are told it for a Kimi K3 target only; leave it out")
    if asked is not None and declared is not None and asked != declared:
        raise ConfigError(f"--tap-stream {asked}: the draft's file says {declared}; leave it out, or correct the file")
    known = known_stream(wish.draft) if facts.is_kimi_k3 else None
    return declared or asked or (known.stream if known is not None and not known.is_inferred else None)


def _check_nodes(wish: Wish, machine: Machine) -> None:
    if machine.num_nodes > 1 and wish.head is None:
        raise RequestError(f"--nodes {machine.num_nodes} needs --head HOST:PORT, where the nodes meet, on node 0")
    if machine.num_nodes == 1 and (wish.head is not None or wish.node_rank):
        raise RequestError("--head and --node-rank are for several nodes: give --nodes, or leave them out")
    if not 0 <= wish.node_rank < machine.num_nodes:
        raise RequestError(f"--node-rank is {wish.node_rank}: it must be 0 to {machine.num_nodes - 1}")
    if wish.head is not None and not wish.head.rpartition(":")[2].isdigit():
        raise RequestError(f"--head is {shown(wish.head)}: it must be HOST:PORT")


def _setting(
    engine: Engine, wish: Wish, facts: Facts, target_raw: Mapping[str, Any], machine: Machine, installed: Installed
) -> Setting:
    for name, value in (
        ("--context", wish.context),
        ("--concurrency", wish.concurrency),
        ("--tp", wish.tensor_parallel),
    ):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}: at least 1")
    if wish.memory_fraction is not None and not 0 < wish.memory_fraction < 1:
        raise RequestError(f"--memory-fraction is {wish.memory_fraction:g}: it must be between 0 and 1")
    return Setting(
        draft=facts,
        draft_path=_as_given(wish.draft),
        target_path=_as_given(wish.target),
        target_raw=target_raw,
        width=facts.config.max_width if wish.width is None else wish.width,
        tap_stream=facts.config.tap_stream,
        machine=machine,
        installed=installed,
        host=wish.host,
        port=engine.default_port if wish.port is None else wish.port,
        tensor_parallel=machine.total_gpus if wish.tensor_parallel is None else wish.tensor_parallel,
        draft_window=wish.draft_window,
        context=wish.context,
        concurrency=wish.concurrency,
        memory_fraction=wish.memory_fraction,
        node_rank=wish.node_rank,
        head=wish.head,
    )


def _as_given(path: str) -> str:
    """A hub id as it stands, a local path in full: the engine may run elsewhere."""
    place = Path(path).expanduser()
    if not place.exists():
        return path
    place = place.resolve()
    return str(place.parent if place.is_file() else place)


def _check_width(engine: Engine, setting: Setting) -> None:
    config: DraftConfig = setting.draft.config
    if not 2 <= setting.width <= config.max_width:
        raise RequestError(
            f"--width is {setting.width}: this draft proposes at most {config.num_proposals} tokens, so it must be "
            f"2 to {config.max_width}"
        )
    if setting.is_narrowed and engine.fixed_width is not None:
        raise RequestError(
            f"--width is {setting.width}: {engine.label} serves this draft at {config.max_width} only "
            f"({engine.fixed_width})"
        )
    if setting.draft_window is not None and setting.draft_window < setting.width:
        raise RequestError(f"--draft-window is {setting.draft_window}: at least the width, {setting.width}")
    if setting.draft_window is not None and engine is not SGLANG:
        raise RequestError(f"--draft-window: {engine.label} takes the window from the draft's file; leave it out")


def _judge(engine: Engine, setting: Setting, rules: Sequence[Mapping[str, Any]], wish: Wish) -> list[str]:
    """Notes on what comes out differently. Raises PairError for what cannot run, or would lose what it is for."""
    refused = [rule for rule in rules if rule["level"] == "refused"]
    if refused and not wish.is_own_build:
        texts = "; ".join(f"{rule['text']} [{rule['source']}]" for rule in refused)
        raise PairError(f"{engine.label} does not run this draft: {texts}; with a branch that does, say --own-build")
    worse = [rule for rule in rules if rule["level"] == "lower_acceptance"]
    if worse and not wish.is_degraded_allowed:
        texts = "; ".join(f"{rule['text']} [{rule['source']}]" for rule in worse)
        raise PairError(
            f"{engine.label} would accept less of this draft than it could: {texts}; mend it, or say --allow-degraded"
        )
    notes = [f"{rule['text']} [{rule['source']}]" for rule in rules]
    if setting.is_narrowed and not all(layer.is_causal for layer in setting.draft.config.layers):
        notes.append("rows of this block see each other: a narrower width is another computation, compare acceptance")
    return notes
