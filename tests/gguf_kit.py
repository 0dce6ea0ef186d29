"""A tiny Llama as the GGUF that llama.cpp's converter would write of it, tokenizer included.

The layout (names, permuted queries and keys, block quantisation) comes from the package ``gguf`` and its converter's
rules, not from this project's own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_llama_gguf(source: Path, goal: Path, kind: gguf.GGMLQuantizationType) -> dict[str, torch.Tensor]:
    """Write the Llama of a folder; its weights as they stand in the file, by the folder's names."""
    config = json.loads((source / "config.json").read_text("utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(goal, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, source)
    written = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        matrix = tensor.numpy()
        num_heads = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        if num_heads is not None:
            matrix = _permuted(matrix, num_heads)
        is_matrix = matrix.ndim == 2 and matrix.shape[1] % 32 == 0
        stored = gguf.quants.quantize(matrix, kind) if is_matrix else matrix
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind if is_matrix else None)
        plain = gguf.quants.dequantize(stored, kind) if is_matrix else matrix
        if num_heads is not None:
            plain = _permuted(plain, num_heads, back=True)
        written[name] = torch.from_numpy(np.ascontiguousarray(plain))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _permuted(matrix: Any, num_heads: int, *, back: bool = False) -> Any:
    """Rows of a head from two halves to pairs, as llama.cpp rotates them; or back."""
    width = matrix.shape[0] // num_heads
    parts = (width // 2, 2) if back else (2, width // 2)
    return matrix.reshape(num_heads, *parts, matrix.shape[1]).swapaxes(1, 2).reshape(matrix.shape)


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{_NAMES[rest]}.weight"


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    stored = json.loads((source / "tokenizer.json").read_text("utf-8"))
    ids = stored["model"]["vocab"] | {token["content"]: token["id"] for token in stored["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {token["content"] for token in stored["added_tokens"]}
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(json.loads((source / "config.json").read_text("utf-8"))["eos_token_id"])
    writer.add_chat_template((source / "chat_template.jinja").read_text("utf-8"))
