"""The journal of a run: one JSON line for each record, on disk before the next one is made.

Owns the file, what survives a crash and what may be put together. A killed run is opened again with the same settings
and goes on behind its last whole line.

The first line of every process says what it runs and where: {"kind": "run", "settings": ..., "where": ...}. Settings
must be equal in all of them; `where` (date, commit, machine) may differ and all are kept. Then {"kind": "record", ...}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from blockdraft.bench.record import RequestRecord
from blockdraft.errors import ConfigError, shown

__all__ = ["Journal", "JournalContent", "read_journal"]


@dataclass(slots=True)
class JournalContent:
    """What a journal holds. A later record of the same key replaces the earlier one."""

    settings: dict[str, Any] | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    records: dict[tuple[Any, ...], RequestRecord] = field(default_factory=dict)


class Journal:
    """A journal open for appending. Use as a context manager, or `close` it."""

    def __init__(self, path: Path, settings: Mapping[str, Any], where: Mapping[str, Any]) -> None:
        """Opens or makes the file. A torn last line is cut off; other settings are a ConfigError."""
        # As JSON gives it back, so that it can be compared with what a file holds.
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._where = dict(where)
        self.path = path
        self.content = JournalContent()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                self.content, size = _read(path)
                _check_settings(self._settings, self.content.settings, path)
                os.truncate(path, size)
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; name a file that can be written") from None
        _sync_folder(path.parent)
        self.content.settings = self._settings
        self._write({"kind": "run", "settings": self._settings, "where": self._where})
        self.content.runs.append(self._where)

    def append(self, record: RequestRecord) -> None:
        """Put a record on disk before returning."""
        self._write({"kind": "record", **record.to_json()})
        self.content.records[record.key] = record

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read_journal(paths: Path | Iterable[Path]) -> JournalContent:
    """The content of one journal, or of several parts with equal settings. Raises ConfigError."""
    merged = JournalContent()
    for path in [paths] if isinstance(paths, Path) else sorted(paths):
        try:
            content, _ = _read(path)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}; name the journal of a run") from None
        if content.settings is None:
            raise ConfigError(f"{path} holds no run; name the journal of one")
        _check_settings(content.settings, merged.settings, path)
        merged.settings = content.settings
        merged.runs += content.runs
        merged.records |= content.records
    return merged


def _read(path: Path) -> tuple[JournalContent, int]:
    """The content, and the number of bytes up to the end of the last whole line."""
    raw = path.read_bytes()
    size = raw.rfind(b"\n") + 1
    content = JournalContent()
    for number, line in enumerate(raw[:size].split(b"\n")[:-1], start=1):
        try:
            entry = json.loads(line)
            kind = entry.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ConfigError(f"{path} line {number} is damaged; delete that line") from None
        if kind == "run":
            if content.settings is not None:
                _check_settings(entry.get("settings") or {}, content.settings, path)
            content.settings = entry.get("settings")
            content.runs.append(entry.get("where") or {})
        elif kind == "record":
            try:
                record = RequestRecord.from_json(entry)
            except ConfigError as error:
                raise ConfigError(f"{path} line {number}: {error}") from None
            content.records[record.key] = record
        else:
            raise ConfigError(f"{path} line {number} is a {shown(kind)}; a journal holds runs and records")
    return content, size


def _check_settings(wanted: Mapping[str, Any], found: Mapping[str, Any] | None, path: Path) -> None:
    if found is not None and found != wanted:
        keys = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
        raise ConfigError(f"{path}: made with another {', '.join(keys)}; name another file, or move this one away")


def _sync_folder(folder: Path) -> None:
    """Make a new file's name survive a crash too, where the system lets a folder be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
