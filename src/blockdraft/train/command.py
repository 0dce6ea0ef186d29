"""One call for a whole run: recipe, corpus and target in; checkpoints, metrics and an exported drafter out.

Owns the order of checks (cheap ones first, all before the first step), the lines of progress and the run's record.
What is borrowed of the target is taken here, so that the loop knows no target.

Letters: T positions, N taps, V vocabulary, E target width.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import blockdraft
from blockdraft.config import DraftConfig, TargetFacts
from blockdraft.errors import ConfigError, PairError
from blockdraft.formats._safetensors import list_entries
from blockdraft.formats.source import locate
from blockdraft.inspection import read_target_facts
from blockdraft.targets import Target, ensure_target, load_target
from blockdraft.train.corpus import Corpus
from blockdraft.train.export import export_draft
from blockdraft.train.loop import METRICS_FILE, FrozenHead, Trainer
from blockdraft.train.overrides import ResolvedRecipe, resolve_recipe
from blockdraft.train.plan import BUILTIN_TARGET

__all__ = ["TrainingRun", "check_target_wrote", "frozen_head", "run_training"]

DRAFT_FOLDER = "draft"
LINE_EVERY_STEPS = 20
MAX_TAP_ERROR = 0.1
_FINAL_NORMS = ("model.norm.weight", "norm.weight", "model.language_model.norm.weight")
_ZERO_CENTRED_NORMS = ("gemma", "qwen3_next", "qwen3_5")
_AVERAGED = ("loss", "prefix", "selector_prefix", "oracle_prefix", "recall", "grad_norm", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Where a run stands. `draft` is the folder of the exported drafter, None before the last step."""

    step: int
    num_steps: int
    draft: Path | None


def run_training(
    source: str | Path | ResolvedRecipe,
    corpus: Path | None,
    target: str | Path | None,
    out: Path,
    *,
    stop_after: int | None = None,
    has_gates: bool = True,
    commit: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train into `out`, or go on there; export to `out`/draft when the recipe's last step is done.

    `target` None is the recipe's own. `stop_after` ends this call at that step, to be gone on with later; `commit` goes
    into the run's record. `on_progress` gets one short line now and then.
    """
    say = on_progress or (lambda _line: None)
    if stop_after is not None and stop_after < 1:
        raise ConfigError(f"stop_after is {stop_after}; it is a step, 1 or more")
    resolved = source if isinstance(source, ResolvedRecipe) else resolve_recipe(source)
    recipe = resolved.recipe
    if corpus is None:
        raise ConfigError("no corpus is given; write one with blockdraft corpus and name its folder")
    text = Corpus(corpus, max_length=recipe.max_length)
    name = recipe.target.name if target is None else target
    is_builtin = name == BUILTIN_TARGET
    folder = ensure_target(progress=lambda line, _done: say(line)) if is_builtin else locate(name, what="target")
    facts = read_target_facts(folder)
    recipe.target.check_facts(facts)
    config = recipe.draft.config(facts)
    text.facts.check_fits(config)
    say(f"corpus: {len(text)} sequences, {text.num_answer_tokens} tokens written by {text.facts.target}")
    trainer = Trainer(recipe, config, _borrow(folder, config, text), text, out)
    if trainer.step:
        say(f"going on from step {trainer.step}")
    progress = _Progress(recipe.optim.num_steps, say)
    trainer.run(on_step=progress, stop_after=stop_after)
    draft = None
    if trainer.step >= recipe.optim.num_steps:
        draft = out / DRAFT_FOLDER
        export_draft(trainer, draft, run_record(trainer, commit=commit), overwrite=True)
        say(f"drafter written to {draft}")
    return TrainingRun(step=trainer.step, num_steps=recipe.optim.num_steps, draft=draft)


def run_record(trainer: Trainer, *, commit: str | None) -> dict[str, Any]:
    """What a run took and was made of, as plain JSON. Seconds are those spent in steps, over all restarts."""
    lines = (trainer.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return {
        "steps": trainer.step,
        "blocks": trainer.num_blocks_seen,
        "sequences": len(trainer.corpus),
        "answer_tokens": trainer.corpus.num_answer_tokens,
        "target": trainer.corpus.facts.target,
        "seconds": round(sum(json.loads(line)["step_s"] for line in lines), 1),
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "seed": trainer.recipe.seed,
        "versions": {
            "blockdraft": blockdraft.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": commit,
    }


# ---- what is borrowed of the target ----------------------------------------------------------------------------------
def _borrow(folder: Path, config: DraftConfig, corpus: Corpus) -> FrozenHead:
    """The target's rows in float32, after a look at whether it is the target that wrote the corpus."""
    target = load_target(folder, tap_layer_ids=config.target_layer_ids, dtype=torch.float32)
    check_target_wrote(target, corpus)
    return frozen_head(target, final_norm_E=_final_norm(folder, target.facts))


def check_target_wrote(target: Target, corpus: Corpus) -> None:
    """Nothing; a PairError if the corpus's first sequence does not hold this target's taps.

    Numbers of another precision pass: the median relative error of a tap may reach a tenth (bfloat16: a hundredth).
    """
    batch = corpus.batch([0])
    num_fed = int(batch.len_B[0]) - 1
    row = target.new_row()
    [scored] = target.forward([batch.ids_BS[0, :num_fed]], [row], num_logits=0)
    target.free(row)
    kept_TNE, taps_TNE = batch.taps_BSNE[0, :num_fed], scored.taps_TNE.float()
    error_TN = (kept_TNE - taps_TNE).norm(dim=-1) / taps_TNE.norm(dim=-1).clamp_min(1e-6)
    worst, at = error_TN.median(dim=0).values.max(dim=0)
    if not worst <= MAX_TAP_ERROR:
        raise PairError(
            f"the corpus was written by {corpus.facts.target}, and its tap of layer "
            f"{target.tap_layer_ids[int(at)]} is off by {float(worst):.0%} from this target's; "
            "name the target that wrote it, or write a new corpus"
        )


def frozen_head(target: Target, *, final_norm_E: Tensor | None) -> FrozenHead:
    """The target's embedding and output rows; `final_norm_E` None starts the draft's final norm at 1."""
    facts = target.facts
    embed_VE = target.embed(torch.arange(facts.vocab_size))
    unit_EE = torch.eye(facts.hidden_size, dtype=target.dtype, device=target.device)
    if target.logits(torch.zeros_like(unit_EE[:1])).any():
        raise PairError(
            f"the output head of {facts.model_type} adds a bias, which a draft cannot borrow; choose another target"
        )
    head_VE = target.logits(unit_EE).T.contiguous()
    if torch.equal(head_VE, embed_VE):
        head_VE = embed_VE
    norm_E = torch.ones(facts.hidden_size) if final_norm_E is None else final_norm_E.float()
    return FrozenHead(embed_VE.cpu(), norm_E, head_VE.cpu())


def _final_norm(folder: Path, facts: TargetFacts) -> Tensor | None:
    """The weight of the target's final norm as a factor; None where the files have none under a known name."""
    for entry in list_entries(folder):
        if entry.name in _FINAL_NORMS and entry.shape == (facts.hidden_size,):
            with safe_open(str(entry.file), framework="pt") as stream:
                weight_E: Tensor = stream.get_tensor(entry.name).float()
            return weight_E + 1 if facts.model_type.startswith(_ZERO_CENTRED_NORMS) else weight_E
    return None


# ---- progress --------------------------------------------------------------------------------------------------------
class _Progress:
    """One line for the first step of a call, every 20th and the last: means since the line before."""

    def __init__(self, num_steps: int, say: Callable[[str], None]) -> None:
        self.num_steps, self.say = num_steps, say
        self._since: list[dict[str, Any]] = []
        self._has_spoken = False

    def __call__(self, metrics: dict[str, Any]) -> None:
        self._since.append(metrics)
        step = metrics["step"]
        if self._has_spoken and step % LINE_EVERY_STEPS and step != self.num_steps:
            return
        means = {
            name: sum(entry[name] for entry in self._since) / len(self._since) for name in _AVERAGED if name in metrics
        }
        left_min = means.pop("step_s") * (self.num_steps - step) / 60
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        self.say(f"step {step}/{self.num_steps}  {numbers}  lr {metrics['lr']:.2e}  {left_min:.1f} min left")
        self._since, self._has_spoken = [], True
