"""From names to a running engine: find the checkpoints, check the pair, load both halves.

Owns which draft and target are meant when none is named, and what happens when a draft does not fit.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Literal

import torch

from blockdraft.config import TAP_STREAMS, TapStream
from blockdraft.draft import DraftModel
from blockdraft.engine.core import Engine
from blockdraft.engine.fit import check_fit
from blockdraft.engine.tap_stream import choose_stream, settle_stream
from blockdraft.engine.tune import adaptive_width
from blockdraft.errors import BlockdraftError, PairError, RequestError, UnavailableError
from blockdraft.formats import read as read_checkpoint
from blockdraft.formats.source import locate
from blockdraft.targets import ensure_target, load_target
from blockdraft.targets.loading import DeviceMap, WeightsForm, check_placement, check_weights
from blockdraft.targets.quantised import QuantizeMode
from blockdraft.targets.stored import StoredTarget, find_target
from blockdraft.text import load_tokenizer

__all__ = ["DTYPES", "SpeculationMode", "builtin_draft", "load"]

SpeculationMode = Literal["required", "optional", "off"]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
BUILTIN_NAME = "smollm2-135m"


def builtin_draft() -> Path:
    """The folder of the drafter that the package carries, made for the built-in target."""
    return Path(str(resources.files("blockdraft"))) / "data" / BUILTIN_NAME


def load(
    draft: str | Path | None = None,
    target: str | Path | None = None,
    *,
    dtype: str = "float32",
    draft_dtype: str | None = None,
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    quantize: QuantizeMode | None = None,
    weights: WeightsForm | None = None,
    speculation: SpeculationMode = "required",
    max_rows: int = 16,
    max_waiting: int | None = None,
    memory_limit: int | None = None,
    prefix_cache_bytes: int = 0,
    trust_remote_code: bool = False,
    allow_mask_is_eos: bool = False,
    block_size: int | None = None,
    tap_stream: TapStream | Literal["auto"] | None = None,
    width: Literal["adaptive"] | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Engine:
    """An engine for a pair; without names, for the built-in one.

    `speculation`: "required" makes a draft that does not fit, or is not there, an error; "optional" goes on without
    it and says so in every completion; "off" loads no draft. `dtype` holds for both halves, "auto" is each as it is
    stored; `draft_dtype` is for the draft alone. `device_map` spreads the target over devices and `quantize` makes it
    int8 or nf4 while it is read (bitsandbytes), `weights` "int8" rounds it to 8 bits for the CPU, see `load_target`: in
    both cases the texts are those of the rounded target; the draft lies where the target's embedding does,
    in its own number format. `progress` is called with what a first-time fetch is doing and the share of it that is
    done. `allow_mask_is_eos` consents to a draft whose mask id also ends or pads a text. `max_rows`, `max_waiting`,
    `memory_limit`, `prefix_cache_bytes`: the engine's. `block_size` is for a draft whose files state none.
    `tap_stream`: which stream of a target with two (Kimi K3) the draft reads; None is what its config says, or what is
    known of the checkpoint; "auto" measures both on a short probe and leaves the outcome in the engine's `tap_choice`.
    `width` "adaptive" chooses the width of every step, plain decoding included, for the most tokens per second (the
    costs of steps are measured once, for a few seconds); None is the trained one. What a request names goes before it.
    """
    _check_options(width, speculation, dtype, draft_dtype, block_size, tap_stream)
    place = _checked_device(device)
    check_placement(device_map, place, quantize)
    check_weights(weights, place)
    _check_named(draft, target, speculation)
    named = ensure_target(progress=progress) if target is None else target
    stored = find_target(named, trust_remote_code=trust_remote_code)
    given = (draft, stored, place, draft_dtype or dtype, target is None, allow_mask_is_eos, block_size, tap_stream)
    model, reason = _draft_or_reason(speculation, lambda: _load_draft(*given))
    loaded = load_target(
        stored,
        tap_layer_ids=() if model is None else model.config.target_layer_ids,
        dtype=DTYPES.get(dtype),
        device=place,
        device_map=device_map,
        quantize=quantize,
        weights=weights,
        tap_stream=(None if model is None else model.config.tap_stream) or "prefix",
    )
    if model is not None:
        _settle(model, loaded.device)
    tokenizer = load_tokenizer(stored.path, trust_remote_code=trust_remote_code)
    choice = None
    if model is not None and tap_stream == "auto":
        loaded, choice = choose_stream(loaded, model, tokenizer, allow_mask_is_eos=allow_mask_is_eos)
    engine = Engine(
        loaded,
        model,
        tokenizer=tokenizer,
        draft_off_reason=reason,
        max_rows=max_rows,
        max_waiting=max_waiting,
        memory_limit=memory_limit,
        prefix_cache_bytes=prefix_cache_bytes,
        allow_mask_is_eos=allow_mask_is_eos,
    )
    engine.tap_choice = choice
    if width == "adaptive" and model is not None:
        folder = builtin_draft() if draft is None else locate(draft, what="draft")
        options = {"quantize": quantize, "weights": weights, "device_map": device_map}
        engine.width_policy = adaptive_width(
            loaded, model, target_folder=stored.path, draft_folder=folder, max_rows=max_rows, options=options
        )
    return engine


def _check_options(
    width: object,
    speculation: object,
    dtype: object,
    draft_dtype: object,
    block_size: object,
    tap_stream: object,
) -> None:
    """Nothing; a RequestError for a word that is none of the allowed ones, or that has no effect."""
    if width not in (None, "adaptive"):
        raise RequestError(f'width is {width!r}; "adaptive" or None here, and a number in a request')
    if speculation not in ("required", "optional", "off"):
        raise RequestError(f'speculation is {speculation!r}; allowed are "required", "optional" and "off"')
    for word, given in (("dtype", dtype), ("draft_dtype", dtype if draft_dtype is None else draft_dtype)):
        if given != "auto" and (not isinstance(given, str) or given not in DTYPES):
            raise RequestError(f"{word} is {given!r}; allowed are {', '.join(DTYPES)} and auto")
    if tap_stream not in (None, "auto", *TAP_STREAMS):
        raise RequestError(f'tap_stream is {tap_stream!r}; allowed are "prefix", "attn_res", "mean" and "auto"')
    idle = {"width": width, "draft_dtype": draft_dtype, "block_size": block_size, "tap_stream": tap_stream}
    for word, given in idle.items():
        if given is not None and speculation == "off":
            raise RequestError(f"{word} is {given!r} and speculation is off; drop one of the two")


def _check_named(draft: str | Path | None, target: str | Path | None, speculation: SpeculationMode) -> None:
    if draft is not None and target is None:
        raise PairError(f"draft {draft} needs its target; name it with target (--target on the command line)")
    if draft is None and target is not None and speculation == "required":
        raise PairError(f"target {target} has no draft; name one, or turn speculation off (--no-draft)")


def _draft_or_reason(speculation: SpeculationMode, read: Callable[[], DraftModel]) -> tuple[DraftModel | None, str]:
    """The draft, or None and why; where speculation is required, what kept it from being read is raised."""
    if speculation == "off":
        return None, "speculation is switched off"
    try:
        return read(), ""
    except BlockdraftError as error:
        if speculation == "required":
            raise
        return None, f"the draft was left out: {error}"


def _load_draft(
    draft: str | Path | None,
    target: StoredTarget,
    device: torch.device,
    dtype: str,
    is_builtin: bool,
    allow_mask_is_eos: bool,
    block_size: int | None,
    tap_stream: TapStream | Literal["auto"] | None,
) -> DraftModel:
    if draft is None and not is_builtin:
        raise PairError("no draft was named for this target")
    facts = target.facts
    folder = builtin_draft() if draft is None else locate(draft, what="draft")
    checkpoint = read_checkpoint(folder, allow_mask_is_eos=allow_mask_is_eos, target=facts, block_size=block_size)
    check_fit(checkpoint.config, facts, own=checkpoint.tensors, allow_mask_is_eos=allow_mask_is_eos)
    stream = settle_stream(checkpoint.config, facts, folder if draft is None else draft, asked=tap_stream)
    kind = _stored_dtype(checkpoint.tensors.values(), draft or folder) if dtype == "auto" else DTYPES[dtype]
    model = DraftModel.from_checkpoint(checkpoint, dtype=kind, device=device)
    model.config = replace(model.config, tap_stream=stream)
    return model


def _stored_dtype(tensors: Iterable[torch.Tensor], name: str | Path) -> torch.dtype:
    """The number format of most of a draft's weights: a file may keep a few of them in another."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        counts[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
    [(most, _)] = counts.most_common(1)
    if most not in DTYPES.values():
        raise RequestError(f"draft {name} is stored in {most}, in which it cannot run; name its draft_dtype")
    return most


def _settle(model: DraftModel, device: torch.device) -> None:
    """Put the draft where the target's embedding lies, in the form that is fastest there."""
    model.to(device)
    if device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16):
        model.pack_()


def _checked_device(device: str) -> torch.device:
    """The device of "cpu", "cuda" or "cuda:N"; an error for one that is unknown or not here."""
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", device) if isinstance(device, str) else None
    if match is None:
        raise RequestError(f'device is {device!r}; allowed are "cpu", "cuda" and "cuda:N"')
    if device == "cpu":
        return torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(match[1] or 0) >= count:
        raise UnavailableError(f"device is {device!r}, and this machine has {count} CUDA devices; use cpu")
    return torch.device(device)
