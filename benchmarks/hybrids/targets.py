"""The two tiny targets: a Qwen3.5 of transformers and a Kimi K3, made, written as ordinary checkpoints, judged.

Owns their shapes and first weights. Letters: B sequences, T positions, V vocabulary, X experts.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lossless, session
from benchmarks.hybrids.prose import END_ID

sys.path.append(str(session.ROOT / "tests"))  # where a config of Kimi K3 to start from is

MAX_LENGTH = 1024
HEAD_DIM = 32
_BALANCE = 1e-3  # what the bias of an expert moves by per step


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is chosen of a target; every fourth layer has full attention."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_experts: int = 0
    block_size: int = 0  # of attention residuals


class Shape(ABC):
    """One kind of target."""

    name: str
    is_in_transformers = True

    def __init__(self, size: Size) -> None:
        self.size = size

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.size).items() if value}

    @abstractmethod
    def make(self) -> nn.Module:
        """A model with random weights, in float32, for training."""

    @abstractmethod
    def logits(self, model: nn.Module, ids_BT: Tensor) -> Tensor:
        """logits_BTV of whole texts, with gradients."""

    @abstractmethod
    def write(self, model: nn.Module, folder: Path) -> None:
        """A checkpoint in a folder that is not there yet."""

    @abstractmethod
    def judge(self, folder: Path) -> Callable[..., Any]:
        """The model of a folder in float64, called as one of transformers, without cache and rollback."""

    @abstractmethod
    def after_step(self, model: nn.Module) -> None:
        """Move what is not moved by the gradient."""


class Qwen35(Shape):
    """Gated DeltaNet, and gated full attention every fourth layer."""

    name = "qwen3_5"

    def make(self) -> nn.Module:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        size = self.size
        config = Qwen3_5TextConfig(
            vocab_size=size.vocab_size,
            hidden_size=size.hidden_size,
            intermediate_size=3 * size.hidden_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_heads // 2,
            head_dim=HEAD_DIM,
            linear_num_key_heads=size.num_heads // 2,
            linear_num_value_heads=size.num_heads,
            linear_key_head_dim=HEAD_DIM,
            linear_value_head_dim=HEAD_DIM,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=0.05,
            eos_token_id=END_ID,
            bos_token_id=None,
            pad_token_id=None,
            tie_word_embeddings=False,
        )
        made: nn.Module = Qwen3_5ForCausalLM(config)
        return made

    def logits(self, model: nn.Module, ids_BT: Tensor) -> Tensor:
        found: Tensor = model(ids_BT, use_cache=False).logits
        return found

    def write(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder)

    def judge(self, folder: Path) -> Callable[..., Any]:
        found: Callable[..., Any] = lossless.float64_model(folder)
        return found

    def after_step(self, model: nn.Module) -> None:
        """Nothing."""


class KimiK3(Shape):
    """KDA and gated latent attention, attention residuals, latent experts whose bias is balanced as they are used."""

    name = "kimi_k3"
    is_in_transformers = False

    def raw(self) -> dict[str, Any]:
        """Its config.json."""
        from kimi_k3_kit import edited

        size = self.size
        full = sorted({*range(4, size.num_layers + 1, 4), size.num_layers})
        made: dict[str, Any] = edited(
            vocab_size=size.vocab_size,
            hidden_size=size.hidden_size,
            intermediate_size=3 * size.hidden_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_heads,
            max_position_embeddings=MAX_LENGTH,
            q_lora_rank=size.hidden_size // 2,
            kv_lora_rank=HEAD_DIM,
            qk_nope_head_dim=HEAD_DIM,
            qk_rope_head_dim=HEAD_DIM // 2,
            v_head_dim=HEAD_DIM,
            num_experts=size.num_experts,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=size.hidden_size,
            routed_expert_hidden_size=size.hidden_size // 2,
            attn_res_block_size=size.block_size,
            linear_kda_layers=[layer for layer in range(1, size.num_layers + 1) if layer not in full],
            linear_full_attn_layers=full,
            linear_num_heads=size.num_heads,
            linear_head_dim=HEAD_DIM,
        )
        return {**made, "eos_token_id": END_ID, "pad_token_id": None, "dtype": "float32"}

    def make(self) -> nn.Module:
        from blockdraft.targets.kimi_k3 import KimiK3Config, KimiK3Model

        model = KimiK3Model(KimiK3Config.from_dict(self.raw()))
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_(std=0.5)  # smaller ones drown in what the first layers add
            model.lm_head.weight.normal_(std=0.05)
        self._uses = {name: self._count_uses(module) for name, module in _routers(model)}
        return model

    @staticmethod
    def _count_uses(router: nn.Module) -> list[Tensor]:
        """A list that holds the ids_FG of the router's last forward pass."""
        seen: list[Tensor] = []

        def keep(_module: nn.Module, _given: Any, found: tuple[Tensor, Tensor]) -> None:
            seen[:] = [found[0].detach()]

        router.register_forward_hook(keep)
        return seen

    def after_step(self, model: nn.Module) -> None:
        """Raise the bias of experts that were used less than the mean, lower that of the others."""
        for name, router in _routers(model):
            bias_X: Any = router.e_score_correction_bias
            uses_X = torch.bincount(self._uses[name][0].flatten(), minlength=len(bias_X)).float()
            bias_X.add_(_BALANCE * (uses_X.mean() - uses_X).sign())

    def logits(self, model: nn.Module, ids_BT: Tensor) -> Tensor:
        found: Tensor = model(ids_BT)
        return found

    def write(self, model: Any, folder: Path) -> None:
        from blockdraft.targets.kimi_k3 import write

        write(model, self.raw(), folder)

    def judge(self, folder: Path) -> Callable[..., Any]:
        from blockdraft.targets.kimi_k3 import read

        model, _ = read(folder, dtype=torch.float64, device=torch.device("cpu"))

        def run(ids_BT: Tensor, *, use_cache: bool) -> SimpleNamespace:
            assert not use_cache
            return SimpleNamespace(logits=model(ids_BT))

        return run


def _routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "e_score_correction_bias")]
