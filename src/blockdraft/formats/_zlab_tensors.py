"""Tensors of the z-lab dialect: which names and shapes a config asks for, and strict accounting of them.

Owns: canonical names, other spellings of them, what a leftover tensor says. Must not know: torch, files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from blockdraft.config import AttentionConfig, DraftConfig, GqaConfig, MlaConfig
from blockdraft.errors import CheckpointError
from blockdraft.formats._safetensors import Entry
from blockdraft.formats._zlab_config import CLASS_OF_FAMILY, STAND_ALONE

__all__ = [
    "D2T",
    "HEAD_IDS",
    "MASK_EMBEDDING",
    "T2D",
    "TRANSFER_CODES",
    "TRANSFER_READY",
    "canonical_name",
    "check_header",
    "expected_tensors",
    "optional_tensors",
    "some",
    "split_fused",
]

MASK_EMBEDDING = "mask_embedding"
TRANSFER_CODES = "transfer_codes"
# A flag beside the codes, not a weight: that they were made. Codes that never were are all zero.
TRANSFER_READY = "transfer_ready"
# The target's id of every row of a reduced head, and the two maps that hold it on disk.
HEAD_IDS, D2T, T2D = "head_ids", "d2t", "t2d"
_FLOATS = ("BF16", "F16", "F32", "F64")
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_V2_PARTS = (".attention_conv.", ".mlp_conv.", "candidate_selector.")
_SHOWN = 4
_FUSED = ("fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa")
_MLA_NAMES = ("kv_a_proj_with_mqa", "q_a_proj", "kv_b_proj", *_FUSED)

# What a leftover tensor says about the file: (part of its name, whose it is).
_FOREIGN = (
    ("fc_norm", "the file has a norm per tap: fc_norm true would fit"),
    ("markov_head", "a Markov head belongs to DSpark: the class DSparkDraftModel would fit, with its kind and rank"),
    ("confidence_head", "a confidence head belongs to DSpark: enable_confidence_head true would fit"),
    ("injection", "adjacent injection belongs to DSpine: the class DSpineDraftModel would fit"),
    (
        "context_proj",
        "context_proj, context_norm and final_norm are TorchSpec's training names: export the checkpoint first, or "
        "convert it",
    ),
    ("encoder.fc", "encoder.* names belong to a transformers assistant: model_type 'muse_glimmer_assistant' would fit"),
    ("mask_hidden", "a learned mask_hidden is not supported, only a mask embedding"),
    *(
        (
            name,
            "d2t and t2d belong to a reduced draft vocabulary: a speculators config would say so by draft_vocab_size",
        )
        for name in (D2T, T2D)
    ),
)


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that the config asks for; optional ones are not among them."""
    width, mlp = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, config.num_taps * config.target_hidden_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    if config.has_tap_norms:
        shapes |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(config.num_taps)}
    attention = _attention_tensors(config.attention, width)
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (width,)
        shapes[layer + "post_attention_layernorm.weight"] = (width,)
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        shapes[layer + "mlp.gate_proj.weight"] = (mlp, width)
        shapes[layer + "mlp.up_proj.weight"] = (mlp, width)
        shapes[layer + "mlp.down_proj.weight"] = (width, mlp)
        if config.conv is not None:
            kernels = 2 * config.conv.kernel_size
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{layer}{name}.base_kernel"] = (2, config.conv.kernel_size, width)
                projection = (kernels * (width // config.conv.group_size), width)
                shapes[f"{layer}{name}.kernel_projection.weight"] = projection
    if config.selector is not None:
        for name in CODEBOOKS:
            shapes[name] = (config.vocab_size, config.selector.rank)
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector.rank, width)
    if config.draft_vocab_size is not None:
        shapes |= {"lm_head.weight": (config.draft_vocab_size, width), HEAD_IDS: (config.draft_vocab_size,)}
    return shapes | _spark_tensors(config) | _spine_tensors(config)


def _spark_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    width, shapes = config.hidden_size, dict[str, tuple[int, ...]]()
    markov, rank = config.markov, 0 if config.markov is None else config.markov.rank
    if markov is not None:
        shapes |= {f"markov_head.markov_w{side}.weight": (config.vocab_size, rank) for side in (1, 2)}
        rows, columns = {"gated": (rank, width + rank), "rnn": (3 * rank, 2 * rank + width)}.get(markov.kind, (0, 0))
        if rows:
            name = "markov_head.gate_proj" if markov.kind == "gated" else "markov_head.joint_proj"
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    if config.confidence is not None:
        columns = width + (rank if config.confidence.reads_token else 0)
        shapes |= {"confidence_head.proj.weight": (1, columns), "confidence_head.proj.bias": (1,)}
    return shapes


def _spine_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    if config.injection is None:
        return {}
    rank, size, width = config.injection.transfer_rank, config.injection.message_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        f"injection.{name}.weight": (size, rank) for name in ("message", "receiver_gate", "predecessor_gate")
    }
    for index in range(config.num_layers):
        shapes[f"injection.readouts.{index}.weight"] = (rank, width)
        shapes[f"injection.writes.{index}.weight"] = (width, size)
    return {**shapes, "injection.bias": (size,), TRANSFER_CODES: (config.vocab_size, rank)}


def _attention_tensors(attention: AttentionConfig, width: int) -> dict[str, tuple[int, ...]]:
    if isinstance(attention, MlaConfig):
        return _latent_tensors(attention, width)
    return _grouped_tensors(attention, width)


def _grouped_tensors(attention: GqaConfig, width: int) -> dict[str, tuple[int, ...]]:
    query, keyval = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    matrices = {
        "q_proj": (query, width),
        "k_proj": (keyval, width),
        "v_proj": (keyval, width),
        "o_proj": (width, query),
    }
    norms = {"q_norm": attention.head_dim, "k_norm": attention.head_dim}
    return _named(matrices, norms, biased=matrices if attention.has_bias else ())


def _latent_tensors(attention: MlaConfig, width: int) -> dict[str, tuple[int, ...]]:
    heads, rank = attention.num_heads, attention.q_lora_rank
    matrices = {
        "kv_a_proj_with_mqa": (attention.num_cached, width),
        "kv_b_proj": (heads * (attention.qk_nope_head_dim + attention.v_head_dim), attention.kv_lora_rank),
        "o_proj": (width, heads * attention.v_head_dim),
    }
    norms = {"kv_a_layernorm": attention.kv_lora_rank}
    if rank is None:
        matrices["q_proj"] = (heads * attention.qk_head_dim, width)
    else:
        matrices |= {"q_a_proj": (rank, width), "q_b_proj": (heads * attention.qk_head_dim, rank)}
        norms["q_a_layernorm"] = rank
    biased = [name for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj") if name in matrices]
    return _named(matrices, norms, biased=biased if attention.has_bias else ())


def _named(
    matrices: Mapping[str, tuple[int, int]], norms: Mapping[str, int], *, biased: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    return {
        **{f"{name}.weight": shape for name, shape in matrices.items()},
        **{f"{name}.bias": matrices[name][:1] for name in biased},
        **{f"{name}.weight": (size,) for name, size in norms.items()},
    }


def optional_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of the tensors that a draft may carry instead of borrowing the target's."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.num_head_rows, config.hidden_size),
        MASK_EMBEDDING: (config.hidden_size,),
    }


def canonical_name(name: str) -> str:
    """The name without a `model.` prefix, and without `.weight` on a codebook."""
    name = name.removeprefix("model.")
    stem = name.removesuffix(".weight")
    return stem if stem in CODEBOOKS else name


def split_fused(config: DraftConfig, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries with each fused first projection of latent attention, [q_a_proj; kv_a_proj_with_mqa] stacked,
    taken as the two that it holds. One of another height stays as it is and will be found left over. The flag beside
    the codes of DSpine is no tensor of the model and is left out. The maps of a reduced vocabulary count as one tensor,
    if both are there.
    """
    if config.draft_vocab_size is not None:
        entries = _joined_maps(config, entries)
    if config.injection is not None:
        flag = ("BOOL", ())
        entries = {n: e for n, e in entries.items() if n != TRANSFER_READY or (e.dtype, e.shape) != flag}
    attention = config.attention
    if not isinstance(attention, MlaConfig) or attention.q_lora_rank is None:
        return dict(entries)
    rank, total = attention.q_lora_rank, attention.q_lora_rank + attention.num_cached
    found: dict[str, Entry] = {}
    for name, entry in entries.items():
        stem, _, kind = name.rpartition(".")
        layer, _, last = stem.rpartition(".")
        parts = {f"{layer}.q_a_proj.{kind}": (0, rank), f"{layer}.kv_a_proj_with_mqa.{kind}": (rank, total)}
        if last not in _FUSED or entry.shape[:1] != (total,) or any(part in entries for part in parts):
            found[name] = entry
            continue
        for part, (begin, end) in parts.items():
            found[part] = dataclasses.replace(entry, shape=(end - begin, *entry.shape[1:]), rows=(begin, end))
    return found


def _joined_maps(config: DraftConfig, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    if HEAD_IDS in entries:
        raise CheckpointError(f"{HEAD_IDS} is no name of a file: the ids of the head stand in {D2T} and {T2D}")
    offsets, mask = entries.get(D2T), entries.get(T2D)
    if offsets is None or mask is None or (mask.dtype, mask.shape) != ("BOOL", (config.vocab_size,)):
        return dict(entries)
    return {HEAD_IDS if name == D2T else name: entry for name, entry in entries.items() if name != T2D}


def check_header(config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise CheckpointError if a tensor is missing, left over, or of a wrong shape or dtype."""
    expected = expected_tensors(config)
    allowed = {**expected, **optional_tensors(config)}
    missing = sorted(set(expected) - set(header))
    extra = sorted(set(header) - set(allowed))
    if missing or extra:
        parts = [f"{len(missing)} missing ({some(missing)})"] if missing else []
        parts += [f"{len(extra)} left over ({some(extra)})"] if extra else []
        reason = _diagnose(config, header, missing, extra)
        raise CheckpointError(
            f"the tensors do not fit the config: {', '.join(parts)}" + (f"; {reason}" if reason else "")
        )
    wrong = [
        f"{name} is {list(shape)}, expected {list(allowed[name])}"
        for name, (_, shape) in sorted(header.items())
        if shape != allowed[name]
    ]
    if wrong:
        raise CheckpointError(f"{len(wrong)} tensors of another shape: {some(wrong)}{_taps_hint(config, header)}")
    typed = [
        f"{name} is {dtype}"
        for name, (dtype, _) in sorted(header.items())
        if dtype not in (("I64",) if name == HEAD_IDS else _FLOATS)
    ]
    if typed:
        raise CheckpointError(
            f"{len(typed)} tensors of another dtype: {some(typed)}; supported are {', '.join(_FLOATS)}, for ids I64"
        )


def some(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (", ..." if len(items) > _SHOWN else "")


def _diagnose(config: DraftConfig, header: Iterable[str], missing: list[str], extra: list[str]) -> str | None:
    """What kind of file this rather is, None if nothing is known."""
    if HEAD_IDS in missing:
        sizes = f"{D2T} [{config.draft_vocab_size}] of I64 and {T2D} [{config.vocab_size}] of BOOL"
        return (
            f"draft_vocab_size {config.draft_vocab_size} needs {sizes}, which say what the rows of the head stand for"
        )
    for mark, reason in _FOREIGN:
        if any(mark in name.split(".") or (mark in name and "." in mark) for name in extra):
            return reason
    names = set(header)
    if config.injection is not None and missing == [TRANSFER_CODES]:
        return (
            f"the codes of the tokens are missing: they may stand in a file of their own, join them as {TRANSFER_CODES}"
        )
    attention = config.attention
    latent = [part for name in extra for part in name.split(".") if part in _MLA_NAMES]
    if latent and not isinstance(attention, MlaConfig):
        return "these are MLA tensors: attention_mode 'mla' in dflash_config would fit, with its sizes"
    if isinstance(attention, MlaConfig):
        if latent and attention.q_lora_rank is None:
            return "the file has a low-rank query: q_lora_rank would be its rank, not null"
        if any(part in _FUSED for part in latent):
            rows = attention.q_lora_rank or 0
            return f"{latent[0]} needs {rows + attention.num_cached} rows: q_a_proj, then kv_a_proj_with_mqa"
        if any(name.endswith((".k_proj.weight", ".v_proj.weight")) for name in extra):
            return "these are tensors of grouped-query attention: attention_mode 'gqa' would fit"
    if "fc.weight" not in names and any(".self_attn." in name for name in names):
        return STAND_ALONE
    if config.family == "dflash" and any(part in name for name in extra for part in _V2_PARTS):
        v2 = CLASS_OF_FAMILY["dflash2"]
        return f"these are DFlash 2 parts: the class {v2} would fit, with conv_* and selector_* fields"
    has_v2_part = any(part in name for name in names for part in _V2_PARTS)
    if config.family == "dflash2" and missing and not has_v2_part:
        return f"there are no DFlash 2 parts in the file: the class {CLASS_OF_FAMILY['dflash']} would fit"
    layers = {int(name.split(".")[1]) for name in names if name.startswith("layers.") and name.split(".")[1].isdigit()}
    if layers and layers != set(range(config.num_layers)):
        return f"the file has the layers {sorted(layers)}, the config asks for {config.num_layers}"
    if extra and all(name.endswith(".bias") for name in extra):
        return "the file has biases: attention_bias true would fit"
    return None


def _taps_hint(config: DraftConfig, header: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    shape = header["fc.weight"][1]
    wanted = (config.hidden_size, config.num_taps * config.target_hidden_size)
    if shape == wanted or len(shape) != 2 or shape[1] % config.target_hidden_size:
        return ""
    fits = shape[1] // config.target_hidden_size
    return f"; fc expects {fits} taps, target_layer_ids lists {config.num_taps}"
