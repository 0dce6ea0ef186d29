"""A report: what was measured, how, on what, and its tables. Owns the JSON schema of results (docs/bench.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdraft.bench.table import Table
from blockdraft.errors import ConfigError

__all__ = ["REPORT_SCHEMA", "Document", "write_text"]

REPORT_SCHEMA = "blockdraft.bench/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """`system`, `settings`, `workloads`: as JSON, what was measured. `runs`: date, commit and machine of each process.

    `command` makes it again. `notes` say what was cut or left out.
    """

    title: str
    command: str
    system: Mapping[str, Any]
    settings: Mapping[str, Any]
    workloads: Sequence[Mapping[str, Any]]
    runs: Sequence[Mapping[str, Any]]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the identities hold for every table."""
        return all(table.holds for table in self.tables)

    def facts(self) -> list[tuple[str, str]]:
        """What stands above the tables, name and text."""
        system, settings = self.system, self.settings
        pair = f"{system['draft']} with {system['target']}" if system.get("draft") else str(system["target"])
        lines = [("measured", f"{pair}, {system['engine']} {system['version']}")]
        details = {**system.get("details", {}), "template": system.get("template_sha256")}
        words = ", ".join(f"{key} {value}" for key, value in details.items() if value is not None)
        lines += [("system", words)] if words else []
        for sampling in settings.get("samplings", []):
            cut = "" if sampling["top_k"] is None else f", top-k {sampling['top_k']}"
            effort = "" if not sampling["reasoning_effort"] else f", {sampling['reasoning_effort']} reasoning effort"
            words = f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}{cut}{effort}"
            lines.append((f"sampling {sampling['name']}", words))
        if "max_new_tokens" in settings:
            lines.append(("length limit", f"{settings['max_new_tokens']} tokens"))
        for one in self.workloads:
            size = f"{one['num_prompts']} of {one['num_prompts_of_the_set']} prompts"
            words = f"{size}, format {one['format']} ({one['format_sha256']}), prompts {one['prompts_sha256']}"
            lines.append((str(one["name"]), f"{words}, {one['source']}"))
        for run in self.runs:
            lines.append(("run", ", ".join(f"{key} {_flat(value)}" for key, value in run.items() if value is not None)))
        hardware = ", ".join(f"{key} {value}" for key, value in system.get("hardware", {}).items() if value is not None)
        return [*lines, *([("hardware", hardware)] if hardware else []), ("command", self.command)]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": REPORT_SCHEMA,
            "title": self.title,
            "command": self.command,
            "system": dict(self.system),
            "settings": dict(self.settings),
            "workloads": [dict(one) for one in self.workloads],
            "runs": [dict(one) for one in self.runs],
            "identities_hold": self.holds,
            "tables": [table.to_json() for table in self.tables],
            "notes": list(self.notes),
            "details": dict(self.details),
        }

    def to_json_text(self) -> str:
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return str(value)


def write_text(path: Path, text: str) -> None:
    """Write a file; a reader sees the old one or the new one, never a part. Raises ConfigError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a place that can be written") from None
