"""What commands share: the library loaded with a sign of life, and sentences that break between words."""

from __future__ import annotations

import gc
import shutil
import sys
import textwrap

import typer

from fedgraft.core.progress import phase


def load() -> None:
    """Import what everything that computes needs, which takes seconds, and say so.

    What imports make stays, and looking for garbage in it takes a fifth of the time, here and when the program ends.
    """
    with phase("loading the library"):
        gc.disable()
        import fedgraft.runs.loop  # noqa: F401

        gc.freeze()
        gc.enable()


def say(text: str, indent: str = "  ") -> None:
    """Print a sentence; a terminal gets lines that end between words, a pipe gets one line."""
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty() and len(text) > width:
        text = textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    typer.echo(text)
