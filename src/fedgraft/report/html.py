"""The parts of a page that needs nothing else: its frame, tables, pictures, numbers as CSV.

Numbers and texts are escaped when the page is written; the charts read a JSON block and only ever set text. The
page's own policy forbids every request and every script but the one it came with, which it names by its hash.
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

from fedgraft.core.files import plain, write_atomic
from fedgraft.report.values import NONE, show

PICTURES = {".png": "image/png", ".svg": "image/svg+xml"}
_CLIENT_FIELDS = ("loss", "norm", "drift", "cosine", "weight")
Rows = Sequence[Mapping[str, Any]]


def write_tables(path: Path | str, title: str, tables: Mapping[str, Rows], notes: Sequence[str] = ()) -> Path:
    """Write a page of tables, each a list of rows under a heading, with all numbers as one CSV file, notes first."""
    text = rows_csv([{"table": name, **row} for name, rows in tables.items() for row in rows])
    parts = [
        *(f"<p>{safe(note)}</p>" for note in notes),
        *(section(name, grid(rows)) for name, rows in tables.items()),
    ]
    return write_page(path, title, header(title, "finished", f"{Path(path).stem}.csv", text), parts, [])


def write_page(path: Path | str, title: str, top: str, parts: Sequence[str], charts: Sequence[Any]) -> Path:
    """Write a page of these parts under this header; charts are drawn where `CHARTS` (or `charts_at`) stands."""
    template = importlib.resources.files("fedgraft.report").joinpath("template.html").read_text("utf-8")
    script = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    # Inside a script element only `<` could end it; JSON can say the same character without it.
    block = json.dumps(plain({"charts": charts}), separators=(",", ":"))
    block = block.replace("<", "\\u003c").replace("&", "\\u0026")
    body = "\n".join([top, "<main>", *filter(None, parts), "</main>"])
    filled = {"POLICY": policy, "TITLE": html.escape(title), "BODY": body, "DATA": block}
    # One pass, so that a mark inside a run's own texts is not filled in again.
    page = re.sub(r"@@(POLICY|TITLE|BODY|DATA)@@", lambda mark: filled[mark[1]], template)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, [page.encode()])
    return path


def header(title: str, status: str, name: str, numbers: str, about: str = "") -> str:
    """Title, a line about it, status, the numbers as a CSV file of this name, and the choice of colours."""
    data = base64.b64encode(numbers.encode()).decode()
    link = f'<a class="button" download="{html.escape(name)}" href="data:text/csv;base64,{data}">Numbers as CSV</a>'
    badge = f'<span class="badge {safe(status.split()[0])}">{safe(status)}</span>'
    line = f'<p class="note">{safe(about)}</p>' if about else ""
    theme = '<button type="button" id="theme">Dark / light</button>'
    return f"<header><h1>{safe(title)}</h1>{badge}{link}{theme}{line}</header>"


def safe(text: object) -> str:
    """Text that is only text, with every number on the line of its unit, and two that belong together on one line."""
    together = re.sub(r"(?<=[\d%]) (to|of) (?=\d)", r"&nbsp;\1&nbsp;", html.escape(str(text)))
    return re.sub(r"(?<=\d) (?=(%|[kMG]?B|s|min|h)(?!\w))", "&nbsp;", together)


def charts_at(place: str) -> str:
    """Where the charts of this name are drawn."""
    return f'<div class="charts" id="{place}"></div>'


CHARTS = charts_at("charts")


def section(title: str, content: str) -> str:
    """A titled part of the page; without content there is none."""
    return f"<section><h2>{safe(title)}</h2>{content}</section>" if content else ""


def folded(title: str, content: str) -> str:
    """A part that opens when asked for."""
    return f"<details><summary>{safe(title)}</summary>{content}</details>" if content else ""


def preformatted(text: str) -> str:
    """Text as it is written, such as a config."""
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def notices(texts: Sequence[str]) -> str:
    """What a reader must know first."""
    return "".join(f'<p class="notice">{safe(text)}</p>' for text in texts)


def facts(values: Mapping[str, str]) -> str:
    """A table of two columns: what, and its value."""
    rows = (f'<tr><th scope="row">{safe(k)}</th>{_cell(v, "")}</tr>' for k, v in values.items())
    return f'<div class="scroll"><table class="facts">{"".join(rows)}</table></div>' if values else ""


def grid(rows: Rows) -> str:
    """A table with the first row's keys as its head; columns of numbers stand to the right, but for the first."""
    if not rows:
        return ""
    named = list(rows[0])[1:]  # what the first column has are names, even where they are numbers
    numeric = {key for key in named if not any(isinstance(row[key], str) and _words(row[key]) for row in rows)}
    mark = {key: ' class="number"' if key in numeric else "" for key in rows[0]}
    head = "".join(f'<th scope="col"{mark[key]}>{safe(key)}</th>' for key in rows[0])
    lines = ("".join(_cell(show(key, v), mark[key]) for key, v in row.items()) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _words(text: str) -> bool:
    """Whether a text is more than a number already written down, or none."""
    return text != NONE and not re.fullmatch(r"-?\d+(\.\d*)?(e[+-]\d+)?", text)


def _cell(text: str, mark: str) -> str:
    """A cell; only longer text may be broken into lines."""
    long = ' class="text"' if len(text) > 44 else ""
    return f"<td{mark or long}>{safe(text)}</td>"


def picture(file: Path, caption: str = "") -> str:
    """A file as part of the page."""
    data = base64.b64encode(file.read_bytes()).decode()
    name = safe(caption or file.stem.replace("_", " "))
    return f'<p><img alt="{name}" src="data:{PICTURES[file.suffix]};base64,{data}"></p>'


def metrics_csv(lines: Rows) -> str:
    """All rounds as CSV: one row per round, nested numbers as `seconds.exchange`, clients as their mean."""
    return rows_csv([csv_row(line) for line in lines])


def csv_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """One round as flat columns."""
    row: dict[str, Any] = {}
    for key, value in line.items():
        if key == "clients":
            for field in _CLIENT_FIELDS:
                known = [v for v in value.get(field) or [] if v is not None]
                row[f"clients.{field}.mean"] = sum(known) / len(known) if known else None
        elif key == "dropped":
            row[key] = len(value)
        elif isinstance(value, Mapping):
            row |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            row[key] = value
    return row


def flatten(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested mapping as `outer.inner` keys; lists stay as they are."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{above}.{key}" if above else str(key)
        flat |= flatten(item, name) if isinstance(item, Mapping) else {name: item}
    return flat


def rows_csv(rows: Rows) -> str:
    """Rows as CSV, with every column that any of them has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
