"""From a folder or a hub id to a target that is ready to run.

Owns which class of target a checkpoint becomes, and what is checked before its weights are read. Must not know drafts
or requests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from blockdraft.config import TapStream
from blockdraft.errors import CheckpointError, PairError, UnavailableError
from blockdraft.packed import pack_linears_

from .contract import Target, checked_taps
from .fused import FusedTarget, can_fuse
from .hf import HFTarget
from .hf_attention import use_grouped_attention_
from .kimi_k3 import holds_kimi_k3, load_kimi_k3
from .model_facts import declared_facts, facts_of

__all__ = ["load_model", "load_target"]


def load_target(
    name_or_path: str | Path,
    *,
    tap_layer_ids: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    pack: bool | None = None,
    fused: bool | None = None,
    trust_remote_code: bool = False,
    tap_stream: TapStream = "prefix",
) -> Target:
    """The target in a local folder or of a hub id, ready to run.

    dtype None: as stored. pack: weights and attention in the form that is fastest on the CPU, the same up to
    rounding; None does it wherever it pays. fused: one pass for all rows, for the families that have it; None uses it
    wherever it is there. The family and the taps are checked before any weight is read. tap_stream: which of the two
    streams of a target with attention residuals (Kimi K3) the taps are.
    """
    source = str(name_or_path)
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} was asked for and no CUDA device is here: use device 'cpu'")
    folder = Path(source).expanduser()
    if holds_kimi_k3(folder):
        if fused:
            raise UnavailableError("fused=True was asked for, and Kimi K3 has no other form here: pass fused=None")
        return load_kimi_k3(folder, tap_layer_ids, tap_stream=tap_stream, dtype=dtype, device=place, pack=pack)
    if tap_stream != "prefix":
        raise PairError(f"taps of the stream {tap_stream!r} were asked for: only Kimi K3 has it; is this its target?")
    model = load_model(source, tap_layer_ids, dtype=dtype, trust_remote_code=trust_remote_code)
    model.to(place)
    can_pack = place.type == "cpu" and not hasattr(model.config, "quantization_config")
    if pack and not can_pack:
        raise UnavailableError(
            f"pack=True needs an unquantised target on the CPU, this one is on {place}: pass pack=None"
        )
    should_pack = can_pack if pack is None else pack
    if fused and not can_fuse(model):
        raise UnavailableError(
            f"fused=True was asked for, and {model.config.model_type!r} has no fused form here: pass fused=None"
        )
    if fused or (fused is None and can_fuse(model)):
        taps = checked_taps(tap_layer_ids, len(model.model.layers))
        return FusedTarget(model.eval(), facts_of(model), taps, pack=should_pack)
    if should_pack:
        pack_linears_(model)
        use_grouped_attention_(model)
    return HFTarget(model, tap_layer_ids)


def load_model(
    source: str, tap_layer_ids: Sequence[int], *, dtype: torch.dtype | None, trust_remote_code: bool = False
) -> Any:
    """The transformers model itself, whole and without gradients; its family and the taps are checked first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_folder(source)
    config = _read(AutoConfig, source, trust_remote_code=trust_remote_code)
    facts = declared_facts(config)
    checked_taps(tap_layer_ids, facts.num_layers)
    model, found = _read(
        AutoModelForCausalLM,
        source,
        dtype="auto" if dtype is None else dtype,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise CheckpointError(
            f"{source} lacks {len(missing)} tensors of a {facts.model_type} model ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): fetch it again, or correct its config.json"
        )
    model.requires_grad_(False)
    return model


def _check_folder(source: str) -> None:
    """Raise CheckpointError for what can only be a path and is not there, before a hub is asked for it."""
    path = Path(source).expanduser()
    looks_local = source.startswith((".", "~", os.sep)) or source.count("/") > 1 or "\\" in source
    if path.is_file():
        raise CheckpointError(f"{source} is a file: give the folder that holds config.json and the weights")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{source} has no config.json: give the folder of a transformers checkpoint")
    if looks_local and not path.exists():
        raise CheckpointError(f"no folder {source}: give a folder with config.json, or a hub id (owner/name)")


def _read(loader: Any, source: str, **kwargs: Any) -> Any:
    path = Path(source).expanduser()
    is_local = path.is_dir()
    try:
        with _no_progress_bar():
            return loader.from_pretrained(str(path) if is_local else source, **kwargs)
    except Exception as error:  # configs and weights that make no sense raise anything, bare Exception included
        reason = " ".join(str(error).split())[:200]
        if is_local:
            raise CheckpointError(f"{source} cannot be loaded as a causal language model: {reason}") from error
        raise UnavailableError(
            f"target {source!r} is no local folder and could not be fetched from the hub: check the name and"
            f" the network, or give a local folder ({reason})"
        ) from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading draws nothing: a library does not write to its caller's terminal."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
