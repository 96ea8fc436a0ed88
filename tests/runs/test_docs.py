"""The README and the guide are true: every command and Python block that can run offline is run, in order.

A page is followed in one folder, as a reader would: a TOML block becomes the file that the text before it names, `...`
in a run folder's name is filled in. To keep it quick, commands that train get `SMALL` behind their own words, and
Python blocks the tiny network; what they say is otherwise taken as it stands.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.tiny import without_pictures

with warnings.catch_warnings():  # typer's own import of click warns with some pairs of versions
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedgraft.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
NOT_RUN = {
    "make": "sets up an environment, or is the gate that this test is part of",
    "pip": "installs packages",
    "eval": "is for a shell's own start file",
    "fedgraft deploy local": "starts real Flower processes: tests/deploy/test_deploy_local.py runs it",
    "python -m reproduction": "belongs to no installed package: tests/reproduction runs it",
    "fedgraft run privacy.dp.epsilon": "looks for its noise for a minute; tests/unit/test_protected_rounds.py runs one",
    "fedgraft watch": "serves a page until Ctrl-C: tests/studio looks at it",
    "fedgraft studio": "serves a page until Ctrl-C: tests/studio looks at it",
    "fedgraft attack": "runs a table of attacks: tests/runs/test_attack.py",
    "examples/": "is one of the examples, which tests/runs/test_examples.py runs as they are",
}
"""What is not run, by how it begins, and why. A command that begins in no such way is run."""
TRAINING = ("run", "centralized", "find-lr", "sweep", "partition")
SMALL = [
    "model.name=tiny",
    "model.head=random",
    "data.image_size=16",
    "data.limit=150",
    "partition.clients=3",
    "rounds.total=2",
    "local.steps=8",
    "local.batch_size=16",
    "centralized.epochs=1",
    "workers=1",
]


@dataclass
class Reader:
    """Follows a page in the present folder and notes what it did not run."""

    page: str
    ran: int = 0
    skipped: list[str] = field(default_factory=list)

    def follow(self) -> None:
        """Every fenced block, in order."""
        end = 0
        for block in re.finditer(r"^```(\w*)\n(.*?)^```", self.page, re.MULTILINE | re.DOTALL):
            before, language, text = self.page[end : block.start()], block[1], block[2]
            end = block.end()
            if language == "toml":
                names = re.findall(r"`([\w-]+\.toml)`", before)
                assert names, f"no file is named before the block {text[:60]!r}"
                Path(names[-1]).write_text(text)
            elif language == "python":
                self._python(text)
            else:
                assert language in ("", "sh", "bash", "console"), f"a block of {language!r} is neither run nor listed"
                for line in text.splitlines():
                    self._shell(line.partition(" #")[0].strip())

    def _python(self, text: str) -> None:
        examples = [path.read_text() for path in (ROOT / "examples").glob("*.py")]
        last = [line.strip() for line in text.splitlines() if line.strip()][-1]
        if any(last in example for example in examples):
            self.skipped.append("examples/")
            return
        small = text.replace('"nano"', '"tiny"')
        shutil.rmtree("adapted", ignore_errors=True)  # a new folder each time: nothing is overwritten
        exec(compile(small, "the page", "exec"), {"__name__": "__page__"})
        self.ran += 1

    def _shell(self, line: str) -> None:
        if not line:
            return
        for start in NOT_RUN:
            if line.startswith(start):
                self.skipped.append(start)
                return
        words = [word for word_on_page in shlex.split(line) for word in filled_in(word_on_page)]
        assert words[0] == "fedgraft", f"nobody knows how to run {line!r}"
        if words[1] in TRAINING:
            words += SMALL
        command(words)
        self.ran += 1


def filled_in(word: str) -> list[str]:
    """A run folder's name with `...` or a star as the folders there are; a run nobody made yet is made."""
    if not re.fullmatch(r"runs/[\w-]+-(\.\.\.|\*)", word):
        return [word]
    star = word.replace("...", "*")
    if not list(Path().glob(star)):
        command(["fedgraft", "run", f"name={star.removeprefix('runs/').removesuffix('-*')}", "seed=5", *SMALL])
    matches = sorted(map(str, Path().glob(star)))
    return matches if word.endswith("*") else matches[:1]


def command(words: list[str]) -> None:
    """Call the command line in this process; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            cli.main()
            code: object = 0
        except SystemExit as stop:
            code = stop.code or 0
    assert code == 0, f"{' '.join(words)} ended with {code}"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with images of two owners' kind, and no way to any hub."""
    stream = np.random.default_rng(0)
    for folder in ("xrays", "my_images"):
        for kind in map(str, range(10)):  # named like the digits, so that a model of these knows them
            (tmp_path / folder / kind).mkdir(parents=True)
            for number in range(3):
                pixels = stream.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / folder / kind / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("COLUMNS", "200")
        patch.chdir(tmp_path)
        yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("page", "least"), [("README.md", 5), ("docs/guide.md", 10), ("docs/studio.md", 4)])
def test_what_the_page_says_can_be_done(page: str, least: int, place: Path) -> None:
    reader = Reader((ROOT / page).read_text())
    reader.follow()
    assert reader.ran >= least, "so few commands? the blocks are no longer found"


def test_a_stale_page_is_noticed(place: Path) -> None:
    for stale in (
        "```\nfedgraft run demo local.speed=3 --dry-run\n```",
        "```\nfedgraft rum demo\n```",
        "```\ngraft run demo\n```",
        "```python\nimport fedgraft\nfedgraft.ran\n```",
        "```rust\nmain()\n```",
    ):
        with pytest.raises((AssertionError, AttributeError)):
            Reader(stale).follow()


def test_what_is_not_run_is_listed_with_a_reason(place: Path) -> None:
    reader = Reader("```\nmake run   # the demo\npip install .\nfedgraft algorithms\n```")
    reader.follow()
    assert (reader.ran, reader.skipped) == (1, ["make", "pip"])
