"""Small targets and stand-in drafters for tests of the engine. The target and the engine are always the real ones.

Stand-ins: `Continuation` proposes a text known beforehand, and can be told to be wrong at chosen slots of chosen steps.
They fill the draft's place in the engine: a cache per row, inject, noise, a forward pass, propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.config import (
    ConvConfig,
    DraftConfig,
    GqaConfig,
    LayerConfig,
    RopeConfig,
    SelectorConfig,
    TargetFacts,
)
from blockdraft.draft import BlockRows, CandidateLists, DraftModel, Proposal
from blockdraft.engine import Completion, Engine, Request
from blockdraft.targets import HFTarget

VOCAB = 32


def tiny_model(
    *,
    seed: int = 0,
    vocab: int = VOCAB,
    dtype: torch.dtype = torch.float64,
    scale: float = 0.3,
    max_length: int = 512,
):
    """A random Llama of three layers whose next-token law is neither flat nor certain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocab - 1,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
    return model.to(dtype)


def bigram_model(next_id: Callable[[int], int], *, vocab: int = VOCAB, dtype: torch.dtype = torch.float64):
    """A Llama whose layers add nothing, so that the most likely next token depends on the last one only."""
    model = tiny_model(vocab=vocab, dtype=dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.eye(vocab, 32, dtype=dtype) if vocab <= 32 else torch.randn(vocab, 32, dtype=dtype)
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for token in range(vocab):
            model.lm_head.weight[next_id(token)] += 3.0 * table[token]
    return model


def draft_config(
    facts: TargetFacts, *, block_size: int = 8, window: int | None = None, v2: bool = True, **changes
) -> DraftConfig:
    config = DraftConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=40,
        vocab_size=facts.vocab_size,
        rms_norm_eps=1e-6,
        max_position_embeddings=facts.max_length,
        attention=GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, has_bias=False),
        layers=(LayerConfig(is_causal=False, window=window),) * 2,
        rope=RopeConfig(theta=10000.0, kind="default", params=()),
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=(0, 1, 2),
        num_target_layers=facts.num_layers,
        target_hidden_size=facts.hidden_size,
        conv=ConvConfig(kernel_size=2, group_size=8) if v2 else None,
        selector=SelectorConfig(rank=4, top_k=4) if v2 else None,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
    return replace(config, **changes)


def random_draft(config: DraftConfig, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> DraftModel:
    """A draft with random weights everywhere, the selector and the convolutions included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = DraftModel(config)
        with torch.no_grad():
            for name, parameter in draft.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.5 if "codebook" in name else 0.2)
    return draft.to(dtype).eval().requires_grad_(False)


class _Positions:
    """A cache that only counts: the stand-in knows its text by position."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.num_positions = 0
        self.num_steps = 0


class Continuation:
    """A stand-in drafter that proposes a known text. `texts[n]` is prompt + continuation of the n-th row.

    `wrong(step)` is the slot (0-based) at which the proposal of that step (from 0) is changed, None for no change.
    `calls` counts proposals. With `q` "lists" the proposal is reported as drawn from a list that gives it 0.9.
    """

    def __init__(
        self,
        config: DraftConfig,
        texts: Sequence[Sequence[int]],
        *,
        wrong: Callable[[int], int | None] = lambda step: None,
    ) -> None:
        self.config, self.texts, self.wrong = config, [list(t) for t in texts], wrong
        self.max_length = config.max_position_embeddings
        self.own_embedding = self.own_head = None
        self.calls = 0
        self._next = 0
        self._caches: list[_Positions] = []

    def new_cache(self) -> _Positions:
        cache = _Positions(self.texts[self._next % len(self.texts)])
        self._next += 1
        return cache

    def inject_rows(self, taps: Sequence[Tensor], caches: Sequence[_Positions]) -> None:
        for taps_CNE, cache in zip(taps, caches, strict=True):
            assert taps_CNE.shape[1:] == (self.config.num_taps, self.config.target_hidden_size)
            cache.num_positions += len(taps_CNE)

    def noise(self, anchor_ids, length, embed) -> Tensor:
        return torch.zeros(len(anchor_ids), length, self.config.hidden_size, dtype=torch.float64)

    def __call__(self, noise_BLD: Tensor, caches) -> Tensor:
        self._caches = list(caches)
        return noise_BLD

    def propose_rows(self, blocks, logits_KV, **options) -> list[Proposal]:
        return [self._proposal(block) for block in blocks]

    def _proposal(self, block: BlockRows) -> Proposal:
        self.calls += 1
        cache = self._caches.pop(0)
        start = cache.num_positions + 1
        count = block.hidden_LD.shape[0] - 1
        ids = (cache.text[start : start + count] + [1] * count)[:count]
        slot = self.wrong(cache.num_steps)
        cache.num_steps += 1
        if slot is not None and slot < count:
            ids[slot] = (ids[slot] + 1) % self.config.vocab_size
        return Proposal(ids_G=torch.tensor(ids, dtype=torch.long), q=None)


def hf_target(model, taps: Sequence[int] = (0, 1, 2)) -> HFTarget:
    return HFTarget(model, taps)


def plain_ids(model, prompt: Sequence[int], count: int, *, stop: frozenset[int] = frozenset()) -> list[int]:
    """Greedy continuation by the slowest way: the whole sequence anew for every token, no cache, no engine."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] in stop:
                break
    return ids[len(prompt) :]


def run_one(engine: Engine, **fields) -> Completion:
    [completion] = engine.run([Request(**fields)])
    return completion


__all__ = [
    "VOCAB",
    "CandidateLists",
    "Continuation",
    "bigram_model",
    "draft_config",
    "hf_target",
    "plain_ids",
    "random_draft",
    "run_one",
    "tiny_model",
]
