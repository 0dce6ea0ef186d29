"""`blockdraft verify`: its options, and the pair it examines. What is examined and how is the library's."""

from __future__ import annotations

import gc
import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.generate import set_threads
from blockdraft.cli.options import AllowMaskIsEos, TapStreamToRead, Threads, TrustRemoteCode
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
    url: Annotated[str | None, typer.Option(help="A running server; comes with `blockdraft serve`.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help=THOROUGH_HELP)] = False,
    seed: Annotated[int, typer.Option(help="Of the exam's own draws.")] = 0,
    no_reference: Annotated[
        bool,
        typer.Option("--no-reference", help="Do not load the target a second time, in float64, as independent judge."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report there as JSON, besides what is printed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    block_size: Annotated[
        int | None, typer.Option(help="Rows of the draft's block, for a draft whose files do not say.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    tap_stream: TapStreamToRead = None,
) -> None:
    """Is this pair compatible, correct and lossless? Exit 0: nothing was found; 1: something was, and what."""
    if url is not None:
        raise UnavailableError(
            "verify --url comes with the server; until then name a pair: blockdraft verify DRAFT --target TARGET"
        )
    if quick and thorough:
        raise RequestError("--quick and --thorough were both given; give one of them")
    if draft is not None and target is None:
        raise PairError(f"draft {draft} needs its target; name it with --target")
    if draft is None and target is not None:
        raise PairError(f"target {target} needs its draft; name it before --target")
    if seed < 0:
        raise RequestError(f"--seed is {seed}; it must be a whole number of at least 0")
    set_threads(threads)
    report = _examined(
        draft,
        target,
        budget="thorough" if thorough else "quick",
        seed=seed,
        has_reference=not no_reference,
        allow_mask_is_eos=allow_mask_is_eos,
        settings={
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "allow_mask_is_eos": allow_mask_is_eos,
            "block_size": block_size,
            "tap_stream": tap_stream,
        },
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
