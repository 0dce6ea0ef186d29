"""How a measurement starts: its options, the pair it loads, and where, when and on what it runs.

Owns provenance. No path of the machine gets into it: checkpoints are known by name and digest.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockdraft
from blockdraft.errors import BlockdraftError, ConfigError

if TYPE_CHECKING:
    from blockdraft.engine import Engine

ROOT = Path(__file__).resolve().parents[1]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every measurement has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--draft", help="folder or hub id of a draft (default: the built-in pair)")
    made.add_argument("--target", help="folder or hub id of its target")
    made.add_argument("--data", type=Path, required=True, help="folder with gsm8k/ and mtbench/")
    made.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    made.add_argument("--device", default="cpu")
    made.add_argument("--threads", type=int, default=2, help="CPU threads of this process (default 2)")
    made.add_argument("--max-new-tokens", type=int, default=256)
    made.add_argument("--limit", type=int, help="at most so many prompts of each set")
    made.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="only the I-th of N shares")
    made.add_argument("--work", type=Path, default=ROOT / "benchmarks" / "work", help="folder of work files")
    made.add_argument("--results", type=Path, default=ROOT / "results", help="folder of result files")
    return made


def add_document(made: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """--write FILE and --check FILE: no measurement, but a document that shows a result."""
    action = made.add_mutually_exclusive_group()
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    return action


def show(options: argparse.Namespace, written: Callable[[str], str], script: str) -> int:
    """Make the document of --write anew, or see whether that of --check is new; the exit code."""
    document: Path = options.write or options.check
    text = document.read_text("utf-8")
    fresh = written(text)
    if options.write:
        document.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        print(f"{document.name} does not show the results; run python -m benchmarks.{script} --write")
        return 1
    return 0


def add_step_options(made: argparse.ArgumentParser, *, repeats: int, context: int, context_help: str) -> None:
    """What times steps of random models takes."""
    made.add_argument("--width", type=int, default=8)
    made.add_argument("--repeats", type=int, default=repeats)
    made.add_argument("--context", type=int, default=context, help=context_help)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--device", default="cpu")
    made.add_argument("--results", type=Path, default=ROOT / "results")


def step_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Those options as a result states them."""
    names = ("width", "context", "repeats", "threads", "device")
    return {name: getattr(options, name) for name in names} | {"dtype": "float32", "weights": "random"}


def widths(text: str) -> list[int]:
    """The widths of an option such as 3,5,8."""
    return [int(word) for word in text.split(",")]


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 1 to N, such as 1/2")
    return int(found[1]), int(found[2])


def finish(main: Callable[[], int]) -> None:
    """Run a script: errors made on purpose are one line and exit code 2."""
    try:
        raise SystemExit(main())
    except BlockdraftError as error:
        print(f"benchmarks: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


# ---- the pair ------------------------------------------------------------------------------------------------------
def load_engine(options: argparse.Namespace, *, max_rows: int = 16) -> Engine:
    """The engine of the options' pair, with its draft; torch gets the asked number of threads first."""
    import torch

    torch.set_num_threads(options.threads)
    from blockdraft.engine import load

    return load(
        options.draft,
        options.target,
        dtype=options.dtype,
        device=options.device,
        max_rows=max_rows,
        progress=lambda line, _done: note(line),
    )


def target_folder(options: argparse.Namespace) -> Path:
    from blockdraft.formats.source import locate
    from blockdraft.targets import ensure_target

    return ensure_target() if options.target is None else locate(options.target, what="target")


def draft_folder(options: argparse.Namespace) -> Path:
    from blockdraft.engine.load import builtin_draft
    from blockdraft.formats.source import locate

    return builtin_draft() if options.draft is None else locate(options.draft, what="draft")


def draft_digest(options: argparse.Namespace) -> dict[str, str]:
    """SHA-256 of every weight file of the draft, whole, by file name."""
    files = sorted(draft_folder(options).glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must be equal in all records of one measurement. Knows digests of the weights, not where they are."""
    from blockdraft.engine.load import BUILTIN_NAME
    from blockdraft.targets.smollm2 import TARGET_NAME

    return {
        "draft": checkpoint(draft_folder(options), options.draft, BUILTIN_NAME),
        "target": checkpoint(target_folder(options), options.target, TARGET_NAME),
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
        "max_new_tokens": options.max_new_tokens,
        "sampling": "greedy",
    }


def checkpoint(folder: Path, given: str | None, builtin: str) -> dict[str, str]:
    """Name and digest of the weights and config in a folder; `given` None: it is the built-in one."""
    digest = hashlib.sha256()
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    if not files:
        raise ConfigError(f"{folder} holds no safetensors; name the folder of a checkpoint")
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    name = builtin if given is None else (folder.resolve().name if Path(given).exists() else given)
    return {"name": name, "sha256": digest.hexdigest()[:16]}


# ---- where and when ------------------------------------------------------------------------------------------------
def run_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Date, commit, versions and machine of this process."""
    return {
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        **_commit(),
        "versions": {
            "python": platform.python_version(),
            "blockdraft": blockdraft.__version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
        "machine": _machine(options.device),
    }


def load_average() -> float | None:
    """Processes that wanted a core in the last minute: how much else ran."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _commit() -> dict[str, Any]:
    """The commit, and whether code that is measured or measures differs from it."""
    watched = ("--", "src", "benchmarks", "pyproject.toml")
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", *watched)
    return {"commit": commit or None, "is_dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _machine(device: str) -> dict[str, Any]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else "none used",
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
