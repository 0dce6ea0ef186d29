"""The chat prompts of benchmarks.acceptance: user turns that the built-in target made up itself.

Written once and kept in chat_prompts.json; a corpus for training draws its own with other seeds. Sampled at temperature
1, top-p .9 from the open user turn of the chat template; the first 100 finished and distinct ones are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import common, session
from blockdraft.errors import ConfigError

FILE = Path(__file__).with_name("chat_prompts.json")
COUNT, SEED, MAX_TOKENS, TOP_P = 100, 20_261_201, 96, 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-asked", type=int, default=160, help="turns to sample; unfinished ones are dropped")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=32)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    texts = own_turns(options.num_asked, threads=options.threads, max_rows=options.max_rows)
    if len(texts) < COUNT:
        raise ConfigError(f"{len(texts)} of {options.num_asked} turns were finished; ask for more with --num-asked")
    from blockdraft.targets.smollm2 import TARGET_NAME

    settings = {"seed": SEED, "num_asked": options.num_asked, "max_tokens": MAX_TOKENS, "temperature": 1.0}
    settings |= {"top_p": TOP_P, "dtype": "float32", "target": TARGET_NAME}
    common.write_json(options.out, {"settings": settings, "prompts": texts[:COUNT]})
    print(json.dumps({"finished": len(texts), "kept": COUNT}))
    return 0


def own_turns(count: int, *, threads: int, max_rows: int) -> list[str]:
    """The distinct finished ones of `count` turns, in the order of their seeds."""
    import torch

    from blockdraft.targets import ensure_target, load_target
    from blockdraft.targets.writing import write
    from blockdraft.text import load_tokenizer
    from blockdraft.train.selfwritten import finished_turn, open_turn_ids

    torch.set_num_threads(threads)
    folder = ensure_target()
    tokenizer, target = load_tokenizer(folder), load_target(folder, dtype=torch.float32)
    opening, stop_ids = open_turn_ids(tokenizer, ""), frozenset(target.facts.eos_token_ids)
    found: dict[int, str] = {}
    for index, item in write(
        target,
        ((index, opening) for index in range(count)),
        max_new_tokens=MAX_TOKENS,
        stop_ids=stop_ids,
        temperature=1.0,
        top_p=TOP_P,
        generator_of=lambda index: torch.Generator().manual_seed(SEED + index),
        max_rows=max_rows,
    ):
        turn = finished_turn(tokenizer, "", item.ids[item.num_prompt :], stop_ids)
        if turn.text is not None:
            found[index] = turn.text
    return list(dict.fromkeys(found[index] for index in sorted(found)))


if __name__ == "__main__":
    session.finish(main)
