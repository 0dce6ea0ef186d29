"""The whole course: targets are taught, drafters trained on them, text is served and compared.

Owns how much of everything there is, the files of the work folder, and what the result holds. Every part that is
finished is kept, so a call that was killed goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import common, lossless, markdown, session
from benchmarks.hybrids import drafting, prose, serving
from benchmarks.hybrids.lesson import Lesson, loss_of, teach
from benchmarks.hybrids.targets import KimiK3, Qwen35, Shape, Size
from blockdraft.errors import ConfigError

_FACTS = "facts.json"


@dataclass(frozen=True, kw_only=True)
class Course:
    """How much of everything: few paragraphs, which a target learns nearly by heart, so that its text runs in no loop.

    A drafter is trained on what the target writes after the beginnings of `num_drafted` other paragraphs. `changes` are
    those of every recipe.
    """

    shapes: Mapping[str, Shape]
    lessons: Mapping[str, Lesson]
    pairs: Sequence[drafting.Pair] = drafting.PAIRS
    num_taught: int = 20
    num_drafted: int = 80
    num_prompts: int = 24
    max_new_tokens: int = 320
    width: int = 8
    changes: Sequence[str] = ()
    has_gates: bool = True


FULL = Course(
    shapes={
        "qwen3_5": Qwen35(Size(vocab_size=512, hidden_size=128, num_layers=4, num_heads=4)),
        "kimi_k3": KimiK3(
            Size(vocab_size=512, hidden_size=128, num_layers=5, num_heads=4, num_experts=6, block_size=2)
        ),
    },
    lessons={
        "qwen3_5": Lesson(num_steps=200, sequences_per_step=4, length=128, learning_rate=3e-3),
        "kimi_k3": Lesson(num_steps=200, sequences_per_step=4, length=128, learning_rate=3e-3),
    },
)


def run(
    course: Course,
    text: prose.Prose,
    work: Path,
    threads: int,
    say: Callable[[str], None],
    *,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """All parts that are not there yet, and the result; of the targets in `only`, None for all."""
    backends = cache(lambda vocab_size: prose.make_tokenizer(list(text.taught.values()), vocab_size))
    targets: dict[str, dict[str, Any]] = {}
    pairs: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for pair in course.pairs:
        if only is not None and pair.target not in only:
            continue
        shape, place = course.shapes[pair.target], work / pair.target
        if pair.target not in targets:
            backend = backends(shape.size.vocab_size)
            targets[pair.target] = _target(shape, course.lessons[pair.target], text, backend, place, say)
        found, served = _pair(course, pair, shape, text, place, threads, say)
        pairs.append({"target": pair.target, "tap_stream": pair.stream, **found})
        runs += served.runs
    return {
        "what": "tiny hybrid targets trained on real text, drafters trained on them: greedy text with and without",
        "tie": f"both tokens are the float64 top two and less than {lossless.TIE_MARGIN} apart",
        "loop": f"the last {common.LOOP_TOKENS} tokens repeat with a period of at most {common.LOOP_PERIODS[-1]}",
        "settings": {
            "dtype": "float32",
            "device": "cpu",
            "threads": threads,
            "max_new_tokens": course.max_new_tokens,
            "max_rows": serving.MAX_ROWS,
            "sampling": "greedy",
        },
        "prompts_sha256": common.prompts_digest(text.prompts(course.num_prompts)),
        "runs": runs,
        "targets": targets,
        "pairs": pairs,
    }


def _target(
    shape: Shape, lesson: Lesson, text: prose.Prose, backend: Any, place: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """The facts of a taught target, which is in `place`/target."""
    import torch

    folder = place / "target"
    if not folder.is_dir():
        ids_S, held_out_S = (
            torch.tensor(prose.ids_of(backend, list(texts.values()))) for texts in (text.taught, text.held_out)
        )
        taught = teach(shape, ids_S, lesson, place / "lesson.pt", say)
        model = taught.model
        facts = {
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "size": shape.to_json(),
            "lesson": asdict(lesson),
            "num_text_tokens": len(ids_S),
            "losses": taught.losses,
            "taught_loss": loss_of(shape, model, ids_S, lesson.length),
            "held_out_loss": loss_of(shape, model, held_out_S, lesson.length),
            "cpu_seconds": round(taught.cpu_seconds),
            "run": session.run_facts(argparse.Namespace(device="cpu")),
        }
        making = place / ".target"
        shutil.rmtree(making, ignore_errors=True)
        shape.write(model, making)
        prose.write_tokenizer(backend, making)
        common.write_json(place / _FACTS, facts)
        os.replace(making, folder)
    found = markdown.read(place / _FACTS)
    if (found["size"], found["lesson"]) != (shape.to_json(), asdict(lesson)):
        raise ConfigError(f"{folder} was made with another size or lesson; use another --work folder")
    return found


def _pair(
    course: Course,
    pair: drafting.Pair,
    shape: Shape,
    text: prose.Prose,
    place: Path,
    threads: int,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], common.Work]:
    """One drafter: trained, served, compared."""
    target, out, prompt_file = place / "target", place / pair.stream, place / "prompts.jsonl"
    prose.write_prompts(prompt_file, list(text.drafted.values()))
    draft = drafting.train(pair, target, prompt_file, out, course.changes, say, has_gates=course.has_gates)
    options = argparse.Namespace(
        draft=str(out / "draft"),
        target=str(target),
        dtype="float32",
        device="cpu",
        threads=threads,
        max_new_tokens=course.max_new_tokens,
    )
    settings = {**session.settings(options), "max_rows": serving.MAX_ROWS}
    work = common.Work.open(out / "served.jsonl", settings, session.run_facts(options))
    prompts = text.prompts(course.num_prompts)
    say(f"{pair.target}, {pair.stream}: {len(prompts)} prompts")
    serving.serve(
        work,
        prompts,
        course.width,
        course.max_new_tokens,
        lambda: session.load_engine(options, max_rows=serving.MAX_ROWS),
    )
    judge = cache(lambda: shape.judge(target))
    found = {
        "draft": draft,
        "checkpoints": {name: settings[name] for name in ("draft", "target")},
        "served": serving.report(work, prompts, course.width, judge),
    }
    if shape.is_in_transformers:
        found["reference"] = serving.reference(work, prompts, course.width, target, judge)
    return found, work
