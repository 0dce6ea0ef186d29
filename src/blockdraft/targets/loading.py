"""From a folder, a GGUF file or a hub id to a target that is ready to run.

Owns which class of target a checkpoint becomes, on which devices and in which number format, and what is checked
before its weights are read. Must not know drafts or requests.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from blockdraft.config import TapStream
from blockdraft.errors import CheckpointError, PairError, RequestError, UnavailableError
from blockdraft.packed import can_multiply_int8, pack_linears_

from .contract import Target, checked_taps
from .fused import FusedTarget, can_fuse
from .hf import HFTarget
from .hf_attention import use_grouped_attention_
from .kimi_k3 import load_kimi_k3
from .model_facts import facts_of
from .quantised import (
    QUANTIZE_MODES,
    QuantizeMode,
    bitsandbytes_config,
    check_dtype,
    check_independence,
    check_method,
    method_of,
    run_once,
    settle_dense_,
)
from .stored import StoredTarget, find_target, silenced
from .streams import checked_stream

__all__ = ["DEVICE_MAPS", "DeviceMap", "WeightsForm", "check_weights", "load_model", "load_target"]

DeviceMap = str | Mapping[str, int | str]
WeightsForm = Literal["int8"]
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_target(
    source: str | Path | StoredTarget,
    *,
    tap_layer_ids: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    device_map: DeviceMap | None = None,
    quantize: QuantizeMode | None = None,
    pack: bool | None = None,
    fused: bool | None = None,
    weights: WeightsForm | None = None,
    trust_remote_code: bool = False,
    tap_stream: TapStream = "prefix",
) -> Target:
    """The target in a folder, a GGUF file or of a hub id, ready to run.

    dtype None: as stored. device_map: how accelerate spreads the modules over devices, by a name of `DEVICE_MAPS` or by
    module; taps and logits come to the embedding's device. quantize: bitsandbytes, while plain weights are read.
    pack: weights and attention in the form that is fastest on the CPU, the same up to rounding; None does it wherever
    it pays. fused: one pass for all rows, for the families that have it; None uses it wherever it is there. weights:
    "int8" rounds the weights of such a family to 8 bits, on the CPU: faster, and another model by a little. The family
    and the taps are checked before any weight is read. tap_stream: which stream the taps are, for the families where
    that has to be said (Kimi K3, qwen4_exp).
    """
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(f"device {device!r} was asked for and no CUDA device is here: use device 'cpu'")
    check_placement(device_map, place, quantize)
    check_weights(weights, place)
    stored = find_target(source, trust_remote_code=trust_remote_code)
    checked_stream(tap_stream, stored.facts)
    if stored.is_kimi_k3:
        asked = {"fused=True": fused, "device_map": device_map, "quantize": quantize, "weights": weights}
        if unmet := [word for word, value in asked.items() if value]:
            raise UnavailableError(
                f"{unmet[0]} was asked for, and Kimi K3 has one form on one device here: leave it out"
            )
        return load_kimi_k3(stored.path, tap_layer_ids, tap_stream=tap_stream, dtype=dtype, device=place, pack=pack)
    model = load_model(stored, tap_layer_ids, dtype=dtype, device=place, device_map=device_map, quantize=quantize)
    given = (stored.name, device_map is not None, tap_stream)
    return _target_of(model, tap_layer_ids, place, *given, pack=pack, fused=fused, weights=weights)


def load_model(
    source: str | Path | StoredTarget,
    tap_layer_ids: Sequence[int],
    *,
    dtype: torch.dtype | None,
    device: torch.device | None = None,
    device_map: DeviceMap | None = None,
    quantize: QuantizeMode | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """The transformers model itself, whole and without gradients; its family and the taps are checked first."""
    stored = find_target(source, trust_remote_code=trust_remote_code)
    place = device or torch.device("cpu")
    facts = stored.facts
    checked_taps(tap_layer_ids, facts.num_layers)
    method = method_of(stored.config)
    if method is not None:
        check_method(method, stored.name)
    settings: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if quantize is not None:
        if method is not None or stored.is_gguf:
            raise UnavailableError(
                f"quantize={quantize!r} was asked for, and target {stored.name} is quantised already"
                f" ({method or 'GGUF'}): leave it out"
            )
        check_method("bitsandbytes", stored.name)
        settings["quantization_config"] = bitsandbytes_config(quantize, dtype or _stored_dtype(stored.config))
    may_stay_packed = stored.is_gguf and place.type != "cpu"
    if device_map is None and (method is not None or quantize is not None or may_stay_packed):
        settings["device_map"] = {"": str(place)}  # quantised layers are made where they stay
    try:
        model, found = stored.read(
            _class_of(stored.config, stored.name),
            config=copy.deepcopy(stored.config),  # loading changes it
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=stored.trust_remote_code,
            output_loading_info=True,
            **settings,
        )
    except CheckpointError as error:
        if "offload_folder" not in str(error.__cause__):
            raise
        raise UnavailableError(
            f"the device map puts weights of target {stored.name} on disk that are not used as they are stored there"
            " (most experts, GGUF): place them on a device or the cpu"
        ) from error
    if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
        raise CheckpointError(
            f"{stored.name} lacks {len(missing)} tensors of a {facts.model_type} model ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): fetch it again, or correct its config.json"
        )
    settle_dense_(model)
    if device_map is None and method_of(model.config) is None:
        model.to(place)
    _check_embedding(model, stored.name)
    model.eval().requires_grad_(False)
    if method_of(model.config) is not None:
        check_dtype(model, dtype, stored.name)
        with silenced():
            run_once(model, stored.name)
    return model


def check_placement(device_map: DeviceMap | None, device: torch.device, quantize: QuantizeMode | None) -> None:
    """Raise RequestError or UnavailableError for places and modes that are unknown, contradictory or not here."""
    if quantize is not None and quantize not in QUANTIZE_MODES:
        raise RequestError(f"quantize is {quantize!r}; allowed are {', '.join(QUANTIZE_MODES)}")
    if device_map is None:
        return
    if device != torch.device("cpu"):
        raise RequestError(f"device {device} and a device_map were given; give one of the two")
    if isinstance(device_map, str):
        if device_map not in DEVICE_MAPS:
            raise RequestError(
                f"device_map is {device_map!r}; allowed are {', '.join(DEVICE_MAPS)}, or an object from modules to"
                ' devices ("" is the whole model)'
            )
        return
    if not isinstance(device_map, Mapping) or not device_map:
        raise RequestError("device_map must be a name or an object from modules to devices")
    for module, where in device_map.items():
        _check_device(module, where)


def check_weights(weights: WeightsForm | None, device: torch.device) -> None:
    """Raise RequestError or UnavailableError for a form of weights that is unknown or not here."""
    if weights is None:
        return
    if weights != "int8":
        raise RequestError(f'weights is {weights!r}; allowed is "int8"; leave it out for the weights as they are')
    if device.type != "cpu":
        raise UnavailableError(f"weights='int8' is for the CPU, and the target goes to {device}: use quantize there")
    if not can_multiply_int8():
        raise UnavailableError(
            "weights='int8' needs a CPU that sums 8-bit products exactly (VNNI), and torch with oneDNN: leave it out"
        )


def _check_device(module: str, where: int | str) -> None:
    name = str(where)
    if name in ("cpu", "disk"):
        return
    number = name.removeprefix("cuda:") if name != "cuda" else "0"
    if isinstance(where, bool) or not number.isdecimal():
        raise RequestError(
            f'device_map puts {module!r} on {where!r}; allowed are "cpu", "disk", "cuda", "cuda:N" and a number N'
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(number) >= count:
        raise UnavailableError(f"device_map puts {module!r} on {where!r}, and this machine has {count} CUDA devices")


def _target_of(
    model: Any,
    tap_layer_ids: Sequence[int],
    place: torch.device,
    name: str,
    is_mapped: bool,
    tap_stream: TapStream,
    *,
    pack: bool | None,
    fused: bool | None,
    weights: WeightsForm | None,
) -> Target:
    method = method_of(model.config)
    is_plain = method is None and not is_mapped
    can_pack = place.type == "cpu" and is_plain
    if pack and not can_pack:
        raise UnavailableError(
            f"pack=True needs an unquantised target on the CPU, this one is on {'a device map' if is_mapped else place}"
            f"{'' if method is None else f' and quantised ({method})'}: pass pack=None"
        )
    should_pack = can_pack if pack is None else pack
    is_fusible = is_plain and can_fuse(model)
    if fused and not is_fusible:
        raise UnavailableError(
            f"fused=True was asked for, and {model.config.model_type!r} has no fused form here: pass fused=None"
        )
    if weights is not None and not (is_fusible and fused is not False):
        why = "fused=False was given" if is_fusible else f"{model.config.model_type!r} has none, as it was loaded"
        raise UnavailableError(f"weights={weights!r} needs the fused form of a target, and {why}: leave it out")
    if is_fusible and fused is not False:
        taps = checked_taps(tap_layer_ids, len(model.model.layers))
        return FusedTarget(model.eval(), facts_of(model), taps, pack=should_pack, weights=weights)
    if should_pack:
        pack_linears_(model)
        use_grouped_attention_(model)
    with silenced():  # a method may unpack its weights in the first forward, with a bar of its own
        target = HFTarget(model, tap_layer_ids, tap_stream=tap_stream)
        if method is not None and target.tap_layer_ids:
            check_independence(target, model, name)
    return target


def _class_of(config: Any, name: str) -> Any:
    """The class of transformers that reads a causal language model of this configuration, with or without vision."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    own = getattr(config, "auto_map", None) or {}
    classes: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
    for loader in classes:
        if type(config) in loader._model_mapping or loader.__name__ in own:
            return loader
    raise PairError(
        f"target {name} ({config.model_type}) is no causal language model of transformers, nor one with a causal"
        " language model inside: a target must be one"
    )


def _stored_dtype(config: Any) -> torch.dtype:
    """The number format that a configuration names; float32 where it names none, as transformers has it."""
    for found in (config.dtype, config.get_text_config(decoder=True).dtype):
        if isinstance(found, torch.dtype):
            return found
    return torch.float32


def _check_embedding(model: Any, name: str) -> None:
    """Raise UnavailableError where rows of the embedding cannot be read: a draft's block is made of them."""
    weight = model.get_input_embeddings().weight
    if weight.is_meta:
        raise UnavailableError(
            f"the device map keeps the embedding of target {name} away from every device until it is used; its rows are"
            " needed at every step: place it on a device"
        )
    if not weight.is_floating_point() or weight.itemsize == 1 or type(weight.data) is not torch.Tensor:
        raise UnavailableError(
            f"the embedding of target {name} is quantised ({method_of(model.config)}), and a draft reads its plain"
            " rows: take a checkpoint that leaves the embedding as it is"
        )
