"""Our engine as one of the rivals: the same pipe, the same clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.rivals import worker
from benchmarks.rivals.modes import INT8, PLAIN, V1, V2


def start(settings: dict[str, Any]) -> tuple[worker.Generate, dict[str, Any]]:
    import torch

    torch.set_num_threads(settings["threads"])
    from blockdraft.engine import Request, load

    is_int8 = settings["precision"] == INT8
    given = {"dtype": "bfloat16" if is_int8 else settings["precision"], "weights": "int8" if is_int8 else None}
    engines = {
        how: load(settings["drafts"][how], settings["target"], max_rows=1, **given)
        for how in (V2, V1)
        if how in settings["hows"] or (how == V2 and PLAIN in settings["hows"])
    }

    def generate(how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        speculate = how != PLAIN
        asked = Request(prompt_ids=prompt_ids, max_new_tokens=max_new_tokens, stop_ids=frozenset(), speculate=speculate)
        begin = time.perf_counter()
        [done] = engines[how if speculate else V2].run([asked])
        whole_s = time.perf_counter() - begin
        if done.speculation.enabled != speculate:
            raise RuntimeError(f"speculation stopped: {done.speculation.reason}")
        # decode_s is what is left of the whole: the engine's own bookkeeping counts as it does for the others
        return {
            "ids": list(done.token_ids),
            "num_steps": done.stats.num_steps,
            "prefill_s": done.stats.prefill_s,
            "decode_s": whole_s - done.stats.prefill_s,
        }

    return generate, {}


if __name__ == "__main__":
    worker.serve(start)
