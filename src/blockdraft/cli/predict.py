"""`blockdraft bench --predict`: acceptance from a run or given, step times of this machine or of named GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.errors import RequestError, shown

if TYPE_CHECKING:
    from blockdraft.bench.in_process import InProcess
    from blockdraft.bench.report import Document

DEFAULT_LOADS = "1,2,4,8,16"


def predict_here(
    source: str,
    make_system: Callable[[int], InProcess],
    *,
    context: str | None,
    loads: Sequence[int],
    command: str,
) -> Document:
    """The prediction for this pair on this machine, beside what the run measured. `make_system` gets the most rows."""
    from blockdraft.bench.journal import read_journal
    from blockdraft.bench.predict import Acceptance, MeasuredSteps, acceptances, prediction_of
    from blockdraft.bench.where import where
    from blockdraft.engine.cost_probe import measure_costs
    from blockdraft.inspection.plan import read_length, read_survival

    content = read_journal(Path(source)) if _is_journal(source) else None
    if content is not None and context is not None:
        raise RequestError("--context is that of the run's own requests; drop it")
    system = make_system(max(loads))
    draft = system.engine.draft
    assert draft is not None
    if content is None:
        shares = read_survival(source, draft.config.max_width - 1)
        found = [Acceptance("as given", shares, float(read_length(context or "512")))]
    else:
        found = acceptances(list(content.records.values()))
    model = measure_costs(system.engine.target, draft, max_rows=max(loads), limit_s=10.0)
    return prediction_of(
        content,
        found,
        MeasuredSteps(model),
        loads=loads,
        system=system.facts.to_json(),
        command=command,
        where=where(),
    )


def predict_on_gpus(
    source: str,
    draft: str | None,
    target: str | None,
    *,
    gpus: str,
    context: str | None,
    loads: Sequence[int],
    allow_mask_is_eos: bool,
    block_size: int | None,
    command: str,
) -> Document:
    """The roofline of a plan for these GPUs; of a run, a table for each data set."""
    import blockdraft
    from blockdraft.bench.journal import read_journal
    from blockdraft.bench.predict import acceptances, plan_table
    from blockdraft.bench.report import Document
    from blockdraft.bench.where import where
    from blockdraft.engines import read_fitting
    from blockdraft.inspection.plan import make_plan, read_length, read_survival
    from blockdraft.inspection.plan_gpus import read_gpus
    from blockdraft.inspection.plan_target import read_target_shape

    if draft is None or target is None:
        raise RequestError("--gpus is for a pair of yours; name the draft and its --target")
    num_gpus, gpu = read_gpus(gpus)
    facts, raw = read_fitting(draft, target, allow_mask_is_eos=allow_mask_is_eos, block_size=block_size)
    count = facts.config.num_proposals
    if _is_journal(source):
        records = list(read_journal(Path(source)).records.values())
        found = [(one.name, one.survival) for one in acceptances(records)]
    else:
        found = [("acceptance as given", read_survival(source, count))]
    for name, shares in found:
        if len(shares) != count:
            raise RequestError(f"{name}: the run tells {len(shares)} positions and this draft proposes {count}")
    plans: list[tuple[str, Any]] = [
        (
            name,
            make_plan(
                facts.config,
                read_target_shape(raw),
                tuple(facts.own),
                num_gpus=num_gpus,
                gpu=gpu,
                context=read_length(context or "32k"),
                concurrency=loads,
                survival=shares,
                is_geometric=not _is_journal(source) and "," not in source,
                tensor_parallel=None,
                usd_per_gpu_hour=None,
                kv_bits=16,
                costs=None,
                acceptance_source=Path(source).name if _is_journal(source) else "as given",
            ),
        )
        for name, shares in found
    ]
    return Document(
        title=f"Predicted speed-up on {gpus}",
        command=command,
        system={"engine": "roofline", "version": blockdraft.__version__, "target": target, "draft": draft},
        settings={},
        workloads=[],
        runs=[where()],
        tables=[plan_table(name, plan) for name, plan in plans],
    )


def _is_journal(source: str) -> bool:
    if source.endswith(".jsonl"):
        if not Path(source).is_file():
            raise RequestError(f"--predict {shown(source)}: there is no such journal; name one, or give an acceptance")
        return True
    return False
