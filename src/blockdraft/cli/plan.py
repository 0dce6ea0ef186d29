"""`blockdraft inspect --plan`: what the user said, read; the plan made and shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from blockdraft.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWish:
    """The options of a plan as they were given, None for what was not."""

    gpus: str | None
    context: str | None
    concurrency: str | None
    acceptance: str | None
    tensor_parallel: int | None
    usd_per_gpu_hour: float | None
    kv_bits: int | None
    target_gb: float | None
    costs: Path | None

    def given(self) -> list[str]:
        """The options that were given, as a user writes them."""
        options = {
            "--gpus": self.gpus,
            "--context": self.context,
            "--concurrency": self.concurrency,
            "--acceptance": self.acceptance,
            "--tp": self.tensor_parallel,
            "--price": self.usd_per_gpu_hour,
            "--kv-bits": self.kv_bits,
            "--target-gb": self.target_gb,
            "--costs": self.costs,
        }
        return [name for name, value in options.items() if value is not None]


def show_plan(
    draft: str,
    target: str | None,
    wish: PlanWish,
    *,
    allow_mask_is_eos: bool,
    block_size: int | None,
    as_json: bool,
) -> None:
    """Print the plan of a pair on a machine."""
    from blockdraft.engines import card_at, read_fitting
    from blockdraft.inspection import plan as planning
    from blockdraft.inspection.plan_gpus import read_gpus
    from blockdraft.inspection.plan_target import read_target_shape
    from blockdraft.inspection.plan_text import plan_json, render_plan

    if target is None or wish.gpus is None:
        raise RequestError("--plan needs --target and --gpus, as --gpus 8xH200")
    if wish.kv_bits not in (None, 8, 16):
        raise RequestError(f"--kv-bits is {wish.kv_bits}: 16 or 8")
    for name, value in (("--price", wish.usd_per_gpu_hour), ("--target-gb", wish.target_gb)):
        if value is not None and not value > 0:
            raise RequestError(f"{name} is {value:g}: it must be above 0")
    num_gpus, gpu = read_gpus(wish.gpus)
    context = planning.read_length(wish.context or "32k")
    counts = planning.read_concurrency(wish.concurrency or "1..256")
    facts, target_raw = read_fitting(draft, target, allow_mask_is_eos=allow_mask_is_eos, block_size=block_size)
    config = facts.config
    if wish.acceptance is not None:
        acceptance, source = wish.acceptance, "--acceptance"
    else:
        card = card_at(draft, config.max_width)
        if card is None:
            raise RequestError(
                f"what {draft} accepts is not known: give --acceptance, tokens a step (as 3.4) or one share for each "
                f"of its {config.num_proposals} positions (as 0.9,0.8,...)"
            )
        acceptance = str(sum(card.lengths.values()) / len(card.lengths))
        source = f"{float(acceptance):.2f} tokens a step, the mean of {', '.join(card.lengths)} in {card.source}"
    made = planning.make_plan(
        config,
        read_target_shape(target_raw, None if wish.target_gb is None else wish.target_gb * 1e9),
        tuple(facts.own),
        num_gpus=num_gpus,
        gpu=gpu,
        context=context,
        concurrency=counts,
        survival=planning.read_survival(acceptance, config.num_proposals),
        is_geometric="," not in acceptance,
        tensor_parallel=wish.tensor_parallel,
        usd_per_gpu_hour=wish.usd_per_gpu_hour,
        kv_bits=wish.kv_bits or 16,
        costs=None if wish.costs is None else planning.read_costs(wish.costs),
        acceptance_source=source,
    )
    print(json.dumps(plan_json(made), indent=1) if as_json else render_plan(made), end="\n" if as_json else "")
