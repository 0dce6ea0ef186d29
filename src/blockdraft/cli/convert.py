"""`blockdraft convert`: a draft in another dialect. One library call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli.options import AllowMaskIsEos, BlockSize

if TYPE_CHECKING:
    from blockdraft.config import TargetFacts

_DIALECTS = "One of z-lab, speculators, transformers, torchspec, deepspec, k3-dspark, gguf."


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a draft, in any dialect.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Where the converted draft goes, for gguf a file.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="DIALECT", help=_DIALECTS)],
    target: Annotated[
        str | None, typer.Option(help="Target: folder, config.json, hub id or GGUF; for what SRC does not state of it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Stored type of every tensor. Without it, each keeps its own.")
    ] = None,
    block_size: BlockSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier checkpoint in DST.")] = False,
    allow_mask_is_eos: AllowMaskIsEos = False,
) -> None:
    """Write a draft in another dialect and read it back; what the dialect cannot express is refused.

    A draft in gguf holds the tokenizer of its target: --target must be the target's GGUF.
    """
    from blockdraft.formats.convert import convert as convert_checkpoint
    from blockdraft.formats.source import locate

    facts, place = None, None
    if target is not None:
        place = locate(target, what="target", config_only=True)
        facts = _facts(place)
    done = convert_checkpoint(
        locate(source, what="draft"),
        destination,
        to,
        dtype=dtype,
        overwrite=overwrite,
        allow_mask_is_eos=allow_mask_is_eos,
        target=facts,
        target_file=place,
        block_size=block_size,
    )
    what = f"{done.num_tensors} tensors ({', '.join(done.dtypes)}), {done.source_dialect} -> {done.dialect}"
    print(f"{destination}: {what}, read back and equal")
    if done.left_out:
        print(f"not carried over, it says nothing of the draft itself: {', '.join(done.left_out)}")


def _facts(place: Path) -> TargetFacts:
    if place.suffix == ".gguf":
        from blockdraft.formats.gguf import target_facts

        return target_facts(place)
    from blockdraft.inspection import read_target_facts

    return read_target_facts(place)
