"""MLA drafts of the z-lab dialect: the published layout read, written, refused, inspected, and run with a target."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.accept import SamplingParams
from blockdraft.config import DraftConfig, MlaConfig, TargetFacts, pairing_rules
from blockdraft.draft import DraftModel
from blockdraft.engine import Engine, Request
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import zlab
from blockdraft.inspection import cache_bytes, count_parameters, inspect_checkpoint, render_text, step_cost
from drafts import K3_FIVE_LAYERS, K3_SIX_LAYERS, K31, TINY_MLA, TINY_V2, checkpoint, edited, random_tensors
from engine_kit import hf_target, plain_ids, run_one, tiny_model
from exactness import pooled_chi_square_ok
from test_engine_sampling import raw_table, table_model, target_distribution_table

EMBEDDING = "embed_tokens.weight"


def reduced(raw: dict[str, Any], *, vocab_size: int = 32, **changes: Any) -> dict[str, Any]:
    """A published config with every size made small: the same keys at the same places."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "vocab_size": vocab_size,
        "draft_vocab_size": vocab_size,
        "num_target_layers": 3,
        "sliding_window": 7,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": vocab_size - 1,
        "pad_token_id": None,
        "nest_mask_token_id": 1,
        "nest_target_layer_ids": [0, 1, 2],
        "nest_conv_group_size": 8,
        "nest_selector_rank": 4,
        "nest_selector_top_k": 4,
    }
    rope = {**raw["rope_parameters"], "original_max_position_embeddings": 32}
    return edited(raw, **small, rope_parameters=rope, **changes)


def written(folder: Path, raw: dict[str, Any], *, own: tuple[str, ...] = (EMBEDDING,)) -> zlab.Checkpoint:
    """A random checkpoint of the config as a publisher would leave it: their config.json, their names."""
    config = zlab.config_from_dict(raw)
    generator = torch.Generator().manual_seed(7)
    shapes = zlab.expected_tensors(config) | {name: zlab.optional_tensors(config)[name] for name in own}
    tensors = {}
    for name, shape in shapes.items():
        is_gain = "norm" in name and len(shape) == 1
        scale = 0.5 if "codebook" in name else 0.2
        tensors[name] = float(is_gain) + scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return zlab.Checkpoint(config=config, tensors=tensors)


# ---- the config ------------------------------------------------------------------------------------------------------
def test_published_configs() -> None:
    six, five, k31 = (zlab.config_from_dict(raw) for raw in (K3_SIX_LAYERS, K3_FIVE_LAYERS, K31))
    assert six.attention == MlaConfig(
        num_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        has_bias=False,
    )
    assert [(layer.is_causal, layer.window) for layer in six.layers] == [(False, 4096)] * 5 + [(False, None)]
    assert six.target_layer_ids == (19, 37, 54, 66, 78, 90) and five.target_layer_ids == (19, 37, 66, 78, 90)
    assert (six.block_size, six.mask_token_id, six.tap_stream, six.has_tap_norms) == (8, 163592, None, False)
    assert [(layer.is_causal, layer.window) for layer in k31.layers] == [(True, 1024)] * 5
    assert k31.selector is not None and k31.selector.top_k == 32
    assert (six.max_window, k31.max_window) == (None, 1024)


@pytest.mark.parametrize("raw", [K3_SIX_LAYERS, K3_FIVE_LAYERS, K31])
def test_the_written_config_has_the_published_keys_at_the_published_places(raw: dict[str, Any]) -> None:
    config = zlab.config_from_dict(raw)
    again = json.loads(json.dumps(zlab.config_to_dict(config)))
    assert zlab.config_from_dict(again) == config
    without_meaning = {"attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "draft_vocab_size"}
    assert set(raw) - without_meaning - {"torch_dtype"} <= set(again)
    assert set(raw["dflash_config"]) == set(again["dflash_config"])
    for key in set(raw) & set(again) - {"dflash_config"}:
        assert again[key] == raw[key], key


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 128},
        {"kv_lora_rank": ..., "nest_kv_lora_rank": 10},
        {"nest_q_lora_rank": 12},
        {"nest_attention_modes": ["mla", "mla"]},
        {"nest_attention_mode": ..., "nest_attention_modes": ["mla", "mla"]},
        {"nest_attention_mode": ..., "attention_mode": "mla"},
        {"rope_interleave": True, "nest_mla_rope_interleaved": True, "rope_is_neox_style": False},
        {"mla_use_nope": False, "nest_mla_use_output_gate": False, "mla_use_qk_norm": None},
        {"fc_norm": False, "nest_aux_hidden_stream": None, "nest_projector_type": "dflash2"},
    ],
)
def test_places_and_spellings_that_mean_the_same(changes: dict[str, Any]) -> None:
    assert zlab.config_from_dict(edited(TINY_MLA, **changes)) == zlab.config_from_dict(TINY_MLA)


def test_what_a_config_may_ask_for() -> None:
    def attention(**changes: Any) -> Any:
        return zlab.config_from_dict(edited(TINY_MLA, **changes)).attention

    assert attention(q_lora_rank=None).q_lora_rank is None
    assert attention(attention_bias=True).has_bias
    config = zlab.config_from_dict(edited(TINY_MLA, fc_norm=True, nest_aux_hidden_stream="attn_res"))
    assert (config.has_tap_norms, config.tap_stream) == (True, "attn_res")
    first = {name: shape for name, shape in zlab.expected_tensors(config).items() if name.startswith("fc_norm")}
    assert first == {"fc_norm.0.weight": (32,), "fc_norm.1.weight": (32,)}
    v1 = edited(TINY_MLA, architectures=["DFlashDraftModel"])
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        del v1["dflash_config"][key]
    assert zlab.config_from_dict(v1).family == "dflash"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": ...}, "kv_lora_rank is missing: an MLA draft gives every size"),
        ({"qk_nope_head_dim": None}, "qk_nope_head_dim is missing"),
        ({"qk_rope_head_dim": ...}, "qk_rope_head_dim is missing"),
        ({"v_head_dim": ...}, "v_head_dim is missing"),
        ({"q_lora_rank": ...}, "q_lora_rank is missing: give the rank of the query, or null"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3"),
        ({"nest_v_head_dim": 6}, "v_head_dim is given twice and differs"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"nest_attention_mode": ...}, "q_lora_rank is 12 and attention_mode is not mla"),
        ({"nest_attention_mode": "MLA"}, "attention_mode is 'MLA': supported are 'gqa', 'mha' and 'mla'"),
        ({"nest_attention_modes": ["mla", "gqa"]}, "it must name one kind for each of 2 layers, the same for all"),
        ({"nest_attention_modes": ["mla"]}, "attention_modes is"),
        ({"nest_attention_modes": ["gqa", "gqa"]}, "make them agree"),
        ({"rope_interleave": False}, "rope_interleave is False: supported is true"),
        ({"nest_mla_rope_interleaved": False}, "mla_rope_interleaved is False"),
        ({"rope_is_neox_style": True}, "rope_is_neox_style is True: supported is false"),
        ({"mla_use_nope": True}, "mla_use_nope is True"),
        ({"nest_mla_use_output_gate": True}, "mla_use_output_gate is True"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm is True"),
        ({"fc_norm": 1}, "fc_norm is 1"),
        ({"nest_aux_hidden_stream": "mixture"}, "aux_hidden_stream is 'mixture'"),
        ({"kv_lora_rnk": 10}, "unknown key 'kv_lora_rnk' at top level: the nearest known name is 'kv_lora_rank'"),
    ],
)
def test_refused_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        zlab.config_from_dict(edited(TINY_MLA, **changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("stream", ["prefix", "attn_res", None])
def test_a_stream_is_written_exactly_where_it_was_said(stream: str | None) -> None:
    config = zlab.config_from_dict(edited(TINY_MLA, nest_aux_hidden_stream=stream))
    assert config.tap_stream == stream
    assert zlab.config_to_dict(config)["dflash_config"].get("aux_hidden_stream") == stream


def test_a_stream_that_the_target_does_not_have() -> None:
    draft = zlab.config_from_dict(edited(TINY_MLA, nest_aux_hidden_stream="attn_res"))
    target = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "max_position_embeddings": 256}

    def verdict(model_type: str, config: DraftConfig) -> str:
        facts = TargetFacts.from_config({**target, "model_type": model_type})
        return next(rule.verdict for rule in pairing_rules(config, facts) if rule.name == "tap_stream")

    assert verdict("llama", draft) == "fail"
    assert verdict("kimi_k3", draft) == "pass"
    assert verdict("kimi_linear", draft) == "fail"
    assert verdict("kimi_k3", zlab.config_from_dict(TINY_MLA)) == "unknown"
    assert verdict("llama", zlab.config_from_dict(edited(TINY_MLA, nest_aux_hidden_stream="prefix"))) == "pass"
    assert verdict("llama", zlab.config_from_dict(TINY_MLA)) == "pass"


# ---- the tensors -----------------------------------------------------------------------------------------------------
def test_names_and_shapes_of_the_published_file() -> None:
    shapes = zlab.expected_tensors(zlab.config_from_dict(K3_SIX_LAYERS))
    layer = {name.removeprefix("layers.3."): shape for name, shape in shapes.items() if name.startswith("layers.3.")}
    assert {name: shape for name, shape in layer.items() if name.startswith("self_attn.")} == {
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (64 * 192, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (64 * 256, 512),
        "self_attn.o_proj.weight": (7168, 64 * 128),
    }
    assert len(layer) == 16
    assert [name for name in shapes if not name.startswith("layers.")] == [
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight",
    ]


def test_one_query_projection_and_biases() -> None:
    names = set(zlab.expected_tensors(zlab.config_from_dict(edited(TINY_MLA, q_lora_rank=None, attention_bias=True))))
    first = {name.removeprefix("layers.0.self_attn.") for name in names if name.startswith("layers.0.self_attn.")}
    assert first == {
        "q_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_proj_with_mqa.bias",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
        "o_proj.bias",
    }


@pytest.mark.parametrize("raw", [K3_SIX_LAYERS, K3_FIVE_LAYERS, K31])
def test_a_reduced_checkpoint_of_the_published_layout_round_trips(tmp_path: Path, raw: dict[str, Any]) -> None:
    made = written(tmp_path / "published", reduced(raw))
    back = zlab.read(tmp_path / "published")
    assert back.config == made.config
    zlab.write(tmp_path / "ours", back, dtype=None)
    again = zlab.read(tmp_path / "ours")
    assert again.config == made.config and again.tensors.keys() == made.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in made.tensors.items())
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == made.tensors.keys()


@pytest.mark.parametrize("fused", ["fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa"])
def test_a_fused_first_projection_is_taken_apart(tmp_path: Path, fused: str) -> None:
    made = checkpoint(edited(TINY_MLA, attention_bias=True), dtype=torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(edited(TINY_MLA, attention_bias=True)))
    stacked = dict(made.tensors)
    for layer in range(2):
        for kind in ("weight", "bias"):
            at = f"layers.{layer}.self_attn."
            parts = [stacked.pop(f"{at}{name}.{kind}") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
            stacked[f"model.{at}{fused}.{kind}"] = torch.cat(parts)
    save_file(stacked, tmp_path / "model.safetensors")
    back = zlab.read(tmp_path).tensors
    assert back.keys() == made.tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in made.tensors.items())
    assert inspect_checkpoint(tmp_path)["weights"]["num_tensors"] == len(made.tensors)


def without(*names: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in names]


def adding(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


BAD_TENSORS = [
    (TINY_MLA, without("layers.1.self_attn.kv_b_proj.weight"), r"1 missing \(layers\.1\.self_attn\.kv_b_proj"),
    (TINY_MLA, adding("layers.0.self_attn.k_proj.weight", 4, 32), "attention_mode 'gqa' would fit"),
    (TINY_MLA, adding("layers.0.self_attn.fused_qkv_a_proj.weight", 9, 32), "fused_qkv_a_proj needs 26 rows"),
    (TINY_MLA, adding("layers.0.self_attn.fused_qkv_a_proj.weight", 26, 32), "1 left over"),
    (TINY_MLA, adding("fc_norm.0.weight", 32), "fc_norm true would fit"),
    (edited(TINY_MLA, fc_norm=True), without("fc_norm.1.weight"), r"1 missing \(fc_norm\.1\.weight\)"),
    (
        edited(TINY_MLA, q_lora_rank=None),
        adding("layers.0.self_attn.q_a_proj.weight", 12, 32),
        "q_lora_rank would be its rank, not null",
    ),
    (TINY_V2, adding("layers.0.self_attn.kv_b_proj.weight", 44, 10), "attention_mode 'mla' in dflash_config would fit"),
]


@pytest.mark.parametrize(("raw", "damage", "message"), BAD_TENSORS)
def test_tensors_that_do_not_fit(tmp_path: Path, raw: dict[str, Any], damage: Any, message: str) -> None:
    tensors = random_tensors(zlab.config_from_dict(raw), dtype=torch.float32)
    damage(tensors)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        zlab.read(tmp_path)


# ---- what it is and what it costs ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raw", "cache", "weights_gb", "inject_mflop", "block_gflop"),
    [(K3_FIVE_LAYERS, 5760, 4.869, 555, 34.8), (K3_SIX_LAYERS, 6912, 5.842, 666, 41.8), (K31, 5760, 5.402, 658, 38.3)],
)
def test_published_costs(
    raw: dict[str, Any], cache: int, weights_gb: float, inject_mflop: int, block_gflop: float
) -> None:
    config = zlab.config_from_dict(raw)
    cost = step_cost(config)
    assert cost["cache_bytes_per_token"] == cache
    assert round(cost["weight_bytes_per_step"] / 1e9, 3) == weights_gb
    assert round(cost["head_bytes_per_step"] / 1e9, 3) == 2.349
    assert round(cost["flops"]["inject_per_position"] / 1e6) == inject_mflop
    assert round(cost["flops"]["block"] / 1e9, 1) == block_gflop
    visible = sum(min(4096, layer.window or 4096) + 8 for layer in config.layers)
    assert cost["flops"]["attention"] == 2 * 8 * visible * config.attention.num_heads * (2 * 512 + 64)
    assert config.max_window is not None or not cost["is_cache_bounded"]
    assert cache_bytes(zlab.config_from_dict(K31), 10**6) == 5760 * 1024


def test_parts_of_the_published_draft() -> None:
    config = zlab.config_from_dict(K3_FIVE_LAYERS)
    parts = count_parameters(config, [EMBEDDING])
    assert parts["total"] == 3_692_877_824
    assert parts["embedding"] == 163840 * 7168
    assert parts["fuse"] == 5 * 7168**2
    assert parts["convolutions"] == 5 * 25_747_456
    per_layer = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168
    assert parts["attention"] == 5 * per_layer
    assert parts["norms"] == 5 * (2 * 7168 + 1536 + 512) + 2 * 7168
    assert count_parameters(config)["total"] == 2_518_472_704


def test_the_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(K3_SIX_LAYERS))
    report = inspect_checkpoint(tmp_path / "config.json")
    assert json.loads(json.dumps(report)) == report
    assert report["shape"]["attention"] == "mla" and report["shape"]["kv_lora_rank"] == 512
    text = render_text(report, columns=120)
    assert "MLA, 64 heads x 128 + 64 rotary, values 128, query rank 1536, latent 512, scale 0.130861" in text
    assert "cache      6,912 bytes a token" in text
    written(tmp_path / "draft", reduced(K3_SIX_LAYERS, fc_norm=True, nest_aux_hidden_stream="attn_res"))
    report = inspect_checkpoint(tmp_path / "draft")
    assert report["weights"]["own"] == [EMBEDDING]
    assert report["num_tensors"] == report["weights"]["num_tensors"] == 103 + 3
    assert report["parameters"]["embedding"] == 32 * 32
    assert "a norm for each, of the attention-residual stream" in render_text(report)


# ---- with a target ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def ar_text(model: Any) -> list[int]:
    return plain_ids(model, [3, 7, 1, 12, 5], 28)


def loaded(folder: Path, raw: dict[str, Any], **options: Any) -> DraftModel:
    written(folder, raw, **options)
    return DraftModel.from_checkpoint(zlab.read(folder))


@pytest.mark.parametrize("raw", [K3_SIX_LAYERS, K31], ids=["k3", "k3.1"])
def test_greedy_text_is_the_targets_own(tmp_path: Path, model: Any, ar_text: list[int], raw: dict[str, Any]) -> None:
    """Every width of a block, far past the window of 7."""
    engine = Engine(hf_target(model), loaded(tmp_path / "draft", reduced(raw)))
    for width in range(2, 9):
        done = run_one(engine, prompt_ids=[3, 7, 1, 12, 5], max_new_tokens=28, stop_ids=frozenset(), width=width)
        assert list(done.token_ids) == ar_text
        assert done.stats.num_draft_tokens > 0 and done.speculation.width == width


def test_rows_of_a_batch_are_the_texts_of_each_alone(tmp_path: Path, model: Any) -> None:
    engine = Engine(hf_target(model), loaded(tmp_path / "draft", reduced(K3_FIVE_LAYERS), own=()))
    prompts = [[3, 7, 1], [5, 9, 2, 4, 4, 8, 11, 20, 21, 1, 2], [30, 2]]
    requests = [Request(prompt_ids=ids, max_new_tokens=12, stop_ids=frozenset()) for ids in prompts]
    texts = [list(done.token_ids) for done in engine.run(requests)]
    assert texts == [plain_ids(model, ids, 12) for ids in prompts]


def test_the_embedding_of_the_file_is_the_one_that_is_used(tmp_path: Path) -> None:
    raw = reduced(K3_FIVE_LAYERS)
    draft = loaded(tmp_path / "draft", raw)
    own = zlab.read(tmp_path / "draft").tensors[EMBEDDING]

    def refuse(ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the target's embedding was asked for")

    assert torch.equal(draft.noise([5], 3, refuse)[0], own[[5, 1, 1]])


def test_the_law_of_sampled_text_is_kept(tmp_path: Path) -> None:
    model = table_model()
    raw_VV = raw_table(model)
    vocab_size = len(raw_VV)
    params = SamplingParams(temperature=0.9)
    draft = loaded(tmp_path / "draft", reduced(K31, vocab_size=vocab_size), own=())
    engine = Engine(hf_target(model), draft)
    counts: list[Counter[int]] = [Counter() for _ in range(vocab_size)]
    requests = [
        Request(
            prompt_ids=[i % vocab_size],
            max_new_tokens=8,
            stop_ids=frozenset(),
            sampling=params,
            width=2 + i % 7,
            seed=i,
        )
        for i in range(64)
    ]
    for request, done in zip(requests, engine.run(requests), strict=True):
        previous = request.prompt_ids[-1]
        for token in done.token_ids:
            counts[previous][token] += 1
            previous = token
    laws = [{i: float(p) for i, p in enumerate(row)} for row in target_distribution_table(raw_VV, params)]
    assert pooled_chi_square_ok(list(zip(counts, laws, strict=True)), alpha=1e-5)
    shifted = copy.deepcopy(laws)
    shifted.insert(0, shifted.pop())
    assert not pooled_chi_square_ok(list(zip(counts, shifted, strict=True)), alpha=1e-5)


def test_scale_of_the_reduced_draft_has_the_published_factor() -> None:
    config = zlab.config_from_dict(reduced(K3_SIX_LAYERS))
    assert math.isclose(config.softmax_scale, 10**-0.5 * 1.81326, rel_tol=1e-5)
