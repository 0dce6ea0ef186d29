"""The report as lines for a terminal: one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from blockdraft.inspection.engines import LEVELS

_GUTTER = 11
_RED, _YELLOW, _GREEN, _BOLD, _DIM = "31", "33", "32", "1", "2"
_OUTCOMES = {
    "runs": ("runs", _GREEN),
    "runs_with_notes": ("runs", _GREEN),
    "lower_acceptance": ("degraded", _YELLOW),
    "unknown": ("can't tell", _YELLOW),
    "refused": ("refuses", _RED),
}
_VERDICTS = {"pass": ("pass", _GREEN), "fail": ("FAIL", _RED), "unknown": ("can't tell", _YELLOW)}


def render_text(report: Mapping[str, Any], *, has_colours: bool = False, columns: int = 100) -> str:
    """The report as lines for a terminal of so many columns."""
    lines = [*_what(report), *_size(report), *_cost(report), *_engines(report)]
    if report["pair"] is not None:
        lines += _pair(report)
    return "".join(f"{part}\n" for line in lines for part in _wrapped(line, has_colours, columns))


# A line, the column where it goes on when it is too long, the columns of it that have a colour, the colour.
_Line = tuple[str, int, slice, str]


def _wrapped(line: _Line, has_colours: bool, columns: int) -> list[str]:
    text, indent, where, colour = line
    parts = textwrap.wrap(
        text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
    begin, end, _ = where.indices(len(parts[0]))
    if has_colours and end > begin:
        parts[0] = f"{parts[0][:begin]}\x1b[{colour}m{parts[0][begin:end]}\x1b[0m{parts[0][end:]}"
    return parts


def _row(label: str, text: str) -> _Line:
    return f"{label:<{_GUTTER}}{text}", _GUTTER, slice(0, _GUTTER), _BOLD


_EMPTY: _Line = ("", 0, slice(0, 0), _DIM)


def _what(report: Mapping[str, Any]) -> Iterator[_Line]:
    shape, conventions = report["shape"], report["conventions"]
    kind = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark", "dspine": "DSpine"}[report["family"]]
    yield _row("draft", report["draft"])
    yield _row("family", f"{kind} ({report['architecture']}, {report['dialect']} layout), {shape['num_layers']} layers")
    rows = "all proposals" if conventions["first_proposal_row"] == 0 else f"anchor + {shape['num_proposals']} proposals"
    narrower = "narrower is a prefix" if conventions["narrower_is_prefix"] else "narrower is another computation"
    yield _row("block", f"{shape['block_size']} rows ({rows}), mask id {shape['mask_token_id']}; {narrower}")
    yield _row(
        "taps",
        f"{', '.join(map(str, shape['target_layer_ids']))} of {shape['num_target_layers']} target layers, "
        f"width {shape['target_hidden_size']}{_taps_text(report)}",
    )
    yield from _layers(report)
    yield _row("attention", _attention_text(shape))
    yield _row(
        "rope",
        _rope_text(report["rope"], shape["max_length"]),
    )
    vocabulary = f"vocab {shape['vocab_size']}"
    if shape["draft_vocab_size"] is not None:
        vocabulary += f" (proposes among {shape['draft_vocab_size']} of them)"
    yield _row("size", f"hidden {shape['hidden_size']}, MLP {shape['intermediate_size']}, {vocabulary}")
    if parts := _parts_text(shape):
        yield _row("parts", parts)


def _taps_text(report: Mapping[str, Any]) -> str:
    shape = report["shape"]
    norms = ", a norm for each" if shape["has_tap_norms"] else ""
    if shape["tap_stream"] == "attn_res":
        return f"{norms}, of the attention-residual stream"
    if shape["tap_stream"] == "mean":
        return f"{norms}, the mean of the target's parallel streams"
    conventions = report["conventions"]
    if not conventions["has_target_two_streams"] or conventions["is_tap_stream_declared"]:
        return norms
    known = conventions["known_tap_stream"]
    if known is not None and not known["is_inferred"]:
        return f"{norms}; stream {known['stream']}, not declared but known: {known['ground']}"
    likely = "" if known is None else f" (likely {known['stream']}: {known['ground']})"
    return f"{norms}; stream not declared{likely}: name it with --tap-stream"


def _layers(report: Mapping[str, Any]) -> Iterator[_Line]:
    """One line for each run of layers that are alike."""
    layers: list[Mapping[str, Any]] = report["layers"]
    start = 0
    guessed = "" if report["conventions"]["is_causality_declared"] else " (is_causal is not given: by the window)"
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            label = f"layer {start}" if index - start == 1 else f"layers {start}-{index - 1}"
            reach = "full attention" if layers[start]["window"] is None else f"window {layers[start]['window']}"
            order = "causal" if layers[start]["is_causal"] else "bidirectional"
            yield _row(label, f"{reach}, {order} in the block{guessed}")
            start, guessed = index, ""


def _attention_text(shape: Mapping[str, Any]) -> str:
    if shape["attention"] == "gqa":
        return f"grouped queries, {shape['num_heads']}/{shape['num_kv_heads']} heads x {shape['head_dim']}"
    query = "one query projection" if shape["q_lora_rank"] is None else f"query rank {shape['q_lora_rank']}"
    return (
        f"MLA, {shape['num_heads']} heads x {shape['qk_nope_head_dim']} + {shape['qk_rope_head_dim']} rotary, "
        f"values {shape['v_head_dim']}, {query}, latent {shape['kv_lora_rank']}, scale {shape['softmax_scale']:.6g}"
    )


def _rope_text(rope: Mapping[str, Any], max_length: int) -> str:
    numbers = {name: value for name, value in rope.items() if name != "rope_type"}
    start, factor = numbers.pop("original_max_position_embeddings", None), numbers.pop("factor", None)
    kind = rope["rope_type"] if factor is None else f"{rope['rope_type']} x {_plain(factor)}"
    reach = f"from {_plain(start)} to {max_length}" if start is not None else f"up to {max_length}"
    return f"{kind}, {reach} positions, {', '.join(f'{name} {_plain(value)}' for name, value in numbers.items())}"


def _parts_text(shape: Mapping[str, Any]) -> str:
    parts = []
    if shape["selector_top_k"] is not None:
        parts = [
            f"convolution of {shape['conv_kernel_size']} rows, groups of {shape['conv_group_size']}",
            f"selector of {shape['selector_top_k']} candidates, rank {shape['selector_rank']}",
        ]
    if shape["markov_rank"] is not None:
        parts.append(f"Markov head, {shape['markov_kind']}, rank {shape['markov_rank']}")
    if shape["has_confidence_head"]:
        parts.append("confidence head")
    if shape["injection"] is not None:
        numbers = shape["injection"]
        parts.append(f"adjacent injection {numbers['transfer_rank']} > {numbers['message_size']}")
        parts.append(f"{numbers['top_k']} candidates")
    if shape["input_embedding_scale"] != 1.0:
        parts.append(f"embedding x {shape['input_embedding_scale']:g}")
    if shape["output_multiplier"] != 1.0:
        parts.append(f"logits x {shape['output_multiplier']:g}")
    if shape["final_logit_softcapping"] is not None:
        parts.append(f"soft cap {shape['final_logit_softcapping']:g}")
    return "; ".join(parts)


def _size(report: Mapping[str, Any]) -> Iterator[_Line]:
    parts, sizes, weights = report["parameters"], report["size_bytes"], report["weights"]
    by_part = ", ".join(f"{name} {_count(count)}" for name, count in parts.items() if name != "total" and count)
    yield _row("parameters", f"{parts['total']:,} in {report['num_tensors']} tensors: {by_part}")
    files = f"bf16 {_bytes(sizes['bf16'])}, 8 bits {_bytes(sizes['8_bit'])}, 4 bits {_bytes(sizes['4_bit'])}; "
    if weights is None:
        yield _row("file", files + "no weights here")
        return
    found = f"{weights['num_tensors']} tensors, {'/'.join(weights['dtypes'])}, {_bytes(weights['size_bytes'])}"
    own = f", of its own: {', '.join(weights['own'])}" if weights["own"] else ""
    yield _row("file", f"{files}here as the config asks: {found}{own}")


def _cost(report: Mapping[str, Any]) -> Iterator[_Line]:
    cost = report["cost"]
    flops = cost["flops"]
    limit = "at most" if cost["is_cache_bounded"] else "at full length"
    yield _row(
        "cache",
        f"{cost['cache_bytes_per_token']:,} bytes a token, {limit} {_bytes(cost['max_cache_bytes'])} a row; "
        f"taps {_bytes(cost['tap_bytes_per_token'])} a token",
    )
    markov = f", {_bytes(cost['markov_bytes_per_step'])} of Markov head" if cost["markov_bytes_per_step"] else ""
    yield _row(
        "reads",
        f"{_bytes(cost['weight_bytes_per_step'])} of draft weights, "
        f"{_bytes(cost['head_bytes_per_step'])} of output head{markov} a step",
    )
    parts = [f"{name} {flops[name] / 1e9:.3g}" for name in ("block", "head", "attention", "markov") if flops[name]]
    yield _row(
        "computes",
        f"{flops['total'] / 1e9:.3g} GFLOP at {cost['reference_context']} positions: {', '.join(parts)}, "
        f"inject {flops['inject_per_position'] / 1e9:.3g} a position",
    )


def _engines(report: Mapping[str, Any]) -> Iterator[_Line]:
    """One line of outcome per engine, and the rules behind it; of an engine that refuses, only why."""
    yield _EMPTY
    for engine in report["engines"]:
        word, colour = _OUTCOMES[engine["outcome"]]
        refused = [rule for rule in engine["rules"] if rule["level"] == "refused"]
        shown = refused or sorted(engine["rules"], key=lambda rule: -LEVELS.index(rule["level"]))
        text = "; ".join(rule["text"] for rule in refused) or engine["how"]
        line = f"{engine['engine']:<{_GUTTER}}{word:<11}{text}"
        yield line, _GUTTER + 11, slice(_GUTTER, _GUTTER + len(word)), colour
        for rule in [] if refused else shown:
            mark, colour = ("-", _DIM) if rule["level"] == "note" else ("!", _YELLOW)
            where = slice(_GUTTER, None if mark == "-" else _GUTTER + 1)
            yield f"{'':<{_GUTTER}}{mark} {rule['text']}", _GUTTER + 2, where, colour


def _pair(report: Mapping[str, Any]) -> Iterator[_Line]:
    pair = report["pair"]
    yield _EMPTY
    yield _row("target", f"{report['target']} ({pair['target_model_type']})")
    for rule in pair["rules"]:
        word, colour = _VERDICTS[rule["verdict"]]
        yield f"  {word:<10} {rule['name']}: {rule['detail']}", _GUTTER + 2, slice(2, 2 + len(word)), colour
    word, colour = ("fits", _GREEN) if pair["fits"] else ("does not fit", _RED)
    yield f"{'pair':<{_GUTTER}}{word}", _GUTTER, slice(_GUTTER, None), colour


def _plain(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def _count(count: int) -> str:
    return f"{count / 1e6:,.4g} M" if count >= 1e6 else f"{count:,}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
