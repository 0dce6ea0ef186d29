"""Are hybrid targets served exactly, end to end: trained on real text, with a drafter trained on them?

A Qwen3.5 and a Kimi K3 of a million parameters learn a novel; `blockdraft train` lets them write, and trains a DFlash 2
drafter for each (for Kimi K3 one per stream of taps). Then the engine serves beginnings of paragraphs that neither has
seen, greedily, with the draft and without; texts are compared and judged as in benchmarks.lossless.

python -m benchmarks.hybrids --data DIR                 minutes of one thread, to results/hybrids.json; resumable
python -m benchmarks.hybrids --write docs/targets.md    the table
python -m benchmarks.hybrids --check docs/targets.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import common, markdown, session
from benchmarks.hybrids import shown
from blockdraft.errors import ConfigError

RESULT = "hybrids.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with haystack/")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", metavar="TARGET", help="qwen3_5 or kimi_k3: its parts, and no result yet")
    parser.add_argument("--work", type=Path, default=session.ROOT / "benchmarks" / "work" / "hybrids")
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    options = parser.parse_args()
    file = options.results / RESULT
    document = options.write or options.check
    if document:
        if not file.is_file():
            raise ConfigError(f"{file} is not there; measure first, with --data")
        text = document.read_text("utf-8")
        fresh = shown.written(text, markdown.read(file))
        if options.write:
            document.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            print(f"{document.name} does not show the result; run python -m benchmarks.hybrids --write")
            return 1
        return 0
    if options.data is None:
        raise ConfigError("give --data, the folder that holds haystack/")
    return _measure(options, file)


def _measure(options: argparse.Namespace, file: Path) -> int:
    import torch

    from benchmarks.hybrids import course, prose

    torch.set_num_threads(options.threads)
    full, only = course.FULL, options.only
    if only is not None and only not in full.shapes:
        raise ConfigError(f"--only is {only}; the targets are {', '.join(full.shapes)}")
    text = prose.read_prose(options.data, full.num_taught, full.num_drafted)
    targets = None if only is None else [only]
    found = course.run(full, text, options.work, options.threads, session.note, only=targets)
    if only is None:
        common.write_json(file, found)
    failures = [one for pair in found["pairs"] for one in _failures(pair)]
    for one in failures:
        print(f"FAILURE {one}", file=sys.stderr)
    print(shown.block(found))
    return 1 if failures else 0


def _failures(pair: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in pair["served"]["divergences"] if one["outcome"] == "failure"]


if __name__ == "__main__":
    session.finish(main)
