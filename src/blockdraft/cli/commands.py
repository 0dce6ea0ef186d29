"""The short commands: train, corpus, inspect, pull. Each is one library call."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from blockdraft.cli.generate import set_threads
from blockdraft.cli.options import AllowMaskIsEos, BlockSize, Threads
from blockdraft.cli.show import FetchProgress, has_colours, note
from blockdraft.errors import RequestError, UnavailableError, shown


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a ready recipe, or path of a TOML file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as optim.num_steps=2000.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; an interrupted run in it goes on.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub id. Without it, the recipe's.")] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Text that is there already. Without it, the target writes it into OUT/corpus.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the resolved recipe, its sizes and a probe's time, then stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The plan as JSON.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Pause at this step; the next call goes on.")] = None,
    threads: Threads = None,
    no_gates: Annotated[bool, typer.Option("--no-gates", help="Skip the checks before the first step.")] = False,
    tracker: Annotated[str | None, typer.Option(help="Send the metrics to trackio, wandb or tensorboard too.")] = None,
) -> None:
    """Train a drafter; the last step exports it to OUT/draft."""
    if as_json and not plan:
        raise RequestError("--json is for --plan; a run keeps its numbers in OUT/metrics.jsonl")
    if out is None and not plan:
        raise RequestError("give --out FOLDER, where the run goes; --plan only shows what it would be")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is first imported
    from blockdraft.train.overrides import resolve_recipe

    resolved = resolve_recipe(recipe, changes or [])
    set_threads(threads)
    if plan:
        from blockdraft.train.plan import make_plan

        made = make_plan(resolved, target=target)
        print(json.dumps(made.to_dict(), indent=1) if as_json else made.to_text(), end="\n" if as_json else "")
        return
    from blockdraft.train.command import run_training
    from blockdraft.train.parallel import OtherProcessFailed

    assert out is not None
    gc.enable()
    try:
        done = run_training(
            resolved,
            corpus,
            target,
            out,
            stop_after=stop_after,
            has_gates=not no_gates,
            tracker=tracker,
            on_progress=note,
        )
    except OtherProcessFailed:  # the process that failed has printed why
        raise typer.Exit(2) from None
    if done.is_main:
        print(f"step {done.step} of {done.num_steps}" if done.draft is None else f"drafter {done.draft}")


def corpus(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name of a ready recipe, or path of a TOML file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, such as prompts.self_written=200.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the corpus goes; it goes on where it stopped.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub id. Without it, the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads, where text.num_processes is 1.")] = None,
) -> None:
    """Let a target write the text that a drafter is trained on: the first part of `train`, by itself."""
    if out is None:
        raise RequestError("give --out FOLDER, where the corpus goes")
    from blockdraft.train.overrides import resolve_recipe

    resolved = resolve_recipe(recipe, changes or [])
    set_threads(threads)
    from blockdraft.train.prepare import run_corpus

    gc.enable()
    manifest = run_corpus(resolved.recipe, target, out, on_progress=note)
    print(
        f"{manifest.success} of {manifest.given} prompts answered with {manifest.written_tokens} tokens in {out}; "
        f"{manifest.num_skipped} skipped, {manifest.num_errors} refused"
    )


def inspect(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Folder, config.json or hub id of a draft.")],
    target: Annotated[str | None, typer.Option(help="Target: folder, config.json or hub id.")] = None,
    block_size: BlockSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Instead: memory, step times and speed-up of the pair on some GPUs.")
    ] = False,
    gpus: Annotated[str | None, typer.Option(help="The GPUs of a plan, as 8xH200.")] = None,
    context: Annotated[str | None, typer.Option(help="Positions of every request, as 128k. Without it, 32k.")] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Requests at a time on one replica, as 1..256 or 1,8,64. Without it, 1..256.")
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Tokens a step, or a share for each position. Without it, by the draft's card.")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="GPUs of one replica. Without it, the fewest that hold it.")] = None,
    price: Annotated[float | None, typer.Option(help="USD for an hour of one GPU.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of the target's cache: 16 or 8. Without it, 16.")] = None,
    target_gb: Annotated[
        float | None, typer.Option(help="Size of the target's weights, for one whose config does not tell.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Measured step times, a JSON file, in place of a roofline.")
    ] = None,
) -> None:
    """What is this checkpoint, does it fit the target, what will it cost. Needs no torch, reads no weights."""
    from blockdraft.cli.plan import PlanWish, show_plan

    wish = PlanWish(
        gpus=gpus,
        context=context,
        concurrency=concurrency,
        acceptance=acceptance,
        tensor_parallel=tp,
        usd_per_gpu_hour=price,
        kv_bits=kv_bits,
        target_gb=target_gb,
        costs=costs,
    )
    if plan:
        show_plan(draft, target, wish, allow_mask_is_eos=allow_mask_is_eos, block_size=block_size, as_json=as_json)
        return
    if wish.given():
        raise RequestError(f"{', '.join(wish.given())} without --plan: add it, or leave them out")
    from blockdraft.formats.source import locate
    from blockdraft.inspection import inspect_checkpoint, render_text

    found = locate(draft, what="draft", config_only=True)
    pair = None if target is None else locate(target, what="target", config_only=True)
    report = inspect_checkpoint(
        found, pair, allow_mask_is_eos=allow_mask_is_eos, block_size=block_size, name=draft, target_name=target
    )
    if as_json:
        print(json.dumps(report, indent=1))
        return
    columns = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    print(render_text(report, has_colours=has_colours(sys.stdout), columns=columns), end="")


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pair to fetch.")] = "smollm2-135m",
    check: Annotated[
        bool, typer.Option("--check", help="Check every byte that is stored; mend what is damaged.")
    ] = False,
) -> None:
    """Fetch a ready pair: check it, convert it once, and say where it is."""
    if name != "smollm2-135m":
        raise UnavailableError(f"no ready pair {shown(name)}; there is smollm2-135m")
    from blockdraft.engine.load import builtin_draft
    from blockdraft.targets.smollm2 import ensure_target, repair_target

    progress = FetchProgress()
    try:
        folder = (repair_target if check else ensure_target)(progress=progress)
    finally:
        progress.close()
    print(f"target {folder}")
    print(f"draft  {builtin_draft()}")
