"""llama.cpp's server, built by benchmarks.llama_cpp: its files in the precision that a mode states, its own times."""

from __future__ import annotations

import urllib.error
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import llama_cpp
from benchmarks.rivals.hosts import Failed
from benchmarks.rivals.modes import F16
from benchmarks.rivals.vllm_server import wait_until_ready
from blockdraft import formats
from blockdraft.engines.process import EngineProcess


def target_file(precision: str, given: Path | None, into: Path) -> Path:
    """The target's GGUF in a precision: as it was published, or with its matrices widened to float16."""
    source = llama_cpp.target_gguf(given, into)
    return llama_cpp.widen(source, into / "target-f16.gguf", half=True) if precision == F16 else source


def draft_file(draft: Path, target: Path, into: Path) -> Path:
    """A drafter as GGUF in float16."""
    path = into / "draft-f16.gguf"
    formats.write(path, formats.read(draft), dialect="gguf", dtype="float16", overwrite=True, target=target)
    return path


class LlamaServer:
    """A server of our own, one slot, nothing kept between requests, everything else as it is by itself."""

    def __init__(self, server: Path, target: Path, draft: Path | None, *, threads: int, port: int, log: Path) -> None:
        words = [str(server), "-m", str(target), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--threads", str(threads), "--parallel", "1", "--ctx-size", "2048", "--cache-ram", "0"]
        words += ["--metrics", "--offline"]
        if draft is not None:
            words += ["--spec-type", "draft-dflash", "--spec-draft-model", str(draft), "--spec-draft-n-max", "7"]
            words += ["--spec-draft-threads", str(threads)]
        self.facts: dict[str, Any] = {"build": llama_cpp.SDIST}
        self._log = log.open("w", encoding="utf-8")
        self._process = EngineProcess(words, {}, self._keep)
        self._client, self._is_plain = llama_cpp.Server(f"http://127.0.0.1:{port}"), draft is None
        try:
            wait_until_ready(self._process, self._is_ready)
        except Failed:
            self.close()
            raise

    def generate(self, how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        try:
            found = self._client.generate(prompt_ids, max_new_tokens, ignore_eos=True)
        except (urllib.error.URLError, OSError) as error:
            raise Failed(f"{error}; the server's last line: {self._process.last_line()}") from None
        steps = max_new_tokens - 1 if self._is_plain else found["num_steps"]
        return {"ids": found["ids"], "num_steps": steps, "prefill_s": found["prefill_s"], "decode_s": found["decode_s"]}

    def close(self) -> None:
        self._process.stop(20.0)
        self._log.close()

    def _is_ready(self) -> bool:
        try:
            self._client.text("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _keep(self, line: str) -> None:
        self._log.write(line + "\n")
        self._log.flush()
