"""SGLang: `sglext.spec_tokens_details` of a request, or `meta_info` in older versions.

Its acceptance length is C / S: the token of the prefill is counted, what a stop cut off is not. So it is kept as it
came and 1 + A / S is made of the counters. Proposals are S (rows - 1). The gauges of its /metrics are averages of a
window and of no use for one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages, server_info_facts
from blockdraft.bench.servers.answer import Answer, whole
from blockdraft.bench.system import Setting

__all__ = ["Sglang"]

# Newest name first.
STEPS = ("spec_verify_ct",)
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class Sglang(Adapter):
    name = "sglang"
    owned_by = "sglang"
    metrics_prefix = "sglang:"
    pages = ("/server_info", "/get_server_info")
    advice = "start a version that knows return_spec_tokens_details or return_meta_info, with a draft"
    neutral: ClassVar[Mapping[str, Any]] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    def facts(self, pages: Pages) -> EngineFacts:
        return server_info_facts(pages, self.pages)

    def body(self, setting: Setting) -> dict[str, Any]:
        return {"return_spec_tokens_details": True, "return_meta_info": True}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        found = answer.object_of("sglext", "spec_tokens_details") or answer.object_of("meta_info")
        steps, accepted, proposed = (_first(found, names) for names in (STEPS, ACCEPTED, PROPOSED))
        if steps is None or accepted is None or proposed is None:
            return None
        num_steps, num_proposed = whole(steps, STEPS[0]), whole(proposed, PROPOSED[0])
        k, rest = divmod(num_proposed, num_steps) if num_steps else (0, 0)
        if width is not None:
            k, rest = width - 1, 0
        rate, histogram = found.get("spec_accept_rate"), _first(found, HISTOGRAM)
        has_cap = "spec_cap_length" in found  # steps of fewer proposals than the block has
        return Counts(
            num_steps=num_steps,
            num_draft_tokens=num_proposed,
            num_accepted_draft_tokens=whole(accepted, ACCEPTED[0]),
            num_emitted_tokens=answer.num_emitted,
            accepted_histogram=_trimmed(histogram),
            max_draft_tokens=k if k and not rest else None,
            has_fixed_depth=bool(k) and not rest and not has_cap,
            reported_acceptance_rate=float(rate) if isinstance(rate, int | float) and num_proposed else None,
        )


def _first(found: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _trimmed(value: object) -> tuple[int, ...] | None:
    """A histogram without the zeros at its end; None where there is none."""
    if not isinstance(value, list):
        return None
    counts = [whole(item, HISTOGRAM[0]) for item in value]
    while counts and not counts[-1]:
        counts.pop()
    return tuple(counts) or None
