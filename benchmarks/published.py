"""Published drafters: what is known of their config.json, and from where.

No config.json is fetched here. A key that no source gives stands in `assumed`: its value is the family's habit, so that
the rest can be read and counted. Sizes that depend on an assumed key say so in the table of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.config import DraftConfig
from blockdraft.formats import DIALECTS

_HABITS: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
}
_V2_PARTS: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
EMBEDDING, HEAD, MASK = "embed_tokens.weight", "lm_head.weight", "mask_embedding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One drafter that people can download. `config` None: nothing about it is public but its name.

    `own`: optional tensors that its file carries. `assumed`: keys that no source gives. For comparison with our count,
    `own` included: `num_parameters` and `num_tensors` as its card, the reference's class or another loader has them,
    `billions` of parameters and `gigabytes` of the file as its card or page rounds them.
    """

    name: str
    target: str
    source: str
    config: Mapping[str, Any] | None = None
    dialect: str = "z-lab"
    own: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    num_parameters: int | None = None
    billions: str | None = None
    gigabytes: str | None = None
    num_tensors: int | None = None

    def read(self) -> DraftConfig:
        """What the package makes of the config."""
        assert self.config is not None
        return DIALECTS[self.dialect].config_from_dict(self.config)


def _gqa(
    *,
    hidden: int,
    mlp: int,
    layers: int,
    vocab: int,
    target_layers: int,
    taps: list[int],
    mask: int,
    block: int,
    theta: float,
    length: int,
    heads: int = 32,
    kv_heads: int = 8,
    window: int | None = None,
    full: int = 0,
    v2: bool = False,
    nested: Mapping[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A config.json of the z-lab layout on grouped-query attention; the last `full` layers see everything."""
    kinds = ["full_attention"] * layers
    if window is not None:
        kinds[: layers - full] = ["sliding_attention"] * (layers - full)
    place = {"block_size": block, "mask_token_id": mask, "target_layer_ids": taps}
    return {
        "architectures": ["DFlash2DraftModel" if v2 else "DFlashDraftModel"],
        **_HABITS,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": layers,
        "num_target_layers": target_layers,
        **({"is_causal": False} if v2 else {}),
        "block_size": block,
        "dflash_config": {**place, **(_V2_PARTS if v2 else {}), **(nested or {})},
        **top,
    }


QWEN_V2 = _gqa(
    hidden=5120, mlp=17408, layers=5, vocab=248320, target_layers=64, taps=[5, 19, 33, 47, 61], mask=248070, block=8,
    theta=1e7, length=262144, window=2048, v2=True,
)  # fmt: skip
QWEN36_V1 = _gqa(
    hidden=5120, mlp=17408, layers=5, vocab=248320, target_layers=64, taps=[1, 16, 31, 46, 61], mask=248070, block=16,
    theta=1e7, length=262144, window=2048, full=1,
)  # fmt: skip
QWEN3_8B = _gqa(
    hidden=4096, mlp=12288, layers=5, vocab=151936, target_layers=36, taps=[1, 9, 17, 25, 33], mask=151669, block=16,
    theta=1e6, length=40960,
)  # fmt: skip
QWEN3_4B = _gqa(
    hidden=2560, mlp=9728, layers=5, vocab=151936, target_layers=36, taps=[1, 9, 17, 25, 33], mask=151669, block=16,
    theta=1e6, length=40960,
)  # fmt: skip
GEMMA_V1 = _gqa(
    hidden=5376, mlp=10752, layers=5, vocab=262144, target_layers=60, taps=[1, 12, 23, 35, 46, 57], mask=4, block=16,
    theta=1e6, length=262144, heads=64, window=2048, full=1,
)  # fmt: skip
LLAMA_V1 = _gqa(
    hidden=4096, mlp=14336, layers=5, vocab=128256, target_layers=32, taps=[1, 8, 15, 22, 29], mask=128002, block=10,
    theta=5e5, length=131072, rms_norm_eps=1e-05,
    rope_parameters={
        "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
GPT_OSS_V1 = _gqa(
    hidden=2880, mlp=7680, layers=8, vocab=201088, target_layers=24, taps=[1, 6, 11, 16, 21], mask=200000, block=8,
    theta=150000.0, length=131072,
)  # fmt: skip
KIMI_V1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": 61,
    "dflash_config": {"block_size": 8, "mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}
K3_MODAL_V1 = _gqa(
    hidden=7168, mlp=18432, layers=6, vocab=163840, target_layers=93, taps=[1, 19, 37, 54, 72, 90], mask=163592,
    block=16, theta=50000.0, length=262144, heads=64, nested={"aux_hidden_stream": "attn_res"},
)  # fmt: skip
MUSE_V2 = _gqa(
    hidden=6656, mlp=19968, layers=5, vocab=202048, target_layers=52, taps=[1, 13, 25, 37, 49], mask=201818, block=8,
    theta=5e5, length=131072, window=2048, v2=True,
    nested={"output_multiplier": 0.196, "final_logit_softcapping": 20.0},
)  # fmt: skip
GLM_FLASH_OWN_V2 = _gqa(
    hidden=4096, mlp=12288, layers=8, vocab=154880, target_layers=45, taps=[5, 9, 14, 19, 24, 28, 33, 38, 42],
    mask=154856, block=8, theta=1e6, length=131072, v2=True,
)  # fmt: skip
GLM_FLASH_V2 = _gqa(
    hidden=4096, mlp=12288, layers=5, vocab=154880, target_layers=45, taps=[5, 14, 24, 33, 42], mask=154856, block=8,
    theta=1e6, length=131072, window=2048, v2=True,
)  # fmt: skip
GLM_V2 = _gqa(
    hidden=6144, mlp=12288, layers=5, vocab=154880, target_layers=78, taps=[1, 20, 38, 56, 75], mask=154856, block=8,
    theta=1e6, length=131072, window=2048, v2=True,
)  # fmt: skip
FLASH_NEXT_V2 = _gqa(
    hidden=2560, mlp=8704, layers=6, vocab=248320, target_layers=48, taps=[1, 7, 13, 20, 26, 33, 39, 46], mask=248077,
    block=16, theta=1e7, length=262144, heads=20, kv_heads=4, window=4096, full=1, v2=True,
)  # fmt: skip
FLASH_NEXT_V1 = _gqa(
    hidden=2560, mlp=8704, layers=6, vocab=248320, target_layers=48, taps=[1, 7, 13, 20, 26, 33, 39, 46], mask=248077,
    block=16, theta=1e7, length=262144, heads=20, kv_heads=4, window=4096, full=1, is_causal=False,
)  # fmt: skip
# lightseekorg/kimi-k3-dflash2, the revision of six layers.
K3_SIX_LAYERS: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "num_target_layers": 93,
    "fc_norm": False,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "is_causal": False,
    "use_sliding_window": True,
    "sliding_window": 4096,
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
    "tie_word_embeddings": False,
    "dflash_config": {
        "attention_mode": "mla",
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 163592,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": [19, 37, 54, 66, 78, 90],
    },
}
# The same, the revision of five layers.
K3_FIVE_LAYERS: dict[str, Any] = {
    **K3_SIX_LAYERS,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "dflash_config": {**K3_SIX_LAYERS["dflash_config"], "target_layer_ids": [19, 37, 66, 78, 90]},
}
# RadixArk/Kimi-K3.1-Dflash2-Preview as its card describes it: heads, windows, causal blocks, 32 candidates.
K31: dict[str, Any] = {
    **K3_SIX_LAYERS,
    "num_hidden_layers": 5,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "layer_types": ["sliding_attention"] * 5,
    "is_causal": True,
    "sliding_window": 1024,
    "dflash_config": {**K3_SIX_LAYERS["dflash_config"], "selector_top_k": 32},
}
# DeepSpec's layout: every key at top level, rows that predict from the anchor.
DSPARK_8B: dict[str, Any] = {
    **{key: value for key, value in QWEN3_8B.items() if key not in ("architectures", "dflash_config")},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_anchors": 512,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
K3_DSPARK: dict[str, Any] = {
    **{key: value for key, value in K3_FIVE_LAYERS.items() if key not in ("dflash_config", "sliding_window")},
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "num_target_layers": 5,
    "target_num_hidden_layers": 93,
    "target_hidden_size": 7168,
    "target_layer_ids": [7, 31, 47, 63, 87],
    "block_size": 7,
    "mask_token_id": 163837,
    "fc_norm": True,
    "aux_hidden_stream": "attn_res",
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPINE_27B: dict[str, Any] = {
    **_gqa(
        hidden=5120, mlp=17408, layers=5, vocab=248320, target_layers=64, taps=[5, 19, 33, 47, 61], mask=248070,
        block=16, theta=1e7, length=262144, is_causal=True,
    ),
    "architectures": ["DSpineDraftModel"],
    "dspine_config": {"transfer_rank": 1024, "message_size": 512, "top_k": 16},
}  # fmt: skip
# Its vocabulary and its target's layers are the target's: its own file states neither.
MUSE_ASSISTANT: dict[str, Any] = {
    **{key: value for key, value in MUSE_V2.items() if key not in ("dflash_config", "max_window_layers", "is_causal")},
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}

PUBLISHED: tuple[Published, ...] = (
    Published(
        name="z-lab/Qwen3.8-27B-DFlash2",
        target="Qwen3.8-27B",
        config=QWEN_V2,
        source="a training recipe that reproduces it, two ports; counts of the reference's class",
        assumed=("rope_theta", "max_position_embeddings"),
        num_parameters=1_924_404_480,
        gigabytes="3.85",
        num_tensors=81,
    ),
    Published(
        name="z-lab/Muse-Glimmer-30B-DFlash2",
        target="Muse-Glimmer-30B",
        config=MUSE_V2,
        source="the reference's test fixture, the target's sizes",
        assumed=("num_hidden_layers", "num_attention_heads", "target_layer_ids", "block_size", "windows", "rope_theta"),
        billions="3",
    ),
    Published(
        name="z-lab/GLM-5.3-Flash-DFlash2",
        target="GLM-5.3-Flash",
        config=GLM_FLASH_V2,
        source='its taps; the sizes of the third-party one',
        assumed=(
            "num_hidden_layers", "num_attention_heads", "intermediate_size", "block_size", "windows", "rope_theta",
        ),
        billions="1",
    ),
    Published(
        name="canada-quant/GLM-5.3-Flash-DFlash2-G",
        target="GLM-5.3-Flash",
        config=GLM_FLASH_OWN_V2,
        own=(EMBEDDING, HEAD, MASK),
        source="its card",
        assumed=("rope_theta", "max_position_embeddings"),
        gigabytes="6.22",
    ),
    Published(
        name="z-lab/GLM-5.3-DFlash2",
        target="GLM-5.3",
        config=GLM_V2,
        source='the target\'s sizes',
        assumed=(
            "num_hidden_layers", "num_attention_heads", "intermediate_size", "target_layer_ids", "block_size",
            "windows", "rope_theta",
        ),
        billions="2",
    ),
    Published(
        name="Qwen3.8-Flash-Next DFlash 2",
        target="Qwen3.8-Flash-Next",
        config=FLASH_NEXT_V2,
        source="the checks of another loader (Atlas); it also limits candidates, by selector_vocab_size 248077",
        assumed=("rope_theta", "max_position_embeddings"),
        num_parameters=695_497_216,
        num_tensors=96,
    ),
    Published(name="Flint-DFlash2", target="Flint", source="only its name"),
    Published(
        name="lightseekorg/kimi-k3-dflash2, 6 layers",
        target="Kimi-K3",
        config=K3_SIX_LAYERS,
        own=(EMBEDDING,),
        source="its card, the training config",
        num_tensors=103,
    ),
    Published(
        name="lightseekorg/kimi-k3-dflash2, 5 layers",
        target="Kimi-K3",
        config=K3_FIVE_LAYERS,
        own=(EMBEDDING,),
        source="its card",
        assumed=("mask_token_id",),
        billions="3.69",
    ),
    Published(
        name="RadixArk/Kimi-K3.1-Dflash2-Preview",
        target="Kimi-K3.1-Pro",
        config=K31,
        source="its card; no size depends on what is assumed",
        assumed=("target_layer_ids", "mask_token_id", "rope_theta", "rope_type", "is_causal", "aux_hidden_stream"),
        num_parameters=2_784_811_008,
    ),
    Published(
        name="z-lab/Qwen3.6-27B-DFlash",
        target="Qwen3.6-27B",
        config=QWEN36_V1,
        source="a trainer's config of it; counts of the reference's class",
        num_parameters=1_730_213_120,
        num_tensors=58,
    ),
    Published(
        name="z-lab/Qwen3-8B-DFlash-b16",
        target="Qwen3-8B",
        config=QWEN3_8B,
        source="trainers' configs for the same target",
        assumed=("num_hidden_layers", "rope_theta", "max_position_embeddings"),
    ),
    Published(
        name="z-lab/Qwen3-4B-DFlash-b16",
        target="Qwen3-4B",
        config=QWEN3_4B,
        source="trainers' configs for the same target",
        assumed=("num_hidden_layers", "max_position_embeddings"),
    ),
    Published(
        name="z-lab/Gemma-4-31B-DFlash",
        target="Gemma-4-31B",
        config=GEMMA_V1,
        source="fields quoted from its config",
        assumed=("block_size", "max_position_embeddings"),
    ),
    Published(
        name="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        target="Llama-3.1-8B",
        config=LLAMA_V1,
        source="the target's sizes",
        assumed=(
            "num_hidden_layers", "num_attention_heads", "target_layer_ids", "mask_token_id", "block_size", "rope_type",
        ),
    ),
    Published(
        name="z-lab/gpt-oss-20b-DFlash",
        target="gpt-oss-20b",
        config=GPT_OSS_V1,
        source="the target's sizes",
        assumed=(
            "num_hidden_layers", "num_attention_heads", "intermediate_size", "target_layer_ids", "mask_token_id",
            "block_size", "rope_type",
        ),
    ),
    Published(
        name="z-lab/Kimi-K2.5-DFlash",
        target="Kimi-K2.5",
        config=KIMI_V1,
        source="its card",
        assumed=("block_size", "mask_token_id", "head_dim"),
        billions="3.479",
        num_tensors=69,
    ),
    Published(
        name="modal-labs/Kimi-K3-DFlash",
        target="Kimi-K3",
        config=K3_MODAL_V1,
        source="an engine's log and its capture code",
        assumed=(
            "num_hidden_layers", "num_attention_heads", "intermediate_size", "target_layer_ids", "rope_theta",
            "max_position_embeddings",
        ),
    ),
    Published(
        name="Qwen3.8-Flash-Next DFlash",
        target="Qwen3.8-Flash-Next",
        config=FLASH_NEXT_V1,
        source="the checks of another loader (Atlas)",
        assumed=("windows", "rope_theta", "max_position_embeddings"),
        num_parameters=547_918_336,
        num_tensors=69,
    ),
    Published(
        name="meta-models/Muse-Glimmer-30B-assistant",
        target="Muse-Glimmer-30B",
        config=MUSE_ASSISTANT,
        dialect="transformers",
        source="transformers' class for it; loaders of other engines",
        assumed=("rope_theta", "max_position_embeddings"),
        billions="2.56",
    ),
    Published(
        name="deepseek-ai/dspark_qwen3_8b_block7",
        target="Qwen3-8B",
        config=DSPARK_8B,
        dialect="deepspec",
        own=(EMBEDDING, HEAD),
        source="DeepSpec's code and trainers that start from it",
        assumed=("num_hidden_layers", "rope_theta", "max_position_embeddings"),
    ),
    Published(
        name="lightseekorg/kimi-k3-dspark",
        target="Kimi-K3",
        config=K3_DSPARK,
        dialect="k3-dspark",
        source="fields quoted from its config",
        assumed=("intermediate_size", "markov_head_type", "confidence_head_with_markov"),
    ),
    Published(
        name="tencent/Qwen3.8-27B-DSpine-b16",
        target="Qwen3.8-27B",
        config=DSPINE_27B,
        source="the trainer's code and its name",
        assumed=(
            "num_hidden_layers", "num_attention_heads", "intermediate_size", "target_layer_ids", "mask_token_id",
            "windows", "rope_theta",
        ),
    ),
)  # fmt: skip
