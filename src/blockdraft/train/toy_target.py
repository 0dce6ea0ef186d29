"""A tiny random target and one text that it wrote, for the gates: real enough for the engine and the trainer.

Owns no maths of drafts. Every forward pass computes a row's whole text anew, so a row's state is its list of ids and
rolling back is exact by construction.

Letters: T positions, S positions of the text, N taps, E target width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.config import DraftConfig, TapStream, TargetFacts
from blockdraft.targets import Row, Scored
from blockdraft.targets.contract import checked_length
from blockdraft.train.corpus import CorpusBatch
from blockdraft.train.corpus_facts import CorpusFacts
from blockdraft.train.head import FrozenHead

__all__ = ["OneText", "ToyTarget"]

_DECAY = 0.7
_EPS = 1e-6


class _ToyRow(Row):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_last = 0
        self.is_free = False

    @property
    def num_positions(self) -> int:
        return len(self.ids)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.ids)

    @property
    def was_freed(self) -> bool:
        return self.is_free


class ToyTarget:
    """Random float64 layers that mix the past with falling weights; random positions keep its text from looping.

    It has the vocabulary, the width and the layers that `config` was made for.
    """

    dtype = torch.float64
    device = torch.device("cpu")
    tap_stream: TapStream = "prefix"

    def __init__(self, config: DraftConfig, *, seed: int) -> None:
        self.facts = TargetFacts(
            model_type="toy",
            vocab_size=config.vocab_size,
            hidden_size=config.target_hidden_size,
            num_layers=config.num_target_layers,
            max_length=config.max_position_embeddings,
            is_recurrent=False,
            eos_token_ids=(),
            pad_token_id=None,
        )
        self.tap_layer_ids = config.target_layer_ids
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        width, facts = config.target_hidden_size, self.facts
        self.embed_VE, self.head_VE = normal(facts.vocab_size, width), normal(facts.vocab_size, width)
        self.head_VE[config.mask_token_id] = 0  # no text holds the mask id
        self.final_norm_E = 1 + 0.1 * normal(width)
        self._positions_SE = normal(facts.max_length, width)
        self._layers = [normal(width, width) * width**-0.5 for _ in range(facts.num_layers)]

    def new_row(self) -> Row:
        return _ToyRow()

    def free(self, row: Row) -> None:
        assert isinstance(row, _ToyRow)
        row.ids, row.is_free = [], True

    @property
    def can_truncate(self) -> bool:
        return True

    def copy(self, row: Row, length: int | None = None) -> Row:
        assert isinstance(row, _ToyRow)
        made = _ToyRow()
        made.ids = row.ids[: checked_length(row, length, can_truncate=True)]
        return made

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        return [self._score(x.tolist(), row, num_logits) for x, row in zip(ids, rows, strict=True)]

    def _score(self, ids: list[int], row: Row, num_logits: int | None) -> Scored:
        assert isinstance(row, _ToyRow)
        row.ids, row.num_last = row.ids + ids, len(ids)
        outputs = self.outputs(row.ids)
        kept = len(ids) if num_logits is None else num_logits
        hidden_TE = F.rms_norm(outputs[-1], (self.facts.hidden_size,), self.final_norm_E, _EPS)
        taps_TNE = torch.stack([outputs[layer] for layer in self.tap_layer_ids], dim=1)
        return Scored(logits_TV=self.logits(hidden_TE[len(row.ids) - kept :]), taps_TNE=taps_TNE[-len(ids) :])

    def outputs(self, ids: Sequence[int]) -> list[Tensor]:
        """What each layer puts out, [T, E]."""
        count = len(ids)
        back_TT = torch.arange(count)[:, None] - torch.arange(count)
        mix_TT = torch.where(back_TT >= 0, _DECAY ** back_TT.clamp_min(0).double(), 0.0)
        x_TE = self.embed_VE[list(ids)] + self._positions_SE[:count]
        found = []
        for weight_EE in self._layers:
            x_TE = x_TE + torch.tanh(mix_TT @ x_TE @ weight_EE)
            found.append(x_TE)
        return found

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        for row, kept in zip(rows, keep, strict=True):
            assert isinstance(row, _ToyRow) and 0 <= kept <= row.num_last
            row.ids = row.ids[: len(row.ids) - row.num_last + kept]
            row.num_last = kept

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_VE[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head_VE.T

    def head(self, dtype: torch.dtype) -> FrozenHead:
        """What a draft borrows."""
        return FrozenHead(
            self.embed_VE.to(dtype), self.final_norm_E.to(dtype), self.head_VE.to(dtype), final_norm_eps=_EPS
        )

    def write(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """The prompt and its greedy continuation."""
        ids = list(prompt)
        for _ in range(num_new):
            row = self.new_row()
            [scored] = self.forward([torch.tensor(ids)], [row], num_logits=1)
            ids.append(int(scored.logits_TV[0].argmax()))
        return ids


class OneText:
    """A corpus (what the trainer asks of one) of a single text that the target wrote."""

    shard_names: list[str] = []  # noqa: RUF012

    def __init__(self, target: ToyTarget, ids: Sequence[int], num_prompt: int) -> None:
        self.ids, self.num_prompt = list(ids), num_prompt
        self.facts = CorpusFacts(
            target=target.facts.model_type,
            weights_sha256="",
            tokenizer_sha256="",
            chat_template_sha256="",
            vocab_size=target.facts.vocab_size,
            target_hidden_size=target.facts.hidden_size,
            target_layer_ids=target.tap_layer_ids,
            tap_stream="plain",
            last_layer_id=target.facts.num_layers - 1,
            features_dtype="bfloat16",
        )
        outputs = [output.float() for output in target.outputs(self.ids)]
        self._taps_1SNE = torch.stack([outputs[layer] for layer in target.tap_layer_ids], dim=1)[None]
        self._taps_1SNE[:, -1] = 0  # as in a corpus: the last id was never fed
        self._last_1SE = outputs[-1][None]

    def __len__(self) -> int:
        return 1

    @property
    def num_answer_tokens(self) -> int:
        return len(self.ids) - self.num_prompt

    def rescan(self) -> int:
        return 0

    def use_shards(self, names: Sequence[str]) -> None:
        assert not names

    def token_ids(self) -> Tensor:
        return torch.tensor(self.ids).unique()

    def check_fits(self, config: DraftConfig) -> None:
        self.facts.check_fits(config)

    def batch(self, indices: Sequence[int]) -> CorpusBatch:
        count = len(indices)
        written_S = torch.arange(len(self.ids)) >= self.num_prompt
        return CorpusBatch(
            ids_BS=torch.tensor([self.ids] * count),
            taps_BSNE=self._taps_1SNE.repeat(count, 1, 1, 1),
            written_BS=written_S.repeat(count, 1),
            len_B=torch.tensor([len(self.ids)] * count),
            last_BSE=self._last_1SE.repeat(count, 1, 1),
        )
