"""How a draft starts: a fresh network from a seed, with copies of target layers in it, or as a trained draft.

Owns which tensor of a target goes where. Knows no training.

Letters: V vocabulary, E target width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft import formats
from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.errors import ConfigError
from blockdraft.formats import zlab
from blockdraft.formats._safetensors import list_entries
from blockdraft.train.head import FrozenHead
from blockdraft.train.recipe import differing_keys

__all__ = ["ZERO_CENTRED_NORMS", "initialise_draft", "read_draft_tensors", "read_target_layers"]

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
    tensors: Mapping[str, Tensor] | None = None,
) -> DraftModel:
    """A fresh draft from `seed`; a fresh DFlash 2 draft proposes what a DFlash draft of the same linear weights would.

    The final norm starts as the target's own, since both stand before the same output head; a mask embedding of its own
    as the mask id's row. `layers`: what `read_target_layers` gave, one for each layer; all else stays as drawn.
    `tensors`: what `read_draft_tensors` gave; nothing is drawn then.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DraftModel(config, has_mask_embedding=has_mask_embedding)
    with torch.no_grad():
        model.norm.weight.copy_(head.final_norm_E)
        if model.mask_embedding is not None:
            model.mask_embedding.copy_(head.embed_VE[config.mask_token_id])
        for index, copied in enumerate(layers):
            _copy_layer(model, index, copied)
        if tensors is not None:
            model.load_state_dict(dict(tensors))
    return model


def read_draft_tensors(folder: Path, config: DraftConfig, *, has_mask_embedding: bool) -> dict[str, Tensor]:
    """Every tensor of a trained draft that is to be trained on, in float32. Its settings must be the new draft's."""
    checkpoint = formats.read(folder)
    theirs, ours = (zlab.config_to_dict(one, dtype="float32") for one in (checkpoint.config, config))
    if keys := differing_keys(theirs, ours):
        raise ConfigError(f"{folder}: as a start it must be like the recipe's draft; {', '.join(keys)} differ")
    if ("mask_embedding" in checkpoint.tensors) != has_mask_embedding:
        raise ConfigError(f"{folder}: as a start it must have a mask embedding exactly if the recipe's draft has one")
    own = [name for name in ("embed_tokens.weight", "lm_head.weight") if name in checkpoint.tensors]
    if own:
        raise ConfigError(f"{folder}: it brings {', '.join(own)} of its own, which are not trained here")
    return {name: tensor.float() for name, tensor in checkpoint.tensors.items()}


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
