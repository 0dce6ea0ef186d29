"""Proposals from the text itself: what followed the last time that it ended like this.

Owns the index of a text's own n-grams and how likely such proposals are to stand, by the length of the match. A
proposal that is fixed by the text before it has a one-hot law, so that it is as lossless as the draft's, and it costs
no pass of the draft. Knows ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

from blockdraft.engine.expected import AcceptanceRecord, Ease

__all__ = ["LookupRecord", "TextIndex"]

MIN_MATCH = 2  # ids that must agree
MAX_MATCH = 12  # beyond it two matches are as good as each other
MAX_PLACES = 8  # latest earlier places that are looked at
_STEPS = (2, 3, 4, 6, 10)  # least lengths of the classes that acceptance is kept for
# Conditional acceptance by class, the same at every position: greedy answers of a small model to GSM8K questions.
_PRIOR = (0.52, 0.6, 0.7, 0.78, 0.83)


class TextIndex:
    """Where each pair of ids stands in a text that only grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], list[int]] = {}
        self._num_seen = 1  # pairs that end before this place are in the index

    def find(self, ids: Sequence[int], most: int) -> tuple[int, list[int]]:
        """(length of the match, at most ``most`` ids that followed it); (0, []) where there is none.

        Of the latest earlier places that end like the text the one with the longest match counts, of equal ones the
        latest. The text must be the one of the calls before, or longer.
        """
        last = len(ids) - 1
        if last < 1 or most < 1:
            return 0, []
        places = self._places
        for at in range(self._num_seen, last):
            places.setdefault((ids[at - 1], ids[at]), []).append(at)
        self._num_seen = max(self._num_seen, last)
        best, length = -1, 0
        for place in reversed(places.get((ids[last - 1], ids[last]), ())[-MAX_PLACES:]):
            same = MIN_MATCH
            while same < MAX_MATCH and same <= place and ids[place - same] == ids[last - same]:
                same += 1
            if same > length:
                best, length = place, same
        if best < 0:
            return 0, []
        return length, list(ids[best + 1 : best + 1 + most])


class LookupRecord:
    """Acceptance of such proposals over all requests of an engine, by class of match length."""

    def __init__(self, num_positions: int) -> None:
        self._records = [AcceptanceRecord(num_positions, [share]) for share in _PRIOR]

    def survival(self, length: int, ease: Ease) -> list[float]:
        """P(at least k of the proposals stand) for k = 1, 2, ... after a match of this length."""
        return self._records[_class(length)].survival(ease)

    def observe(self, length: int, ease: Ease, num_proposed: int, num_accepted: int) -> None:
        record = self._records[_class(length)]
        record.observe(ease, num_proposed, num_accepted)
        record.refresh()

    def shares(self) -> dict[int, list[float]]:
        """Conditional acceptance by position, for each least length of match."""
        return {length: record.shares for length, record in zip(_STEPS, self._records, strict=True)}


def _class(length: int) -> int:
    return sum(length >= least for least in _STEPS) - 1
