"""The numbers of an answer under the names that harnesses read: usage, vLLM's metrics object, SGLang's meta_info.

Owns the translation of one choice's counters; their meaning is stats.py's. Knows no HTTP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blockdraft.serve.engine_loop import Done, Step
from blockdraft.stats import RequestStats, decode_tok_per_s

__all__ = ["StepLog", "meta_info", "metrics", "spec_details", "usage"]


@dataclass
class StepLog:
    """Accepted proposals of a choice's steps, by how many were proposed."""

    counts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, step: Step) -> None:
        if not step.num_drafted:
            return
        histogram = self.counts[step.num_drafted]
        histogram.extend([0] * (step.num_drafted + 1 - len(histogram)))
        histogram[step.num_accepted] += 1


def usage(num_prompt_tokens: int, done: Sequence[Done], num_reasoning: int | None = None) -> dict[str, Any]:
    """OpenAI's usage: every prompt counted once, the tokens of all choices."""
    emitted = sum(len(each.completion.token_ids) for each in done)
    cached = min(sum(each.completion.stats.num_cached_prompt_tokens for each in done), num_prompt_tokens)
    counted: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": emitted,
        "total_tokens": num_prompt_tokens + emitted,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if num_reasoning is not None:
        counted["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counted


def metrics(done: Done, log: StepLog) -> dict[str, Any]:
    """Of an answer of one choice: vLLM's object (null without proposals), times, whether and why not, all counters."""
    completion, times = done.completion, done.times
    stats, speculation = completion.stats, completion.speculation
    queue_s = None if times.started_s is None else times.started_s - times.submitted_s
    return {
        "speculative_decoding": _vllm(stats, log),
        "timing": {
            "queue_s": queue_s,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "tokens_per_s": decode_tok_per_s([stats]),
        },
        "speculation": {
            "enabled": speculation.enabled,
            "width": speculation.width,
            "reason": speculation.reason,
        },
        "counters": stats.to_json(),
    }


def _vllm(stats: RequestStats, log: StepLog) -> dict[str, Any] | None:
    """Steps with proposals only, as there; one more entry in the histogram than the widest block's proposals."""
    num_steps = stats.num_steps - stats.num_plain_steps
    if not num_steps:
        return None
    size = len(stats.drafted_histogram)
    histogram = list(stats.accepted_histogram) + [0] * (size - len(stats.accepted_histogram))
    histogram[0] -= stats.num_plain_steps
    return {
        "mean_acceptance_length": 1.0 + stats.num_accepted_draft_tokens / num_steps,
        "draft_acceptance_rate": stats.num_accepted_draft_tokens / stats.num_draft_tokens,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {str(n): log.counts[n] for n in sorted(log.counts)},
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": size - 1,
    }


def spec_details(done: Done) -> dict[str, Any]:
    """SGLang's counters of speculation; every step is a verification there, plain ones too."""
    stats = done.completion.stats
    emitted = len(done.completion.token_ids)
    return {
        "spec_verify_ct": stats.num_steps,
        "spec_num_correct_drafts": stats.num_accepted_draft_tokens,
        "spec_num_proposed_drafts": stats.num_draft_tokens,
        "spec_accept_rate": stats.num_accepted_draft_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0,
        "spec_accept_length": emitted / stats.num_steps if stats.num_steps else 0.0,
        "spec_correct_drafts_histogram": list(stats.accepted_histogram),
    }


def meta_info(answer_id: str, num_prompt_tokens: int, done: Done) -> dict[str, Any]:
    """SGLang's meta_info of one choice."""
    completion = done.completion
    matched = {} if completion.stop is None else {"matched": completion.stop}
    return {
        "id": answer_id,
        "finish_reason": {"type": completion.finish_reason, **matched},
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": completion.stats.num_cached_prompt_tokens,
        "e2e_latency": done.times.ended_s - done.times.submitted_s,
        **spec_details(done),
    }
