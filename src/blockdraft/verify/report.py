"""What an examination found: checks with their outcome, in words and as JSON.

Owns the meaning of passed, failed and not run, and how the results of chance become verdicts: all statistical tests of
an exam share one rate of false alarms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from blockdraft.verify.chance import Sight, holm

__all__ = ["Check", "Report", "Trial", "settled"]

Outcome = Literal["passed", "failed", "not run"]
POWER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question and its answer. `reason`: why it failed, or why it was not run. `power`: what it would have seen."""

    name: str
    outcome: Outcome
    finding: str
    reason: str | None = None
    power: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A statistical test before its verdict, which depends on the other tests. `reason` is said if it fails.

    `p_value` None: not enough draws for a test; `finding` says so.
    """

    name: str
    p_value: float | None
    finding: str
    reason: str
    sight: Sight | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def settled(trials: Sequence[Trial], alpha: float) -> list[Check]:
    """The verdicts. The chance that a correct system fails any of them is at most alpha (Holm).

    Power is worked out at alpha / number of tests, the least level that Holm's rule ever asks of one.
    """
    run = [trial for trial in trials if trial.p_value is not None]
    fails = dict(zip(map(id, run), holm([trial.p_value or 0.0 for trial in run], alpha), strict=True))
    level = alpha / max(1, len(run))
    checks = []
    for trial in trials:
        if trial.p_value is None:
            checks.append(
                Check(name=trial.name, outcome="not run", finding="", reason=trial.finding, figures=trial.figures)
            )
            continue
        has_failed = fails[id(trial)]
        figures: dict[str, Any] = {**trial.figures, "p_value": trial.p_value, "level": level}
        words = None
        if trial.sight is not None:
            least = figures["least_seen"] = trial.sight.least(level, POWER)
            words = trial.sight.words(least, level, POWER)
            if trial.sight.sd == 0.0:
                figures["power_at_variation_0.05"] = trial.sight.power(0.05, level)
        checks.append(
            Check(
                name=trial.name,
                outcome="failed" if has_failed else "passed",
                finding=f"{trial.finding}; p = {trial.p_value:.2g}",
                reason=trial.reason if has_failed else None,
                power=words,
                figures=figures,
            )
        )
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of one examination, what was examined, the rate of false alarms they share (0: no tests of chance)."""

    subject: Mapping[str, Any]
    budget: str
    alpha: float
    checks: tuple[Check, ...]
    seconds: float

    @property
    def has_passed(self) -> bool:
        return all(check.outcome != "failed" for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Why it failed, every reason once, in the order of the checks."""
        return list(dict.fromkeys(check.reason for check in self.checks if check.outcome == "failed" and check.reason))

    def check(self, name: str) -> Check:
        [found] = [check for check in self.checks if check.name == name]
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "blockdraft verify",
            "passed": self.has_passed,
            "reasons": self.reasons,
            "false_alarm_rate": self.alpha,
            "budget": self.budget,
            "seconds": round(self.seconds, 1),
            "subject": dict(self.subject),
            "checks": [
                {
                    "name": check.name,
                    "outcome": check.outcome,
                    "finding": check.finding,
                    "reason": check.reason,
                    "power": check.power,
                    "figures": dict(check.figures),
                }
                for check in self.checks
            ],
        }

    def to_text(self) -> str:
        marks = {"passed": "pass", "failed": "FAIL", "not run": "----"}
        lines = [f"{name}: {value}" for name, value in self.subject.items()]
        for check in self.checks:
            lines.append(f"{marks[check.outcome]}  {check.name}: {check.finding or check.reason}")
            if check.outcome == "failed" and check.reason:
                lines.append(f"      because: {check.reason}")
            if check.power:
                lines.append(f"      {check.power}")
        counts = [sum(c.outcome == outcome for c in self.checks) for outcome in ("passed", "failed", "not run")]
        lines.append(
            f"{counts[0]} passed, {counts[1]} failed, {counts[2]} not run; {self.seconds:.0f} s ({self.budget})"
        )
        if self.alpha:
            lines.append(
                f"A correct system fails this exam by chance with a probability of at most {self.alpha:g}: "
                "all tests of chance share it (Holm), the others have none."
            )
        if self.has_passed:
            lines.append("PASSED: nothing was found that tells this system from its target alone.")
        else:
            lines.extend(["FAILED:", *(f"  - {reason}" for reason in self.reasons)])
        return "\n".join(lines) + "\n"
