"""The pages that list what the five reports ask for: each row names how to ask for it, and a test that runs it.

Options, paths and source files of all pages are held by `tests/runs/test_examples.py`. Here: the tests exist, words of
the form `key=value` are a config that is accepted, and commands parse.
"""

from __future__ import annotations

import re
import warnings

import pytest
from reproduction.preset import names
from reproduction.question import QUESTIONS
from tests.support.named_tests import ROOT, missing

from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedgraft.cli import main as cli

PAGES = {"checklist.md": 229, "atoms.md": 148}
"""The pages, and how many rows each has at least."""
ASSIGNMENT = r"[a-z_]+(?:\.[a-z_0-9]+)*=\S+"
OWN_FILES = ("FILE", "FOLDER", "RUN", "DATA", ".pth")
"""Words for what only a reader has; what they belong to is not opened here."""


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the page's tables, headings left out."""
    found = []
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith(("| item ", "| what ")):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def spans(cell: str) -> list[str]:
    """Return what stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def refused(words: list[str]) -> list[str]:
    """Return why these words are no config whose algorithm can be built; nothing if they are."""
    try:
        config = load(None, words)
        if not config.centralized.active:
            build_algorithm(config)
    except FedgraftError as error:
        return [f"{' '.join(words)}: {error}"]
    return []


def strange_commands(text: str) -> list[str]:
    """Return the commands and options in backticks that nobody could type."""
    app = cli.typer.main.get_command(cli.app)
    strange = []
    for span in (span for cells in rows(text) for cell in cells for span in spans(cell)):
        words = span.split()
        if words[0] == "fedgraft":
            command = getattr(app, "commands", {}).get(words[1] if len(words) > 1 else "")
            group = getattr(command, "commands", None)
            if command is not None and group and len(words) > 2:
                command = group.get(words[2])
            if command is None:
                strange.append(span)
                continue
            known = {option for parameter in command.params for option in parameter.opts}
            strange += [span for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        elif words[0] == "make":
            named = re.findall(r"NAME=([\w-]+)", span)
            strange += [span for name in named if name not in {*names(), *QUESTIONS}]
        elif all(re.fullmatch(ASSIGNMENT, word) for word in words) and not any(own in span for own in OWN_FILES):
            strange += refused(words)
    return strange


@pytest.mark.parametrize("page", PAGES)
def test_every_row_says_how_and_names_tests_that_exist(page: str) -> None:
    found = rows((ROOT / "docs" / page).read_text("utf-8"))
    assert len(found) >= PAGES[page]
    for cells in found:
        assert all(cells), cells
        named = spans(cells[-1])
        assert named and all(name.startswith("tests/") for name in named), cells
        assert not missing(named), cells
        how = " ".join(cells[1:-1])
        assert spans(how) or "not there" in how, f"neither an option nor a command, nor a reason: {cells}"
        assert "not yet" not in how.lower(), cells


@pytest.mark.parametrize("page", PAGES)
def test_words_are_configs_and_commands_can_be_typed(page: str) -> None:
    assert not strange_commands((ROOT / "docs" / page).read_text("utf-8"))


def test_what_does_not_exist_is_noticed() -> None:
    assert missing(["tests/laws/test_listed_items.py::test_nothing", "tests/none.py", "tests/laws"]) == [
        "tests/laws/test_listed_items.py::test_nothing",
        "tests/none.py",
        "tests/laws",
    ]
    wrong = "\n".join(
        [
            "| what | how |",
            "| a | `rounds.total=many` |",
            "| b | `fedgraft swim` `fedgraft run --deep` |",
            "| c | `make reproduce NAME=q9` |",
        ]
    )
    assert len(strange_commands(wrong)) == 4


def test_the_pages_point_into_no_report_that_a_reader_does_not_have() -> None:
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text("utf-8")
        assert not re.search(r"\b[Dd]ocument 00\d|\bseed(s)? ?§|\bT\d\d\b|shared/", text), page
