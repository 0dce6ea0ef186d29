"""A report as one HTML file: no script, no font, no request to anywhere; light and dark."""

from __future__ import annotations

from html import escape

from blockdraft.bench.report.document import Document
from blockdraft.bench.report.figures import figure_svg
from blockdraft.bench.table import Column, Table, shown_cell

__all__ = ["to_html"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#5b6470;--paper:#fff;--line:#d7dce2;--band:#f5f7f9;--bad:#a61b1b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#9aa4b0;--paper:#15181c;--line:#343b44;--band:#1c2127;
--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px 20px 60px;font:15px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper)}
h1{font-size:26px;margin:0 0 12px}h2{font-size:19px;margin:36px 0 8px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;font-size:13px;color:var(--dim);margin:0}
dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums;margin:6px 0}
th,td{padding:5px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{vertical-align:bottom;border-bottom:2px solid var(--line)}
th.text,td.text{text-align:left}
tbody tr:nth-child(odd){background:var(--band)}
td small{color:var(--dim)}
.notes{font-size:13px;color:var(--dim);margin:4px 0 0;padding-left:18px}
.refused{border-left:4px solid var(--bad);padding:6px 14px;color:var(--bad)}
figure{margin:10px 0}
svg{width:100%;max-width:820px;height:auto;font:12px system-ui,sans-serif}
svg .grid{stroke:var(--line)}svg .base{stroke:var(--dim);stroke-dasharray:4 3}
svg .tick{fill:var(--ink)}svg .axis{fill:var(--dim)}svg .whisker{stroke:var(--ink);fill:none}
svg .line{fill:none;stroke-width:1.8}
"""
# Told apart by people who see colours differently, on both backgrounds (Okabe and Ito's, black left out).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f7f7f")


def to_html(document: Document) -> str:
    """The whole page."""
    colours = "".join(
        f"svg .c{i}{{stroke:{colour}}}svg .bar.c{i},svg .dot.c{i}{{fill:{colour}}}" for i, colour in enumerate(_COLOURS)
    )
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in document.facts())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(document.title)}</title><style>{_STYLE}{colours}</style></head><body><main>"
        f"<h1>{escape(document.title)}</h1><dl>{facts}</dl>"
        + "".join(_section(table) for table in document.tables)
        + _notes(document.notes)
        + "</main></body></html>\n"
    )


def _section(table: Table) -> str:
    head = f"<section><h2>{escape(table.title)}</h2>"
    if not table.holds:
        lines = "".join(f"<p>{escape(line)}</p>" for line in table.refusal())
        return f'{head}<div class="refused">{lines}</div></section>'
    drawing = "" if table.figure is None else figure_svg(table.figure)
    figure = f"<figure>{drawing}</figure>" if drawing else ""
    heads = "".join(_head(table, column) for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(_data(table, row.get(c.key), c) for c in table.columns) + "</tr>" for row in table.rows
    )
    body = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    formulas = dict.fromkeys(f"{c.title}: {c.formula}" for c in table.columns if c.formula and not c.title.isdigit())
    return f"{head}{figure}{body}{_notes([*formulas, *table.notes])}</section>"


def _notes(notes: object) -> str:
    lines = "".join(f"<li>{escape(str(note))}</li>" for note in notes)  # type: ignore[attr-defined]
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def _is_text(table: Table, column: Column) -> bool:
    return any(isinstance(row.get(column.key), str) for row in table.rows)


def _head(table: Table, column: Column) -> str:
    kind = ' class="text"' if _is_text(table, column) else ""
    hint = f' title="{escape(column.formula)}"' if column.formula else ""
    return f'<th scope="col"{kind}{hint}>{escape(column.title)}</th>'


def _data(table: Table, cell: object, column: Column) -> str:
    kind = ' class="text"' if _is_text(table, column) else ""
    text = escape(shown_cell(cell, column))  # type: ignore[arg-type]
    estimate, bracket, bounds = text.partition(" [")
    small = f" <small>[{bounds}</small>" if bracket and not isinstance(cell, str) else ""
    return f"<td{kind}>{estimate if small else text}{small}</td>"
