"""Malformed configs and checkpoints: each is refused by one line that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.formats._zlab_keys import KNOWN_NESTED, KNOWN_TOP
from drafts import TINY_V1, TINY_V2, checkpoint, edited

SWA = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    # missing, never guessed
    ({"nest_block_size": ...}, "block_size is missing"),
    ({"nest_mask_token_id": ...}, "mask_token_id is missing"),
    ({"nest_mask_token_id": ..., "mask_token": "<|MASK|>"}, "mask_token_id is missing"),
    ({"nest_target_layer_ids": ...}, "target_layer_ids is missing"),
    ({"num_target_layers": ...}, "num_target_layers is missing"),
    ({"rope_theta": ...}, "rope_theta is missing"),
    ({"hidden_size": ...}, "hidden_size is missing"),
    ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ({"max_position_embeddings": ...}, "max_position_embeddings is missing"),
    ({"architectures": ...}, "DFlash2DraftModel"),
    # given twice and different
    ({"block_size": 8}, "block_size is given twice"),
    ({"mask_token_id": 61}, "mask_token_id is given twice"),
    ({"target_layer_ids": [1, 5]}, "target_layer_ids is given twice"),
    ({"selector_top_k": 8}, "selector_top_k is given twice"),
    ({"is_causal": True, "nest_causal": False}, "is_causal is given twice"),
    ({**SWA, "nest_swa_window_size": 10}, "sliding_window is given twice"),
    ({**SWA, "nest_use_swa": False}, "use_sliding_window is given twice"),
    ({"rope_parameters": {"rope_theta": 500000.0}}, "rope_theta is given twice"),
    (
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2},
            "rope_scaling": {"type": "linear", "factor": 4},
        },
        "differ in factor",
    ),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "rope_type 'yarn'"),
    # not a value
    ({"hidden_size": True}, "hidden_size is True"),
    ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"intermediate_size": 0}, "intermediate_size is 0"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_hidden_layers": 10**15, "layer_types": None}, "more than 1000 layers"),
    ({"num_attention_heads": 3}, "num_attention_heads is 3"),
    ({"num_attention_heads": 6, "head_dim": None}, "head_dim is missing"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"rms_norm_eps": 10**400}, "it must be finite"),
    ({"rope_theta": "1e4"}, "rope_theta is '1e4'"),
    ({"attention_bias": 1}, "attention_bias is 1"),
    ({"is_causal": 0}, "is_causal is 0"),
    ({"nest_block_size": 1}, "block_size is 1"),
    ({"nest_block_size": 4.0}, "block_size is 4.0"),
    ({"nest_block_size": 257}, "block_size is 257"),
    ({"nest_mask_token_id": 64}, "mask_token_id is 64"),
    ({"nest_mask_token_id": -1}, "mask_token_id is -1"),
    ({"nest_mask_token_id": 2}, "mask_token_id is 2, which is also eos_token_id"),
    ({"pad_token_id": 60}, "mask_token_id is 60, which is also pad_token_id"),
    ({"nest_conv_group_size": 5}, "conv_group_size is 5"),
    ({"nest_selector_top_k": 65}, "selector_top_k is 65"),
    ({"nest_output_multiplier": -1.0}, "output_multiplier is -1"),
    ({"final_logit_softcapping": "off"}, "final_logit_softcapping is 'off'"),
    # taps
    ({"nest_target_layer_ids": []}, "target_layer_ids is empty"),
    ({"nest_target_layer_ids": "1,4"}, "target_layer_ids is '1,4'"),
    ({"nest_target_layer_ids": [1, 1]}, "holds 1 twice"),
    ({"nest_target_layer_ids": [4, 1]}, "must rise: 1 follows 4"),
    ({"nest_target_layer_ids": [-1, 4]}, "holds -1: negative"),
    ({"nest_target_layer_ids": [1, 6]}, "holds 6: too big"),
    ({"nest_target_layer_ids": [1, True]}, "holds True"),
    # rope
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type is 'longrope'"),
    ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type is"),
    ({"rope_scaling": {"factor": 2}}, "rope_type is missing"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "needs original_max_position_embeddings"),
    ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "rope parameter mscale is unknown"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope parameter factor is -2"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
    ({"rope_parameters": [1]}, "rope_parameters is"),
    # windows
    ({**SWA, "layer_types": ["sliding_attention"]}, "layer_types is"),
    ({**SWA, "layer_types": ["sliding_attention", "linear_attention"]}, "'linear_attention'"),
    ({**SWA, "sliding_window": None}, "sliding_window is missing"),
    ({**SWA, "sliding_window": -3}, "sliding_window is -3"),
    ({**SWA, "use_sliding_window": False}, "use_sliding_window is false"),
    ({**SWA, "use_sliding_window": ...}, "use_sliding_window is missing"),
    ({**SWA, "layer_types": ...}, "layer_types is missing"),
    ({**SWA, "layer_types": ["full_attention"] * 2}, "no layer in layer_types slides"),
    ({"sliding_window": 9}, "sliding_window is 9 and no layer slides"),
    # unknown keys
    (
        {"mask_tokn_id": 60},
        "unknown key 'mask_tokn_id' at top level: the nearest known name is 'mask_token_id'",
    ),
    (
        {"nest_blok_size": 4},
        "unknown key 'blok_size' in dflash_config: the nearest known name is 'block_size'",
    ),
    ({"nest_hidden_size": 32}, "unknown key 'hidden_size' in dflash_config"),
    ({"nest_selector_vocab_size": 60}, "unknown key 'selector_vocab_size' in dflash_config"),
    ({"dflash_config": [1]}, "dflash_config is [1]"),
    # other families and extensions
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"nest_attention_mode": "mla"}, "kv_lora_rank is missing"),
    ({"nest_attention_mode": "kda"}, "attention_mode is 'kda'"),
    ({"nest_attention_mode": "mha"}, "attention_mode is 'mha' and num_key_value_heads is 2"),
    ({"nest_attention_mode": "gqa", "nest_attention_modes": ["mha", "mha"]}, "attention_modes is"),
    ({"nest_attention_modes": ["gqa", "kda"]}, "attention_modes is"),
    ({"kv_lora_rank": 512}, "kv_lora_rank is 512"),
    ({"mla_use_nope": True}, "mla_use_nope is True"),
    ({"fc_norm": "yes"}, "fc_norm is 'yes'"),
    ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    ({"draft_vocab_size": 32}, "draft_vocab_size is 32"),
    ({"nest_attention_sink_bias": True}, "attention_sink_bias is True"),
    ({"nest_attention_value_scale": 2.0}, "attention_value_scale is 2.0"),
    ({"markov_rank": 256}, "markov_rank is 256"),
    ({"enable_confidence_head": True}, "enable_confidence_head is True"),
    ({"logit_scale": 0.5}, "logit_scale is 0.5"),
    ({"rope_is_neox_style": False}, "rope_is_neox_style is False"),
    ({"rope_interleave": True}, "rope_interleave is True: supported is false"),
    ({"nest_projector_type": "dspark"}, "projector_type is 'dspark'"),
    ({"aux_hidden_stream": "mixture"}, "aux_hidden_stream is 'mixture'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"nest_aux_hidden_state_layer_ids": [2, 5]}, "aux_hidden_state_layer_ids is"),
    # class and parts
    ({"architectures": ["DFlashDraftModel"]}, "DFlash2DraftModel would fit"),
    ({"nest_selector_rank": ...}, "DFlash2DraftModel needs selector_rank"),
    ({"architectures": ["Qwen3DSparkModel"]}, "architectures says Qwen3DSparkModel but conv_kernel_size"),
    ({"architectures": "DFlash2DraftModel"}, "architectures is 'DFlash2DraftModel'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_CONFIGS)
def test_bad_config(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(edited(TINY_V2, **changes)))
    with pytest.raises(ConfigError) as caught:
        zlab.read_config(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (edited(TINY_V1, architectures=["DFlash2DraftModel"]), "DFlashDraftModel would fit"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "pass it as --target"),
        ({"model_type": "llama"}, "pass it as --target"),
        ([1, 2], "the config is a list"),
    ],
)
def test_config_of_another_kind(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zlab.config_from_dict(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a JSON file"),
        ('{"hidden_size": 32, "hidden_size": 64}', "the key 'hidden_size' stands twice"),
        ('{"rms_norm_eps": NaN}', "NaN is not a number"),
        ("\udcff", "is not a JSON file"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_config_that_is_not_json(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        zlab.read_config(tmp_path)


KEYS = sorted([*KNOWN_TOP, *(f"nest_{name}" for name in KNOWN_NESTED)])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor"]), inner),
    max_leaves=4,
)


@given(key=st.sampled_from(KEYS), value=VALUES)
@settings(max_examples=400, deadline=None)
def test_any_value_of_any_key_is_understood_or_refused_by_name(key: str, value: Any) -> None:
    try:
        config = zlab.config_from_dict(edited(TINY_V2, **{key: value}))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert zlab.config_from_dict(zlab.config_to_dict(config)) == config


Change = Callable[[dict[str, torch.Tensor]], object]


def extra(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.__setitem__(name, torch.zeros(shape or (2,)))


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors: tensors.__setitem__(name, tensors[name].to(dtype))


def drop(part: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name]


def spoil(name: str, value: float) -> Change:
    return lambda tensors: tensors[name].view(-1).__setitem__(1, value)


def stand_alone(tensors: dict[str, torch.Tensor]) -> None:
    drop("fc.weight")(tensors)
    drop("hidden_norm")(tensors)
    tensors["model.embed_tokens.weight"] = torch.zeros(64, 32)


BAD_TENSORS: list[tuple[dict[str, Any], Change, str]] = [
    (TINY_V2, drop("norm.weight"), "missing (hidden_norm.weight, "),
    (TINY_V2, drop("layers.1."), "15 missing (layers.1.attention_conv.base_kernel"),
    (TINY_V2, drop("layers.1."), "the file has the layers [0], the config asks for 2"),
    (TINY_V2, extra("layers.2.mlp.up_proj.weight"), "1 left over (layers.2.mlp.up_proj.weight)"),
    (TINY_V2, extra("rotary_emb.inv_freq"), "1 left over (rotary_emb.inv_freq)"),
    (TINY_V2, extra("fc_norm.0.weight"), "the file has a norm per tap: fc_norm true would fit"),
    (TINY_V1, extra("layers.0.attention_conv.base_kernel"), "DFlash2DraftModel would fit"),
    (TINY_V1, extra("candidate_selector.predecessor_codebook.weight"), "DFlash2DraftModel would fit"),
    (TINY_V2, lambda t: [drop(p)(t) for p in ("_conv.", "candidate_")], "DFlashDraftModel would fit"),
    (TINY_V2, extra("layers.0.self_attn.kv_a_proj_with_mqa.weight"), "MLA"),
    (TINY_V2, extra("layers.0.self_attn.q_a_proj.weight"), "MLA"),
    (TINY_V1, extra("markov_head.markov_w1.weight"), "DSpark"),
    (TINY_V1, extra("confidence_head.proj.weight"), "DSpark"),
    (TINY_V1, extra("d2t"), "reduced draft vocabulary"),
    (TINY_V1, extra("context_proj.weight"), "export the checkpoint first"),
    (TINY_V1, extra("encoder.fc.weight"), "assistant"),
    (TINY_V1, extra("layers.0.self_attn.q_proj.bias"), "attention_bias true would fit"),
    (TINY_V1, stand_alone, "this is a stand-alone model, not a draft: pass it as --target"),
    (TINY_V1, extra("fc.weight", 32, 96), "fc expects 3 taps, target_layer_ids lists 2"),
    (TINY_V1, extra("norm.weight", 16), "norm.weight is [16], expected [32]"),
    (TINY_V1, extra("embed_tokens.weight", 63, 32), "embed_tokens.weight is [63, 32], expected [64, 32]"),
    (TINY_V1, cast("norm.weight", torch.int64), "norm.weight is I64"),
    (TINY_V1, cast("fc.weight", torch.float8_e4m3fn), "fc.weight is F8_E4M3"),
    (TINY_V1, spoil("fc.weight", float("nan")), "1 tensors hold NaN or infinity: fc.weight"),
    (TINY_V1, spoil("norm.weight", float("inf")), "1 tensors hold NaN or infinity: norm.weight"),
    (TINY_V1, extra("model.norm.weight", 32), "are the same tensor"),
    (TINY_V2, extra("candidate_selector.successor_codebook.weight", 64, 4), "are the same tensor"),
]


def saved(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, message: str, kind: type[BlockdraftError] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        zlab.read(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("raw", "change", "message"), BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, raw: dict[str, Any], change: Change, message: str) -> None:
    tensors = checkpoint(raw).tensors
    change(tensors)
    refused(saved(tmp_path, raw, tensors), message)


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


def header_changed(old: bytes, new: bytes) -> Callable[[Path], None]:
    assert len(old) == len(new)
    return rewrite(lambda data: data.replace(old, new, 1))


def text_file(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def moved(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def index(**files: str) -> Callable[[Path], None]:
    """An index that puts `norm.weight` into the file given for `norm`, every other tensor into `rest`."""

    def apply(folder: Path) -> None:
        names = zlab.read_header(folder)
        weight_map = {name: files["norm" if name == "norm.weight" else "rest"] for name in names}
        weight_map |= {"ghost.weight": files["ghost"]} if "ghost" in files else {}
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        save_file({"norm.weight": torch.zeros(32)}, folder / "b.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return apply


def mask_embedding(value: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "mask_embedding.pt")


class Foreign:
    """Something that a file of plain tensors must not hold."""


BAD_FILES: list[tuple[Callable[[Path], None], str]] = [
    (rewrite(lambda data: data[:-7]), "is cut short"),
    (rewrite(lambda data: data[:100]), "is cut short"),
    (rewrite(lambda data: data + b"xx"), "2 bytes follow its last tensor"),
    (rewrite(lambda data: b""), "is not a safetensors file"),
    (rewrite(lambda data: b"PK\x03\x04" + data[4:]), "is cut short"),
    (rewrite(lambda data: data[:8] + b"?" + data[9:]), "is not a safetensors file"),
    (rewrite(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "Git LFS pointer"),
    (
        header_changed(b'"norm.weight":{"dtype":"BF16"', b'"norm.weight":{"dtype":"BF99"'),
        "unknown dtype 'BF99'",
    ),
    (header_changed(b'"shape":[32]', b'"shape":[33]'), "does not fill its 64 bytes"),
    (header_changed(b'"shape":[32]', b'"shape":[-2]'), "has the shape [-2]"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no weights in"),
    (
        moved("model.safetensors", "pytorch_model.bin"),
        "pytorch_model.bin is not read, convert it to safetensors",
    ),
    (moved("model.safetensors", "draft.safetensors"), "holds draft.safetensors but neither"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (lambda folder: [path.unlink() for path in folder.iterdir()] and None, "is empty"),
    (text_file("model.safetensors.index.json", '{"weight_map": {}}'), "holds both model.safetensors and"),
    (lambda folder: save_file({}, folder / "z.safetensors"), "holds z.safetensors beside model.safetensors"),
    (index(norm="a.safetensors", rest="a.safetensors"), "holds b.safetensors, which"),
    (index(norm="b.safetensors", rest="a.safetensors"), "tensor norm.weight stands in two files"),
    (
        index(norm="b.safetensors", rest="a.safetensors", ghost="b.safetensors"),
        "holds ghost.weight: it does not",
    ),
    (index(norm="c.safetensors", rest="a.safetensors"), "names c.safetensors, which is missing"),
    (index(norm="../b.safetensors", rest="a.safetensors"), "names '../b.safetensors'"),
    (
        mask_embedding({"embedding": torch.zeros(32), "mask_token_id": 61}),
        "mask_token_id is 61 in mask_embedding.pt",
    ),
    (mask_embedding({"vector": torch.zeros(32)}), "holds the keys vector"),
    (mask_embedding(torch.zeros(31)), "mask_embedding is [31]"),
    (mask_embedding(torch.zeros(32, dtype=torch.int64)), "does not hold a floating-point tensor"),
    (mask_embedding(torch.full((32,), float("nan"))), "hold NaN or infinity: mask_embedding"),
    (mask_embedding(Foreign()), "cannot be read as plain tensors"),
    (text_file("mask_embedding.pt", "junk"), "cannot be read as plain tensors"),
    (lambda folder: (folder / "mask_embedding.pt").symlink_to("gone.pt"), "cannot be read as plain tensors"),
    (rewrite(lambda data: (10**5).to_bytes(8, "little") + b"[" * 10**5), "nested too deeply"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_FILES)
def test_bad_files(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    saved(tmp_path, TINY_V1, checkpoint(TINY_V1).tensors)
    damage(tmp_path)
    refused(tmp_path, message)


def test_index_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_V1))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    refused(tmp_path, "is not an index with a weight_map")


def test_mask_embedding_in_two_places(tmp_path: Path) -> None:
    zlab.write(tmp_path / "draft", checkpoint(TINY_V1, own=True))
    tensors = checkpoint(TINY_V1, own=True).tensors
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    refused(tmp_path / "draft", "mask_embedding stands in the weights and in mask_embedding.pt")


def test_weights_file_given_as_a_folder(tmp_path: Path) -> None:
    saved(tmp_path, TINY_V1, checkpoint(TINY_V1).tensors)
    refused(tmp_path / "model.safetensors", "give the folder")
    refused(tmp_path / "nowhere", "does not exist")


def test_a_target_opened_as_a_draft(tmp_path: Path) -> None:
    saved(tmp_path, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, {"x": torch.zeros(1)})
    refused(tmp_path, "this is a stand-alone model, not a draft: pass it as --target", ConfigError)
