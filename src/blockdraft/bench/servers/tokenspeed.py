"""TokenSpeed: steps of a request in `meta_info`, counters of /metrics.

`accept_draft_tokens` is (C - 1) / S: the acceptance length with the bonus token, despite its name, and of what the user
got. Its counter of draft tokens adds the rows of a block, so that a rate made of it is too low (12.5 % at 8 rows); the
anchors are taken off. Its counters leave out steps in which another request's prompt was worked on too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages, server_info_facts
from blockdraft.bench.servers.answer import Answer, AnswerError, whole
from blockdraft.bench.servers.prometheus import CounterNames
from blockdraft.bench.system import Setting

__all__ = ["TokenSpeed"]


class TokenSpeed(Adapter):
    name = "tokenspeed"
    owned_by = "tokenspeed"
    metrics_prefix = "tokenspeed:"
    pages = ("/server_info", "/get_server_info")
    counters = CounterNames(
        steps="tokenspeed:spec_decode_num_drafts",
        proposed="tokenspeed:spec_decode_num_draft_tokens",
        accepted="tokenspeed:spec_decode_num_accepted_tokens",
        counts_rows=True,
    )
    advice = "start it with --enable-metrics, and name its block's rows with --widths where it does not tell them"
    neutral: ClassVar[Mapping[str, Any]] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    def facts(self, pages: Pages) -> EngineFacts:
        return server_info_facts(pages, self.pages)

    def body(self, setting: Setting) -> dict[str, Any]:
        return {"return_meta_info": True}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        found = answer.object_of("meta_info")
        if found.get("spec_verify_ct") is None or width is None:
            return None
        steps, emitted = whole(found["spec_verify_ct"], "spec_verify_ct"), answer.num_emitted
        accepted = emitted - 1 - steps
        if accepted < 0 and steps:
            raise AnswerError("spec_verify_ct is above the tokens after the first; is the prefill counted as a step?")
        length = found.get("accept_draft_tokens")
        return Counts(
            num_steps=steps,
            num_draft_tokens=steps * (width - 1),
            num_accepted_draft_tokens=max(accepted, 0),
            num_emitted_tokens=emitted,
            max_draft_tokens=width - 1,
            has_fixed_depth=True,
            reported_acceptance_length=float(length) if isinstance(length, int | float) and steps else None,
        )
