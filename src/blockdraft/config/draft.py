"""`DraftConfig`: one drafter, every field of it validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blockdraft.config.attention import AttentionConfig, GqaConfig, LayerConfig, MlaConfig, RopeConfig
from blockdraft.config.checks import require_bool, require_float, require_int
from blockdraft.config.heads import ConfidenceConfig, InjectionConfig, MarkovConfig
from blockdraft.errors import ConfigError

Family = Literal["dflash", "dflash2", "dspark", "dspine"]
TapStream = Literal["prefix", "attn_res", "mean"]
TAP_STREAMS: tuple[TapStream, ...] = ("prefix", "attn_res", "mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvConfig:
    """The dynamic block convolution: taps over preceding rows, channels that share a kernel."""

    kernel_size: int
    group_size: int

    def __post_init__(self) -> None:
        require_int("conv_kernel_size", self.kernel_size)
        require_int("conv_group_size", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """The candidate selector: codebook rank and number of candidates per proposal."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        require_int("selector_rank", self.rank)
        require_int("selector_top_k", self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """One drafter. `conv` and `selector` are both given (DFlash 2) or both absent.

    `block_size` counts the rows of the draft's block: the anchor and the masks. `predicts_from_anchor`: the anchor's
    row predicts the token after it, so that every row is a proposal (DSpark); otherwise row j predicts the token at
    its own place, and the anchor's row predicts nothing. `markov` and `confidence` are heads of DSpark, `injection`
    is DSpine. `has_tap_norms`: every tap has a norm of its own before they are joined. `tap_stream`: which of the
    streams of a target with attention residuals (Kimi K3) the taps are, or "mean" for the mean of parallel streams
    that nobody has settled (qwen4_exp); None where the draft does not say. Other targets have one, and nothing to say.
    `draft_vocab_size`: a head of the draft's own has rows for so many of the target's ids only (DFlash); None: for all.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention: AttentionConfig
    layers: tuple[LayerConfig, ...]
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    target_hidden_size: int
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    has_tap_norms: bool = False
    tap_stream: TapStream | None = None
    predicts_from_anchor: bool = False
    markov: MarkovConfig | None = None
    confidence: ConfidenceConfig | None = None
    injection: InjectionConfig | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
            "num_target_layers",
            "target_hidden_size",
        ):
            require_int(name, getattr(self, name))
        for name in ("rms_norm_eps", "input_embedding_scale", "output_multiplier"):
            object.__setattr__(self, name, require_float(name, getattr(self, name)))
        if self.final_logit_softcapping is not None:
            cap = require_float("final_logit_softcapping", self.final_logit_softcapping)
            object.__setattr__(self, "final_logit_softcapping", cap)
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("num_hidden_layers is 0: a draft needs at least one layer")
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        require_bool("sample_from_anchor", self.predicts_from_anchor)
        require_int("block_size", self.block_size, least=1 if self.predicts_from_anchor else 2)
        if self.block_size > self.max_position_embeddings:
            raise ConfigError(
                f"block_size is {self.block_size}: it must not exceed max_position_embeddings, "
                f"{self.max_position_embeddings}"
            )
        require_int("mask_token_id", self.mask_token_id, least=0)
        if self.mask_token_id >= self.vocab_size:
            raise ConfigError(f"mask_token_id is {self.mask_token_id}: it must be below vocab_size, {self.vocab_size}")
        _check_taps(self.target_layer_ids, self.num_target_layers)
        if not isinstance(self.attention, GqaConfig | MlaConfig):
            raise ConfigError(f"attention is {self.attention!r}: it must be a GqaConfig or an MlaConfig")
        require_bool("fc_norm", self.has_tap_norms)
        if self.tap_stream not in (None, *TAP_STREAMS):
            raise ConfigError(f"aux_hidden_stream is {self.tap_stream!r}: it must be 'prefix', 'attn_res' or 'mean'")
        self._check_parts()
        self._check_heads()
        self._check_vocabulary()

    def _check_parts(self) -> None:
        if (self.conv is None) != (self.selector is None):
            here, gone = ("conv", "selector") if self.selector is None else ("selector", "conv")
            raise ConfigError(
                f"{here} settings are given and {gone} settings are not: DFlash 2 needs both, DFlash needs neither"
            )
        if self.conv is not None and self.hidden_size % self.conv.group_size:
            raise ConfigError(
                f"conv_group_size is {self.conv.group_size}: it must divide hidden_size, {self.hidden_size}"
            )
        if self.selector is not None and self.selector.top_k > self.vocab_size:
            raise ConfigError(
                f"selector_top_k is {self.selector.top_k}: it must not exceed vocab_size, {self.vocab_size}"
            )

    def _check_heads(self) -> None:
        has_spark = self.markov is not None or self.confidence is not None or self.predicts_from_anchor
        if self.conv is not None and (has_spark or self.injection is not None):
            raise ConfigError(
                "conv and selector settings stand beside those of DSpark or DSpine: a draft is one of them"
            )
        if self.injection is not None:
            if has_spark:
                raise ConfigError("dspine_config stands beside settings of DSpark: a draft is one of the two")
            if not all(layer.is_causal for layer in self.layers):
                raise ConfigError("is_causal is false: in a DSpine block every row sees only the rows before it")
            if self.injection.top_k > self.vocab_size:
                raise ConfigError(
                    f"dspine_config.top_k is {self.injection.top_k}: it must not exceed vocab_size, {self.vocab_size}"
                )
        if self.confidence is not None and self.confidence.reads_token and self.markov is None:
            raise ConfigError(
                "confidence_head_with_markov is true and markov_rank is 0: there is no Markov head to read"
            )

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size is None:
            return
        require_int("draft_vocab_size", self.draft_vocab_size, least=2)
        if self.draft_vocab_size >= self.vocab_size:
            raise ConfigError(
                f"draft_vocab_size is {self.draft_vocab_size}: a reduced vocabulary is below vocab_size, "
                f"{self.vocab_size}, and a full one has no map"
            )
        for part, is_there in (
            ("a candidate selector", self.selector is not None),
            ("a Markov head", self.markov is not None),
            ("a confidence head", self.confidence is not None),
            ("adjacent injection", self.injection is not None),
            ("rows that predict from the anchor", self.predicts_from_anchor),
        ):
            if is_there:
                raise ConfigError(
                    f"draft_vocab_size is {self.draft_vocab_size} of vocab_size {self.vocab_size} beside {part}: "
                    "supported in DFlash alone, whose proposals are fixed"
                )

    @property
    def num_head_rows(self) -> int:
        """Rows of the output head: one for each id, or for each of a reduced vocabulary."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    @property
    def num_proposals(self) -> int:
        """Tokens that a whole block proposes."""
        return self.block_size if self.predicts_from_anchor else self.block_size - 1

    @property
    def max_width(self) -> int:
        """Positions that the target scores for a whole block: the anchor and every proposal."""
        return self.num_proposals + 1

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def family(self) -> Family:
        if self.injection is not None:
            return "dspine"
        if self.conv is not None:
            return "dflash2"
        has_spark = self.predicts_from_anchor or self.markov is not None or self.confidence is not None
        return "dspark" if has_spark else "dflash"

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by before the softmax."""
        return self.attention.softmax_scale(self.rope)

    @property
    def max_window(self) -> int | None:
        """The widest window, None if any layer sees the whole context."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if len(windows) == len(self.layers) else None


def _check_taps(taps: tuple[int, ...], num_target_layers: int) -> None:
    if not taps:
        raise ConfigError("target_layer_ids is empty: list the target layers that the draft reads")
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int):
            raise ConfigError(f"target_layer_ids holds {tap!r}: every entry must be an integer")
        if tap < 0:
            raise ConfigError(f"target_layer_ids holds {tap}: negative ids are not allowed, the first layer is 0")
        if tap >= num_target_layers:
            raise ConfigError(
                f"target_layer_ids holds {tap}: too big for num_target_layers {num_target_layers}, "
                f"the last layer is {num_target_layers - 1}"
            )
    for index, tap in enumerate(taps):
        if tap in taps[:index]:
            raise ConfigError(f"target_layer_ids {list(taps)} holds {tap} twice: duplicates are not allowed")
        if index and tap < taps[index - 1]:
            raise ConfigError(
                f"target_layer_ids {list(taps)} must rise: {tap} follows {taps[index - 1]}; "
                "the order is the order of fc's columns, so it cannot be sorted here"
            )
