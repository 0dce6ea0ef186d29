"""transformers' own `generate`: plain, with prompt lookup, and with its native DFlash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.rivals import worker
from benchmarks.rivals.modes import LOOKUP, V1

NUM_LOOKUP_TOKENS = 7  # as many proposals as the drafters make


def start(settings: dict[str, Any]) -> tuple[worker.Generate, dict[str, Any]]:
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["precision"])
    target = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype).eval()
    pad = target.generation_config.eos_token_id
    target.generation_config.pad_token_id = pad[0] if isinstance(pad, list) else pad
    target.generation_config.eos_token_id = None  # every text has the length that is asked for
    options: dict[str, dict[str, Any]] = {LOOKUP: {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}}
    if V1 in settings["hows"]:
        assistant = AutoModel.from_pretrained(settings["drafts"]["assistant"], dtype=dtype).eval()
        options[V1] = {"assistant_model": assistant, "speculation_type": "dflash"}
    times = worker.ForwardTimes(target)

    def generate(how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        ids = torch.tensor([list(prompt_ids)])

        def run() -> list[int]:
            found = target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                **options.get(how, {}),
            )
            new: list[int] = found[0, ids.shape[1] :].tolist()
            return new

        return times.timed(run)

    return generate, {"attention": target.config._attn_implementation}


if __name__ == "__main__":
    worker.serve(start)
