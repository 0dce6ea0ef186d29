"""Kimi-K3 checkpoints: every tensor of a folder read under its published name, or written so.

Owns: the published names and shapes, which tensors are not the text model's, the dtypes that are kept. The text model
is made without memory first, so that nothing is read of a checkpoint that is not whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from blockdraft.config import TargetFacts, token_ids
from blockdraft.errors import CheckpointError
from blockdraft.formats._safetensors import WEIGHTS, Entry, list_entries, read_json

from .config import KimiK3Config
from .model import KimiK3Model

__all__ = ["Counts", "count_parameters", "empty_model", "published_tensors", "read", "read_raw", "write"]

_PREFIX = "language_model."
_OTHER_PARTS = ("vision_tower.", "mm_projector.")  # of the whole model: seen, not read
# Kept in float32 at least: what decays, gates and chooses.
_WIDE = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
_FLOATS = ("BF16", "F16", "F32", "F64")
_BYTES = ("U8", "F8_E8M0")
_STACKS = {"w1": "w1.weight", "w2": "w2.weight", "w3": "w3.weight"} | {
    f"{name}_{part}": f"{name}.weight_{part}" for name in ("w1", "w2", "w3") for part in ("packed", "scale")
}


class _Home(NamedTuple):
    """Where a tensor of a file belongs: a parameter, or one expert of a stack."""

    parameter: str
    expert: int | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Parameters of a text model: all, and those that one token uses (of the embedding its own row)."""

    total: int
    active: int


def empty_model(config: KimiK3Config) -> KimiK3Model:
    """The model on the meta device: shapes, and no memory."""
    with torch.device("meta"):
        return KimiK3Model(config)


def count_parameters(config: KimiK3Config) -> Counts:
    """Weights of the model; in MXFP4 two of them lie in one byte and the scales are no weights."""
    total = routed = 0
    for name, parameter in empty_model(config).named_parameters():
        if name.endswith("_scale"):
            continue
        count = parameter.numel() * (2 if name.endswith("_packed") else 1)
        total += count
        routed += count if ".experts." in name else 0
    unused = routed - routed // config.moe.num_experts * config.moe.top_k
    other_rows = (config.vocab_size - 1) * config.hidden_size
    return Counts(total=total, active=total - unused - other_rows)


def published_tensors(config: KimiK3Config) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor of the text model."""
    return {_PREFIX + name: home.shape for name, home in _homes(empty_model(config)).items()}


def read_raw(folder: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises CheckpointError."""
    try:
        raw = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json of {folder} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"config.json of {folder} is not an object")
    return raw


def facts_of_folder(folder: Path) -> TargetFacts:
    """The facts of a folder's config, and the ends of text of its generation config too."""
    return _facts_of(folder, read_raw(folder))


def read(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> tuple[KimiK3Model, TargetFacts]:
    """The model of a folder and its facts. dtype None: as stored."""
    raw = read_raw(folder)
    config = KimiK3Config.from_dict(raw)
    facts = _facts_of(folder, raw)
    model = empty_model(config)
    entries = list_entries(folder)
    homes = _homes(model)
    found = _accounted(folder, entries, homes, config)
    stored = next(entry.dtype for entry in entries if found.get(entry.name) == "model.embed_tokens.weight")
    kind = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}[stored]
    _fill(model, entries, found, homes, dtype or kind, device or torch.device("cpu"))
    return model, facts


def write(model: KimiK3Model, raw: Mapping[str, Any], folder: Path) -> None:
    """A new folder with a config.json and one weight file under the published names."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists: name a folder that is not there yet")
    state = model.state_dict()
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, home in _homes(model).items():
        tensor = state[home.parameter] if home.expert is None else state[home.parameter][home.expert]
        if name.endswith(".A_log") and config.kda.head_dim > config.kda.num_heads:  # published with zeros behind it
            tensor = torch.cat((tensor, tensor.new_zeros(config.kda.head_dim - config.kda.num_heads)))
        tensors[_PREFIX + name] = tensor.detach().clone().contiguous()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


# ---- names -----------------------------------------------------------------------------------------------------------
def _homes(model: KimiK3Model) -> dict[str, _Home]:
    """Published name without its prefix -> where it belongs."""
    homes: dict[str, _Home] = {}
    for name, parameter in model.named_parameters():
        before, marker, stack = name.partition(".experts.")
        if not marker:
            homes[name] = _Home(name, None, tuple(parameter.shape))
            continue
        for expert in range(parameter.shape[0]):
            homes[f"{before}.experts.{expert}.{_STACKS[stack]}"] = _Home(name, expert, tuple(parameter.shape[1:]))
    return homes


def _accounted(folder: Path, entries: list[Entry], homes: dict[str, _Home], config: KimiK3Config) -> dict[str, str]:
    """Name in the files -> published name without its prefix, of the text model's. Raises CheckpointError."""
    given = {entry.name: entry for entry in entries}
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in given) else ""
    found = {prefix + name: name for name in homes}
    missing = [name for name in found if name not in given]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of a Kimi-K3 text model ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): fetch it again, or correct its config.json"
        )
    extra = [name for name in given if name not in found and not (prefix and name.startswith(_OTHER_PARTS))]
    if extra:
        raise CheckpointError(
            f"{folder} holds {len(extra)} tensors that its config.json does not account for"
            f" ({', '.join(extra[:3])}{', ...' if len(extra) > 3 else ''}): correct it, or remove them"
        )
    for name, published in found.items():
        entry, home = given[name], homes[published]
        shapes = [home.shape]
        if published.endswith(".A_log") and config.kda.head_dim > config.kda.num_heads:
            shapes.append((config.kda.head_dim,))
        if entry.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{name} of {folder} has the shape {list(entry.shape)}: its config says {wanted}")
        allowed = _BYTES if published.endswith(("_packed", "_scale")) else _FLOATS
        if entry.dtype not in allowed:
            raise CheckpointError(f"{name} of {folder} is stored as {entry.dtype}: allowed is {', '.join(allowed)}")
    return found


# ---- weights ---------------------------------------------------------------------------------------------------------
def _fill(
    model: KimiK3Model,
    entries: list[Entry],
    found: dict[str, str],
    homes: dict[str, _Home],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give every parameter memory and its values, file by file."""
    parameters = dict(model.named_parameters())
    held: dict[str, Tensor] = {}
    by_file: dict[Path, list[str]] = {}
    for entry in entries:
        if entry.name in found:
            by_file.setdefault(entry.file, []).append(entry.name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as stream:
            for name in names:
                home = homes[found[name]]
                empty = parameters[home.parameter]
                if home.parameter not in held:
                    kind = _kept_dtype(home.parameter, empty, dtype)
                    held[home.parameter] = torch.empty(empty.shape, dtype=kind, device=device)
                place = held[home.parameter] if home.expert is None else held[home.parameter][home.expert]
                tensor = stream.get_tensor(name)
                if empty.dtype == torch.uint8:
                    tensor = tensor.view(torch.uint8)
                elif not bool(tensor.isfinite().all()):
                    raise CheckpointError(f"{name} in {file} holds NaN or infinity: fetch the checkpoint again")
                # A_log is stored with room behind the heads that there are.
                place.copy_(tensor[: place.shape[0]])
    for name, tensor in held.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))


def _kept_dtype(name: str, empty: Tensor, dtype: torch.dtype) -> torch.dtype:
    if empty.dtype == torch.uint8:
        return torch.uint8
    return torch.promote_types(dtype, torch.float32) if name.endswith(_WIDE) else dtype


def _facts_of(folder: Path, raw: Mapping[str, Any]) -> TargetFacts:
    """The facts of the config, and the ends of text of the generation config too."""
    facts = TargetFacts.from_config(raw)
    path = folder / "generation_config.json"
    if not path.is_file():
        return facts
    try:
        more = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"generation_config.json of {folder} cannot be read: {error}") from error
    if not isinstance(more, dict):
        raise CheckpointError(f"generation_config.json of {folder} is not an object")
    ends = (*facts.eos_token_ids, *token_ids("eos_token_id", more.get("eos_token_id")))
    kept = tuple(dict.fromkeys(end for end in ends if end < facts.vocab_size))
    return dataclasses.replace(facts, eos_token_ids=kept)
