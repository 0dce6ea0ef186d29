"""Tiny quantised checkpoints, written tensor by tensor as their formats say, and the plain weights they stand for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Scheme = dict[str, Any]
FP8_BLOCK = 16


def write_compressed(source: Path, goal: Path, activations: Scheme | None, kind: str) -> dict[str, Tensor]:
    """compressed-tensors with one scale a row; its weights as they are meant. kind: "int" or "float", eight bits."""
    largest = 127 if kind == "int" else 448
    weights, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = weights[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / largest
            scaled = tensor / scale
            stored = scaled.round().to(torch.int8) if kind == "int" else scaled.to(torch.float8_e4m3fn)
            weights[name], weights[f"{name}_scale"] = stored, scale
            plain[name] = stored.float() * scale
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    _write(source, goal, weights, {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": activations},
        },
    })  # fmt: skip
    return plain


def by(strategy: str, kind: str) -> Scheme:
    """Activations of eight bits, scaled when they are there: by "token" or by "tensor"."""
    return {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": True}


def write_fp8(source: Path, goal: Path) -> dict[str, Tensor]:
    """Fine-grained FP8: a scale for every block of the projections."""
    weights, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        plain[name] = weights[name] = tensor
        if name.endswith("proj.weight"):
            rows, columns = (size // FP8_BLOCK for size in tensor.shape)
            blocks = tensor.reshape(rows, FP8_BLOCK, columns, FP8_BLOCK)
            scale = blocks.abs().amax((1, 3)) / 448
            stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            weights[name] = stored.reshape(tensor.shape)
            weights[f"{name}_scale_inv"] = scale
            plain[name] = (stored.float() * scale[:, None, :, None]).reshape(tensor.shape)
    size = [FP8_BLOCK, FP8_BLOCK]
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": size}
    _write(source, goal, weights, {**method, "modules_to_not_convert": ["lm_head"]})
    return plain


def _write(source: Path, goal: Path, weights: dict[str, Tensor], method: dict[str, Any]) -> None:
    shutil.copytree(source, goal)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, goal / "model.safetensors", {"format": "pt"}
    )
    raw = json.loads((goal / "config.json").read_text("utf-8"))
    (goal / "config.json").write_text(json.dumps({**raw, "quantization_config": method}))
