"""Counters for Prometheus: vLLM's names after our own prefix, so that dashboards and harnesses find what they know.

Owns the registry (never the process's global one) and every name in it; docs/server.md explains them. Told of steps in
the engine's thread and of answers in asyncio's; the library's counters take both.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from blockdraft.serve.engine_loop import Done, EngineLoop, Failed, Job, LoopObserver, Step

__all__ = ["CONTENT_TYPE", "PREFIX", "Metrics"]

PREFIX = "blockdraft:"
CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_SHORT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics(LoopObserver):
    """The counters of one server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        ProcessCollector(registry=self.registry)
        self._make_requests()
        self._make_speculation()

    def _make_requests(self) -> None:
        self.running = self._gauge("num_requests_running", "Choices whose prompt or text is worked on.")
        self.waiting = self._gauge("num_requests_waiting", "Choices in the engine's queue.")
        self.state_bytes = self._gauge("state_bytes", "Memory of rows' states, of target and draft, and kept prefixes.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended choices.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Of these, not computed anew.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens emitted.")
        self.success = self._counter("request_success", "Ended choices.", "finished_reason")
        self.rejected = self._counter("request_rejected", "Requests answered with an error.", "code")
        self.ttft = self._histogram("time_to_first_token_seconds", "Submission to first token.", _SHORT_S)
        self.per_token = self._histogram("request_time_per_output_token_seconds", "Decode time a token.", _SHORT_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Submission to end.", _LONG_S)
        self.queue = self._histogram("request_queue_time_seconds", "Submission to first work.", _SHORT_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "First work to first token.", _SHORT_S)
        self.decode = self._histogram("request_decode_time_seconds", "First token to end.", _LONG_S)
        self.lengths = self._histogram("request_generation_tokens", "Tokens emitted by a choice.", _TOKENS)
        self.prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)

    def _make_speculation(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Steps with proposals.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Proposals; the anchor is none.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted proposals, before stop cuts.")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Steps that accepted this position (0 is the first).", "position"
        )
        self.plain_steps = self._counter("plain_steps", "Steps without proposals.")
        self.broken_steps = self._counter("engine_step_failures", "Engine steps that broke.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)
        return made if labels else made.labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self.registry).labels(
            self._model
        )

    # ---- told by the engine's thread ---------------------------------------------------------------------------------
    def on_step(self, job: Job, step: Step) -> None:
        self.generation_tokens.inc(len(step.events))
        if step.num_drafted is None:
            return
        if not step.num_drafted:
            self.plain_steps.inc()
            return
        self.drafts.inc()
        self.drafted.inc(step.num_drafted)
        self.accepted.inc(step.num_accepted)
        for position in range(step.num_accepted):
            self.accepted_at.labels(self._model, str(position)).inc()

    def on_end(self, job: Job, end: Done | Failed) -> None:
        if isinstance(end, Failed):
            self.success.labels(self._model, "error").inc()
            return
        completion, times = end.completion, end.times
        self.success.labels(self._model, completion.finish_reason).inc()
        self.prompt_tokens.inc(len(job.request.prompt_ids))
        self.cached_tokens.inc(completion.stats.num_cached_prompt_tokens)
        if times.started_s is not None:
            self.queue.observe(times.started_s - times.submitted_s)
        if completion.finish_reason not in ("stop", "length"):
            return
        self.prompts.observe(len(job.request.prompt_ids))
        self.lengths.observe(len(completion.token_ids))
        self.e2e.observe(times.ended_s - times.submitted_s)
        if times.first_s is None or times.started_s is None:
            return
        self.ttft.observe(times.first_s - times.submitted_s)
        self.prefill.observe(times.first_s - times.started_s)
        self.decode.observe(times.ended_s - times.first_s)
        if len(completion.token_ids) > 1:
            self.per_token.observe((times.ended_s - times.first_s) / (len(completion.token_ids) - 1))

    def on_broken_step(self) -> None:
        self.broken_steps.inc()

    # ---- asked by asyncio --------------------------------------------------------------------------------------------
    def reject(self, code: str) -> None:
        """Counts a request that was answered with an error."""
        self.rejected.labels(self._model, code).inc()

    def text(self, loop: EngineLoop) -> bytes:
        """The exposition."""
        stats = loop.stats
        self.running.set(stats.num_running)
        self.waiting.set(stats.num_waiting)
        self.state_bytes.set(stats.target_bytes + stats.draft_bytes + stats.prefix_bytes)
        return generate_latest(self.registry)
