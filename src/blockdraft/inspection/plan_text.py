"""A plan as lines for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from blockdraft.inspection.plan import Load, Memory, Plan

PLAN_SCHEMA = 1
_HEAD = (
    "requests",
    "GB each GPU",
    "plain ms",
    "width",
    "step ms",
    "tokens",
    "speed-up",
    "at full",
    "tok/s each",
    "tok/s",
    "tok/s in all",
)


def render_plan(plan: Plan) -> str:
    """Memory of one request, then a line for each load, then what is assumed."""
    first = plan.loads[0]
    lines = [
        f"{plan.num_gpus} x {plan.gpu.name}: {plan.num_replicas} replica{'s' if plan.num_replicas > 1 else ''} of "
        f"{plan.tensor_parallel} GPU{'s' if plan.tensor_parallel > 1 else ''}, context {plan.context}, draft's width "
        f"{len(plan.survival) + 1}",
        "",
        *_memory(first.memory, first.num_requests),
        f"  at most {plan.max_requests} requests of the full context fit on one replica",
        "",
        *_table(plan),
        "",
        _verdict(plan),
        "",
        "assumed",
        *(f"  {line}" for line in plan.assumptions),
    ]
    return "\n".join(lines) + "\n"


def _memory(memory: Memory, num_requests: int) -> list[str]:
    what = f"{num_requests} request{'s' if num_requests > 1 else ''}"
    rows = [
        (name.replace("_", " "), value) for name, value in dataclasses.asdict(memory).items() if name != "available"
    ]
    lines = [f"memory of each GPU, {what}"]
    lines += [f"  {name:<15} {value / 1e9:9.2f} GB" for name, value in rows if value]
    verdict = "fits" if memory.fits else "does not fit"
    lines.append(f"  {'total':<15} {memory.total / 1e9:9.2f} GB of {memory.available / 1e9:.2f}: {verdict}")
    return lines


def _table(plan: Plan) -> list[str]:
    heads = [*_HEAD, "GPU hours / M tokens"]
    if plan.usd_per_gpu_hour is not None:
        heads.append("USD / M tokens")
    rows = [heads, *(_cells(plan, load) for load in plan.loads)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]


def _cells(plan: Plan, load: Load) -> list[str]:
    if not load.memory.fits:
        short = f"{load.memory.total / 1e9:.1f} no"
        return [str(load.num_requests), short, *["-"] * (len(_HEAD) - 2), "-", *_price(plan, None)]
    return [
        str(load.num_requests),
        f"{load.memory.total / 1e9:.1f}",
        f"{load.plain_s * 1e3:.2f}",
        "-" if load.width == 1 else str(load.width),
        f"{load.step_s * 1e3:.2f}",
        f"{load.length:.2f}",
        f"{load.speed_up:.2f}",
        f"{load.full_speed_up:.2f}",
        f"{load.tok_per_s_each:.0f}",
        f"{load.tok_per_s:.0f}",
        f"{load.tok_per_s * plan.num_replicas:.0f}",
        f"{plan.gpu_hours_per_million(load):.3f}",
        *_price(plan, load),
    ]


def _price(plan: Plan, load: Load | None) -> list[str]:
    if plan.usd_per_gpu_hour is None:
        return []
    cost = None if load is None else plan.usd_per_million(load)
    return ["-" if cost is None else f"{cost:.3f}"]


def _verdict(plan: Plan) -> str:
    if plan.stops_at is not None:
        return f"speculation stops paying at {plan.stops_at} requests"
    fitting = [load for load in plan.loads if load.memory.fits]
    if not fitting:
        return "none of these loads fits"
    return f"speculation pays at every load that fits, up to {fitting[-1].num_requests} requests"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Everything that `render_plan` shows, in bytes and seconds."""
    return {
        "schema": PLAN_SCHEMA,
        "gpu": plan.gpu.name,
        "num_gpus": plan.num_gpus,
        "tensor_parallel": plan.tensor_parallel,
        "num_replicas": plan.num_replicas,
        "context": plan.context,
        "max_requests": plan.max_requests,
        "stops_paying_at": plan.stops_at,
        "survival": list(plan.survival),
        "usd_per_gpu_hour": plan.usd_per_gpu_hour,
        "loads": [
            {
                **{key: value for key, value in dataclasses.asdict(load).items() if key != "memory"},
                "fits": load.memory.fits,
                "memory_bytes": {**dataclasses.asdict(load.memory), "total": load.memory.total},
                "gpu_hours_per_million_tokens": plan.gpu_hours_per_million(load),
                "usd_per_million_tokens": plan.usd_per_million(load),
            }
            for load in plan.loads
        ],
        "assumptions": list(plan.assumptions),
    }
