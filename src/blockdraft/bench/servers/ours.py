"""This package's own server: all counters of a request in `metrics.counters`, every token with its step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages
from blockdraft.bench.servers.answer import Answer, AnswerError
from blockdraft.bench.servers.prometheus import CounterNames
from blockdraft.bench.system import Setting
from blockdraft.errors import BlockdraftError
from blockdraft.stats import RequestStats

__all__ = ["Ours"]


class Ours(Adapter):
    name = "blockdraft"
    owned_by = "blockdraft"
    metrics_prefix = "blockdraft:"
    pages = ("/version", "/info")
    counters = CounterNames(
        steps="blockdraft:spec_decode_num_drafts",
        proposed="blockdraft:spec_decode_num_draft_tokens",
        accepted="blockdraft:spec_decode_num_accepted_tokens",
        plain_steps="blockdraft:plain_steps",
        finished="blockdraft:request_success",
        tokens="blockdraft:generation_tokens",
    )
    advice = "start it with a draft"
    can_switch = True
    neutral: ClassVar[Mapping[str, Any]] = {"top_k": -1}

    def facts(self, pages: Pages) -> EngineFacts:
        info = pages["/info"].json if "/info" in pages else {}
        version = pages["/version"].json if "/version" in pages else {}
        return EngineFacts(
            version=str(version.get("version", "unknown")),
            max_width=info.get("max_width"),
            draft=info.get("draft"),
            dtype=info.get("dtype"),
        )

    def body(self, setting: Setting) -> dict[str, Any]:
        speculation: dict[str, Any] = {"enabled": setting.speculation, "tokens": True}
        if setting.width is not None:
            speculation["width"] = setting.width
        return {"speculation": speculation}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        counters = answer.object_of("metrics", "counters")
        if not counters:
            return None
        try:
            stats = RequestStats.from_json(dict(counters))
        except BlockdraftError:
            raise AnswerError("metrics.counters are none of this version's") from None
        drafted, accepted = _steps(answer, stats)
        return Counts.of_stats(
            stats,
            per_step_drafted=drafted,
            per_step_accepted=accepted,
            max_draft_tokens=None if width is None else width - 1,
        )


def _steps(answer: Answer, stats: RequestStats) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(proposals, accepted) by step, from the tokens; what a stop cut off the last step is in its sum alone."""
    drafted: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for token in answer.tokens:
        step, width = token.get("step"), token.get("width")
        if token.get("kind") == "first" or not isinstance(step, int) or not isinstance(width, int):
            continue
        drafted[step] = width - 1
        accepted[step] = accepted.get(step, 0) + (token.get("kind") == "accepted")
    if len(drafted) != stats.num_steps or not drafted:
        return None, None
    order = sorted(drafted)
    by_step = [accepted[step] for step in order]
    by_step[-1] = stats.num_accepted_draft_tokens - sum(by_step[:-1])
    return tuple(drafted[step] for step in order), tuple(by_step)
