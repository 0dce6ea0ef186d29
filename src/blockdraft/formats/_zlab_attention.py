"""The attention fields of a z-lab config.json, of both kinds, read and written.

Owns: how the kind is told, and which fields belong to which. Must not know: tensors, maths.
"""

from __future__ import annotations

from typing import Any

from blockdraft.config import AttentionConfig, GqaConfig, MlaConfig, require_int
from blockdraft.errors import ConfigError
from blockdraft.formats._zlab_fields import Fields

__all__ = ["attention_from_fields", "attention_to_dict"]

_MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Statements about rotary pairs, and what each says of neighbouring pairs when it is true.
_PAIRS = {"rope_interleave": True, "mla_rope_interleaved": True, "rope_is_neox_style": False, "is_neox_style": False}


def attention_from_fields(fields: Fields, hidden_size: int, num_layers: int) -> AttentionConfig:
    """The attention of every layer. Raises ConfigError for a kind that is unknown, mixed, or given in part."""
    mode = _mode(fields, num_layers)
    num_heads = require_int("num_attention_heads", fields.require_top("num_attention_heads"))
    has_bias = False if fields.top.get("attention_bias") is None else fields.top["attention_bias"]
    _check_pairs(fields, mode)
    if mode == "mla":
        return _latent(fields, num_heads, has_bias)
    given = [name for name in ("q_lora_rank", *_MLA_SIZES) if fields.pick(name) is not None]
    if given:
        raise ConfigError(
            f"{given[0]} is {fields.pick(given[0])!r} and attention_mode is not mla: an MLA draft says attention_mode "
            "'mla' in dflash_config"
        )
    config = _grouped(fields, hidden_size, num_heads, has_bias)
    if mode == "mha" and config.num_kv_heads != num_heads:
        raise ConfigError(
            f"attention_mode is 'mha' and num_key_value_heads is {config.num_kv_heads}: it must be "
            f"num_attention_heads, {num_heads}, or the mode 'gqa'"
        )
    return config


def _mode(fields: Fields, num_layers: int) -> str:
    mode, modes = fields.pick("attention_mode"), fields.pick("attention_modes")
    supported = "supported are 'gqa', 'mha' and 'mla'"
    if modes is not None:
        if not isinstance(modes, list) or len(modes) != num_layers or any(entry != modes[0] for entry in modes):
            raise ConfigError(
                f"attention_modes is {modes!r}: it must name one kind for each of {num_layers} layers, the same for all"
            )
        if mode is not None and mode != modes[0]:
            raise ConfigError(f"attention_mode is {mode!r} and attention_modes is {modes!r}: make them agree")
        mode = modes[0]
    if mode not in (None, "gqa", "mha", "mla"):
        raise ConfigError(f"attention_mode is {mode!r}: {supported}")
    return "gqa" if mode is None else str(mode)


def _check_pairs(fields: Fields, mode: str) -> None:
    """Latent attention turns neighbouring dimensions, grouped queries turn halves; a file may say so."""
    is_neighbouring = mode == "mla"
    for name, meaning in _PAIRS.items():
        value = fields.pick(name)
        if value is not None and (not isinstance(value, bool) or (value == meaning) != is_neighbouring):
            wanted = str(meaning == is_neighbouring).lower()
            pairs = "neighbouring dimensions" if is_neighbouring else "halves of a head"
            raise ConfigError(
                f"{name} is {value!r}: supported is {wanted} or absent, rotary pairs are {pairs} in "
                f"{'an MLA' if is_neighbouring else 'a GQA'} draft"
            )


def _grouped(fields: Fields, hidden_size: int, num_heads: int, has_bias: Any) -> GqaConfig:
    head_dim = fields.top.get("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                f"head_dim is missing and hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{num_heads}: give head_dim"
            )
        head_dim = hidden_size // num_heads
    return GqaConfig(
        num_heads=num_heads,
        num_kv_heads=fields.require_top("num_key_value_heads"),
        head_dim=head_dim,
        has_bias=has_bias,
    )


def _latent(fields: Fields, num_heads: int, has_bias: Any) -> MlaConfig:
    # Files of MLA drafts carry these two along from the Qwen3 config class; latent attention has no such sizes.
    for name in ("num_key_value_heads", "head_dim"):
        if fields.top.get(name) is not None:
            require_int(name, fields.top[name])
    sizes = {name: fields.require(name, "an MLA draft gives every size, there is no default") for name in _MLA_SIZES}
    if not fields.has("q_lora_rank"):
        raise ConfigError("q_lora_rank is missing: give the rank of the query, or null for one q_proj")
    return MlaConfig(num_heads=num_heads, q_lora_rank=fields.pick("q_lora_rank"), has_bias=has_bias, **sizes)


def attention_to_dict(attention: AttentionConfig) -> dict[str, Any]:
    """The top-level fields of an attention; that it is MLA is said in dflash_config."""
    if isinstance(attention, MlaConfig):
        return {
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_heads,
            "q_lora_rank": attention.q_lora_rank,
            **{name: getattr(attention, name) for name in _MLA_SIZES},
            "mla_use_output_gate": False,
            "attention_bias": attention.has_bias,
        }
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.has_bias,
    }
