"""Every key of a z-lab config.json, and what it may say.

Owns: where a key may stand, which keys mean nothing to a draft, and the settings of families that are not
supported, which are accepted only at the value that switches them off. Must not know: how keys are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ordinary Hugging Face keys without a meaning for the maths of a draft.
IRRELEVANT = _words(
    "transformers_version dtype torch_dtype bos_token_id eos_token_id pad_token_id unk_token_id auto_map "
    "attention_dropout initializer_range use_cache max_window_layers num_anchors tie_word_embeddings "
    "_name_or_path return_dict output_hidden_states output_attentions chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id problem_type pretraining_tp torchscript _attn_implementation "
    "_attn_implementation_autoset confidence_head_alpha"
)
_TOP = _words(
    "architectures model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps vocab_size max_position_embeddings attention_bias hidden_act "
    "layer_types rope_theta rope_parameters rope_scaling dflash_config dspine_config"
)
# Fields of the draft itself: nested, at top level, or at both if equal.
_BOTH = _words(
    "block_size mask_token_id target_layer_ids num_target_layers target_hidden_size conv_kernel_size "
    "conv_group_size selector_rank selector_top_k input_embedding_scale output_multiplier "
    "final_logit_softcapping is_causal sliding_window use_sliding_window fc_norm aux_hidden_stream attention_mode "
    "attention_modes q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave "
    "mla_rope_interleaved rope_is_neox_style is_neox_style sample_from_anchor query_zero_predicts_next markov_rank "
    "markov_head_type enable_confidence_head confidence_head_with_markov projector_type"
)
_NESTED = _words("causal use_swa swa_window_size confidence_head_alpha")


def _is_off(value: object) -> bool:
    return value is None or value is False


def is_one(value: object) -> bool:
    return value is None or (not isinstance(value, bool) and value == 1)


def is_on(value: object) -> bool:
    return value is None or value is True


# Settings that change the maths of other families: accepted only at the value that switches them off.
_Neutral = tuple[Callable[[object], bool], str]
_OFF: _Neutral = (_is_off, "false or absent")
_ABSENT: _Neutral = (lambda value: value is None, "absent")
_ONE: _Neutral = (is_one, "1 or absent")
NEUTRAL: Mapping[str, _Neutral] = {
    "attention_sink_bias": _OFF,
    "add_swa_attention_sink_bias": _OFF,
    "attention_value_scale": _ONE,
    "logit_scale": (is_one, "1 or absent, use output_multiplier"),
    "partial_rotary_factor": (is_one, "1 or absent, every dimension of a head is rotated"),
    "mla_use_nope": (_is_off, "false or absent, latent attention without positions is not supported"),
    "mla_use_output_gate": (_is_off, "false or absent, a gate on latent attention is not supported"),
    "mla_use_qk_norm": (_is_off, "false or absent, norms per head in latent attention are not supported"),
    "mlp_bias": _OFF,
    "quantization_config": (lambda value: value is None, "absent, quantised drafts are not supported"),
    "aux_hidden_state_layer_ids": (
        lambda value: value is None,
        "absent: this is the speculators spelling, whose ids are one higher than target_layer_ids",
    ),
    "target_num_hidden_layers": (lambda value: value is None, "absent: write num_target_layers"),
    "markov_state_dim": _ABSENT,
}
KNOWN_TOP = IRRELEVANT | _TOP | _BOTH | frozenset(NEUTRAL) | {"draft_vocab_size", "mask_token"}
KNOWN_NESTED = _BOTH | _NESTED | frozenset(NEUTRAL) | {"draft_vocab_size", "mask_token"}
