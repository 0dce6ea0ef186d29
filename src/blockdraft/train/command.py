"""One call for a whole run: a recipe in; text, checkpoints, metrics, evaluations and an exported drafter out.

Owns the order of things: cheap checks, gates, text, training with evaluations, export. Everything goes on where an
interrupted call stopped.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import blockdraft
from blockdraft.config import DraftConfig
from blockdraft.engine.load import builtin_draft
from blockdraft.errors import CheckpointError, ConfigError
from blockdraft.formats.source import locate
from blockdraft.inspection import read_target_facts
from blockdraft.targets import Target, ensure_target, load_target
from blockdraft.train.borrowed import borrow, check_target_wrote
from blockdraft.train.card import write_card
from blockdraft.train.corpus import Corpus, CorpusSource
from blockdraft.train.evaluate import Evaluator
from blockdraft.train.export import export_draft
from blockdraft.train.files import write_text_atomically
from blockdraft.train.gates import GateResult, check_gates
from blockdraft.train.initial import read_draft_tensors, read_target_layers
from blockdraft.train.loop import Trainer
from blockdraft.train.online import OnlineCorpus
from blockdraft.train.optim import resolve_device
from blockdraft.train.overrides import ResolvedRecipe, resolve_recipe
from blockdraft.train.parallel import Parallel
from blockdraft.train.plan import BUILTIN_TARGET
from blockdraft.train.prepare import prepare_corpus
from blockdraft.train.progress import TrainingProgress
from blockdraft.train.recipe import Recipe
from blockdraft.train.report import draw_figure
from blockdraft.train.state import BEST_FILE, METRICS_FILE, STATE_FILE, append_line, read_lines
from blockdraft.train.trackers import check_tracker, open_tracking
from blockdraft.train.writer import HELD_OUT_FILE, read_held_out, read_manifest

__all__ = ["TrainingRun", "run_training"]

DRAFT_FOLDER = "draft"
CORPUS_FOLDER = "corpus"
EVALUATIONS_FILE = "evaluations.jsonl"
TIMES_FILE = "times.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Where a run stands. `draft` is the folder of the exported drafter, None before the last step.

    `is_main`: of several processes this one speaks for the run.
    """

    step: int
    num_steps: int
    draft: Path | None
    is_main: bool


def run_training(
    source: str | Path | ResolvedRecipe,
    corpus: Path | None,
    target: str | Path | None,
    out: Path,
    *,
    stop_after: int | None = None,
    has_gates: bool = True,
    tracker: str | None = None,
    commit: str | None = None,
    on_progress: Say | None = None,
) -> TrainingRun:
    """Train into `out`, or go on there; export the best evaluated weights to `out`/draft when the last step is done.

    `corpus` None lets the target write the text into `out`/corpus first. `target` None is the recipe's own.
    `stop_after` ends this call at that step, to be gone on with later; `commit` goes into the run's record.
    `on_progress` gets one short line now and then.
    """
    if stop_after is not None and stop_after < 1:
        raise ConfigError(f"stop_after is {stop_after}; it is a step, 1 or more")
    recipe = (source if isinstance(source, ResolvedRecipe) else resolve_recipe(source)).recipe
    if target is not None:
        recipe = replace(recipe, target=replace(recipe.target, name=str(target)))
    parallel = Parallel.from_env(resolve_device(recipe.optim).type)
    with parallel.together():
        parallel.check_sharding(recipe.optim.sharding)
        if tracker is not None and parallel.is_main:
            check_tracker(tracker)
        say = on_progress if on_progress is not None and parallel.is_main else _silent
        run = _Run(recipe, out, parallel, say)
        if has_gates:
            run.pass_gates()
        trainer = run.trainer(run.text(corpus))
        run.train(trainer, stop_after=stop_after, tracker=tracker)
        draft = None
        if trainer.step >= recipe.optim.num_steps:
            draft = parallel.on_main(lambda: run.export(trainer, commit=commit))
        parallel.close()
    return TrainingRun(step=trainer.step, num_steps=recipe.optim.num_steps, draft=draft, is_main=parallel.is_main)


class _Run:
    """The parts of one call, in the order in which they are made."""

    def __init__(self, recipe: Recipe, out: Path, parallel: Parallel, say: Say) -> None:
        self.recipe, self.out, self.parallel, self.say = recipe, out, parallel, say
        self.started = time.perf_counter()
        with parallel.main_first():
            self.folder = self._target_folder()
        facts = read_target_facts(self.folder)
        recipe.target.check_facts(facts)
        self.config: DraftConfig = recipe.draft.config(facts)
        self.times = self._read_times()
        self._target: Target | None = None

    def _target_folder(self) -> Path:
        name = self.recipe.target.name
        if name == BUILTIN_TARGET:
            return ensure_target(progress=lambda line, _done: self.say(line))
        return locate(name, what="target")

    @property
    def target(self) -> Target:
        """The target in float32 where it runs on the CPU, as stored elsewhere; loaded when it is first needed."""
        if self._target is None:
            self._target = self._load(self.config.target_layer_ids)
        return self._target

    def _load(self, tap_layer_ids: tuple[int, ...]) -> Target:
        device = self.parallel.device
        dtype = torch.float32 if device.type == "cpu" else None
        stream = self.recipe.draft.loaded_stream
        return load_target(self.folder, tap_layer_ids=tap_layer_ids, dtype=dtype, device=device, tap_stream=stream)

    # ---- before the first step -----------------------------------------------------------------------------------
    def pass_gates(self) -> None:
        """Every gate of the trainer on this draft's shape, before a run's first step."""
        if not (self.out / STATE_FILE).is_file():
            self.parallel.on_main(self._check_gates)

    def _check_gates(self) -> None:
        found: list[GateResult] = []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
        try:
            check_gates(self.config, recipe=self.recipe, seed=self.recipe.seed, on_gate=found.append)
        finally:
            torch.set_num_threads(threads)
        self.say(f"gates: {len(found)} passed in {sum(gate.seconds for gate in found):.1f} s")

    def text(self, corpus: Path | None) -> CorpusSource:
        """The corpus, written first where it is missing."""
        recipe, parallel = self.recipe, self.parallel
        self.corpus_folder = self.out / CORPUS_FOLDER if corpus is None else corpus
        if corpus is None:
            started = time.perf_counter()
            prepare_corpus(
                recipe, self.folder, self.corpus_folder, self.say, rank=parallel.rank, num_ranks=parallel.world_size
            )
            self._add_time("corpus_s", time.perf_counter() - started)
        text = Corpus(self.corpus_folder, max_length=recipe.max_length)
        text.facts.check_target(recipe.target.name, self.folder)
        found: CorpusSource = text
        if recipe.text.features == "online":
            found = self._online(text)
        found.check_fits(self.config)
        if parallel.is_main and recipe.text.features == "disk":
            check_target_wrote(self.target, found)
        self.say(f"corpus: {len(found)} sequences, {found.num_answer_tokens} tokens written by {found.facts.target}")
        return found

    def _online(self, text: Corpus) -> OnlineCorpus:
        """The taps computed in the step; a teacher's last layer beside them, by a second view of the target."""
        layers, last = self.config.target_layer_ids, None
        target = self.target
        if self.recipe.loss.kind == "kl":
            last = target.facts.num_layers - 1
            if last not in layers:
                target = self._load((*layers, last))
        return OnlineCorpus(text, target, target_layer_ids=layers, last_layer_id=last)

    def trainer(self, corpus: CorpusSource) -> Trainer:
        """The trainer, fresh or where the run in the folder stands."""
        ids = self.recipe.draft.initial_layers
        layers = read_target_layers(self.folder, ids, model_type=self.target.facts.model_type) if ids else []
        head = borrow(self.target, self.folder)
        made = Trainer(
            self.recipe,
            self.config,
            head,
            corpus,
            self.out,
            parallel=self.parallel,
            initial_layers=layers,
            initial_tensors=self._initial_tensors(),
        )
        if made.step:
            self.say(f"going on from step {made.step}")
        return made

    def _initial_tensors(self) -> dict[str, torch.Tensor] | None:
        draft = self.recipe.draft
        if not draft.initial_draft or (self.out / STATE_FILE).is_file():
            return None
        is_builtin = draft.initial_draft == BUILTIN_TARGET  # the pair has one name
        folder = builtin_draft() if is_builtin else locate(draft.initial_draft, what="draft")
        return read_draft_tensors(folder, self.config, has_mask_embedding=draft.learned_mask_embedding)

    # ---- the run itself ------------------------------------------------------------------------------------------
    def train(self, trainer: Trainer, *, stop_after: int | None, tracker: str | None) -> None:
        """Up to the last step, with evaluations, progress, and the tracker if one is named."""
        evaluation = self.recipe.evaluation
        is_main = self.parallel.is_main
        evaluator = self._evaluator() if is_main and evaluation.num_prompts else None
        tracking = None
        if tracker is not None and is_main:
            recipe = self.recipe.to_dict()
            tracking = open_tracking(
                tracker, project="blockdraft", run_name=self.out.name, recipe=recipe, folder=self.out, say=self.say
            )

        def on_evaluate(trainer: Trainer) -> float | None:
            assert evaluator is not None
            result = evaluator.run(trainer.served)
            append_line(self.out / EVALUATIONS_FILE, {"step": trainer.step, **result.to_json()})
            return result.acceptance_length

        with contextlib.ExitStack() as stack:
            progress = self._progress(trainer.step, stack) if is_main else None

            def on_step(metrics: dict[str, Any]) -> None:
                assert progress is not None
                progress(metrics)
                if tracking is not None:
                    tracking(metrics)

            if tracking is not None:
                stack.callback(tracking.close)
            started = time.perf_counter()
            has_prompts = bool(evaluation.num_prompts)
            try:
                trainer.run(on_step=on_step, on_evaluate=on_evaluate if has_prompts else None, stop_after=stop_after)
            except BaseException:
                with contextlib.suppress(CheckpointError):  # on a full disk the first word counts
                    self._add_time("training_s", time.perf_counter() - started)
                raise
            self._add_time("training_s", time.perf_counter() - started)

    def _progress(self, step: int, stack: contextlib.ExitStack) -> TrainingProgress:
        every = self.recipe.evaluation.every_steps
        return stack.enter_context(
            TrainingProgress(self.recipe.optim.num_steps, say=self.say, start_step=step, evaluate_every=every)
        )

    def _evaluator(self) -> Evaluator:
        path, evaluation = self.corpus_folder / HELD_OUT_FILE, self.recipe.evaluation
        prompts = read_held_out(self.corpus_folder) if path.is_file() else []
        if len(prompts) < evaluation.num_prompts:
            raise CheckpointError(
                f"{path}: the corpus keeps {len(prompts)} prompts for evaluation, and evaluation.num_prompts is "
                f"{evaluation.num_prompts}; lower it, write a corpus with more prompts.held_out, or set all of "
                "[evaluation] to 0"
            )
        return Evaluator(
            self.target,
            self.config,
            prompts[: evaluation.num_prompts],
            width=evaluation.width,
            max_new_tokens=evaluation.max_new_tokens,
        )

    # ---- after the last step -------------------------------------------------------------------------------------
    def export(self, trainer: Trainer, *, commit: str | None) -> Path:
        """The drafter of the best evaluation (of the last step where none was made), its record, card and figure."""
        draft = self.out / DRAFT_FOLDER
        weights = self.out / (STATE_FILE if trainer.best is None else BEST_FILE)
        export_draft(weights, draft, self._record(trainer, commit=commit), overwrite=True)
        write_card(draft)
        draw_figure(self.out, say=self.say)
        self.say(f"drafter written to {draft}")
        return draft

    def _record(self, trainer: Trainer, *, commit: str | None) -> dict[str, Any]:
        """What a run took and was made of, as plain JSON. Seconds are summed over all calls."""
        lines = read_lines(self.out / METRICS_FILE)
        manifest = read_manifest(self.corpus_folder)
        return {
            "steps": trainer.step,
            "exported_step": trainer.step if trainer.best is None else trainer.best[0],
            "blocks": trainer.num_blocks_seen,
            "sequences": len(trainer.corpus),
            "answer_tokens": trainer.corpus.num_answer_tokens,
            "corpus": None if manifest is None else asdict(manifest),
            "target": trainer.corpus.facts.target,
            "evaluation": self._best_evaluation(trainer),
            "seconds": {"steps": round(sum(x.get("step_s", 0.0) for x in lines), 1), **self.times},
            "threads": torch.get_num_threads(),
            "processes": self.parallel.world_size,
            "device": str(trainer.device),
            "autocast": trainer.autocast,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "seed": self.recipe.seed,
            "versions": {
                "blockdraft": blockdraft.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "commit": commit,
        }

    def _best_evaluation(self, trainer: Trainer) -> dict[str, Any] | None:
        if trainer.best is None:
            return None
        path = self.out / EVALUATIONS_FILE
        found = [entry for entry in read_lines(path) if entry["step"] == trainer.best[0]]
        if not found:
            raise CheckpointError(
                f"{path} has no evaluation of step {trainer.best[0]}, whose weights {BEST_FILE} holds; put it back, or "
                f"delete {BEST_FILE} and run again"
            )
        return {name: value for name, value in found[-1].items() if name not in ("prompts", "positions", "formulas")}

    # ---- times over all calls ------------------------------------------------------------------------------------
    def _read_times(self) -> dict[str, float]:
        path = self.out / TIMES_FILE
        if not path.is_file():
            return {}
        try:
            return {name: float(seconds) for name, seconds in json.loads(path.read_text(encoding="utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); delete it, the run itself does not need it") from None

    def _add_time(self, name: str, seconds: float) -> None:
        if not self.parallel.is_main:
            return
        self.times[name] = round(self.times.get(name, 0.0) + seconds, 1)
        write_text_atomically(self.out / TIMES_FILE, json.dumps(self.times) + "\n")


def _silent(_line: str) -> None:
    pass
