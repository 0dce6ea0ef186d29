"""A row's grammar in the engine: which ids each position of a block may have, and the way of its text through it.

Owns the masks along proposals, what end ids mean under a grammar, and the grammars that an engine keeps compiled. The
grammar itself is text.Matcher's; what a mask does to a distribution is accept.py's.

Row i of a block is masked by the grammar after the committed text and proposals[:i]. A proposal that its row forbids
has p = 0, so that no later row is ever answered for, and after an end id nothing is committed: those rows stay free.

Letters: T positions scored, V vocabulary rows of the target.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.errors import RequestError
from blockdraft.text import CompiledGrammar, Grammar, Matcher, Tokenizer, compile_grammar, why_no_grammars

__all__ = ["Allowed", "GrammarCache", "RowConstraint"]

MAX_KEPT = 64
MAX_KEPT_CHARS = 8 * 2**20  # of all kept grammars together


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """Ids that the rows of a block may have; rows from ``num_known`` on have no mask, and ``error`` says why."""

    ids_TV: NDArray[np.bool_]
    num_known: int
    error: str | None

    def on(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.ids_TV).to(device)


class RowConstraint:
    """The way of one text through its grammar.

    An end id may come where the text may end, and nothing else where it must. A special token that ends texts and that
    the grammar names itself may come where it is the grammar's last.
    """

    def __init__(
        self, matcher: Matcher, *, stop_ids: Collection[int], special_ids: Collection[int], vocab_size: int
    ) -> None:
        self._matcher = matcher
        self._stop_ids = frozenset(stop_ids)
        self._end_ids = np.array(sorted(i for i in self._stop_ids if i < vocab_size), dtype=np.int64)
        self._special_ends = [i for i in self._end_ids.tolist() if i in special_ids]
        self._vocab_size = vocab_size
        self._ahead: list[int] = []  # proposals that the matcher has gone through and that are not committed
        self._error: str | None = None

    def allowed(self, proposals: Sequence[int]) -> Allowed:
        """The masks of the rows after the committed text and after each proposal."""
        self._go_back(0)
        num_rows = len(proposals) + 1
        ids_TV = np.ones((num_rows, self._vocab_size), dtype=np.bool_)
        if self._error is not None:
            return Allowed(ids_TV, 0, self._error)
        for row in range(num_rows):
            try:
                ids_TV[row] = self._row()
                if row == len(proposals) or not ids_TV[row, proposals[row]] or proposals[row] in self._stop_ids:
                    break
                self._ahead.append(proposals[row])
                self._matcher.consume(proposals[row])
            except (
                Exception
            ) as error:  # whatever breaks a grammar ends its own row, and only where the text comes to it
                return Allowed(ids_TV, len(self._ahead), _reason(error))
        return Allowed(ids_TV, num_rows, None)

    def _row(self) -> NDArray[np.bool_]:
        """[V]: the ids that may come next."""
        mask = self._matcher.mask()
        ids_V = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(mask.bits.view(np.uint8), bitorder="little")[: self._vocab_size]
        ids_V[: len(bits)] = bits
        named = [i for i in self._special_ends if ids_V[i] and not mask.may_end]
        ids_V[self._end_ids] = mask.may_end
        for token_id in named:
            ids_V[token_id] = self._matcher.may_end_after(token_id)
        return ids_V

    def advance(self, ids: Sequence[int]) -> None:
        """Commit ids that do not end the text: proposals that fell are taken back. A breach is told by `allowed`."""
        num_kept = 0
        while num_kept < min(len(ids), len(self._ahead)) and ids[num_kept] == self._ahead[num_kept]:
            num_kept += 1
        self._go_back(num_kept)
        try:
            for token_id in ids[num_kept:]:
                self._matcher.consume(token_id)
        except Exception as error:
            self._error = _reason(error)

    def _go_back(self, num_kept: int) -> None:
        """Take back all but the first ``num_kept`` of the ids that the matcher is ahead by."""
        try:
            self._matcher.rollback(len(self._ahead) - num_kept)
        except Exception as error:
            self._error = _reason(error)
        self._ahead = []


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class GrammarCache:
    """The grammars that were used last, compiled for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar made ready; RequestError or UnavailableError where that cannot be."""
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return known
        if self._tokenizer is None:
            raise RequestError(f"{why_no_grammars(None)}; load the target with its tokenizer")
        made = compile_grammar(grammar, self._tokenizer)  # may take seconds: others go on
        with self._lock:
            self._kept[grammar] = made
            self._kept.move_to_end(grammar)
            while len(self._kept) > MAX_KEPT or self._num_chars > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
        return made

    @property
    def _num_chars(self) -> int:
        return sum(len(grammar.source) for grammar in self._kept)

    def begin(self, compiled: CompiledGrammar, stop_ids: Collection[int]) -> RowConstraint:
        """A text that begins under this grammar; RequestError if no first id is left of those that the target has."""
        assert self._tokenizer is not None
        if not stop_ids:
            raise RequestError("a grammar ends its text with an end id, and there is none; give stop_ids")
        row = RowConstraint(
            compiled.matcher(),
            stop_ids=stop_ids,
            special_ids=self._tokenizer.special_ids,
            vocab_size=self._vocab_size,
        )
        first = row.allowed([])
        if first.error is not None or not first.ids_TV.any():
            raise RequestError(first.error or f"{compiled.grammar.name} leaves the target no first token")
        return row
