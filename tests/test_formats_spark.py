"""DSpark and DSpine checkpoints: every published layout read, written, counted, and refused where it says nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft import formats
from blockdraft.config import ConfidenceConfig, DraftConfig, MarkovConfig, MlaConfig
from blockdraft.draft import DraftModel
from blockdraft.engine import Engine
from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.formats.convert import convert
from blockdraft.inspection import inspect_checkpoint
from drafts import edited, random_tensors
from engine_kit import hf_target, plain_ids, run_one, tiny_model
from spark_kit import KINDS, spark_config, spine_config
from tiny_pair import run_cli

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
HEADS = {
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
}
# deepseek-ai/dspark_qwen3_8b_block7, SpecForge's DSpark for the same target, its DSpine.
DEEPSPEC = {**QWEN, **TAPS, **HEADS, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "num_anchors": 512}
SPECFORGE = {
    **QWEN,
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "dflash_config": {
        **TAPS,
        **HEADS,
        "attention_mode": "gqa",
        "projector_type": "dspark",
        "confidence_head_alpha": 1.0,
    },
}
SPINE = {
    **QWEN,
    "architectures": ["DSpineDraftModel"],
    "block_size": 16,
    "is_causal": True,
    "dflash_config": dict(TAPS),
    "dspine_config": {
        "transfer_rank": 1024,
        "message_size": 512,
        "top_k": 16,
        "ce_weight": 0.1,
        "alignment_weight": 0.5,
        "alignment_warmup_steps": 146,
        "replacement_layers": 3,
        "replacement_probability": 0.5,
        "replacement_hold_ratio": 0.16666666666666666,
        "replacement_end_ratio": 0.3333333333333333,
        "candidate_mass_threshold": 0.0001,
    },
}
# Inferact/Kimi-K3-DSpark. The file leaves the block to the server; 7 is that of its kin.
KIMI: dict[str, Any] = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    **HEADS,
    "tie_word_embeddings": False,
    "draft_vocab_size": 163840,
    "_torchspec_version": "0.1.0",
    "torch_dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
KIMI_B7 = {**KIMI, "block_size": 7}
PUBLISHED = {"deepspec": DEEPSPEC, "specforge": SPECFORGE, "kimi": KIMI_B7, "dspine": SPINE}


def config_of(raw: dict[str, Any], folder: Path) -> DraftConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return formats.read_config(folder / "config.json")


def numbers(config: DraftConfig) -> int:
    return sum(math.prod(shape) for shape in zlab.expected_tensors(config).values())


@pytest.mark.parametrize("raw", PUBLISHED.values(), ids=PUBLISHED)
def test_published_configs_are_understood_and_written_again(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = config_of(raw, tmp_path)
    assert config.family == ("dspine" if raw is SPINE else "dspark")
    assert config.predicts_from_anchor is (raw is not SPINE)
    assert config.max_width == (16 if raw is SPINE else 8)
    layout = formats.find_dialect(tmp_path / "config.json")
    again = layout.config_to_dict(config)
    assert again["architectures"] == raw["architectures"]
    assert layout.config_from_dict(again) == config
    assert zlab.config_from_dict(zlab.config_to_dict(config)) == config


def test_deepspec_and_specforge_say_the_same(tmp_path: Path) -> None:
    assert config_of(DEEPSPEC, tmp_path) == config_of(SPECFORGE, tmp_path)


def test_sizes_are_the_published_ones(tmp_path: Path) -> None:
    """Kimi K3: the bytes that the file gives to the draft itself, 4,775,815,682; Qwen3-8B: layers as DFlash's."""
    kimi = config_of(KIMI_B7, tmp_path)
    assert (len(zlab.expected_tensors(kimi)), 2 * numbers(kimi)) == (67, 4_775_815_682)
    spark, spine = config_of(DEEPSPEC, tmp_path), config_of(SPINE, tmp_path)
    backbone = 5 * (4096 * 128 * (32 + 16) + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 128 + 2 * 4096)
    backbone += 5 * 4096 * 4096 + 2 * 4096
    assert numbers(spark) == backbone + 2 * 151936 * 256 + 4096 + 256 + 1
    assert len(zlab.expected_tensors(spark)) == 5 * 11 + 3 + 4
    injection = 5 * 4096 * (1024 + 512) + 3 * 512 * 1024 + 512 + 151936 * 1024
    assert numbers(spine) == backbone + injection
    assert len(zlab.expected_tensors(spine)) == 5 * 11 + 3 + 2 * 5 + 3 + 2


LATENT = MlaConfig(
    num_heads=3, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5, has_bias=False
)
SMALL = {
    **{kind: spark_config(kind) for kind in KINDS},
    "no heads": spark_config(None, confidence=None),
    "confidence alone": spark_config(None, confidence=ConfidenceConfig(reads_token=False)),
    "not from the anchor": spark_config("rnn", predicts_from_anchor=False, confidence=None),
    "latent": spark_config("gated", attention=LATENT, has_tap_norms=True),
    "dspine": spine_config(),
}
DIALECTS_OF = {
    "latent": ("z-lab", "k3-dspark"),
    "dspine": ("z-lab",),
}


@pytest.mark.parametrize(("name", "config"), SMALL.items(), ids=SMALL)
def test_round_trip_in_every_dialect_that_can_say_it(tmp_path: Path, name: str, config: DraftConfig) -> None:
    tensors = random_tensors(config, dtype=torch.float64)
    tensors |= {f"{name}.weight": torch.randn(32, 24, dtype=torch.float64) for name in ("embed_tokens", "lm_head")}
    model = DraftModel.from_checkpoint(formats.Checkpoint(config, tensors))
    able = set()
    for dialect in formats.DIALECTS:
        folder = tmp_path / dialect
        try:
            formats.write(folder, formats.Checkpoint(config, tensors), dialect=dialect, dtype=None)
        except BlockdraftError as error:
            assert "cannot express" in str(error) or "has no place" in str(error)
            assert "\n" not in str(error) and not folder.exists()
            continue
        able.add(dialect)
        assert formats.find_dialect(folder).name == dialect
        back = formats.read(folder)
        assert back.config == config and back.tensors.keys() == tensors.keys()
        assert all(torch.equal(back.tensors[key], value) for key, value in tensors.items())
        assert back.tensors.keys() == DraftModel.from_checkpoint(back).state_dict().keys() == model.state_dict().keys()
    assert able >= set(DIALECTS_OF.get(name, ("z-lab", "deepspec")))
    assert name != "dspine" or able == {"z-lab"}


def test_names_on_disk(tmp_path: Path) -> None:
    config = SMALL["latent"]
    formats.write(
        tmp_path / "k3", formats.Checkpoint(config, random_tensors(config)), dialect="k3-dspark", dtype="bfloat16"
    )
    names = load_file(tmp_path / "k3" / "model.safetensors").keys()
    training = {"context_proj.weight", "context_norm.weight", "final_norm.weight", "markov_head.markov_w1.weight"}
    assert training <= names and not {"fc.weight", "norm.weight"} & names
    raw = json.loads((tmp_path / "k3" / "config.json").read_text())
    assert "dflash_config" not in raw and "projector_type" not in raw
    assert (raw["num_target_layers"], raw["target_num_hidden_layers"]) == (2, 3)
    formats.write(tmp_path / "spine", formats.Checkpoint(SMALL["dspine"], random_tensors(SMALL["dspine"])))
    stored = load_file(tmp_path / "spine" / "model.safetensors")
    assert stored["transfer_ready"].dtype == torch.bool and bool(stored["transfer_ready"])
    assert stored["transfer_codes"].shape == (32, 7) and stored["injection.writes.1.weight"].shape == (24, 5)


@pytest.mark.parametrize("name", ["rnn", "latent", "dspine"])
def test_a_checkpoint_from_disk_runs_with_a_target(tmp_path: Path, name: str) -> None:
    config = SMALL[name]
    tensors = random_tensors(config, dtype=torch.float64)
    tensors |= {f"{name}.weight": torch.randn(32, 24, dtype=torch.float64) for name in ("embed_tokens", "lm_head")}
    formats.write(tmp_path / "draft", formats.Checkpoint(config, tensors), dtype="float64")
    target = tiny_model()
    engine = Engine(hf_target(target, (0, 2)), DraftModel.from_checkpoint(formats.read(tmp_path / "draft")))
    done = run_one(engine, prompt_ids=[3, 7, 1], max_new_tokens=12, stop_ids=frozenset())
    assert list(done.token_ids) == plain_ids(target, [3, 7, 1], 12)
    assert done.stats.num_draft_tokens > 0
    report = inspect_checkpoint(tmp_path / "draft")
    assert report["family"] == config.family


def small_spark(**changes: Any) -> dict[str, Any]:
    return edited(zlab.config_to_dict(SMALL["vanilla"]), **changes)


def small_spine(**changes: Any) -> dict[str, Any]:
    raw = zlab.config_to_dict(SMALL["dspine"])
    raw["dspine_config"] = {**raw["dspine_config"], **changes.pop("spine", {})}
    return edited(raw, **changes)


BAD = [
    (small_spark(nest_markov_rank=...), "markov_rank is missing"),
    (small_spark(nest_markov_rank=-1), "markov_rank is -1"),
    (small_spark(nest_markov_head_type=...), "markov_head_type is missing"),
    (small_spark(nest_markov_head_type="lstm"), "markov_head_type is 'lstm': supported are 'vanilla', 'gated', 'rnn'"),
    (small_spark(nest_markov_rank=0), "cannot take effect"),
    (small_spark(nest_markov_rank=0, nest_markov_head_type=...), "there is no Markov head to read"),
    (small_spark(nest_enable_confidence_head=...), "enable_confidence_head is missing"),
    (small_spark(nest_enable_confidence_head="yes"), "enable_confidence_head is 'yes'"),
    (small_spark(nest_confidence_head_with_markov=...), "confidence_head_with_markov is missing"),
    (small_spark(markov_rank=6), "markov_rank is given twice and differs"),
    (small_spark(nest_sample_from_anchor=1), "sample_from_anchor is 1: it must be true or false"),
    (small_spark(nest_query_zero_predicts_next=False), "sample_from_anchor and query_zero_predicts_next differ"),
    (small_spark(nest_projector_type="domino"), "projector_type is 'domino': with this class it is 'dspark'"),
    (small_spark(nest_selector_rank=4), "architectures says DSparkDraftModel but selector_rank is given"),
    (small_spark(dspine_config={}), "DSpineDraftModel would fit"),
    (small_spark(nest_target_layer_ids=[-1, 2]), "holds -1: negative"),
    (small_spark(architectures=["DFlashDraftModel"]), "projector_type is 'dspark'"),
    (small_spark(architectures=["DFlashDraftModel"], nest_projector_type=...), "it belongs to DSpark"),
    (small_spark(architectures=["Gemma4DSparkModel"]), "not supported, its layers have norms before and behind"),
    (small_spark(architectures=["DeepseekV4DSparkModel"]), "not supported, its layers are those of DeepSeek-V4"),
    (small_spark(draft_vocab_size=16), "draft_vocab_size is 16"),
    (small_spine(dspine_config=None), "dspine_config is missing"),
    (small_spine(spine={"top_k": None}), "dspine_config lacks top_k"),
    (small_spine(spine={"top_k": 33}), "dspine_config.top_k is 33"),
    (small_spine(spine={"transfer_rank": 0}), "dspine_config.transfer_rank is 0"),
    (small_spine(spine={"mesage_size": 4}), "unknown key 'mesage_size' in dspine_config: the nearest known name is"),
    (small_spine(is_causal=False), "is_causal is false: in a DSpine block"),
    (small_spine(nest_markov_rank=4), "markov_rank is 4: it belongs to DSpark"),
    (small_spine(nest_sample_from_anchor=True), "sample_from_anchor is True: it belongs to DSpark"),
    (small_spine(architectures=["DFlashDraftModel"]), "DSpineDraftModel would fit"),
    (small_spine(architectures=...), "['DSpineDraftModel'] would fit"),
    (KIMI, "block_size is missing: engines take it from their command line"),
    ({**KIMI_B7, "num_target_layers": 93}, "num_target_layers is 93: here it counts the taps, and there are 5"),
    ({**KIMI_B7, "target_num_hidden_layers": None}, "target_num_hidden_layers is missing"),
    ({**KIMI_B7, "attention_mode": "gqa"}, "attention_mode is 'gqa'"),
    ({**KIMI_B7, "model_type": "qwen3"}, "model_type is 'qwen3'"),
    ({**KIMI_B7, "mla_use_nope": True}, "mla_use_nope is True"),
]


@pytest.mark.parametrize(("raw", "message"), BAD)
def test_bad_config(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(raw, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vanilla", {"markov_head.markov_w2.weight": None}, "1 missing (markov_head.markov_w2.weight)"),
        ("vanilla", {"markov_head.gate_proj.weight": torch.zeros(5, 29)}, "a Markov head belongs to DSpark"),
        ("rnn", {"markov_head.joint_proj.weight": torch.zeros(15, 33)}, "is [15, 33], expected [15, 34]"),
        ("no heads", {"confidence_head.proj.bias": torch.zeros(1)}, "enable_confidence_head true would fit"),
        ("no heads", {"injection.bias": torch.zeros(5)}, "the class DSpineDraftModel would fit"),
        ("dspine", {"transfer_codes": None}, "they may stand in a file of their own"),
        ("dspine", {"transfer_codes": torch.zeros(32, 7)}, "transfer_codes holds only zeros"),
        ("dspine", {"transfer_ready": torch.zeros(3)}, "1 left over (transfer_ready)"),
        ("dspine", {"transfer_ready": torch.tensor(False)}, "transfer_ready is false and transfer_codes is not zero"),
        ("dspine", {"injection.readouts.2.weight": torch.zeros(7, 24)}, "1 left over (injection.readouts.2.weight)"),
        ("dspine", {"injection.bias": torch.full((5,), math.nan)}, "1 tensors hold NaN or infinity: injection.bias"),
    ],
)
def test_bad_tensors(tmp_path: Path, name: str, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = random_tensors(SMALL[name], dtype=torch.float32)
    tensors |= {key: value for key, value in change.items() if value is not None}
    tensors = {key: value for key, value in tensors.items() if change.get(key, value) is not None}
    (tmp_path / "config.json").write_text(json.dumps(zlab.config_to_dict(SMALL[name])))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        formats.read(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def without_block(folder: Path, name: str = "latent") -> Path:
    """A checkpoint of Kimi's class that leaves its block to the server."""
    config = SMALL[name]
    formats.write(folder, formats.Checkpoint(config, random_tensors(config)), dialect="k3-dspark")
    raw = json.loads((folder / "config.json").read_text())
    del raw["block_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_a_block_that_the_file_leaves_to_the_server_is_given(tmp_path: Path) -> None:
    folder, config = without_block(tmp_path / "draft"), SMALL["latent"]
    for open_ in (formats.read, formats.read_config, inspect_checkpoint):
        with pytest.raises(ConfigError, match=r"block_size is missing.*--block-size"):
            open_(folder)
    assert formats.read(folder, block_size=4).config == config == formats.read_config(folder, block_size=4)
    assert formats.read(folder, block_size=6).config == replace(config, block_size=6)
    assert inspect_checkpoint(folder, block_size=6)["shape"]["block_size"] == 6
    convert(folder, tmp_path / "written", "z-lab", block_size=4)
    assert formats.read(tmp_path / "written").config == config
    for wrong, message in ((0, "block_size is 0"), (True, "block_size is True"), (257, "must not exceed")):
        with pytest.raises(ConfigError, match=message):
            formats.read(folder, block_size=wrong)


@pytest.mark.parametrize("dialect", ["z-lab", "deepspec", "speculators"])
def test_a_block_that_the_file_states_is_not_overruled(tmp_path: Path, dialect: str) -> None:
    config = SMALL["vanilla"] if dialect != "speculators" else replace(SMALL["vanilla"], target_layer_ids=(0, 1))
    formats.write(tmp_path / "draft", formats.Checkpoint(config, random_tensors(config)), dialect=dialect)
    assert formats.read(tmp_path / "draft", block_size=4).config == config
    for open_ in (formats.read, formats.read_config, inspect_checkpoint):
        with pytest.raises(ConfigError, match="block_size is 4 in the file and given as 5"):
            open_(tmp_path / "draft", block_size=5)


def test_the_option_of_the_command_line(tmp_path: Path) -> None:
    folder = without_block(tmp_path / "draft")
    assert "give the number of rows" in run_cli("inspect", folder).refusal
    report = json.loads(run_cli("inspect", folder, "--block-size", "5", "--json").out)
    assert report["shape"]["block_size"] == 5
    ran = run_cli("convert", folder, tmp_path / "other", "--to", "z-lab", "--block-size", "5")
    assert ran.code == 0 and formats.read_config(tmp_path / "other").block_size == 5
    refusal = run_cli(
        "convert", tmp_path / "other", tmp_path / "more", "--to", "k3-dspark", "--block-size", "4"
    ).refusal
    assert refusal.startswith("block_size is 5 in the file and given as 4")
    assert not (tmp_path / "more").exists()


def test_a_flag_that_says_the_codes_are_there_is_not_a_tensor_of_the_model(tmp_path: Path) -> None:
    formats.write(tmp_path / "a", formats.Checkpoint(SMALL["dspine"], random_tensors(SMALL["dspine"])))
    assert "transfer_ready" not in formats.read(tmp_path / "a").tensors
    assert "transfer_ready" not in formats.read_header(tmp_path / "a", SMALL["dspine"])


def test_a_markov_head_of_another_kind_is_not_taken_for_this_one() -> None:
    expected = {kind: set(zlab.expected_tensors(SMALL[kind])) for kind in KINDS}
    assert expected["vanilla"] < expected["gated"] and expected["vanilla"] < expected["rnn"]
    assert expected["gated"] != expected["rnn"]
    assert MarkovConfig(rank=5, kind="rnn") == SMALL["rnn"].markov
