"""How a draft starts: a fresh network from a seed, or with copies of target layers in it.

Owns which tensor of a target goes where. Knows no training.

Letters: V vocabulary, E target width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.formats._safetensors import list_entries
from blockdraft.train.head import FrozenHead

__all__ = ["ZERO_CENTRED_NORMS", "initialise_draft", "read_target_layers"]

ZERO_CENTRED_NORMS = ("gemma", "qwen3_next", "qwen3_5")  # families that store a norm's weight minus 1
_PREFIXES = ("model.layers.", "layers.", "model.language_model.layers.", "language_model.model.layers.")
_OWN_PARTS = ("attention_conv.", "mlp_conv.")
_MAY_LACK = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def initialise_draft(
    config: DraftConfig,
    head: FrozenHead,
    *,
    seed: int,
    has_mask_embedding: bool = False,
    layers: Sequence[Mapping[str, Tensor]] = (),
) -> DraftModel:
    """A fresh draft from `seed`; a fresh DFlash 2 draft proposes what a DFlash draft of the same linear weights would.

    The final norm starts as the target's own, since both stand before the same output head; a mask embedding of its own
    as the mask id's row. `layers`: what `read_target_layers` gave, one for each layer; all else stays as drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config, has_mask_embedding=has_mask_embedding)
    with torch.no_grad():
        model.norm.weight.copy_(head.final_norm_E)
        if model.mask_embedding is not None:
            model.mask_embedding.copy_(head.embed_VE[config.mask_token_id])
        for index, tensors in enumerate(layers):
            _copy_layer(model, index, tensors)
    return model


def _copy_layer(model: DraftModel, index: int, tensors: Mapping[str, Tensor]) -> None:
    wanted = {
        name: parameter
        for name, parameter in model.layers[index].named_parameters()
        if not name.startswith(_OWN_PARTS) and not (name in _MAY_LACK and name not in tensors)
    }
    missing = [name for name in wanted if name not in tensors]
    wrong = [
        f"{name} is {list(tensors[name].shape)} there and {list(parameter.shape)} in the draft"
        for name, parameter in wanted.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if missing or wrong:
        found = "; ".join([*(["the target has no " + ", ".join(missing)] if missing else []), *wrong])
        raise ConfigError(
            f'draft.initial is "target_layers", and layer {index} cannot start as a copy: {found}; '
            "give the draft the target's widths, or set draft.initial=random and draft.initial_layers=[]"
        )
    for name, parameter in wanted.items():
        parameter.copy_(tensors[name])


def read_target_layers(folder: Path, layer_ids: Sequence[int], *, model_type: str) -> list[dict[str, Tensor]]:
    """Tensors of these layers of a target's checkpoint, under their names within a layer, in float32.

    What a draft has no place for (biases, say) is left out when it is copied.
    """
    places: dict[int, dict[str, Tensor]] = {layer: {} for layer in layer_ids}
    for entry in list_entries(folder):
        prefix = next((prefix for prefix in _PREFIXES if entry.name.startswith(prefix)), None)
        if prefix is None:
            continue
        number, _, name = entry.name[len(prefix) :].partition(".")
        if not number.isdigit() or int(number) not in places:
            continue
        with safe_open(str(entry.file), framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(entry.name).float()
        is_zero_centred = "norm" in name and model_type.startswith(ZERO_CENTRED_NORMS)
        places[int(number)][name] = tensor + 1 if is_zero_centred else tensor
    empty = [layer for layer, tensors in places.items() if not tensors]
    if empty:
        raise ConfigError(
            f"{folder}: no tensors of layer {empty[0]} are found under a known name ({', '.join(_PREFIXES)}); "
            "set draft.initial=random and draft.initial_layers=[]"
        )
    return [places[layer] for layer in layer_ids]
