"""One `bench` run from its options: which prompts under which settings, and the report of its journal.

Owns what each table needs to be measured and the defaults of a run. Words of the command line are the CLI's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.bench import tables as tb
from blockdraft.bench.compare import Side, compare
from blockdraft.bench.journal import Journal, JournalContent, read_journal
from blockdraft.bench.record import WHOLE_RUN, RequestRecord
from blockdraft.bench.report import Document
from blockdraft.bench.runner import Part, Progress, check_parts, run_parts
from blockdraft.bench.system import Load, Setting, System, find_sampling
from blockdraft.bench.table import Table
from blockdraft.bench.tables.grouping import by_setting, grouped, mode_of, speculating
from blockdraft.bench.workloads import MATRIX, Workload, load_ruler, load_workload
from blockdraft.errors import RequestError, UnavailableError, shown

if TYPE_CHECKING:
    from blockdraft.bench.in_process import InProcess

__all__ = [
    "TABLES",
    "Options",
    "Plan",
    "comparison_of",
    "document_of",
    "load_sets",
    "make_plan",
    "measure",
    "replay_journal",
]

TABLES = ("A", "B", "C", "speed")
DEFAULT_LENGTHS = (8192, 32768, 65536, 131072)
DEFAULT_TOKENS: Mapping[str, int] = {"A": 512, "B": 512, "C": 512, "speed": 256}
DEFAULT_COUNT = 20  # contexts of each length


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured. `sets` empty: the table's own; `widths` empty: the draft's own; None among them: the system's.

    `formats` names a prompt format by data set. `limit` prompts of each set (contexts of each length) are taken.
    """

    table: str
    sets: Sequence[str] = ()
    data: Path | None = None
    haystack: Path | None = None
    lengths: Sequence[int] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    widths: Sequence[int | None] = ()
    samplings: Sequence[str] = ("greedy",)
    loads: Sequence[Load] = (Load(concurrency=1),)
    limit: int | None = None
    max_new_tokens: int | None = None
    num_samples: int = 1
    num_rounds: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.table not in TABLES:
            raise RequestError(f"table {shown(self.table)} is unknown; there are {', '.join(TABLES)}")
        if self.max_new_tokens is not None and self.max_new_tokens < 2:
            raise RequestError(f"the length limit is {self.max_new_tokens}; a step needs at least 2 tokens")
        for name in self.samplings:
            find_sampling(name)
        if self.table == "C" and self.haystack is None:
            raise RequestError("table C hides numbers in a long text of yours; name it with --haystack FILE")
        if self.table != "C" and (self.haystack is not None or self.lengths):
            raise RequestError("a haystack and lengths belong to table C; drop them, or ask for --table C")
        if self.table == "C" and (self.sets or self.formats):
            raise RequestError("table C has prompts of its own; drop --sets and --format")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be run. `left_out` says which sets of the matrix could not be had, and why."""

    options: Options
    workloads: Sequence[Workload]
    settings: Sequence[Setting]
    left_out: Sequence[str]

    @property
    def parts(self) -> list[Part]:
        return [Part(workload, setting) for workload in self.workloads for setting in self.settings]

    @property
    def num_rounds(self) -> int:
        given = self.options.num_rounds
        return given if given is not None else 2 if self.options.table == "speed" else 1

    def settings_json(self, system: System, command: str) -> dict[str, Any]:
        """What all processes of a run must agree in, and what a report is made of."""
        samplings = {setting.sampling.name: setting.sampling.to_json() for setting in self.settings}
        return {
            "table": self.options.table,
            "command": command,
            "system": system.facts.to_json(),
            "workloads": [workload.to_json() for workload in self.workloads],
            "modes": list(dict.fromkeys(setting.mode for setting in self.settings)),
            "samplings": list(samplings.values()),
            "loads": list(dict.fromkeys(setting.load.name for setting in self.settings)),
            "max_new_tokens": self.settings[0].max_new_tokens,
            "num_samples": self.options.num_samples,
            "num_rounds": self.num_rounds,
            "seed": self.options.seed,
            "left_out": list(self.left_out),
        }


Sets = tuple[list[Workload], list[str]]
"""Workloads, and why others were left out."""


def make_plan(options: Options, system: System, sets: Sets | None = None) -> Plan:
    """Loads all prompts, unless `sets` are they, and checks all settings. Raises what keeps them from being run."""
    workloads, left_out = _contexts(options, system) if options.table == "C" else sets or load_sets(options)
    tokens = options.max_new_tokens or DEFAULT_TOKENS[options.table]
    settings = [
        Setting(
            speculation=is_on,
            width=width,
            sampling=find_sampling(name),
            max_new_tokens=tokens,
            load=load,
            seed=options.seed,
        )
        for name in options.samplings
        for load in options.loads
        for is_on, width in _modes(options, system)
    ]
    plan = Plan(options=options, workloads=workloads, settings=settings, left_out=left_out)
    check_parts(system, settings, num_samples=options.num_samples, num_rounds=plan.num_rounds)
    return plan


def _modes(options: Options, system: System) -> list[tuple[bool, int | None]]:
    """(speculation, width) of every mode; plain decoding first where speed is asked for."""
    widths = list(options.widths) or [system.facts.max_width]
    if len(set(widths)) < len(widths):
        raise RequestError(f"widths {', '.join(map(str, options.widths))}: one of them is there twice")
    on: list[tuple[bool, int | None]] = [(True, width) for width in widths]
    return [(False, None), *on] if options.table == "speed" else on


def _contexts(options: Options, system: System) -> Sets:
    assert options.haystack is not None
    lengths = tuple(options.lengths) or DEFAULT_LENGTHS
    count = options.limit or DEFAULT_COUNT
    workload = load_ruler(
        options.haystack, lengths=lengths, count=count, seed=options.seed, num_tokens=system.num_tokens
    )
    return [workload], []


def load_sets(options: Options) -> Sets:
    """The data sets of any table but C, whose contexts need a tokenizer. Raises what keeps them from being had."""
    asked = tuple(options.sets) or (MATRIX if options.table == "B" else ("own",))
    if unknown := sorted(set(options.formats) - set(asked)):
        raise RequestError(f"a prompt format was given for {shown(unknown[0])}, which is not among the sets")
    workloads: list[Workload] = []
    left_out: list[str] = []
    for name in asked:
        try:
            workload = load_workload(
                name,
                data=options.data,
                format_name=options.formats.get(name),
                limit=options.limit,
                seed=options.seed,
            )
        except UnavailableError as error:
            if options.sets:
                raise
            left_out.append(str(error))
            continue
        if any(one.name == workload.name for one in workloads):
            raise RequestError(f"data set {workload.name} was named twice; name each once")
        workloads.append(workload)
    if not workloads:
        raise UnavailableError(f"no data set could be had: {'; '.join(left_out)}")
    return workloads, left_out


def measure(
    plan: Plan,
    system: System,
    journal_path: Path,
    *,
    command: str,
    where: Mapping[str, Any],
    progress: Progress,
) -> Document:
    """Run what the journal does not hold yet, and report."""
    settings = plan.settings_json(system, command)
    with Journal(journal_path, settings, where) as journal:
        run_parts(
            system,
            plan.parts,
            journal,
            num_samples=plan.options.num_samples,
            num_rounds=plan.num_rounds,
            progress=progress,
        )
        return document_of(journal.content)


# ---- the report of a journal -----------------------------------------------------------------------------------------
Builder = Callable[[Sequence[RequestRecord]], list[Table]]


def document_of(content: JournalContent) -> Document:
    """The report of a run, from its journal alone. Raises RequestError for one without records."""
    settings, records = content.settings, list(content.records.values())
    if settings is None or not records:
        raise RequestError("the journal holds no records yet; run the measurement first")
    table = str(settings["table"])
    found = [one for build in _BUILDERS[table] for one in build(records)]
    notes = [*_cuts(settings), *_failures(records), *_whole_runs(records)]
    details = {"num_records": len(records), "num_failed": sum(not r.is_whole for r in records)}
    return Document(
        title=_TITLES[table],
        command=str(settings["command"]),
        system=settings["system"],
        settings={key: value for key, value in settings.items() if key not in ("system", "workloads", "command")},
        workloads=settings["workloads"],
        runs=content.runs,
        tables=found,
        notes=notes,
        details=details,
    )


def widths_compared(records: Sequence[RequestRecord]) -> list[Table]:
    """Every width against the first one, in each setting, paired by prompt."""
    found = []
    for setting, members in by_setting(speculating(records)).items():
        (first, ones), *others = grouped(members, mode_of).items()
        for name, twos in others:
            try:
                found.append(compare(Side(first, ones), Side(name, twos), about=setting))
            except RequestError:
                continue  # no prompt in common yet: the run is not finished
    return found


_BUILDERS: Mapping[str, Sequence[Builder]] = {
    "A": (tb.lengths, widths_compared, tb.other_names, tb.block_positions, tb.output_positions, tb.sections),
    "B": (tb.matrix, tb.block_positions, tb.output_positions, tb.sections),
    "C": (tb.long_context,),
    "speed": (tb.speed_ups, tb.lengths, tb.block_positions),
    "replay": (tb.lengths, widths_compared, tb.block_positions, tb.output_positions),
}
_TITLES = {
    "A": "Acceptance length by data set and width",
    "B": "Acceptance over data sets",
    "C": "Acceptance and retrieval in long contexts",
    "speed": "Speed with and without speculation",
    "replay": "Acceptance on texts that were given (replay)",
}


def _cuts(settings: Mapping[str, Any]) -> list[str]:
    notes = []
    for one in settings["workloads"]:
        if one["num_prompts"] < one["num_prompts_of_the_set"]:
            notes.append(
                f"{one['name']} was cut to {one['num_prompts']} of {one['num_prompts_of_the_set']} prompts, evenly"
            )
    return [*notes, *(f"left out: {reason}" for reason in settings["left_out"])]


def _failures(records: Sequence[RequestRecord]) -> list[str]:
    broken = [record for record in records if not record.is_whole]
    if not broken:
        return []
    return [f"{len(broken)} requests broke and are not counted; the first: {broken[0].prompt_id}: {broken[0].error}"]


def _whole_runs(records: Sequence[RequestRecord]) -> list[str]:
    """Acceptance by a server's own counters, where its requests have none."""
    notes = []
    for record in records:
        entry = record.raw.get(WHOLE_RUN)
        if not isinstance(entry, Mapping) or record.counts.has_acceptance:
            continue
        where = f"{record.dataset}, {mode_of(record)}, {record.sampling}, {record.load}"
        steps, accepted = (entry["server"].get(name) for name in ("num_steps", "num_accepted_draft_tokens"))
        if entry["nobody_else"] is False:
            notes.append(f"{where}: others used the server too, so that its counters say nothing of this run")
        elif steps and accepted is not None:
            is_sure = "" if entry["nobody_else"] else "; that nobody else used it is not known"
            notes.append(
                f"{where}: requests tell no acceptance; by the server's counters 1 + A / S is "
                f"{1 + accepted / steps:.3f} over {entry['num_requests']} requests, {steps} steps, without an interval"
                f"{is_sure}"
            )
    return notes


# ---- two journals, and replays ---------------------------------------------------------------------------------------
def comparison_of(first: JournalContent, second: JournalContent, *, names: Sequence[str]) -> Document:
    """Second against first, in every setting that both have; a lone width on each side is paired whatever it is.

    Raises RequestError where the two asked different things.
    """
    _check_same_questions(first.settings or {}, second.settings or {}, names)
    tables = []
    sides = [by_setting(speculating(content.records.values())) for content in (first, second)]
    for setting in [name for name in sides[0] if name in sides[1]]:
        one, two = (grouped(side[setting], mode_of) for side in sides)
        pairs = [(mode, mode) for mode in one if mode in two]
        if not pairs and len(one) == len(two) == 1:
            pairs = [(next(iter(one)), next(iter(two)))]
        for mode_1, mode_2 in pairs:
            ones = Side(f"{names[0]}, {mode_1}", one[mode_1])
            tables.append(compare(ones, Side(f"{names[1]}, {mode_2}", two[mode_2]), about=setting))
    if not tables:
        said = " and ".join(f"{', '.join(side) or 'nothing'}" for side in sides)
        raise RequestError(f"the two runs have no setting in common ({said}); measure both with the same one")
    assert first.settings is not None and second.settings is not None
    facts = [content.settings["system"] for content in (first, second) if content.settings is not None]
    return Document(
        title=f"{names[1]} against {names[0]}",
        command=f"blockdraft bench --compare {names[0]}.jsonl {names[1]}.jsonl",
        system=facts[1],
        settings=second.settings,
        workloads=second.settings["workloads"],
        runs=[*first.runs, *second.runs],
        tables=tables,
        details={"first": facts[0], "second": facts[1]},
    )


def _check_same_questions(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> None:
    """Nothing; a RequestError where equal names of prompts mean different prompts, or replies had other limits."""
    ours = {one["name"]: one for one in first["workloads"]}
    for other in second["workloads"]:
        one = ours.get(other["name"])
        if one is None:
            continue
        is_same_size = one["num_prompts"] == other["num_prompts"]
        same = ("format_sha256", *(("prompts_sha256",) if is_same_size else ()), "haystack_sha256")
        if differing := [key for key in same if one.get(key) != other.get(key)]:
            raise RequestError(f"{other['name']} has another {differing[0]} in {names[1]} than in {names[0]}")
    for key in ("max_new_tokens", "seed"):
        if first[key] != second[key]:
            raise RequestError(f"{key} is {first[key]} in {names[0]} and {second[key]} in {names[1]}; measure alike")


def replay_journal(
    system: InProcess,
    source: Path,
    journal_path: Path,
    *,
    data: Path | None,
    sets: Sequence[str],
    widths: Sequence[int],
    num_rows: int,
    command: str,
    where: Mapping[str, Any],
    progress: Progress,
) -> Document:
    """Walk this system's draft along the texts of a run, at every width; the report of that.

    The prompts are read again as that run read them (`sets` names the files of custom ones). Raises RequestError where
    they are others, or where the run holds several texts of a prompt under one sampling.
    """
    from blockdraft.bench.replay import replay, texts_of

    content = read_journal(source)
    assert content.settings is not None
    records = _one_text_each(list(content.records.values()))
    setting = make_replay_setting(content.settings, records)
    texts = []
    for stated in content.settings["workloads"]:
        texts += texts_of(system, _again(stated, data, sets, content.settings["seed"]), records, setting)
    settings = {**content.settings, "table": "replay", "command": command, "system": system.facts.to_json()}
    settings |= {"replay_of": source.name, "modes": [f"width {width}" for width in widths] or ["own width"]}
    with Journal(journal_path, settings, where) as journal:
        done = {(r.width, r.prompt_id, r.sample, r.turn) for r in journal.content.records.values()}
        asked: list[int | None] = list(widths) or [system.facts.max_width]
        for width in asked:
            left = [(r, ids) for r, ids in texts if (width, r.prompt_id, r.sample, r.turn) not in done]
            for number, record in enumerate(replay(system, left, width=width, num_rows=num_rows), start=1):
                journal.append(record)
                progress(f"replay, width {width}", number, len(left), record)
        return document_of(journal.content)


def make_replay_setting(settings: Mapping[str, Any], records: Sequence[RequestRecord]) -> Setting:
    """The setting that the prompts of a run were asked under, as far as it decides their ids."""
    return Setting(
        speculation=True,
        width=None,
        sampling=find_sampling(records[0].sampling),
        max_new_tokens=int(settings["max_new_tokens"]),
        load=Load(concurrency=1),
    )


def _one_text_each(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """One record for each prompt, sample and turn: greedy texts are the same in every mode, of the others there must be
    one mode only."""
    samplings = {record.sampling for record in records}
    if len(samplings) != 1:
        raise RequestError(f"the run has the samplings {', '.join(sorted(samplings))}; replay a run of one")
    chosen: dict[tuple[Any, ...], RequestRecord] = {}
    for record in records:
        first = chosen.setdefault((record.dataset, record.prompt_id, record.sample, record.turn), record)
        if first.output_sha256 != record.output_sha256:
            raise RequestError(
                f"{record.prompt_id} has two texts in this run ({mode_of(first)} and {mode_of(record)}); replay a run "
                "of one mode"
            )
    return list(chosen.values())


def _again(stated: Mapping[str, Any], data: Path | None, sets: Sequence[str], seed: int) -> Workload:
    """A workload as a run stated it, read again. Raises RequestError where it is another."""
    name = str(stated["name"])
    if name == "ruler":
        raise RequestError("contexts of table C cannot be replayed; measure them again with each draft")
    source = next((one for one in sets if Path(one).name == stated["source"]), name)
    workload = load_workload(
        source, data=data, format_name=str(stated["format"]), limit=int(stated["num_prompts"]), seed=seed
    )
    if workload.sha256 != stated["prompts_sha256"]:
        raise RequestError(
            f"the prompts of {name} are not those of the run ({stated['prompts_sha256']}); name its files"
        )
    return workload
