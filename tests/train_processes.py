"""Runs a function in several processes that find each other as torchrun's do, and gathers how each one ended."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from blockdraft.errors import BlockdraftError
from blockdraft.train.parallel import Parallel

LIMIT_S = 120.0
# The server is a process of its own, which imports once and is copied for every process of a test.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "blockdraft.train.export",
        "pytest",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
    ]
)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its function's result, or the kind and text of its error; neither if it was killed."""

    exit_code: int | None
    result: Any = None
    error: str = ""


def run_processes(count: int, work: Callable[..., Any], *args: Any, folder: Path) -> list[Ended]:
    """`work(parallel, *args)` in `count` processes. A process that does not end is killed and fails the test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has one
    outs = [folder / f"ended-{work.__name__}-{rank}.pt" for rank in range(count)]
    processes = [
        _CONTEXT.Process(target=_process, args=(rank, count, store.port, outs[rank], work, args))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
        process.join()
    assert not hanging, f"{len(hanging)} of {count} processes did not end within {LIMIT_S:g} s"
    told = [torch.load(out, weights_only=False) if out.is_file() else {} for out in outs]
    for out in outs:
        out.unlink(missing_ok=True)
    return [Ended(process.exitcode, **found) for process, found in zip(processes, told, strict=True)]


def _process(rank: int, count: int, port: int, out: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    parallel = Parallel.from_env()
    try:
        with parallel.together():
            told = {"result": work(parallel, *args)}
            parallel.close()
    except BlockdraftError as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, out)
        raise SystemExit(2) from None
    except Exception:
        torch.save({"error": traceback.format_exc()}, out)
        raise SystemExit(1) from None
    torch.save(told, out)
