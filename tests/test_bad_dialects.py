"""Malformed checkpoints of every dialect beside z-lab's: each is refused by one line that names what is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockdraft import formats
from blockdraft.config import TargetFacts
from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError
from drafts import TINY_V1, TINY_V2, checkpoint, edited, random_tensors
from spark_kit import spark_config, spine_config
from test_formats_spark import LATENT

NAMES = ("z-lab", "speculators", "transformers", "torchspec")
# Where each dialect keeps what the cases below spoil: a path in its config.json.
TAPS = {
    "z-lab": "dflash_config.target_layer_ids",
    "speculators": "aux_hidden_state_layer_ids",
    "transformers": "target_layer_ids",
    "torchspec": "dflash_config.target_layer_ids",
}
BLOCK = {
    "z-lab": ("block_size", "dflash_config.block_size"),
    "speculators": ("block_size",),
    "transformers": ("block_size",),
    "torchspec": ("block_size", "dflash_config.block_size"),
}
MASK = {
    "z-lab": "dflash_config.mask_token_id",
    "speculators": "mask_token_id",
    "transformers": "mask_token_id",
    "torchspec": "dflash_config.mask_token_id",
}
SWA = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5, "use_sliding_window": True, "is_causal": False}


def put(raw: dict[str, Any], path: str, value: object) -> None:
    """Set the entry at a dotted path; the value `...` removes it."""
    *places, name = path.split(".")
    place = raw
    for part in places:
        place = place[part]
    if value is ...:
        place.pop(name, None)
    else:
        place[name] = value


def config_of(name: str, family: dict[str, Any] = TINY_V1) -> dict[str, Any]:
    config = checkpoint(family).config
    return copy.deepcopy(json.loads(json.dumps(formats.DIALECTS[name].config_to_dict(config))))


def tensors_of(name: str, family: dict[str, Any] = TINY_V1) -> dict[str, torch.Tensor]:
    layout = formats.DIALECTS[name]
    return {layout.stored_name(key): tensor for key, tensor in checkpoint(family).tensors.items()}


def saved(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


def refused(folder: Path, message: str, kind: type[BlockdraftError], **options: Any) -> None:
    with pytest.raises(kind) as caught:
        formats.read(folder, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- taps, block size, mask id, left-over and missing tensors, alike in every dialect --------------------------------
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["missing", "too many", "twice", "negative", "beyond"])
def test_taps(tmp_path: Path, name: str, case: str) -> None:
    """Taps are never guessed, and each has to exist."""
    key = TAPS[name].split(".")[-1]
    first = 2 if name == "speculators" else 1
    value, message, kind = {
        "missing": (..., f"{key} is missing", ConfigError),
        "too many": ([first, first + 1, first + 3], "fc expects 2 taps", CheckpointError),
        "twice": ([first, first], "twice", ConfigError),
        "negative": ([-1, 4], "-1", ConfigError),
        "beyond": ([first, 17], "17", ConfigError),
    }[case]
    raw = config_of(name)
    put(raw, TAPS[name], value)
    if name == "torchspec":
        raw["num_target_layers"] = None
    refused(saved(tmp_path, raw, tensors_of(name)), message, kind)
    if case == "missing":
        refused(tmp_path, "fc expects 2 taps (fc.weight is [32, 64])", kind)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_layer_mean_the_same_everywhere(name: str) -> None:
    """Index 0 is the output of the first layer in every dialect, however its ids are counted."""
    for taps in ([0, 4], [0, 5]):
        config = checkpoint(edited(TINY_V1, nest_target_layer_ids=taps)).config
        if name == "speculators" and taps[-1] == 5:
            with pytest.raises(ConfigError, match="a tap on the last target layer, 5"):
                formats.DIALECTS[name].config_to_dict(config)
            continue
        raw = formats.DIALECTS[name].config_to_dict(config)
        assert formats.DIALECTS[name].config_from_dict(raw).target_layer_ids == tuple(taps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [..., 1, 0, "4", 4.0, True, 257])
def test_block_size(tmp_path: Path, name: str, value: object) -> None:
    raw = config_of(name)
    for path in BLOCK[name]:
        put(raw, path, value)
    message = "block_size is missing" if value is ... else f"block_size is {value!r}"
    refused(saved(tmp_path, raw, tensors_of(name)), message, ConfigError)


@pytest.mark.parametrize("name", [name for name in NAMES if len(BLOCK[name]) > 1])
def test_block_size_in_two_places(tmp_path: Path, name: str) -> None:
    raw = config_of(name)
    put(raw, BLOCK[name][0], 8)
    refused(saved(tmp_path, raw, tensors_of(name)), "block_size is given twice and differs", ConfigError)
    put(raw, BLOCK[name][0], ...)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert formats.read(tmp_path).config.block_size == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [..., 64, -1, "60"])
def test_mask_ids(tmp_path: Path, name: str, value: object) -> None:
    raw = config_of(name)
    put(raw, MASK[name], value)
    message = "mask_token_id is missing" if value is ... else f"mask_token_id is {value!r}"
    refused(saved(tmp_path, raw, tensors_of(name)), message, ConfigError)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["eos_token_id", "pad_token_id"])
def test_a_mask_that_ends_or_pads_needs_consent(tmp_path: Path, name: str, key: str) -> None:
    raw = config_of(name)
    raw[key] = 60
    refused(saved(tmp_path, raw, tensors_of(name)), f"mask_token_id is 60, which is also {key}", ConfigError)
    assert formats.read(tmp_path, allow_mask_is_eos=True).config.mask_token_id == 60


@pytest.mark.parametrize("name", NAMES)
def test_tensors_left_over_or_missing(tmp_path: Path, name: str) -> None:
    raw, tensors = config_of(name), tensors_of(name)

    def with_change(change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        changed = dict(tensors)
        change(changed)
        return saved(tmp_path, raw, changed)

    ones = torch.ones(32)
    refused(with_change(lambda t: t.update({"fc_norm.0.weight": ones})), "fc_norm true would fit", CheckpointError)
    kernel = {"layers.0.attention_conv.base_kernel": torch.ones(2, 2, 32)}
    refused(with_change(lambda t: t.update(kernel)), "DFlash2DraftModel would fit", CheckpointError)
    layer = [key for key in tensors if key.startswith("layers.1.")]
    refused(
        with_change(lambda t: [t.pop(key) for key in layer]),
        "the file has the layers [0], the config asks for 2",
        CheckpointError,
    )
    fc = formats.DIALECTS[name].stored_name("fc.weight")
    refused(with_change(lambda t: t.pop(fc)), "1 missing (fc.weight)", CheckpointError)
    refused(with_change(lambda t: t.update({fc: torch.ones(32, 96)})), "fc expects 3 taps", CheckpointError)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_the_wrong_kind(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(name)
    tensors["layers.0.input_layernorm.weight"] = torch.ones(32, dtype=torch.int64)
    refused(saved(tmp_path, config_of(name), tensors), "input_layernorm.weight is I64", CheckpointError)
    tensors["layers.0.input_layernorm.weight"] = torch.full((32,), float("nan"))
    refused(saved(tmp_path, config_of(name), tensors), "hold NaN or infinity", CheckpointError)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["[]", '"draft"', "{", '{"block_size": 4, "block_size": 8}', '{"x": NaN}'])
def test_no_config(tmp_path: Path, name: str, text: str) -> None:
    saved(tmp_path, {}, tensors_of(name))
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, "", ConfigError)


# ---- what is particular to one dialect ------------------------------------------------------------------------------
SPECULATORS: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": ...}, "speculators_model_type is missing"),
    ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3': supported are"),
    ({"architectures": ["DFlash2DraftModel"]}, "is a DFlashDraftModel or DFlashSpeculator"),
    ({"architectures": "DFlashDraftModel"}, "architectures is 'DFlashDraftModel'"),
    ({"transformer_layer_config": ...}, "transformer_layer_config is missing"),
    ({"transformer_layer_config": [1]}, "transformer_layer_config is [1]"),
    ({"transformer_layer_config.model_type": "gemma3"}, "model_type is 'gemma3' in transformer_layer_config"),
    ({"transformer_layer_config.hiden_size": 3}, "unknown key 'hiden_size' in transformer_layer_config"),
    ({"transformer_layer_config.hidden_size": ...}, "hidden_size is missing"),
    ({"transformer_layer_config.rope_parameters": ..., "transformer_layer_config.rope_theta": ...}, "rope_theta"),
    ({"transformer_layer_config.mlp_bias": True}, "mlp_bias is True"),
    ({"transformer_layer_config.hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"target_layer_ids": [1, 4]}, "unknown key 'target_layer_ids' in a speculators config"),
    ({"num_target_layers": ...}, "num_target_layers is missing: a speculators checkpoint does not state it"),
    ({"num_target_layers": 5}, "aux_hidden_state_layer_ids holds 5"),
    ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids holds 0"),
    ({"aux_hidden_state_layer_ids": [2, 6]}, "the embedding and the last layer cannot be tapped"),
    ({"aux_hidden_state_layer_ids": [5, 2]}, "the ids must rise"),
    ({"aux_hidden_state_layer_ids": "2,5"}, "aux_hidden_state_layer_ids is '2,5'"),
    ({"aux_hidden_state_layer_ids": [True, 2]}, "it must be a list of integers"),
    ({"draft_vocab_size": 65}, "draft_vocab_size is 65: a reduced vocabulary is below vocab_size, 64"),
    ({"draft_vocab_size": "32"}, "draft_vocab_size is '32'"),
    ({"draft_vocab_size": 1}, "draft_vocab_size is 1"),
    ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    ({"sliding_window_non_causal": "no"}, "sliding_window_non_causal is 'no'"),
    ({"projector_type": "domino"}, "projector_type is 'domino'"),
    ({"draft_ffn_type": "moe"}, "draft_ffn_type is 'moe'"),
    ({"shift_label": True}, "shift_label is True"),
    ({"conv_kernel_size": 2}, "conv_kernel_size is given"),
    ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
    ({"speculators_config": 3}, "speculators_config is 3"),
    ({"speculators_config.algorithm": "dflash2"}, "speculators_config.algorithm is 'dflash2'"),
    ({"speculators_config.proposal_methods": [{"speculative_tokens": 4}]}, "speculative_tokens is 4"),
    ({"speculators_config.proposal_methods": [{"tokens": 3}]}, "unknown key 'tokens' in proposal_methods"),
    ({"speculators_config.proposal_methods": 7}, "proposal_methods is 7"),
]
TRANSFORMERS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
    ({"architectures": ["DFlashDraftModel"]}, "has model_type 'muse_glimmer_assistant' and the class"),
    ({"num_target_layer": 6}, "unknown key 'num_target_layer' in an assistant's config"),
    ({"dflash_config": {}}, "unknown key 'dflash_config' in an assistant's config"),
    ({"layer_types": ...}, "layer_types is missing"),
    ({"layer_types": ["sliding_attention", "linear_attention"], "sliding_window": 4}, "'linear_attention'"),
    ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window is 0"),
    ({"vocab_size": ...}, "vocab_size is missing: a transformers assistant does not state it"),
    ({"num_target_layers": ...}, "num_target_layers is missing: a transformers assistant does not state it"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"is_causal": True}, "is_causal is True"),
    ({"rope_parameters": ..., "rope_theta": ...}, "rope_theta is missing"),
    ({"rope_parameters.rope_type": "longrope"}, "rope_type is 'longrope'"),
]
TORCHSPEC: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type is 'llama'"),
    ({"num_target_layers": 3}, "num_target_layers is 3: beside target_num_hidden_layers 6 it is the number of taps, 2"),
    ({"target_num_hidden_layers": ...}, "target_num_hidden_layers is missing"),
    ({"target_num_hidden_layers": 4}, "target_layer_ids holds 4: too big"),
    ({"target_num_hidden_layers": "6"}, "num_target_layers is"),
    ({"target_hidden_layers": 6}, "unknown key 'target_hidden_layers' at top level"),
    ({"architectures": ["DFlash2DraftModel"]}, "DFlashDraftModel would fit"),
    ({"markov_rank": 8}, "markov_rank is 8"),
]
PARTICULAR = [
    (name, change, message)
    for name, cases in (("speculators", SPECULATORS), ("transformers", TRANSFORMERS), ("torchspec", TORCHSPEC))
    for change, message in cases
]


@pytest.mark.parametrize(("name", "change", "message"), PARTICULAR)
def test_bad_configs(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    raw = config_of(name)
    for path, value in change.items():
        put(raw, path, value)
    refused(saved(tmp_path, raw, tensors_of(name)), message, ConfigError)


def test_at_least_forty() -> None:
    assert len({(name, message) for name, _, message in PARTICULAR}) >= 40


def test_tensors_of_a_reduced_vocabulary(tmp_path: Path) -> None:
    """The head of 32 ids and the maps between 32 and 64, under a config that says nothing of it."""
    tensors = tensors_of("speculators")
    tensors |= {"d2t": torch.zeros(32, dtype=torch.int64), "t2d": torch.zeros(64, dtype=torch.bool)}
    refused(saved(tmp_path, config_of("speculators"), tensors), "reduced draft vocabulary", CheckpointError)


def test_names_of_another_dialect(tmp_path: Path) -> None:
    refused(
        saved(tmp_path, config_of("transformers"), tensors_of("z-lab")),
        "fc.weight outside of encoder",
        CheckpointError,
    )
    refused(saved(tmp_path, config_of("z-lab"), tensors_of("transformers")), "assistant", CheckpointError)
    refused(saved(tmp_path, config_of("speculators"), tensors_of("transformers")), "assistant", CheckpointError)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    tensors = tensors_of("torchspec") | {"fc.weight": torch.ones(32, 64)}
    refused(saved(tmp_path, config_of("torchspec"), tensors), "are the same tensor", CheckpointError)


def test_a_head_where_there_is_no_place_for_one(tmp_path: Path) -> None:
    tensors = tensors_of("transformers") | {"lm_head.weight": torch.ones(64, 32)}
    message = "lm_head.weight: a transformers assistant has no place for it"
    refused(saved(tmp_path, config_of("transformers"), tensors), message, CheckpointError)
    torch.save(torch.ones(32), tmp_path / "mask_embedding.pt")
    saved(tmp_path, config_of("speculators"), tensors_of("speculators"))
    refused(tmp_path, "mask_embedding: a speculators checkpoint has no place for it", CheckpointError)


def test_two_dialects_in_one_config(tmp_path: Path) -> None:
    raw = {**config_of("speculators"), "model_type": "muse_glimmer_assistant"}
    refused(saved(tmp_path, raw, tensors_of("speculators")), "mixes the dialects speculators and", ConfigError)


@pytest.mark.parametrize("name", ["speculators", "torchspec"])
def test_a_part_is_missing(tmp_path: Path, name: str) -> None:
    raw = config_of(name, TINY_V2)
    refused(saved(tmp_path, raw, tensors_of(name)), "there are no DFlash 2 parts in the file", CheckpointError)
    put(raw, "selector_rank" if name == "speculators" else "dflash_config.selector_rank", ...)
    refused(saved(tmp_path, raw, tensors_of(name, TINY_V2)), "needs selector_rank", ConfigError)


@pytest.mark.parametrize("name", ["speculators", "transformers"])
def test_a_window_that_is_not_one(tmp_path: Path, name: str) -> None:
    raw = config_of(name, edited(TINY_V1, **SWA))
    path = "sliding_window" if name == "transformers" else "transformer_layer_config.sliding_window"
    put(raw, path, "5")
    refused(saved(tmp_path, raw, tensors_of(name)), "sliding_window is '5'", ConfigError)
    put(raw, path, ...)
    refused(saved(tmp_path, raw, tensors_of(name)), "sliding_window is missing", ConfigError)


# ---- DSpark and DSpine under the names of their engines --------------------------------------------------------------
SPARK = {
    "deepspec": spark_config("gated"),
    "k3-dspark": spark_config("gated", attention=LATENT),
    "z-lab": spine_config(),
}


def spark_files(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    layout, config = formats.DIALECTS[name], SPARK[name]
    raw = json.loads(json.dumps(layout.config_to_dict(config)))
    return raw, {layout.stored_name(key): value for key, value in random_tensors(config).items()}


def spoilt(raw: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """A copy with a field of the draft changed at every place that gives it; `...` removes it."""
    raw = copy.deepcopy(raw)
    for place in (raw, raw.get("dflash_config", {})):
        if key in place:
            put(place, key, value)
    return raw


@pytest.mark.parametrize("name", SPARK)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("target_layer_ids", [2], "fc expects 2 taps"),
        ("target_layer_ids", [2, 2], "twice"),
        ("target_layer_ids", [2, 0], "must rise"),
        ("target_layer_ids", [-1, 2], "holds -1: negative"),
        ("target_layer_ids", [0, 3], "holds 3: too big for num_target_layers 3"),
        ("block_size", ..., "block_size is missing"),
        ("block_size", 0, "block_size is 0"),
        ("block_size", "4", "block_size is '4'"),
        ("block_size", True, "block_size is True"),
        ("block_size", 257, "block_size is 257"),
        ("mask_token_id", ..., "mask_token_id is missing"),
        ("mask_token_id", 32, "mask_token_id is 32"),
        ("mask_token_id", -1, "mask_token_id is -1"),
    ],
)
def test_taps_block_and_mask_of_dspark_and_dspine(
    tmp_path: Path, name: str, key: str, value: object, message: str
) -> None:
    raw, tensors = spark_files(name)
    raw = spoilt(raw, key, value)
    if name == "k3-dspark" and isinstance(value, list):
        raw["num_target_layers"] = len(value)
    refused(saved(tmp_path, raw, tensors), message, BlockdraftError)


@pytest.mark.parametrize("name", SPARK)
def test_missing_taps_of_dspark_and_dspine_are_not_guessed(tmp_path: Path, name: str) -> None:
    raw, tensors = spark_files(name)
    saved(tmp_path, spoilt(raw, "target_layer_ids", ...), tensors)
    refused(tmp_path, "fc expects 2 taps (fc.weight is [24, 64])", ConfigError)


@pytest.mark.parametrize("name", SPARK)
def test_tensors_and_mask_role_of_dspark_and_dspine(tmp_path: Path, name: str) -> None:
    raw, tensors = spark_files(name)
    norm = {"fc_norm.0.weight": torch.ones(32)}
    refused(saved(tmp_path, raw, tensors | norm), "1 left over (fc_norm.0.weight)", CheckpointError)
    short = {key: value for key, value in tensors.items() if not key.startswith("layers.1.")}
    refused(saved(tmp_path, raw, short), "the file has the layers [0], the config asks for 2", CheckpointError)
    selector = {"candidate_selector.hidden_projection.weight": torch.ones(4, 24)}
    refused(saved(tmp_path, raw, tensors | selector), "left over", CheckpointError)
    for key in ("eos_token_id", "pad_token_id"):
        saved(tmp_path, {**raw, key: 3}, tensors)
        refused(tmp_path, f"mask_token_id is 3, which is also {key}", ConfigError)
        assert formats.read(tmp_path, allow_mask_is_eos=True).config == SPARK[name]


DRAFTS = [*((name, config_of(name)) for name in NAMES), *((name, spark_files(name)[0]) for name in SPARK)]


@pytest.mark.parametrize("raw", [raw for _, raw in DRAFTS], ids=[name for name, _ in DRAFTS])
def test_a_draft_is_not_taken_for_a_target(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="this config describes a draft: give the model that it drafts for"):
        TargetFacts.from_config(raw)
