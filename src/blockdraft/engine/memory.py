"""How much memory a request needs, and whether there is that much: admission by bytes.

Owns the measured cost of a position in a row of the target and of the draft, and the sum of what is set aside. Knows no
queue. A request is counted for its whole possible length, prompt and max_new_tokens, so that a row which was admitted
never has to wait for memory.

What a row holds is taken as a line in its positions, measured on short rows filled in one go, which have the most spare
room. Rows that grow by doubling are such a line. Those of ``targets.fused`` have a sixteenth to spare, which shows only
beyond a thousand positions: there they hold up to 6 % more than the line says. States of recurrent layers and what is
kept to take a block back are its fixed part. Layers with a window hold less than the line says, once they are longer
than it; the moment in which a buffer moves to a larger one, and the activations of a forward, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blockdraft.draft import DraftModel
from blockdraft.engine.request import Request
from blockdraft.engine.row import MAX_PENDING, MAX_PENDING_BYTES
from blockdraft.targets import Target

__all__ = ["Costs", "measure_costs"]

_PROBED = (64, 128)  # positions; smaller rows have at least as much room as the first


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes of one row: ``fixed + per_position * positions``, of the target and of the draft."""

    target_fixed: int
    target_per_position: float
    draft_fixed: int
    draft_per_position: float
    max_draft_positions: int | None
    """Positions beyond which the draft's context does not grow: twice its widest window. None: it always grows."""

    def of_row(self, num_positions: int, *, speculates: bool) -> int:
        """At most so many bytes are held by a row of this many positions."""
        num_positions = max(num_positions, _PROBED[0])
        need = self.target_fixed + self.target_per_position * num_positions
        if speculates:
            most = self.max_draft_positions
            seen = num_positions if most is None else max(min(num_positions, most), _PROBED[0])
            need += self.draft_fixed + self.draft_per_position * seen
        return int(need)

    def of_request(self, request: Request, *, has_draft: bool) -> int:
        """Bytes to set aside for a request."""
        num_positions = len(request.prompt_ids) + request.max_new_tokens
        return self.of_row(num_positions, speculates=has_draft and request.speculate is not False)


@torch.inference_mode()
def measure_costs(target: Target, draft: DraftModel | None) -> Costs:
    """Fill a few rows, and free them again."""
    short, long = (min(count, target.facts.max_length - 8) for count in _PROBED)
    width = 8 if draft is None else draft.config.max_width
    first, _ = _filled(target, short, 1)
    second, after_block = _filled(target, long, min(width, target.facts.max_length - long))
    per_position = (second - first) / (long - short) if long > short else second / max(long, 1)
    fixed = max(0, round(after_block - per_position * long))
    if draft is None:
        return Costs(fixed, per_position, 0, 0.0, None)
    config = draft.config
    sizes = []
    for count in _PROBED:
        cache = draft.new_cache()
        taps = torch.zeros(count, config.num_taps, config.target_hidden_size, dtype=target.dtype, device=target.device)
        draft.inject_rows([taps], [cache])
        sizes.append(cache.num_bytes)
    slope = (sizes[1] - sizes[0]) / (_PROBED[1] - _PROBED[0])
    held_back = min(MAX_PENDING * taps[0].nbytes, MAX_PENDING_BYTES)
    window = config.max_window
    return Costs(
        fixed,
        per_position,
        max(0, round(sizes[1] - slope * _PROBED[1])) + held_back,
        slope,
        None if window is None else 2 * window,
    )


def _filled(target: Target, count: int, width: int) -> tuple[int, int]:
    """Bytes of a row after ``count`` positions at once, and after a block of ``width`` more."""
    row = target.new_row()
    try:
        sizes = []
        for size in (count, width):
            target.forward([torch.zeros(size, dtype=torch.long)], [row], num_logits=0)
            target.rollback([row], [size])
            sizes.append(row.num_bytes)
        return sizes[0], sizes[1]
    finally:
        target.free(row)
