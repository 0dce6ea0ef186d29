"""Making a corpus: the target answers prompts, or writes the prompts too, and its taps are kept.

Owns the order of work, the shards on disk and their resumption. The text is made by targets.writing.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from blockdraft.errors import ConfigError, RequestError
from blockdraft.formats.source import locate
from blockdraft.targets import ensure_target
from blockdraft.targets.writing import BatchWriter, Written, load_writer
from blockdraft.text import Prompt, Tokenizer, load_tokenizer
from blockdraft.train.corpus import CorpusFacts

__all__ = ["Manifest", "chat_prompts", "run_corpus", "self_written_prompts", "write_corpus"]

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What became of the prompts: success + skipped = given."""

    given: int
    success: int
    skipped: int
    answer_tokens: int


def run_corpus(
    folder: Path,
    target: str | Path | None,
    tap_layer_ids: Sequence[int],
    *,
    prompts: Sequence[Prompt],
    num_self_prompts: int,
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
    seed: int,
    dtype: str,
    on_progress: Callable[[str], None] | None = None,
) -> Manifest:
    """The whole of `blockdraft corpus`: `prompts` and those of the target itself, answered into `folder`.

    `target` None is the built-in one. Self-written prompts are kept in `folder`, so that a resumed call has the same.
    """
    say = on_progress or (lambda _line: None)
    if not prompts and num_self_prompts < 1:
        raise RequestError("no prompts: give a JSONL file, or let the target write some (--self-prompts)")
    if dtype not in ("float32", "bfloat16"):
        raise RequestError(f"dtype is {dtype!r}; a corpus is written in float32 or bfloat16")
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    source = ensure_target(progress=lambda line, _done: say(line)) if target is None else locate(target, what="target")
    tokenizer = load_tokenizer(source)
    writer = load_writer(source, tap_layer_ids, dtype=getattr(torch, dtype))
    try:
        ids = chat_prompts(prompts, tokenizer)
        if num_self_prompts > 0:
            say(f"the target writes {num_self_prompts} prompts")
            ids += _kept_self_prompts(folder, writer, tokenizer, num_self_prompts, batch_size, seed)
        return write_corpus(
            folder,
            ids,
            writer,
            target_name=source.name,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            batch_size=batch_size,
            seed=seed,
            on_shard=lambda done, total: say(f"shard {done} of {total}"),
        )
    finally:
        writer.close()


def _kept_self_prompts(
    folder: Path, writer: BatchWriter, tokenizer: Tokenizer, count: int, batch_size: int, seed: int
) -> list[list[int]]:
    path = folder / f"self-prompts-{count}-{batch_size}-{seed}.json"
    if path.is_file():
        kept: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    turns = self_written_prompts(
        writer, tokenizer, count=count, batch_size=batch_size, max_tokens=96, top_p=0.9, seed=seed
    )
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(turns), encoding="utf-8")
    os.replace(temporary, path)
    return turns


def chat_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of every prompt under the target's chat template, ready to be answered."""
    return [tokenizer.chat_ids(prompt.as_messages(), add_generation_prompt=True) for prompt in prompts]


def self_written_prompts(
    writer: BatchWriter, tokenizer: Tokenizer, *, count: int, batch_size: int, max_tokens: int, top_p: float, seed: int
) -> list[list[int]]:
    """Prompts that the target makes up: it continues its chat template's open user turn, sampled at temperature 1.

    Unfinished, very short and repeated turns are dropped, so fewer than `count` may come back.
    """
    marker = "@@blockdraft@@"
    opened = tokenizer.chat_ids([{"role": "user", "content": marker}], add_generation_prompt=False)
    before, found, _ = tokenizer.decode(opened, skip_special_tokens=False).partition(marker)
    if not found:
        raise ConfigError("the chat template rewrites user messages; self-written prompts need one that keeps them")
    opening = tokenizer.encode(before, add_special_tokens=False)
    stops = frozenset(writer.facts.eos_token_ids)
    generator = torch.Generator().manual_seed(seed)
    turns: dict[str, list[int]] = {}
    for start in range(0, count, batch_size):
        size = min(batch_size, count - start)
        for item in writer.write(
            [opening] * size,
            max_new_tokens=max_tokens,
            stop_ids=stops,
            temperature=1.0,
            top_p=top_p,
            generator=generator,
        ):
            turn = tokenizer.decode(item.ids[item.num_prompt :]).strip()
            if item.ids[-1] in stops and len(turn) >= 12:
                turns[turn] = tokenizer.chat_ids([{"role": "user", "content": turn}], add_generation_prompt=True)
    return list(turns.values())


def write_corpus(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    writer: BatchWriter,
    *,
    target_name: str,
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
    seed: int,
    on_shard: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Answer every prompt greedily into shards below `folder`; finished shards of an earlier call are kept.

    Prompts that would pass `max_length` positions are skipped and counted. The same prompts, seed and batch size give
    the same shards, so an interrupted call goes on where it stopped. `on_shard` gets shards done and shards in all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = CorpusFacts(
        target=target_name,
        target_layer_ids=writer.tap_layer_ids,
        target_hidden_size=writer.facts.hidden_size,
        vocab_size=writer.facts.vocab_size,
    )
    if (folder / "corpus.json").is_file() and CorpusFacts.read(folder) != facts:
        raise ConfigError(f"{folder}: holds the corpus of another target or other taps; name an empty folder")
    facts.write(folder)
    usable = [list(prompt) for prompt in prompts if len(prompt) + max_new_tokens <= max_length]
    if not usable:
        raise RequestError(f"none of {len(prompts)} prompts leaves {max_new_tokens} of {max_length} positions")
    random.Random(seed).shuffle(usable)
    batches = [usable[start : start + batch_size] for start in range(0, len(usable), batch_size)]
    answer_tokens = 0
    for number, batch in enumerate(batches):
        path = folder / f"shard-{number:05d}.safetensors"
        if not path.is_file():
            _write_shard(path, _answers(writer, batch, max_new_tokens))
        answer_tokens += _answer_tokens(path)
        if on_shard is not None:
            on_shard(number + 1, len(batches))
    manifest = Manifest(
        given=len(prompts), success=len(usable), skipped=len(prompts) - len(usable), answer_tokens=answer_tokens
    )
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.__dict__, indent=1) + "\n", encoding="utf-8")
    return manifest


def _answers(writer: BatchWriter, batch: Sequence[Sequence[int]], max_new_tokens: int) -> list[Written]:
    return writer.write(
        batch,
        max_new_tokens=max_new_tokens,
        stop_ids=frozenset(writer.facts.eos_token_ids),
        temperature=0.0,
        top_p=1.0,
        generator=None,
    )


def _write_shard(path: Path, items: Sequence[Written]) -> None:
    tensors = {
        "ids": torch.cat([torch.tensor(item.ids, dtype=torch.int32) for item in items]),
        "taps": torch.cat([item.taps_SNE for item in items]),
        "prompt_len": torch.tensor([item.num_prompt for item in items]),
        "len": torch.tensor([len(item.ids) for item in items]),
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, str(temporary))
    os.replace(temporary, path)


def _answer_tokens(path: Path) -> int:
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as shard:
        return int((shard.get_tensor("len") - shard.get_tensor("prompt_len")).sum())
