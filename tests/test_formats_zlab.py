"""The z-lab dialect: resolution of configs, names of tensors, reading what was written."""

from __future__ import annotations

import json
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from blockdraft.config import ConvConfig, DraftConfig, LayerConfig, RopeConfig, SelectorConfig
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import zlab
from drafts import (
    KIMI_V1,
    QWEN_V1,
    QWEN_V2,
    TINY_V1,
    TINY_V2,
    checkpoint,
    draft_configs,
    edited,
    random_tensors,
)


def layers(raw: dict[str, Any], **changes: Any) -> list[tuple[bool, int | None]]:
    config = zlab.config_from_dict(edited(raw, **changes))
    return [(layer.is_causal, layer.window) for layer in config.layers]


def same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_published_dflash2() -> None:
    config = zlab.config_from_dict(QWEN_V2)
    assert config.layers == (LayerConfig(is_causal=False, window=2048),) * 5
    assert config.target_layer_ids == (5, 19, 33, 47, 61)
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (8, 248070, 64)
    assert config.conv == ConvConfig(kernel_size=2, group_size=16)
    assert config.selector == SelectorConfig(rank=256, top_k=16)
    assert config.rope == RopeConfig(theta=1e7)
    assert (config.attention.head_dim, config.target_hidden_size) == (128, 5120)


def test_published_dflash() -> None:
    config = zlab.config_from_dict(QWEN_V1)
    assert config.layers == (LayerConfig(is_causal=True, window=2048),) * 4 + (
        LayerConfig(is_causal=False, window=None),
    )
    assert (config.family, config.block_size) == ("dflash", 16)


def test_published_yarn() -> None:
    rope = zlab.config_from_dict(KIMI_V1).rope
    assert (rope.theta, rope.kind, rope.numbers["factor"]) == (50000.0, "yarn", 64.0)
    assert rope.numbers["mscale_all_dim"] == 1.0


def test_rough_draft(shared_dir: Path) -> None:
    made = zlab.read(shared_dir / "prototypes" / "rough-draft", dtype=torch.float32)
    assert made.config.target_layer_ids == (1, 8, 14, 20, 27)
    assert len(made.tensors) == 36
    assert {tensor.dtype for tensor in made.tensors.values()} == {torch.float32}


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 4, "nest_block_size": ...},
        {"block_size": 4},
        {"mask_token_id": 60, "nest_mask_token_id": ...},
        {"target_layer_ids": [1, 4], "nest_target_layer_ids": ...},
        {"num_target_layers": ..., "nest_num_target_layers": 6},
        {"conv_kernel_size": 2, "nest_conv_kernel_size": ...},
        {"selector_top_k": 4},
        {"target_hidden_size": 32},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000.0}},
        {"rope_scaling": {"type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": 1.0}},
        {"head_dim": None},
        {"draft_vocab_size": 64},
        {"nest_attention_mode": "gqa", "fc_norm": False, "logit_scale": 1.0, "rope_is_neox_style": True},
        {"nest_output_multiplier": 1.0, "input_embedding_scale": 1, "final_logit_softcapping": 0.0},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 32, "use_sliding_window": False},
        {"attention_bias": False, "hidden_act": "silu", "transformers_version": "5.24.0", "auto_map": {}},
        {"model_type": ...},
        {"aux_hidden_stream": None, "markov_rank": 0, "enable_confidence_head": False},
    ],
)
def test_places_and_spellings_that_mean_the_same(changes: dict[str, Any]) -> None:
    assert zlab.config_from_dict(edited(TINY_V2, **changes)) == zlab.config_from_dict(TINY_V2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(False, None), (False, None)]),
        ({"is_causal": True}, [(True, None), (True, None)]),
        ({"nest_is_causal": True}, [(True, None), (True, None)]),
        ({"nest_causal": True}, [(True, None), (True, None)]),
        ({"is_causal": None, "nest_causal": False}, [(False, None), (False, None)]),
    ],
)
def test_causality_of_full_layers(changes: dict[str, Any], expected: list[tuple[bool, int | None]]) -> None:
    assert layers(TINY_V2, **changes) == expected


MIXED = edited(TINY_V2, layer_types=["sliding_attention", "full_attention"], sliding_window=9, use_sliding_window=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [(True, 9), (False, None)]),
        ({"is_causal": False}, [(False, 9), (False, None)]),
        ({"is_causal": True}, [(True, 9), (True, None)]),
        ({"nest_causal": False}, [(False, 9), (False, None)]),
        ({"sliding_window": ..., "nest_swa_window_size": 9}, [(True, 9), (False, None)]),
        ({"nest_swa_window_size": 9, "nest_use_swa": True}, [(True, 9), (False, None)]),
        ({"use_sliding_window": ..., "nest_use_swa": True}, [(True, 9), (False, None)]),
        ({"use_sliding_window": ..., "nest_use_swa": True, "layer_types": ...}, [(True, 9), (True, 9)]),
        ({"layer_types": ["full_attention"] * 2, "nest_use_swa": True}, [(True, 9), (True, 9)]),
    ],
)
def test_windows_and_causality(changes: dict[str, Any], expected: list[tuple[bool, int | None]]) -> None:
    assert layers(MIXED, **changes) == expected


def test_numbers_of_logits() -> None:
    changes = {
        "nest_output_multiplier": 0.196,
        "final_logit_softcapping": 20,
        "nest_input_embedding_scale": 2,
    }
    config = zlab.config_from_dict(edited(TINY_V2, **changes))
    assert (config.output_multiplier, config.final_logit_softcapping) == (0.196, 20.0)
    assert config.input_embedding_scale == 2.0


@given(config=draft_configs())
@settings(max_examples=200, deadline=None)
def test_config_round_trip(config: DraftConfig) -> None:
    text = json.dumps(zlab.config_to_dict(config), allow_nan=False)
    assert zlab.config_from_dict(json.loads(text)) == config


@given(
    config=draft_configs(),
    seed=st.integers(0, 99),
    own=st.booleans(),
    kind=st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_checkpoint_round_trip(config: DraftConfig, seed: int, own: bool, kind: str) -> None:
    tensors = random_tensors(config, seed=seed, own=own, dtype=getattr(torch, kind))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "draft"
        zlab.write(folder, zlab.Checkpoint(config=config, tensors=tensors), dtype=None)
        back = zlab.read(folder)
    assert back.config == config
    assert same_tensors(back.tensors, tensors)


def test_layers_that_the_layout_cannot_express() -> None:
    config = zlab.config_from_dict(MIXED)
    for first, second, word in [
        ((True, None), (False, None), "is_causal"),
        ((True, 4), (True, 8), "windows"),
    ]:
        pair = [LayerConfig(is_causal=causal, window=window) for causal, window in (first, second)]
        changed = DraftConfig(**{**_fields(config), "layers": tuple(pair)})
        with pytest.raises(ConfigError, match=word):
            zlab.config_to_dict(changed)


def _fields(config: DraftConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_the_written_layout(tmp_path: Path) -> None:
    made = checkpoint(TINY_V2, own=True, dtype=torch.float32)
    zlab.write(tmp_path / "deep" / "draft", made)
    folder = tmp_path / "deep" / "draft"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "mask_embedding.pt",
        "model.safetensors",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 10000.0
    assert (raw["dtype"], raw["is_causal"], raw["use_sliding_window"]) == ("bfloat16", False, False)
    with safe_open(folder / "model.safetensors", framework="pt") as stream:
        names = set(stream.keys())
        assert stream.get_tensor("fc.weight").dtype == torch.bfloat16
    assert "candidate_selector.predecessor_codebook" in names
    assert names == set(zlab.expected_tensors(made.config)) | {"embed_tokens.weight", "lm_head.weight"}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444


def test_other_names_and_a_prefix(tmp_path: Path) -> None:
    made = checkpoint(TINY_V2)
    (tmp_path / "config.json").write_text(json.dumps(TINY_V2))
    other = {
        "model." + (name + ".weight" if name.endswith("codebook") else name): tensor
        for name, tensor in made.tensors.items()
    }
    save_file(other, tmp_path / "model.safetensors")
    assert same_tensors(zlab.read(tmp_path).tensors, made.tensors)
    assert zlab.read_header(tmp_path)["candidate_selector.successor_codebook"] == ("BF16", (64, 4))


def test_shards(tmp_path: Path) -> None:
    made = checkpoint(TINY_V2, own=False)
    (tmp_path / "config.json").write_text(json.dumps(TINY_V2))
    names = sorted(made.tensors)
    weight_map = {}
    for index, part in enumerate((names[:10], names[10:]), start=1):
        file = f"model-{index:05d}-of-00002.safetensors"
        save_file({name: made.tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same_tensors(zlab.read(tmp_path).tensors, made.tensors)


@pytest.mark.parametrize("form", ["tensor", "row", "dict", "dict without id"])
def test_forms_of_a_mask_embedding(tmp_path: Path, form: str) -> None:
    zlab.write(tmp_path / "draft", checkpoint(TINY_V1))
    vector = torch.arange(32.0)
    value: Any = {
        "tensor": vector,
        "row": vector[None],
        "dict": {"embedding": vector, "mask_token_id": 60},
    }.get(form, {"embedding": vector})
    torch.save(value, tmp_path / "draft" / "mask_embedding.pt")
    assert torch.equal(zlab.read(tmp_path / "draft").tensors["mask_embedding"], vector)


def test_biases_are_expected_where_the_config_has_them(tmp_path: Path) -> None:
    made = checkpoint(edited(TINY_V1, attention_bias=True))
    assert made.tensors["layers.1.self_attn.o_proj.bias"].shape == (32,)
    assert made.tensors["layers.1.self_attn.k_proj.bias"].shape == (16,)
    zlab.write(tmp_path / "draft", made)
    assert zlab.read(tmp_path / "draft").config.attention.has_bias


def test_consent_to_a_mask_that_ends_the_text(tmp_path: Path) -> None:
    raw = edited(TINY_V1, eos_token_id=[1, 60])
    with pytest.raises(ConfigError, match="eos_token_id"):
        zlab.config_from_dict(raw)
    assert zlab.config_from_dict(raw, allow_mask_is_eos=True).mask_token_id == 60
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert zlab.read_config(tmp_path / "config.json", allow_mask_is_eos=True).mask_token_id == 60


def test_missing_taps_say_what_fc_expects(tmp_path: Path) -> None:
    made = checkpoint(TINY_V1)
    save_file(made.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(edited(TINY_V1, nest_target_layer_ids=...)))
    with pytest.raises(ConfigError, match=r"target_layer_ids is missing.*fc expects 2 taps"):
        zlab.read_config(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = checkpoint(TINY_V1)
    zlab.write(tmp_path / "draft", made)
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="disk full"):
        zlab.write(tmp_path / "new", made)
    with pytest.raises(OSError, match="disk full"):
        zlab.write(tmp_path / "draft", made, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before


def test_what_a_write_may_replace(tmp_path: Path) -> None:
    first, second = checkpoint(TINY_V1), checkpoint(TINY_V2)
    zlab.write(tmp_path / "draft", first)
    with pytest.raises(CheckpointError, match="is not empty"):
        zlab.write(tmp_path / "draft", second)
    zlab.write(tmp_path / "draft", second, overwrite=True)
    assert zlab.read(tmp_path / "draft").config == second.config
    (tmp_path / "draft" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt, which is not part"):
        zlab.write(tmp_path / "draft", first, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        zlab.write(tmp_path / "file", first)


def test_write_checks_what_it_is_given(tmp_path: Path) -> None:
    made = checkpoint(TINY_V1)
    with pytest.raises(CheckpointError, match="dtype is 'int8'"):
        zlab.write(tmp_path / "draft", made, dtype="int8")
    made.tensors["norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match="NaN"):
        zlab.write(tmp_path / "draft", made)
    del made.tensors["norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(norm\.weight\)"):
        zlab.write(tmp_path / "draft", made)
    assert not any(tmp_path.iterdir())
