"""Text that a target writes for training, many rows at a time, with the outputs of the tapped layers.

Owns batched generation without speculation: left-padded rows, finished rows leave the batch. It is for making corpora;
serving goes through the engine. Nothing is ever rolled back here.

Letters: B rows, S positions of a row, N taps, E target width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import TargetFacts
from blockdraft.errors import RequestError
from blockdraft.packed import pack_linears_
from blockdraft.targets.hf import cache_word, checked_taps, decoder_of, end_ids_of, load_model

__all__ = ["BatchWriter", "Written", "load_writer"]


@dataclass(frozen=True, slots=True)
class Written:
    """One sequence: `ids` are prompt and answer; row t of `taps_SNE` was read at position t (the last one is zeros)."""

    ids: list[int]
    num_prompt: int
    taps_SNE: Tensor


class BatchWriter:
    """A loaded target that continues many prompts at once. `close` takes its hooks off the model."""

    def __init__(self, model: Any, tap_layer_ids: Sequence[int]) -> None:
        facts = TargetFacts.from_config(model.config.to_dict())
        self.model, self.tap_layer_ids = model, checked_taps(tap_layer_ids, facts.num_layers)
        self.facts = dataclasses.replace(facts, eos_token_ids=end_ids_of(model, facts, facts.vocab_size))
        self._cache_word = cache_word(model, facts.model_type)
        _, layers = decoder_of(model, facts)
        self._seen: dict[int, Tensor] = {}
        self._hooks = [layers[layer].register_forward_hook(self._hook(layer)) for layer in self.tap_layer_ids]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, layer: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._seen[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    @torch.inference_mode()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        temperature: float,
        top_p: float,
        generator: torch.Generator | None,
    ) -> list[Written]:
        """The continuation of every prompt, up to a stop id (kept) or the limit. Temperature 0 is greedy."""
        self._check(prompts, max_new_tokens)
        rows = [list(prompt) for prompt in prompts]
        taps: list[list[Tensor]] = [[] for _ in rows]
        longest = max(map(len, rows))
        ids_BS = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
        mask_BS = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        running, cache = list(range(len(rows))), None
        while running:
            logits_BV, taps_BSNE, cache = self._forward(ids_BS, mask_BS, cache)
            for at, row in enumerate(running):
                fed = min(ids_BS.shape[1], len(rows[row]))
                taps[row].append(taps_BSNE[at, -fed:])
            chosen = _choose(logits_BV, temperature, top_p, generator).tolist()
            for row, token in zip(running, chosen, strict=True):
                rows[row].append(token)
            kept = [
                at
                for at, row in enumerate(running)
                if rows[row][-1] not in stop_ids and len(rows[row]) - len(prompts[row]) < max_new_tokens
            ]
            if len(kept) < len(running):
                running = [running[at] for at in kept]
                if running:
                    cache.batch_select_indices(torch.tensor(kept))
                mask_BS = mask_BS[kept]
            ids_BS = torch.tensor([[rows[row][-1]] for row in running])
            mask_BS = torch.cat([mask_BS, torch.ones(len(running), 1, dtype=mask_BS.dtype)], dim=1)
        return [self._finished(row, len(p), t) for row, p, t in zip(rows, prompts, taps, strict=True)]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        if not prompts or not all(prompts):
            raise RequestError("an empty prompt cannot be continued; leave it out")
        longest = max(map(len, prompts)) + max_new_tokens
        if longest > self.facts.max_length:
            raise RequestError(
                f"a prompt and max_new_tokens need {longest} positions, the target has {self.facts.max_length}; "
                "leave the prompt out or lower max_new_tokens"
            )

    def _forward(self, ids_BS: Tensor, mask_BS: Tensor, cache: Any) -> tuple[Tensor, Tensor, Any]:
        positions_BS = (mask_BS.cumsum(-1) - 1).clamp_min(0)[:, -ids_BS.shape[1] :]
        output = self.model(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            position_ids=positions_BS,
            logits_to_keep=1,
            **{self._cache_word: cache},
        )
        taps = [self._seen[layer].to(torch.bfloat16) for layer in self.tap_layer_ids]
        self._seen.clear()
        return output.logits[:, -1], torch.stack(taps, dim=2), output[self._cache_word]

    def _finished(self, row: list[int], num_prompt: int, pieces: list[Tensor]) -> Written:
        taps_SNE = torch.cat(pieces)
        last = taps_SNE.new_zeros(1, *taps_SNE.shape[1:])
        return Written(row, num_prompt, torch.cat([taps_SNE, last]))


def _choose(logits_BV: Tensor, temperature: float, top_p: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1)
    probs_BV, order_BV = torch.softmax(logits_BV.float() / temperature, -1).sort(-1, descending=True)
    probs_BV = probs_BV * (probs_BV.cumsum(-1) - probs_BV < top_p)
    return order_BV.gather(-1, torch.multinomial(probs_BV, 1, generator=generator))[:, 0]


def load_writer(folder: Path, tap_layer_ids: Sequence[int], *, dtype: torch.dtype) -> BatchWriter:
    """A writer for the target in `folder`, on the CPU with packed weights."""
    model = load_model(str(folder), tap_layer_ids, dtype=dtype).eval()
    pack_linears_(model)
    return BatchWriter(model, tap_layer_ids)
