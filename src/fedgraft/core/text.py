"""Text that came from outside, made harmless for where it is shown: a terminal, Markdown, a table of CSV.

HTML is escaped by `html.escape` where pages are made.
"""

from __future__ import annotations

import unicodedata

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_MARKDOWN = "\\`[]<|"  # code, links, pictures, HTML, the next cell; emphasis does no harm
_HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")  # controls, directions of writing, surrogates, private use, line ends


def printable(text: str) -> str:
    """Return a text without what moves a cursor, starts a line, hides, or turns the direction of writing."""
    return "".join(character if unicodedata.category(character) not in _HIDDEN else " " for character in text)


def markdown_cell(text: str) -> str:
    """Return a text as a cell of a Markdown table shows it, word for word."""
    shown = printable(text)
    for character in _MARKDOWN:
        shown = shown.replace(character, f"\\{character}")
    return shown


def csv_cell(text: str) -> str:
    """Return a text so that no table program takes it for a formula."""
    shown = printable(text)
    if text.startswith(_FORMULA) or shown.startswith(_FORMULA):
        return f"'{shown}"
    return shown
