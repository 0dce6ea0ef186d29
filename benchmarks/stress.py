"""Does a continuous batch give every request its own text, leak nothing and starve nobody?

Thousands of requests of random lengths, widths, priorities, seeds and cancellations go through one engine, many of them
beginning as earlier ones did, under a memory limit that a few rows fill. The target is a tiny random Llama in float64,
so that rounding never decides; its draft is a tiny DFlash 2 whose mistakes depend on its context, so that a wrong
context shows in what is accepted.

Every greedy text is compared with the transformers model itself: each of its ids is the most likely one after all
before it, so it is what a single run gives. Every sampled request, and a part of the greedy ones, is run again alone in
a fresh engine that keeps nothing: same ids, same accepted proposals at every length. On the way: the engine's
invariants, each row's memory against what was set aside for it, the order of admission, and at the end no state that is
still held.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, session
from blockdraft.accept import SamplingParams
from blockdraft.config import ConvConfig, DraftConfig, GqaConfig, LayerConfig, RopeConfig, SelectorConfig
from blockdraft.draft import DraftModel, Proposal
from blockdraft.engine import Completion, Engine, Request, Ticket
from blockdraft.engine.scheduler import AGEING_STEPS
from blockdraft.engine.width import FixedWidth
from blockdraft.targets import HFTarget, Target
from blockdraft.targets.fused import FusedTarget
from blockdraft.targets.model_facts import facts_of

RESULT = "stress.json"
VOCAB = 48
MAX_LENGTH = 320
MASK_ID, END_ID = 0, VOCAB - 1
_RETRIED = 0.05  # share of the greedy requests that are also run again alone
_CHECK_EVERY = 25  # steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--target", choices=("fused", "hf"), default="fused")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    found = Stress(options.requests, seed=options.seed, is_fused=options.target == "fused").run()
    found["run"] = session.run_facts(argparse.Namespace(device="cpu", threads=options.threads))
    found["wall_s"] = round(time.perf_counter() - started, 1)
    common.write_json(options.results / RESULT, found)
    print(f"{found['num_requests']} requests in {found['wall_s']} s: {found['verdict']}")
    return 0 if found["verdict"] == "ok" else 1


# ---- the pair --------------------------------------------------------------------------------------------------------
def tiny_model(seed: int = 0) -> Any:
    """A random Llama of three layers; mostly, but not only, the last id decides on the next one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double().eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.12)
        table = torch.randn(VOCAB, 32, dtype=torch.float64)
        model.model.embed_tokens.weight.copy_(table)
        after = torch.randperm(VOCAB)
        model.lm_head.weight.normal_(0, 0.08)
        model.lm_head.weight[after] += 0.15 * table
    return model


class WeatherDraft(DraftModel):
    """A real draft, context and all, whose proposals follow the target's likeliest steps from id to id, but go wrong
    wherever its hidden row says so. So it is often right, and its mistakes depend on its whole context."""

    next_ids: Sequence[int]

    def propose_rows(self, blocks: Any, *_args: Any, **_options: Any) -> list[Proposal]:
        return [self._of_block(block.hidden_LD, block.anchor_id) for block in blocks]

    def _of_block(self, hidden_LD: Any, last: int) -> Proposal:
        ids = []
        for mood in (hidden_LD[1:, 0] * 1e3).floor().long().tolist():
            last = self.next_ids[last] if mood % 4 else (last + mood) % VOCAB
            ids.append(last)
        return Proposal(torch.tensor(ids, dtype=torch.long), None)


def tiny_draft(target: Target, model: Any) -> WeatherDraft:
    facts = target.facts
    config = DraftConfig(
        hidden_size=facts.hidden_size,
        intermediate_size=40,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        max_position_embeddings=MAX_LENGTH - 16,  # so that some requests come to its end
        attention=GqaConfig(num_heads=4, num_kv_heads=2, head_dim=8, has_bias=False),
        layers=(LayerConfig(is_causal=False, window=None),) * 2,
        rope=RopeConfig(theta=10000.0, kind="default", params=()),
        block_size=8,
        mask_token_id=MASK_ID,
        target_layer_ids=(0, 1, 2),
        num_target_layers=facts.num_layers,
        target_hidden_size=facts.hidden_size,
        conv=ConvConfig(kernel_size=2, group_size=8),
        selector=SelectorConfig(rank=4, top_k=4),
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        draft = WeatherDraft(config)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
    with torch.inference_mode():
        draft.next_ids = [int(model(torch.tensor([[i]])).logits[0, -1].argmax()) for i in range(VOCAB)]
    return draft.double().eval().requires_grad_(False)


class RandomWidth(FixedWidth):
    """Another width for every row at every step, 1 included; rows whose width is fixed have theirs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, rows: Any, most: Sequence[int]) -> list[int]:
        return [
            limit if row.has_fixed_width else self._random.choice((1, 1, self._random.randint(1, limit), limit))
            for row, limit in zip(rows, most, strict=True)
        ]


class CountedTarget:
    """A target that knows which of its rows were made and not freed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.open: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def new_row(self) -> Any:
        return self._opened(self._target.new_row())

    def copy(self, row: Any, length: int | None = None) -> Any:
        return self._opened(self._target.copy(row, length))

    def free(self, row: Any) -> None:
        self.open.pop(id(row), None)
        self._target.free(row)

    def _opened(self, row: Any) -> Any:
        self.open[id(row)] = row
        return row


# ---- the requests ----------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Asked:
    """One request on its way. ``cancel_after``: steps after its submission; None: it is left alone."""

    ticket: Ticket
    submitted_at: int
    cancel_after: int | None
    admitted_at: int | None = None

    @property
    def place(self) -> int:
        return self.ticket.request.priority * AGEING_STEPS + self.submitted_at


class Requests:
    """Random requests; some begin with a common text, some go on where an earlier one ended."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._beginnings = [self._ids(self._random.randint(4, 90)) for _ in range(12)]
        self._told: list[list[int]] = []

    def remember(self, request: Request, completion: Completion) -> None:
        text = [*request.prompt_ids, *completion.token_ids]
        if len(text) < MAX_LENGTH - 80:
            self._told = [*self._told[-30:], text]

    def next(self) -> Request:
        dice = self._random
        kind = dice.random()
        if kind < 0.25 and self._told:
            prompt = [*dice.choice(self._told), *self._ids(dice.randint(1, 12))]
        elif kind < 0.75:
            prompt = [*dice.choice(self._beginnings), *self._ids(dice.randint(0, 40))]
        else:
            prompt = self._ids(dice.choice((1, 2, 9, dice.randint(3, 200))))
        room = MAX_LENGTH - len(prompt)
        count = min(dice.choice((1, 2, dice.randint(3, 30), dice.randint(3, 60))), room)
        speculate = dice.choice((None, None, None, False))
        sampling = SamplingParams()
        seed = None
        if dice.random() < 0.2:
            sampling = SamplingParams(temperature=dice.choice((0.7, 1.0, 1.3)), top_p=dice.choice((1.0, 0.9)))
            seed = dice.randrange(2**40)
        elif dice.random() < 0.1:
            sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2)
        return Request(
            prompt_ids=prompt,
            max_new_tokens=count,
            min_new_tokens=dice.choice((0, 0, min(5, count))),
            sampling=sampling,
            seed=seed,
            stop_ids=dice.choice((None, None, frozenset(), frozenset({END_ID, 3, 11}))),
            speculate=speculate,
            width=None if speculate is False else dice.choice((None, None, *range(2, 9))),
            num_logprobs=dice.choice((None, None, None, 2)),
            priority=dice.choice((-1, 0, 0, 0, 1, 3)),
        )

    def cancels_after(self) -> int | None:
        return self._random.choice((0, 1, 2, 3, 5, 8, 15)) if self._random.random() < 0.12 else None

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(1, VOCAB - 1) for _ in range(count)]


# ---- the run ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Found:
    """What went wrong, by kind, and what was seen."""

    faults: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    num_rerun: int = 0
    waits: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    max_row_bytes_share: float = 0.0
    rss_bytes: list[int] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)

    def fault(self, text: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(text)


class Stress:
    """One engine under load. ``run`` gives the result; its verdict is "ok" or the first fault."""

    def __init__(self, num_requests: int, *, seed: int = 0, is_fused: bool = True, max_outstanding: int = 40) -> None:
        self.num_requests, self.max_outstanding = num_requests, max_outstanding
        self.model = tiny_model(seed)
        made = _target(self.model, is_fused)
        self.target = CountedTarget(made)
        self.draft = tiny_draft(made, self.model)
        self.alone = Engine(made, self.draft, max_rows=1)
        need = self.alone.bytes_needed(Request(prompt_ids=[1] * 200, max_new_tokens=60))
        self.engine = Engine(
            self.target,  # type: ignore[arg-type]
            self.draft,
            max_rows=12,
            max_waiting=max_outstanding,
            prefill_chunk_size=96,
            mixed_chunk_size=64,
            memory_limit=12 * need,
            prefix_cache_bytes=4 * need,
            width_policy=RandomWidth(seed),
        )
        self.requests = Requests(seed)
        self.dice = random.Random(seed + 1)
        self.found = _Found()
        self.num_rows_before = len(self.target.open)

    def run(self) -> dict[str, Any]:
        asked: list[_Asked] = []
        num_submitted = num_done = step = 0
        while num_done < self.num_requests:
            while num_submitted < self.num_requests and len(asked) < self.max_outstanding and self.dice.random() < 0.8:
                ticket = self.engine.submit(self.requests.next())
                asked.append(_Asked(ticket, step, self.requests.cancels_after()))
                num_submitted += 1
            for one in asked:
                if one.cancel_after is not None and step - one.submitted_at >= one.cancel_after:
                    self.engine.cancel(one.ticket)
            self._note_order(asked)
            self.engine.step()
            self._note_admitted(asked, step)
            step = self.engine.stats().num_steps
            if step % _CHECK_EVERY == 0:
                self._check_inside(asked)
            for one in [one for one in asked if one.ticket.is_finished]:
                asked.remove(one)
                self._judge(one.ticket)
                num_done += 1
                if num_done % max(5, self.num_requests // 40) == 0:
                    self._note_memory()
        return self._result(step)

    def _check_inside(self, asked: Sequence[_Asked]) -> None:
        self.engine.check_integrity()
        for one in asked:
            row = one.ticket.row
            if row is not None and not row.is_finished:
                share = row.num_bytes / one.ticket.num_reserved_bytes
                self.found.max_row_bytes_share = max(self.found.max_row_bytes_share, share)

    def _note_order(self, asked: Sequence[_Asked]) -> None:
        """Remember who waits before a step, to see who was admitted in it."""
        self._line = [one for one in asked if one.admitted_at is None and not one.ticket.is_finished]

    def _note_admitted(self, asked: Sequence[_Asked], step: int) -> None:
        admitted = [one for one in self._line if one.ticket.row is not None]
        left = [one for one in self._line if one.ticket.row is None]
        for one in admitted:
            one.admitted_at = step
            self.found.waits[one.ticket.request.priority].append(step - one.submitted_at)
        if admitted and left and max(one.place for one in admitted) > min(one.place for one in left):
            self.found.fault("a request was passed by one behind it")

    def _note_memory(self) -> None:
        if self.num_requests >= 1000:  # it costs more than a request
            gc.collect()
        stats = self.engine.stats()
        self.found.rss_bytes.append(_rss())
        self.found.cache_bytes.append(stats.target_bytes + stats.draft_bytes + stats.prefix_bytes)

    # ---- judging -----------------------------------------------------------------------------------------------------
    def _judge(self, ticket: Ticket) -> None:
        done, request = ticket.completion, ticket.request
        assert done is not None
        self.found.ends[done.finish_reason] += 1
        if ticket.row is not None and ticket.row.num_bytes:
            self.found.fault("a finished request holds memory")
        if done.finish_reason == "error":
            self.found.fault(f"a request broke: {done.error}")
        if done.finish_reason != "cancelled":
            self.requests.remember(request, done)
        if request.sampling.is_greedy and not request.sampling.has_penalties:
            self._compare(request, done)
            if self.dice.random() < _RETRIED:
                self._rerun(request, done)
        else:
            self._rerun(request, done)

    def _compare(self, request: Request, done: Completion) -> None:
        """Each id is the model's most likely one after all before it, and the text ends where it must."""
        self.found.num_compared += 1
        stops = {END_ID} if request.stop_ids is None else request.stop_ids
        ids, num_prompt = [*request.prompt_ids, *done.token_ids], len(request.prompt_ids)
        with torch.no_grad():
            logits_TV = self.model(torch.tensor([ids])).logits[0, num_prompt - 1 : -1].clone()
        for index, token_id in enumerate(done.token_ids):
            if stops and index < request.min_new_tokens:
                logits_TV[index, sorted(stops)] = -torch.inf
            if int(logits_TV[index].argmax()) != token_id:
                self.found.fault(f"a greedy text differs at token {index}: {request}")
                return
        wanted = next((i + 1 for i, x in enumerate(done.token_ids) if x in stops), request.max_new_tokens)
        if done.finish_reason != "cancelled" and len(done.token_ids) != wanted:
            self.found.fault(f"a text of {len(done.token_ids)} tokens has to have {wanted}: {request}")

    def _rerun(self, request: Request, done: Completion) -> None:
        """The same request alone in a fresh engine: the same text, and at a fixed width the same acceptances."""
        self.found.num_rerun += 1
        [fresh] = self.alone.run([request])
        given = fresh.token_ids[: len(done.token_ids)] if done.finish_reason == "cancelled" else fresh.token_ids
        if done.token_ids != given:
            self.found.fault(f"a text differs from that of a fresh run: {request}")
        has_fixed_width = request.width is not None or request.seed is not None
        if has_fixed_width and done.finish_reason != "cancelled":
            one, other = done.stats.to_json(), fresh.stats.to_json()
            for name in ("accepted_histogram", "drafted_histogram", "num_clipped_tokens"):
                if one[name] != other[name]:
                    self.found.fault(f"{name} {one[name]} differs from {other[name]} of a fresh run: {request}")

    # ---- the result --------------------------------------------------------------------------------------------------
    def _result(self, num_steps: int) -> dict[str, Any]:
        found, stats = self.found, self.engine.stats()
        self.engine.check_integrity()
        self.engine.clear_prefixes()
        rest = self.engine.stats()
        if len(self.target.open) > self.num_rows_before:
            found.fault(f"{len(self.target.open) - self.num_rows_before} rows of the target were never freed")
        if rest.target_bytes + rest.draft_bytes + rest.prefix_bytes + rest.reserved_bytes:
            found.fault("memory is held by nobody")
        if found.max_row_bytes_share > 1.0:
            found.fault(f"a row held {found.max_row_bytes_share:.3f} of what was set aside for it")
        growth = _growth(found.rss_bytes)
        if growth is not None and growth > 0.05:
            found.fault(f"the process grew by {growth:.1%} from its second quarter to its last")
        return {
            "what": "random requests through one engine: texts, memory, order",
            "verdict": "ok" if not found.faults else found.faults[0],
            "faults": found.faults,
            "num_requests": self.num_requests,
            "target": type(self.target._target).__name__,
            "dtype": "float64",
            "num_steps": num_steps,
            "ends": dict(found.ends),
            "num_greedy_texts_checked_by_the_model": found.num_compared,
            "num_texts_run_again_alone": found.num_rerun,
            "most_of_a_rows_reserved_bytes_held": round(found.max_row_bytes_share, 3),
            "steps_waited_by_priority": {
                str(priority): {"num": len(waits), "mean": round(sum(waits) / len(waits), 1), "max": max(waits)}
                for priority, waits in sorted(found.waits.items())
            },
            "process_bytes": found.rss_bytes,
            "process_growth": growth,
            "cache_bytes": found.cache_bytes,
            "engine": stats.to_json(),
        }


def _target(model: Any, is_fused: bool) -> Any:
    return FusedTarget(model, facts_of(model), (0, 1, 2), pack=False) if is_fused else HFTarget(model, (0, 1, 2))


def _growth(values: Sequence[int]) -> float | None:
    """Mean of the last quarter over that of the second, less one; the first is warming up."""
    quarter = len(values) // 4
    if quarter < 2:
        return None
    early, late = values[quarter : 2 * quarter], values[-quarter:]
    return sum(late) / len(late) / (sum(early) / len(early)) - 1.0


def _rss() -> int:
    """Bytes of this process in memory now; where the system does not say, the most there ever were."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    raise SystemExit(main())
