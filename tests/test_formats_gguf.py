"""GGUF: what llama.cpp's loader expects, round trips, refusals by name, its converter's files, the built-in draft."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from blockdraft import formats
from blockdraft.config import DraftConfig, LayerConfig, TargetFacts
from blockdraft.draft.rope import rope_frequencies
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import Checkpoint
from blockdraft.formats.convert import convert
from blockdraft.formats.gguf import LAYOUT, target_facts
from blockdraft.inspection import inspect_checkpoint
from drafts import TINY_MLA, TINY_V1, TINY_V2, checkpoint, draft_configs, edited

SWA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPRESSED: dict[str, dict[str, Any]] = {
    "v1": TINY_V1,
    "v2": TINY_V2,
    "v1 bidirectional windows": edited(TINY_V1, **SWA, is_causal=False),
    "v2 causal windows": edited(TINY_V2, **SWA, is_causal=True),
    "v1 causal": edited(TINY_V1, is_causal=True),
    "v2 scaled": edited(
        TINY_V2,
        nest_input_embedding_scale=32**0.5,
        nest_output_multiplier=0.2,
        nest_final_logit_softcapping=20.0,
    ),
    "v1 yarn": edited(TINY_V1, rope_parameters=YARN),
    "v1 linear": edited(TINY_V1, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}),
    "v2 llama3": edited(TINY_V2, rope_parameters=LLAMA3, rope_theta=500000.0),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (TINY_MLA, "latent attention (attention_mode 'mla')"),
    (edited(TINY_V1, **SWA), "layers of which some are causal"),
    (edited(TINY_V1, attention_bias=True), "biases in attention"),
    (edited(TINY_V1, target_hidden_size=24), "taps of another width than its own (target_hidden_size 24)"),
    (edited(TINY_V1, nest_target_layer_ids=[1, 5]), "a tap on the last target layer, 5"),
    (edited(TINY_V2, nest_selector_top_k=6), "selector_top_k 6 at hidden_size 32"),
    (edited(TINY_V1, **{**SWA, "sliding_window": 3}, is_causal=False), "a window of 3 in a bidirectional block of 4"),
    (edited(TINY_V1, rope_parameters={**YARN, "attention_factor": 1.5}), "attention_factor of a YaRN rope"),
    (edited(TINY_V1, rope_parameters={**YARN, "beta_fast": 16.0}), "beta_fast 16.0 of a YaRN rope"),
]


def write_target(path: Path, **changes: Any) -> Path:
    """A target's GGUF as far as a draft needs it: its size and its tokenizer, with a mask id of its own."""
    keys = {"block_count": 6, "embedding_length": 32, "context_length": 256, "vocab_size": 64, **changes}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(keys["block_count"])
    writer.add_embedding_length(keys["embedding_length"])
    writer.add_context_length(keys["context_length"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"t{index}" for index in range(keys["vocab_size"])])
    writer.add_token_types([1] * keys["vocab_size"])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_eos_token_id(keys.get("eos", 2))
    writer.add_mask_token_id(7)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}")
    if "sections" in keys:
        writer.add_rope_dimension_sections(keys["sections"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target.gguf")


def keys_of(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def same(left: Checkpoint, right: Checkpoint) -> bool:
    return (
        left.config == right.config
        and left.tensors.keys() == right.tensors.keys()
        and all(
            left.tensors[name].dtype == right.tensors[name].dtype
            and torch.equal(left.tensors[name], right.tensors[name])
            for name in left.tensors
        )
    )


# ---- what llama.cpp's loader (build 11434) asks for ------------------------------------------------------------------
KEYS = {
    "general.architecture": "dflash",  # DFlash and DFlash 2 alike
    "dflash.context_length": 256,
    "dflash.embedding_length": 32,
    "dflash.block_count": 2,  # layers of the draft
    "dflash.feed_forward_length": 48,
    "dflash.vocab_size": 64,
    "dflash.attention.head_count": 4,
    "dflash.attention.head_count_kv": 2,
    "dflash.attention.key_length": 8,  # of a head
    "dflash.attention.value_length": 8,  # must be equal
    "dflash.attention.layer_norm_rms_epsilon": np.float32(1e-6),
    "dflash.attention.causal": False,  # of all layers; absent means false
    "dflash.attention.sliding_window": 5,  # as many positions, the row's own among them
    "dflash.attention.sliding_window_pattern": [True, False],  # which layers slide; always beside the window
    "dflash.rope.freq_base": 10000.0,
    "dflash.rope.dimension_count": 8,
    "dflash.block_size": 4,  # rows, the anchor among them: proposes at most one less
    "dflash.target_layers": [2, 5],  # layers whose input is tapped: one more than z-lab's ids
    "dflash.conv_kernel_size": 2,
    "dflash.conv_group_size": 8,
    "dflash.selector_rank": 4,
    "dflash.selector_top_k": 4,  # above 0: DFlash 2
    "tokenizer.ggml.mask_token_id": 60,  # found through the tokenizer, so the file needs one
}
# In the order of dimensions that numpy has; the loader's is the reverse.
GLOBAL_TENSORS = {
    "fc.weight": (32, 64),  # joins the taps
    "enc.output_norm.weight": (32,),  # norm behind fc
    "output_norm.weight": (32,),  # final norm
    "selector_predecessor.weight": (64, 4),
    "selector_successor.weight": (64, 4),
    "selector_hidden.weight": (4, 32),
}
LAYER_TENSORS = {
    "attn_norm.weight": (32,),
    "attn_q.weight": (32, 32),
    "attn_k.weight": (16, 32),
    "attn_v.weight": (16, 32),
    "attn_output.weight": (32, 32),
    "attn_q_norm.weight": (8,),
    "attn_k_norm.weight": (8,),
    "ffn_norm.weight": (32,),
    "ffn_gate.weight": (48, 32),
    "ffn_up.weight": (48, 32),
    "ffn_down.weight": (32, 48),
    "attn_conv_base": (2, 2, 32),  # input and output side, taps, channels; no ".weight"
    "attn_conv_proj.weight": (16, 32),
    "ffn_conv_base": (2, 2, 32),
    "ffn_conv_proj.weight": (16, 32),
}


def test_keys_and_tensors_as_the_loader_expects(tmp_path: Path, target: Path) -> None:
    made = checkpoint(edited(TINY_V2, **SWA, is_causal=False))
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype="bfloat16", target=target)
    found = keys_of(tmp_path / "d.gguf")
    assert {key: found[key] for key in KEYS} == KEYS
    assert {key for key in found if key.startswith("dflash.")} == {key for key in KEYS if key.startswith("dflash.")}
    layers = {f"blk.{index}.{name}": shape for index in range(2) for name, shape in LAYER_TENSORS.items()}
    tensors = gguf.GGUFReader(tmp_path / "d.gguf").tensors
    shapes = {tensor.name: tuple(reversed([int(size) for size in tensor.shape])) for tensor in tensors}
    assert shapes == GLOBAL_TENSORS | layers
    for tensor in tensors:  # vectors and base kernels are added to float32: no other type is computed there
        wide = len(tensor.shape) == 1 or tensor.name.endswith("conv_base")
        assert tensor.tensor_type.name == ("F32" if wide else "BF16"), tensor.name


def test_types_of_the_keys(tmp_path: Path, target: Path) -> None:
    """The loader asks for each key with one type and refuses another."""
    formats.write(tmp_path / "d.gguf", checkpoint(EXPRESSED["v2 scaled"]), dialect="gguf", target=target)
    fields = gguf.GGUFReader(tmp_path / "d.gguf").fields
    kinds = {
        "dflash.block_size": ["UINT32"],
        "dflash.attention.layer_norm_rms_epsilon": ["FLOAT32"],
        "dflash.rope.freq_base": ["FLOAT32"],
        "dflash.attention.causal": ["BOOL"],
        "dflash.target_layers": ["ARRAY", "INT32"],
        "dflash.embedding_scale": ["FLOAT32"],
        "dflash.logit_scale": ["FLOAT32"],
        "dflash.final_logit_softcapping": ["FLOAT32"],
        "tokenizer.ggml.mask_token_id": ["UINT32"],
    }
    assert {key: [kind.name for kind in fields[key].types] for key in kinds} == kinds


def test_rows_of_q_and_k_keep_their_order(tmp_path: Path, target: Path) -> None:
    """The architecture turns halves, as these drafts do: rows move only for one that turns neighbours."""
    made = checkpoint(TINY_V1, dtype=torch.float32)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype=None, target=target)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "d.gguf").tensors}
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        assert np.array_equal(stored[f"blk.1.{theirs}.weight"], made.tensors[f"layers.1.self_attn.{ours}.weight"])


def test_the_tokenizer_is_the_targets_with_the_drafts_mask_id(tmp_path: Path, target: Path) -> None:
    formats.write(tmp_path / "d.gguf", checkpoint(TINY_V2), dialect="gguf", target=target)
    theirs, ours = keys_of(target), keys_of(tmp_path / "d.gguf")
    assert theirs.pop("tokenizer.ggml.mask_token_id") == 7 and ours["tokenizer.ggml.mask_token_id"] == 60
    assert theirs.pop("tokenizer.chat_template") and "tokenizer.chat_template" not in ours
    copied = {key: value for key, value in theirs.items() if key.startswith("tokenizer.")}
    assert len(copied) == 7 and {key: ours[key] for key in copied} == copied


def test_a_llama3_rope_becomes_the_table_of_its_stretches(tmp_path: Path, target: Path) -> None:
    made = checkpoint(EXPRESSED["v2 llama3"])
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", target=target)
    table = next(t for t in gguf.GGUFReader(tmp_path / "d.gguf").tensors if t.name == "rope_freqs.weight")
    plain = dataclasses.replace(made.config.rope, kind="default", params=())
    stretched, _ = rope_frequencies(made.config.rope, 8, torch.float64)
    base, _ = rope_frequencies(plain, 8, torch.float64)
    assert np.allclose(table.data, (base / stretched).numpy(), rtol=1e-6) and table.data.max() > 7.9


def test_a_target_with_sections_of_positions(tmp_path: Path) -> None:
    """Its drafts turn by the first of its positions alone; llama.cpp wants to be told."""
    target = write_target(tmp_path / "target.gguf", sections=[2, 1, 1, 0])
    made = checkpoint(TINY_V1)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", target=target)
    assert keys_of(tmp_path / "d.gguf")["dflash.rope.dimension_sections"] == [4, 0, 0, 0]
    assert same(formats.read(tmp_path / "d.gguf"), made)


# ---- round trips -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", EXPRESSED)
def test_round_trip(tmp_path: Path, target: Path, family: str, dtype: str) -> None:
    made = checkpoint(EXPRESSED[family], dtype=torch.float32)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype=dtype, target=target)
    rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in made.tensors.items()}
    assert formats.find_dialect(tmp_path / "d.gguf").name == "gguf"
    assert same(formats.read(tmp_path / "d.gguf"), Checkpoint(config=made.config, tensors=rounded))
    assert formats.read_config(tmp_path / "d.gguf") == made.config
    assert set(formats.read_header(tmp_path / "d.gguf", made.config)) == set(made.tensors)


def test_types_of_several_kinds_and_own_tensors_come_back(tmp_path: Path, target: Path) -> None:
    made = checkpoint(TINY_V2, own=True)
    del made.tensors["mask_embedding"]
    made.tensors["norm.weight"] = made.tensors["norm.weight"].float()  # its values are those of bfloat16
    made.tensors["hidden_norm.weight"] = made.tensors["hidden_norm.weight"].half()
    made.tensors["fc.weight"] = made.tensors["fc.weight"].float() / 3
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype=None, target=target)
    assert same(formats.read(tmp_path / "d.gguf"), made)


def test_a_block_of_another_size_than_the_file_states_is_refused(tmp_path: Path, target: Path) -> None:
    made = checkpoint(TINY_V1)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", target=target)
    assert formats.read(tmp_path / "d.gguf", block_size=4).config == made.config
    for open_ in (formats.read, formats.read_config):
        with pytest.raises(ConfigError, match="block_size is 4 in the file and given as 3"):
            open_(tmp_path / "d.gguf", block_size=3)


def test_convert_there_and_back(tmp_path: Path, target: Path) -> None:
    made = checkpoint(TINY_V2)
    formats.write(tmp_path / "draft", made)
    there = convert(tmp_path / "draft", tmp_path / "out" / "d.gguf", "gguf", target_file=target)
    assert (there.dialect, there.num_tensors, there.dtypes) == ("gguf", len(made.tensors), ("bfloat16",))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["d.gguf"]
    assert formats.find_dialect(tmp_path / "out").name == "gguf"  # the only file of a folder
    back = convert(tmp_path / "out", tmp_path / "back", "z-lab")
    assert back.source_dialect == "gguf" and same(formats.read(tmp_path / "back"), made)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=draft_configs())
def test_any_config_comes_back_or_is_refused(config: DraftConfig) -> None:
    try:
        keys = LAYOUT.config_to_dict(config)
    except ConfigError as error:
        assert "cannot express" in str(error) and "\n" not in str(error)
        return
    stored = {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in keys.items()}
    assert LAYOUT.config_from_dict(stored) == config


# ---- files of llama.cpp's converter ----------------------------------------------------------------------------------
FACTS = TargetFacts(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    num_layers=6,
    max_length=256,
    is_recurrent=False,
    eos_token_ids=(2,),
    pad_token_id=None,
)


def rewritten(
    source: Path,
    path: Path,
    *,
    drop: tuple[str, ...] = (),
    rename: dict[str, str | None] | None = None,
    add: dict[str, np.ndarray[Any, Any]] | None = None,
    quantise: str = "",
) -> Path:
    """Another file with the same keys and tensors, but for keys that begin with `drop`, and what else is asked for."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "dflash")
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture", *drop)):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        name = (rename or {}).get(tensor.name, tensor.name)
        if name == quantise:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor.data, kind), raw_dtype=kind)
        elif name is not None:
            writer.add_tensor(name, np.array(tensor.data))
    for name, data in (add or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def foreign(path: Path, made: Checkpoint, target: Path, drop: tuple[str, ...] = ()) -> Path:
    """The draft as llama.cpp's converter writes it: without our keys, vocabulary by the tokenizer."""
    formats.write(path, made, dialect="gguf", dtype="float32", target=target)
    return rewritten(path, path.with_name("foreign.gguf"), drop=("blockdraft.", "dflash.vocab_size", *drop))


@pytest.mark.parametrize("family", [name for name in EXPRESSED if name not in ("v2 llama3", "v2 scaled")])
def test_a_file_of_the_converter_is_read_with_its_target(tmp_path: Path, target: Path, family: str) -> None:
    made = checkpoint(EXPRESSED[family], dtype=torch.float32)
    path = foreign(tmp_path / "d.gguf", made, target)
    assert same(formats.read(path, target=FACTS), made)
    with pytest.raises(ConfigError, match=r"num_target_layers is missing.*--target"):
        formats.read(path)


def test_what_the_converter_leaves_out(tmp_path: Path, target: Path) -> None:
    made = checkpoint(TINY_V1, dtype=torch.float32)
    path = foreign(tmp_path / "d.gguf", made, target, drop=("dflash.attention.causal", "dflash.rope.dimension_count"))
    assert same(formats.read(path, target=FACTS), made)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("dflash.target_layers", r"target_layer_ids.*fc expects 2 taps"),
        ("dflash.block_size", r"dflash.block_size is missing"),
        ("tokenizer.ggml.mask_token_id", r"mask_token_id"),
        ("dflash.embedding_length", r"dflash.embedding_length is missing"),
    ],
)
def test_a_key_that_is_missing_is_named(tmp_path: Path, target: Path, key: str, message: str) -> None:
    path = foreign(tmp_path / "d.gguf", checkpoint(TINY_V1, dtype=torch.float32), target, drop=(key,))
    with pytest.raises(ConfigError, match=message):
        formats.read(path, target=FACTS)


# ---- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("raw", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_what_cannot_be_expressed_is_refused_by_name(
    tmp_path: Path, target: Path, raw: dict[str, Any], what: str
) -> None:
    formats.write(tmp_path / "draft", checkpoint(raw))
    with pytest.raises(ConfigError, match="cannot express") as caught:
        convert(tmp_path / "draft", tmp_path / "d.gguf", "gguf", target_file=target)
    assert what in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target.gguf"]


def test_other_parts_and_windows_are_refused_by_name() -> None:
    config = checkpoint(TINY_V1).config
    two = dataclasses.replace(config, layers=tuple(LayerConfig(is_causal=False, window=w) for w in (4, 5)))
    norms = dataclasses.replace(config, has_tap_norms=True)
    spark = dataclasses.replace(config, predicts_from_anchor=True)
    for given_, what in ((two, r"windows \[4, 5\]"), (norms, "fc_norm"), (spark, "a dspark draft")):
        with pytest.raises(ConfigError, match=f"cannot express .*{what}"):
            LAYOUT.config_to_dict(given_)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 8}, "num_target_layers is 6 for the draft and 8 in target.gguf"),
        ({"embedding_length": 48}, "hidden_size is 32 for the draft and 48"),
        ({"vocab_size": 65}, "vocab_size is 64 for the draft and 65"),
    ],
)
def test_another_target_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = write_target(tmp_path / "target.gguf", **changes)
    with pytest.raises(ConfigError, match=message):
        formats.write(tmp_path / "d.gguf", checkpoint(TINY_V2), dialect="gguf", target=target)
    assert not (tmp_path / "d.gguf").exists()


def test_what_is_asked_for_cannot_be_written(tmp_path: Path, target: Path) -> None:
    made = checkpoint(TINY_V2)
    half = checkpoint(TINY_V2, own=True)
    del half.tensors["mask_embedding"], half.tensors["lm_head.weight"]
    masked = checkpoint(TINY_V2)
    masked.tensors["mask_embedding"] = torch.ones(32, dtype=torch.bfloat16)
    for given_, path, options, message in (
        (made, "d.gguf", {}, "no target is given"),
        (made, "d.gguf", {"target": tmp_path}, "is no GGUF file"),
        (made, "d", {"target": target}, "does not end with .gguf"),
        (made, "d.gguf", {"target": target, "dtype": "float64"}, "is F64: a GGUF draft holds F32, F16 and BF16"),
        (half, "d.gguf", {"target": target}, "llama.cpp would take the one for the other"),
        (masked, "d.gguf", {"target": target}, "mask_embedding: a GGUF draft has no place for it"),
        (made, "target.gguf", {"target": target}, "exists"),
        (made, "draft", {"target": target, "dialect": "z-lab"}, "only gguf does"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            formats.write(tmp_path / path, given_, **{"dialect": "gguf", **options})
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", target=target)
    with pytest.raises(ConfigError, match="is a draft"):
        formats.write(tmp_path / "e.gguf", made, dialect="gguf", target=tmp_path / "d.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.gguf", "target.gguf"]


def test_a_mask_id_that_ends_a_text_needs_consent(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target.gguf", eos=60)
    made = checkpoint(TINY_V2)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", target=target)
    with pytest.raises(ConfigError, match="mask"):
        formats.read(tmp_path / "d.gguf")
    assert formats.read(tmp_path / "d.gguf", allow_mask_is_eos=True).config == made.config


# ---- damaged files ---------------------------------------------------------------------------------------------------
def edit_keys(keys: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**keys, **{f"dflash.{key}": value for key, value in changes.items()}}


def test_keys_that_contradict_the_config_are_found() -> None:
    keys = LAYOUT.config_to_dict(checkpoint(EXPRESSED["v2 causal windows"]).config)
    for changed, message in (
        (edit_keys(keys, block_size=5), "dflash.block_size is 5, and 4 follows"),
        (edit_keys(keys, target_layers=[1, 4]), r"dflash.target_layers is \[1, 4\], and \[2, 5\] follows"),
        (edit_keys(keys, logit_scale=2.0), "dflash.logit_scale is 2.0, and None follows"),
        ({**keys, "tokenizer.ggml.mask_token_id": 7}, "mask_token_id is 7, and 60 follows"),
        (edit_keys(keys, sliding_windw=4), "unknown key 'dflash.sliding_windw'"),
        (edit_keys(keys, hidden_act="gelu"), "hidden_act is 'gelu'"),
        ({**keys, "general.architecture": "llama"}, "general.architecture is 'llama'.*--target"),
        ({**keys, "tokenizer.ggml.tokens": 65}, "vocab_size is 64 and the tokenizer has 65"),
        ({**keys, "blockdraft.config": "{"}, "blockdraft.config is not the JSON"),
    ):
        with pytest.raises(ConfigError, match=message):
            LAYOUT.config_from_dict(changed)


def test_damaged_files_are_one_line(tmp_path: Path, target: Path) -> None:
    formats.write(tmp_path / "d.gguf", checkpoint(TINY_V2), dialect="gguf", target=target)
    whole = (tmp_path / "d.gguf").read_bytes()
    for cut in (0, 3, 20, 200, len(whole) // 2, len(whole) - 200):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError) as caught:
            formats.read(tmp_path / "cut.gguf")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"general.architecture is 'llama'"):
        formats.read(target)
    with pytest.raises(CheckpointError, match="is not a file"):
        formats.read(tmp_path / "none.gguf")
    (tmp_path / "many").mkdir()
    for name in "ab":
        (tmp_path / "many" / f"{name}.gguf").write_bytes(whole)
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        formats.read(tmp_path / "many")


ONES = np.ones(32, dtype=np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rename": {"blk.1.attn_q.weight": None}}, "1 missing .layers.1.self_attn.q_proj.weight"),
        ({"add": {"blk.0.attn_q.bias": ONES}}, "1 left over .blk.0.attn_q.bias"),
        ({"rename": {"output_norm.weight": "norm.weight"}}, "norm.weight .no name of GGUF"),
        ({"add": {"rope_freqs.weight": ONES}}, "left over .rope_freqs.weight"),
        ({"quantise": "fc.weight"}, "fc.weight is Q8_0"),
        ({"rename": {"output_norm.weight": None}, "add": {"output_norm.weight": ONES * np.nan}}, "NaN or infinity"),
    ],
)
def test_tensors_left_over_missing_or_quantised(
    tmp_path: Path, target: Path, changes: dict[str, Any], message: str
) -> None:
    made = checkpoint(TINY_V2, dtype=torch.float32)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype=None, target=target)
    with pytest.raises(CheckpointError, match=message):
        formats.read(rewritten(tmp_path / "d.gguf", tmp_path / "variant.gguf", **changes))


def test_a_table_of_another_rope_is_found(tmp_path: Path, target: Path) -> None:
    made = checkpoint(EXPRESSED["v2 llama3"], dtype=torch.float32)
    formats.write(tmp_path / "d.gguf", made, dialect="gguf", dtype=None, target=target)
    table = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    other = rewritten(tmp_path / "d.gguf", tmp_path / "e.gguf", rename={"rope_freqs.weight": None}, add=table)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight is missing or not that"):
        formats.read(other)


# ---- the built-in pair, the command ----------------------------------------------------------------------------------
def test_the_builtin_draft_exports(tmp_path: Path) -> None:
    from blockdraft.engine.load import builtin_draft

    made = formats.read(builtin_draft())
    config = made.config
    sizes = {"block_count": config.num_target_layers, "embedding_length": config.hidden_size}
    target = write_target(tmp_path / "target.gguf", **sizes, vocab_size=config.vocab_size)
    done = convert(builtin_draft(), tmp_path / "d.gguf", "gguf", target_file=target)
    assert done.num_tensors == len(made.tensors) and same(formats.read(tmp_path / "d.gguf"), made)


def test_the_target_says_what_it_is(target: Path) -> None:
    assert target_facts(target) == FACTS


def test_the_command(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unittest import mock

    from blockdraft.cli import app as app_module

    def run(*words: object) -> tuple[int, str]:
        with mock.patch("sys.argv", ["blockdraft", "convert", *map(str, words)]), pytest.raises(SystemExit) as ended:
            app_module.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out + err

    formats.write(tmp_path / "draft", checkpoint(TINY_V2))
    code, said = run(tmp_path / "draft", tmp_path / "d.gguf", "--to", "gguf", "--target", target)
    assert code == 0 and said.endswith("36 tensors (bfloat16), z-lab -> gguf, read back and equal\n")
    code, said = run(tmp_path / "draft", tmp_path / "e.gguf", "--to", "gguf")
    assert code == 2 and "no target is given" in said and said.count("\n") == 1
    code, said = run(tmp_path / "d.gguf", tmp_path / "back", "--to", "speculators")
    assert code == 0 and "gguf -> speculators" in said
    assert json.loads((tmp_path / "back" / "config.json").read_text())["speculators_model_type"] == "dflash2"


# ---- inspect and the headers alone -----------------------------------------------------------------------------------
def test_inspect_reads_a_file_without_torch(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "draft.gguf"
    formats.write(path, checkpoint(TINY_V2), dialect="gguf", target=target)
    code = (
        "import sys\n"
        "from blockdraft import formats\n"
        "from blockdraft.inspection import inspect_checkpoint, render_text\n"
        "report = inspect_checkpoint(sys.argv[1], sys.argv[2])\n"
        "config = formats.read_config(sys.argv[1])\n"
        "assert len(formats.read_header(sys.argv[1], config)) == report['num_tensors']\n"
        "print(render_text(report))\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path, target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "(dflash, gguf layout)" in done.stdout and "pair       fits" in done.stdout


def test_a_report_is_that_of_the_folder(tmp_path: Path, target: Path) -> None:
    given = checkpoint(edited(TINY_V2, **SWA, is_causal=True))
    formats.write(tmp_path / "draft", given)
    formats.write(tmp_path / "draft.gguf", given, dialect="gguf", target=target)
    folder, file = (inspect_checkpoint(tmp_path / name) for name in ("draft", "draft.gguf"))
    for key in ("family", "shape", "layers", "rope", "conventions", "parameters", "num_tensors", "cost"):
        assert file[key] == folder[key], key
    assert (file["dialect"], file["architecture"]) == ("gguf", "dflash")
    assert file["weights"]["dtypes"] == ["BF16", "F32"] and folder["weights"]["dtypes"] == ["BF16"]
    outcomes = {found["engine"]: found["outcome"] for found in file["engines"]}
    assert outcomes["llama.cpp"] == "runs_with_notes" and outcomes["SGLang"] == "refused"


def test_inspect_of_a_file_that_is_no_draft(tmp_path: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"general\.architecture is 'llama'"):
        inspect_checkpoint(target)
    (tmp_path / "cut.gguf").write_bytes(target.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        inspect_checkpoint(tmp_path / "cut.gguf")
