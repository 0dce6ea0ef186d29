"""What does one pass for several rows of a target of transformers save, against a pass for each of them?

Random models with the mixers and attention of published ones and four layers (those of ``replay_cost``, and one with
attention alone), float32. Per shape: seconds of a step (the block scored, half of it taken back) of 1, 4 and 8 rows,
each with a context of its own length, for a block of --width ids a row and for one id a row. Both ways take turns on
the same weights, so that whatever else runs on the machine meets both.

python -m benchmarks.rows                            some minutes of one thread, to results/rows.json
python -m benchmarks.rows --write docs/targets.md    the table
python -m benchmarks.rows --check docs/targets.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import common, markdown, session
from benchmarks.replay_cost import SHAPES, model_of
from benchmarks.table import split

BEGIN, END = "<!-- rows:begin -->", "<!-- rows:end -->"
RESULT = "rows.json"
NUM_ROWS = (1, 4, 8)
ATTENTION = "qwen3"
_ALL_SHAPES = {
    ATTENTION: {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "use_sliding_window": False,
    },
    **{
        family: {**shape, "num_hidden_layers": 4, "layer_types": shape["layer_types"][:4]}
        for family, shape in SHAPES.items()
    },
}


def measured(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both ways, by number of rows and width."""
    from blockdraft.targets import HFTarget

    model = model_of(family, _ALL_SHAPES[family]).to(options.device)
    together, apart = HFTarget(model), HFTarget(model)
    if together.way is None:
        raise AssertionError(f"{family} has no pass for several rows")
    apart._way, apart._was_tried = None, True
    found: dict[str, Any] = {}
    for num_rows in NUM_ROWS:
        for width in (1, options.width):
            seconds = _both(together, apart, num_rows, width, options)
            found[f"{num_rows} x {width}"] = {
                **{name: common.median_interval(times) for name, times in seconds.items()},
                "times_faster": common.median_interval(
                    [b / a for a, b in zip(seconds["one_pass"], seconds["one_by_one"], strict=True)]
                ),
            }
    way = together.way
    together.close()
    apart.close()
    return {
        "config": _ALL_SHAPES[family],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows_part": way,
        "steps": found,
    }


def _both(together: Any, apart: Any, num_rows: int, width: int, options: argparse.Namespace) -> dict[str, list[float]]:
    import torch

    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> Any:
        return torch.randint(together.facts.vocab_size, (count,), generator=draw)

    rows = {}
    for name, target in (("one_pass", together), ("one_by_one", apart)):
        rows[name] = [target.new_row() for _ in range(num_rows)]
        for index, row in enumerate(rows[name]):
            target.forward([ids(options.context + 7 * index)], [row], num_logits=0)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.repeats + 1):
        blocks = [ids(width) for _ in range(num_rows)]
        for name, target in (("one_pass", together), ("one_by_one", apart)):
            begin = time.perf_counter()
            target.forward(blocks, rows[name])
            target.rollback(rows[name], [(width + 1) // 2] * num_rows)
            if options.device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    for name, target in (("one_pass", together), ("one_by_one", apart)):
        for row in rows[name]:
            target.free(row)
    return {name: times[1:] for name, times in seconds.items()}  # the first is slow


# ---- the table -----------------------------------------------------------------------------------------------------
def block(found: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    settings, facts = found["settings"], found["runs"][-1]
    cases = list(next(iter(found["shapes"].values()))["steps"])
    lines = [f"| rows x ids | {' | '.join(found['shapes'])} |", "| --- |" + " --- |" * len(found["shapes"])]
    for case in cases:
        cells = [_cell(shape["steps"][case]) for shape in found["shapes"].values()]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    machine, versions = facts["machine"], facts["versions"]
    commit = (facts["commit"] or "unknown")[:10] + ("+" if facts["is_dirty"] else "")
    return "\n".join(
        [
            f"**One pass for all rows against a pass for each: times faster, and ms of one step** (contexts of"
            f" {settings['context']} positions and more, float32)",
            "",
            *lines,
            "",
            f"<sub>{machine['cpu']}, {markdown.threads(found)}, {machine['os']}, torch {versions['torch']},"
            f" transformers {versions['transformers']}, {facts['date_utc'][:10]}, commit {commit}</sub>",
        ]
    )


def _cell(step: Mapping[str, Any]) -> str:
    times, seconds = step["times_faster"], step["one_pass"]["estimate"]
    return f"{times['estimate']:.2f} [{times['low']:.2f}, {times['high']:.2f}], {1000 * seconds:.0f} ms"


def written(text: str, found: Mapping[str, Any]) -> str:
    """The text of a file with everything between its marks made anew."""
    before, _, after = split(text, BEGIN, END)
    return f"{before}\n{block(found)}\n{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    session.add_step_options(
        parser, repeats=5, context=64, context_help="positions of the shortest row before the steps"
    )
    session.add_document(parser)
    options = parser.parse_args()
    file = options.results / RESULT
    if options.write or options.check:
        return session.show(options, lambda text: written(text, markdown.read(file)), "rows")
    import torch

    torch.set_num_threads(options.threads)
    started = session.load_average()
    shapes = {}
    for family in _ALL_SHAPES:
        shapes[family] = measured(family, options)
        session.note(f"{family} measured")
    result = {
        "what": "seconds of a step of several rows of one target, in one pass and in a pass for each row",
        "formulas": {"times_faster": "median over steps of (seconds of a pass for each / seconds of one pass)"},
        "settings": session.step_settings(options),
        "runs": [{**session.run_facts(options), "load_average": [started, session.load_average()]}],
        "shapes": shapes,
    }
    common.write_json(file, result)
    return 0


if __name__ == "__main__":
    session.finish(main)
