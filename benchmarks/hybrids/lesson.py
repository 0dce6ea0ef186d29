"""Teaching a tiny target a text: AdamW in float32, whole windows, a state on disk from which a killed call goes on.

Letters: S ids of the text, B sequences, T positions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hybrids.targets import Shape
from blockdraft.errors import ConfigError

_SAVE_EVERY, _SAY_EVERY = 50, 25
_WARMUP, _FLOOR = 0.05, 0.05  # of the steps; of the learning rate


@dataclass(frozen=True, kw_only=True)
class Lesson:
    num_steps: int
    sequences_per_step: int
    length: int
    learning_rate: float
    seed: int = 1

    def lr_at(self, step: int) -> float:
        """A linear rise, then a cosine down to _FLOOR of the learning rate."""
        warmup = max(1, round(_WARMUP * self.num_steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        return self.learning_rate * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)

    def batch(self, ids_S: Tensor, step: int) -> Tensor:
        """[B, T + 1] windows of the text; which ones depends on the seed and the step alone."""
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        starts = torch.randint(len(ids_S) - self.length, (self.sequences_per_step,), generator=draw)
        return torch.stack([ids_S[start : start + self.length + 1] for start in starts.tolist()])


@dataclass(slots=True)
class Taught:
    """A model, and what it took: `losses` of the training text, in nats a token, every few steps."""

    model: nn.Module
    losses: list[tuple[int, float]]
    cpu_seconds: float


def teach(shape: Shape, ids_S: Tensor, lesson: Lesson, state: Path, say: Callable[[str], None]) -> Taught:
    """The model after the last step; goes on from the file `state` where there is one."""
    torch.manual_seed(lesson.seed)
    made = Taught(shape.make().train(), [], 0.0)
    optim = _optimizer(made.model)
    settings = {"lesson": asdict(lesson), "shape": shape.to_json(), "num_ids": len(ids_S)}
    step = _resume(made, optim, state, settings)
    begun, spent = time.process_time(), made.cpu_seconds
    recent: list[float] = []
    while step < lesson.num_steps:
        recent.append(_step(shape, made.model, optim, lesson, ids_S, step))
        step += 1
        made.cpu_seconds = spent + time.process_time() - begun
        if step % _SAY_EVERY == 0 or step == lesson.num_steps:
            made.losses.append((step, sum(recent) / len(recent)))
            recent = []
            say(f"{shape.name}: step {step} of {lesson.num_steps}, loss {made.losses[-1][1]:.3f}")
        if step % _SAVE_EVERY == 0 or step == lesson.num_steps:
            _save(made, optim, state, settings, step)
    made.model.eval()
    return made


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices alone."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def _step(
    shape: Shape, model: nn.Module, optim: torch.optim.Optimizer, lesson: Lesson, ids_S: Tensor, step: int
) -> float:
    for group in optim.param_groups:
        group["lr"] = lesson.lr_at(step)
    ids_BT = lesson.batch(ids_S, step)
    loss = F.cross_entropy(shape.logits(model, ids_BT[:, :-1]).flatten(0, 1), ids_BT[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad()
    with torch.no_grad():
        shape.after_step(model)
    return float(loss.detach())


@torch.no_grad()
def loss_of(shape: Shape, model: nn.Module, ids_S: Tensor, length: int) -> float:
    """Nats a token over whole windows of a text, one after the other."""
    windows = ids_S[: (len(ids_S) - 1) // length * length + 1].unfold(0, length + 1, length)
    logits_BTV = torch.cat([shape.logits(model, window[None, :-1]) for window in windows])
    return float(F.cross_entropy(logits_BTV.flatten(0, 1), windows[:, 1:].flatten()))


# ---- the state -------------------------------------------------------------------------------------------------------
def _save(made: Taught, optim: torch.optim.Optimizer, state: Path, settings: dict[str, Any], step: int) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    temporary = state.with_name(f".{state.name}.tmp")
    torch.save(
        {
            "settings": settings,
            "step": step,
            "model": made.model.state_dict(),
            "optim": optim.state_dict(),
            "losses": made.losses,
            "cpu_seconds": made.cpu_seconds,
        },
        temporary,
    )
    os.replace(temporary, state)


def _resume(made: Taught, optim: torch.optim.Optimizer, state: Path, settings: dict[str, Any]) -> int:
    """The step to go on from; 0 where nothing was saved."""
    if not state.is_file():
        return 0
    saved = torch.load(state, weights_only=True)
    if saved["settings"] != settings:
        raise ConfigError(f"{state} was made with other settings; use another --work folder")
    made.model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    made.losses = [(int(step), float(loss)) for step, loss in saved["losses"]]
    made.cpu_seconds = float(saved["cpu_seconds"])
    return int(saved["step"])
