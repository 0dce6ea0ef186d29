"""`blockdraft launch`: one library call to print a production engine's command, another to run it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import AllowMaskIsEos, BlockSize
from blockdraft.cli.show import note

if TYPE_CHECKING:
    from blockdraft.engines import Wish

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}


def launch(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="sglang, vllm or tokenspeed.")],
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="Draft: folder or hub id.")],
    target: Annotated[str, typer.Option(help="Target: folder or hub id.")],
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the command with the reason of each word, start nothing.")
    ] = False,
    width: Annotated[
        int | None, typer.Option(help="Positions scored in a step, anchor included. Without it, the draft's own.")
    ] = None,
    tap_stream: Annotated[
        str | None, typer.Option(help="Stream of a Kimi K3 target that the draft reads: prefix or attn_res.")
    ] = None,
    draft_window: Annotated[
        int | None, typer.Option(help="Positions that the draft sees (SGLang). Without it, what its layers see.")
    ] = None,
    gpus: Annotated[str | None, typer.Option(help="GPUs of all nodes together, as 8xH200.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor parallel size. Without it, all GPUs.")] = None,
    nodes: Annotated[int, typer.Option(help="Nodes that share the target.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    head: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the nodes meet, on node 0.")] = None,
    max_context: Annotated[int | None, typer.Option("--context", help="Longest request, in tokens.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time.")] = None,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Share of a GPU's memory for weights and caches.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="Where it listens. Without it, the engine's own.")] = None,
    block_size: BlockSize = None,
    engine_env: Annotated[
        Path | None, typer.Option(help="Virtual environment of the engine. Without it, what is on the PATH.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Version to print for, where the engine is not installed.")
    ] = None,
    own_build: Annotated[
        bool, typer.Option("--own-build", help="The engine is a branch, not a release: what releases refuse is a note.")
    ] = False,
    allow_degraded: Annotated[
        bool, typer.Option("--allow-degraded", help="Start although less will be accepted than the draft could.")
    ] = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    floor: Annotated[
        float | None, typer.Option(help="Tokens a step that must be accepted. Without it, by the draft's card.")
    ] = None,
    probes: Annotated[int, typer.Option(help="Prompts to measure acceptance with, at most 6; 0: do not.")] = 6,
    probe_tokens: Annotated[int, typer.Option(help="Tokens to ask for in each.")] = 128,
    probe_timeout: Annotated[float, typer.Option(help="Seconds that one may take.")] = 300.0,
    startup_timeout: Annotated[float, typer.Option(help="Seconds until it must be ready.")] = 3600.0,
    stop_grace: Annotated[float, typer.Option(help="Seconds that it has to stop by itself.")] = 30.0,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Stop it again when everything is confirmed and measured.")
    ] = False,
) -> None:
    """Check a pair, start a production engine with the right flags, see that it runs what was meant.

    What stands after the options, or after --, goes to the engine; what contradicts the pair is refused. Ends 1 if the
    engine took other taps, width or mask than the draft declares, or accepts too little; it is stopped then.
    """
    from blockdraft.engines import Conduct, Wish, floor_of, prepare, run_launch
    from blockdraft.errors import RequestError, shown

    if tap_stream not in (None, "prefix", "attn_res"):
        raise RequestError(f"--tap-stream is {shown(tap_stream)}: prefix or attn_res")
    if probes < 0 or probe_tokens < 2:
        raise RequestError(f"--probes {probes}, --probe-tokens {probe_tokens}: at least 0, at least 2")
    wish = Wish(
        engine=engine,
        draft=draft,
        target=target,
        extra=tuple(word for word in context.args if word != "--"),
        width=width,
        tap_stream=tap_stream,  # type: ignore[arg-type]
        draft_window=draft_window,
        gpus=gpus,
        tensor_parallel=tp,
        num_nodes=nodes,
        node_rank=node_rank,
        head=head,
        context=max_context,
        concurrency=concurrency,
        memory_fraction=memory_fraction,
        host=host,
        port=port,
        block_size=block_size,
        environment=engine_env,
        engine_version=engine_version,
        is_own_build=own_build,
        is_degraded_allowed=allow_degraded,
        allow_mask_is_eos=allow_mask_is_eos,
    )
    if print_only:
        _print(wish)
        return
    ready = prepare(wish, is_started=True)
    for line in ready.notes:
        note(f"note: {line}")
    if ready.engine.nodes.is_replaced(ready.setting):
        raise RequestError(f"node {node_rank} does not start the engine: see --print for what it runs")
    conduct = Conduct(
        startup_timeout_s=startup_timeout,
        probe_timeout_s=probe_timeout,
        stop_grace_s=stop_grace,
        num_probes=probes,
        num_probe_tokens=probe_tokens,
        floor=floor_of(draft, ready.setting.width, floor),
        is_check_only=check_only,
        extra=wish.extra,
    )
    code = run_launch(
        ready, conduct, on_line=lambda line: print(line, flush=True), note=lambda line: note(f"blockdraft: {line}")
    )
    if code:
        raise typer.Exit(code)


def _print(wish: Wish) -> None:
    """The command of every node; of one node, the command alone."""
    from blockdraft.engines import prepare, render

    for rank in range(wish.num_nodes):
        ready = prepare(dataclasses.replace(wish, node_rank=rank), is_started=False)
        if rank == 0:
            how = "as installed" if not ready.setting.installed.is_assumed else "not found here, assumed"
            print(f"# {ready.engine.label} {ready.command.version} ({how})")
            for line in ready.notes:
                print(f"# note: {line}")
        if wish.num_nodes > 1:
            print(f"\n# ---- node {rank}")
        print(render(ready.command, is_replaced=ready.engine.nodes.is_replaced(ready.setting)), end="")
