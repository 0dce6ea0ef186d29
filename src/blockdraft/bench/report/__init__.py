"""What a run's tables are written as: terminal, Markdown, JSON, CSV, one HTML file, a section of a model card."""

from __future__ import annotations

from pathlib import Path

from blockdraft.bench.report.document import REPORT_SCHEMA, Document, write_text
from blockdraft.bench.report.page import to_html
from blockdraft.bench.report.plain import print_terminal, to_card_section, to_csv, to_markdown

__all__ = [
    "REPORT_SCHEMA",
    "Document",
    "print_terminal",
    "to_card_section",
    "to_csv",
    "to_html",
    "to_markdown",
    "write",
]


def write(document: Document, folder: Path, stem: str) -> list[Path]:
    """All files of a report in a folder: STEM.json, .md, .csv, .html and STEM.card.md."""
    texts = {
        "json": document.to_json_text(),
        "md": to_markdown(document),
        "csv": to_csv(document.tables),
        "html": to_html(document),
        "card.md": to_card_section(document),
    }
    paths = []
    for ending, text in texts.items():
        path = folder / f"{stem}.{ending}"
        write_text(path, text)
        paths.append(path)
    return paths
