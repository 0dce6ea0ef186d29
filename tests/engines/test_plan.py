"""`inspect --plan`: targets against models that exist, plans against what people report, and the arithmetic."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import DRAFTS

from blockdraft.errors import BlockdraftError, CheckpointError, ConfigError, PairError, RequestError
from blockdraft.inspection.plan import (
    Plan,
    make_plan,
    read_concurrency,
    read_costs,
    read_length,
    read_survival,
)
from blockdraft.inspection.plan_gpus import GPUS, read_gpus
from blockdraft.inspection.plan_target import read_target_shape
from tiny_pair import run_cli

GIB = 2**30
QWEN_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attn_output_gate": True,
        "intermediate_size": 17408,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        "mtp_num_hidden_layers": 1,
        "max_position_embeddings": 262144,
        "eos_token_id": 0,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    },
}
KIMI_K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "first_k_dense_replace": 1,
        "intermediate_size": 33792,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93],
        },
        "vocab_size": 163840,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1048576,
        "eos_token_id": 0,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
INT4 = {"quantization_config": {"quant_method": "auto-round", "bits": 4}}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
QWEN_DRAFT, K3_DRAFT = "z-lab/Qwen3.8-27B-DFlash2", "lightseekorg/kimi-k3-dflash2, 5 layers"
K31_DRAFT = "RadixArk/Kimi-K3.1-Dflash2-Preview"
DENSE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 4096,
}


def planned(target: dict[str, Any], draft: str, gpus: str, **changes: Any) -> Plan:
    config = DRAFTS[draft].read()
    num_gpus, gpu = read_gpus(gpus)
    words: dict[str, Any] = {
        "context": 131072,
        "concurrency": (1,),
        "survival": read_survival("4.0", config.num_proposals),
        "is_geometric": True,
        "tensor_parallel": num_gpus,
        "usd_per_gpu_hour": None,
        "kv_bits": 16,
        "costs": None,
        "acceptance_source": "a test",
    }
    given = changes.pop("given_bytes", None)
    return make_plan(
        config, read_target_shape(target, given), DRAFTS[draft].own, num_gpus=num_gpus, gpu=gpu, **{**words, **changes}
    )


def near(value: float, reported: float, share: float = 0.1) -> bool:
    return abs(value / reported - 1) < share


# ---- three published deployments: what cards and users report --------------------------------------------------------
def test_kimi_k31_on_eight_gpus() -> None:
    plan = planned(KIMI_K3, K31_DRAFT, "8xB300")
    memory = plan.loads[0].memory
    # SemiAnalysisAI/InferenceX pull request 2351: the checkpoint is 1.56 TB, 195 GB on each of 8.
    assert near(memory.target_weights, 195e9) and memory.fits
    # NVIDIA/TensorRT-LLM pull request 19040: 27,648 bytes a token for K3's latents, 5,760 for those of its draft.
    assert near(memory.target_cache, 27_648 * 131072)
    assert near(planned(KIMI_K3, K31_DRAFT, "8xB300", context=1024).loads[0].memory.draft_cache, 5_760 * 1024)
    # vllm-project/recipes: at least 1,680 GB of memory over all GPUs.
    assert near(8 * memory.total, 1680e9)
    with pytest.raises(PairError, match=r"the weights alone need 199\.\d GB on each of 8 H200, which have 150\.8"):
        planned(KIMI_K3, K31_DRAFT, "8xH200")


def test_kimi_k3_on_two_times_four_gb300() -> None:
    plan = planned(KIMI_K3, K3_DRAFT, "8xGB300", context=65536)
    assert near(plan.loads[0].memory.target_weights, 195e9) and plan.loads[0].memory.fits
    # The draft's card: 7.39 GB in bf16.
    alone = planned({**DENSE, "hidden_size": 7168}, K3_DRAFT, "1xGB300", context=2048)
    assert near(alone.loads[0].memory.draft_weights, 7.39e9)
    # vllm-project/recipes issue 934: eight GB200 are too small.
    with pytest.raises(PairError, match="weights alone"):
        planned(KIMI_K3, K3_DRAFT, "8xB200", context=65536)


def test_qwen_27b_on_two_cards_of_24_gb() -> None:
    plan = planned({**QWEN_27B, **INT4}, QWEN_DRAFT, "2xRTX3090", kv_bits=8)
    memory = plan.loads[0].memory
    # noonghunna/club-3090 pull request 1056: weights and draft 11.6 GiB a card, a pool of 8.65 GiB, 22,292 MiB at most.
    assert near(memory.target_weights + memory.draft_weights, 11.6 * GIB)
    assert near(memory.target_weights + memory.draft_weights + memory.reserved + 8.65 * GIB, 22_292 * 2**20)
    assert memory.fits
    # vllm-project/recipes pull request 810: 14.28 GiB of FP8 weights a card; noonghunna/club-3090 issue 1087: 377,456
    # tokens in 12.26 GiB a card, with the layer for multi-token prediction that we do not count.
    wide = planned({**QWEN_27B, **FP8}, QWEN_DRAFT, "2xRTX5090").loads[0].memory
    assert near(wide.target_weights, 14.28 * GIB)
    assert near(wide.target_cache / 131072, 12.26 * GIB / 377_456)


# ---- targets against models that transformers builds -----------------------------------------------------------------
def llama(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **DENSE, **changes}


QWEN_MOE = {
    "model_type": "qwen3_moe",
    **DENSE,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **DENSE,
    "num_key_value_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "model_type": "qwen3_5_text",
    **DENSE,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "attn_output_gate": True,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    "config",
    [llama(tie_word_embeddings=False), llama(tie_word_embeddings=True), QWEN_MOE, DEEPSEEK, HYBRID],
    ids=["dense", "tied", "experts", "latent", "hybrid"],
)
def test_parameters_are_those_of_the_model(config: dict[str, Any]) -> None:
    import torch
    import transformers

    words = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **words)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    real = {name: value.numel() for name, value in model.named_parameters()}
    shape = read_target_shape({**config, "tie_word_embeddings": built.tie_word_embeddings})
    assert near(shape.dense_params + shape.expert_params, sum(real.values()), 0.003)  # norms and biases are left out
    assert near(shape.weight_bytes, 2 * sum(real.values()), 0.003)
    experts = sum(size for name, size in real.items() if ".experts." in name)
    assert shape.expert_params == experts
    head = real["model.embed_tokens.weight"]
    share = shape.top_k / shape.num_experts if shape.num_experts else 0
    untied = 0 if built.tie_word_embeddings else head
    assert near(shape.active_params, sum(real.values()) - experts - untied + share * experts, 0.003)


def test_caches_and_states_by_hand() -> None:
    dense, latent, hybrid = read_target_shape(llama()), read_target_shape(DEEPSEEK), read_target_shape(HYBRID)
    assert (dense.cached_bytes_per_token, dense.num_kv_heads, dense.state_bytes) == (4 * 2 * 2 * 64 * 2, 2, 0)
    assert (latent.cached_bytes_per_token, latent.num_kv_heads) == (4 * (64 + 16) * 2, 1)
    assert hybrid.cached_bytes_per_token == 2 * 2 * 64 * 2
    inner = 2 * 4 * 32 + 8 * 32
    assert hybrid.state_bytes == 3 * (8 * 32 * 32 * 4 + inner * 3 * 2)
    assert dense.attention_flops_per_pair == 4 * 4 * 8 * 64  # a product with the key and one with the value, 2 each
    assert latent.attention_flops_per_pair == 4 * 2 * 8 * (64 + 16 + 64)


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}, 4.5),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ],
)
def test_bits_of_the_weights(settings: dict[str, Any] | None, bits: float) -> None:
    config = llama(tie_word_embeddings=False) | ({"quantization_config": settings} if settings else {})
    tables = 2 * 4096 * 512
    shape = read_target_shape(config)
    assert shape.weight_bytes == pytest.approx((shape.dense_params - tables) * bits / 8 + tables * 2)


def test_of_a_few_bits_with_experts_only_the_experts_are_small() -> None:
    plain = read_target_shape(QWEN_MOE)
    small = read_target_shape({**QWEN_MOE, "quantization_config": {"quant_method": "mxfp4"}})
    assert small.dense_bytes == plain.dense_bytes and small.expert_bytes == plain.expert_bytes * 4.25 / 16
    assert "only the experts" in small.simplified[0]


def test_a_size_that_is_given_is_kept() -> None:
    shape = read_target_shape({**QWEN_27B, "quantization_config": {"quant_method": "exl3"}}, 18.24e9)
    assert shape.weight_bytes == pytest.approx(18.24e9) and shape.quantisation == "as given"
    assert shape.active_params == read_target_shape(QWEN_27B).active_params


def test_what_a_config_does_not_tell_is_said() -> None:
    with pytest.raises(ConfigError, match="its bits are not known; give --target-gb"):
        read_target_shape({**llama(), "quantization_config": {"quant_method": "exl3"}})
    with pytest.raises(ConfigError, match="hidden_size is missing"):
        read_target_shape({})
    with pytest.raises(ConfigError, match="intermediate_size is missing"):
        read_target_shape({key: value for key, value in llama().items() if key != "intermediate_size"})
    with pytest.raises(ConfigError, match=r"layer_types hold .*mamba"):
        read_target_shape({**llama(), "layer_types": ["mamba"] * 4})
    bare = copy.deepcopy(QWEN_27B)
    bare["vision_config"] = {"vt_hidden_size": 1152}
    told = read_target_shape(bare)
    assert told.not_counted == ("the vision tower", "layers for multi-token prediction") and told.vision_bytes == 0
    assert (
        "sliding layers"
        in read_target_shape(llama(layer_types=["sliding_attention", "full_attention"] * 2)).simplified[0]
    )


# ---- time ------------------------------------------------------------------------------------------------------------
def test_experts_drawn_by_a_block_against_one_position() -> None:
    """384 experts, 8 for each position: a step of 8 positions reads so many times the experts of a step of one."""
    shape = read_target_shape({**QWEN_MOE, "num_experts": 384, "num_experts_per_tok": 8, "mlp_only_layers": []})
    dense = shape.read_bytes(0)
    ratios = [
        (shape.read_bytes(8 * count) - dense) / (shape.read_bytes(count) - dense) for count in (1, 4, 8, 16, 32, 64)
    ]
    assert [round(ratio, 1) for ratio in ratios[:5]] == [7.4, 6.1, 4.8, 3.3, 2.0] and round(ratios[5], 2) == 1.35


def test_a_dense_target_is_free_to_verify_until_the_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 on an H200: M* = 0.6 F / (0.8 BW) = 155 positions; 8 each cost 1.66 times at 32 requests, 3.3 at 64."""
    from blockdraft.inspection import plan as planning

    monkeypatch.setattr(planning, "LAYER_FLOOR_S", 0.0)
    monkeypatch.setattr(planning, "STEP_FLOOR_S", 0.0)
    sizes = {**DENSE, "num_hidden_layers": 400, "num_attention_heads": 8, "tie_word_embeddings": True}
    plan = planned(sizes, QWEN_DRAFT, "1xH200", context=1, concurrency=(1, 16, 32, 64), survival=(1.0,) * 7)
    maker = planning._Maker(
        DRAFTS[QWEN_DRAFT].read(), read_target_shape(sizes), (), GPUS["H200"], 1, (1.0,) * 7, 16, None
    )
    ratios = {count: maker._target_s(1, count, 8) / maker._target_s(1, count, 1) for count in (1, 16, 32, 64)}
    assert ratios[1] < 1.02 and ratios[16] < 1.02
    assert near(ratios[32], 1.66, 0.02) and near(ratios[64], 3.3, 0.02)
    assert plan.loads[0].width == 8


def test_speculation_pays_less_the_more_requests_and_stops() -> None:
    plan = planned(QWEN_27B, QWEN_DRAFT, "8xH200", context=1024, concurrency=(1, 8, 64, 512, 1024), tensor_parallel=8,
                   survival=read_survival("1.6", 7))  # fmt: skip
    gains = [load.speed_up for load in plan.loads]
    widths = [load.width for load in plan.loads]
    assert gains == sorted(gains, reverse=True) and widths == sorted(widths, reverse=True)
    assert gains[0] > 1 and widths[-1] == 1 and gains[-1] == 1.0 and plan.loads[-1].full_speed_up < 1
    assert plan.stops_at == next(load.num_requests for load in plan.loads if load.width == 1 and load.memory.fits)


def test_measured_costs_replace_the_roofline(tmp_path: Path) -> None:
    place = tmp_path / "costs.json"
    place.write_text(json.dumps({"target": [[1, 0.010], [8, 0.012], [64, 0.050]], "draft": [[1, 0.001], [8, 0.002]]}))
    plan = planned(
        QWEN_27B, QWEN_DRAFT, "1xH200", context=1024, concurrency=(1, 8), costs=read_costs(place),
        survival=(0.5, 0.25, 0.125, 0.0625, 0.03, 0.015, 0.0075),
    )  # fmt: skip
    one, eight = plan.loads
    # By hand, 200 us of bookkeeping a step: widths 2 ... 8 of one request, then of eight.
    target, lengths = {1: 10.0, 8: 12.0, 64: 50.0}, [1.5, 1.75, 1.875, 1.9375, 1.9675, 1.9825, 1.99]
    steps = [10 + 2 * (width - 1) / 7 + 1 + 0.2 for width in range(2, 9)]
    best = max(range(7), key=lambda index: lengths[index] / steps[index])
    assert one.width == best + 2 and one.step_s == pytest.approx(steps[best] / 1e3)
    assert one.speed_up == pytest.approx(lengths[best] * (target[1] + 0.2) / steps[best])
    assert one.tok_per_s == pytest.approx(lengths[best] / steps[best] * 1e3)
    assert eight.plain_s == pytest.approx(0.0122) and eight.width == 1 and eight.speed_up == 1.0
    assert plan.stops_at == 8 and eight.full_speed_up == pytest.approx(1.99 * 12.2 / (50 + 2 + 0.2))
    assert any("as measured" in line for line in plan.assumptions)


def test_replicas_and_price() -> None:
    plan = planned(
        QWEN_27B, QWEN_DRAFT, "8xH200", context=4096, tensor_parallel=None, usd_per_gpu_hour=3.6, concurrency=(4,)
    )
    [load] = plan.loads
    assert (plan.tensor_parallel, plan.num_replicas) == (1, 8)
    assert plan.usd_per_million(load) == pytest.approx(3.6 / 3600 / load.tok_per_s * 1e6)
    assert load.tok_per_s == pytest.approx(4 * load.tok_per_s_each) == pytest.approx(4 * load.length / load.step_s)
    none = planned(QWEN_27B, QWEN_DRAFT, "8xH200", context=4096)
    assert none.usd_per_million(none.loads[0]) is None
    fewest = planned({**QWEN_27B}, QWEN_DRAFT, "8xRTX4090", tensor_parallel=None, context=4096)
    assert fewest.tensor_parallel == 4  # 54 GB of weights on cards of 26


def test_the_most_requests_fit_and_one_more_does_not() -> None:
    plan = planned(QWEN_27B, QWEN_DRAFT, "2xH100", context=16384)
    most = plan.max_requests
    around = planned(QWEN_27B, QWEN_DRAFT, "2xH100", context=16384, concurrency=(most, most + 1)).loads
    assert most > 1 and around[0].memory.fits and not around[1].memory.fits
    half = planned(QWEN_27B, QWEN_DRAFT, "2xH100", context=16384, kv_bits=8)
    assert half.loads[0].memory.target_cache == plan.loads[0].memory.target_cache / 2 and half.max_requests > most


def test_heads_are_split_and_latents_are_not() -> None:
    by_split = [planned(QWEN_27B, QWEN_DRAFT, "8xH200", tensor_parallel=split).loads[0].memory for split in (2, 4, 8)]
    assert by_split[0].target_cache == 2 * by_split[1].target_cache == 2 * by_split[2].target_cache  # 4 heads
    latent = [planned(KIMI_K3, K3_DRAFT, f"{count}xB300").loads[0].memory.target_cache for count in (8, 16)]
    assert latent[0] == latent[1]


# ---- words -----------------------------------------------------------------------------------------------------------
def test_words_are_read() -> None:
    assert read_concurrency("1..256") == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert read_concurrency("3..20") == (3, 4, 8, 16, 20) and read_concurrency("8,1") == (1, 8)
    assert read_length("128k") == 131072 and read_length("4096") == 4096 and read_length("1M") == 2**20
    assert read_survival("0.9,0.5,0.5", 3) == (0.9, 0.5, 0.5)
    assert sum(read_survival("3.0", 7)) == pytest.approx(2.0) and read_survival("8", 7) == pytest.approx((1.0,) * 7)
    assert read_gpus("8xH200") == (8, GPUS["H200"]) and read_gpus("2 x rtx 3090") == (2, GPUS["RTX3090"])
    assert all(gpu.source for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (read_concurrency, "1..x", "1..256, or 1,8,64"),
        (read_concurrency, "0,4", "at least 1"),
        (read_concurrency, "8..2", "the second number must not be below the first"),
        (read_length, "128q", "as 131072 or 128k"),
        (read_length, "k", "as 131072 or 128k"),
        (read_length, "0", "as 131072 or 128k"),
        (read_gpus, "H200", "a count and a kind"),
        (read_gpus, "0xH200", "a count and a kind"),
        (read_gpus, "8xTPU", "known are A100"),
        (lambda text: read_survival(text, 7), "lots", "tokens per step, or one share"),
        (lambda text: read_survival(text, 7), "nan", "tokens per step are 1 to 8"),
        (lambda text: read_survival(text, 7), "9", "tokens per step are 1 to 8"),
        (lambda text: read_survival(text, 7), "0.9,0.8", "2 positions: this draft proposes 7"),
        (lambda text: read_survival(text, 2), "0.8,0.9", "never rise"),
        (lambda text: read_survival(text, 2), "0.8,nan", "never rise"),
    ],
)
def test_words_that_make_no_sense(read: Callable[[str], object], text: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no JSON"),
        ('{"target": [[1, 1], [2, 2]]}', "exactly target and draft"),
        ('{"target": [[1, 1]], "draft": [[1, 1], [2, 2]]}', "target needs at least two pairs"),
        ('{"target": [[1, 1], [1, 2]], "draft": [[1, 1], [2, 2]]}', "counts of target must rise"),
        ('{"target": [[1, 1], [2, 0]], "draft": [[1, 1], [2, 2]]}', "seconds be above 0"),
        ('{"target": [[1, 1], [2, NaN]], "draft": [[1, 1], [2, 2]]}', "seconds be above 0"),
        ('{"target": [[1, 1], ["a", 2]], "draft": [[1, 1], [2, 2]]}', "something else than pairs"),
        ('{"target": [[1, 1], 2], "draft": [[1, 1], [2, 2]]}', "something else than pairs"),
    ],
)
def test_costs_that_make_no_sense(tmp_path: Path, text: str, words: str) -> None:
    place = tmp_path / "costs.json"
    place.write_text(text)
    with pytest.raises(CheckpointError, match=words):
        read_costs(place)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_costs(tmp_path / "none")


def test_a_split_that_does_not_divide() -> None:
    for split in (3, 0):
        with pytest.raises(RequestError, match=f"--tp is {split}: it must divide the 8 GPUs"):
            planned(QWEN_27B, QWEN_DRAFT, "8xH200", tensor_parallel=split)
    with pytest.raises(
        PairError, match=r"one request of 1048576 positions needs .* a shorter --context or --kv-bits 8"
    ):
        planned(QWEN_27B, QWEN_DRAFT, "1xRTX5090", given_bytes=15e9, context=2**20)


# ---- the command -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("plan")
    draft, target = place / "draft", place / "target"
    for folder, config in ((draft, DRAFTS[QWEN_DRAFT].config), (target, {**QWEN_27B, **INT4})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    return str(draft), str(target)


def asked(folders: tuple[str, str], *words: str) -> list[str]:
    return ["inspect", folders[0], "--target", folders[1], "--plan", *words]


def test_the_command_prints_a_plan(folders: tuple[str, str]) -> None:
    words = asked(
        folders, "--gpus", "2xRTX3090", "--tp", "2", "--context", "16k", "--acceptance", "3.35", "--price", "0.2"
    )
    ran = run_cli(*words, "--concurrency", "1..256")
    shown = ran.out
    assert ran.code == 0
    assert shown.startswith("2 x RTX3090: 1 replica of 2 GPUs, context 16384, draft's width 8\n")
    for part in ("target weights", "draft cache", "fits", "speed-up", "USD / M tokens", "assumed", "speculation pays"):
        assert part in shown
    assert re.search(r"^ +256 +\d+\.\d no( +-){11}$", shown, re.MULTILINE)
    plan = json.loads(run_cli(*words, "--json", "--concurrency", "1,256").out)
    assert plan["schema"] == 1 and [load["fits"] for load in plan["loads"]] == [True, False]
    assert plan["loads"][0]["usd_per_million_tokens"] > 0 and plan["survival"][0] < 1


def test_the_card_tells_what_is_accepted_by_a_draft_of_a_known_name(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from blockdraft.engines import assemble

    places = {"z-lab/Qwen3.8-27B-DFlash2": Path(folders[0])}
    locate = assemble.locate
    monkeypatch.setattr(assemble, "locate", lambda name, **words: places.get(name) or locate(name, **words))
    words = ["inspect", "z-lab/Qwen3.8-27B-DFlash2", "--target", folders[1], "--plan", "--gpus", "1xH200"]
    assert "acceptance: 5.46 tokens a step, the mean of GSM8K in its card" in run_cli(*words).out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--plan needs --target and --gpus"),
        (["--gpus", "1xH200"], "what {draft} accepts is not known: give --acceptance"),
        (["--gpus", "1xH200", "--acceptance", "3", "--kv-bits", "4"], "--kv-bits is 4: 16 or 8"),
        (["--gpus", "1xH200", "--acceptance", "3", "--price", "-1"], "--price is -1: it must be above 0"),
        (["--gpus", "1xH200", "--acceptance", "3", "--target-gb", "0"], "--target-gb is 0: it must be above 0"),
    ],
)
def test_the_command_refuses(folders: tuple[str, str], words: list[str], message: str) -> None:
    ran = run_cli(*asked(folders, *words))
    assert ran.code == 2 and message.format(draft=folders[0]) in ran.err


def test_options_of_a_plan_without_plan_are_refused(folders: tuple[str, str]) -> None:
    ran = run_cli("inspect", folders[0], "--gpus", "8xH200", "--kv-bits", "8")
    assert ran.code == 2 and "--gpus, --kv-bits without --plan" in ran.err


def test_no_torch_for_a_plan(folders: tuple[str, str]) -> None:
    words = asked(folders, "--gpus", "1xH200", "--acceptance", "3")
    code = "\n".join(
        [
            "import sys",
            "from blockdraft.cli import main",
            f"sys.argv = ['blockdraft', *{words!r}]",
            "try:",
            "    main()",
            "except SystemExit as end:",
            "    sys.exit(end.code or ('torch' in sys.modules or 'transformers' in sys.modules))",
        ]
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and "assumed" in ran.stdout, ran.stderr


def test_a_pair_that_does_not_fit_has_no_plan(folders: tuple[str, str], tmp_path: Path) -> None:
    from blockdraft.engines import read_fitting

    (tmp_path / "config.json").write_text(json.dumps(llama(eos_token_id=0, max_position_embeddings=4096)))
    with pytest.raises(BlockdraftError, match="does not fit this target"):
        read_fitting(folders[0], str(tmp_path), allow_mask_is_eos=False, block_size=None)


def test_a_plan_is_a_value() -> None:
    plan = planned(QWEN_27B, QWEN_DRAFT, "8xH200")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.context = 1  # type: ignore[misc]
