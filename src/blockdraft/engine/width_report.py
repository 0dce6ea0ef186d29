"""What a policy of widths says of itself: of one request, and of the engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RowReport", "WidthReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReport:
    """How one request's widths were chosen."""

    widths: dict[int, int]
    """Steps by width."""
    num_probes: int
    num_lookups: int
    """Steps whose proposals came from its own text."""
    survival: list[float]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthReport:
    """What an engine's policy chose and what came of it; rates over the steps without prompts in them."""

    num_steps: int
    widths: dict[int, int]
    """Row-steps by width."""
    num_probes: int
    num_audits: int
    num_lookups: int
    """Row-steps whose proposals came from the row's own text."""
    probe_share: float
    """Share of the time that probes and audits took, as predicted, beyond the best choice."""
    expected_tok_per_s: float | None
    measured_tok_per_s: float | None
    conditional_acceptance: list[float]
    num_trials: int
    lookup_acceptance: dict[int, list[float]]
    """Conditional acceptance of proposals from the text, by the least length of match."""
    reason: str

    def __str__(self) -> str:
        """One line for people."""
        total = max(sum(self.widths.values()), 1)
        widths = ", ".join(f"{width}: {100 * count / total:.0f} %" for width, count in self.widths.items())
        return (
            f"{self.reason}; widths used {widths or 'none'}; {self.num_lookups} from the text, {self.num_probes} probes"
        )
