"""What a training run takes from its target: embedding and output rows, the final norm, a look at whose text it is.

So that the loop knows no target. Letters: T positions, N taps, V vocabulary, E target width.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from blockdraft.config import TargetFacts
from blockdraft.errors import PairError
from blockdraft.formats._safetensors import list_entries
from blockdraft.targets import Target
from blockdraft.train.corpus import CorpusSource
from blockdraft.train.head import FrozenHead
from blockdraft.train.initial import ZERO_CENTRED_NORMS

__all__ = ["borrow", "check_target_wrote", "frozen_head"]

MAX_TAP_ERROR = 0.1
_FINAL_NORMS = (
    "model.norm.weight",
    "norm.weight",
    "model.language_model.norm.weight",
    "language_model.model.norm.weight",
)


def borrow(target: Target, folder: Path) -> FrozenHead:
    """The target's rows in float32 on the CPU; `folder` holds its checkpoint."""
    return frozen_head(
        target, final_norm_E=_final_norm(folder, target.facts), final_norm_eps=_final_norm_eps(folder / "config.json")
    )


def check_target_wrote(target: Target, corpus: CorpusSource) -> None:
    """Nothing; a PairError if the corpus's first sequence does not hold this target's taps.

    Numbers of another precision pass: the median relative error of a tap may reach a tenth (bfloat16: a hundredth).
    """
    batch = corpus.batch([0])
    num_fed = int(batch.len_B[0]) - 1
    row = target.new_row()
    [scored] = target.forward([batch.ids_BS[0, :num_fed]], [row], num_logits=0)
    target.free(row)
    layers = corpus.facts.target_layer_ids
    columns = [target.tap_layer_ids.index(layer) for layer in layers]
    kept_TNE, taps_TNE = batch.taps_BSNE[0, :num_fed], scored.taps_TNE[:, columns].float().cpu()
    error_TN = (kept_TNE - taps_TNE).norm(dim=-1) / taps_TNE.norm(dim=-1).clamp_min(1e-6)
    worst, at = error_TN.median(dim=0).values.max(dim=0)
    if not worst <= MAX_TAP_ERROR:
        raise PairError(
            f"the corpus was written by {corpus.facts.target}, and its tap of layer {layers[int(at)]} is off by "
            f"{float(worst):.0%} from this target's; name the target that wrote it, or write a new corpus"
        )


def frozen_head(target: Target, *, final_norm_E: Tensor | None, final_norm_eps: float | None = None) -> FrozenHead:
    """The target's embedding and output rows; `final_norm_E` None starts the draft's final norm at 1."""
    facts = target.facts
    embed_VE = target.embed(torch.arange(facts.vocab_size))
    unit_EE = torch.eye(facts.hidden_size, dtype=target.dtype, device=target.device)
    if target.logits(torch.zeros_like(unit_EE[:1])).any():
        raise PairError(
            f"the output head of {facts.model_type} adds a bias, which a draft cannot borrow; choose another target"
        )
    head_VE = target.logits(unit_EE).T.contiguous()
    if torch.equal(head_VE, embed_VE):
        head_VE = embed_VE
    is_known = final_norm_E is not None
    norm_E = final_norm_E.float() if final_norm_E is not None else torch.ones(facts.hidden_size)
    return FrozenHead(embed_VE.float().cpu(), norm_E, head_VE.float().cpu(), final_norm_eps if is_known else None)


def _final_norm(folder: Path, facts: TargetFacts) -> Tensor | None:
    """The weight of the target's final norm as a factor; None where the files have none under a known name."""
    for entry in list_entries(folder):
        if entry.name in _FINAL_NORMS and entry.shape == (facts.hidden_size,):
            with safe_open(str(entry.file), framework="pt") as stream:
                weight_E: Tensor = stream.get_tensor(entry.name).float()
            return weight_E + 1 if facts.model_type.startswith(ZERO_CENTRED_NORMS) else weight_E
    return None


def _final_norm_eps(config: Path) -> float | None:
    raw = json.loads(config.read_text(encoding="utf-8"))
    eps = raw.get("text_config", raw).get("rms_norm_eps")
    return float(eps) if isinstance(eps, int | float) else None
