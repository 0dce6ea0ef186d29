"""What a draft must know of its target, and every rule that a pair has to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from blockdraft.config.checks import require_int, token_ids
from blockdraft.config.draft import DraftConfig, TapStream
from blockdraft.errors import ConfigError, PairError

Verdict = Literal["pass", "fail", "unknown"]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RECURRENT_MODEL_TYPES = _words(
    "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text kimi_linear "
    "kimi_k3 glm5_next glm5_next_text falcon_h1 falcon_mamba lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl mamba "
    "mamba2 jamba bamba zamba zamba2 zaya1 granitemoehybrid nemotron_h nemotron_h_omni olmo_hybrid rwkv "
    "xlstm recurrent_gemma bailing_hybrid minimax plamo2"
)
# Families whose recurrent states this package takes back exactly; its tests show it for each of them.
PROVEN_RECURRENT_MODEL_TYPES = _words(
    "kimi_k3 qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen4_exp qwen4_exp_text kimi_linear "
    "glm5_next glm5_next_text bailing_hybrid olmo_hybrid falcon_h1 granitemoehybrid nemotron_h lfm2 lfm2_moe lfm3 "
    "zaya mamba2"
)
# Families that keep their states where no cache of transformers reaches them, or whose own forward of several
# positions forgets the state before them, so that a block cannot be scored at all.
REFUSED_RECURRENT_MODEL_TYPES = _words("rwkv xlstm recurrent_gemma minimax mamba falcon_mamba jamba zamba bamba")
# Layer types whose cache holds one entry per position (or nothing at all); every other name counts as state.
_POSITIONAL_LAYER_TYPES = _words(
    "full_attention attention sliding_attention chunked_attention indexed_attention global_attention "
    "local_attention moe mlp dense sparse"
)
# Targets whose residual is replaced by attention over earlier layers, so that there are two streams to tap.
_RESIDUAL_ATTENTION_MODEL_TYPES = _words("kimi_k3")
# Targets with parallel streams whose meaning as a tap no published draft has settled.
_PARALLEL_STREAM_MODEL_TYPES = _words("qwen4_exp qwen4_exp_text")
_STREAM_WORDS: Mapping[TapStream, str] = {
    "prefix": "the residual stream",
    "attn_res": "the attention-residual stream",
    "mean": "the mean of the parallel streams",
}
# What only a drafter's config has: keys, and words in its model_type or class.
_DRAFT_KEYS = ("dflash_config", "dspine_config", "speculators_config", "speculators_model_type")
_DRAFT_WORDS = ("dflash", "dspark", "dspine", "assistant")
_TEXT_KEYS = ("text_config", "language_config", "llm_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a draft must know of a target. `vocab_size` counts rows of the input embedding."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int
    is_recurrent: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    @property
    def tap_streams(self) -> tuple[TapStream, ...]:
        """The streams that a tap of this target can be."""
        if self.model_type in _RESIDUAL_ATTENTION_MODEL_TYPES:
            return ("prefix", "attn_res")
        return ("mean",) if self.model_type in _PARALLEL_STREAM_MODEL_TYPES else ("prefix",)

    @property
    def has_plain_taps(self) -> bool:
        """Whether a tap can only be one thing, the residual stream, so that a draft need not name it."""
        return self.tap_streams == ("prefix",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TargetFacts:
        """The facts in a Hugging Face config.json, also of a model whose text part is nested."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"the target's config is a {type(config).__name__}: it must be an object")
        if _is_draft(config):
            raise ConfigError("this config describes a draft: give the model that it drafts for as --target")
        text = next((config[key] for key in _TEXT_KEYS if isinstance(config.get(key), Mapping)), config)
        if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
            raise ConfigError("the target is an encoder-decoder model: a target must be a causal language model")
        model_type = "kimi_k3" if is_kimi_k3(config) else text.get("model_type") or config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError("model_type is missing from the target's config: give a Hugging Face config.json")
        is_recurrent = _is_recurrent(text) or str(config.get("model_type")) in _RECURRENT_MODEL_TYPES
        end = text.get("eos_token_id") if text.get("eos_token_id") is not None else config.get("eos_token_id")
        pad = text.get("pad_token_id") if text.get("pad_token_id") is not None else config.get("pad_token_id")
        return cls(
            model_type=model_type,
            vocab_size=_target_int(text, model_type, "vocab_size"),
            hidden_size=_target_int(text, model_type, "hidden_size", "n_embd", "d_model"),
            num_layers=_target_int(text, model_type, "num_hidden_layers", "n_layer", "num_layers"),
            max_length=_target_int(
                text,
                model_type,
                "max_position_embeddings",
                "n_positions",
                "max_sequence_length",
                "n_ctx",
                "model_max_length",
            ),
            is_recurrent=is_recurrent,
            eos_token_ids=token_ids("eos_token_id", end),
            pad_token_id=next(iter(token_ids("pad_token_id", pad)), None),
        )


def is_kimi_k3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of Kimi K3: the whole model, or its text part alone.

    The text part bears the model type of an older family, which has no attention residuals.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    return config.get("model_type") == "kimi_k3" or (
        inner.get("model_type") == "kimi_linear" and inner.get("attn_res_block_size") is not None
    )


def _is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a drafter, in whatever dialect."""
    names = f"{config.get('model_type')} {config.get('architectures')}".lower()
    return any(key in config for key in _DRAFT_KEYS) or any(word in names for word in _DRAFT_WORDS)


def _is_recurrent(text: Mapping[str, Any]) -> bool:
    if str(text.get("model_type")) in _RECURRENT_MODEL_TYPES:
        return True
    if text.get("linear_attn_config") or text.get("hybrid_override_pattern"):
        return True
    for key in ("layer_types", "layers_block_type", "block_types"):
        kinds = text.get(key)
        if isinstance(kinds, list) and any(str(kind) not in _POSITIONAL_LAYER_TYPES for kind in kinds):
            return True
    return False


def _target_int(text: Mapping[str, Any], model_type: str, *names: str) -> int:
    for name in names:
        if text.get(name) is not None:
            return require_int(f"the target's {name}", text[name])
    raise ConfigError(
        f"{names[0]} is missing from the config of the target ({model_type}): write it there, or save "
        "the config again with every field that its class fills in"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRule:
    """One rule of the pairing and how it came out."""

    name: str
    verdict: Verdict
    detail: str


def _equal(name: str, what: str, draft: int, target: int) -> PairRule:
    if draft == target:
        return PairRule(name=name, verdict="pass", detail=f"{what} {draft}")
    return PairRule(name=name, verdict="fail", detail=f"{what}: the draft is made for {draft}, the target has {target}")


def pairing_rules(
    draft: DraftConfig,
    target: TargetFacts,
    *,
    allow_mask_is_eos: bool = False,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
) -> list[PairRule]:
    """Every rule of the pairing, in a fixed order; "unknown" is what a config alone cannot settle.

    `allow_mask_is_eos` is the explicit consent to a mask id that also ends or pads a text.
    `has_own_embedding`, `has_own_head`: the draft's checkpoint carries its own.
    """
    vocabulary = _equal("vocabulary_rows", "vocabulary rows", draft.vocab_size, target.vocab_size)
    if vocabulary.verdict == "fail" and draft.family == "dflash" and has_own_head:
        detail = vocabulary.detail + "; the draft has a head of its own, whether its ids agree cannot be told"
        vocabulary = PairRule(name=vocabulary.name, verdict="unknown", detail=detail)
    width = _equal("draft_width", "width of embedding and head", draft.hidden_size, target.hidden_size)
    if width.verdict == "fail" and has_own_embedding and has_own_head:
        width = PairRule(name=width.name, verdict="pass", detail="the draft has its own embedding and head")
    return [
        vocabulary,
        _equal("hidden_size", "width of the taps", draft.target_hidden_size, target.hidden_size),
        width,
        _equal("num_target_layers", "target layers", draft.num_target_layers, target.num_layers),
        _taps_rule(draft, target),
        _mask_row_rule(draft, target),
        _mask_role_rule(draft, target, allow_mask_is_eos),
        _length_rule(draft, target),
        _stream_rule(draft, target),
        _recurrent_rule(target),
    ]


def _taps_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    beyond = [tap for tap in draft.target_layer_ids if tap >= target.num_layers]
    if beyond:
        detail = f"taps {beyond} do not exist: the target's last layer is {target.num_layers - 1}"
        return PairRule(name="target_layer_ids", verdict="fail", detail=detail)
    return PairRule(name="target_layer_ids", verdict="pass", detail=f"taps {list(draft.target_layer_ids)}")


def _mask_row_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    inside = draft.mask_token_id < target.vocab_size
    detail = f"mask id {draft.mask_token_id} of {target.vocab_size} embedding rows"
    return PairRule(name="mask_token_row", verdict="pass" if inside else "fail", detail=detail)


def _mask_role_rule(draft: DraftConfig, target: TargetFacts, allowed: bool) -> PairRule:
    name, mask = "mask_token_role", draft.mask_token_id
    roles = ["end of text"] if mask in target.eos_token_ids else []
    roles += ["padding"] if mask == target.pad_token_id else []
    if roles and allowed:
        detail = f"mask id {mask} is also the target's {' and '.join(roles)} id, allowed explicitly"
        return PairRule(name=name, verdict="pass", detail=detail)
    if roles:
        detail = (
            f"mask id {mask} is the target's {' and '.join(roles)} id; if that is meant, allow it (--allow-mask-is-eos)"
        )
        return PairRule(name=name, verdict="fail", detail=detail)
    if not target.eos_token_ids and target.pad_token_id is None:
        detail = "the target's config names neither an end nor a pad id"
        return PairRule(name=name, verdict="unknown", detail=detail)
    return PairRule(name=name, verdict="pass", detail=f"mask id {mask} has no other role")


def _length_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    short, long = draft.max_position_embeddings, target.max_length
    if short >= long:
        return PairRule(name="max_length", verdict="pass", detail=f"draft {short}, target {long} positions")
    detail = f"draft {short}, target {long} positions: nothing is known of proposals beyond {short}"
    return PairRule(name="max_length", verdict="unknown", detail=detail)


def _stream_rule(draft: DraftConfig, target: TargetFacts) -> PairRule:
    name = "tap_stream"
    if draft.tap_stream is None and not target.has_plain_taps:
        detail = f"taps of {target.model_type} can be {' or '.join(target.tap_streams)}, and the draft names none"
        return PairRule(name=name, verdict="unknown", detail=detail)
    detail = f"taps are {_STREAM_WORDS[draft.tap_stream or 'prefix']}"
    if (draft.tap_stream or "prefix") in target.tap_streams:
        return PairRule(name=name, verdict="pass", detail=detail)
    return PairRule(name=name, verdict="fail", detail=f"{detail}, which {target.model_type} does not have")


def _recurrent_rule(target: TargetFacts) -> PairRule:
    if not target.is_recurrent:
        return PairRule(name="recurrent_state", verdict="pass", detail=f"{target.model_type} keeps no recurrent state")
    if target.model_type in PROVEN_RECURRENT_MODEL_TYPES:
        detail = f"{target.model_type} keeps recurrent state, which is taken back exactly"
        return PairRule(name="recurrent_state", verdict="pass", detail=detail)
    if target.model_type in REFUSED_RECURRENT_MODEL_TYPES:
        detail = f"{target.model_type} keeps recurrent state that cannot be taken back, or is lost between forwards"
        return PairRule(name="recurrent_state", verdict="fail", detail=detail)
    detail = f"{target.model_type} keeps recurrent state: a self-test at load shows whether it is taken back exactly"
    return PairRule(name="recurrent_state", verdict="unknown", detail=detail)


def check_pair(
    draft: DraftConfig,
    target: TargetFacts,
    *,
    allow_mask_is_eos: bool = False,
    has_own_embedding: bool = False,
    has_own_head: bool = False,
) -> None:
    """Raise one PairError that lists every failed rule; rules that cannot be told do not fail."""
    rules = pairing_rules(
        draft,
        target,
        allow_mask_is_eos=allow_mask_is_eos,
        has_own_embedding=has_own_embedding,
        has_own_head=has_own_head,
    )
    failed = [f"{rule.name}: {rule.detail}" for rule in rules if rule.verdict == "fail"]
    if failed:
        raise PairError(f"this draft does not fit this target ({target.model_type}): " + "; ".join(failed))
