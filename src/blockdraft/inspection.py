"""What a draft checkpoint is, whether it fits a target, what its step costs: the library behind `inspect`.

Owns: the report and its text. Must not know: torch, weights (headers are enough), how a draft computes.
Costs are exact counts for one row at batch 1; what they assume is named in the report.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from blockdraft.config import DraftConfig, MlaConfig, TargetFacts, pairing_rules, token_ids
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats import zlab

REFERENCE_CONTEXT = 4096
_BF16_BYTES = 2
_QUANT_GROUP = 32  # weights that share one 16-bit scale in the quantised sizes
_DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def inspect_checkpoint(
    draft_path: Path | str, target_path: Path | str | None = None, *, allow_mask_is_eos: bool = False
) -> dict[str, Any]:
    """A JSON-able report on a draft (folder or bare config.json), and on its pair if a target is given.

    Raises ConfigError or CheckpointError where the draft itself is not sound; a pair that does not fit is a
    result (`pair.fits` false), not an error.
    """
    config = zlab.read_config(draft_path, allow_mask_is_eos=allow_mask_is_eos)
    folder = Path(draft_path)
    weights = _weights(config, folder) if folder.is_dir() else None
    own = weights["own"] if weights is not None else ()
    report: dict[str, Any] = {
        "draft": str(draft_path),
        "family": config.family,
        "architecture": zlab.config_to_dict(config)["architectures"][0],
        "shape": _shape(config),
        "layers": [{"window": layer.window, "is_causal": layer.is_causal} for layer in config.layers],
        "rope": {"theta": config.rope.theta, "rope_type": config.rope.kind, **config.rope.numbers},
        "parameters": count_parameters(config, own),
        "num_tensors": len(zlab.expected_tensors(config)) + len(own),
        "weights": weights,
        "size_bytes": _sizes(config, own),
        "cost": step_cost(config),
        "pair": None,
    }
    if target_path is not None:
        report["target"] = str(target_path)
        report["pair"] = _pair(config, target_path, weights, allow_mask_is_eos)
    return report


def _shape(config: DraftConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_proposals": config.block_size - 1,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "tap_stream": config.tap_stream,
        "has_tap_norms": config.has_tap_norms,
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention": "mla" if isinstance(config.attention, MlaConfig) else "gqa",
        **dataclasses.asdict(config.attention),
        "softmax_scale": config.softmax_scale,
        "max_length": config.max_position_embeddings,
        "max_window": config.max_window,
        "conv_kernel_size": config.conv.kernel_size if config.conv else None,
        "conv_group_size": config.conv.group_size if config.conv else None,
        "selector_rank": config.selector.rank if config.selector else None,
        "selector_top_k": config.selector.top_k if config.selector else None,
        "input_embedding_scale": config.input_embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


_OWN_PARTS = {"embed_tokens.weight": "embedding", "lm_head.weight": "head", zlab.MASK_EMBEDDING: "embedding"}


def count_parameters(config: DraftConfig, own: Collection[str] = ()) -> dict[str, int]:
    """Parameters of the draft by part, and `total`; what it borrows from the target is not counted.

    `own` names the optional tensors that its checkpoint carries: an embedding, a head, a mask embedding.
    """
    names = ("fuse", "attention", "mlp", "norms", "convolutions", "selector", "embedding", "head")
    parts = dict.fromkeys(names, 0)
    for name, shape in _tensors(config, own).items():
        parts[_part(name)] += math.prod(shape)
    return {**parts, "total": sum(parts.values())}


def _tensors(config: DraftConfig, own: Collection[str]) -> dict[str, tuple[int, ...]]:
    optional = zlab.optional_tensors(config)
    return zlab.expected_tensors(config) | {name: optional[name] for name in own}


def _part(name: str) -> str:
    if name in _OWN_PARTS:
        return _OWN_PARTS[name]
    if name == "fc.weight" or name.startswith("fc_norm."):
        return "fuse"
    if name.startswith("candidate_selector."):
        return "selector"
    if "_conv." in name:
        return "convolutions"
    if "norm" in name:
        return "norms"
    return "attention" if ".self_attn." in name else "mlp"


def _sizes(config: DraftConfig, own: Collection[str]) -> dict[str, int]:
    """Bytes of the weights in bf16, and with matrices in 8 or 4 bits and one bf16 scale per 32 weights."""
    shapes = _tensors(config, own).values()
    matrices = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    others = sum(math.prod(shape) for shape in shapes if len(shape) != 2)
    sizes = {"bf16": _BF16_BYTES * (matrices + others)}
    for bits in (8, 4):
        scales = math.ceil(matrices / _QUANT_GROUP) * _BF16_BYTES
        sizes[f"{bits}_bit"] = math.ceil(matrices * bits / 8) + scales + _BF16_BYTES * others
    return sizes


def step_cost(config: DraftConfig) -> dict[str, Any]:
    """Cache bytes, weight bytes read and FLOPs of one drafting step, one row, weights and cache in bf16.

    FLOPs count a multiply and an add as two. `flops.total` assumes `reference_context` cached positions in a
    full layer (the window in a sliding one), and injects `block_size` positions: the step after a fully
    accepted block.
    """
    block, attention = config.block_size, config.attention
    width, vocab = config.hidden_size, config.vocab_size
    parts = count_parameters(config)
    layer_params = parts["attention"] + parts["mlp"] + parts["norms"] + parts["convolutions"] - 2 * width
    rank = config.selector.rank if config.selector else 0
    top_k = config.selector.top_k if config.selector else 0
    proposals = block - 1
    context = min(REFERENCE_CONTEXT, config.max_position_embeddings)
    visible = sum(min(context, layer.window or context) + block for layer in config.layers)
    flops = {
        "inject_per_position": 2 * parts["fuse"] + config.num_layers * 2 * width * attention.num_cached,
        "block": 2 * block * layer_params,
        "attention": 2 * block * visible * attention.num_heads * _attention_width(config),
        "head": 2 * proposals * vocab * width,
        "selector": proposals * (2 * width * rank + top_k * top_k * 2 * rank),
    }
    flops["total"] = block * flops["inject_per_position"] + sum(
        flops[name] for name in ("block", "attention", "head", "selector")
    )
    cache = _BF16_BYTES * attention.num_cached * config.num_layers
    window = config.max_window
    return {
        "cache_bytes_per_token": cache,
        "max_cache_bytes": cache_bytes(config, config.max_position_embeddings),
        "is_cache_bounded": window is not None,
        "tap_bytes_per_token": _BF16_BYTES * config.num_taps * config.target_hidden_size,
        "weight_bytes_per_step": _BF16_BYTES * (layer_params + parts["fuse"] + rank * width),
        "codebook_bytes_per_step": _BF16_BYTES * proposals * top_k * 2 * rank,
        "head_bytes_per_step": _BF16_BYTES * vocab * width,
        "flops": flops,
        "reference_context": context,
    }


def _attention_width(config: DraftConfig) -> int:
    """Numbers that one query of one head multiplies per position: with the key, then with the value."""
    attention = config.attention
    if isinstance(attention, MlaConfig):
        return attention.num_cached + attention.kv_lora_rank
    return 2 * attention.head_dim


def cache_bytes(config: DraftConfig, length: int) -> int:
    """Bytes of one row's cache in bf16 at `length` committed positions; sliding layers keep a window."""
    per_layer = _BF16_BYTES * config.attention.num_cached
    return sum(per_layer * min(length, layer.window or length) for layer in config.layers)


def _weights(config: DraftConfig, folder: Path) -> dict[str, Any] | None:
    """What the weight files hold, checked against the config; None if the folder has only a config."""
    if not any(folder.glob("*.safetensors*")):
        return None
    header = zlab.read_header(folder, config)
    zlab.check_header(config, header)
    optional = zlab.optional_tensors(config)
    own = sorted(name for name in header if name in optional)
    if (folder / zlab.MASK_EMBEDDING_FILE).is_file():
        own.append(zlab.MASK_EMBEDDING)
    return {
        "num_tensors": len(header),
        "dtypes": sorted({dtype for dtype, _ in header.values()}),
        "size_bytes": sum(_DTYPE_BYTES[dtype] * math.prod(shape) for dtype, shape in header.values()),
        "own": own,
    }


def read_target_facts(target_path: Path | str) -> TargetFacts:
    """The facts of a target from its folder or config.json; end and pad ids also of the generation config."""
    path = Path(target_path)
    if not path.exists():
        text = str(target_path)
        is_id = text.count("/") == 1 and not text.startswith((".", "/", "~"))
        hint = "a hub id is not fetched here, download it first" if is_id else "give a folder or a config.json"
        raise CheckpointError(f"the target {text} does not exist: {hint}")
    raw, folder = zlab.read_raw_config(path)
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the config of the target {target_path} is not an object")
    generation = folder / "generation_config.json" if folder is not None else None
    if generation is None or not generation.is_file():
        return TargetFacts.from_config(raw)
    more, _ = zlab.read_raw_config(generation)
    if not isinstance(more, Mapping):
        raise ConfigError(f"{generation} is not an object")
    facts = TargetFacts.from_config(raw)
    ends = {*facts.eos_token_ids, *token_ids("eos_token_id", more.get("eos_token_id"))}
    pads = token_ids("pad_token_id", more.get("pad_token_id"))
    pad = facts.pad_token_id if facts.pad_token_id is not None else next(iter(pads), None)
    return dataclasses.replace(facts, eos_token_ids=tuple(sorted(ends)), pad_token_id=pad)


def _pair(
    config: DraftConfig, target_path: Path | str, weights: Mapping[str, Any] | None, allow_mask_is_eos: bool
) -> dict[str, Any]:
    facts = read_target_facts(target_path)
    own = weights["own"] if weights is not None else []
    rules = pairing_rules(
        config,
        facts,
        allow_mask_is_eos=allow_mask_is_eos,
        has_own_embedding="embed_tokens.weight" in own,
        has_own_head="lm_head.weight" in own,
    )
    return {
        "target_model_type": facts.model_type,
        "fits": all(rule.verdict != "fail" for rule in rules),
        "rules": [{"name": rule.name, "verdict": rule.verdict, "detail": rule.detail} for rule in rules],
    }


def render_text(report: Mapping[str, Any]) -> str:
    """The report as plain lines for a terminal."""
    shape = report["shape"]
    lines = [
        f"draft      {report['draft']}",
        f"family     {report['family']} ({report['architecture']}), {shape['num_layers']} layers",
        f"block      {shape['block_size']} (anchor + {shape['num_proposals']} proposals), "
        f"mask id {shape['mask_token_id']}",
        f"taps       {', '.join(map(str, shape['target_layer_ids']))} "
        f"of {shape['num_target_layers']} target layers, width {shape['target_hidden_size']}{_taps_text(shape)}",
        f"size       hidden {shape['hidden_size']}, MLP {shape['intermediate_size']}, vocabulary {shape['vocab_size']}",
        f"attention  {_attention_text(shape)}",
        f"rope       {', '.join(f'{name} {_plain(value)}' for name, value in report['rope'].items())}, "
        f"up to {shape['max_length']} positions",
    ]
    if shape["selector_top_k"] is not None:
        lines.append(
            f"parts      convolution {shape['conv_kernel_size']} taps, groups of {shape['conv_group_size']}; "
            f"selector of {shape['selector_top_k']} candidates, rank {shape['selector_rank']}"
        )
    lines += [f"layer {index:<4} {_layer_text(layer)}" for index, layer in enumerate(report["layers"])]
    lines += _size_lines(report) + _cost_lines(report)
    if report["pair"] is not None:
        lines += _pair_lines(report)
    return "\n".join(lines) + "\n"


def _attention_text(shape: Mapping[str, Any]) -> str:
    if shape["attention"] == "gqa":
        return f"grouped queries, {shape['num_heads']}/{shape['num_kv_heads']} heads x {shape['head_dim']}"
    query = "one query projection" if shape["q_lora_rank"] is None else f"query rank {shape['q_lora_rank']}"
    return (
        f"latent (MLA), {shape['num_heads']} heads x {shape['qk_nope_head_dim']} + {shape['qk_rope_head_dim']} rotary, "
        f"values {shape['v_head_dim']}, {query}, latent {shape['kv_lora_rank']}, scale {shape['softmax_scale']:.6g}"
    )


def _taps_text(shape: Mapping[str, Any]) -> str:
    norms = ", a norm for each" if shape["has_tap_norms"] else ""
    return norms + (", of the attention-residual stream" if shape["tap_stream"] != "prefix" else "")


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _layer_text(layer: Mapping[str, Any]) -> str:
    reach = "full attention" if layer["window"] is None else f"window {layer['window']}"
    return f"{reach}, {'causal' if layer['is_causal'] else 'bidirectional'} in the block"


def _size_lines(report: Mapping[str, Any]) -> list[str]:
    parts, sizes, weights = report["parameters"], report["size_bytes"], report["weights"]
    by_part = ", ".join(f"{name} {count:,}" for name, count in parts.items() if name != "total" and count)
    lines = [
        f"parameters {parts['total']:,} in {report['num_tensors']} tensors: {by_part}",
        f"weights    bf16 {_bytes(sizes['bf16'])}, 8 bits {_bytes(sizes['8_bit'])}, 4 bits {_bytes(sizes['4_bit'])}",
    ]
    if weights is None:
        return [*lines, "files      no weights here, only the config was checked"]
    own = f", of its own: {', '.join(weights['own'])}" if weights["own"] else ""
    found = f"{weights['num_tensors']} tensors, {'/'.join(weights['dtypes'])}, {_bytes(weights['size_bytes'])}"
    return [*lines, f"files      every tensor as the config asks: {found}{own}"]


def _cost_lines(report: Mapping[str, Any]) -> list[str]:
    cost = report["cost"]
    flops = cost["flops"]
    limit = "at most" if cost["is_cache_bounded"] else "at full length"
    return [
        f"cache      {cost['cache_bytes_per_token']:,} bytes a token, {limit} {_bytes(cost['max_cache_bytes'])} a row",
        f"step reads {_bytes(cost['weight_bytes_per_step'])} of draft weights, "
        f"{_bytes(cost['head_bytes_per_step'])} of output head",
        f"step costs {flops['total'] / 1e9:.3g} GFLOP at {cost['reference_context']} positions: "
        f"block {flops['block'] / 1e9:.3g}, head {flops['head'] / 1e9:.3g}, "
        f"attention {flops['attention'] / 1e9:.3g}, "
        f"inject {flops['inject_per_position'] / 1e9:.3g} a position",
    ]


def _pair_lines(report: Mapping[str, Any]) -> list[str]:
    pair = report["pair"]
    words = {"pass": "pass", "fail": "FAIL", "unknown": "can't tell"}
    lines = [f"target     {report['target']} ({pair['target_model_type']})"]
    lines += [f"  {words[rule['verdict']]:<10} {rule['name']}: {rule['detail']}" for rule in pair["rules"]]
    return [*lines, "pair       fits" if pair["fits"] else "pair       does not fit"]


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
