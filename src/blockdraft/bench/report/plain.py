"""A report as text: for the terminal, as Markdown, as CSV, and as a section of a model card."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence

from blockdraft.bench.report.document import Document
from blockdraft.bench.table import Cell, Column, Table, shown_cell
from blockdraft.stats import Interval

__all__ = ["print_terminal", "to_card_section", "to_csv", "to_markdown"]


MOST_ON_ONE_LINE = 6  # columns of a table that has its intervals beside the numbers in a terminal


# ---- terminal --------------------------------------------------------------------------------------------------------
def print_terminal(document: Document) -> None:
    """The tables on stdout, as wide as the terminal (160 characters elsewhere); everything else is in the files."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as RichTable

    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in document.tables:
        console.print()
        console.print(f"[bold]{escape(table.title)}[/]", highlight=False)
        if not table.holds:
            for line in table.refusal():
                console.print(f"  [red]{escape(line)}[/]", highlight=False)
            continue
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in table.columns:
            drawn.add_column(
                escape(column.title), justify="left" if _is_text(table, column) else "right", overflow="fold"
            )
        parts = "\n[" if len(table.columns) > MOST_ON_ONE_LINE else " ["
        for row in table.rows:
            cells = (shown_cell(row.get(column.key), column).replace(" [", parts) for column in table.columns)
            drawn.add_row(*map(escape, cells))
        console.print(drawn, highlight=False)
        for note in table.notes:
            console.print(f"  [dim]{escape(note)}[/]", highlight=False)
    for note in document.notes:
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _is_text(table: Table, column: Column) -> bool:
    return any(isinstance(row.get(column.key), str) for row in table.rows)


# ---- Markdown --------------------------------------------------------------------------------------------------------
def to_markdown(document: Document) -> str:
    parts = [f"# {document.title}", "\n".join(f"- **{name}**: {text}" for name, text in document.facts())]
    for table in document.tables:
        parts += [f"## {table.title}", table_markdown(table)]
    if document.notes:
        parts.append("\n".join(f"- {note}" for note in document.notes))
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """A table with its formulas and notes below; the refusal where it does not hold."""
    if not table.holds:
        return "\n".join(f"- {line}" for line in table.refusal())
    head = [column.title for column in table.columns]
    align = [":--" if _is_text(table, column) else "--:" for column in table.columns]
    lines = [_line(head), _line(align)]
    lines += [_line(shown_cell(row.get(c.key), c) for c in table.columns) for row in table.rows]
    formulas = dict.fromkeys(f"{c.title}: {c.formula}" for c in table.columns if c.formula and not _is_width(c.title))
    under = [*formulas, *table.notes]
    return "\n".join(lines) + ("\n\n<sub>" + "; ".join(_escaped(text) for text in under) + "</sub>" if under else "")


def _is_width(title: str) -> bool:
    return title.isdigit()


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# ---- CSV -------------------------------------------------------------------------------------------------------------
def to_csv(tables: Sequence[Table]) -> str:
    """All tables as one long list: table, row, column, formula, estimate, low, high, level, clusters."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "title", "row", "column", "formula", "value", "low", "high", "level", "num_clusters"])
    for table in tables:
        for row in table.rows if table.holds else ():
            name = " / ".join(str(row[c.key]) for c in table.columns if isinstance(row.get(c.key), str))
            for column in table.columns:
                cell = row.get(column.key)
                if cell is not None and not isinstance(cell, str):
                    writer.writerow([table.name, table.title, name, column.title, column.formula, *_numbers(cell)])
    return out.getvalue()


def _numbers(cell: Cell) -> list[object]:
    if isinstance(cell, Interval):
        return [cell.estimate, cell.low, cell.high, cell.level, cell.num_clusters]
    return [cell, "", "", "", ""]


# ---- a model card ----------------------------------------------------------------------------------------------------
CARD_TABLES = ("A", "B", "C", "positions", "speed")


def to_card_section(document: Document) -> str:
    """What a drafter's model card says of these measurements. A table whose identities fail has no place in it."""
    parts = ["## Measured acceptance", "\n".join(f"- {name}: {text}" for name, text in document.facts())]
    for table in document.tables:
        if table.name in CARD_TABLES and table.holds:
            parts += [f"### {table.title}", table_markdown(table)]
    return "\n\n".join(parts) + "\n"
