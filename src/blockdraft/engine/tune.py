"""From a loaded pair to the policy of its widths: the stored or measured costs, and what is known of the draft.

Owns where the expected acceptance comes from: the record of the run that trained the draft, where there is one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from blockdraft.draft import DraftModel
from blockdraft.engine.adaptive import AdaptiveWidth
from blockdraft.engine.cost_probe import cost_key, stored_costs
from blockdraft.engine.costs import StepCosts
from blockdraft.targets import Target, default_cache_dir

__all__ = ["adaptive_width", "known_acceptance"]

_RUN_FILE = "run.json"


def adaptive_width(
    target: Target,
    draft: DraftModel,
    *,
    target_folder: Path,
    draft_folder: Path,
    max_rows: int,
    options: Mapping[str, object],
) -> AdaptiveWidth:
    """The policy for this pair on this machine. Measures for a few seconds where no table of it is stored.

    `options` are further settings of the loaded pair that change its times.
    """
    key = cost_key(
        target,
        draft,
        target_folder=target_folder,
        draft_folder=draft_folder,
        max_rows=max_rows,
        options=options,
    )
    model = stored_costs(key, target, draft, max_rows=max_rows, cache_dir=default_cache_dir())
    return AdaptiveWidth(
        StepCosts(model), num_positions=draft.config.max_width - 1, prior=known_acceptance(draft_folder)
    )


def known_acceptance(draft_folder: Path) -> list[float] | None:
    """Conditional acceptance by position from the draft's run.json, as its evaluation in training served it."""
    with contextlib.suppress(OSError, ValueError):
        record = json.loads((draft_folder / _RUN_FILE).read_text("utf-8"))
        evaluation = record.get("evaluation") if isinstance(record, dict) else None
        shares = evaluation.get("conditional_acceptance") if isinstance(evaluation, dict) else None
        if isinstance(shares, list):
            known = []
            for share in shares:
                if not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
                    break
                known.append(float(share))
            return known or None
    return None
