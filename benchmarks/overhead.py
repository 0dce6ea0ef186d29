"""What share of a step is the engine's own, outside the forwards of target and draft?

The built-in pair (or --draft, --target), --batch rows of one prompt, with and without the draft. The models' part is
the target's forward, its head and embedding rows, the draft's pass, its choice of proposals and the injection of taps.
All else is the engine's: blocks, acceptance, ids, text, counters, rollback calls, widths. Seconds are those of this
process on its processor, so that what else runs on the machine does not count; CPU and one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import common, session

RESULT = "overhead.json"
QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft")
    parser.add_argument("--target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    options.device = "cpu"
    rows = []
    for has_draft in (False, True):
        for batch in options.batch:
            rows.append(measure(options, batch, has_draft=has_draft))
            print(rows[-1], flush=True)
    what = "share of a step outside the forwards of target and draft, seconds of the process"
    result = {"what": what, "dtype": options.dtype, "rows": rows, "run": session.run_facts(options)}
    common.write_json(options.results / RESULT, result)
    return 0


def measure(options: argparse.Namespace, batch: int, *, has_draft: bool) -> dict[str, Any]:
    """One run of ``batch`` rows; counted from the step in which all of them decode."""
    import torch

    import blockdraft.engine.core as core
    import blockdraft.engine.times as times
    from blockdraft.engine import Request, load

    clock = time.process_time
    with mock.patch.object(core, "now_s", clock), mock.patch.object(times, "now_s", clock):
        speculation: Any = "required" if has_draft else "off"
        engine = load(options.draft, options.target, dtype=options.dtype, max_rows=batch, speculation=speculation)
        engine.mixed_chunk_size = engine.prefill_chunk_size  # prompts first: they are not what is measured
        assert engine.tokenizer is not None
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
        count = options.max_new_tokens
        request = Request(prompt_ids=ids, max_new_tokens=count, min_new_tokens=count, width=8 if has_draft else None)
        tickets = [engine.submit(request) for _ in range(batch)]
        while any(ticket.row is None or ticket.row.num_unfed for ticket in tickets):
            engine.step()
        first, seconds = engine.stats(), [0.0]
        with torch.inference_mode(), _counted(engine, seconds, clock):
            while engine.num_running:
                engine.step()
        last = engine.stats()
    total, num_steps = last.total_s - first.total_s, last.num_steps - first.num_steps
    phases = ("propose_s", "score_s", "accept_s", "commit_s", "other_s")
    return {
        "draft": has_draft,
        "batch": batch,
        "num_steps": num_steps,
        "mean_rows": round((last.num_rows - first.num_rows) / num_steps, 2),
        "step_ms": round(1e3 * total / num_steps, 2),
        "engine_ms": round(1e3 * (total - seconds[0]) / num_steps, 3),
        "engine_share": round(1.0 - seconds[0] / total, 4),
        "phases": {name: round((getattr(last, name) - getattr(first, name)) / total, 4) for name in phases},
    }


@contextmanager
def _counted(engine: Any, seconds: list[float], clock: Any) -> Iterator[None]:
    """Within, the seconds of the models' calls are summed; a call inside another counts once."""
    depth = [0]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            started = clock()
            try:
                return real(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    seconds[0] += clock() - started

        return call

    calls = [(engine.target, name) for name in ("forward", "embed", "logits")]
    if engine.draft is not None:
        calls += [(engine.draft, name) for name in ("forward", "noise", "propose_rows", "inject_rows")]
    patches = [mock.patch.object(owner, name, counted(getattr(owner, name))) for owner, name in calls]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


if __name__ == "__main__":
    session.finish(main)
