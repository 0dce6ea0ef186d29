"""Taps of targets with several parallel streams, and raw embedding rows of targets that scale or norm them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockdraft.errors import PairError
from blockdraft.targets import HFTarget
from blockdraft.targets.streams import JOINED_STREAMS, join_streams, with_tap_stream
from kimi_k3_kit import LAYERS, tiny_target
from kimi_k3_kit import VOCAB as K3_VOCAB
from tiny_hybrids import RECURRENT, SPARSE, relative, rounds, tiny_hybrid
from tiny_targets import ATTENTION_ONLY, random_ids, tiny_config, tiny_model

TAPS = (0, 2, 3)
# Their embedding layer, or the model before its first layer, changes the rows.
CHANGED_ROWS = {
    "gemma": {},
    "gemma2": ATTENTION_ONLY["gemma2"],
    "gemma3_text": ATTENTION_ONLY["gemma3_text"],
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "falcon_h1": {**RECURRENT["falcon_h1"], "embedding_multiplier": 3.0},
    "granitemoehybrid": {**RECURRENT["granitemoehybrid"], "embedding_multiplier": 3.0},
    "muse_glimmer": {},
}


def muse_glimmer() -> Any:
    """The family has no class for its text alone."""
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    text = tiny_config("muse_glimmer_text", sliding_window=9).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = MuseGlimmerConfig(text_config=text, vision_config=vision)
    return MuseGlimmerForConditionalGeneration(config).double().eval()


def model_of(family: str) -> Any:
    if family == "muse_glimmer":
        return muse_glimmer()
    if family in CHANGED_ROWS:
        return tiny_model(family, **CHANGED_ROWS[family])
    return tiny_hybrid(family) if family in {**RECURRENT, **SPARSE} else tiny_model(family)


# ---- streams ---------------------------------------------------------------------------------------------------------
def test_taps_of_glm5_next_are_the_mean_of_its_streams() -> None:
    """By hand from what the model itself reports of its layers; behind the last layer stands the final norm."""
    model = tiny_hybrid("glm5_next_text")
    target, ids = HFTarget(model, TAPS), random_ids(19)
    [scored] = target.forward([ids], [target.new_row()])
    with torch.no_grad():
        states = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    for column, layer in enumerate(TAPS[:-1]):
        streams = states[layer + 1][0]  # T, S, E
        assert streams.shape == (19, 2, 32) and float((streams[:, 0] - streams[:, 1]).abs().max()) > 1e-3
        by_hand = torch.tensor([
            [(float(streams[t, 0, e]) + float(streams[t, 1, e])) / 2 for e in range(32)] for t in range(19)
        ], dtype=torch.float64)  # fmt: skip
        assert relative(scored.taps_TNE[:, column], by_hand) < 1e-12
    text = model.model.language_model
    with torch.no_grad():
        assert relative(model.lm_head(text.norm(scored.taps_TNE[:, -1])), scored.logits_TV) < 1e-12
    target.close()


def test_joined_taps_are_rolled_back_with_their_rows() -> None:
    target = HFTarget(tiny_hybrid("glm5_next_text"), TAPS)
    assert target.tap_layer_ids == TAPS and rounds(target, 6) < 1e-5
    target.close()


def test_streams_without_a_published_meaning_have_to_be_named() -> None:
    model = tiny_hybrid("qwen4_exp_text")
    with pytest.raises(PairError, match=r"no published draft says what of it a tap is: name it with tap_stream \("):
        HFTarget(model, (1,))
    assert "qwen4_exp_text" not in JOINED_STREAMS and not any(layer._forward_hooks for layer in model.model.layers)
    HFTarget(model).close()  # without taps it is a target like any other
    with pytest.raises(PairError, match="'attn_res' were asked for, and qwen4_exp_text has mean: is this the draft's"):
        HFTarget(model, (1,), tap_stream="attn_res")
    with pytest.raises(PairError, match="'mean' were asked for, and llama has prefix"):
        HFTarget(tiny_model("llama"), (1,), tap_stream="mean")


def test_the_named_mean_of_parallel_streams() -> None:
    """By hand, number by number, from what each layer hands to the next: S streams side by side."""
    model, ids, seen = tiny_hybrid("qwen4_exp_text"), random_ids(11), {}
    target = HFTarget(model, TAPS, tap_stream="mean")
    [scored] = target.forward([ids], [target.new_row()])
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _module, _args, output, index=index: seen.update({index: output[0]}))
    with torch.no_grad():
        model(input_ids=ids[None])
    width, count = model.config.hidden_size, model.config.hc_count
    assert count > 1 and scored.taps_TNE.shape == (11, len(TAPS), width)
    for column, layer in enumerate(TAPS):
        by_hand = [
            [sum(float(row[s * width + e]) for s in range(count)) / count for e in range(width)] for row in seen[layer]
        ]
        assert relative(scored.taps_TNE[:, column], torch.tensor(by_hand, dtype=torch.float64)) < 1e-12
    assert rounds(target, 6) < 1e-5
    target.close()


def test_one_stream_is_left_as_it_is() -> None:
    output = torch.zeros(1, 2, 3)
    assert join_streams("llama", "prefix", output, 3) is output
    assert join_streams("llama", "prefix", (output, None), 3) is output  # type: ignore[arg-type]


def test_the_other_stream_of_the_same_model() -> None:
    target, ids = tiny_target((1, LAYERS - 1)), torch.arange(3, 20) % K3_VOCAB
    other = with_tap_stream(target, "attn_res")
    assert with_tap_stream(target, "prefix") is target and other.tap_stream == "attn_res"
    taps = [one.forward([ids], [one.new_row()])[0].taps_TNE for one in (target, other)]
    expected = tiny_target((1, LAYERS - 1), stream="attn_res")
    assert relative(taps[0], taps[1]) > 0.1
    assert torch.equal(taps[1], expected.forward([ids], [expected.new_row()])[0].taps_TNE)
    llama = HFTarget(tiny_model("llama"))
    with pytest.raises(PairError, match="llama has one stream of taps"):
        with_tap_stream(llama, "attn_res")


# ---- embedding rows --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", sorted({*ATTENTION_ONLY, *RECURRENT, *SPARSE, *CHANGED_ROWS}))
def test_embed_gives_the_stored_rows(family: str) -> None:
    """Rows of the tensor that a checkpoint stores, whatever the model does to them before its first layer."""
    model = model_of(family)
    target, ids = HFTarget(model), random_ids(12)
    [stored] = [
        x for name, x in model.state_dict().items() if name.endswith(("embed_tokens.weight", "embeddings.weight"))
    ]
    assert torch.equal(target.embed(ids), stored[ids])
    first = _input_of_first_layer(target, ids)
    if family in CHANGED_ROWS:
        assert relative(first, stored[ids]) > 0.1
    target.close()


def _input_of_first_layer(target: HFTarget, ids: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def keep(_module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    handle = target._layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    target.forward([ids], [target.new_row()], num_logits=0)
    handle.remove()
    return seen[0][0]
