"""Served text of a trained pair, with and without its draft, and the same blocks taken back by the public recipe.

Owns what is asked of the engine. Judging and counting are benchmarks.lossless and benchmarks.common.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common, lossless

if TYPE_CHECKING:
    from blockdraft.engine import Engine

MAX_ROWS = 8


def serve(
    work: common.Work,
    prompts: Sequence[common.Prompt],
    width: int,
    max_new_tokens: int,
    load: Callable[[], Engine],
) -> None:
    """Run and record what has no record yet: greedy, plain and in blocks of `width`, MAX_ROWS prompts at a time."""
    engine: Engine | None = None
    for asked in (None, width):
        mode = common.mode_name(asked)
        todo = [prompt for prompt in prompts if (prompt.id, mode) not in work.records]
        for start in range(0, len(todo), MAX_ROWS):
            engine = engine or load()
            _serve(engine, work, todo[start : start + MAX_ROWS], asked, max_new_tokens)
            print(f"\r{mode}: {min(start + MAX_ROWS, len(todo))} of {len(todo)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _serve(
    engine: Engine, work: common.Work, prompts: Sequence[common.Prompt], width: int | None, max_new_tokens: int
) -> None:
    """All of these prompts in one batch. No id ends a text: all are of full length."""
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    requests = [
        Request(
            prompt_ids=engine.tokenizer.chat_ids([{"role": "user", "content": prompt.text}]),
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(),
            speculate=width is not None,
            width=width,
        )
        for prompt in prompts
    ]
    for prompt, request, done in zip(prompts, requests, engine.run(requests), strict=True):
        assert done.speculation.enabled == (width is not None), done.speculation.reason
        record = {"prompt_ids": list(request.prompt_ids), "ids": list(done.token_ids), "finish": done.finish_reason}
        work.append(prompt.id, common.mode_name(width), {**record, "stats": done.stats.to_json()})


def report(work: common.Work, prompts: Sequence[common.Prompt], width: int, judge: Callable[[], Any]) -> dict[str, Any]:
    """How the texts compare, and acceptance: over all of them, and over those that do not end in a loop."""
    [entry] = lossless.report(work, prompts, [width], judge)
    records = [work.records[prompt.id, common.mode_name(width)] for prompt in prompts]
    without = [record for record in records if not common.loops(record["ids"])]
    entry["num_loops"] = len(records) - len(without)
    entry["acceptance_without_loops"] = common.acceptance_summary(without) if without else None
    return entry


# ---- the public recipe -----------------------------------------------------------------------------------------------
def reference(
    work: common.Work, prompts: Sequence[common.Prompt], width: int, folder: Path, judge: Callable[[], Any]
) -> dict[str, Any]:
    """What the public loop makes of such blocks: a recording cache of transformers, cropped behind every block.

    Its proposals are the plain text up to a wrong one, as often as in the served steps; a text ends where it differs.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        plain, served = (work.records[prompt.id, common.mode_name(asked)] for asked in (None, width))
        ids = _cropped(model, plain, served["stats"]["accepted_histogram"], width, random.Random(prompt.id))
        found.append(lossless.compare(plain, {**plain, "ids": ids}, judge))
    outcomes = [one["outcome"] for one in found]
    return {
        "num_prompts": len(found),
        "num_identical": outcomes.count("identical"),
        "num_ties": outcomes.count("tie"),
        "num_failures": outcomes.count("failure"),
        "positions": sorted(one["position"] for one in found if one["outcome"] == "failure"),
    }


def _cropped(model: Any, plain: dict[str, Any], accepted: Sequence[int], width: int, draw: random.Random) -> list[int]:
    """The text up to its end or to the first token that is not that of `plain`. `accepted`: steps by their number."""
    import torch
    from transformers import DynamicCache

    prompt, right = plain["prompt_ids"], plain["ids"]
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), cache=cache, use_cache=True).logits[0, -1:]
        ids = out.argmax(-1).tolist()
        while len(ids) < len(right) and ids == right[: len(ids)]:
            [count] = draw.choices(range(len(accepted)), weights=accepted)
            proposals = right[len(ids) : len(ids) + width - 1]
            if count < len(proposals):
                proposals[count] = (proposals[count] + 1) % out.shape[-1]
            block = [ids[-1], *proposals]
            chosen = model(torch.tensor([block]), cache=cache, use_cache=True).logits[0].argmax(-1).tolist()
            kept = next((n for n, pair in enumerate(zip(proposals, chosen, strict=False)) if pair[0] != pair[1]), None)
            kept = len(proposals) if kept is None else kept
            if kept < len(proposals):
                cache.crop(kept - len(proposals))
            ids += [*proposals[:kept], chosen[kept]]
    at = lossless.first_divergence(ids[: len(right)], right)
    return ids[: len(right)] if at is None else ids[: at + 1]
