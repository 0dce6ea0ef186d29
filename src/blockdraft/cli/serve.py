"""`blockdraft serve`: its options, the configuration file, and what it says when it starts.

Knows words and files; what a setting means is the library's.
"""

from __future__ import annotations

from typing import Annotated

import typer

from blockdraft.cli.options import AllowMaskIsEos, TapStreamToRead, Threads, TrustRemoteCode


def serve(
    draft: Annotated[str | None, typer.Argument(metavar="[DRAFT]", help="Draft: folder or hub id.")] = None,
    target: Annotated[str | None, typer.Option(help="Target: folder or hub id. Without it, the built-in pair.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto.")] = "float32",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    max_rows: Annotated[int, typer.Option(help="Choices that run at a time.")] = 16,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
    tap_stream: TapStreamToRead = None,
) -> None:
    """An OpenAI-compatible server with a playground page."""
    from blockdraft.cli.generate import set_threads
    from blockdraft.cli.show import note
    from blockdraft.serve import ServerSettings, create_app

    set_threads(threads)
    from blockdraft.engine import Engine, load
    from blockdraft.serve.process import bind, serve_forever

    def open_engine() -> Engine:
        return load(draft, target, dtype=dtype, max_rows=max_rows)

    settings = ServerSettings(has_access_log=True)
    address = bind(host, port)
    app = create_app(open_engine, settings)
    code = serve_forever(app, settings, address, on_ready=lambda service: note(f"ready at port {port}"))
    raise typer.Exit(code)
