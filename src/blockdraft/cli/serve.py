"""`blockdraft serve`: its options, and what it says when it starts.

Knows words; what a setting means, and what a file of settings may hold, is the library's.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdraft.cli.generate import set_threads
from blockdraft.cli.options import BlockSize, TapStreamToRead, Threads
from blockdraft.cli.show import FetchProgress, note

if TYPE_CHECKING:
    from blockdraft.engine import Engine
    from blockdraft.serve.config_file import LaunchSettings
    from blockdraft.serve.service import Service
    from blockdraft.serve.settings import ServerSettings

Switch = bool | None


def serve(
    draft: Annotated[str | None, typer.Argument(metavar="[DRAFT]", help="Draft: folder or hub id.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub id. Without it, the built-in pair.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with these settings; flags go before it. See docs/server.md.")
    ] = None,
    speculation: Annotated[
        str | None, typer.Option(help="required (default), optional: go on without a draft that does not fit, or off.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default), bfloat16, float16, float64, or auto: as it is stored.")
    ] = None,
    draft_dtype: Annotated[str | None, typer.Option(help="The draft's own, where it is not --dtype.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu (default), cuda, cuda:1 ...")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="The target over several devices: auto, balanced or sequential.")
    ] = None,
    quantize: Annotated[str | None, typer.Option(help="int8 or nf4 (bitsandbytes).")] = None,
    weights: Annotated[str | None, typer.Option(help="int8: round the target's weights to 8 bits on the CPU.")] = None,
    block_size: BlockSize = None,
    tap_stream: TapStreamToRead = None,
    trust_remote_code: Annotated[
        Switch, typer.Option("--trust-remote-code/--no-trust-remote-code", help="Run code that a target brings.")
    ] = None,
    allow_mask_is_eos: Annotated[
        Switch,
        typer.Option("--allow-mask-is-eos/--no-allow-mask-is-eos", help="Accept a draft whose mask id ends a text."),
    ] = None,
    width: Annotated[
        str | None, typer.Option(help="auto: the fastest width at every moment. Without it, the trained one.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(help="Choices that run at a time (16).")] = None,
    memory_limit_mib: Annotated[int | None, typer.Option(help="Bound of all states; without it there is none.")] = None,
    prefix_cache_mib: Annotated[int | None, typer.Option(help="States kept for prompts that begin alike (0).")] = None,
    threads: Threads = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (8000); 0 takes a free one.")] = None,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(help="One key a line. Keys also come from BLOCKDRAFT_API_KEYS (with commas).")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call this server; may be repeated.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Host name that requests may use; may be repeated.")
    ] = None,
    max_queue: Annotated[int | None, typer.Option(help="Choices that may wait (256); more get 429.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="Largest body of a request (4 MiB).")] = None,
    max_n: Annotated[int | None, typer.Option(help="Choices of one prompt (16).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most new tokens of a choice; without it, the window.")] = None,
    default_max_tokens: Annotated[
        int | None, typer.Option(help="New tokens of a chat whose request names no limit (1024).")
    ] = None,
    request_timeout_s: Annotated[float | None, typer.Option(help="Longest time of a request (600).")] = None,
    drain_timeout_s: Annotated[float | None, typer.Option(help="What running requests get after SIGTERM (30).")] = None,
    reply_format: Annotated[
        str | None, typer.Option(help="How the target writes reasoning and tool calls; without it, by its template.")
    ] = None,
    page: Annotated[Switch, typer.Option("--page/--no-page", help="The playground page at / (on).")] = None,
    access_log: Annotated[
        Switch, typer.Option("--access-log/--no-access-log", help="A JSON line on stderr per request (on).")
    ] = None,
) -> None:
    """An OpenAI-compatible server with a playground page."""
    given: dict[str, Any] = dict(locals())
    path = given.pop("config")
    for word, name in (("cors_origin", "cors_origins"), ("allow_host", "allowed_hosts")):
        values = given.pop(word)
        given[name] = tuple(values) if values else None
    given["has_page"], given["has_access_log"] = given.pop("page"), given.pop("access_log")
    raise typer.Exit(_run(path, given))


def _run(config: Path | None, given: dict[str, Any]) -> int:
    from blockdraft.serve import create_app
    from blockdraft.serve.config_file import resolve
    from blockdraft.serve.process import bind, serve_forever

    launch, settings = resolve(config, given)
    address = bind(launch.host, launch.port)
    url = f"http://{'[' + launch.host + ']' if ':' in launch.host else launch.host}:{address.getsockname()[1]}"
    facts: dict[str, str] = {}
    app = create_app(lambda: _open_engine(launch, facts), settings)
    note(f"loading; {url}/ready says when it is done")
    return serve_forever(
        app, settings, address, on_ready=lambda service: _say_ready(service, launch, settings, url, facts)
    )


def _open_engine(launch: LaunchSettings, facts: dict[str, str]) -> Engine:
    """The engine; called in the thread that will run it."""
    set_threads(launch.threads)
    from blockdraft.engine import load

    mib = 2**20
    fetching = FetchProgress()
    try:
        engine = load(
            launch.draft,
            launch.target,
            dtype=launch.dtype,
            draft_dtype=launch.draft_dtype,
            device=launch.device,
            device_map=launch.device_map,
            quantize=launch.quantize,  # type: ignore[arg-type]
            weights=launch.weights,  # type: ignore[arg-type]
            speculation=launch.speculation,  # type: ignore[arg-type]
            max_rows=launch.max_rows,
            memory_limit=None if launch.memory_limit_mib is None else launch.memory_limit_mib * mib,
            prefix_cache_bytes=launch.prefix_cache_mib * mib,
            trust_remote_code=launch.trust_remote_code,
            allow_mask_is_eos=launch.allow_mask_is_eos,
            block_size=launch.block_size,
            tap_stream=launch.tap_stream,  # type: ignore[arg-type]
            width="adaptive" if launch.width == "auto" else None,
            progress=fetching,
        )
    finally:
        fetching.close()
    if engine.tap_choice is not None:
        note(str(engine.tap_choice))
    facts["memory"] = _memory(engine, launch)
    gc.freeze()
    gc.enable()
    return engine


def _memory(engine: Engine, launch: LaunchSettings) -> str:
    from blockdraft.engine import Request

    window = engine.target.facts.max_length
    whole = engine.bytes_needed(Request(prompt_ids=(0,), max_new_tokens=window - 1)) / 2**20
    limit = "no limit" if launch.memory_limit_mib is None else f"at most {launch.memory_limit_mib} MiB"
    return f"{launch.max_rows} rows, {limit}; a row of the whole window takes {whole:,.1f} MiB"


def _say_ready(
    service: Service, launch: LaunchSettings, settings: ServerSettings, url: str, facts: dict[str, str]
) -> None:
    """What was loaded, line by line, and where to reach it."""
    info = service.info()
    device = f"{info['dtype']} on {info['device']}"
    lines = {"target": f"{settings.model_name} ({info['target_type']}), window {info['max_length']}, {device}"}
    if info["draft"] is None:
        lines["draft"] = f"none: {info['draft_off_reason']}; plain decoding"
    else:
        taps = ", ".join(map(str, info["target_layer_ids"]))
        fixed = f"2 to {info['max_width']} in a request, else {info['max_width']}"
        lines["draft"] = f"{info['draft']}, {info['draft_dtype']}"
        lines["taps"] = f"layers {taps} of {info['num_target_layers']}, stream {info['tap_stream']}; confirmed"
        lines["widths"] = "auto, plain steps included" if launch.width == "auto" else fixed
    lines["memory"] = facts["memory"]
    lines["replies"] = f"{info['reply_format']}; grammars {'yes' if info['grammar'] else 'no'}"
    lines["keys"] = f"{len(settings.api_keys)}" if settings.api_keys else "none: open to whoever reaches the port"
    lines["url"] = f"{url}/v1" + (f", page {url}/" if settings.has_page else "")
    for name, text in lines.items():
        note(f"{name:<8} {text}")
    if not launch.is_loopback and not settings.api_keys:
        note(f"warning: {launch.host} is not loopback and no API key is set; anybody there may use this server")
