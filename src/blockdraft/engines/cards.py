"""What published drafts accept, as their cards say: the ground that a measured acceptance is held against.

A card's workloads are not our probes. So the floor is not the card's number but half of the way from 1 (nothing is
accepted) to the card's hardest workload: a port that works is above it, one that is broken is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockdraft.formats.known_streams import hub_id_of

# Below this nothing worth the name is accepted, whatever the draft: shifted taps give 1.0 to 1.1.
COLLAPSED = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Acceptance lengths by workload at one width, the bonus token included."""

    width: int
    lengths: Mapping[str, float]
    source: str

    @property
    def floor(self) -> float:
        return 1 + (min(self.lengths.values()) - 1) / 2


CARDS: Mapping[str, tuple[Card, ...]] = {
    "lightseekorg/kimi-k3-dflash2": (
        Card(
            width=8,
            lengths={
                "GSM8K": 5.901, "HumanEval": 5.080, "MATH-500": 4.636, "SPEED-Bench coding": 4.431,
                "SPEED-Bench RAG": 3.958, "SPEED-Bench multilingual": 3.849, "MT-Bench": 3.585,
                "SPEED-Bench QA": 3.213, "AIME 2026": 2.785, "SPEED-Bench writing": 2.780,
            },
            source="its card, five-layer revision: TokenSpeed, 8 GB300, T = 1, top_p 0.95",
        ),
    ),
    "RadixArk/Kimi-K3.1-Dflash2-Preview": (
        Card(
            width=5,
            lengths={"GSM8K": 4.259405, "AIME 2026": 3.231564, "GPQA-Diamond": 3.275916},
            source="its card: SGLang, 8 GPUs",
        ),
        Card(
            width=8,
            lengths={"GSM8K": 5.780277, "AIME 2026": 3.696036, "GPQA-Diamond": 3.768280},
            source="its card: SGLang, 8 GPUs",
        ),
    ),
    "z-lab/Qwen3.8-27B-DFlash2": (
        Card(width=8, lengths={"GSM8K": 5.46}, source="its card: T = 1, top_p 0.95, top_k 20; xLLM issue 2279: 5.366"),
    ),
    "z-lab/Kimi-K2.5-DFlash": (
        Card(
            width=8,
            lengths={"GSM8K": 5.3, "MATH-500": 5.5, "HumanEval": 5.3, "MBPP": 4.5, "MT-Bench": 3.7},
            source="its card: SGLang, thinking on",
        ),
    ),
}  # fmt: skip


def card_at(draft: str, width: int) -> Card | None:
    """The card of a draft, by its hub id, at this width."""
    name = (hub_id_of(draft) or "").lower()
    cards = {key.lower(): value for key, value in CARDS.items()}.get(name, ())
    return next((card for card in cards if card.width == width), None)


@dataclass(frozen=True, slots=True)
class Floor:
    """Acceptance below `length` counts as a collapse; `ground` says whose word that is."""

    length: float
    ground: str


def floor_of(draft: str, width: int, asked: float | None) -> Floor:
    """The floor asked for, else that of the draft's card at this width, else what no draft may fall below."""
    if asked is not None:
        return Floor(asked, "--floor")
    card = card_at(draft, width)
    if card is not None:
        lowest = min(card.lengths, key=lambda workload: card.lengths[workload])
        return Floor(card.floor, f"half of what {lowest} gains, {card.lengths[lowest]:.2f} in {card.source}")
    return Floor(COLLAPSED, "no card is known for this draft and width; say what you expect with --floor")
