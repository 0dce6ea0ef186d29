"""Is text under a grammar always one of the grammar's, and the same with the draft as without it?

Random JSON schemas and regular expressions (benchmarks/grammar_cases.py), each asked for in a chat with the built-in
pair, greedy: once in plain steps, once with the draft, several rows at a time. A text that ended is judged by
``jsonschema_rs`` or ``re``; one that the length limit cut is no whole text and is counted apart. Where the two ways
differ the case is listed: in float32 that may only be where two ids are equal up to rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import common, session
from benchmarks.grammar_cases import Case, cases
from blockdraft import stats as st

if TYPE_CHECKING:
    from blockdraft.engine import Completion, Engine

RESULT = "grammar.json"
PREFIX_BYTES = 2**28


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", help="folder or hub id of a draft (default: the built-in pair)")
    parser.add_argument("--target", help="folder or hub id of its target")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16, help="requests at a time")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    options = parser.parse_args()
    run = session.run_facts(options)  # of the code that is loaded now
    engine = _engine(options)
    started = time.perf_counter()
    asked = list(cases(options.cases, seed=options.seed))
    pairs = both_ways(engine, asked, max_new_tokens=options.max_new_tokens)
    found = report(asked, pairs)
    found["settings"] = session.settings(options) | {"seed": options.seed, "rows": options.rows}
    found["run"] = run | {"llguidance": version("llguidance"), "judge": version("jsonschema_rs")}
    found["wall_s"] = round(time.perf_counter() - started, 1)
    found["load_average"] = session.load_average()
    common.write_json(options.results / RESULT, found)
    print(f"{len(asked)} grammars in {found['wall_s']} s: {found['verdict']}")
    return 0 if found["verdict"] == "ok" else 1


def _engine(options: argparse.Namespace) -> Engine:
    """The pair, with room for what all prompts begin with."""
    import torch

    torch.set_num_threads(options.threads)
    from blockdraft.engine import load

    return load(
        options.draft,
        options.target,
        dtype=options.dtype,
        device=options.device,
        max_rows=options.rows,
        prefix_cache_bytes=PREFIX_BYTES,
    )


def both_ways(engine: Engine, asked: Sequence[Case], *, max_new_tokens: int) -> list[tuple[Completion, Completion]]:
    """(plain, with the draft) of every case."""
    from blockdraft.engine import Request

    assert engine.tokenizer is not None
    ways = []
    for speculate in (False, True):
        requests = [
            Request(
                prompt_ids=engine.tokenizer.chat_ids([{"role": "user", "content": _question(case)}]),
                max_new_tokens=max_new_tokens,
                grammar=case.grammar,
                speculate=speculate,
            )
            for case in asked
        ]
        ways.append(engine.run(requests))
        session.note("with the draft: done" if speculate else "plain: done")
    return list(zip(*ways, strict=True))


def _question(case: Case) -> str:
    return f"Make up {case.subject}. Answer in the form that you are held to, and with nothing else."


def report(asked: Sequence[Case], pairs: Sequence[tuple[Completion, Completion]]) -> dict[str, Any]:
    """Counts by kind of grammar, every case that is not as it should be, and the verdict."""
    kinds: dict[str, dict[str, int]] = {}
    wrong = []
    for case, (plain, drafted) in zip(asked, pairs, strict=True):
        counts = kinds.setdefault(case.kind, dict.fromkeys(("cases", "same_ids", "ended", "valid", "cut"), 0))
        is_same, has_ended = plain.token_ids == drafted.token_ids, drafted.finish_reason == "stop"
        is_valid = has_ended and case.fits(drafted.text or "")
        counts["cases"] += 1
        counts["same_ids"] += is_same
        counts["ended" if has_ended else "cut"] += 1
        counts["valid"] += is_valid
        if not is_same or has_ended != is_valid:
            texts = {"plain": plain.text, "drafted": drafted.text, "finish": drafted.finish_reason}
            wrong.append({"kind": case.kind, "grammar": case.source, **texts})
    drafted_stats = [drafted.stats for _, drafted in pairs]
    length = st.pooled_acceptance_length(drafted_stats)
    return {
        "kinds": kinds,
        "num_tokens": sum(s.num_emitted_tokens for s in drafted_stats),
        "pooled_acceptance_length": None if length is None else round(length, 3),
        "wrong": wrong,
        "verdict": "wrong" if wrong else "ok",
    }


if __name__ == "__main__":
    session.finish(main)
