"""What a rule about an engine is, and what it may ask of a draft.

One table per engine holds the rules; each names where it was read. A rule that does not concern a draft says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blockdraft.config import DraftConfig, MlaConfig, TargetFacts

Level = Literal["note", "lower_acceptance", "unknown", "refused"]
Outcome = Literal["runs", "runs_with_notes", "lower_acceptance", "unknown", "refused"]

# From harmless to fatal: an engine's outcome is that of its gravest rule.
LEVELS: tuple[Level, ...] = ("note", "lower_acceptance", "unknown", "refused")
_KIMI_K3_TYPES = ("kimi_k3", "kimi_linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A draft as an engine meets it: its meaning, the keys that its config.json really has, what its file carries.

    `raw` is the config.json itself; where its keys stand is asked of z-lab files only. `target` may be unknown.
    """

    config: DraftConfig
    dialect: str = "z-lab"
    raw: Mapping[str, Any] = field(default_factory=dict)
    own: Collection[str] = ()
    target: TargetFacts | None = None

    @property
    def is_v2(self) -> bool:
        return self.config.conv is not None

    @property
    def is_mla(self) -> bool:
        return isinstance(self.config.attention, MlaConfig)

    @property
    def has_windows(self) -> bool:
        return any(layer.window is not None for layer in self.config.layers)

    @property
    def is_causal(self) -> bool:
        """Some layer is causal in the block."""
        return any(layer.is_causal for layer in self.config.layers)

    @property
    def is_kimi_k3(self) -> bool:
        """The target has two streams to tap: by its model type, or, where no target is given, by its size."""
        if self.target is not None:
            return self.target.model_type in _KIMI_K3_TYPES and self.target.num_layers == 93
        sizes = (self.config.num_target_layers, self.config.target_hidden_size, self.config.vocab_size)
        return sizes == (93, 7168, 163840)

    @property
    def is_recurrent(self) -> bool:
        return self.target is not None and self.target.is_recurrent

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def is_zlab(self) -> bool:
        return self.dialect == "z-lab"

    def only_nested(self, *names: str) -> bool:
        """One of these keys stands in dflash_config and not at top level."""
        nest = self.raw.get("dflash_config") or {}
        return self.is_zlab and any(nest.get(name) is not None and self.raw.get(name) is None for name in names)

    def only_top(self, *names: str) -> bool:
        """One of these keys stands at top level and not in dflash_config."""
        nest = self.raw.get("dflash_config") or {}
        return self.is_zlab and any(nest.get(name) is None and self.raw.get(name) is not None for name in names)

    def words(self) -> dict[str, object]:
        """What the text of a rule may name."""
        return {
            "width": self.config.max_width,
            "proposals": self.config.num_proposals,
            "dialect": self.dialect,
            "theta": f"{self.config.rope.theta:g}",
            "rope": self.config.rope.kind,
            "length": self.config.max_position_embeddings,
            "cap": self.config.final_logit_softcapping,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing an engine does with some drafts. `source`: the file, change or thread where it was read."""

    name: str
    level: Level
    when: Callable[[Facts], bool]
    text: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """One engine: the state of it that was read, how it is told to run a draft (one of DSpark), and its rules."""

    name: str
    read: str
    how: str
    how_dspark: str
    rules: tuple[Rule, ...]

    def examine(self, facts: Facts) -> dict[str, Any]:
        """What this engine would do with the draft, as plain values."""
        words, how = facts.words(), self.how_dspark if facts.family == "dspark" else self.how
        found = [rule for rule in self.rules if rule.when(facts)]
        worst = max((LEVELS.index(rule.level) for rule in found), default=-1)
        outcome: Outcome = "runs" if worst < 0 else "runs_with_notes" if worst == 0 else LEVELS[worst]  # type: ignore[assignment]
        return {
            "engine": self.name,
            "read": self.read,
            "outcome": outcome,
            "how": None if outcome == "refused" else how.format(**words),
            "rules": [
                {"name": rule.name, "level": rule.level, "text": rule.text.format(**words), "source": rule.source}
                for rule in found
            ],
        }
