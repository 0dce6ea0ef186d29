"""vLLM: `metrics.speculative_decoding` of a request, counters of /metrics without it.

Accepted proposals are counted before a stop cuts them, so the last step may hold more than the user got. Steps without
proposals are not counted at all: where drafting was skipped, 1 + S + A - C falls below 0 and the identities say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages
from blockdraft.bench.servers.answer import Answer, whole
from blockdraft.bench.servers.prometheus import CounterNames
from blockdraft.bench.system import Setting

__all__ = ["Vllm"]


class Vllm(Adapter):
    name = "vllm"
    owned_by = "vllm"
    metrics_prefix = "vllm:"
    pages = ("/version",)
    counters = CounterNames(
        steps="vllm:spec_decode_num_drafts",
        proposed="vllm:spec_decode_num_draft_tokens",
        accepted="vllm:spec_decode_num_accepted_tokens",
        per_position="vllm:spec_decode_num_accepted_tokens_per_pos",
        finished="vllm:request_success",
        tokens="vllm:generation_tokens",
    )
    advice = "start it with --speculative-config and --per-request-spec-decode-metrics detailed (or summary)"
    neutral: ClassVar[Mapping[str, Any]] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    tokenize = ("/tokenize", "prompt", {"add_special_tokens": False})

    def facts(self, pages: Pages) -> EngineFacts:
        version = pages["/version"].json if "/version" in pages else {}
        return EngineFacts(version=str(version.get("version", "unknown")))

    def body(self, setting: Setting) -> dict[str, Any]:
        return {"return_token_ids": True}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        found = answer.object_of("metrics", "speculative_decoding")
        if not found:
            return None
        drafted, full = _by_draft_length(found.get("acceptance_histogram_by_draft_length"))
        return Counts(
            num_steps=whole(found.get("num_spec_steps"), "num_spec_steps"),
            num_draft_tokens=whole(found.get("num_draft_tokens"), "num_draft_tokens"),
            num_accepted_draft_tokens=whole(found.get("num_accepted_draft_tokens"), "num_accepted_draft_tokens"),
            num_emitted_tokens=answer.num_emitted,
            accepted_histogram=_list(found.get("acceptance_histogram"), "acceptance_histogram"),
            drafted_histogram=drafted,
            full_histogram=full,
            per_step_accepted=_list(found.get("per_step_accepted"), "per_step_accepted"),
            per_step_drafted=_list(found.get("per_step_drafted"), "per_step_drafted"),
            max_draft_tokens=whole(found.get("num_spec_tokens"), "num_spec_tokens"),
            reported_acceptance_length=_ratio(found.get("mean_acceptance_length")),
            reported_acceptance_rate=_ratio(found.get("draft_acceptance_rate")),
        )


def _list(value: object, name: str) -> tuple[int, ...] | None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    return tuple(whole(item, name) for item in value)


def _ratio(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _by_draft_length(value: object) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(steps by proposals, those that accepted all), from {proposals: [steps by accepted ones]}."""
    if not isinstance(value, Mapping) or not value:
        return None, None
    name = "acceptance_histogram_by_draft_length"
    by_length = {whole(int(length), name): _list(steps, name) or () for length, steps in value.items()}
    drafted, full = ([0] * (max(by_length) + 1) for _ in range(2))
    for length, steps in by_length.items():
        drafted[length] = sum(steps)
        full[length] = steps[length] if len(steps) > length else 0
    return tuple(drafted), tuple(full)
