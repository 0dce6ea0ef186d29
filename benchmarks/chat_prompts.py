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
COUNT, SEED, BATCH_SIZE, MAX_TOKENS, TOP_P = 100, 20_261_201, 32, 96, 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--num-asked", type=int, default=160, help="turns to sample; unfinished ones are dropped")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=FILE)
    options = parser.parse_args()
    import torch

    from blockdraft.targets import ensure_target
    from blockdraft.targets.smollm2 import TARGET_NAME
    from blockdraft.targets.writing import load_writer
    from blockdraft.text import load_tokenizer
    from blockdraft.train.writer import self_written_prompts

    torch.set_num_threads(options.threads)
    folder = ensure_target()
    tokenizer = load_tokenizer(folder)
    writer = load_writer(folder, (0,), dtype=torch.float32)
    found = self_written_prompts(
        writer,
        tokenizer,
        count=options.num_asked,
        batch_size=BATCH_SIZE,
        max_tokens=MAX_TOKENS,
        top_p=TOP_P,
        seed=SEED,
    )
    marker = "@@turn@@"
    around = tokenizer.decode(
        tokenizer.chat_ids([{"role": "user", "content": marker}], add_generation_prompt=True),
        skip_special_tokens=False,
    )
    before, _, after = around.partition(marker)
    texts = [tokenizer.decode(ids, skip_special_tokens=False)[len(before) : -len(after)] for ids in found]
    if len(texts) < COUNT:
        raise ConfigError(f"{len(texts)} of {options.num_asked} turns were finished; ask for more with --num-asked")
    settings = {"seed": SEED, "num_asked": options.num_asked, "batch_size": BATCH_SIZE, "max_tokens": MAX_TOKENS}
    settings |= {"temperature": 1.0, "top_p": TOP_P, "dtype": "float32", "target": TARGET_NAME}
    common.write_json(options.out, {"settings": settings, "prompts": texts[:COUNT]})
    print(json.dumps({"finished": len(texts), "kept": COUNT}))
    return 0


if __name__ == "__main__":
    session.finish(main)
