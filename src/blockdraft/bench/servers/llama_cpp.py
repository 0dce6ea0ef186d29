"""llama.cpp's server: proposals and accepted ones of a request in `timings`, steps only in /metrics.

With one request in flight the steps are what the counter of drafts grew by. With more they are worked out: C - 1 - A,
which is one off where the length limit cut the last step. `/props` may call speculation "none" while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from blockdraft.bench.record import Counts
from blockdraft.bench.servers.adapter import Adapter, EngineFacts, Pages
from blockdraft.bench.servers.answer import Answer, whole
from blockdraft.bench.servers.prometheus import CounterNames, Growth
from blockdraft.bench.system import Setting

__all__ = ["LlamaCpp"]


class LlamaCpp(Adapter):
    name = "llama_cpp"
    owned_by = "llamacpp"
    metrics_prefix = "llamacpp:"
    pages = ("/props",)
    counters = CounterNames(
        steps="llamacpp:spec_decode_num_drafts",
        proposed="llamacpp:spec_decode_num_draft_tokens",
        accepted="llamacpp:spec_decode_num_accepted_tokens",
        tokens="llamacpp:tokens_predicted",
    )
    counts_steps_apart = True
    advice = "start it with a draft, and with --metrics so that its steps are counted"
    neutral: ClassVar[Mapping[str, Any]] = {
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
    }  # its own defaults cut: top-k 40, min-p .05
    tokenize = ("/tokenize", "content", {"add_special": False})

    def facts(self, pages: Pages) -> EngineFacts:
        props: Any = pages["/props"].json if "/props" in pages else None
        props = props if isinstance(props, dict) else {}
        template = props.get("chat_template")
        return EngineFacts(
            version=str(props.get("build_info", "unknown")), template=template if isinstance(template, str) else None
        )

    def body(self, setting: Setting) -> dict[str, Any]:
        return {}

    def counts(self, answer: Answer, width: int | None) -> Counts | None:
        timings = answer.object_of("timings")
        if not timings.get("draft_n"):
            return None
        proposed = whole(timings["draft_n"], "draft_n")
        accepted = whole(timings.get("draft_n_accepted", 0), "draft_n_accepted")
        emitted = answer.num_emitted
        return Counts(
            num_steps=max(emitted - 1 - accepted, 0),
            num_draft_tokens=proposed,
            num_accepted_draft_tokens=accepted,
            num_emitted_tokens=emitted,
            max_draft_tokens=None if width is None else width - 1,
            steps_source="derived",
        )

    def by_growth(self, own: Counts | None, grown: Growth, answer: Answer, width: int | None) -> Counts:
        if own is None or not grown.num_steps:
            return own or super().by_growth(own, grown, answer, width)
        return replace(own, num_steps=grown.num_steps, steps_source="counted")
