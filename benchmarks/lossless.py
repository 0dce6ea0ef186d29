"""Is greedy text with speculation the text of the same engine without it?

First 50 GSM8K test prompts and first turns of the first 30 MT-Bench questions, 256 new tokens. Where the texts part,
an independent float64 pass over the common prefix decides: a tie if both tokens are its top two and lie less than
TIE_MARGIN apart; everything else is a failure, and the script exits with 1.

Run the shares (--part 1/2, --part 2/2) in processes of their own, then --merge; without --part one run does it all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from benchmarks import common, session
from blockdraft.errors import ConfigError
from blockdraft.verify.greedy import Verdict, compared, first_divergence
from blockdraft.verify.reference import Reference, float64_model

__all__ = ["TIE_MARGIN", "compare", "first_divergence", "float64_judge", "float64_model", "judge", "main", "report"]

SETS = {"gsm8k": 50, "mtbench": 30}
TIE_MARGIN = 1e-4  # logits


# ---- comparing -----------------------------------------------------------------------------------------------------
def judge(model: Any, prefix: Sequence[int], first: int, second: int) -> Verdict:
    """The verdict of a transformers model (float64, no code of ours) on two tokens after `prefix`."""
    return Verdict.of(Reference(model).logits(prefix)[-1], first, second)


def compare(plain: dict[str, Any], other: dict[str, Any], model: Callable[[], Any]) -> dict[str, Any]:
    """Outcome "identical", "tie" or "failure" of one prompt, and the tokens that were compared."""
    outcome, found = compared(
        plain["prompt_ids"], plain["ids"], other["ids"], lambda ids: Reference(model()).logits(ids), TIE_MARGIN
    )
    if outcome == "identical" and plain["finish"] != other["finish"]:
        outcome = "failure"
    return {"prompt": other["prompt"], "outcome": outcome, **found}


def report(
    work: common.Work, prompts: Sequence[common.Prompt], widths: Sequence[int], model: Callable[[], Any]
) -> list[dict[str, Any]]:
    """One entry per set and width."""
    entries = []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        ids = [prompt.id for prompt in prompts if prompt.set == name]
        for width in widths:
            records = [work.records[i, common.mode_name(width)] for i in ids]
            found = [compare(work.records[i, common.PLAIN], r, model) for i, r in zip(ids, records, strict=True)]
            outcomes = [one["outcome"] for one in found]
            entries.append(
                {
                    "set": name,
                    "width": width,
                    "num_prompts": len(ids),
                    "num_identical": outcomes.count("identical"),
                    "num_ties": outcomes.count("tie"),
                    "num_failures": outcomes.count("failure"),
                    "num_tokens_compared": sum(one["num_compared"] for one in found),
                    "divergences": [one for one in found if one["outcome"] != "identical"],
                    "acceptance": common.acceptance_summary(records),
                }
            )
    return entries


# ---- running -------------------------------------------------------------------------------------------------------
def main() -> int:
    parser = session.parser(__doc__)
    parser.add_argument("--widths", type=session.widths, default=[3, 5, 8], help="default 3,5,8")
    parser.add_argument("--merge", action="store_true", help="no runs: judge and report what the parts found")
    options = parser.parse_args()
    if options.dtype != "float32":
        raise ConfigError("the tie margin is made for float32; worth_it speed counts texts that differ in bfloat16")
    prompts = [
        prompt
        for name, count in SETS.items()
        for prompt in common.load_prompts(options.data, name, min(count, options.limit or count))
    ]
    settings = session.settings(options)
    if not options.merge:
        _measure(options, settings, common.part_of(prompts, options.part))
        if options.part[1] > 1:
            return 0
    work = common.merge(options.work.glob("lossless.part-*.jsonl"))
    assert work.settings is not None
    settings["threads"] = work.settings["threads"]  # those of the runs count
    common.check_settings(settings, work.settings, "the work files")
    work.require((p.id, common.mode_name(width)) for p in prompts for width in (None, *options.widths))
    return _conclude(options, work, prompts)


def _measure(options: argparse.Namespace, settings: dict[str, Any], prompts: Sequence[common.Prompt]) -> None:
    part, of = options.part
    path = options.work / f"lossless.part-{part}-of-{of}.jsonl"
    work = common.Work.open(path, settings, session.run_facts(options))
    common.generate_all(
        work, prompts, [None, *options.widths], options.max_new_tokens, lambda: session.load_engine(options)
    )


def float64_judge(options: argparse.Namespace) -> Callable[[], Any]:
    """The target in float64, loaded when it is first asked for."""

    @cache
    def model() -> Any:
        session.note("texts differ: loading the target in float64 to judge")
        return float64_model(session.target_folder(options))

    return model


def _conclude(options: argparse.Namespace, work: common.Work, prompts: Sequence[common.Prompt]) -> int:
    model = float64_judge(options)
    entries = report(work, prompts, options.widths, model)
    result = {
        "what": "greedy text with speculation against plain text of the same engine",
        "tie": f"both tokens are the float64 top two and less than {TIE_MARGIN} apart",
        "settings": work.settings,
        "prompts_sha256": common.prompts_digest(prompts),
        "runs": work.runs,
        "comparisons": entries,
    }
    common.write_json(options.results / "lossless.json", result)
    for entry in entries:
        length = (entry["acceptance"]["pooled_acceptance_length"] or {}).get("estimate", float("nan"))
        print(
            f"{entry['set']} width {entry['width']}: {entry['num_identical']} of {entry['num_prompts']} identical, "
            f"{entry['num_ties']} ties, {entry['num_failures']} failures, {entry['num_tokens_compared']} tokens, "
            f"{length:.3f} tokens per step"
        )
    failures = [one for entry in entries for one in entry["divergences"] if one["outcome"] == "failure"]
    for one in failures:
        print(f"FAILURE {one}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    session.finish(main)
