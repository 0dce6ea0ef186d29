"""The model card of an exported drafter, made of its run.json and of result files, never by hand.

Owns how they are shown. A number that no file holds does not appear; results of other weights are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.errors import CheckpointError
from blockdraft.train.export import RUN_FILE
from blockdraft.train.files import write_text_atomically

__all__ = ["CARD_FILE", "render_card", "write_card"]

CARD_FILE = "README.md"
_WEIGHTS = "model.safetensors"
_SET_NAMES = {
    "gsm8k": "GSM8K test",
    "mbpp": "MBPP",
    "mtbench": "MT-Bench, first turns",
    "humaneval": "HumanEval",
    "chat": "chat prompts written by the target",
}


def write_card(draft: Path, results: Sequence[Path | Mapping[str, Any]] = ()) -> Path:
    """Write `draft`/README.md from `draft`/run.json and the results; returns its path.

    A result is what benchmarks.acceptance wrote, or the JSON of an evaluation in training: a file, or its content.
    """
    run = _read(draft / RUN_FILE, "the record of a run")
    found = [_read(given, "a result") if isinstance(given, Path) else given for given in results]
    for given, result in zip(results, found, strict=True):
        _check_same_weights(draft, str(given) if isinstance(given, Path) else "a result", result)
    try:
        text = render_card(run, found, name=draft.resolve().name)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"a result lacks what a card shows ({error}); measure again with this version") from None
    target = draft / CARD_FILE
    write_text_atomically(target, text)
    return target


def render_card(run: Mapping[str, Any], results: Sequence[Mapping[str, Any]], *, name: str) -> str:
    """The text of the card: what the drafter is, what was measured, how it was made."""
    what = run.get("what") or f"A block drafter for {run.get('target', 'its target')}"
    parts = [_front_matter(run), f"# {name}", f"{what}.".replace("..", "."), _use()]
    evaluation = run.get("evaluation")
    if results or evaluation:
        parts.append("## Measured")
        parts += [_result(result) for result in results]
    if evaluation:
        parts.append(f"In training, after step {run['exported_step']}:\n\n{_evaluation(evaluation)}")
    parts.append("## The run")
    parts.append(_record(run))
    parts += [f"- {note}" for note in run.get("notes", ())]
    return "\n\n".join(parts) + "\n"


def _front_matter(run: Mapping[str, Any]) -> str:
    lines = ["---", "library_name: blockdraft", "pipeline_tag: text-generation"]
    if isinstance(run.get("license"), str):
        lines.append(f"license: {run['license']}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(run.get("target", ""))):
        lines.append(f"base_model: {run['target']}")
    return "\n".join([*lines, "tags:", "- speculative-decoding", "- dflash", "---"])


def _use() -> str:
    return '```sh\nblockdraft inspect DRAFT --target TARGET\nblockdraft generate DRAFT --target TARGET "..."\n```'


# ---- results ---------------------------------------------------------------------------------------------------------
def _result(result: Mapping[str, Any]) -> str:
    if "rows" in result:
        return _acceptance(result)
    return _evaluation(result)


def _acceptance(result: Mapping[str, Any]) -> str:
    """A table of served acceptance, as benchmarks.acceptance measured it."""
    heads = ["prompts", "sampling", "width", "number", "mean tokens", "pooled 1 + ΣA/ΣS [95 %]"]
    heads.append("accepted, given that all before it were, by position, %")
    rows = []
    for row in result["rows"]:
        found = row["acceptance"]
        shares = found["conditional_acceptance_by_position"]
        rows.append(
            [
                _SET_NAMES.get(row["set"], row["set"]),
                row["sampling"],
                row["width"],
                row["num_prompts"],
                f"{found['mean_output_tokens']:.0f}",
                _interval(found["pooled_acceptance_length"]),
                " ".join("-" if share is None else f"{100 * share:.0f}" for share in shares),
            ]
        )
    settings, run = result["settings"], result["runs"][-1]
    where = (
        f"<sub>target `{settings['target']['name']}`, {settings['dtype']}, up to {settings['max_new_tokens']} tokens; "
        f"{run['machine']['cpu']}, torch {run['versions']['torch']}, {run['date_utc'][:10]}, "
        f"commit {(run['commit'] or 'unknown')[:10]}{'+' if run['is_dirty'] else ''}</sub>"
    )
    sampled = ", ".join(
        f"{name}: {' '.join(f'{key} {value:g}' for key, value in given.items()) or 'temperature 0'}"
        for name, given in settings["sampling"].items()
    )
    return f"{_table(heads, rows)}\n\n{sampled}. S steps, A accepted proposals.\n\n{where}"


def _evaluation(result: Mapping[str, Any]) -> str:
    """The evaluation in training: held-out prompts through the engine, greedy."""
    rows = [
        ["acceptance length [95 %]", _interval(result["acceptance_length"])],
        ["without the selector, at the same steps", _number(result["base_acceptance_length"])],
        ["best path in its lists, at the same steps", _number(result["oracle_acceptance_length"])],
        ["blocks lost because the token was not in the list", _percent(result["miss_rate"])],
        ["blocks lost because another in the list was picked", _percent(result["misrank_rate"])],
        ["blocks accepted whole", _percent(result["full_rate"])],
    ]
    heads = [f"{result['num_prompts']} held-out prompts, width {result['width']}, greedy", ""]
    return _table(heads, rows)


def _interval(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    if found["low"] is None:
        return f"{found['estimate']:.2f}"
    return f"{found['estimate']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


# ---- the run ---------------------------------------------------------------------------------------------------------
def _record(run: Mapping[str, Any]) -> str:
    """Every number and word of run.json, under its dotted name."""
    left_out = ("what", "notes", "license", "evaluation")
    rows = [
        [f"`{name}`", _plain(value)]
        for name, value in _flat({key: value for key, value in run.items() if key not in left_out})
    ]
    return _table([RUN_FILE, ""], rows)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else f"{value:g}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [_row(heads), _row(["---"] * len(heads)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(' '.join(str(cell).split()).replace('|', chr(92) + '|') for cell in cells)} |"


# ---- files -----------------------------------------------------------------------------------------------------------
def _read(path: Path, what: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {what} is needed for a card") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); {what} is needed for a card") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; {what} is an object")
    return content


def _check_same_weights(draft: Path, name: str, result: Mapping[str, Any]) -> None:
    """Nothing; a CheckpointError for a file that is no result, or one of other weights."""
    if "acceptance_length" in result and "miss_rate" in result:
        return
    digests = result.get("draft_file_sha256")
    if "rows" not in result or not isinstance(digests, Mapping):
        raise CheckpointError(f"{name} is no result; give acceptance.json, or an evaluation's JSON")
    own = hashlib.sha256((draft / _WEIGHTS).read_bytes()).hexdigest()
    if digests.get(_WEIGHTS) != own:
        raise CheckpointError(f"{name} was measured with another drafter than {draft}; measure this one")
