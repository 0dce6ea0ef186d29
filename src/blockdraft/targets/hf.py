"""Any causal language model of transformers as a target, also one with recurrent or convolution states.

Owns: taps, rows, rollback, the refusal of models that keep state elsewhere. Must not know drafts, requests or files.
The model is used through what every family shares (``get_decoder().layers``, the embedding and head accessors, the
cache calls), never through a family's own names.

Shapes: T positions fed to the target, N taps, E target width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from blockdraft.config import TapStream, TargetFacts
from blockdraft.errors import PairError

from .contract import Row, Scored, check_forward, checked_length, checked_taps
from .hf_attention import can_part_rows, part_rows_
from .hf_cache import RowCache, WholeLayer, refusal
from .hf_rows import WAYS, Joint, Part, Way, take_over
from .model_facts import cache_word, decoder_of, facts_of, is_spread
from .recurrent import Mixers, Undo, Watched, watched
from .selftest import identity_of, prove, says_the_same
from .streams import checked_stream, join_streams

__all__ = ["HFTarget"]


class _HFRow(Row):
    """A row of one HFTarget; ``num_last`` of its positions came with the last forward."""

    def __init__(self, owner: HFTarget, cache: RowCache, undo: Undo | None) -> None:
        self.owner = owner
        self.cache: RowCache | None = cache
        self.undo = undo  # of the states; None where the row has none
        self.length = 0
        self.num_last = 0

    @property
    def num_positions(self) -> int:
        return self.length

    @property
    def num_bytes(self) -> int:
        beside = 0 if self.undo is None else self.undo.num_bytes
        return 0 if self.cache is None else self.cache.num_bytes + beside

    @property
    def was_freed(self) -> bool:
        return self.cache is None

    def shorten(self, length: int) -> None:
        """Forget all but the first ``length`` positions; those forgotten belong to the last forward."""
        assert self.cache is not None
        self.cache.shorten(length)
        if self.undo is not None:
            self.undo.shorten(length)


class _Capture:
    """Layer outputs of the forward pass that runs now, for the one target that runs it."""

    def __init__(self, owner: HFTarget) -> None:
        self.owner = owner
        self.outputs: dict[int, Tensor] = {}
        self._token: Token[_Capture | None] | None = None

    def __enter__(self) -> None:
        self._token = _capture.set(self)

    def __exit__(self, *_error: object) -> None:
        assert self._token is not None
        _capture.reset(self._token)


# Not a field: hooks of two targets on one model, or of two threads, must not see each other.
_capture: ContextVar[_Capture | None] = ContextVar("blockdraft_capture", default=None)


class HFTarget:
    """A target around a loaded transformers model. The model is not copied; close() removes the hooks."""

    def __init__(
        self, model: nn.Module, tap_layer_ids: Sequence[int] = (), *, tap_stream: TapStream = "prefix"
    ) -> None:
        self._model = cast(Any, model)
        self._config = self._model.config
        self._text_config = self._config.get_text_config(decoder=True)
        self.facts = facts_of(self._model)
        self.tap_stream = checked_stream(tap_stream, self.facts)
        self._cache_word = cache_word(self._model, self.facts.model_type)
        self._decoder, self._layers = decoder_of(self._model, self.facts)
        self.tap_layer_ids = checked_taps(tap_layer_ids, len(self._layers))
        self._embedding: Tensor = self._model.get_input_embeddings().weight
        self._head: Any = self._model.get_output_embeddings()
        self.dtype: torch.dtype = self._embedding.dtype
        self.device: torch.device = self._embedding.device
        model.eval()
        self._mixers: Mixers | None = None
        self._can_truncate = False
        self._way: Way | None = None
        self._was_tried = False  # whether the way is known
        self._let_go: Callable[[], None] | None = None
        self._handles = [
            self._layers[layer].register_forward_hook(self._hook(layer)) for layer in set(self.tap_layer_ids)
        ]
        try:
            self._probe()
            if self._mixers is not None or self.facts.is_recurrent:
                prove(self, identity_of(self._model))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the hooks off the model. The target must not be used afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._mixers is not None:
            self._mixers.close()
        if self._let_go is not None:
            self._let_go()
            self._let_go = None

    def new_row(self) -> Row:
        cache = RowCache(self._config, self.facts.model_type)
        return _HFRow(self, cache, None if self._mixers is None else Undo(self._mixers, cache))

    def free(self, row: Row) -> None:
        owned = self._owned(row)
        owned.cache, owned.undo, owned.length, owned.num_last = None, None, 0, 0

    @property
    def can_truncate(self) -> bool:
        return self._can_truncate

    def copy(self, row: Row, length: int | None = None) -> Row:
        source = self._owned(row)
        kept = checked_length(source, length, can_truncate=self._can_truncate)
        assert source.cache is not None
        cache = RowCache(self._config, self.facts.model_type)
        with torch.inference_mode():
            if source.undo is not None:
                source.undo.settle()
            cache.take(source.cache, kept)
        made = _HFRow(self, cache, None if self._mixers is None else Undo(self._mixers, cache, kept))
        made.length = kept
        return made

    def forward(self, ids: Sequence[Tensor], rows: Sequence[Row], *, num_logits: int | None = None) -> list[Scored]:
        """One ``Scored`` per row; on an error every row is as it was.

        Several rows run in one pass where a trial, at the first such call, shows that it says the same as a pass for
        each; otherwise one after another.
        """
        owned = [self._owned(row) for row in rows]
        check_forward(ids, owned, num_logits, max_length=self.facts.max_length)
        return self._forward(ids, owned, num_logits, self.way if len(owned) > 1 else None)

    @property
    def way(self) -> Way | None:
        """Where rows part in a pass of many, tried when first asked for; None: each has a pass of its own."""
        if not self._was_tried:
            self._was_tried = True
            self._way = self._found_way()
        return self._way

    def _forward(
        self, ids: Sequence[Tensor], owned: Sequence[_HFRow], num_logits: int | None, way: Way | None
    ) -> list[Scored]:
        before = [row.length for row in owned]
        try:
            if way is not None:
                return self._score_jointly(ids, owned, num_logits, way)
            return [self._score(x, row, num_logits) for x, row in zip(ids, owned, strict=True)]
        except BaseException:
            for row, length in zip(owned, before, strict=True):
                row.shorten(length)
                row.length, row.num_last = length, 0
            raise

    def rollback(self, rows: Sequence[Row], keep: Sequence[int]) -> None:
        if len(rows) != len(keep):
            raise ValueError(f"rollback of {len(rows)} rows was given {len(keep)} numbers to keep")
        owned = [self._owned(row) for row in rows]
        for row, kept in zip(owned, keep, strict=True):
            if row.cache is None or not 0 <= kept <= row.num_last:
                raise ValueError(f"cannot keep {kept} positions: the last forward left {row.num_last}")
        for row, kept in zip(owned, keep, strict=True):
            row.length -= row.num_last - kept
            row.num_last = kept
            row.shorten(row.length)

    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.embedding(ids.to(self.device), self._embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Tensor, self._head(hidden)).to(self.device)  # it may lie elsewhere

    # ---- inside ----

    def _owned(self, row: Row) -> _HFRow:
        if not isinstance(row, _HFRow) or row.owner is not self:
            raise ValueError("this row belongs to another target")
        return row

    def _score(self, ids_T: Tensor, row: _HFRow, num_logits: int | None) -> Scored:
        num_new = ids_T.shape[0]
        capture = _Capture(self)
        # Inference mode saves a tenth of the time between the matrix products; what leaves this class is made
        # outside it, so that a trainer may use it in a graph.
        with torch.inference_mode():
            ids_1T = ids_T.to(self.device)[None]
            if row.undo is not None:
                row.undo.begin(ids_1T)
            with capture, nullcontext() if row.undo is None else row.undo.recording():
                inner = self._run(ids_1T, row.cache, num_logits)
        row.length += num_new
        row.num_last = num_new
        with torch.no_grad():
            empty_0V = self._embedding.new_empty((0, self.facts.vocab_size))
            logits_TV = empty_0V if inner is None else inner[0].clone()
            if self.tap_layer_ids:
                taps_TNE = torch.stack([capture.outputs[i][0] for i in self.tap_layer_ids], dim=1)
            else:
                taps_TNE = self._embedding.new_empty((num_new, 0, self.facts.hidden_size))
        return Scored(logits_TV=logits_TV, taps_TNE=taps_TNE)

    def _score_jointly(
        self, ids: Sequence[Tensor], rows: Sequence[_HFRow], num_logits: int | None, way: Way
    ) -> list[Scored]:
        counts = [x.shape[0] for x in ids]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        kept = [count if num_logits is None else min(count, num_logits) for count in counts]
        capture, parts = _Capture(self), []
        with torch.inference_mode():
            texts = [x.to(self.device) for x in ids]
            for x, row, start in zip(texts, rows, starts, strict=True):
                assert row.cache is not None
                if row.undo is not None:
                    row.undo.begin(x[None], is_replaced=True)
                parts.append(Part(row.cache, row.undo, row.length, start, x.shape[0]))
            joint = Joint(parts, self._mixers, way, self._text_config, self._embedding)
            positions = [torch.arange(part.length, part.length + part.count, device=self.device) for part in parts]
            wanted = torch.cat([
                torch.arange(part.start + part.count - count, part.start + part.count, device=self.device)
                for part, count in zip(parts, kept, strict=True)
            ])  # fmt: skip
            with capture, joint.runs():
                inner = self._run(
                    torch.cat(texts)[None],
                    joint.cache,
                    num_logits if num_logits in (None, 0) else wanted,
                    position_ids=torch.cat(positions)[None],
                )
        for row, count in zip(rows, counts, strict=True):
            row.length += count
            row.num_last = count
        with torch.no_grad():
            empty_0V = self._embedding.new_empty((0, self.facts.vocab_size))
            logits = [empty_0V] * len(rows) if inner is None else inner[0].clone().split(kept)
            if self.tap_layer_ids:
                taps_FNE = torch.stack([capture.outputs[i][0] for i in self.tap_layer_ids], dim=1)
            else:
                taps_FNE = self._embedding.new_empty((sum(counts), 0, self.facts.hidden_size))
        return [Scored(logits_TV=x, taps_TNE=y) for x, y in zip(logits, taps_FNE.split(counts), strict=True)]

    def _run(self, ids_1T: Tensor, cache: Any, wanted: int | Tensor | None, **kwargs: Any) -> Tensor | None:
        """Logits of the last ``wanted`` positions, or of those whose indices it holds, or of all of them."""
        kwargs |= {self._cache_word: cache, "use_cache": True}
        if isinstance(wanted, int) and wanted == 0:  # the head is a third of a small model: leave it out
            self._decoder(input_ids=ids_1T, **kwargs)
            return None
        output = self._model(input_ids=ids_1T, logits_to_keep=0 if wanted is None else wanted, **kwargs)
        logits_1TV = cast(Tensor, output.logits)
        if isinstance(wanted, Tensor):  # of old families, which give those of all positions whatever is asked
            return logits_1TV if logits_1TV.shape[1] == len(wanted) else logits_1TV[:, wanted]
        return logits_1TV if wanted is None else logits_1TV[:, -wanted:]

    def _found_way(self) -> Way | None:
        seen = self._watched()
        cache = RowCache(self._config, self.facts.model_type)
        if not seen.can_repeat or cache.others:
            return None
        if is_spread(self._model):  # indices of positions would lie on one device
            return None
        keeps_all = all(isinstance(x, WholeLayer) or not hasattr(x, "get_mask_sizes") for x in cache.layers)
        for way in WAYS:
            # Only a backend of ours makes the masks of rows; without one they are plain causal ones.
            may_run = seen.are_apart and (keeps_all or can_part_rows(self._model))
            if not (may_run if way == "modules" else can_part_rows(self._model)):
                continue
            let_go = take_over(self._model, [*seen.movers, *seen.writers], lambda: part_rows_(self._model))
            if says_the_same(self, partial(self._forward, way=way)):
                self._let_go = let_go
                return way
            let_go()
        return None

    def _watched(self) -> Watched:
        if self._mixers is not None:
            return self._mixers.seen
        cache = RowCache(self._config, self.facts.model_type)
        with torch.inference_mode():
            return watched(self._model, cache, lambda ids, row: self._run(ids.to(self.device), row, 0))

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            capture = _capture.get()
            if capture is not None and capture.owner is self:
                facts = self.facts
                joined = join_streams(facts.model_type, self.tap_stream, output, facts.hidden_size)
                capture.outputs[layer] = joined.to(self.device)

        return keep

    def _probe(self) -> None:
        """Feed one id: state kept elsewhere, or taps of another shape, show now and not in a request."""
        capture = _Capture(self)
        cache = RowCache(self._config, self.facts.model_type)
        try:
            with torch.inference_mode(), capture:
                self._run(torch.zeros((1, 1), dtype=torch.long, device=self.device), cache, 0)
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # of code that meets a wrong cache
            reason = " ".join(str(error).split())[:160]
            what = f"a cache of its own config that its forward cannot use ({reason})"
            raise PairError(refusal(self.facts.model_type, what)) from error
        has_states = bool(cache.others) or any(any(layer.has_previous_state.values()) for layer in cache.states)
        if cache.lengths != {1} and not (has_states and cache.lengths <= {1}):
            raise PairError(refusal(self.facts.model_type, "state outside its key/value cache"))
        cache.shorten(0)
        first = cache.drops_before
        self._can_truncate = not has_states and (first is None or first >= self.facts.max_length)
        if has_states:
            cache = RowCache(self._config, self.facts.model_type)
            with torch.inference_mode():
                self._mixers = Mixers(self._model, lambda ids, row: self._run(ids.to(self.device), row, 0), cache)
        for layer, output in capture.outputs.items():
            if tuple(output.shape) != (1, 1, self.facts.hidden_size):
                raise PairError(
                    f"layer {layer} of {self.facts.model_type!r} puts out {tuple(output.shape)}, not one stream of"
                    f" width {self.facts.hidden_size}, and no published draft says what of it a tap is:"
                    f" {_stream_advice(self.facts)}"
                )


def _stream_advice(facts: TargetFacts) -> str:
    if facts.has_plain_taps:
        return "name another target"
    return f"name it with tap_stream ({', '.join(facts.tap_streams)}), as its draft was trained"
