"""The weights of one decoder layer in the form in which they are multiplied: few matrices, residuals added inside.

Letters: F rows, E target width, I MLP width, H query heads, K kv heads, A head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdraft.packed import Int8Linear, PackedLinear, Separately, can_pack

__all__ = ["Form", "Layer", "Matrix", "Norm", "fused_layer", "matrix"]

Form = Literal["plain", "packed", "int8"]
"""How matrices are kept: as they are stored, in oneDNN's layout where it has one, or rounded to 8 bits."""

_ROWS_HINT = 16  # the layout that oneDNN makes for it is the fastest or close to it from 1 row to 256


class Matrix(Protocol):
    """One linear layer, and what may be done to its result before it is written."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The result plus ``other``."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the result."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The result times ``other``, element by element."""
        ...


class PlainMatrix(Separately):
    """A matrix as it is stored, on any device."""

    def __init__(self, linear: nn.Linear) -> None:
        self.weight, self.bias = linear.weight.detach(), linear.bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Gate:
    """The MLP's first half from two matrices, the product made inside the second."""

    def __init__(self, gate: Matrix, up: Matrix) -> None:
        self.gate, self.up = gate, up

    def __call__(self, u_FE: Tensor) -> Tensor:
        """SiLU(gate) * up, [F, I]."""
        return self.up.times(u_FE, self.gate.silu(u_FE))


class JoinedGate:
    """The same from one matrix, for a form whose input costs something to prepare."""

    def __init__(self, both: Matrix) -> None:
        self.both = both

    def __call__(self, u_FE: Tensor) -> Tensor:
        """SiLU(gate) * up, [F, I]."""
        gate_FI, up_FI = self.both(u_FE).chunk(2, dim=-1)
        return F.silu(gate_FI) * up_FI


class Norm:
    """Root-mean-square norm of the last axis, computed in float32 at least."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight.detach(), eps
        self._twice = torch.cat((self.weight, self.weight)) if weight.device.type == "cpu" else None

    def __call__(self, x_FE: Tensor) -> Tensor:
        if self._twice is None:
            return F.rms_norm(x_FE, self.weight.shape, self.weight, self.eps)
        # On the CPU torch makes this norm of ten operations, and the layer norm of one. A vector followed by its
        # negative has the mean 0, hence the variance mean(x^2): its layer norm is the norm wanted, twice.
        both_FE = torch.cat((x_FE, -x_FE), dim=-1)
        return F.layer_norm(both_FE, self._twice.shape, self._twice, None, self.eps)[..., : x_FE.shape[-1]]


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. ``head_norm`` [H + K, A] multiplies normalised query and key heads, where there is."""

    input_norm: Norm
    qkv: Matrix
    head_norm: Tensor | None
    out: Matrix
    mlp_norm: Norm
    gate: Gate | JoinedGate
    down: Matrix

    def mlp(self, x_FE: Tensor) -> Tensor:
        """x_FE with the MLP's result added."""
        return self.down.plus(self.gate(self.mlp_norm(x_FE)), x_FE)


def fused_layer(layer: Any, num_heads: int, num_kv: int, eps: float, form: Form) -> Layer:
    """The layer of a transformers model of one of the families."""
    attention, mlp = layer.self_attn, layer.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        rows = [attention.q_norm.weight] * num_heads + [attention.k_norm.weight] * num_kv
        head_norm = torch.stack([row.expand(attention.head_dim) for row in rows]).detach()
    gate: Gate | JoinedGate
    if form == "int8":
        gate = JoinedGate(matrix([mlp.gate_proj, mlp.up_proj], form))
    else:
        gate = Gate(matrix([mlp.gate_proj], form), matrix([mlp.up_proj], form))
    return Layer(
        input_norm=Norm(layer.input_layernorm.weight, eps),
        qkv=matrix([attention.q_proj, attention.k_proj, attention.v_proj], form),
        head_norm=head_norm,
        out=matrix([attention.o_proj], form),
        mlp_norm=Norm(layer.post_attention_layernorm.weight, eps),
        gate=gate,
        down=matrix([mlp.down_proj], form),
    )


def matrix(parts: Sequence[Any], form: Form) -> Matrix:
    """The parts below each other as one matrix."""
    weight = torch.cat([part.weight.detach() for part in parts]) if len(parts) > 1 else parts[0].weight.detach()
    has_bias = any(part.bias is not None for part in parts)
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if has_bias:
        biases = [p.weight.new_zeros(p.weight.shape[0]) if p.bias is None else p.bias.detach() for p in parts]
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    if form == "int8":
        return Int8Linear(joined)
    return PackedLinear(joined, rows_hint=_ROWS_HINT) if form == "packed" and can_pack(joined) else PlainMatrix(joined)
