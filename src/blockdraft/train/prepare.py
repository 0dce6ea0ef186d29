"""One call that makes a recipe's corpus, in this process or in several, and says how it goes.

Owns the worker processes: how they are started, watched and ended, and the line of progress over all of them.
`python -m blockdraft.train.prepare` is such a worker; it takes its job from the parent and ends with it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from blockdraft import errors
from blockdraft.errors import BlockdraftError, UnavailableError
from blockdraft.formats.source import locate
from blockdraft.inspection import read_target_facts
from blockdraft.targets import ensure_target
from blockdraft.train.plan import BUILTIN_TARGET
from blockdraft.train.recipe import Recipe, recipe_from_dict
from blockdraft.train.writer import Event, Manifest, Writer, finished_manifest

__all__ = ["ProgressLines", "prepare_corpus", "run_corpus", "write_in_processes"]

LINE_EVERY_S = 5.0
EVENT_EVERY_S = 0.5
_WORKER = ("-m", "blockdraft.train.prepare")


def prepare_corpus(
    recipe: Recipe,
    target_folder: Path,
    folder: Path,
    on_progress: Callable[[str], None] | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    exclude: Sequence[str] = (),
) -> Manifest:
    """The corpus of a recipe in `folder`: prompts, held-out split, answers; what is there already is kept.

    Of several processes of one run (`rank` of `num_ranks`), each writes its part and all return when the corpus is
    whole. Each may have text.num_processes workers of its own. Prompts equal to one of `exclude` are not used.
    """
    writer = Writer(recipe, target_folder, folder, rank=rank, num_ranks=num_ranks, exclude=exclude)
    writer.claim()
    if finished_manifest(folder) is None:
        num_processes = recipe.text.num_processes
        lines = ProgressLines(num_processes, on_progress)
        if num_processes == 1:
            writer.say = lambda event: lines(0, event)
            writer.run()
        else:
            write_in_processes(
                num_processes,
                recipe,
                target_folder,
                folder,
                on_event=lines,
                first_rank=rank * num_processes,
                num_ranks=num_ranks * num_processes,
                exclude=exclude,
            )
    return writer.finish()


def run_corpus(
    recipe: Recipe, target: str | Path | None, folder: Path, on_progress: Callable[[str], None] | None = None
) -> Manifest:
    """The whole of `blockdraft corpus`: the recipe's target, or another one, writes the corpus into `folder`."""
    say = on_progress or (lambda _line: None)
    if target is not None:
        recipe = replace(recipe, target=replace(recipe.target, name=str(target)))
    is_builtin = recipe.target.name == BUILTIN_TARGET
    source = (
        ensure_target(progress=lambda line, _: say(line)) if is_builtin else locate(recipe.target.name, what="target")
    )
    recipe.target.check_facts(read_target_facts(source))
    return prepare_corpus(recipe, source, folder, on_progress)


class ProgressLines:
    """A line at a phase's start, every five seconds and at its end: what is done over all workers, and what is left."""

    def __init__(self, num_workers: int, say: Callable[[str], None] | None) -> None:
        self.num_workers, self.say = num_workers, say
        self._phases: dict[str, dict[int, Event]] = {}
        self._begun: dict[str, tuple[float, int]] = {}
        self._ended: set[str] = set()
        self._said = 0.0

    def __call__(self, worker: int, event: Event) -> None:
        """Take in how far a worker is."""
        latest = self._phases.setdefault(event.phase, {})
        latest[worker] = event
        if self.say is None or len(latest) < self.num_workers:
            return
        now = time.monotonic()
        done, total, tokens = (sum(getattr(e, name) for e in latest.values()) for name in ("done", "total", "tokens"))
        is_first = event.phase not in self._begun
        since, done_before = self._begun.setdefault(event.phase, (now, done))
        is_last = done == total and event.phase not in self._ended
        if not is_first and not is_last and now - self._said < LINE_EVERY_S:
            return
        if is_last:
            self._ended.add(event.phase)
        self._said = now
        line = f"{event.phase} {done}/{total}"
        if done > done_before and now > since:
            left_min = (total - done) * (now - since) / (done - done_before) / 60
            line += f", {tokens} tokens, {tokens / (now - since):.0f} tokens/s, {left_min:.1f} min left"
        self.say(line)


# ---- the parent's side -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Worker:
    number: int
    process: subprocess.Popen[str]
    errors: IO[bytes]


def write_in_processes(
    num_processes: int,
    recipe: Recipe,
    target_folder: Path,
    folder: Path,
    *,
    on_event: Callable[[int, Event], None] | None = None,
    first_rank: int = 0,
    num_ranks: int | None = None,
    exclude: Sequence[str] = (),
) -> None:
    """Let `num_processes` workers of one thread each write ranks `first_rank` and on of `num_ranks`.

    A worker's failure ends all of them and is raised here with the worker's own words; finished shards stay.
    """
    jobs = [
        {
            "recipe": recipe.to_dict(),
            "target_folder": str(target_folder),
            "folder": str(folder),
            "rank": first_rank + number,
            "num_ranks": num_processes if num_ranks is None else num_ranks,
            "exclude": list(exclude),
        }
        for number in range(num_processes)
    ]
    said: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
    workers: list[_Worker] = []
    try:
        for number, job in enumerate(jobs):
            workers.append(_start(number, job, said))
        running = set(range(num_processes))
        while running:
            number, message = said.get()
            if message is None:
                _check_ended(workers[number], folder)
                running.remove(number)
            elif "error" in message:
                raise getattr(errors, message["kind"])(message["error"])
            elif on_event is not None:
                on_event(number, Event(**message))
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            worker.errors.close()


def _start(number: int, job: dict[str, Any], said: queue.Queue[tuple[int, dict[str, Any] | None]]) -> _Worker:
    error_file = tempfile.TemporaryFile()  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, *_WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=error_file,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        encoding="utf-8",
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()  # and left open: its end tells the worker that its parent is gone
    stream = process.stdout

    def listen() -> None:
        for line in stream:
            if line.startswith("{"):
                said.put((number, json.loads(line)))
        said.put((number, None))

    threading.Thread(target=listen, daemon=True).start()
    return _Worker(number, process, error_file)


def _check_ended(worker: _Worker, folder: Path) -> None:
    """Nothing; an UnavailableError if the worker did not end by itself with all its work done."""
    code = worker.process.wait()
    if code == 0:
        return
    worker.errors.seek(0)
    lines = worker.errors.read().decode(errors="replace").strip().splitlines()
    words = lines[-1] if lines else "it said nothing; a lack of memory is the usual reason"
    raise UnavailableError(
        f"a process that writes the corpus ended with code {code}: {words}; "
        f"finished shards in {folder} are kept, run again to go on"
    )


# ---- the worker's side -----------------------------------------------------------------------------------------------
def main() -> None:
    """Do the job that the parent wrote to stdin, reporting on stdout; a refusal is reported and exits 2."""
    import torch

    torch.set_num_threads(1)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    last = 0.0

    def report(event: Event) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVENT_EVERY_S or event.done in (0, event.total):
            last = now
            print(json.dumps(event._asdict()), flush=True)

    try:
        Writer(
            recipe_from_dict(job["recipe"], where="recipe"),
            Path(job["target_folder"]),
            Path(job["folder"]),
            rank=job["rank"],
            num_ranks=job["num_ranks"],
            exclude=job["exclude"],
            on_event=report,
        ).run()
    except BlockdraftError as error:
        print(json.dumps({"kind": type(error).__name__, "error": str(error)}), flush=True)
        raise SystemExit(2) from None


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


if __name__ == "__main__":
    main()
