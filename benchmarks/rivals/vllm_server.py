"""vLLM's CPU build as a server: how it is started, what it is asked, and how its counters are read.

Times are the server's own (its histograms of prefill and decode time, one request at a time), so that HTTP and the
client are not counted against it.
"""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.environments import preloads
from benchmarks.rivals.hosts import Failed
from blockdraft.engines.process import EngineProcess
from blockdraft.errors import UnavailableError

START_S, REQUEST_S, SETTLE_S = 900.0, 600.0, 5.0
_POLL_S = 0.01
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? (\S+)$")
_POSITION = re.compile(r'position="(\d+)"')
_NUM_DONE = "request_decode_time_seconds_count"


def variables(folder: Path, threads: int, cache: Path) -> dict[str, str]:
    """The environment of a server of the environment in `folder`, on the first `threads` cores, offline."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        **preloads(folder),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def options(precision: str) -> list[str]:
    """Flags for one request at a time, greedy, nothing kept between requests."""
    return [
        *("--dtype", precision),
        *("--max-model-len", "2048"),
        *("--max-num-seqs", "1"),
        "--no-enable-prefix-caching",
    ]


class Client:
    """A running vLLM at one address."""

    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            self._text("/health", timeout_s=5.0)
        except (urllib.error.URLError, OSError):
            return False
        return True

    def model(self) -> str:
        return str(json.loads(self._text("/v1/models"))["data"][0]["id"])

    def counters(self) -> dict[str, float]:
        """Every count of /metrics, summed over labels; those by position keep it in the name, as name[0]."""
        sums: dict[str, float] = {}
        for line in self._text("/metrics").splitlines():
            if (found := _SAMPLE.match(line)) and not found[1].endswith("_created"):
                position = _POSITION.search(found[2] or "")
                name = found[1] + (f"[{position[1]}]" if position else "")
                sums[name] = sums.get(name, 0.0) + float(found[3])
        return sums

    def generate(self, model: str, prompt_ids: Sequence[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy ids, how the text ended, and what the counters grew by."""
        before = self.counters()
        body = {"model": model, "prompt": list(prompt_ids), "max_tokens": max_new_tokens, "temperature": 0.0}
        body |= {"return_token_ids": True, **more}
        [choice] = json.loads(self._text("/v1/completions", body, timeout_s=REQUEST_S))["choices"]
        grown = self._grown(before)
        return {
            "ids": choice["token_ids"],
            "finish": choice["finish_reason"],
            "counters": {name: value for name, value in grown.items() if name.startswith("spec_decode")},
            "prefill_s": grown["request_prefill_time_seconds_sum"],
            "decode_s": grown["request_decode_time_seconds_sum"],
        }

    def _grown(self, before: Mapping[str, float]) -> dict[str, float]:
        """What one request added, once the server has counted it."""
        until = time.monotonic() + SETTLE_S
        while True:
            after = self.counters()
            if after.get(_NUM_DONE, 0.0) - before.get(_NUM_DONE, 0.0) == 1.0:
                return {name: value - before.get(name, 0.0) for name, value in after.items()}
            if time.monotonic() > until:
                raise UnavailableError(f"the server has no count of one request in {_NUM_DONE}: another version?")
            time.sleep(_POLL_S)

    def _text(self, path: str, body: object = None, timeout_s: float = 30.0) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"})
        with _OPENER.open(request, timeout=timeout_s) as answer:
            return str(answer.read().decode())


class VllmServer:
    """A server of our own, and one way to generate with it. `plugin`: a folder of packages that it alone sees."""

    def __init__(
        self,
        folder: Path,
        target: Path,
        draft: Path | None,
        *,
        precision: str,
        threads: int,
        port: int,
        work: Path,
        plugin: Path | None = None,
        more: Sequence[str] = (),
    ) -> None:
        words = [str(folder / "bin" / "vllm"), "serve", str(target), "--host", "127.0.0.1", "--port", str(port)]
        words += [*options(precision), *more]
        if draft is not None:
            config = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 7}
            words += ["--speculative-config", json.dumps(config)]
        self.facts: dict[str, Any] = {}
        self._log = (work / f"vllm-{'plain' if draft is None else 'draft'}.log").open("w", encoding="utf-8")
        environment = variables(folder, threads, work / "vllm") | ({"PYTHONPATH": str(plugin)} if plugin else {})
        self._process = EngineProcess(words, environment, self._keep)
        self.client, self._is_plain = Client(port), draft is None
        try:
            wait_until_ready(self._process, self.client.is_ready)
            self._model = self.client.model()
        except Failed:
            self.close()
            raise

    def generate(self, how: str, prompt_ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        try:
            found = self.client.generate(self._model, prompt_ids, max_new_tokens, ignore_eos=True)
        except (urllib.error.URLError, OSError, UnavailableError) as error:
            raise Failed(f"{error}; the server's last line: {self._process.last_line()}") from None
        counters = found.pop("counters")
        del found["finish"]
        steps = max_new_tokens - 1 if self._is_plain else round(counters["spec_decode_num_drafts_total"])
        return {**found, "num_steps": steps}

    def close(self) -> None:
        self._process.stop(20.0)
        self._log.close()

    def _keep(self, line: str) -> None:
        self._log.write(line + "\n")
        self._log.flush()


def wait_until_ready(process: EngineProcess, is_ready: Callable[[], bool]) -> None:
    """Return when the server answers; Failed with its own last line of error where it ends before."""
    until = time.monotonic() + START_S
    while not is_ready():
        if process.is_ended(within_s=0.5):
            raise Failed(_cause(process.tail))
        if time.monotonic() > until:
            raise Failed(f"not ready after {START_S:g} s; its last line: {process.last_line()}")


def _cause(lines: Sequence[str]) -> str:
    """The line of a log that names the error, or its last one."""
    named = [line for line in lines if re.search(r"\b\w*(?:Error|Exception)\b: ", line)]
    return (named or list(lines) or ["it said nothing"])[-1].strip()
