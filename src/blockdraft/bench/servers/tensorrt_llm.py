"""TensorRT-LLM: accepted and proposed tokens in `request_perf_metrics`, tokens a step in the choice.

It states no steps: they are (C - 1) / `avg_decoded_tokens_per_iter`, or C - 1 - A where that is not there. Relaxed
acceptance for thinking changes the text; its answers do not tell, so such a run cannot be recognised here.
"""

from __future__ import annotations

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages
from blockdraft.bench.servers.answer import Answer, whole

__all__ = ["TensorRtLlm"]


class TensorRtLlm(Adapter):
    name = "tensorrt_llm"
    owned_by = "tensorrt_llm"
    metrics_prefix = "trtllm_"
    pages = ("/version",)
    advice = "start it with return_perf_metrics and a draft"

    def facts(self, pages: Pages) -> EngineFacts:
        version = pages["/version"].json if "/version" in pages else {}
        return EngineFacts(version=str(version.get("version", "unknown")))

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        found = answer.object_of("request_perf_metrics", "speculative_decoding")
        if found.get("total_draft_tokens") is None or found.get("total_accepted_draft_tokens") is None:
            return None
        proposed = whole(found["total_draft_tokens"], "total_draft_tokens")
        accepted = whole(found["total_accepted_draft_tokens"], "total_accepted_draft_tokens")
        emitted, length = answer.num_emitted, answer.numbers.get("avg_decoded_tokens_per_iter")
        rate = found.get("acceptance_rate")
        num_steps = emitted - 1 - accepted
        if isinstance(length, int | float) and length >= 1:
            num_steps = round((emitted - 1) / length)
        return Counts(
            num_steps=max(num_steps, 0),
            num_draft_tokens=proposed,
            num_accepted_draft_tokens=accepted,
            num_emitted_tokens=emitted,
            max_draft_tokens=None if width is None else width - 1,
            steps_source="derived",
            reported_acceptance_rate=float(rate) if isinstance(rate, int | float) and proposed else None,
        )
