"""Options that several commands share, so that they are called and explained alike. Defaults are the commands' own."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AllowMaskIsEos", "TapStreamToRead", "Threads", "TrustRemoteCode"]

AllowMaskIsEos = Annotated[
    bool, typer.Option("--allow-mask-is-eos", help="Accept a draft whose mask id also ends or pads a text.")
]
TapStreamToRead = Annotated[
    str | None, typer.Option(help="Kimi K3: the stream that the draft reads; prefix, attn_res or auto.")
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that a target brings.")]
