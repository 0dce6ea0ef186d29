"""mistral.rs: nothing of a request, counters of /metrics. So acceptance needs one request in flight, or a whole run."""

from __future__ import annotations

from blockdraft.bench.servers.adapter import Adapter
from blockdraft.bench.servers.prometheus import CounterNames

__all__ = ["MistralRs"]


class MistralRs(Adapter):
    name = "mistral_rs"
    metrics_prefix = "mistralrs_"
    counters = CounterNames(
        steps="mistralrs_speculative_drafts",
        proposed="mistralrs_speculative_draft_tokens_proposed",
        accepted="mistralrs_speculative_draft_tokens_accepted",
        per_position="mistralrs_speculative_draft_tokens_accepted_per_pos",
    )
    advice = "start it with a draft; it counts speculation on /metrics only"
