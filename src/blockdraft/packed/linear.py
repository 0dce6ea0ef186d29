"""Linear layers whose weights are stored once in the layout that oneDNN multiplies fastest on this CPU.

A decoding step multiplies every weight matrix by a handful of rows. For that shape the ordinary CPU path
re-lays the matrix out on every call; a packed layer does it once, when the model is prepared for inference.
Owns the packed layer and the replacement walk. Knows torch only: nothing about drafts, targets or files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PackedLinear", "Separately", "can_pack", "pack_linears_"]

# oneDNN makes and keeps a program for every number of rows that it meets (1024 of all layers). A busy engine meets
# every number up to some hundred, and memory grew and grew; so larger ones are rounded up.
_ROWS_ALONE, _ROWS_TOGETHER = 16, 8


class Separately:
    """What a packed layer does to its result before writing it, one after another; the call is the subclass's."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The result plus ``other``."""
        return other + self(x)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the result."""
        return F.silu(self(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The result times ``other``, element by element."""
        return self(x) * other


def _padded(x: Tensor) -> tuple[Tensor, int | None]:
    """x with rows of zeros to the next multiple, and how many rows were there; None where nothing was added."""
    num_rows = x.shape[0]
    if x.dim() != 2 or num_rows <= _ROWS_ALONE or num_rows % _ROWS_TOGETHER == 0:
        return x, None
    return F.pad(x, (0, 0, 0, -num_rows % _ROWS_TOGETHER)), num_rows


class PackedLinear(nn.Module):
    """An inference-only stand-in for one ``nn.Linear``: same input shapes, same result up to float rounding.

    The plain weight is not kept: ``weight`` rebuilds it on every access (a copy of the whole matrix,
    exact), and ``state_dict`` does so too, hence a packed module still saves the tensors it was loaded
    from. Code that needs the rows all the time (an embedding tied to the head) keeps its own reference to
    the plain tensor.
    """

    def __init__(self, linear: nn.Linear, *, rows_hint: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        with torch.no_grad():
            plain = linear.weight.detach().contiguous()
            self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, rows_hint)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The plain matrix [out, in], rebuilt from the packed one: a fresh copy, never a view."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("a packed linear layer has no gradient: train the model before it is packed")
        return self._unary(x, "none")

    # What follows is done to the product before it is rounded and written; there is no gradient here either.
    def silu(self, x: Tensor) -> Tensor:
        """SiLU of the layer's result."""
        return self._unary(x, "swish")

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer's result plus ``other``, which has its shape."""
        return self._binary(x, other, "add")

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """The layer's result times ``other``, which has its shape, element by element."""
        return self._binary(x, other, "mul")

    def _unary(self, x: Tensor, what: str) -> Tensor:
        x, num_rows = _padded(x)
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, what, [], "")
        return result if num_rows is None else result[:num_rows]

    def _binary(self, x: Tensor, other: Tensor, what: str) -> Tensor:
        x, num_rows = _padded(x)
        other, _ = _padded(other)
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._packed, self.bias, what)
        return result if num_rows is None else result[:num_rows]

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}, dtype={self.dtype}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a packed linear layer cannot be loaded into: load the weights, then pack")

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        probe = fn(torch.empty(0, dtype=self.dtype))
        if probe.dtype != self.dtype or probe.device.type != "cpu":
            raise RuntimeError("a packed linear layer stays on its device and dtype: move the model, then pack")
        super()._apply(fn, recurse)
        return self


def can_pack(linear: nn.Module) -> bool:
    """Whether this layer has a packed form here: a plain ``nn.Linear`` on the CPU in float32 or bfloat16."""
    has_onednn: bool = torch.backends.mkldnn.is_available()
    if type(linear) is not nn.Linear or not has_onednn:
        return False
    weight = linear.weight
    if weight.device.type != "cpu":
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears_(module: nn.Module, *, rows_hint: int = 8) -> int:
    """The number of linear layers below ``module`` that were replaced, in place, by packed ones.

    ``rows_hint``: rows of a typical call; other row counts stay correct, only less than optimal. A layer
    used in two places stays one object. Layers that have no packed form here are left alone (see
    ``can_pack``).
    """
    done: dict[nn.Module, PackedLinear] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # named_children would hide a second name
            if child is None or not can_pack(child):
                continue
            assert isinstance(child, nn.Linear)
            if child not in done:
                done[child] = PackedLinear(child, rows_hint=rows_hint)
            setattr(parent, name, done[child])
    return len(done)
