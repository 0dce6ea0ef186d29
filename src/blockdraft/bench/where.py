"""Where and when a run was made, and on what. Owns provenance: no path of the machine gets into it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import blockdraft

__all__ = ["checkpoint_name", "hardware", "where"]


def where() -> dict[str, Any]:
    """Date, commit, versions and load of the machine, for one process of a run."""
    names = ("torch", "transformers", "tokenizers")
    return {
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), "blockdraft": blockdraft.__version__} | _versions(names),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def hardware(device: str, threads: int | None) -> Mapping[str, Any]:
    """What the steps ran on. Imports torch."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": cores,
        "threads": threads if threads is not None else torch.get_num_threads(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
    }


def checkpoint_name(folder: Path, given: str | None, builtin: str) -> str:
    """A checkpoint as a file names it: its name or hub id and a short hash of its weights and config."""
    digest = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    name = builtin if given is None else folder.resolve().name if Path(given).exists() else given
    return f"{name} ({digest.hexdigest()[:12]})"


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the checkout that runs, with "+" where it was changed; None for an installed package."""
    root = Path(blockdraft.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    found = [_git(root, "rev-parse", "--short=10", "HEAD"), _git(root, "status", "--porcelain", "--", "src")]
    if not found[0]:
        return None
    return found[0] + ("+" if found[1] else "")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()
