"""Which version of an engine is installed, what it can run, and whether that is enough for a draft.

Asks the Python of the engine's own environment, which need not be ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from blockdraft.engines.rules import Engine
from blockdraft.engines.setting import Installed, Setting, Version
from blockdraft.errors import UnavailableError, shown

_ASK_TIMEOUT_S = 60
# Run by the engine's Python; prints the version of the first distribution and the package's folder, imports nothing.
_QUESTION = """
import importlib.metadata, importlib.util, json, sys
names, package = json.loads(sys.argv[1])
found = None
for name in names:
    try:
        found = importlib.metadata.version(name)
        break
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec(package)
places = list(spec.submodule_search_locations or []) if spec else []
print(json.dumps([found, places]))
"""


def find_program(engine: Engine, environment: Path | None) -> str:
    """The path of what starts the engine: in a given environment, on the PATH, or for a Python module our own."""
    if environment is not None:
        program = environment / "bin" / engine.program
        if not program.is_file():
            raise UnavailableError(f"{engine.label}: {program} does not exist; give the environment that holds it")
        return str(program)
    found = shutil.which(engine.program)
    if found is not None:
        return found
    if engine.program == "python":
        return sys.executable
    raise UnavailableError(
        f"{engine.label}: no {engine.program} on the PATH; install it, or name its environment with --engine-env"
    )


def find_installed(engine: Engine, program: str) -> Installed:
    """Version and features of the installed engine. Raises UnavailableError if it is not there."""
    python = _python_beside(engine, program)
    question = json.dumps([engine.distributions, engine.package])
    try:
        answer = subprocess.run(
            [python, "-c", _QUESTION, question], capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{engine.label}: {python} did not answer ({type(error).__name__})") from None
    try:
        found, places = json.loads(answer.stdout)
    except ValueError:
        reason = shown(answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else "nothing")
        raise UnavailableError(f"{engine.label}: {python} could not say what is installed: {reason}") from None
    if found is None:
        raise UnavailableError(
            f"{engine.label} is not installed for {python}; install {engine.distributions[0]}, or name its environment "
            "with --engine-env"
        )
    features = {
        name for name, file in engine.features.items() if any((Path(place) / file).is_file() for place in places)
    }
    return Installed(version=Version(found), features=frozenset(features))


def _python_beside(engine: Engine, program: str) -> str:
    if engine.program == "python":
        return program
    beside = Path(program).resolve().parent / "python"
    beside = beside if beside.is_file() else Path(program).parent / "python"
    return str(beside) if beside.is_file() else sys.executable


def assumed(engine: Engine, version: str | None) -> Installed:
    """What is taken for granted where nothing is installed: the version given, or the one the table was read at."""
    return Installed(version=Version(version or engine.read), features=frozenset(engine.features), is_assumed=True)


def check_version(engine: Engine, setting: Setting) -> None:
    """Raise UnavailableError if the installed engine cannot run this draft, naming the version that can."""
    installed = setting.installed
    for support in engine.supports:
        if not support.when(setting):
            continue
        if support.oldest is None:
            raise UnavailableError(f"{engine.label}: no release is known that runs {support.text} ({support.source})")
        if installed.version < Version(support.oldest):
            raise UnavailableError(
                f"{engine.label} {installed.version} is too old for {support.text}: {support.oldest} is the oldest "
                f"known to run it ({support.source}); upgrade it, or name another environment with --engine-env"
            )
        if support.feature is not None and support.feature not in installed.features:
            file = engine.features[support.feature]
            raise UnavailableError(
                f"{engine.label} {installed.version} has no {engine.package}/{file}, so this build does not run "
                f"{support.text} ({support.source}); install a newer build"
            )
