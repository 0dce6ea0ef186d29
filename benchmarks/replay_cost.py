"""What does taking a block back cost a target with recurrent state, against the step that scored the block?

Random models with the mixers of published ones (heads, widths, kernel) and few layers, one row, float32, blocks of
--width positions. Per shape: seconds of a step (copies and records included), of making the states of 1, half and all
but one of its positions by running the mixers again and by their recurrence alone, and the bytes that a row keeps for
it. The two ways take turns, so that whatever else runs on the machine meets both.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks import common, session

RESULT = "replay_cost.json"
_PERIOD = ["linear_attention"] * 3 + ["full_attention"]
_MOE = {"num_experts_per_tok": 4, "moe_intermediate_size": 512}
_SHARED = {"vocab_size": 8192, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_GDN = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **_GDN,
        "linear_num_value_heads": 16,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "layer_types": _PERIOD * 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
    },
    "qwen3_next": {
        **_GDN,
        **_MOE,
        "linear_num_value_heads": 32,
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "layer_types": _PERIOD,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 16,
        "shared_expert_intermediate_size": 512,
    },
    "kimi_linear": {
        **_MOE,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "hidden_size": 2304,
        "intermediate_size": 4608,
        "num_hidden_layers": 4,
        "layer_types": _PERIOD,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_local_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
}


@dataclass(slots=True)
class _Way:
    """One target, one row of it, and what was measured on both."""

    target: Any
    row: Any
    steps: list[float]
    replays: dict[int, list[float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    session.add_step_options(parser, repeats=15, context=128, context_help="positions before the blocks")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    started = session.load_average()
    shapes = {family: _measured(family, options) for family in SHAPES}
    result = {
        "what": "seconds and bytes of taking one block of one row back, by the mixers and by their recurrence alone",
        "formulas": {
            "times_cheaper": "median of mixers' seconds / median of recurrence's seconds, for the same kept positions",
            "of_step": "median of the recurrence's seconds / median of the step's seconds",
        },
        "settings": session.step_settings(options),
        "runs": [{**session.run_facts(options), "load_average": [started, session.load_average()]}],
        "shapes": shapes,
    }
    common.write_json(options.results / RESULT, result)
    return 0


def model_of(family: str, shape: dict[str, Any]) -> Any:
    """A random model of a family with this shape, in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SHARED, **shape)
    return AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)


def _measured(family: str, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from blockdraft.targets import HFTarget, delta_rule

    model = model_of(family, SHAPES[family]).to(options.device)
    with mock.patch.dict(delta_rule.KNOWN, clear=True):
        by_mixers = HFTarget(model)
    ways = {"mixers": _way(by_mixers), "recurrence": _way(HFTarget(model))}
    if not ways["recurrence"].target._mixers.deltas or by_mixers._mixers is None or by_mixers._mixers.deltas:
        raise AssertionError(f"{family} does not take its blocks back in the two ways that are to be compared")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(_SHARED["vocab_size"], (options.context,), generator=draw)
    kept = sorted({1, options.width // 2, options.width - 1})
    for way in ways.values():
        way.target.forward([ids], [way.row], num_logits=0)
        way.replays.update((keep, []) for keep in kept)
    for _ in range(options.repeats + 1):
        block = torch.randint(_SHARED["vocab_size"], (options.width,), generator=draw)
        for way in ways.values():
            _one_round(way, block)
    shown = {name: _shown(way) for name, way in ways.items()}
    by = {
        name: {keep: found["seconds"]["estimate"] for keep, found in one["replay"].items()}
        for name, one in shown.items()
    }
    num_deltas = len(ways["recurrence"].target._mixers.deltas)
    for way in ways.values():
        way.target.close()
    return {
        "config": SHAPES[family],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_mixers": num_deltas,
        **shown,
        "times_cheaper": {keep: by["mixers"][keep] / by["recurrence"][keep] for keep in by["mixers"]},
        "of_step": {
            keep: seconds / shown["recurrence"]["step"]["estimate"] for keep, seconds in by["recurrence"].items()
        },
    }


def _way(target: Any) -> _Way:
    return _Way(target, target.new_row(), [], {})


def _one_round(way: _Way, block: Any) -> None:
    """A step, and its states made anew for every number of positions to keep, most first; in the end none is kept."""
    begin = time.perf_counter()
    way.target.forward([block], [way.row])
    way.steps.append(time.perf_counter() - begin)
    for keep in sorted(way.replays, reverse=True):
        way.target.rollback([way.row], [keep])
        way.replays[keep].append(_settled(way.row.undo))
    way.target.rollback([way.row], [0])


def _settled(undo: Any) -> float:
    import torch

    with torch.inference_mode():
        begin = time.perf_counter()
        undo.settle()
        return time.perf_counter() - begin


def _shown(way: _Way) -> dict[str, Any]:
    """Medians without the first round, which is slow, and what the row keeps."""
    copies = [state for copy in way.row.undo._copies for state in copy.tensors.values() if state is not None]
    snapshot = sum(state.nbytes for state in copies)
    return {
        "step": common.median_interval(way.steps[1:]),
        "replay": {str(keep): {"seconds": common.median_interval(found[1:])} for keep, found in way.replays.items()},
        "snapshot_bytes": snapshot,
        "recorded_bytes": way.row.undo.num_bytes - snapshot,
    }


if __name__ == "__main__":
    session.finish(main)
