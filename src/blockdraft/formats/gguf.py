"""Drafts as one GGUF file of llama.cpp's architecture `dflash`, written and read back.

Owns: tensor names and types in it, what it takes from the target's file. One file holds the config as keys, the
weights, and the tokenizer of the target: llama.cpp finds the mask id through it. _gguf_config knows the keys.

Query and key rows keep their order: the architecture turns halves (NeoX), as these drafts do. Vectors and base
kernels are stored as float32, the only type that llama.cpp computes them in.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import _gguf_file as files
from blockdraft.formats._gguf_config import (
    ARCHITECTURE,
    FILE_TYPES,
    LABEL,
    config_from_dict,
    config_to_dict,
    json_object,
    rope_stretches,
)
from blockdraft.formats._keys import requires
from blockdraft.formats._layout import Checkpoint, Layout, check_block_size, check_values

if TYPE_CHECKING:
    import torch

__all__ = ["LAYOUT", "GgufLayout", "config_from_dict", "config_to_dict", "target_facts"]

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROPE_FREQS = "rope_freqs.weight"
_DTYPES = "blockdraft.dtypes"  # what the widened tensors were

_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    _EMBEDDING: "token_embd.weight",
    _HEAD: "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_CANONICAL = {stored: name for name, stored in _NAMES.items()}
_LAYER_CANONICAL = {stored: name for name, stored in _LAYER_NAMES.items()}


# ---- names -----------------------------------------------------------------------------------------------------------
def _stored_name(name: str) -> str:
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"blk.{index}.{_LAYER_NAMES[rest]}"
    return _NAMES[name]


def _canonical_name(name: str) -> str:
    if name.startswith("blk.") and name.count(".") >= 2:
        _, index, rest = name.split(".", 2)
        if index.isdigit() and rest in _LAYER_CANONICAL:
            return f"layers.{index}.{_LAYER_CANONICAL[rest]}"
    if name in _CANONICAL:
        return _CANONICAL[name]
    return f"{name} (no name of GGUF)" if name in _NAMES or name.startswith("layers.") else name


# ---- the target's own file -------------------------------------------------------------------------------------------
# Architectures of llama.cpp that transformers reads under another name.
_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
    "qwen2moe": "qwen2_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
}


def target_facts(path: Path | str) -> TargetFacts:
    """What a target's GGUF says of it. Raises ConfigError for a draft, CheckpointError for no GGUF."""
    return _facts(files.open_gguf(Path(path)), Path(path))


def _facts(reader: Any, path: Path) -> TargetFacts:
    keys = files.scalars(reader)
    model = keys.get("general.architecture")
    if model == ARCHITECTURE:
        raise ConfigError(f"{path.name} is a draft: give the GGUF of the model that it drafts for as --target")
    tokens = requires(keys, "tokenizer.ggml.tokens", f"{path.name} has no tokenizer, which a draft takes from it")
    eos = keys.get("tokenizer.ggml.eos_token_id")
    layers = requires(keys, f"{model}.block_count", f"{path.name} must be the GGUF of a target")
    return TargetFacts(
        model_type=_MODEL_TYPES.get(str(model), str(model)),
        vocab_size=tokens,
        hidden_size=requires(keys, f"{model}.embedding_length", f"{path.name} must be the GGUF of a target"),
        num_layers=layers - keys.get(f"{model}.nextn_predict_layers", 0),
        max_length=requires(keys, f"{model}.context_length", f"{path.name} must be the GGUF of a target"),
        is_recurrent=any(key.startswith((f"{model}.ssm.", f"{model}.wkv.", f"{model}.shortconv.")) for key in keys),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=keys.get("tokenizer.ggml.padding_token_id"),
    )


def _check_target(config: DraftConfig, facts: TargetFacts, path: Path) -> None:
    for name, of_draft, of_target in (
        ("vocab_size", config.vocab_size, facts.vocab_size),
        ("hidden_size", config.target_hidden_size, facts.hidden_size),
        ("num_target_layers", config.num_target_layers, facts.num_layers),
    ):
        if of_draft != of_target:
            raise ConfigError(
                f"{name} is {of_draft} for the draft and {of_target} in {path.name}: give the GGUF of its own target"
            )


# ---- the file --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLayout(Layout):
    """The dialect whose checkpoint is a file. `target`: the GGUF whose tokenizer goes into what is written."""

    target: Path | None = None

    def of_target(self, target: Path | None) -> GgufLayout:
        """The same dialect with the GGUF of the target."""
        return dataclasses.replace(self, target=target)

    def read_raw(self, source: Path | str) -> tuple[Any, Path | None]:
        """The keys of a file, lists of the tokenizer left out, and the file."""
        return files.scalars(_open(source)), files.find_gguf(source)

    def read_config(
        self,
        source: Path | str,
        *,
        allow_mask_is_eos: bool = False,
        target: TargetFacts | None = None,
        block_size: int | None = None,
    ) -> DraftConfig:
        """The config in a file, or in the only GGUF of a folder. Its block size is always stated."""
        return self._config(_open(source), allow_mask_is_eos, target, block_size)

    def _config(
        self, reader: Any, allow_mask_is_eos: bool, target: TargetFacts | None, block_size: int | None
    ) -> DraftConfig:
        shapes = {entry.name: tuple(int(n) for n in reversed(entry.shape)) for entry in reader.tensors}
        config = self.config_from_dict(
            files.scalars(reader),
            allow_mask_is_eos=allow_mask_is_eos,
            fc_shape=shapes.get("fc.weight"),
            target=target,
        )
        if block_size is not None:
            check_block_size(config.block_size, block_size)
        return config

    def read_header(
        self, folder: Path | str, config: DraftConfig | None = None
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Canonical name -> (type as stored, shape) of a file's tensors; the table of a rope is none of them."""
        return _header(_entries(_open(folder), config))

    def check(
        self, config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]], folder: Path | None = None
    ) -> None:
        """Raise CheckpointError if the tensors are not those of the config, or llama.cpp would take them amiss."""
        Layout.check(self, config, header)
        if _EMBEDDING in header and _HEAD not in header:
            raise CheckpointError(
                f"{_EMBEDDING} without {_HEAD}: llama.cpp would take the one for the other, {self.label} needs both"
            )
        wide = sorted(name for name, (dtype, _) in header.items() if dtype == "F64")
        if wide:
            raise CheckpointError(f"{wide[0]} is F64: {self.label} holds F32, F16 and BF16, choose one (--dtype)")

    def read(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        allow_mask_is_eos: bool = False,
        target: TargetFacts | None = None,
        block_size: int | None = None,
    ) -> Checkpoint:
        """The checkpoint of a file, every tensor accounted for and finite. `dtype` None: as it was before writing."""
        reader = _open(folder)
        config = self._config(reader, allow_mask_is_eos, target, block_size)
        entries = _entries(reader, config)
        self.check(config, _header(entries))
        tensors = {name: files.tensor_of(entry) for name, entry in entries.items()}
        check_values(tensors)
        tensors = _as_before(tensors, files.value_of(reader, _DTYPES))
        if dtype is not None:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        return Checkpoint(config=config, tensors=tensors)

    def write(
        self,
        folder: Path | str,
        checkpoint: Checkpoint,
        *,
        dtype: str | None = "bfloat16",
        overwrite: bool = False,
        verify: Callable[[Path], None] | None = None,
    ) -> None:
        """Write the file, whole or not at all. `dtype` rounds every tensor; None keeps each one's own."""
        path, config = Path(folder), checkpoint.config
        self.check_vocabulary(config)
        keys = self.config_to_dict(config)
        tensors, stored = self._prepared(checkpoint, dtype)
        if path.suffix != files.SUFFIX:
            raise CheckpointError(f"{path} does not end with {files.SUFFIX}: {self.label} is one file")
        if self.target is None or self.target.suffix != files.SUFFIX:
            given = "no target is given" if self.target is None else f"{self.target.name} is no GGUF file"
            raise ConfigError(f"{given}: {self.label} holds its target's tokenizer, give the target's GGUF (--target)")
        source = files.open_gguf(self.target)
        _check_target(config, _facts(source, self.target), self.target)
        keys |= self.config_to_dict(config, dtype=stored)
        if files.value_of(source, f"{files.value_of(source, 'general.architecture')}.rope.dimension_sections"):
            keys[f"{ARCHITECTURE}.rope.dimension_sections"] = [config.attention.rope_dim // 2, 0, 0, 0]
            if config.rope.kind == "llama3":
                raise ConfigError(f"{LABEL} cannot express a llama3 rope for a target with sections of positions")
        if path.exists() and (not overwrite or not path.is_file()):
            raise CheckpointError(f"{path} exists: choose another name or overwrite explicitly")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
            fresh = Path(temporary) / path.name
            files.write_gguf(fresh, {**keys, **_dtypes(tensors)}, _named(config, tensors), source)
            if verify is not None:
                verify(fresh)
            with fresh.open("rb") as stream:
                os.fsync(stream.fileno())
            os.replace(fresh, path)


def _open(source: Path | str) -> Any:
    path = files.find_gguf(source)
    if path is None:
        raise CheckpointError(f"{source} is no GGUF file, nor a folder with one")
    return files.open_gguf(path)


def _entries(reader: Any, config: DraftConfig | None) -> dict[str, Any]:
    """Canonical name -> tensor of a reader. The table of a Llama 3 rope must be the config's and is left out."""
    found = {_canonical_name(entry.name): entry for entry in reader.tensors}
    if config is not None and config.rope.kind == "llama3":
        entry = found.pop(_ROPE_FREQS, None)
        table = [] if entry is None else [float(value) for value in entry.data.reshape(-1)]
        wanted = rope_stretches(config)
        if len(table) != len(wanted) or any(
            not math.isclose(one, other, rel_tol=1e-5) for one, other in zip(table, wanted, strict=True)
        ):
            raise CheckpointError(f"{_ROPE_FREQS} is missing or not that of the config's rope: write the file anew")
    return found


def _header(entries: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (entry.tensor_type.name, tuple(int(size) for size in reversed(entry.shape)))
        for name, entry in entries.items()
    }


def _is_wide(name: str, tensor: torch.Tensor) -> bool:
    """Whether llama.cpp computes with this tensor in float32 only."""
    return tensor.dim() == 1 or name.endswith(".base_kernel")


def _named(config: DraftConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    named = {
        _stored_name(name): tensor.to(torch.float32) if _is_wide(name, tensor) else tensor
        for name, tensor in tensors.items()
    }
    if config.rope.kind == "llama3":
        named[_ROPE_FREQS] = torch.tensor(rope_stretches(config), dtype=torch.float32)
    return named


def _dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The key that names what the widened tensors were, nothing if none was widened."""
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    changed = {name: kind for name, kind in kinds.items() if _is_wide(name, tensors[name]) and kind != "float32"}
    return {_DTYPES: json.dumps(changed)} if changed else {}


def _as_before(tensors: dict[str, torch.Tensor], text: Any) -> dict[str, torch.Tensor]:
    """The tensors with those that were widened for llama.cpp as they were, which loses nothing."""
    import torch

    if text is None:
        return tensors
    kinds = json_object(_DTYPES, text)
    unknown = sorted(name for name, kind in kinds.items() if name not in tensors or kind not in FILE_TYPES)
    if unknown:
        raise CheckpointError(f"{_DTYPES} speaks of {unknown[0]} as {kinds[unknown[0]]!r}: write the file anew")
    narrow = {name: tensors[name].to(getattr(torch, kind)) for name, kind in kinds.items()}
    lossy = sorted(name for name, tensor in narrow.items() if not torch.equal(tensor.to(torch.float32), tensors[name]))
    if lossy:
        raise CheckpointError(f"{_DTYPES} says that {lossy[0]} was {kinds[lossy[0]]}: its values are not")
    return {**tensors, **narrow}


def _detect(raw: Mapping[str, Any], names: Collection[str]) -> bool:
    return False  # it has no config.json


LAYOUT = GgufLayout(
    name="gguf",
    label=LABEL,
    detect=_detect,
    config_from_dict=config_from_dict,
    config_to_dict=config_to_dict,
    canonical_name=_canonical_name,
    stored_name=_stored_name,
    own=frozenset({_EMBEDDING, _HEAD}),
)
