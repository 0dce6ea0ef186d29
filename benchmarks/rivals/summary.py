"""What the records of all modes say: speed, tokens a step, ratios prompt by prompt.

decode tok/s of a text is (C - 1) / decode time; with prefill it is C / the whole time. Tokens a step is Σ(C - 1)/ΣS,
the same count for everybody: what was emitted after the prefill, over forward passes of the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import common
from benchmarks.markdown import interval
from benchmarks.rivals.modes import PLAIN, RATIOS, Mode
from blockdraft import stats as st


def summary(
    work: common.Work,
    prompts: Sequence[common.Prompt],
    modes: Sequence[Mode],
    failures: Mapping[str, str],
    num_tokens: int,
) -> dict[str, Any]:
    """`modes`, `ratios` and `not_run` of a result."""
    sets = list(dict.fromkeys(prompt.set for prompt in prompts))
    ids = {name: [prompt.id for prompt in prompts if prompt.set == name] for name in sets}
    whole = [mode for mode in modes if all((prompt.id, mode.name) in work.records for prompt in prompts)]
    lead = modes[0]
    return {
        "num_prompts": {name: len(members) for name, members in ids.items()},
        "prompts": ids,
        "num_tokens_each": num_tokens,
        "formulas": {
            "tokens_a_step": "Σ(C-1)/ΣS",
            "decode_tok_per_s": "(C-1)/decode time",
            "ratio": "median over prompts",
        },
        "highest_load_average": max(
            (work.records[p.id, m.name]["load_average"] or 0.0 for p in prompts for m in whole), default=None
        ),
        "modes": {
            mode.name: {
                "rival": mode.rival,
                "precision": mode.precision,
                "how": mode.how,
                **{
                    name: _mode(_records(work, members, mode), _records(work, members, lead))
                    for name, members in ids.items()
                },
            }
            for mode in whole
        },
        "ratios": [
            {
                "what": ratio.what,
                "ours": ratio.ours.name,
                "other": ratio.other.name,
                **{name: _ratio(work, members, ratio.ours, ratio.other) for name, members in ids.items()},
            }
            for ratio in RATIOS
            if ratio.ours in whole and ratio.other in whole
        ],
        "not_run": {
            mode.name: failures.get(mode.name, "not every prompt was run") for mode in modes if mode not in whole
        },
    }


def _records(work: common.Work, ids: Sequence[str], mode: Mode) -> list[dict[str, Any]]:
    return [work.records[i, mode.name] for i in ids]


def _decode_rate(record: Mapping[str, Any]) -> float:
    return float((len(record["ids"]) - 1) / record["decode_s"])


def _whole_rate(record: Mapping[str, Any]) -> float:
    return float(len(record["ids"]) / (record["prefill_s"] + record["decode_s"]))


def _mode(records: Sequence[Mapping[str, Any]], lead: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    requests = [
        st.RequestStats(
            num_steps=record["num_steps"],
            num_accepted_draft_tokens=max(len(record["ids"]) - 1 - record["num_steps"], 0),
            num_emitted_tokens=len(record["ids"]),
        )
        for record in records
    ]
    return {
        "decode_tok_per_s": median(map(_decode_rate, records)),
        "tok_per_s_with_prefill": median(map(_whole_rate, records)),
        "ms_per_step": 1e3 * sum(r["decode_s"] for r in records) / sum(r["num_steps"] for r in records),
        "num_steps": sum(r["num_steps"] for r in records),
        "tokens_a_step": common.interval_json(st.pooled_acceptance_length_interval(requests)),
        # of the plain text of our engine in bfloat16; rounding decides where two tokens are nearly equally likely
        "num_texts_as_ours": sum(a["ids"] == b["ids"] for a, b in zip(records, lead, strict=True)),
    }


def _ratio(work: common.Work, ids: Sequence[str], ours: Mode, other: Mode) -> dict[str, Any]:
    pairs = list(zip(_records(work, ids, ours), _records(work, ids, other), strict=True))
    return {
        "decode": common.median_interval([_decode_rate(a) / _decode_rate(b) for a, b in pairs]),
        "with_prefill": common.median_interval([_whole_rate(a) / _whole_rate(b) for a, b in pairs]),
    }


def show(result: Mapping[str, Any]) -> None:
    """The result in lines of text."""
    for name, mode in result["modes"].items():
        of_sets = []
        for set_name in result["num_prompts"]:
            found = mode[set_name]
            steps = "" if mode["how"] == PLAIN else f", {interval(found['tokens_a_step'])} tokens a step"
            of_sets.append(f"{set_name} {found['decode_tok_per_s']:.1f} tok/s{steps}")
        print(f"{name}: {'; '.join(of_sets)}")
    for ratio in result["ratios"]:
        of_sets = [f"{set_name} {interval(ratio[set_name]['decode'])}" for set_name in result["num_prompts"]]
        print(f"{ratio['ours']} / {ratio['other']} ({ratio['what']}): {'; '.join(of_sets)}")
    for name, why in result["not_run"].items():
        print(f"{name}: not run: {why}")
