"""`blockdraft bench`: its options, the pair it loads, where its files go. What is measured and how is the library's."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.generate import set_threads
from blockdraft.cli.options import AllowMaskIsEos, BlockSize, TapStreamToRead, Threads, TrustRemoteCode
from blockdraft.cli.servers import check_no_server, connect_to, pair_options
from blockdraft.cli.show import FetchProgress, note
from blockdraft.errors import RequestError, shown

if TYPE_CHECKING:
    from blockdraft.bench.command import Plan
    from blockdraft.bench.in_process import InProcess
    from blockdraft.bench.record import RequestRecord
    from blockdraft.bench.report import Document
    from blockdraft.bench.system import System

OUT = Path("bench")
_PATH_OPTIONS = ("--out", "--data", "--haystack", "--target", "--replay", "--predict", "--sets")


def bench(
    draft: Annotated[str | None, typer.Argument(metavar="[DRAFT]", help="Draft: folder or hub id.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Target: folder or hub id. Without both, the built-in pair.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Instead of a pair: an OpenAI-compatible server, as http://127.0.0.1:8000.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="With --url: blockdraft, vllm, sglang, tokenspeed, llama_cpp, mistral_rs, tensorrt_llm. "
            "Default: what the server says."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: one of the server's models.")] = None,
    plain_url: Annotated[
        str | None, typer.Option(help="With --url: the same engine without a draft, for the speed-up.")
    ] = None,
    effort: Annotated[
        str | None, typer.Option(help="With --url: the target's word for its highest reasoning effort, or none.")
    ] = None,
    table: Annotated[
        str, typer.Option(help="A: data sets by width. B: matrix of data sets. C: long contexts. speed: against plain.")
    ] = "A",
    sets: Annotated[
        str | None,
        typer.Option(help="Data sets or .jsonl files, by commas. Default: own, for B all that are here."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data set files (docs/bench.md); else they come from the hub."),
    ] = None,
    haystack: Annotated[Path | None, typer.Option(help="C: a long text, .jsonl of {text} or plain.")] = None,
    lengths: Annotated[str | None, typer.Option(help="C: tokens of a context, as 8k,32k,64k,128k.")] = None,
    format_: Annotated[
        list[str] | None,
        typer.Option("--format", help="SET=NAME, the prompt format of another harness; may be repeated."),
    ] = None,
    widths: Annotated[str | None, typer.Option(help="Block widths, as 5,8. Default: the draft's own.")] = None,
    sampling: Annotated[
        str, typer.Option(help="greedy, production (temperature 1, top-p .95, highest effort), or both by a comma.")
    ] = "greedy",
    concurrency: Annotated[str | None, typer.Option(help="Conversations in flight, as 1,8,32.")] = None,
    rate: Annotated[float | None, typer.Option(help="Instead: Poisson arrivals a second, open loop.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each set; C: contexts of a length.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length limit of a reply.")] = None,
    samples: Annotated[int, typer.Option(help="Samples of each prompt, where they are drawn.")] = 1,
    rounds: Annotated[int | None, typer.Option(help="Rounds in which settings alternate. Default: 1, speed 2.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampling, arrivals, options and contexts.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the journal and the report.")] = OUT,
    name: Annotated[str | None, typer.Option(help="Name of its files. Default: table-A and so on.")] = None,
    report: Annotated[list[Path] | None, typer.Option(help="No run: the report of a journal; may be repeated.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="No run: two journals, same prompts, paired differences.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Walk this draft along the texts of a journal instead of writing new ones.")
    ] = None,
    predict: Annotated[
        str | None,
        typer.Option(
            metavar="RUN.jsonl|N|S1,S2,...",
            help="No run: speed-up and best width by load, from a run, tokens a step or shares by position.",
        ),
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="With --predict: a roofline of these, as 8xH200.")] = None,
    context: Annotated[str | None, typer.Option(help="With --predict: positions that a request holds, as 32k.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of tables.")] = False,
    block_size: BlockSize = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    tap_stream: TapStreamToRead = None,
) -> None:
    """Measure acceptance and speed, with intervals: tables, figures, JSON. A killed run goes on where it was."""
    if sum(given is not None for given in (report, compare, replay, predict, url)) > 1:
        raise RequestError("--report, --compare, --replay, --predict and --url are five things; ask for one of them")
    named = {"engine": engine, "model": model, "plain_url": plain_url, "effort": effort}
    if url is None:
        check_no_server(named)
    if predict is None and (gpus is not None or context is not None):
        raise RequestError("--gpus and --context belong to --predict; add it, or drop them")
    if report is not None or compare is not None:
        document = _from_journals(report, compare)
        return _finish(document, out, name or ("compare" if compare else "report"), as_json)
    loads = _loads(concurrency, rate)
    settings = {"dtype": dtype, "device": device, "block_size": block_size, "tap_stream": tap_stream}
    settings |= {"trust_remote_code": trust_remote_code, "allow_mask_is_eos": allow_mask_is_eos}
    most_rows = max([load.concurrency or 1 for load in loads])
    if predict is not None:
        document = _predicted(
            predict, draft, target, threads, gpus=gpus, context=context, concurrency=concurrency, settings=settings
        )
        return _finish(document, out, name or "predict", as_json)
    if replay is not None:
        system = _system(draft, target, threads, max_rows=most_rows, settings=settings)
        given = {"data": data, "sets": sets.split(",") if sets else (), "widths": _numbers("--widths", widths)}
        return _replay(system, replay, {**given, "num_rows": most_rows}, out, name, as_json)
    from blockdraft.bench.command import Options, load_sets, make_plan

    options = Options(
        table=table,
        sets=sets.split(",") if sets else (),
        data=data,
        haystack=haystack,
        lengths=_lengths(lengths),
        formats=_formats(format_ or []),
        widths=_numbers("--widths", widths),
        samplings=sampling.split(","),
        loads=loads,
        limit=limit,
        max_new_tokens=max_new_tokens,
        num_samples=samples,
        num_rounds=rounds,
        seed=seed,
    )
    rows = most_rows if rate is None else 16
    found = None if table == "C" else load_sets(options)  # what is wrong with them is said before anything is loaded
    if url is not None:
        server = connect_to(url, named, pair_options(draft, target, threads, settings, dtype="bfloat16"))
        return _measure(make_plan(options, server, found), server, out, name or f"table-{table}", as_json)
    system = _system(draft, target, threads, max_rows=rows, settings=settings)
    _measure(make_plan(options, system, found), system, out, name or f"table-{table}", as_json)


def _measure(plan: Plan, system: System, out: Path, name: str, as_json: bool) -> None:
    from blockdraft.bench.command import measure
    from blockdraft.bench.where import where

    for workload in plan.workloads:
        note(f"{workload.name}: {len(workload.prompts)} of {workload.num_rows} prompts, format {workload.format_name}")
    for line in plan.left_out:
        note(f"left out: {line}")
    shown_progress = _Progress()
    try:
        document = measure(
            plan,
            system,
            out / f"{name}.jsonl",
            command=_command(sys.argv[1:]),
            where=where(),
            progress=shown_progress,
        )
    finally:
        shown_progress.close()
    _finish(document, out, name, as_json)


def _finish(document: Document, out: Path, name: str, as_json: bool) -> None:
    """Print and write a report; exit code 1 where the counters of a table cannot be true."""
    from blockdraft.bench.report import print_terminal, write

    if as_json:
        print(document.to_json_text(), end="")
    else:
        print_terminal(document)
    paths = write(document, out, name)
    note(f"written: {', '.join(str(path) for path in paths)}")
    if not document.holds:
        note("the identities do not hold: see the tables that are not shown")
        raise typer.Exit(1)


def _predicted(
    source: str,
    draft: str | None,
    target: str | None,
    threads: int | None,
    *,
    gpus: str | None,
    context: str | None,
    concurrency: str | None,
    settings: dict[str, Any],
) -> Document:
    from blockdraft.cli.predict import DEFAULT_LOADS, predict_here, predict_on_gpus

    command = _command(sys.argv[1:])
    loads = sorted(load.concurrency for load in _loads(concurrency or DEFAULT_LOADS, None))
    if gpus is None:
        return predict_here(
            source,
            lambda most: _system(draft, target, threads, max_rows=most, settings=settings),
            context=context,
            loads=loads,
            command=command,
        )
    options = {name: settings[name] for name in ("allow_mask_is_eos", "block_size")}
    return predict_on_gpus(source, draft, target, gpus=gpus, context=context, loads=loads, command=command, **options)


def _from_journals(report: Sequence[Path] | None, pair: tuple[Path, Path] | None) -> Document:
    from blockdraft.bench.command import comparison_of, document_of
    from blockdraft.bench.journal import read_journal

    if pair is not None:
        return comparison_of(*(read_journal(path) for path in pair), names=[path.stem for path in pair])
    assert report is not None
    return document_of(read_journal(report))


def _replay(
    system: InProcess, source: Path, options: dict[str, Any], out: Path, name: str | None, as_json: bool
) -> None:
    from blockdraft.bench.command import replay_journal
    from blockdraft.bench.where import where

    name = name or f"replay-{source.stem}"
    shown_progress = _Progress()
    try:
        document = replay_journal(
            system,
            source,
            out / f"{name}.jsonl",
            **options,
            command=_command(sys.argv[1:]),
            where=where(),
            progress=shown_progress,
        )
    finally:
        shown_progress.close()
    _finish(document, out, name, as_json)


# ---- words -----------------------------------------------------------------------------------------------------------
def _loads(concurrency: str | None, rate: float | None) -> list[Any]:
    from blockdraft.bench.system import Load

    if rate is not None:
        if concurrency is not None:
            raise RequestError("--concurrency is a closed loop and --rate an open one; give one of them")
        return [Load(rate=rate)]
    return [Load(concurrency=count) for count in _numbers("--concurrency", concurrency or "1")]


def _numbers(option: str, words: str | None) -> list[int]:
    if not words:
        return []
    try:
        return [int(word) for word in words.split(",")]
    except ValueError:
        raise RequestError(f"{option} is {shown(words)}; give whole numbers with commas between them") from None


def _lengths(words: str | None) -> list[int]:
    from blockdraft.inspection.plan import read_length

    return [read_length(word) for word in words.split(",")] if words else []


def _formats(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for word in words:
        dataset, _, name = word.partition("=")
        if not name or dataset in found:
            raise RequestError(f"--format {shown(word)}: give SET=NAME, each set once, such as gsm8k=bare")
        found[dataset] = name
    return found


def _command(words: Sequence[str]) -> str:
    """The command as a result states it: files and folders of this machine by their last part alone."""
    shown_words = ["blockdraft"]
    for before, word in zip(["", *words], words, strict=False):
        option, is_joined, value = word.partition("=")
        if before in _PATH_OPTIONS or before == "bench":
            word = _last_parts(word)
        elif is_joined and option in _PATH_OPTIONS:
            word = f"{option}={_last_parts(value)}"
        shown_words.append(word)
    return " ".join(shown_words)


def _last_parts(words: str) -> str:
    return ",".join(Path(word).name if Path(word).is_absolute() else word for word in words.split(","))


# ---- the pair --------------------------------------------------------------------------------------------------------
def _system(
    draft: str | None, target: str | None, threads: int | None, *, max_rows: int, settings: dict[str, Any]
) -> InProcess:
    set_threads(threads)
    import blockdraft
    from blockdraft.bench.in_process import InProcess
    from blockdraft.bench.where import checkpoint_name, hardware
    from blockdraft.engine.load import BUILTIN_NAME, builtin_draft, load
    from blockdraft.formats.source import locate
    from blockdraft.targets import ensure_target
    from blockdraft.targets.smollm2 import TARGET_NAME

    fetching = FetchProgress()
    try:
        engine = load(draft, target, max_rows=max_rows, progress=fetching, **settings)
    finally:
        fetching.close()
    if engine.tap_choice is not None:
        note(str(engine.tap_choice))
    gc.freeze()
    gc.enable()
    target_folder = ensure_target() if target is None else locate(target, what="target")
    draft_folder = builtin_draft() if draft is None else locate(draft, what="draft")
    return InProcess(
        engine,
        version=blockdraft.__version__,
        target=checkpoint_name(target_folder, target, TARGET_NAME),
        draft=checkpoint_name(draft_folder, draft, BUILTIN_NAME),
        hardware=hardware(settings["device"], threads),
        details={name: settings[name] for name in ("dtype", "device")},
    )


class _Progress:
    """A bar on a terminal; elsewhere a line when something else begins, and every half minute."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._what = ""
        self._said_at = 0.0
        self._lengths: list[float] = [0, 0]

    def __call__(self, what: str, done: int, total: int, record: RequestRecord | None) -> None:
        counts = None if record is None else record.counts
        if counts is not None and counts.num_steps:
            self._lengths[0] += counts.num_accepted_draft_tokens or 0
            self._lengths[1] += counts.num_steps
        if what != self._what:
            self._lengths = [0, 0]
        words = what if not self._lengths[1] else f"{what}: {1 + self._lengths[0] / self._lengths[1]:.2f} tokens a step"
        if sys.stderr.isatty():
            self._draw(words, done, total)
        elif what != self._what or time.monotonic() - self._said_at > 30.0:
            self._said_at = time.monotonic()
            note(f"{done} of {total}  {words}")
        self._what = what

    def _draw(self, words: str, done: int, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(words, total=total)
        self._bar.update(self._task, completed=done, description=words)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
