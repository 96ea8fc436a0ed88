"""The walks in ARCHITECTURE.md are those that `fedgraft run` takes: the order of a run, and every file of a round."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
from tests.support import tiny
from typer.testing import CliRunner

import fedgraft
from fedgraft.cli.main import app

PAGE = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
PACKAGE = Path(fedgraft.__file__).parent


def told() -> list[str]:
    """The files of the walk, as the page lists them."""
    block = re.search(r"## One run, walked\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    return [line.split()[0] for line in block[1].splitlines()]


class Walk:
    """The package's files in the order in which a function of theirs is first called, anew from each `run_round`."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self.round = False
        self.inside = False
        """Whether `run_round` is running."""
        self.in_round: set[str] = set()
        """Every file that a function of `run_round` enters."""
        self.names: dict[CodeType, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "return" and self.names.get(code) == "server/round.py" and code.co_name == "run_round":
            self.inside = False
        if event != "call":
            return
        if code not in self.names:
            path = Path(code.co_filename)
            inside = code.co_name != "<module>" and path.is_relative_to(PACKAGE)
            self.names[code] = path.relative_to(PACKAGE).as_posix() if inside else ""
        name = self.names[code]
        if name == "server/round.py" and code.co_name == "run_round":
            self.round = True
            self.inside = True
        if name and self.inside:
            self.in_round.add(name)
        files = self.after if self.round else self.before
        if name and name not in files:
            files.append(name)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """One run on the command line, one worker, watched; the same once before, because watching makes imports slow."""
    folder, found = tmp_path_factory.mktemp("walked"), Walk()
    words = [*tiny.OVERRIDES, "rounds.total=1", "rounds.checkpoint_every=1", "engine=reference", "-q", "-o"]
    with tiny.without_pictures():
        CliRunner().invoke(app, ["run", *words, str(folder / "first")])
        sys.setprofile(found)
        try:
            done = CliRunner().invoke(app, ["run", *words, str(folder / "second")])
        finally:
            sys.setprofile(None)
    assert done.exit_code == 0, done.output
    assert list((folder / "second" / "checkpoints").glob("round-00000001-*"))
    return found


def test_the_walk_names_each_file_once() -> None:
    assert len(told()) == len(set(told()))
    assert all((PACKAGE / name).is_file() for name in told())
    assert told()[0] == "cli/main.py" and told()[-1] == "runs/checkpoint.py"


@pytest.mark.slow
def test_the_files_are_visited_in_the_order_told(walk: Walk) -> None:
    files = told()
    cut = files.index("server/round.py")
    assert [name for name in walk.before if name in files[:cut]] == files[:cut]
    assert [name for name in walk.after if name in files[cut:]] == files[cut:]


def test_a_page_in_another_order_would_be_noticed(walk: Walk) -> None:
    swapped = ["server/round.py", "server/collect.py", "server/sample.py"]
    assert [name for name in walk.after if name in swapped] != swapped


def files_of_a_round() -> list[str]:
    """The files of the table of one round."""
    section = PAGE.partition("## One round, every file")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_every_file_that_a_round_enters_is_in_the_table(walk: Walk) -> None:
    files = files_of_a_round()
    assert len(files) == len(set(files))
    assert set(files) == walk.in_round


def test_a_file_that_is_missing_in_the_table_would_be_noticed(walk: Walk) -> None:
    assert set(files_of_a_round()) - {"local/train.py"} != walk.in_round
