"""The [draft] section of a recipe: the shape of the draft, and the configuration it has for a given target.

Owns which settings exclude each other. Bounds that DraftConfig checks itself are not checked twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from blockdraft.config import (
    TAP_STREAMS,
    ConvConfig,
    DraftConfig,
    GqaConfig,
    LayerConfig,
    MlaConfig,
    RopeConfig,
    SelectorConfig,
    TapStream,
    TargetFacts,
    require_bool,
    require_float,
    require_int,
)
from blockdraft.errors import ConfigError
from blockdraft.train.checks import require_not_negative, require_one_of

__all__ = ["DraftRecipe", "GqaRecipe", "MlaRecipe"]

_V2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class GqaRecipe:
    """Grouped-query attention."""

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_int("draft.gqa.num_kv_heads", self.num_kv_heads)
        require_int("draft.gqa.head_dim", self.head_dim)


@dataclass(frozen=True, kw_only=True)
class MlaRecipe:
    """Multi-head latent attention. `q_lora_rank` 0 is a plain query projection."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        require_int("draft.mla.q_lora_rank", self.q_lora_rank, least=0)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            require_int(f"draft.mla.{name}", getattr(self, name))
        if self.qk_rope_head_dim % 2:
            raise ConfigError(f"draft.mla.qk_rope_head_dim is {self.qk_rope_head_dim}; it must be even")


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """Shape of the draft; widths that must equal the target's are taken from the target.

    The four numbers of convolution and selector are all 0 for a DFlash draft, all above 0 for a DFlash 2 draft.
    `windows` has one number a layer, 0 for the whole context. `initial_layers` are the target layers that the draft's
    layers start as ("target_layers"), `initial_draft` the trained draft that all of it starts as ("draft": a folder, a
    hub id, or the name of the built-in one), else empty. `tap_stream` is "plain" for a target with one stream, "prefix"
    or "attn_res" for one with two (Kimi K3), "mean" for parallel ones (qwen4_exp). Exactly one of `gqa` and `mla` is
    given.
    """

    num_layers: int
    num_heads: int
    intermediate_size: int
    rms_norm_eps: float
    block_size: int
    mask_token_id: int
    learned_mask_embedding: bool
    target_layer_ids: tuple[int, ...]
    tap_stream: str
    is_causal: bool
    windows: tuple[int, ...]
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    initial: str
    initial_layers: tuple[int, ...]
    initial_draft: str
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float
    rope: RopeConfig
    gqa: GqaRecipe | None = None
    mla: MlaRecipe | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "intermediate_size"):
            require_int(f"draft.{name}", getattr(self, name))
        for name in ("rms_norm_eps", "input_embedding_scale", "output_multiplier"):
            require_float(f"draft.{name}", getattr(self, name))
        require_not_negative("draft.final_logit_softcapping", self.final_logit_softcapping)
        require_int("draft.block_size", self.block_size, least=2)
        require_int("draft.mask_token_id", self.mask_token_id, least=0)
        require_one_of("draft.tap_stream", self.tap_stream, "plain", *TAP_STREAMS)
        for name in ("learned_mask_embedding", "is_causal"):
            require_bool(f"draft.{name}", getattr(self, name))
        self._check_lists()
        self._check_attention()
        self._check_v2_parts()

    def _check_lists(self) -> None:
        for name in ("target_layer_ids", "windows", "initial_layers"):
            entries = tuple(getattr(self, name))
            object.__setattr__(self, name, entries)
            for entry in entries:
                require_int(f"an entry of draft.{name}", entry, least=0)
        taps = self.target_layer_ids
        if not taps or list(taps) != sorted(set(taps)):
            raise ConfigError(f"draft.target_layer_ids is {list(taps)}; list at least one layer, each once, rising")
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"draft.windows is {list(self.windows)}; it must have one number for each of the {self.num_layers} "
                "layers, 0 for the whole context"
            )
        require_one_of("draft.initial", self.initial, "random", "target_layers", "draft")
        needed = self.num_layers if self.initial == "target_layers" else 0
        if len(self.initial_layers) != needed:
            raise ConfigError(
                f"draft.initial_layers is {list(self.initial_layers)} while draft.initial is {self.initial!r}; "
                f"list {needed or 'no'} target layers, one for each layer that starts as a copy"
            )
        if bool(self.initial_draft) != (self.initial == "draft"):
            raise ConfigError(
                f"draft.initial_draft is {self.initial_draft!r} while draft.initial is {self.initial!r}; "
                'name a draft where initial is "draft", and write "" elsewhere'
            )

    def _check_attention(self) -> None:
        if (self.gqa is None) == (self.mla is None):
            given = "neither is given" if self.gqa is None else "both are given"
            raise ConfigError(f"draft.gqa, draft.mla: {given}; a draft has exactly one of the two tables")
        if self.gqa is not None and (self.num_heads % self.gqa.num_kv_heads or self.gqa.head_dim % 2):
            raise ConfigError(
                f"draft.num_heads {self.num_heads}, gqa.num_kv_heads {self.gqa.num_kv_heads}, "
                f"gqa.head_dim {self.gqa.head_dim}: num_heads must be a multiple of num_kv_heads, and head_dim even"
            )

    def _check_v2_parts(self) -> None:
        sizes = {name: require_int(f"draft.{name}", getattr(self, name), least=0) for name in _V2_FIELDS}
        if 0 < sum(size > 0 for size in sizes.values()) < len(sizes):
            zero = ", ".join(name for name, size in sizes.items() if not size)
            given = ", ".join(name for name, size in sizes.items() if size)
            raise ConfigError(
                f"draft: {given} given while {zero} is 0; convolution and selector come together (DFlash 2), "
                "or all four are 0 (DFlash)"
            )

    @property
    def has_selector(self) -> bool:
        return self.selector_rank > 0

    @property
    def loaded_stream(self) -> TapStream:
        """The stream with which the target is loaded."""
        return next((stream for stream in TAP_STREAMS if stream == self.tap_stream), "prefix")

    def config(self, target: TargetFacts) -> DraftConfig:
        """The full draft configuration for this target."""
        self._check_against(target)
        has_conv = self.conv_kernel_size > 0
        return DraftConfig(
            hidden_size=target.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=target.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=target.max_length,
            attention=self._attention(),
            layers=tuple(LayerConfig(is_causal=self.is_causal, window=window or None) for window in self.windows),
            rope=self.rope,
            block_size=self.block_size,
            mask_token_id=self.mask_token_id,
            target_layer_ids=self.target_layer_ids,
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            conv=ConvConfig(kernel_size=self.conv_kernel_size, group_size=self.conv_group_size) if has_conv else None,
            selector=SelectorConfig(rank=self.selector_rank, top_k=self.selector_top_k) if self.has_selector else None,
            input_embedding_scale=self.input_embedding_scale,
            output_multiplier=self.output_multiplier,
            final_logit_softcapping=self.final_logit_softcapping or None,
            tap_stream=self._stream(target),
        )

    def _stream(self, target: TargetFacts) -> TapStream | None:
        allowed = ("plain",) if target.has_plain_taps else target.tap_streams
        if self.tap_stream not in allowed:
            raise ConfigError(
                f"draft.tap_stream is {self.tap_stream!r}, and the target is {target.model_type}: write "
                f"{' or '.join(map(repr, allowed))}"
            )
        return None if self.tap_stream == "plain" else self.loaded_stream

    def _check_against(self, target: TargetFacts) -> None:
        if self.mask_token_id in target.eos_token_ids:
            raise ConfigError(
                f"draft.mask_token_id is {self.mask_token_id}, an end id of the target; "
                "choose a control id that ordinary text never contains"
            )
        for layer in self.initial_layers:
            if layer >= target.num_layers:
                raise ConfigError(
                    f"draft.initial_layers holds {layer}; the target's last layer is {target.num_layers - 1}"
                )
        for window in self.windows:
            if window > target.max_length:
                raise ConfigError(
                    f"draft.windows holds {window}, more than the target's {target.max_length} positions; "
                    "0 is the whole context"
                )

    def _attention(self) -> GqaConfig | MlaConfig:
        if self.gqa is not None:
            return GqaConfig(
                num_heads=self.num_heads,
                num_kv_heads=self.gqa.num_kv_heads,
                head_dim=self.gqa.head_dim,
                has_bias=False,
            )
        assert self.mla is not None
        return MlaConfig(
            num_heads=self.num_heads,
            q_lora_rank=self.mla.q_lora_rank or None,
            kv_lora_rank=self.mla.kv_lora_rank,
            qk_nope_head_dim=self.mla.qk_nope_head_dim,
            qk_rope_head_dim=self.mla.qk_rope_head_dim,
            v_head_dim=self.mla.v_head_dim,
            has_bias=False,
        )
