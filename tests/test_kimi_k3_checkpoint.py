"""Kimi-K3 checkpoints: the published names written and read back, the four-bit experts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError, PairError, UnavailableError
from blockdraft.targets import load_target
from blockdraft.targets.kimi_k3 import KimiK3Config, KimiK3Target, published_tensors, read, write
from kimi_k3_kit import (
    EXPERT_LATENT,
    EXPERTS,
    KDA_DIM,
    KDA_HEADS,
    TINY,
    VOCAB,
    FromScratch,
    edited,
    tensors_of,
    tiny_model,
    tiny_target,
)

IDS = torch.randint(3, VOCAB, (17,), generator=torch.Generator().manual_seed(0))
MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
}
PREFIX = "language_model."


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("k3") / "target"
    write(tiny_model(), TINY, folder)
    return folder


def copied(source: Path, goal: Path, raw: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A copy with another config or other tensors (None removes one); names with `/` for dots."""
    goal.mkdir()
    config = raw if raw is not None else json.loads((source / "config.json").read_text())
    (goal / "config.json").write_text(json.dumps(config))
    held = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, goal / "model.safetensors")
    return goal


def logits_of(target: KimiK3Target) -> Tensor:
    return target.forward([IDS], [target.new_row()])[0].logits_TV


# ---- read back -------------------------------------------------------------------------------------------------------
def test_written_and_read_back(stored: Path) -> None:
    held = load_file(stored / "model.safetensors")
    names = published_tensors(KimiK3Config.from_dict(TINY))
    assert set(held) == set(names)
    for name, tensor in held.items():
        wanted = (KDA_DIM,) if name.endswith("A_log") else names[name]  # with room behind the heads, as published
        assert tuple(tensor.shape) == wanted, name
    wanted = tensors_of(tiny_model())
    for name, tensor in held.items():
        assert torch.equal(tensor[: wanted[name].shape[0]], wanted[name]), name
    target = load_target(stored)
    assert isinstance(target, KimiK3Target)
    assert torch.equal(logits_of(target), logits_of(tiny_target()))
    assert (target.dtype, target.facts, target.tap_stream) == (torch.float64, tiny_target().facts, "prefix")


def test_published_names_one_by_one() -> None:
    names = {name.removeprefix(PREFIX) for name in published_tensors(KimiK3Config.from_dict(TINY))}

    def layer(index: int) -> set[str]:
        at = f"model.layers.{index}."
        return {name.removeprefix(at) for name in names if name.startswith(at)}

    frame = {f"{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")} | {
        f"{side}_res_{part}.weight" for side in ("self_attention", "mlp") for part in ("norm", "proj")
    }
    kda = {f"self_attn.{x}_proj.weight" for x in ("q", "k", "v", "f_a", "f_b", "b", "g", "o")} | {
        *(f"self_attn.{x}_conv1d.weight" for x in "qkv"),
        *("self_attn.A_log", "self_attn.dt_bias", "self_attn.o_norm.weight"),
    }
    mla = {
        f"self_attn.{x}.weight"
        for x in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    } | {"self_attn.g_proj.weight", "self_attn.o_proj.weight"}
    moe = {f"experts.{e}.{w}.weight" for e in range(EXPERTS) for w in ("w1", "w2", "w3")} | {
        *(f"shared_experts.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"routed_expert_{x}.weight" for x in ("down_proj", "up_proj", "norm")),
        *("gate.weight", "gate.e_score_correction_bias"),
    }
    assert layer(0) == frame | kda | {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    assert layer(3) == frame | mla | {f"block_sparse_moe.{name}" for name in moe}
    assert {name for name in names if ".layers." not in name} == {
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *("model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight"),
    }


def test_what_belongs_to_other_parts_and_the_text_part_alone(stored: Path, tmp_path: Path) -> None:
    vision = {"vision_tower.patch_embed.proj.weight": torch.zeros(2, 2), "mm_projector.proj.0.weight": torch.zeros(3)}
    whole = load_target(copied(stored, tmp_path / "whole", **vision))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps({**TINY["text_config"], "eos_token_id": 7}))
    (alone / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, VOCAB + 5]}))
    held = load_file(stored / "model.safetensors")
    save_file({name.removeprefix(PREFIX): tensor for name, tensor in held.items()}, alone / "model.safetensors")
    text = load_target(alone)
    assert isinstance(whole, KimiK3Target) and isinstance(text, KimiK3Target)
    assert torch.equal(logits_of(whole), logits_of(text))
    assert (text.facts.model_type, text.facts.eos_token_ids) == ("kimi_k3", (7, 9))


def test_dtypes_packing_and_taps(stored: Path) -> None:
    exact = logits_of(tiny_target())
    for dtype, pack, limit in ((torch.float32, False, 1e-4), (torch.float32, True, 1e-4), (torch.bfloat16, False, 0.3)):
        target = load_target(stored, dtype=dtype, pack=pack)
        assert isinstance(target, KimiK3Target) and target.dtype == dtype
        attention = target._model.model.layers[0].self_attn
        assert attention.A_log.dtype == attention.q_conv1d.weight.dtype == torch.float32
        # On average: a token that bfloat16 sends to another expert is far off.
        assert float((logits_of(target).double() - exact).abs().mean() / exact.abs().mean()) < limit
    target = load_target(stored, tap_layer_ids=(1, 8), tap_stream="attn_res")
    assert (target.tap_layer_ids, target.tap_stream) == ((1, 8), "attn_res")
    with pytest.raises(PairError, match=r"taps \[9\] do not fit a target of 9 layers"):
        load_target(stored, tap_layer_ids=(9,))
    with pytest.raises(UnavailableError, match="fused=True"):
        load_target(stored, fused=True)


def test_shards_with_an_index(stored: Path, tmp_path: Path) -> None:
    held = load_file(stored / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    names = sorted(held)
    weight_map = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: held[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = load_target(tmp_path)
    assert isinstance(target, KimiK3Target)
    assert torch.equal(logits_of(target), logits_of(tiny_target()))


# ---- four bits -------------------------------------------------------------------------------------------------------
def unpacked_by_hand(packed: Tensor, scale: Tensor) -> Tensor:
    """From the format's own definition: sign, exponent with bias 1, mantissa; scales are powers of two."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    out = torch.zeros(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            code = (int(packed[row, column // 2]) >> (4 * (column % 2))) & 15
            sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
            value = mantissa * 0.5 if exponent == 0 else (1.0 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
            out[row, column] = sign * value * 2.0 ** (int(scale[row, column // 32]) - 127)
    return out


def test_experts_in_four_bits(stored: Path, tmp_path: Path) -> None:
    held = load_file(stored / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    plain = dict(held)
    for name in [name for name in held if ".experts." in name]:
        rows, columns = held.pop(name).shape
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
        scale = torch.randint(122, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        held[f"{name}_packed"], held[f"{name}_scale"] = packed, scale
        plain[name] = unpacked_by_hand(packed, scale)
    assert EXPERT_LATENT % 32 == 0
    (tmp_path / "config.json").write_text(json.dumps(edited(quantization_config=MXFP4)))
    save_file(held, tmp_path / "model.safetensors")
    model, _ = read(tmp_path)
    experts = model.model.layers[1].block_sparse_moe.experts
    assert experts.w1_packed.dtype == torch.uint8  # four bits in memory too
    target = load_target(tmp_path, dtype=torch.float64)
    assert isinstance(target, KimiK3Target)
    heads = {name: tensor[:KDA_HEADS] if name.endswith("A_log") else tensor for name, tensor in plain.items()}
    assert torch.allclose(logits_of(target), FromScratch(heads).run(IDS).logits, atol=1e-10)
    write(model, edited(quantization_config=MXFP4), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert set(again) == set(held) and all(torch.equal(again[name], held[name]) for name in held)


# ---- refused ---------------------------------------------------------------------------------------------------------
AT = "language_model.model.layers"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{AT}.1.self_attn.A_log": None}, f"lacks 1 tensors of a Kimi-K3 text model ({AT}.1.self_attn.A_log)"),
        ({f"{AT}.2.block_sparse_moe.experts.3.w2.weight": None}, "lacks 1 tensors"),
        ({f"{AT}.9.input_layernorm.weight": torch.ones(32)}, "holds 1 tensors that its config.json does not account"),
        ({f"{AT}.1.block_sparse_moe.experts.6.w1.weight": torch.ones(32, 32)}, "does not account for"),
        ({f"{AT}.0.self_attn.g_a_proj.weight": torch.ones(8, 32)}, "does not account for"),
        ({f"{AT}.0.self_attn.q_proj.weight": torch.ones(23, 32)}, "has the shape [23, 32]: its config says [24, 32]"),
        ({f"{AT}.0.self_attn.A_log": torch.ones(5)}, "has the shape [5]: its config says [3] or [8]"),
        ({f"{AT}.0.self_attn.dt_bias": torch.ones(24).int()}, "is stored as I32: allowed is BF16, F16, F32, F64"),
        ({f"{AT}.0.self_attn.dt_bias": torch.full((24,), torch.nan)}, "holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit(stored: Path, tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    folder = copied(stored, tmp_path / "bad", **tensors)
    with pytest.raises(CheckpointError) as caught:
        load_target(folder)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_lora_rank": ...}, "q_lora_rank is missing"),
        ({"kv_lora_rnk": 3}, "unknown key 'kv_lora_rnk' in the text part: the nearest known name is 'kv_lora_rank'"),
        ({"linear_gate": 1}, "unknown key 'gate' in linear_attn_config"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"mla_use_output_gate": False}, "mla_use_output_gate is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        ({"num_expert_group": 2}, "num_expert_group is 2"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ({"num_experts_per_token": 7}, "num_experts_per_token is 7: it must not exceed num_experts, 6"),
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"linear_use_full_rank_gate": False}, "use_full_rank_gate is False"),
        ({"linear_gate_lower_bound": 5.0}, "gate_lower_bound is 5"),
        ({"linear_kda_layers": [1, 2, 3]}, "must name every layer from 1 to 9 once"),
        ({"linear_full_attn_layers": [3, 7, 8]}, "must name every layer from 1 to 9 once"),
        ({"linear_head_dim": ...}, "head_dim is missing"),
        ({"linear_attn_config": None}, "linear_attn_config is missing"),
        ({"quantization_config": {"format": "int-quantized"}}, "quantization_config has the format 'int-quantized'"),
        ({"quantization_config": MXFP4, "moe_intermediate_size": 40}, "must be multiples of 32"),
    ],
)
def test_configs_that_do_not_fit(stored: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    raw = edited(**{k: v for k, v in changes.items() if k != "linear_attn_config"})
    raw["text_config"] |= {k: v for k, v in changes.items() if k == "linear_attn_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        load_target(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_folders_that_are_no_checkpoint(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(BlockdraftError) as caught:
        load_target(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="exists"):
        write(tiny_model(), TINY, stored)
    (stored / "generation_config.json").write_text("{")
    try:
        with pytest.raises(CheckpointError, match=r"generation_config\.json of .* cannot be read"):
            load_target(stored)
    finally:
        (stored / "generation_config.json").unlink()
