"""Judging a draft while it is trained: the real engine on held-out prompts, and why its steps ended where they did.

Owns the evaluation's settings, its result and the meaning of its numbers. The trainer is not touched: the draft that is
served is a copy of its weights, and random states stand afterwards where they stood.

Letters in formulas: S steps, A accepted proposals, C emitted tokens; k = 1, 2, ... proposals of a block; M list size.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockdraft.config import DraftConfig
from blockdraft.draft import DraftModel
from blockdraft.engine import Completion, Engine, Request, Ticket
from blockdraft.errors import ConfigError, PairError
from blockdraft.formats.zlab import Checkpoint
from blockdraft.stats import (
    Interval,
    RequestStats,
    committed_acceptance_length,
    conditional_acceptance_by_position,
    pooled_acceptance_length_interval,
    ratio_interval,
)
from blockdraft.targets import Target
from blockdraft.train.replay import (
    RECALL_AT,
    PositionCounts,
    ReplayedStep,
    ServedStep,
    position_counts,
    replay,
    totals,
)

__all__ = ["FORMULAS", "EvalResult", "EvaluatedText", "Evaluator"]

LIST_SIZE_WITHOUT_SELECTOR = 16

FORMULAS = {
    "acceptance_length": "1 + sum A / sum S over all prompts, greedy; 95 % interval by prompt (linearised ratio)",
    "committed_acceptance_length": "sum max(C - 1, 0) / sum S: tokens cut by a stop or a limit are not counted",
    "conditional_acceptance": "for k: steps that accepted >= k / steps that accepted >= k-1 and proposed >= k",
    "base_acceptance_length": "1 + sum over the served steps of the leading run of largest logits that are right / S",
    "oracle_acceptance_length": "1 + sum over the served steps of the leading run of right ids in the M largest / S",
    "selector_gain": "(sum A - sum of the base's runs) / sum S; 95 % interval by prompt",
    "recall": "for M: positions of all proposed blocks whose right id is among the M largest logits / positions",
    "miss_rate": "share of the blocks whose walk first fails at a right id outside the M largest logits",
    "misrank_rate": "share of the blocks whose walk first fails at a right id inside them",
    "full_rate": "share of the blocks whose whole walk is right",
    "num_steps_replayed_otherwise": "served steps for which the replay accepts another number of proposals: rounding",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedText:
    """What one prompt gave."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stats: RequestStats
    steps: tuple[ReplayedStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation. `list_size` is the M of the oracle: the selector's own, or 16 where the draft has none."""

    width: int
    max_new_tokens: int
    list_size: int
    texts: tuple[EvaluatedText, ...]
    serve_s: float
    replay_s: float

    @property
    def stats(self) -> list[RequestStats]:
        return [text.stats for text in self.texts]

    @property
    def acceptance_length(self) -> float | None:
        """The pooled acceptance length; None where no text took a step."""
        interval = self.interval
        return None if interval is None else interval.estimate

    @property
    def interval(self) -> Interval | None:
        return pooled_acceptance_length_interval(self.stats)

    @property
    def selector_gain(self) -> Interval | None:
        """What the selector adds to the acceptance length, at the steps that were served."""
        sums = [totals(text.steps, self.list_size) for text in self.texts]
        gains = [walk - base for walk, base, _ in sums]
        return ratio_interval(gains, [len(text.steps) for text in self.texts])

    @property
    def positions(self) -> tuple[PositionCounts, ...]:
        return position_counts(self._steps, self.list_size)

    @property
    def num_steps_replayed_otherwise(self) -> int:
        return sum(step.walk_accepted != step.served.num_accepted for step in self._steps)

    @property
    def _steps(self) -> list[ReplayedStep]:
        return [step for text in self.texts for step in text.steps]

    def summary(self) -> dict[str, Any]:
        """The numbers without the prompts: one line of metrics. Their meaning is in FORMULAS."""
        steps, stats, positions = self._steps, self.stats, self.positions
        num_steps = len(steps)
        _, base, oracle = totals(steps, self.list_size)
        blocks = sum(1 for step in steps if step.ranks)
        labels = sum(counts.proposed for counts in positions)
        missed, misranked = (sum(getattr(c, name) for c in positions) for name in ("missed", "misranked"))
        return {
            "acceptance_length": _interval_json(self.interval),
            "committed_acceptance_length": committed_acceptance_length(stats),
            "conditional_acceptance": conditional_acceptance_by_position(stats),
            "base_acceptance_length": 1 + base / num_steps if num_steps else None,
            "oracle_acceptance_length": 1 + oracle / num_steps if num_steps else None,
            "selector_gain": _interval_json(self.selector_gain),
            "recall": {str(m): _share(sum(c.in_top[m] for c in positions), labels) for m in RECALL_AT},
            "miss_rate": _share(missed, blocks),
            "misrank_rate": _share(misranked, blocks),
            "full_rate": _share(blocks - missed - misranked, blocks),
            "num_steps_replayed_otherwise": self.num_steps_replayed_otherwise,
            "list_size": self.list_size,
            "width": self.width,
            "max_new_tokens": self.max_new_tokens,
            "num_prompts": len(self.texts),
            "num_steps": num_steps,
            "num_emitted_tokens": sum(request.num_emitted_tokens for request in stats),
            "serve_s": round(self.serve_s, 3),
            "replay_s": round(self.replay_s, 3),
        }

    def to_json(self) -> dict[str, Any]:
        """Everything, for a file: the summary, its formulas, the counts by position and every prompt."""
        return {
            **self.summary(),
            "formulas": dict(FORMULAS),
            "positions": [_position_json(counts) for counts in self.positions],
            "prompts": [self._text_json(text) for text in self.texts],
        }

    def _text_json(self, text: EvaluatedText) -> dict[str, Any]:
        walk, base, oracle = totals(text.steps, self.list_size)
        return {
            "token_ids": list(text.token_ids),
            "finish_reason": text.finish_reason,
            "stats": text.stats.to_json(),
            "walk_accepted": walk,
            "base_accepted": base,
            "oracle_accepted": oracle,
        }


def _interval_json(interval: Interval | None) -> dict[str, Any] | None:
    if interval is None:
        return None
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high, "level": interval.level}


def _position_json(counts: PositionCounts) -> dict[str, Any]:
    values = {name: getattr(counts, name) for name in counts.__slots__}
    return {**values, "in_top": {str(size): count for size, count in counts.in_top.items()}}


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


class Evaluator:
    """Serves held-out prompts with a draft, greedily, `max_rows` at a time. All settings are checked at the start.

    `width` is the served block's width; the target must tap the layers that the draft reads.
    """

    def __init__(
        self,
        target: Target,
        config: DraftConfig,
        prompts: Sequence[Sequence[int]],
        *,
        width: int,
        max_new_tokens: int,
        max_rows: int = 16,
        allow_mask_is_eos: bool = False,
    ) -> None:
        if not prompts:
            raise ConfigError("there is no prompt to evaluate on; keep some out of the training text")
        taps, read = list(target.tap_layer_ids), list(config.target_layer_ids)
        if taps != read:
            raise PairError(f"the target taps layers {taps}, the draft reads {read}; load it with the draft's layers")
        self.target, self.config = target, config
        self.width, self.max_new_tokens, self.max_rows = width, max_new_tokens, max_rows
        self.allow_mask_is_eos = allow_mask_is_eos
        self.requests = [
            Request(prompt_ids=prompt, max_new_tokens=max_new_tokens, width=width, speculate=True, seed=0)
            for prompt in prompts
        ]
        with torch.device("meta"):
            engine = self._engine(DraftModel(config))
        for request in self.requests:
            engine.check(request)

    def _engine(self, draft: DraftModel) -> Engine:
        return Engine(self.target, draft, max_rows=self.max_rows, allow_mask_is_eos=self.allow_mask_is_eos)

    def run(self, model: DraftModel) -> EvalResult:
        """Evaluate a draft, in training or not. It is copied; nothing of it changes."""
        return self.run_weights(model.state_dict())

    def run_weights(self, tensors: Mapping[str, Tensor]) -> EvalResult:
        """Evaluate a draft by its tensors (`state_dict`), whole and under their canonical names."""
        place = self.target.device
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
            draft = self._copy(tensors)
            started = time.perf_counter()
            completions, steps = _serve(self._engine(draft), self.requests)
            served = time.perf_counter()
            replayed: list[list[ReplayedStep]] = []
            for start in range(0, len(completions), self.max_rows):
                part = slice(start, start + self.max_rows)
                texts = [
                    [*request.prompt_ids, *completion.token_ids]
                    for request, completion in zip(self.requests[part], completions[part], strict=True)
                ]
                replayed += replay(draft, self.target, texts, steps[part])
        return EvalResult(
            width=self.width,
            max_new_tokens=self.max_new_tokens,
            list_size=min(self._list_size, self.config.vocab_size),
            texts=tuple(
                EvaluatedText(
                    token_ids=completion.token_ids,
                    finish_reason=completion.finish_reason,
                    stats=completion.stats,
                    steps=tuple(of_text),
                )
                for completion, of_text in zip(completions, replayed, strict=True)
            ),
            serve_s=served - started,
            replay_s=time.perf_counter() - served,
        )

    @property
    def _list_size(self) -> int:
        selector = self.config.selector
        return LIST_SIZE_WITHOUT_SELECTOR if selector is None else selector.top_k

    def _copy(self, tensors: Mapping[str, Tensor]) -> DraftModel:
        """A draft of its own for serving, in the target's precision and place, packed where the CPU has that form."""
        dtype, device = self.target.dtype, self.target.device
        copies = {name: t.detach().to(device=device, dtype=dtype, copy=True) for name, t in tensors.items()}
        draft = DraftModel.from_checkpoint(Checkpoint(config=self.config, tensors=copies))
        draft.pack_(rows_hint=self.width * min(self.max_rows, len(self.requests)))
        return draft


def _serve(engine: Engine, requests: Sequence[Request]) -> tuple[list[Completion], list[list[ServedStep]]]:
    """The completions, and every step of each as the engine counted it."""
    tickets = [engine.submit(request) for request in requests]
    steps: list[list[ServedStep]] = [[] for _ in tickets]
    try:
        while not all(ticket.is_finished for ticket in tickets):
            engine.step()
            for ticket, taken in zip(tickets, steps, strict=True):
                _note_step(ticket, taken)
    except BaseException:
        for ticket in tickets:
            engine.cancel(ticket)
        raise
    return [ticket.completion for ticket in tickets if ticket.completion is not None], steps


def _note_step(ticket: Ticket, taken: list[ServedStep]) -> None:
    """Append the step that the engine has just taken for this request, if it took one."""
    if ticket.row is None or ticket.row.stats.num_steps == len(taken):
        return
    stats = ticket.row.stats
    emitted_before = 1 + sum(step.num_emitted for step in taken)
    taken.append(
        ServedStep(
            anchor=ticket.row.num_prompt + emitted_before - 1,
            num_draft=stats.num_draft_tokens - sum(step.num_draft for step in taken),
            num_accepted=stats.num_accepted_draft_tokens - sum(step.num_accepted for step in taken),
            num_emitted=stats.num_emitted_tokens - emitted_before,
        )
    )
