"""Parts of a self-contained HTML page: frame, tables, pictures, numbers as CSV.

Numbers and texts are escaped when the page is written; the charts read a JSON block and only ever set text. The
page's content security policy forbids every request and every script but its own, which it names by its hash.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import importlib.resources
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgraft.core.files import json_ready
from fedgraft.core.store import write_atomic
from fedgraft.core.text import csv_cell
from fedgraft.report.sections import PICTURE_TYPES, Charts, Facts, Grid, Matrix, Part, Pictures, Rows, Section

_CLIENT_FIELDS = ("loss", "norm", "drift", "cosine", "weight")


def write_tables(path: Path | str, title: str, tables: Mapping[str, Rows], notes: Sequence[str] = ()) -> Path:
    """Write a page of notes and tables to `path` and return it; the page offers all numbers as one CSV file.

    `tables` are lists of rows by heading.
    """
    parts = [f"<p>{safe(note)}</p>" for note in notes]
    csv_rows = []
    for name, rows in tables.items():
        parts.append(section(name, grid_table(rows)))
        for row in rows:
            csv_rows.append({"table": name, **row})
    top = header(title, "finished", f"{Path(path).stem}.csv", rows_csv(csv_rows))
    return write_page(path, title, top, parts, [])


def write_page(path: Path | str, title: str, top: str, parts: Sequence[str], charts: Sequence[Any]) -> Path:
    """Write the page of `render_page` to `path`; return the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [render_page(title, top, parts, charts).encode()])
    return path


def write_sections(path: Path | str, title: str, top: str, sections: Sequence[Section], begin: str = "") -> Path:
    """Write a page of sections, with their charts, under the header `top`; return the path. `begin` is HTML."""
    return write_page(path, title, top, [begin, *map(render, sections)], charts_of(sections))


def charts_of(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the charts of sections, each with the name of the element in which it is drawn."""
    charts: list[dict[str, Any]] = []
    for titled in sections:
        for part in titled.parts:
            if isinstance(part, Charts):
                charts += [{"place": part.place, **chart} for chart in part.charts]
    return charts


def render_page(title: str, top: str, parts: Sequence[str], charts: Sequence[Any]) -> str:
    """Return a page of these parts under the header `top`.

    `parts` are HTML; `charts` is the data of the charts, which the page's script draws into the elements of
    `charts_at`.
    """
    script = page_script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # Only `<` could end a script element; JSON can escape it.
    block = json.dumps(json_ready({"charts": charts}), separators=(",", ":"))
    block = block.replace("<", "\\u003c").replace("&", "\\u0026")
    body = "\n".join([top, "<main>", *filter(None, parts), "</main>"])
    filled = {
        "POLICY": policy,
        "TITLE": html.escape(title),
        "BODY": body,
        "DATA": block,
        "STYLE": page_file("base.css"),
        "SCRIPT": script,
    }
    # One pass, so that a placeholder inside a run's own texts is not replaced.
    placeholder = r"@@(POLICY|TITLE|BODY|DATA|STYLE|SCRIPT)@@"
    return re.sub(placeholder, lambda place: filled[place[1]], page_file("template.html"))


def page_file(name: str) -> str:
    """Return the text of a file of the page: its style, a script, the template."""
    return importlib.resources.files("fedgraft.report").joinpath("page", name).read_text("utf-8")


def page_script() -> str:
    """Return the script of a static page: the drawing module of the studio and what begins it, as one function."""
    lines = ["", "(() => {", '"use strict";']
    for name in ("charts.js", "static.js"):
        for line in page_file(name).splitlines():
            if not line.startswith("import "):
                lines.append(line.removeprefix("export "))
    return "\n".join([*lines, "})();", ""])


def header(title: str, status: str, name: str, numbers: str, about: str = "") -> str:
    """Return the top of a page: title, description `about`, status, and a link that saves the numbers.

    `numbers` is CSV text, which the link saves under the file name `name`.
    """
    data = base64.b64encode(numbers.encode()).decode()
    link = f'<a class="button" download="{html.escape(name)}" href="data:text/csv;base64,{data}">Numbers as CSV</a>'
    badge = f'<span class="badge {safe(status.split()[0])}">{safe(status)}</span>'
    description = ""
    if about:
        description = f'<p class="note">{safe(about)}</p>'
    theme = '<button type="button" id="theme">Dark / light</button>'
    return f"<header><h1>{safe(title)}</h1>{badge}{link}{theme}{description}</header>"


def safe(text: object) -> str:
    """Return escaped text, with non-breaking spaces between a number and its unit and around `to` and `of`."""
    together = re.sub(r"(?<=[\d%]) (to|of) (?=\d)", r"&nbsp;\1&nbsp;", html.escape(str(text)))
    return re.sub(r"(?<=\d) (?=(%|[kMG]?B|s|min|h)(?!\w))", "&nbsp;", together)


def charts_at(place: str) -> str:
    """Return the element in which the charts of this place are drawn."""
    return f'<div class="charts" id="{place}"></div>'


CHARTS = charts_at("charts")


def section(title: str, content: str) -> str:
    """Return a titled section; empty without content."""
    if not content:
        return ""
    return f"<section><h2>{safe(title)}</h2>{content}</section>"


def folded(title: str, content: str) -> str:
    """Return a section that is folded at first; empty without content."""
    if not content:
        return ""
    return f"<details><summary>{safe(title)}</summary>{content}</details>"


def preformatted(text: str) -> str:
    """Return preformatted text, such as a config; empty without text."""
    if not text:
        return ""
    return f"<pre>{html.escape(text)}</pre>"


def notices(texts: Sequence[str]) -> str:
    """Return texts as highlighted notices."""
    return "".join(f'<p class="notice">{safe(text)}</p>' for text in texts)


def facts_table(values: Mapping[str, str]) -> str:
    """Return a table of two columns, name and value; empty without values."""
    if not values:
        return ""
    rows = ""
    for name, value in values.items():
        rows += f'<tr><th scope="row">{safe(name)}</th>{_cell(value, "")}</tr>'
    return f'<div class="scroll"><table class="facts">{rows}</table></div>'


def grid_table(rows: Rows) -> str:
    """Return a table with the first row's keys as its head; columns of numbers, except the first, are right-aligned."""
    if not rows:
        return ""
    grid = Grid(rows)
    attributes = []
    head = ""
    for name, is_number in grid.columns:
        attribute = ""
        if is_number:
            attribute = ' class="number"'
        attributes.append(attribute)
        head += f'<th scope="col"{attribute}>{safe(name)}</th>'
    body = ""
    for texts in grid.texts:
        body += "<tr>"
        for text, attribute in zip(texts, attributes, strict=True):
            body += _cell(text, attribute)
        body += "</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def matrix_table(matrix: Matrix) -> str:
    """Return a matrix as an HTML table with darker cells for larger values; "" without rows."""
    if not matrix:
        return ""
    largest = 0
    for values in matrix.rows.values():
        largest = max([largest, *(value for value in values if value is not None)])
    largest = largest or 1
    turned = ""
    if max(len(str(heading)) for heading in matrix.columns) > 4:
        turned = ' class="turned"'
    headings: list[object] = [matrix.corner]
    if matrix.sums:
        headings.append("all")
    headings += matrix.columns
    head = "".join(f'<th scope="col"><span>{safe(heading)}</span></th>' for heading in headings)
    body = ""
    for name, values in matrix.rows.items():
        body += f'<tr><th scope="row">{safe(name)}</th>'
        if matrix.sums:
            body += f"<td>{sum(values):,}</td>"
        for value in values:
            body += _shaded_cell(value or 0, largest)
        body += "</tr>"
    foot = ""
    if matrix.sums:
        cells = "".join(f"<td>{count:,}</td>" for count in [sum(matrix.sums), *matrix.sums])
        foot = f'<tfoot><tr><th scope="row">all</th>{cells}</tr></tfoot>'
    table = f"<thead{turned}><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}"
    return f'<div class="scroll"><table class="map">{table}</table></div>'


def _shaded_cell(value: float, largest: float) -> str:
    """Return one cell as HTML, shaded by the square root of its share of `largest`, so that small values are seen."""
    if not value:
        return "<td></td>"
    text = f"{value:.2f}"
    if isinstance(value, int):
        text = f"{value:,}"
    share = (value / largest) ** 0.5
    return f'<td style="--s:{share:.2f}">{text}</td>'


def render(section: Section) -> str:
    """Return a section as HTML; "" if it has no content."""
    if not section:
        return ""
    content = "".join(_render_part(part) for part in section.parts if part)
    if section.folded:
        return folded(section.title, content)
    return f"<section><h2>{safe(section.title)}</h2>{content}</section>"


def _render_part(part: Part) -> str:
    """Return one part of a section as HTML."""
    if isinstance(part, Grid):
        return grid_table(part.rows)
    if isinstance(part, Matrix):
        return matrix_table(part)
    if isinstance(part, Facts):
        return facts_table(part.values)
    if isinstance(part, Charts):
        return charts_at(part.place)
    if isinstance(part, Pictures):
        return "".join(picture(file) for file in part.files)
    if part.style == "list":
        items = "".join(f"<li>{safe(text)}</li>" for text in part.texts)
        return f'<ul class="warnings">{items}</ul>'
    if part.style == "code":
        return "".join(preformatted(text) for text in part.texts)
    if part.style == "heading":
        return "".join(f"<h3>{safe(text)}</h3>" for text in part.texts)
    return "".join(f'<p class="note">{safe(text)}</p>' for text in part.texts)


def _cell(text: str, attribute: str) -> str:
    """Return a table cell with the HTML `attribute`; only longer text without one may be broken into lines."""
    if not attribute and len(text) > 44:
        attribute = ' class="text"'
    return f"<td{attribute}>{safe(text)}</td>"


def picture(file: Path, caption: str = "") -> str:
    """Return the picture in a file as an HTML element that contains its bytes; `caption` default: the file's name."""
    data = base64.b64encode(file.read_bytes()).decode()
    name = safe(caption or file.stem.replace("_", " "))
    return f'<p><img alt="{name}" src="data:{PICTURE_TYPES[file.suffix]};base64,{data}"></p>'


def metrics_csv(lines: Rows) -> str:
    """Return all rounds as CSV: one row per round, nested numbers as `seconds.exchange`, clients as their mean."""
    return rows_csv([csv_row(line) for line in lines])


def csv_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of metrics.jsonl as flat columns: nested keys joined by dots, clients as their mean."""
    row: dict[str, Any] = {}
    for key, value in line.items():
        if key == "clients":
            for field in _CLIENT_FIELDS:
                numbers = [number for number in value.get(field) or [] if number is not None]
                row[f"clients.{field}.mean"] = None
                if numbers:
                    row[f"clients.{field}.mean"] = sum(numbers) / len(numbers)
        elif key == "dropped":
            row[key] = len(value)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                row[f"{key}.{name}"] = item
        else:
            row[key] = value
    return row


def rows_csv(rows: Rows) -> str:
    """Return rows as CSV, with every column that any of them has."""
    columns: dict[str, None] = {}
    for row in rows:
        columns |= dict.fromkeys(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writerow({name: csv_cell(name) for name in columns})
    for row in rows:
        writer.writerow({name: csv_cell(value) if isinstance(value, str) else value for name, value in row.items()})
    return text.getvalue()
