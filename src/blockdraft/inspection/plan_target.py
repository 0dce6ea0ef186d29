"""What a target weighs and keeps, from its config.json alone: weights, caches, recurrent states, experts.

Dense and mixture-of-experts transformers on grouped-query or latent attention, Gated DeltaNet hybrids (Qwen3.5 and its
kin) and Kimi K3. A part that the config does not describe (a vision tower, a layer for multi-token prediction) is not
counted, and said so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blockdraft.config import is_kimi_k3
from blockdraft.errors import ConfigError, shown

_TEXT_KEYS = ("text_config", "language_config", "llm_config")
_BF16 = 2.0
_FP32 = 4.0
# Bits of one weight with its scales, by a word in a quantization_config; of several, the fewest.
_BITS = {
    "fp8": 8.0,
    "mxfp4": 4.25,
    "nvfp4": 4.5,
    "w4a16": 4.15,
    "int4": 4.15,
    "awq": 4.15,
    "gptq": 4.15,
    "auto-round": 4.15,
    "auto_round": 4.15,
    "w8a8": 8.0,
    "int8": 8.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """Counts of one target. Parameters are numbers, `*_bytes` bytes.

    `cached_bytes_per_token` of all layers in 16 bits, `num_kv_heads` how far it can be split (1: latents, not at all).
    `state_bytes` of one snapshot of all recurrent layers of one row. `num_experts` and `top_k` are 0 without experts.
    `attention_flops_per_pair`: of one position with one cached one, in all layers that keep a cache.
    """

    num_layers: int
    dense_params: int
    expert_params: int
    num_experts: int
    top_k: int
    embedding_params: int
    dense_bytes: float
    expert_bytes: float
    embedding_bytes: float
    vision_bytes: float
    cached_bytes_per_token: float
    num_kv_heads: int
    state_bytes: float
    attention_flops_per_pair: float
    not_counted: tuple[str, ...]
    simplified: tuple[str, ...]
    quantisation: str

    @property
    def weight_bytes(self) -> float:
        return self.dense_bytes + self.expert_bytes + self.vision_bytes

    @property
    def active_params(self) -> float:
        """Parameters that one position multiplies with: no embedding row is multiplied, the head is."""
        share = self.top_k / self.num_experts if self.num_experts else 0.0
        return self.dense_params - self.embedding_params + share * self.expert_params

    def read_bytes(self, num_positions: int) -> float:
        """Weights that one forward of so many positions reads: all that is dense, and the experts that are drawn.

        Experts as if each position drew its own at random: E (1 - (1 - k/E)^M); real ones are drawn together more.
        """
        drawn = 1.0 - (1.0 - self.top_k / self.num_experts) ** num_positions if self.num_experts else 0.0
        return self.dense_bytes - self.embedding_bytes + drawn * self.expert_bytes


def read_target_shape(config: Mapping[str, Any], given_bytes: float | None = None) -> TargetShape:
    """The shape behind a config.json. Raises ConfigError for what it does not describe.

    `given_bytes`: what all weights take, where the config does not tell; every part then has the same share of bits.
    """
    text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), config)
    size = _Sizes(text)
    mixers = _mixers(size, is_kimi_k3(config))
    dense_mlp, experts, num_experts, top_k = _mlps(size)
    embedding = size.need("vocab_size") * size.width
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    head = 0 if tied else embedding
    bits, quantisation = _weight_bits(config, text) if given_bytes is None else (16.0, "as given")
    is_expert_only = num_experts > 0 and bits < 8.0
    linear_bits = 16.0 if is_expert_only else bits
    matrices = mixers.params + dense_mlp
    num_cached = size.layers - mixers.num_linear
    tower = _vision_params(config.get("vision_config")) * _BF16
    vision = ("the vision tower",) if "vision_config" in config and not tower else ()
    nextn = ("layers for multi-token prediction",) if text.get("mtp_num_hidden_layers") else ()
    dense_bytes, expert_bytes = matrices * linear_bits / 8 + (embedding + head) * _BF16, experts * bits / 8
    scale = 1.0 if given_bytes is None else given_bytes / (dense_bytes + expert_bytes + tower)
    return TargetShape(
        num_layers=size.layers,
        dense_params=matrices + embedding + head,
        expert_params=experts,
        num_experts=num_experts,
        top_k=top_k,
        embedding_params=0 if tied else embedding,
        dense_bytes=dense_bytes * scale,
        expert_bytes=expert_bytes * scale,
        vision_bytes=tower * scale,
        embedding_bytes=0.0 if tied else embedding * _BF16 * scale,
        cached_bytes_per_token=mixers.cached * _BF16 * num_cached,
        num_kv_heads=mixers.num_kv_heads,
        state_bytes=mixers.state_bytes * mixers.num_linear,
        attention_flops_per_pair=mixers.flops_per_pair * num_cached,
        not_counted=(*vision, *nextn),
        simplified=_simplified(text, is_expert_only),
        quantisation=quantisation,
    )


class _Sizes:
    """Integers of a config.json by the names that families give them."""

    def __init__(self, text: Mapping[str, Any]) -> None:
        self.text = text
        self.width = self.need("hidden_size", "n_embd")
        self.layers = self.need("num_hidden_layers", "n_layer")

    def get(self, *names: str) -> int | None:
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def need(self, *names: str) -> int:
        value = self.get(*names)
        if value is None:
            raise ConfigError(f"{names[0]} is missing from the target's config: a plan needs it")
        return value


def _simplified(text: Mapping[str, Any], is_expert_only: bool) -> tuple[str, ...]:
    lines = ["only the experts are in these bits, the rest is bf16"] if is_expert_only else []
    if "sliding_attention" in (text.get("layer_types") or []):
        lines.append("sliding layers of the target are counted as if they kept the whole context")
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class _Mixers:
    """`params` of all layers; `cached` numbers per token, `flops_per_pair` and `state_bytes` of one layer."""

    params: int
    cached: float
    num_kv_heads: int
    flops_per_pair: float
    state_bytes: float
    num_linear: int


def _mixers(size: _Sizes, is_k3: bool) -> _Mixers:
    linear = _num_linear(size)
    params, cached, heads, flops = _latent(size) if size.get("kv_lora_rank") is not None else _grouped(size)
    total, state = (size.layers - linear) * params, 0.0
    if linear:
        one, state = _kda(size) if is_k3 or size.text.get("linear_attn_config") else _delta_net(size)
        total += linear * one
    return _Mixers(total, cached, heads, flops, state, linear)


def _num_linear(size: _Sizes) -> int:
    """Layers that keep a state instead of a cache."""
    settings = size.text.get("linear_attn_config")
    if isinstance(settings, Mapping):
        return size.layers - len(settings.get("full_attn_layers") or [])
    kinds = size.text.get("layer_types")
    if isinstance(kinds, list):
        odd = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention", "linear_attention"}
        if odd:
            raise ConfigError(f"layer_types hold {shown(sorted(odd))}: a plan knows full, sliding and linear attention")
        return sum(kind == "linear_attention" for kind in kinds)
    interval = size.get("full_attention_interval")
    return size.layers - size.layers // interval if interval else 0


def _grouped(size: _Sizes) -> tuple[int, float, int, float]:
    """(parameters, numbers cached per token, heads to split by, operations of one pair of positions) of one layer."""
    heads = size.need("num_attention_heads", "n_head")
    kv_heads = size.get("num_key_value_heads") or heads
    dim = size.get("head_dim") or size.width // heads
    gate = 2 if size.text.get("attn_output_gate") else 1
    params = size.width * dim * (gate * heads + 2 * kv_heads + heads)
    return params, 2.0 * kv_heads * dim, kv_heads, 4.0 * heads * dim


def _latent(size: _Sizes) -> tuple[int, float, int, float]:
    """Latent attention: one latent and one rotary (or plain) key per token, shared by all heads, so never split."""
    heads, width = size.need("num_attention_heads"), size.width
    rank, rope = size.need("kv_lora_rank"), size.need("qk_rope_head_dim")
    nope, value = size.need("qk_nope_head_dim"), size.need("v_head_dim")
    q_rank = size.get("q_lora_rank")
    query = width * heads * (nope + rope) if q_rank is None else q_rank * (width + heads * (nope + rope))
    gate = heads * value * width if size.text.get("mla_use_output_gate") else 0
    params = query + width * (rank + rope) + rank * heads * (nope + value) + heads * value * width + gate
    return params, float(rank + rope), 1, 2.0 * heads * (2 * rank + rope)


def _delta_net(size: _Sizes) -> tuple[int, float]:
    keys, values = size.need("linear_num_key_heads"), size.need("linear_num_value_heads")
    key_dim, value_dim = size.need("linear_key_head_dim"), size.need("linear_value_head_dim")
    taps = size.get("linear_conv_kernel_dim") or 4
    inner = 2 * keys * key_dim + values * value_dim
    params = size.width * (inner + 2 * values * value_dim + 2 * values) + inner * taps
    return params, values * key_dim * value_dim * _FP32 + inner * (taps - 1) * _BF16


def _kda(size: _Sizes) -> tuple[int, float]:
    settings = size.text["linear_attn_config"]
    heads, dim = int(settings["num_heads"]), int(settings["head_dim"])
    taps = int(settings.get("short_conv_kernel_size", 4))
    inner = heads * dim
    gate = size.width * inner if settings.get("use_full_rank_gate") else dim * (size.width + inner)
    params = size.width * 4 * inner + gate + dim * (size.width + inner) + size.width * heads + 3 * inner * taps
    return params, heads * dim * dim * _FP32 + 3 * inner * (taps - 1) * _BF16


def _mlps(size: _Sizes) -> tuple[int, int, int, int]:
    """(dense parameters, those of routed experts, experts of a layer, experts of a position)."""
    experts = size.get("num_experts", "n_routed_experts", "num_local_experts") or 0
    dense = 3 * size.width * (size.get("intermediate_size") or 0)
    if not experts:
        if not dense:
            raise ConfigError("intermediate_size is missing from the target's config: a plan needs it")
        return size.layers * dense, 0, 0, 0
    top_k = size.need("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
    inner = size.get("moe_intermediate_size", "expert_intermediate_size") or size.need("intermediate_size")
    first = size.get("first_k_dense_replace") or 0
    only = size.text.get("mlp_only_layers")
    first += len(only) if isinstance(only, list) else 0
    sparse = size.layers - first
    width = size.get("routed_expert_hidden_size") or size.width
    latent = 2 * size.width * width if width != size.width else 0
    shared = 3 * size.width * inner * (size.get("num_shared_experts", "n_shared_experts") or 0)
    shared += 3 * size.width * (size.get("shared_expert_intermediate_size") or 0)
    around = sparse * (shared + latent + size.width * experts)
    return first * dense + around, sparse * experts * 3 * width * inner, experts, top_k


def _vision_params(settings: object) -> int:
    """A tower as Qwen's configs describe it: blocks, patches, positions and what joins it to the text; else 0."""
    names = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size", "num_position_embeddings")
    if not isinstance(settings, Mapping) or not all(isinstance(settings.get(name), int) for name in names):
        return 0
    depth, width, inner, out, patch, positions = (settings[name] for name in names)
    joined = width * settings.get("spatial_merge_size", 2) ** 2
    patches = width * 3 * settings.get("temporal_patch_size", 2) * patch * patch
    return int(depth * width * (4 * width + 2 * inner) + joined * (joined + out) + patches + positions * width)


def _weight_bits(config: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[float, str]:
    settings = config.get("quantization_config") or text.get("quantization_config")
    if not settings:
        return 16.0, "bf16, by its config"
    groups = settings.get("config_groups") if isinstance(settings, Mapping) else None
    first: object = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
        bits, group = weights["num_bits"], weights.get("group_size")
        return bits + (16.0 / group if isinstance(group, int) and group > 0 else 0.0), f"{bits} bits, by its config"
    words = str(settings).lower()
    found = [word for word in _BITS if word in words]
    if not found:
        raise ConfigError(f"quantization_config is {shown(settings)}: its bits are not known; give --target-gb")
    word = min(found, key=lambda one: (_BITS[one], one))
    return _BITS[word], f"{word}, by its config"
