"""The published wheel's own loop with our drafter, called as its `spec_generate` calls it.

Its command `dflash generate transformers` puts everything on cuda:0, and its benchmark times with
torch.cuda.synchronize(): neither starts on a CPU. The loop itself does, without its statistics. So it is timed from
outside, like the others; its baseline is, as in its own benchmark, the same loop with blocks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.rivals import worker
from benchmarks.rivals.modes import PLAIN


def start(settings: dict[str, Any]) -> tuple[worker.Generate, dict[str, Any]]:
    import torch
    from dflash.model import DFlash2DraftModel, dflash_generate
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    given = {"attn_implementation": "sdpa", "dtype": getattr(torch, settings["precision"])}  # as it loads them itself
    target = AutoModelForCausalLM.from_pretrained(settings["target"], **given).eval()
    draft = DFlash2DraftModel.from_pretrained(settings["drafts"]["dflash2"], **given).eval()

    def ids_of(prompt_ids: Sequence[int], max_new_tokens: int, **more: Any) -> Any:
        ids = torch.tensor([list(prompt_ids)])
        return dflash_generate(draft, target, ids, max_new_tokens, None, **more)

    facts = {}
    try:
        ids_of([1, 2, 3], 2, return_stats=True)
    except Exception as error:  # what it says where there is no CUDA
        facts["its own statistics"] = worker.said(error)
    times = worker.ForwardTimes(target)

    def generate(how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        def run() -> list[int]:
            found = ids_of(prompt_ids, max_new_tokens, block_size=1 if how == PLAIN else None)
            new: list[int] = found[0, len(prompt_ids) :].tolist()
            return new

        return times.timed(run)

    return generate, facts


if __name__ == "__main__":
    worker.serve(start)
