"""What the engine says in its log about the draft, against what the draft's file declares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blockdraft.engines.rules import Alarm, Engine
from blockdraft.engines.setting import Setting

ASKED = ("taps", "width", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked for. `is_right` None: the engine's log does not say."""

    what: str
    is_right: bool | None
    text: str


@dataclass(slots=True)
class Watch:
    """Reads the log as it comes. `said` keeps the last value of each thing that a line names."""

    engine: Engine
    setting: Setting
    lines: list[str] = field(default_factory=list)
    said: dict[str, object] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)

    def feed(self, line: str) -> None:
        """Take one line of the log."""
        self.lines.append(line)
        for reading in self.engine.readings:
            found = reading.pattern.search(line)
            if found is not None:
                self.said[reading.what] = reading.read(found)
        for alarm in self.engine.alarms:
            if alarm not in self.alarms and alarm.pattern.search(line):
                self.alarms.append(alarm)

    def findings(self) -> list[Finding]:
        """Every thing that a log of this engine could say, and what it said."""
        wanted = expected(self.setting)
        known: set[str] = {reading.what for reading in self.engine.readings}
        return [_finding(what, wanted, self.said, known) for what in wanted if what in known or what in ASKED]

    def contradictions(self) -> list[str]:
        """What must not be: things understood otherwise than declared, and alarms that change the text served."""
        wrong = [finding.text for finding in self.findings() if finding.is_right is False]
        return wrong + [alarm.text for alarm in self.alarms if alarm.is_fatal]


def expected(setting: Setting) -> dict[str, object]:
    """What the log should say, in the words of `Reading`."""
    config = setting.draft.config
    wanted: dict[str, object] = {
        "taps": config.target_layer_ids,
        "width": setting.width,
        "mask": config.mask_token_id,
    }
    if setting.is_kimi_k3 and setting.tap_stream is not None:
        wanted["stream"] = setting.tap_stream
    return wanted


def _finding(what: str, wanted: dict[str, object], said: dict[str, object], known: set[str]) -> Finding:
    declared = _shown(wanted[what])
    if what not in said:
        reason = "the log did not say it" if what in known else "this engine's log never says it"
        return Finding(what=what, is_right=None, text=f"{what} {declared}: {reason}")
    if said[what] == wanted[what]:
        return Finding(what=what, is_right=True, text=f"{what} {declared}: confirmed")
    text = f"{what}: the draft declares {declared}, the engine took {_shown(said[what])}"
    return Finding(what=what, is_right=False, text=text + _hint(what, said[what], wanted[what]))


def _hint(what: str, said: object, wanted: object) -> str:
    if what == "taps" and isinstance(said, tuple) and isinstance(wanted, tuple) and len(said) == len(wanted):
        shifts = {a - b for a, b in zip(said, wanted, strict=True)}
        if len(shifts) == 1:
            return f" (shifted by {shifts.pop():+d})"
    return ""


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)
