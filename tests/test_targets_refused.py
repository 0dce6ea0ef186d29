"""Targets whose state cannot be rolled back exactly are refused by name, before they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from blockdraft.config import TargetFacts
from blockdraft.errors import BlockdraftError, PairError
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.hf_cache import RowCache
from tiny_targets import tiny_config, tiny_model

_TWO_KINDS = ["linear_attention", "full_attention"] * 2
_GDN = {
    "layer_types": _TWO_KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_GDN, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "qwen3_5_text": _GDN,
    "kimi_linear": {},
    "falcon_h1": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "jamba": {},
    "rwkv": {"attention_hidden_size": 32},
}
SPARSE = ["deepseek_v32", "glm_moe_dsa"]


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_a_recurrent_folder_is_refused_before_its_weights_are_read(family: str, tmp_path: Path) -> None:
    tiny_config(family, **RECURRENT[family]).save_pretrained(tmp_path)  # and no weights at all
    with pytest.raises(PairError, match=rf"'{family}'.*rolled back.*later version") as caught:
        load_target(tmp_path, tap_layer_ids=(0, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", sorted(set(RECURRENT) - {"kimi_linear"}))
def test_a_recurrent_model_in_memory_is_refused(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family, **RECURRENT[family]))
    with pytest.raises(PairError, match=rf"'{family}'.*rolled back"):
        HFTarget(model)


@pytest.mark.parametrize("family", sorted(set(RECURRENT) - {"kimi_linear", "mamba", "mamba2", "rwkv"}))
def test_a_recurrent_family_that_nobody_listed_is_refused_by_its_cache(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid of tomorrow: no list and no flag of transformers knows it, only its cache layers do."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **RECURRENT[family]))
    real = TargetFacts.from_config
    monkeypatch.setattr("blockdraft.config.pairing._is_recurrent", lambda _text: False)
    monkeypatch.setattr("blockdraft.config.pairing._RECURRENT_MODEL_TYPES", frozenset())
    monkeypatch.setattr(type(model), "_is_stateful", False)
    assert not real(model.config.to_dict()).is_recurrent
    with pytest.raises(PairError, match=rf"'{family}'.*layer state of the kind \w*Linear\w*"):
        HFTarget(model, (1,))
    assert not any(layer._forward_hooks for layer in model.get_decoder().layers)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv"])
def test_a_model_that_takes_no_key_value_cache_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family, **RECURRENT[family]))
    monkeypatch.setattr("blockdraft.config.pairing._RECURRENT_MODEL_TYPES", frozenset())
    monkeypatch.setattr("blockdraft.config.pairing._is_recurrent", lambda _text: False)
    monkeypatch.setattr(type(model), "_is_stateful", False)
    model.config.max_position_embeddings = 64
    with pytest.raises(BlockdraftError, match=family):
        HFTarget(model)


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_attention_is_refused_by_the_name_of_its_layers(family: str) -> None:
    with pytest.raises(PairError, match="DynamicIndexedLayer"):
        RowCache(tiny_config(family), family)


def test_a_cache_layer_of_an_unknown_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compressed(DynamicLayer):
        """A subclass may keep more than keys and values."""

    monkeypatch.setitem(DynamicCache.__init__.__globals__["DYNAMIC_LAYER_TYPE_MAPPING"], "full_attention", Compressed)
    with pytest.raises(PairError, match=r"'llama'.*Compressed"):
        RowCache(tiny_config("llama"), "llama")


def test_state_outside_the_cache_is_refused_at_load() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    plain = attention.forward

    def forgetful(*args: Any, **kwargs: Any) -> Any:
        kwargs["cache"] = None
        return plain(*args, **kwargs)

    attention.forward = forgetful
    with pytest.raises(PairError, match="state outside its key/value cache"):
        HFTarget(model, (1,))
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_layers_of_several_streams_are_refused_as_taps() -> None:
    model = tiny_model("llama")
    model.model.layers[2].register_forward_hook(lambda _m, _a, out: out[None].expand(2, -1, -1, -1)[0])
    HFTarget(model, (2,)).close()
    handle = model.model.layers[2].register_forward_hook(lambda _m, _a, out: out.unsqueeze(2))
    with pytest.raises((PairError, RuntimeError)):
        HFTarget(model, (2,))
    handle.remove()


def test_models_that_are_no_causal_decoder_are_refused() -> None:
    bert = AutoModelForCausalLM.from_config(
        tiny_config("bert", vocab_size=61, max_position_embeddings=64, is_decoder=True)
    )
    with pytest.raises(BlockdraftError, match="bert"):
        HFTarget(bert)
    with pytest.raises(BlockdraftError, match="encoder-decoder"):
        HFTarget(torch.nn.ModuleList([_Seq2Seq()])[0])


class _Seq2Seq(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = tiny_config("t5")
