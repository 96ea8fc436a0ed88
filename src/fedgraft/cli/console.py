"""Helpers that all commands share: importing the runtime with a progress line, and printing wrapped sentences."""

from __future__ import annotations

import gc
import shutil
import sys
import textwrap

import typer

from fedgraft.core.progress import phase
from fedgraft.core.text import printable


def import_runtime() -> None:
    """Import torch and everything that runs need, which takes seconds, and show that as a phase.

    Imported objects live until the end, and scanning them for garbage takes a fifth of the time, here and at exit: they
    are frozen out of the garbage collector.
    """
    with phase("loading the library"):
        gc.disable()
        import fedgraft.runs.loop  # noqa: F401

        gc.freeze()
        gc.enable()


def print_line(*cells: object, error: bool = False) -> None:
    """Print one line as it stands, never wrapped, so that commands in it can be copied; on stderr if `error`.

    Several cells are parted by tabs. What would move the cursor, begin a line or hide text is left out: it may come
    from outside.
    """
    typer.echo("\t".join(printable(str(cell)) for cell in cells), err=error)


def print_lines(text: str, error: bool = False) -> None:
    """Print a text of several lines; what came from outside is not in it, or is made printable before."""
    for line in text.split("\n"):
        print_line(line, error=error)


def echo(text: str, indent: str = "  ") -> None:
    """Print a sentence: wrapped between words on a terminal, further lines after `indent`; one line in a pipe.

    What would move the cursor or hide text is left out: a sentence may quote what came from outside.
    """
    text = printable(text)
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and len(text) > width:
        text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    print_lines(text)
