"""Checkpoints of the z-lab dialect: DFlash and DFlash 2 on grouped-query attention, read and written.

Owns: names and shapes of tensors on disk, strict accounting of them, an atomic write. The config.json is
resolved in `_zlab_config`, safetensors headers are read in `_safetensors`.
Must not know: what any tensor is used for. torch is imported only where weights are loaded or saved.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.config import DraftConfig
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats._safetensors import WEIGHTS, Entry, list_entries, read_json
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY, STAND_ALONE, config_from_dict, config_to_dict

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "check_header",
    "config_from_dict",
    "config_to_dict",
    "expected_tensors",
    "optional_tensors",
    "read",
    "read_config",
    "read_header",
    "write",
]

CONFIG = "config.json"
MASK_EMBEDDING_FILE = "mask_embedding.pt"
MASK_EMBEDDING = "mask_embedding"
_FLOATS = ("BF16", "F16", "F32", "F64")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_V2_PARTS = (".attention_conv.", ".mlp_conv.", "candidate_selector.")
_SHOWN = 4

# What a leftover tensor says about the file: (part of its name, whose it is).
_FOREIGN = (
    ("fc_norm", "a norm per tap (fc_norm) belongs to the DSpark and K3 family, which is not supported"),
    ("markov_head", "a Markov head belongs to DSpark (DSparkDraftModel), which is not supported"),
    ("confidence_head", "a confidence head belongs to DSpark (DSparkDraftModel), which is not supported"),
    (
        "kv_a_proj_with_mqa",
        "these are MLA tensors: a DFlash 2 MLA draft (attention_mode mla) is not supported",
    ),
    ("q_a_proj", "these are MLA tensors: a DFlash 2 MLA draft (attention_mode mla) is not supported"),
    ("kv_b_proj", "these are MLA tensors: a DFlash 2 MLA draft (attention_mode mla) is not supported"),
    (
        "context_proj",
        "context_proj, context_norm and final_norm are training names: export the checkpoint first",
    ),
    ("encoder.fc", "encoder.* names belong to a transformers assistant model, which is not supported"),
    ("mask_hidden", "a learned mask_hidden is not supported, only a mask embedding"),
    ("d2t", "d2t and t2d belong to a reduced draft vocabulary, which is not supported"),
    ("t2d", "d2t and t2d belong to a reduced draft vocabulary, which is not supported"),
)


@dataclass(slots=True)
class Checkpoint:
    """A draft as it stands on disk: its config and its tensors under canonical names.

    Canonical: no `model.` prefix, codebooks without `.weight`. Optional tensors: embed_tokens.weight [V, D],
    lm_head.weight [V, D], mask_embedding [D].
    """

    config: DraftConfig
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def read_config(source: Path | str, *, allow_mask_is_eos: bool = False) -> DraftConfig:
    """The config of a checkpoint folder or of a bare config.json."""
    raw, folder = read_raw_config(source)
    fc_shape = None
    if folder is not None and isinstance(raw, Mapping):
        fc_shape = _fc_shape(folder, raw)
    return config_from_dict(raw, allow_mask_is_eos=allow_mask_is_eos, fc_shape=fc_shape)


def read_raw_config(source: Path | str) -> tuple[Any, Path | None]:
    """The JSON value of a config.json and its folder; the folder is None if the file itself was given."""
    path = Path(source)
    if path.is_dir():
        file, folder = path / CONFIG, path
        if not file.is_file():
            state = "is empty" if not any(path.iterdir()) else "has no config.json"
            raise CheckpointError(f"{path} {state}: a checkpoint is a folder with config.json and {WEIGHTS}")
    elif path.is_file():
        file, folder = path, None
        if path.suffix != ".json":
            raise CheckpointError(f"{path} is not a config.json: give the folder of the checkpoint or its config.json")
    else:
        text = str(source)
        is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        hint = "a hub id is not fetched here, download it first" if is_id else "give a folder or a config.json"
        raise CheckpointError(f"{text} does not exist: {hint}")
    try:
        return read_json(file), folder
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a JSON file: {error}") from error


def _fc_shape(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of fc.weight, looked up only where the message about missing taps needs it."""
    nest = raw.get("dflash_config")
    if "target_layer_ids" in raw or (isinstance(nest, Mapping) and "target_layer_ids" in nest):
        return None
    try:
        return read_header(folder).get("fc.weight", (None, None))[1]
    except CheckpointError:
        return None


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that the config asks for; optional ones are not among them."""
    width, mlp, attention = config.hidden_size, config.intermediate_size, config.attention
    query, keyval = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, config.num_taps * config.target_hidden_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (width,)
        shapes[layer + "post_attention_layernorm.weight"] = (width,)
        for name, shape in {
            "q": (query, width),
            "k": (keyval, width),
            "v": (keyval, width),
            "o": (width, query),
        }.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
            if attention.has_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
        shapes[layer + "self_attn.q_norm.weight"] = (attention.head_dim,)
        shapes[layer + "self_attn.k_norm.weight"] = (attention.head_dim,)
        shapes[layer + "mlp.gate_proj.weight"] = (mlp, width)
        shapes[layer + "mlp.up_proj.weight"] = (mlp, width)
        shapes[layer + "mlp.down_proj.weight"] = (width, mlp)
        if config.conv is not None:
            groups = width // config.conv.group_size
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{name}.base_kernel"] = (2, config.conv.kernel_size, width)
                shapes[f"{layer}{name}.kernel_projection.weight"] = (
                    2 * config.conv.kernel_size * groups,
                    width,
                )
    if config.selector is not None:
        for name in _CODEBOOKS:
            shapes[name] = (config.vocab_size, config.selector.rank)
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector.rank, width)
    return shapes


def optional_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of the tensors that a draft may carry instead of borrowing the target's."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
        MASK_EMBEDDING: (config.hidden_size,),
    }


def canonical_name(name: str) -> str:
    """The name without a `model.` prefix, and without `.weight` on a codebook."""
    name = name.removeprefix("model.")
    stem = name.removesuffix(".weight")
    return stem if stem in _CODEBOOKS else name


def _has_mask_embedding_file(folder: Path) -> bool:
    return os.path.lexists(folder / MASK_EMBEDDING_FILE)  # a link that leads nowhere is damage, not absence


def _canonical_entries(folder: Path) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in list_entries(folder):
        name = canonical_name(entry.name)
        if name in found:
            raise CheckpointError(f"{found[name].name} and {entry.name} are the same tensor: remove one of them")
        if name == MASK_EMBEDDING and _has_mask_embedding_file(folder):
            raise CheckpointError(
                f"{entry.name} stands in the weights and in {MASK_EMBEDDING_FILE}: remove one of them"
            )
        found[name] = entry
    return found


def read_header(folder: Path | str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Canonical name -> (safetensors dtype, shape) of a folder's weight files; needs no torch."""
    entries = _canonical_entries(Path(folder))
    return {name: (entry.dtype, entry.shape) for name, entry in entries.items()}


def check_header(config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise CheckpointError if a tensor is missing, left over, or of a wrong shape or dtype."""
    expected = expected_tensors(config)
    allowed = {**expected, **optional_tensors(config)}
    missing = sorted(set(expected) - set(header))
    extra = sorted(set(header) - set(allowed))
    if missing or extra:
        parts = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
        parts += [f"{len(extra)} left over ({_some(extra)})"] if extra else []
        reason = _diagnose(config, header, missing, extra)
        raise CheckpointError(
            f"the tensors do not fit the config: {', '.join(parts)}" + (f"; {reason}" if reason else "")
        )
    wrong = [
        f"{name} is {list(shape)}, expected {list(allowed[name])}"
        for name, (_, shape) in sorted(header.items())
        if shape != allowed[name]
    ]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors of another shape: {_some(wrong)}{_taps_hint(config, header)}")
    typed = [f"{name} is {dtype}" for name, (dtype, _) in sorted(header.items()) if dtype not in _FLOATS]
    if typed:
        raise CheckpointError(
            f"{len(typed)} tensors of another dtype: {_some(typed)}; supported are {', '.join(_FLOATS)}"
        )


def _some(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def _diagnose(config: DraftConfig, header: Iterable[str], missing: list[str], extra: list[str]) -> str | None:
    """What kind of file this rather is, None if nothing is known."""
    for mark, reason in _FOREIGN:
        if any(mark in name.split(".") or (mark in name and "." in mark) for name in extra):
            return reason
    names = set(header)
    if "fc.weight" not in names and any(".self_attn." in name for name in names):
        return STAND_ALONE
    if config.family == "dflash" and any(part in name for name in extra for part in _V2_PARTS):
        v2 = CLASS_OF_FAMILY["dflash2"]
        return f"these are DFlash 2 parts: the class {v2} would fit, with conv_* and selector_* fields"
    has_v2_part = any(part in name for name in names for part in _V2_PARTS)
    if config.family == "dflash2" and missing and not has_v2_part:
        return f"there are no DFlash 2 parts in the file: the class {CLASS_OF_FAMILY['dflash']} would fit"
    layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.") and name.split(".")[1].isdigit()}
    if layers and layers != set(range(config.num_layers)):
        return f"the file has the layers {sorted(layers)}, the config asks for {config.num_layers}"
    if extra and all(name.endswith(".bias") for name in extra):
        return "the file has biases: attention_bias true would fit"
    return None


def _taps_hint(config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    shape = header["fc.weight"][1]
    wanted = (config.hidden_size, config.num_taps * config.target_hidden_size)
    if shape == wanted or len(shape) != 2 or shape[1] % config.target_hidden_size:
        return ""
    fits = shape[1] // config.target_hidden_size
    return f"; fc expects {fits} taps, target_layer_ids lists {config.num_taps}"


def read(folder: Path | str, *, dtype: torch.dtype | None = None, allow_mask_is_eos: bool = False) -> Checkpoint:
    """The checkpoint of a folder, every tensor accounted for and finite. `dtype` None: as stored."""
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: give the folder that holds config.json and {WEIGHTS}")
    config = read_config(folder, allow_mask_is_eos=allow_mask_is_eos)
    entries = _canonical_entries(folder)
    check_header(config, {name: (entry.dtype, entry.shape) for name, entry in entries.items()})
    tensors = _load(entries)
    if _has_mask_embedding_file(folder):
        tensors[MASK_EMBEDDING] = _read_mask_embedding(folder / MASK_EMBEDDING_FILE, config)
    _check_finite(tensors)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Checkpoint(config=config, tensors=tensors)


def _load(entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    import safetensors

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        try:
            with safetensors.safe_open(file, framework="pt") as stream:
                for name, entry in entries.items():
                    if entry.file == file:
                        tensors[name] = stream.get_tensor(entry.name)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return {name: tensors[name] for name in entries}


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    if bad:
        raise CheckpointError(f"{len(bad)} tensors hold NaN or infinity: {_some(bad)}; the checkpoint is damaged")


def _read_mask_embedding(file: Path, config: DraftConfig) -> torch.Tensor:
    """The vector [D] of a mask_embedding.pt: a bare tensor, or {embedding, mask_token_id}; ids must agree."""
    import torch

    try:
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here, and all of them mean an unusable file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} cannot be read as plain tensors: {first}") from error
    if isinstance(value, dict):
        unknown = sorted(str(key) for key in value if key not in ("embedding", "mask_token_id"))
        if unknown or "embedding" not in value:
            found = ", ".join(str(key) for key in value)
            raise CheckpointError(f"{file} holds the keys {found}: expected are embedding and mask_token_id")
        given = value.get("mask_token_id", config.mask_token_id)
        if isinstance(given, torch.Tensor) and given.numel() == 1:
            given = given.item()
        if given != config.mask_token_id:
            raise CheckpointError(
                f"mask_token_id is {given} in {file.name} and {config.mask_token_id} in config.json: make them equal"
            )
        value = value["embedding"]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{file} does not hold a floating-point tensor")
    if value.shape == (1, config.hidden_size):
        value = value[0]
    if value.shape != (config.hidden_size,):
        raise CheckpointError(f"mask_embedding is {list(value.shape)} in {file}, expected {[config.hidden_size]}")
    return value


def write(
    folder: Path | str, checkpoint: Checkpoint, *, dtype: str | None = "bfloat16", overwrite: bool = False
) -> None:
    """Write the published layout: all of it or nothing, by a temporary folder that is renamed at the end.

    `dtype` names the stored type (bfloat16, float16, float32, float64); None keeps each tensor's own.
    `overwrite` replaces a folder that holds nothing but an earlier checkpoint.
    """
    folder = Path(folder)
    tensors, stored = _prepared(checkpoint, dtype)
    raw = config_to_dict(checkpoint.config, dtype=stored)
    _check_destination(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh, old = temporary / "new", temporary / "old"
        fresh.mkdir()
        _write_files(fresh, checkpoint.config, tensors, raw)
        if folder.exists():
            os.rename(folder, old)
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prepared(checkpoint: Checkpoint, dtype: str | None) -> tuple[dict[str, torch.Tensor], str]:
    import torch

    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
    if dtype is not None and dtype not in names:
        raise CheckpointError(f"dtype is {dtype!r}: a checkpoint is stored in {', '.join(names)}")
    kind: torch.dtype | None = getattr(torch, dtype) if dtype is not None else None
    tensors = {
        name: tensor.detach().to("cpu", kind if kind is not None else tensor.dtype).contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    header = {name: (names.get(kinds[name], kinds[name]), tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_header(checkpoint.config, header)
    _check_finite(tensors)
    return tensors, kinds["fc.weight"]


def _check_destination(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give a folder to write to")
    inside = sorted(path.name for path in folder.iterdir())
    if inside and not overwrite:
        raise CheckpointError(f"{folder} is not empty: choose another folder or overwrite explicitly")
    foreign = [name for name in inside if name not in (CONFIG, WEIGHTS, MASK_EMBEDDING_FILE)]
    if foreign:
        raise CheckpointError(f"{folder} holds {foreign[0]}, which is not part of a checkpoint: choose another folder")


def _write_files(
    folder: Path, config: DraftConfig, tensors: Mapping[str, torch.Tensor], raw: Mapping[str, Any]
) -> None:
    import torch
    from safetensors.torch import save_file

    plain = {name: tensor.clone() for name, tensor in tensors.items() if name != MASK_EMBEDDING}
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)
    if MASK_EMBEDDING in tensors:
        value = {"embedding": tensors[MASK_EMBEDDING].clone(), "mask_token_id": config.mask_token_id}
        torch.save(value, folder / MASK_EMBEDDING_FILE)
    (folder / CONFIG).write_text(json.dumps(raw, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
