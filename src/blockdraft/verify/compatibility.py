"""Do the two halves fit: every rule of pairing, from their files alone."""

from __future__ import annotations

from pathlib import Path

from blockdraft.errors import PairError
from blockdraft.formats import read
from blockdraft.inspection import read_target_facts
from blockdraft.inspection.pair import examine_pair
from blockdraft.verify.report import Check

__all__ = ["check_compatibility"]

NO_FIT = "the draft does not fit the target"


def check_compatibility(draft: Path, target: Path, *, allow_mask_is_eos: bool, block_size: int | None) -> Check:
    """Passed if no rule of pairing fails; a draft that cannot be read at all for this target fails with the reason."""
    facts = read_target_facts(target)
    try:
        checkpoint = read(draft, allow_mask_is_eos=allow_mask_is_eos, target=facts, block_size=block_size)
    except PairError as error:
        return Check(name="compatibility", outcome="failed", finding=str(error), reason=f"{NO_FIT}: {error}")
    found = examine_pair(checkpoint.config, facts, checkpoint.tensors, allow_mask_is_eos=allow_mask_is_eos)
    failed = [f"{rule['name']}: {rule['detail']}" for rule in found["rules"] if rule["verdict"] == "fail"]
    counts = f"{len(found['rules'])} rules of pairing, {len(failed)} broken"
    return Check(
        name="compatibility",
        outcome="failed" if failed else "passed",
        finding=counts,
        reason=f"{NO_FIT}: {'; '.join(failed)}" if failed else None,
        figures={"rules": found["rules"]},
    )
