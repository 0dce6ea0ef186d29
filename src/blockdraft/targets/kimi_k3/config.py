"""What a Kimi-K3 config.json says of the text model, every field of it checked.

Owns: the published names of the settings, which layer is of which kind. Knows no torch and no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.config import require_bool, require_float, require_int
from blockdraft.errors import ConfigError
from blockdraft.formats._keys import known_only, neutral_only, object_of, off, requires, words

__all__ = ["KdaConfig", "KimiK3Config", "MoeConfig"]

_SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings"
    " attn_res_block_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
)
_MOE_SIZES = "num_experts num_experts_per_token num_shared_experts moe_intermediate_size routed_expert_hidden_size"
_NUMBERS = "rms_norm_eps activation_situ_beta activation_situ_linear_beta routed_scaling_factor"
# Settings of other models of this family: here they have to be what Kimi-K3 is.
_FIXED = {
    "hidden_act": off("situ"),
    "mla_use_nope": off(True),
    "mla_use_output_gate": off(True),
    "latent_moe_use_norm": off(True),
    "moe_router_activation_func": off("sigmoid"),
    "topk_method": off("noaux_tc"),
    "num_expert_group": off(1),
    "topk_group": off(1),
    "moe_layer_freq": off(1),
    "num_nextn_predict_layers": off(0),
    "tie_word_embeddings": off(False),
    "attention_bias": off(False),
}
_STATED = "hidden_act mla_use_nope mla_use_output_gate latent_moe_use_norm moe_router_activation_func"
# Settings that change nothing in this computation: there is no rotation, no dropout, and one group of experts.
_INERT = words(
    "architectures auto_map model_type dtype torch_dtype transformers_version initializer_range use_cache"
    " bos_token_id eos_token_id pad_token_id unk_token_id head_dim model_max_length rope_theta rope_scaling"
    " rope_parameters attention_dropout use_grouped_topk output_router_logits aux_loss_alpha seq_aux pretraining_tp"
    " layer_types layers_block_type _attn_implementation attn_implementation"
    # What older releases of transformers write into every nested config.
    " _name_or_path add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward"
    " cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping"
    " encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id"
    " forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length"
    " no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states"
    " output_scores prefix problem_type pruned_heads remove_invalid_values repetition_penalty return_dict"
    " return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss"
    " tie_encoder_decoder tokenizer_class top_k top_p torchscript typical_p use_bfloat16"
)
_KNOWN = (
    words(f"{_SIZES} {_MOE_SIZES} {_NUMBERS}")
    | words("num_key_value_heads moe_renormalize first_k_dense_replace linear_attn_config quantization_config")
    | _FIXED.keys()
    | _INERT
)
_KDA_KEYS = words(
    "kda_layers full_attn_layers num_heads head_dim short_conv_kernel_size use_full_rank_gate gate_lower_bound"
)
_TEXT_KEY = "text_config"
MXFP4_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class KdaConfig:
    """The delta attention layers: heads, the width of their keys and values, the short convolution, the bounded gate.

    `layers` are 0-based; all others attend to everything.
    """

    layers: frozenset[int]
    num_heads: int
    head_dim: int
    kernel_size: int
    lower_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The expert layers, which are all but the first `num_dense_layers`. Experts work on a latent of their own width.

    `is_packed`: the experts are stored in MXFP4, 32 weights to a scale.
    """

    num_dense_layers: int
    num_experts: int
    top_k: int
    num_shared: int
    intermediate_size: int
    latent_size: int
    renormalises: bool
    scale: float
    is_packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config:
    """The text model. `block_size` is the number of layers of one block of attention residuals."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_length: int
    block_size: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    situ_beta: float
    situ_linear_beta: float
    kda: KdaConfig
    moe: MoeConfig

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> KimiK3Config:
        """The meaning of a config.json. Raises ConfigError for a setting that is missing, unknown or not supported."""
        text = raw.get(_TEXT_KEY, raw)
        if not isinstance(text, Mapping):
            raise ConfigError(f"{_TEXT_KEY} is {text!r}: it must be an object")
        known_only("in the text part", text, _KNOWN)
        for name in (*_SIZES.split(), *_MOE_SIZES.split(), *_NUMBERS.split(), *_STATED.split()):
            requires(text, name, "a Kimi-K3 text model is not defined without it")
        neutral_only(text, _FIXED)
        size = {name: require_int(name, text[name]) for name in (*_SIZES.split(), *_MOE_SIZES.split())}
        number = {name: require_float(name, text[name]) for name in _NUMBERS.split()}
        num_heads, kv_heads = size["num_attention_heads"], text.get("num_key_value_heads")
        if kv_heads not in (None, num_heads):
            raise ConfigError(f"num_key_value_heads is {kv_heads!r}: it must be num_attention_heads, {num_heads}")
        quantization = text.get("quantization_config") or raw.get("quantization_config")
        return cls(
            vocab_size=size["vocab_size"],
            hidden_size=size["hidden_size"],
            intermediate_size=size["intermediate_size"],
            num_layers=size["num_hidden_layers"],
            num_heads=num_heads,
            max_length=size["max_position_embeddings"],
            block_size=size["attn_res_block_size"],
            q_lora_rank=size["q_lora_rank"],
            kv_lora_rank=size["kv_lora_rank"],
            qk_nope_head_dim=size["qk_nope_head_dim"],
            qk_rope_head_dim=size["qk_rope_head_dim"],
            v_head_dim=size["v_head_dim"],
            rms_norm_eps=number["rms_norm_eps"],
            situ_beta=number["activation_situ_beta"],
            situ_linear_beta=number["activation_situ_linear_beta"],
            kda=_kda_of(object_of(text, "linear_attn_config"), size["num_hidden_layers"]),
            moe=_moe_of(text, size, number["routed_scaling_factor"], is_packed=_is_mxfp4(quantization)),
        )

    @property
    def kda_width(self) -> int:
        return self.kda.num_heads * self.kda.head_dim


def _kda_of(raw: Mapping[str, Any], num_layers: int) -> KdaConfig:
    known_only("in linear_attn_config", raw, _KDA_KEYS)
    for name in _KDA_KEYS:
        requires(raw, name, "linear_attn_config of a Kimi-K3 text model states it")
    if not require_bool("use_full_rank_gate", raw["use_full_rank_gate"]):
        raise ConfigError("use_full_rank_gate is False: supported is True")
    lower = require_float("gate_lower_bound", raw["gate_lower_bound"], above=None)
    if lower >= 0.0:
        raise ConfigError(f"gate_lower_bound is {lower:g}: it must be below 0, the logarithm of a decay")
    listed: list[int] = []
    for name in ("kda_layers", "full_attn_layers"):
        if not isinstance(raw[name], list):
            raise ConfigError(f"{name} is {raw[name]!r}: it must be a list of layers, counted from 1")
        listed += [require_int(name, layer) for layer in raw[name]]
    if sorted(listed) != list(range(1, num_layers + 1)):
        raise ConfigError(f"kda_layers and full_attn_layers must name every layer from 1 to {num_layers} once")
    return KdaConfig(
        layers=frozenset(layer - 1 for layer in raw["kda_layers"]),
        num_heads=require_int("num_heads", raw["num_heads"]),
        head_dim=require_int("head_dim", raw["head_dim"]),
        kernel_size=require_int("short_conv_kernel_size", raw["short_conv_kernel_size"]),
        lower_bound=lower,
    )


def _moe_of(text: Mapping[str, Any], size: dict[str, int], scale: float, *, is_packed: bool) -> MoeConfig:
    dense = require_int(
        "first_k_dense_replace", requires(text, "first_k_dense_replace", "layers without experts"), least=0
    )
    if size["num_experts_per_token"] > size["num_experts"]:
        raise ConfigError(
            f"num_experts_per_token is {size['num_experts_per_token']}: it must not exceed num_experts,"
            f" {size['num_experts']}"
        )
    widths = math.gcd(size["moe_intermediate_size"], size["routed_expert_hidden_size"])
    if is_packed and widths % MXFP4_GROUP:
        raise ConfigError(
            f"moe_intermediate_size {size['moe_intermediate_size']} and routed_expert_hidden_size"
            f" {size['routed_expert_hidden_size']} must be multiples of {MXFP4_GROUP} where experts are in MXFP4"
        )
    return MoeConfig(
        num_dense_layers=dense,
        num_experts=size["num_experts"],
        top_k=size["num_experts_per_token"],
        num_shared=size["num_shared_experts"],
        intermediate_size=size["moe_intermediate_size"],
        latent_size=size["routed_expert_hidden_size"],
        renormalises=require_bool("moe_renormalize", requires(text, "moe_renormalize", "true or false")),
        scale=scale,
        is_packed=is_packed,
    )


def _is_mxfp4(quantization: object) -> bool:
    """Whether the experts are stored in MXFP4. Raises ConfigError for any other way of storing them."""
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping):
        raise ConfigError(f"quantization_config is {quantization!r}: it must be an object")
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    if quantization.get("format") != "mxfp4-pack-quantized" or any(
        (entry.get("num_bits", 4), entry.get("group_size", MXFP4_GROUP)) != (4, MXFP4_GROUP) for entry in weights
    ):
        raise ConfigError(
            f"quantization_config has the format {quantization.get('format')!r}: supported is 'mxfp4-pack-quantized'"
            f" with 4 bits and groups of {MXFP4_GROUP}"
        )
    return True
