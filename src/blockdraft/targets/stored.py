"""Where a target's weights lie and in what form, found before any of them is read.

A hub id, a folder or a GGUF file become one answer. Owns the consent to code that a checkpoint brings, and the reading
of its configuration. Must not know how a target runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blockdraft.config import TargetFacts, token_ids
from blockdraft.errors import CheckpointError, ConfigError, UnavailableError
from blockdraft.formats import zlab
from blockdraft.formats.source import locate

from .kimi_k3 import holds_kimi_k3
from .kimi_k3.checkpoint import facts_of_folder
from .model_facts import declared_facts

__all__ = ["StoredTarget", "find_target", "silenced"]

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PROJECTOR = "mmproj"  # the vision part of a model, a GGUF of its own beside it
_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class StoredTarget:
    """A target on this machine. ``path``: its folder, or its GGUF file. ``name``: what the caller called it."""

    name: str
    path: Path
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        return self.path.parent if self.is_gguf else self.path

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def is_kimi_k3(self) -> bool:
        return not self.is_gguf and holds_kimi_k3(self.path)

    @property
    def place(self) -> dict[str, Any]:
        """What a ``from_pretrained`` of transformers is told of the place."""
        file = {"gguf_file": self.path.name} if self.is_gguf else {}
        return {"pretrained_model_name_or_path": str(self.folder), "local_files_only": True, **file}

    @cached_property
    def config(self) -> Any:
        """The configuration as transformers reads it: with everything that the file leaves to its class."""
        from transformers import AutoConfig

        self._check_code()
        if self.is_gguf:
            _need_gguf(self.name)
        return self.read(AutoConfig, trust_remote_code=self.trust_remote_code)

    @property
    def facts(self) -> TargetFacts:
        """The facts of the configuration, and of the generation config the ids that end or pad a text too.

        Raises PairError, naming the family, where a block cannot be taken back exactly.
        """
        if self.is_kimi_k3:
            return facts_of_folder(self.path)
        facts = declared_facts(self.config)
        more = {} if self.is_gguf else self._generation_config()
        ends = (*facts.eos_token_ids, *token_ids("eos_token_id", more.get("eos_token_id")))
        pads = token_ids("pad_token_id", more.get("pad_token_id"))
        pad = facts.pad_token_id if facts.pad_token_id is not None else next(iter(pads), None)
        return dataclasses.replace(facts, eos_token_ids=tuple(dict.fromkeys(ends)), pad_token_id=pad)

    def read(self, loader: Any, **kwargs: Any) -> Any:
        """What a loader of transformers makes of this target, said in one line where it makes nothing of it."""
        try:
            with silenced():
                return loader.from_pretrained(**self.place, **kwargs)
        except Exception as error:  # configs and weights that make no sense raise anything, bare Exception included
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise CheckpointError(f"{self.name} cannot be loaded as a causal language model: {reason}") from error

    def _generation_config(self) -> dict[str, Any]:
        path = self.folder / "generation_config.json"
        if not path.is_file():
            return {}
        found, _ = zlab.read_raw_config(path)
        if not isinstance(found, dict):
            raise ConfigError(f"{path} is not an object")
        return found

    def _check_code(self) -> None:
        """Raise CheckpointError where the model exists only as code of its own and nobody has agreed to run it."""
        if self.trust_remote_code or self.is_gguf:
            return
        raw, _ = zlab.read_raw_config(self.path)
        classes = raw.get("auto_map") if isinstance(raw, dict) else None
        if not isinstance(classes, dict) or _is_known(raw.get("model_type")):
            return
        places = {str(entry).partition("--")[0] for entry in classes.values() if "--" in str(entry)}
        owner = ", ".join(sorted(places)) or self.name
        raise CheckpointError(
            f"target {self.name} ({raw.get('model_type')}) is no model of transformers: it needs Python code from"
            f" {owner}, which runs only if you agree; read it, then pass --trust-remote-code (trust_remote_code=True)"
        )


def find_target(source: str | Path | StoredTarget, *, trust_remote_code: bool = False) -> StoredTarget:
    """The target that a folder, a GGUF file or a hub id (owner/name, owner/name/FILE.gguf) names; fetched if need be.

    Raises CheckpointError for what is no target, UnavailableError for a hub id that cannot be fetched.
    """
    if isinstance(source, StoredTarget):
        return source
    name = str(source)
    _check_path(name)
    path = locate(name, what="target", with_code=trust_remote_code)
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{name} is a file: give the folder that holds config.json and the weights, or a GGUF")
    if path.is_dir():
        path = _gguf_in(path, name) or path
    if _SPLIT.search(path.name):
        raise CheckpointError(f"{name} is one part of a split GGUF: merge the parts (llama-gguf-split --merge) first")
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{name} has no config.json: give the folder of a transformers checkpoint, or a GGUF")
    return StoredTarget(name, path, trust_remote_code)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Loading draws nothing: a library does not write to its caller's terminal.

    Progress bars of transformers have a switch; those of the packages below it know only where stderr is.
    """
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _check_path(name: str) -> None:
    """Raise CheckpointError for what can only be a path and is not there, before a hub is asked for it."""
    is_hub_file = name.endswith(".gguf") and name.count("/") == 2
    looks_local = name.startswith((".", "~", os.sep)) or "\\" in name or (name.count("/") > 1 and not is_hub_file)
    if looks_local and not os.path.exists(os.path.expanduser(name)):
        raise CheckpointError(
            f"target {name!r}: no such folder; no folder and no file is there: give a folder with config.json, a GGUF"
            " file, or a hub id (owner/name)"
        )


def _gguf_in(folder: Path, name: str) -> Path | None:
    """The one GGUF file of a folder without other weights."""
    if any(next(folder.glob(pattern), None) is not None for pattern in _WEIGHTS):
        return None
    files = sorted(path for path in folder.glob("*.gguf") if _PROJECTOR not in path.name.lower())
    if len(files) > 1:
        shown = ", ".join(path.name for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise CheckpointError(f"{name} holds {len(files)} GGUF files ({shown}): give the path of one of them")
    return files[0] if files else None


def _is_known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _need_gguf(name: str) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UnavailableError(f"target {name} is a GGUF, which needs the package gguf: pip install gguf") from error
