"""A corpus whose taps are computed by running the target inside the step: nothing but text is stored.

Owns that the batches are those of taps on disk, up to the rounding of the stored ones. Knows no files and no losses.

Letters: B sequences, S positions (padded), N stored layers, E target width, T positions of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.errors import ConfigError
from blockdraft.targets import Target
from blockdraft.train.corpus import Corpus, CorpusBatch, assemble

__all__ = ["OnlineCorpus"]


class OnlineCorpus:
    """The interface of `Corpus` around one without taps. The target must have been loaded with exactly these layers.

    `last_layer_id` keeps the last layer's output for a teacher; it is appended to the target's taps unless it is one.
    Batches lie on the target's device.
    """

    def __init__(
        self, text: Corpus, target: Target, *, target_layer_ids: Sequence[int], last_layer_id: int | None = None
    ) -> None:
        self.text, self.target = text, target
        self.facts = replace(text.facts, target_layer_ids=tuple(target_layer_ids), last_layer_id=last_layer_id)
        if target.tap_layer_ids != self.facts.stored_layer_ids:
            raise ConfigError(
                f"the target was loaded with taps {list(target.tap_layer_ids)}, "
                f"this corpus asks for {list(self.facts.stored_layer_ids)}"
            )
        if text.max_length > target.facts.max_length + 1:
            raise ConfigError(
                f"max_length is {text.max_length}, the target has {target.facts.max_length} positions; lower max_length"
            )

    def __len__(self) -> int:
        return len(self.text)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote, over all usable sequences."""
        return self.text.num_answer_tokens

    @property
    def shard_names(self) -> list[str]:
        """File names in the order which fixes the sequences' indices."""
        return self.text.shard_names

    def rescan(self) -> int:
        """Number of sequences added by shards that were not there before."""
        return self.text.rescan()

    def use_shards(self, names: Sequence[str]) -> None:
        """Keep exactly these shards in this order."""
        self.text.use_shards(names)

    def token_ids(self) -> Tensor:
        """Sorted distinct token ids that the target wrote or read."""
        return self.text.token_ids()

    def check_fits(self, config: DraftConfig) -> None:
        """Nothing; a ConfigError naming every number in which corpus, target and draft disagree."""
        self.text.facts.check_fits(config)
        if self.facts.target_layer_ids != config.target_layer_ids:
            raise ConfigError(
                f"the target was loaded with taps {list(self.facts.target_layer_ids)}, "
                f"the draft reads {list(config.target_layer_ids)}"
            )
        if self.target.tap_stream != (config.tap_stream or "prefix"):
            raise ConfigError(
                f"the target was loaded with taps of the stream {self.target.tap_stream}, "
                f"the draft reads {config.tap_stream or 'prefix'}"
            )

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        """The named sequences, zero-padded to the longest; taps as float32, computed now."""
        ids_BS, written_BS, len_B = (tensor.to(self.target.device) for tensor in self.text.texts(indices))
        fed = (len_B - 1).tolist()  # as on disk: the last id of a sequence is never fed
        stored_BSNE = torch.zeros(
            *ids_BS.shape, len(self.facts.stored_layer_ids), self.facts.target_hidden_size, device=self.target.device
        )
        rows = [self.target.new_row() for _ in fed]
        try:
            scored = self.target.forward([ids_BS[at, :num] for at, num in enumerate(fed)], rows, num_logits=0)
        finally:
            for row in rows:
                self.target.free(row)
        for at, (num, one) in enumerate(zip(fed, scored, strict=True)):
            stored_BSNE[at, :num] = one.taps_TNE
        return assemble(self.facts, ids_BS, stored_BSNE, written_BS, len_B)
