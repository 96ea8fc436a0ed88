"""The parts of a page about runs as data: tables, matrices, facts, lists, texts, charts and pictures under headings.

A run is read once into sections (`run_view`); `html` writes them as a static page, and the studio sends them to its
page as JSON. Neither reads the run folder in a way of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgraft.core.files import json_ready
from fedgraft.report.values import NONE, format_value

Rows = Sequence[Mapping[str, Any]]
PICTURE_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}
"""Media types of pictures by suffix."""


@dataclass(frozen=True)
class Grid:
    """A table; the first row's keys are its head."""

    rows: Rows

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """Return each column with whether it holds numbers; the first has names, even if they are numbers."""
        columns: list[tuple[str, bool]] = []
        for key in self.rows[0]:
            is_number = bool(columns) and not any(_is_text(row[key]) for row in self.rows)
            columns.append((key, is_number))
        return columns

    @property
    def texts(self) -> list[list[str]]:
        """Return the cells of each row as text."""
        rows = []
        for row in self.rows:
            rows.append([format_value(key, value) for key, value in row.items()])
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the table as JSON can store it."""
        columns = [{"name": name, "number": is_number} for name, is_number in self.columns]
        return {"kind": "grid", "columns": columns, "rows": self.texts}


@dataclass(frozen=True)
class Matrix:
    """A matrix whose larger values are drawn darker."""

    rows: Mapping[str, Sequence[Any]]
    """The values by the row's name."""
    columns: Sequence[object]
    sums: Sequence[int] = ()
    """Totals of the columns; with them there is a row and a column of totals."""
    corner: str = "client"
    """What the rows are."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return the matrix as JSON can store it."""
        return {
            "kind": "matrix",
            "rows": [str(name) for name in self.rows],
            "columns": [str(name) for name in self.columns],
            "values": json_ready(list(self.rows.values())),
            "sums": list(self.sums),
            "corner": self.corner,
        }


@dataclass(frozen=True)
class Facts:
    """Names and their values as text."""

    values: Mapping[str, str]

    def __bool__(self) -> bool:
        return bool(self.values)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON can store them."""
        return {"kind": "facts", "rows": [[name, str(text)] for name, text in self.values.items()]}


@dataclass(frozen=True)
class Texts:
    """Sentences, as `style` says: a `list`, a `note` each, a `heading` each, or `code` as it stands."""

    texts: Sequence[str]
    style: str = "note"

    def __bool__(self) -> bool:
        return any(self.texts)

    def as_json(self) -> dict[str, Any]:
        """Return the texts as JSON can store them."""
        return {"kind": self.style, "texts": [str(text) for text in self.texts]}


@dataclass(frozen=True)
class Charts:
    """Charts of curves, bars or points, as `page/charts.js` draws them."""

    charts: Sequence[Mapping[str, Any]]
    place: str = "charts"
    """Names the element of a static page in which they are drawn."""

    def __bool__(self) -> bool:
        return bool(self.charts)

    def as_json(self) -> dict[str, Any]:
        """Return the charts as JSON can store them."""
        return {"kind": "charts", "charts": json_ready(list(self.charts))}


@dataclass(frozen=True)
class Pictures:
    """Image files, each with its file's name as a caption."""

    files: Sequence[Path]
    folder: Path
    """The folder below which the files are; pages name them by their path below it."""

    def __bool__(self) -> bool:
        return bool(self.files)

    def as_json(self) -> dict[str, Any]:
        """Return the paths below the folder as JSON can store them."""
        pictures = []
        for file in self.files:
            path = file.relative_to(self.folder).as_posix()
            pictures.append({"path": path, "caption": file.stem.replace("_", " ")})
        return {"kind": "pictures", "pictures": pictures}


Part = Grid | Matrix | Facts | Texts | Charts | Pictures


@dataclass(frozen=True)
class Section:
    """Parts under one heading."""

    title: str
    parts: Sequence[Part]
    folded: bool = False
    """It is closed until the reader opens it."""
    tab: str = "overview"
    """The view of the studio that shows it."""

    def __bool__(self) -> bool:
        return any(self.parts)

    def as_json(self) -> dict[str, Any]:
        """Return the section without its empty parts as JSON can store it."""
        parts = [part.as_json() for part in self.parts if part]
        return {"title": self.title, "parts": parts, "folded": self.folded, "tab": self.tab}


def _is_text(value: object) -> bool:
    """Return whether a value is a text and not a formatted number or a dash."""
    if not isinstance(value, str) or value == NONE:
        return False
    return re.fullmatch(r"-?\d+(\.\d*)?(e[+-]\d+)?", value) is None
