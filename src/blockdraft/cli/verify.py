"""`blockdraft verify`: its options, and the pair it examines. What is examined and how is the library's."""

from __future__ import annotations

import gc
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.generate import set_threads
from blockdraft.cli.options import AllowMaskIsEos, BlockSize, TapStreamToRead, Threads, TrustRemoteCode
from blockdraft.cli.servers import check_no_server, connect_to, pair_options
from blockdraft.cli.show import FetchProgress, note
from blockdraft.errors import PairError, RequestError, UnavailableError

if TYPE_CHECKING:
    from blockdraft.verify import Report

QUICK_HELP = "Small sizes (the default)."
THOROUGH_HELP = "Large sizes: smaller faults are seen."


def verify(
    draft: Annotated[str | None, typer.Argument(metavar="[DRAFT]", help="Draft: folder or hub id.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Target: folder or hub id. Without both, the built-in pair.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Instead of a pair: a running server, as far as it can be examined from outside.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="With --url: as in `bench`. Default: what the server says.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --url: one of the server's models.")] = None,
    plain_url: Annotated[str | None, typer.Option(help="With --url: the same engine without a draft.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help=THOROUGH_HELP)] = False,
    seed: Annotated[int, typer.Option(help="Of the exam's own draws.")] = 0,
    no_reference: Annotated[
        bool,
        typer.Option("--no-reference", help="Do not load the target a second time, in float64, as independent judge."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report there as JSON, besides what is printed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    block_size: BlockSize = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    tap_stream: TapStreamToRead = None,
) -> None:
    """Is this pair compatible, correct and lossless? Exit 0: nothing was found; 1: something was, and what."""
    named = {"engine": engine, "model": model, "plain_url": plain_url}
    if url is None:
        check_no_server(named)
    if quick and thorough:
        raise RequestError("--quick and --thorough were both given; give one of them")
    if draft is not None and target is None:
        raise PairError(f"draft {draft} needs its target; name it with --target")
    if draft is None and target is not None:
        raise PairError(f"target {target} needs its draft; name it before --target")
    if seed < 0:
        raise RequestError(f"--seed is {seed}; it must be a whole number of at least 0")
    set_threads(threads)
    budget = "thorough" if thorough else "quick"
    settings = {
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
        "allow_mask_is_eos": allow_mask_is_eos,
        "block_size": block_size,
        "tap_stream": tap_stream,
    }
    if url is not None:
        of_pair = pair_options(draft, target, threads, settings, dtype="float32")
        of_pair["--no-reference"] = no_reference
        report = _examined_server(url, named, of_pair, budget=budget, seed=seed)
    else:
        report = _examined(
            draft,
            target,
            budget=budget,
            seed=seed,
            has_reference=not no_reference,
            allow_mask_is_eos=allow_mask_is_eos,
            settings=settings,
        )
    text = json.dumps(report.to_json(), indent=1, ensure_ascii=False)
    if out is not None:
        try:
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--out {out}: {error.strerror or error}; name a file that can be written") from None
    print(text if as_json else report.to_text(), end="\n" if as_json else "")
    if not report.has_passed:
        raise typer.Exit(1)


def _examined_server(url: str, named: dict[str, Any], of_pair: dict[str, Any], *, budget: str, seed: int) -> Report:
    from blockdraft.bench.servers.exam import SIZES, examine_server
    from blockdraft.bench.workloads import load_workload

    server = connect_to(url, named, of_pair)
    num_prompts, num_tokens = SIZES[budget]
    prompts = load_workload("own", limit=num_prompts).prompts
    note(f"{budget} examination from outside: {num_prompts} prompts, {num_tokens} tokens")
    return examine_server(server, prompts, num_tokens=num_tokens, budget=budget, seed=seed)


def _examined(
    draft: str | None,
    target: str | None,
    *,
    budget: str,
    seed: int,
    has_reference: bool,
    allow_mask_is_eos: bool,
    settings: dict[str, Any],
) -> Report:
    """Compatibility first, from the files alone; only a pair that fits is loaded."""
    from blockdraft.engine.load import builtin_draft, load
    from blockdraft.formats.source import locate
    from blockdraft.targets import ensure_target
    from blockdraft.verify import ALPHA, BUDGETS, Report, exam_prompts, examine_pair
    from blockdraft.verify.compatibility import check_compatibility
    from blockdraft.verify.reference import Reference, load_reference

    fetching = FetchProgress()
    try:
        target_folder = ensure_target(progress=fetching) if target is None else locate(target, what="target")
    finally:
        fetching.close()
    draft_folder = builtin_draft() if draft is None else locate(draft, what="draft")
    subject = {"draft": draft or draft_folder.name, "target": target or target_folder.name}
    subject |= {name: str(settings[name]) for name in ("dtype", "device")}
    subject["versions"] = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("blockdraft", "torch", "transformers")
    )
    fits = check_compatibility(
        draft_folder, target_folder, allow_mask_is_eos=allow_mask_is_eos, block_size=settings["block_size"]
    )
    if fits.outcome == "failed":
        return Report(subject=subject, budget=budget, alpha=ALPHA, checks=(fits,), seconds=0.0)
    engine = load(draft, target, **settings)
    gc.freeze()
    gc.enable()
    assert engine.tokenizer is not None
    sizes = BUDGETS[budget]
    note(f"{budget} examination: {sizes.about}")
    reference: Reference | str = "--no-reference was given"
    if has_reference:
        note("loading the target once more, in float64, as the judge")
        try:
            reference = load_reference(target_folder)
        except UnavailableError as error:
            reference = str(error)
    return examine_pair(
        engine,
        reference=reference,
        draft_folder=draft_folder,
        budget=sizes,
        prompts=exam_prompts(engine.tokenizer, sizes.num_prompts),
        subject=subject,
        seed=seed,
        checks=[fits],
        on_progress=_Progress(),
    )


class _Progress:
    """A line on stderr for every stage, and for every tenth of it that takes long."""

    def __init__(self) -> None:
        self._last = ("", -1)

    def __call__(self, line: str, share: float) -> None:
        now = (line, int(10 * share))
        if now != self._last:
            note(f"{100 * share:3.0f} %  {line}")
        self._last = now
