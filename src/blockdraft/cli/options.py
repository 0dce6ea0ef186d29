"""Options that several commands share, so that they are called and explained alike. Defaults are the commands' own."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AllowMaskIsEos", "BlockSize", "TapStreamToRead", "Threads", "TrustRemoteCode"]

AllowMaskIsEos = Annotated[
    bool, typer.Option("--allow-mask-is-eos", help="Accept a draft whose mask id also ends or pads a text.")
]
BlockSize = Annotated[int | None, typer.Option(help="Rows of the draft's block, for a draft whose files do not say.")]
TapStreamToRead = Annotated[
    str | None,
    typer.Option(help="The stream that the draft reads. Kimi K3: prefix, attn_res or auto; qwen4_exp: mean."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that a target brings.")]
