"""The sections of a recipe beside [draft]: names, types and bounds of every number of a training run.

Owns which settings of one section exclude each other; what depends on two sections is Recipe's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from blockdraft.config import TargetFacts, require_bool, require_float, require_int
from blockdraft.errors import ConfigError
from blockdraft.train.checks import require_fraction, require_no_effect, require_not_negative, require_one_of

__all__ = [
    "EvaluationRecipe",
    "HubRecipe",
    "LossRecipe",
    "OptimRecipe",
    "PromptsRecipe",
    "TargetRecipe",
    "TextRecipe",
]


@dataclass(frozen=True, kw_only=True)
class TargetRecipe:
    """The target's name: "smollm2-135m" is the built-in one, any other is a folder or hub id.

    `facts` lets a recipe be resolved where the target is not at hand; where it is, they must be its own.
    """

    name: str
    facts: TargetFacts | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError('target.name is empty; name a folder, a hub id, or "smollm2-135m", the built-in target')

    def check_facts(self, facts: TargetFacts) -> None:
        """Nothing; a ConfigError if the recipe states other facts than the target at hand has."""
        if self.facts is None:
            return
        for field in fields(TargetFacts):
            stated, found = getattr(self.facts, field.name), getattr(facts, field.name)
            if stated != found:
                raise ConfigError(
                    f"target.facts.{field.name} is {stated!r}, the target at hand has {found!r}; "
                    "correct the recipe, or name the target it was written for"
                )


@dataclass(frozen=True, kw_only=True)
class HubRecipe:
    """One data set of the Hugging Face hub as a source of prompts.

    `config` "" is the data set's only one. `field` holds a list of messages or a text. `suffix` is put after the
    last user message. `limit` 0 takes all of it.
    """

    dataset: str
    config: str
    split: str
    field: str
    suffix: str
    limit: int

    def __post_init__(self) -> None:
        for name in ("dataset", "split", "field"):
            if not getattr(self, name):
                raise ConfigError(f"prompts.hub.{name} is empty; name the {name} to read")
        require_int("prompts.hub.limit", self.limit, least=0)


@dataclass(frozen=True, kw_only=True)
class PromptsRecipe:
    """Where prompts come from, and how many are kept out of training.

    `self_written` prompts are user turns that the target makes up, each begun with one of `openings` ("" is free).
    """

    files: tuple[str, ...]
    self_written: int
    openings: tuple[str, ...]
    temperature: float
    top_p: float
    max_tokens: int
    held_out: int
    hub: tuple[HubRecipe, ...] = ()

    def __post_init__(self) -> None:
        for name in ("files", "openings", "hub"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require_int("prompts.self_written", self.self_written, least=0)
        require_int("prompts.max_tokens", self.max_tokens, least=0)
        require_int("prompts.held_out", self.held_out, least=0)
        require_not_negative("prompts.temperature", self.temperature)
        _top_p("prompts.top_p", self.top_p)
        for name in ("files", "openings"):
            entries = getattr(self, name)
            twice = next((entry for index, entry in enumerate(entries) if entry in entries[:index]), None)
            if twice is not None:
                raise ConfigError(f"prompts.{name} holds {twice!r} twice; list each once")
        if "" in self.files:
            raise ConfigError("prompts.files holds an empty name; name JSONL files")
        self._check_self_written()
        if not self.files and not self.hub and self.held_out and self.held_out >= self.self_written:
            raise ConfigError(
                f"prompts.held_out is {self.held_out}, and there are {self.self_written} prompts; "
                "nothing would be left to train on"
            )

    def _check_self_written(self) -> None:
        if not self.self_written:
            require_no_effect(
                {
                    "prompts.openings": self.openings,
                    "prompts.temperature": self.temperature,
                    "prompts.top_p": self.top_p,
                    "prompts.max_tokens": self.max_tokens,
                },
                {"prompts.openings": (), "prompts.temperature": 0.0, "prompts.top_p": 1.0, "prompts.max_tokens": 0},
                because="prompts.self_written is 0",
            )
            return
        if not self.openings:
            raise ConfigError('prompts.openings is empty; list how self-written prompts begin, "" for freely')
        require_float("prompts.temperature", self.temperature)
        require_int("prompts.max_tokens", self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """How the target answers the prompts, and what is kept of it.

    `features` "disk" stores the taps in `features_dtype`; "online" computes them inside the step and stores none
    (`features_dtype` "none"). `every_turn` lets the target rewrite every assistant turn of a conversation.
    """

    max_new_tokens: int
    batch_size: int
    temperature: float
    top_p: float
    every_turn: bool
    dtype: str
    features: str
    features_dtype: str
    num_processes: int

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size", "num_processes"):
            require_int(f"text.{name}", getattr(self, name))
        require_bool("text.every_turn", self.every_turn)
        require_not_negative("text.temperature", self.temperature)
        _top_p("text.top_p", self.top_p)
        if not self.temperature:
            require_no_effect({"text.top_p": self.top_p}, {"text.top_p": 1.0}, because="text.temperature is 0")
        require_one_of("text.dtype", self.dtype, "float32", "bfloat16")
        require_one_of("text.features", self.features, "disk", "online")
        require_one_of("text.features_dtype", self.features_dtype, "bfloat16", "float16", "none")
        if (self.features == "online") != (self.features_dtype == "none"):
            raise ConfigError(
                f"text.features_dtype is {self.features_dtype!r} while text.features is {self.features!r}; taps on "
                'disk are "bfloat16" or "float16", and of online taps nothing is stored: "none"'
            )


@dataclass(frozen=True, kw_only=True)
class LossRecipe:
    """What is minimised. A number that the chosen kind or weighting does not use is 0.

    `kind` "ce" takes the written token as label, "kl" the target's distribution at `kl_temperature`. `weighting` of a
    block's slots is "dpace" (`dpace_smoothing`), "decay" (`decay_gamma`) or "none". The softmax runs over the ids of
    the corpus and `num_random_head_rows` others, and over the whole vocabulary after the fraction `full_head_from` of
    the steps (1.0 = never). The head works on `head_chunk_blocks` blocks at a time (0 = all at once).
    """

    kind: str
    kl_temperature: float
    weighting: str
    dpace_smoothing: float
    decay_gamma: float
    selector_weight: float
    selector_start_step: int
    selector_detached: bool
    num_random_head_rows: int
    full_head_from: float
    head_chunk_blocks: int

    def __post_init__(self) -> None:
        require_one_of("loss.kind", self.kind, "ce", "kl")
        require_one_of("loss.weighting", self.weighting, "dpace", "decay", "none")
        require_fraction("loss.dpace_smoothing", self.dpace_smoothing)
        for name in ("kl_temperature", "decay_gamma", "selector_weight"):
            require_not_negative(f"loss.{name}", getattr(self, name))
        for name in ("selector_start_step", "num_random_head_rows", "head_chunk_blocks"):
            require_int(f"loss.{name}", getattr(self, name), least=0)
        require_bool("loss.selector_detached", self.selector_detached)
        require_fraction("loss.full_head_from", self.full_head_from)
        if self.kind == "kl":
            require_float("loss.kl_temperature", self.kl_temperature)
        else:
            self._idle("kl_temperature", because=f'loss.kind is "{self.kind}"')
        if self.weighting == "decay":
            require_float("loss.decay_gamma", self.decay_gamma)
        else:
            self._idle("decay_gamma", because=f'loss.weighting is "{self.weighting}"')
        if self.weighting != "dpace":
            self._idle("dpace_smoothing", because=f'loss.weighting is "{self.weighting}"')
        if not self.selector_weight:
            self._idle("selector_start_step", "selector_detached", because="loss.selector_weight is 0")
        if not self.full_head_from:
            self._idle("num_random_head_rows", because="loss.full_head_from is 0")

    def _idle(self, *names: str, because: str) -> None:
        given = {f"loss.{name}": getattr(self, name) for name in names}
        require_no_effect(given, {name: type(value)(0) for name, value in given.items()}, because=because)


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """An optimiser of float32 master weights: warm-up, then "wsd" (constant, linear decay) or "cosine".

    "adamw", or "muon": Muon on the matrices between hidden rows, AdamW on all else; `beta1`, `beta2` are AdamW's.

    `taps_noise` is the deviation of Gaussian noise on the taps, as a share of their root mean square (0 = none).
    "auto" device is the first GPU or the CPU; "auto" autocast is bfloat16 where the device multiplies it fast.
    """

    kind: str
    num_steps: int
    sequences_per_step: int
    blocks_per_sequence: int
    learning_rate: float
    beta1: float
    beta2: float
    weight_decay: float
    max_grad_norm: float
    schedule: str
    warmup_fraction: float
    decay_fraction: float
    final_lr_fraction: float
    taps_noise: float
    autocast: str
    device: str
    sharding: str

    def __post_init__(self) -> None:
        require_one_of("optim.kind", self.kind, "adamw", "muon")
        require_one_of("optim.schedule", self.schedule, "wsd", "cosine")
        require_one_of("optim.autocast", self.autocast, "none", "bfloat16", "auto")
        require_one_of("optim.device", self.device, "cpu", "cuda", "auto")
        require_one_of("optim.sharding", self.sharding, "none", "ddp", "fsdp2")
        for name in ("num_steps", "sequences_per_step", "blocks_per_sequence"):
            require_int(f"optim.{name}", getattr(self, name))
        require_float("optim.learning_rate", self.learning_rate)
        require_float("optim.max_grad_norm", self.max_grad_norm)
        require_not_negative("optim.weight_decay", self.weight_decay)
        require_not_negative("optim.taps_noise", self.taps_noise)
        for name in ("beta1", "beta2"):
            if require_fraction(f"optim.{name}", getattr(self, name)) == 1.0:
                raise ConfigError(f"optim.{name} is 1.0; it must be below 1")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            require_fraction(f"optim.{name}", getattr(self, name))
        if self.kind == "muon" and self.sharding == "fsdp2":
            raise ConfigError(
                'optim.kind is "muon", whose step needs whole matrices, and optim.sharding=fsdp2 spreads them; '
                "set optim.sharding=ddp, or optim.kind=adamw"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.warmup_fraction + self.decay_fraction > 1:
            raise ConfigError(
                f"optim.warmup_fraction {self.warmup_fraction:g} + decay_fraction {self.decay_fraction:g} "
                "is above 1; lower one of them"
            )
        if self.schedule == "cosine":
            given = {"optim.decay_fraction": self.decay_fraction}
            because = 'optim.schedule is "cosine", which falls from the warm-up on'
            require_no_effect(given, {"optim.decay_fraction": 0.0}, because=because)
        elif not self.decay_fraction:
            given = {"optim.final_lr_fraction": self.final_lr_fraction}
            require_no_effect(given, {"optim.final_lr_fraction": 1.0}, because="optim.decay_fraction is 0")

    def lr_at(self, step: int) -> float:
        """Learning rate of 0-based `step`."""
        warmup = max(1, round(self.warmup_fraction * self.num_steps))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        left, floor = self.num_steps - step, self.final_lr_fraction
        if self.schedule == "cosine":
            share = left / max(1, self.num_steps - warmup)
            return self.learning_rate * (floor + (1 - floor) * (1 - math.cos(math.pi * share)) / 2)
        decay = max(1, round(self.decay_fraction * self.num_steps))
        if left >= decay:
            return self.learning_rate
        return self.learning_rate * (floor + (1 - floor) * left / decay)


@dataclass(frozen=True, kw_only=True)
class EvaluationRecipe:
    """Decoding held-out prompts with the draft every so many steps, and at the end. All four are 0 for never."""

    every_steps: int
    num_prompts: int
    max_new_tokens: int
    width: int

    def __post_init__(self) -> None:
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, size in sizes.items():
            require_int(f"evaluation.{name}", size, least=0)
        if self.every_steps == 0:
            given = {f"evaluation.{name}": size for name, size in sizes.items()}
            require_no_effect(given, dict.fromkeys(given, 0), because="evaluation.every_steps is 0, never")
            return
        for name in ("num_prompts", "max_new_tokens"):
            require_int(f"evaluation.{name}", sizes[name])
        require_int("evaluation.width", self.width, least=2)

    def is_comparable(self, saved: Mapping[str, Any]) -> bool:
        """Whether a value of the saved settings may stand beside one of these; where these are for never, it stays."""
        names = ("num_prompts", "max_new_tokens", "width")
        return not self.num_prompts or all(saved.get(name) == getattr(self, name) for name in names)


def _top_p(name: str, value: float) -> None:
    if require_fraction(name, value) == 0:
        raise ConfigError(f"{name} is 0; it must be above 0, and 1 keeps everything")
