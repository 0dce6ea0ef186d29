"""Targets whose state cannot be rolled back exactly are refused by name, before they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from blockdraft.errors import BlockdraftError, PairError
from blockdraft.targets import HFTarget, load_target
from blockdraft.targets.hf_cache import RowCache
from tiny_hybrids import BROKEN, relative, rounds, tiny_hybrid
from tiny_targets import random_ids, tiny_config, tiny_model

_RWKV = {"attention_hidden_size": 32}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKDRAFT_CACHE", str(tmp_path / "cache"))


def test_a_folder_with_state_elsewhere_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    tiny_config("rwkv", **_RWKV).save_pretrained(tmp_path)  # and no weights at all
    with pytest.raises(PairError, match=r"'rwkv'.*roll back exactly") as caught:
        load_target(tmp_path, tap_layer_ids=(0, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", sorted(BROKEN))
def test_a_model_that_forgets_its_state_between_forwards_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their forward of several positions after others does not give what one forward over all gives."""
    model = tiny_hybrid(family, std=0.25)
    model.config.max_position_embeddings = 2048  # what a family without a maximum would have to say
    with pytest.raises(PairError, match=rf"'{family}'.*lost between forwards"):
        HFTarget(model)
    monkeypatch.setattr("blockdraft.targets.model_facts.REFUSED_RECURRENT_MODEL_TYPES", frozenset())
    with pytest.raises(PairError, match=rf"'{family}'.*fed in pieces"):
        HFTarget(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not list(tmp_path.rglob("*.json"))  # a refusal is not remembered


@pytest.mark.parametrize(
    "kinds", [["linear_attention"] * 4, ["linear_attention", "full_attention"] * 2, ["conv", "full_attention"] * 2]
)
def test_a_config_whose_layers_are_not_the_models_is_refused_in_one_line(kinds: list[str]) -> None:
    model = tiny_model("llama")
    model.config.layer_types = kinds
    with pytest.raises(PairError, match=r"'llama' has a cache of its own config that its forward cannot use") as caught:
        HFTarget(model, (1,))
    assert "\n" not in str(caught.value)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_model_that_takes_no_key_value_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("rwkv", **_RWKV))
    monkeypatch.setattr("blockdraft.targets.model_facts.REFUSED_RECURRENT_MODEL_TYPES", frozenset())
    with pytest.raises(BlockdraftError, match="rwkv"):
        HFTarget(model)


class Fading(DynamicLayer):
    """A layer of a class of its own: beside keys and values it holds a number that every update changes."""

    def __init__(self, **_kwargs: Any) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"sum": None, "parts": []}

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        for position in range(value_states.shape[-2]):  # one after another, so that pieces do not matter
            new = value_states[..., position, :].mean()
            self.seen["sum"] = new if self.seen["sum"] is None else 0.9 * self.seen["sum"] + new
            self.seen["parts"].append(self.seen["sum"].clone())
        weights = torch.stack(self.seen["parts"])[:, None]
        return keys, values * (1 + weights)


@pytest.fixture
def fading(monkeypatch: pytest.MonkeyPatch) -> Any:
    kinds = DynamicCache.__init__.__globals__["DYNAMIC_LAYER_TYPE_MAPPING"]
    monkeypatch.setitem(kinds, "full_attention", Fading)
    return tiny_model("llama")


def test_layers_of_an_unknown_class_are_copied_and_put_back(fading: Any, tmp_path: Path) -> None:
    target = HFTarget(fading, (1, 3))
    assert len(list(tmp_path.rglob("*.json"))) == 1  # it had to pass the self-test
    assert not target.can_truncate and rounds(target, 30) < 1e-12
    rows = [target.new_row(), target.new_row()]
    target.forward([random_ids(9), random_ids(5)], rows)
    target.rollback(rows, [4, 0])
    rows.append(target.copy(rows[0]))
    held, new = [random_ids(9)[:4], random_ids(0), random_ids(9)[:4]], [random_ids(3, n) for n in range(3)]
    for before, more, found in zip(held, new, target.forward(new, rows), strict=True):
        [expected] = target.forward([torch.cat([before, more])], [target.new_row()])
        assert relative(found.logits_TV, expected.logits_TV[-3:]) < 1e-12
    assert target.way is None  # each by itself
    assert rows[0].num_bytes > rows[0].cache.num_bytes > 0  # type: ignore[attr-defined]
    target.close()


def test_layers_of_an_unknown_class_that_are_left_as_they_are_do_not_pass(
    fading: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockdraft.targets.recurrent._WholeCopy.put_back", lambda _copy: None)
    with pytest.raises(PairError, match=r"'llama'.*self-test"):
        HFTarget(fading)


def test_layers_of_an_unknown_class_whose_pieces_matter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(DynamicLayer):
        """Remembers how often it was called, wherever the cache is."""

        calls = 0

        def __init__(self, **_kwargs: Any) -> None:
            super().__init__()

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            Counting.calls += 1
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values * (1 + 0.01 * Counting.calls)

    kinds = DynamicCache.__init__.__globals__["DYNAMIC_LAYER_TYPE_MAPPING"]
    monkeypatch.setitem(kinds, "full_attention", Counting)
    with pytest.raises(PairError, match=r"'llama'.*(fed in pieces|self-test)"):
        HFTarget(tiny_model("llama"))


def test_a_kind_of_layer_that_transformers_does_not_know_is_refused() -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention", "remembering_attention"] * 2
    with pytest.raises(PairError, match=r"'llama'.*unknown type 'remembering_attention'"):
        RowCache(config, "llama")


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


def test_a_hybrid_with_state_outside_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_hybrid("lfm2")
    conv = model.model.layers[2].conv
    plain, seen = conv.forward, []

    def remembering(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(hidden_states.mean())
        return plain(hidden_states, *args, **kwargs) + 0.1 * sum(seen)

    conv.forward = remembering
    monkeypatch.setattr("blockdraft.targets.selftest.PROVEN_RECURRENT_MODEL_TYPES", frozenset())
    with pytest.raises(PairError, match=r"'lfm2'.*(fed in pieces|self-test)"):
        HFTarget(model)


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
