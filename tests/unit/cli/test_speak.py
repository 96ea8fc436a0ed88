"""Sentences on a terminal break between words; in a pipe they stay one line."""

from __future__ import annotations

import os
import sys
import time

import pytest
from rich.console import Console

from fedgraft.cli import main as cli
from fedgraft.cli.console import echo
from fedgraft.core.progress import Phase

TEXT = "bytes: 5.7 kB down and 5.7 kB up per client and round; 454.7 kB down and 458.6 kB up in all, of runs/a-name"


@pytest.mark.parametrize("terminal", [True, False])
def test_words_stay_whole(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *given, **named: os.terminal_size((40, 20)))
    echo(TEXT)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(line.strip() for line in lines) == TEXT  # nothing is broken at a hyphen or within a word
    assert len(lines) == (3 if terminal else 1) and max(map(len, lines)) <= (40 if terminal else len(TEXT))


@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_piped_is_the_answer_and_no_progress(
    quiet: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`fedgraft evaluate RUN --json | jq` must not meet `loading the library: 3 s so far`."""
    console = Console(file=sys.stdout, force_terminal=False, quiet=quiet)
    monkeypatch.setattr("rich.get_console", lambda: console)
    monkeypatch.setattr(cli, "_display", None)
    cli._screen([Phase("loading the library", began=time.monotonic() - 3)])
    said = capfd.readouterr()
    assert said.out == "" and ("loading the library: 3 s so far" in said.err) is not quiet
