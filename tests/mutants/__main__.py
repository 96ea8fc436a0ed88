"""Small bugs planted one at a time, each against the tests that should notice it: `make mutants`, not part of the gate.

`mutants.toml` says for each mutant where it is, what is replaced by what, which tests should notice, and what it means.
A mutant lives in a copy of `src`, so the tree is never edited. Each is tried in a fork of a process that has imported
what the tests need but nothing of ours. What was noticed is remembered by the bytes that decided it (the mutant, its
file, its tests), so a run that was stopped goes on, and a change brings back what it touches.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "fedgraft"
KEPT = ROOT / "runs" / "mutants.json"
PAGE = ROOT / "docs" / "mutants.md"
SYSTEMATIC = "## Systematic sample"
"""The page's last section, which `python -m tests.mutants.systematic report` writes."""
QUIET = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Plugins are imported already when they would be rewritten."""
OURS = ("fedgraft", "tests", "benchmarks", "reproduction", "conftest")


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    meaning: str

    @property
    def mutated(self) -> str:
        """The file with the bug in it; the snippet must be there exactly once."""
        text = (PACKAGE / self.file).read_text()
        if text.count(self.old) != 1 or self.old == self.new:
            sys.exit(f"mutant {self.name}: its snippet occurs {text.count(self.old)} times in {self.file}, not once.")
        return text.replace(self.old, self.new)

    @property
    def identity(self) -> str:
        """What decides the outcome: the mutated file and the tests' own files."""
        files = sorted({test.partition("::")[0] for test in self.tests})
        parts = [self.mutated, *self.tests, *((ROOT / file).read_text() for file in files)]
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: which test noticed (empty: none did), and after how many seconds."""

    noticed: str
    seconds: float


def table() -> list[Mutant]:
    """All mutants, each of which can be planted and compiled."""
    rows = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]
    found = [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]
    if len({m.name for m in found}) < len(found):
        sys.exit("two mutants have the same name.")
    for mutant in found:
        compile(mutant.mutated, mutant.file, "exec")
    return found


def loaded(*packages: str) -> list[ModuleType]:
    """What is imported of some packages."""
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in packages]


def warm_up(mutants: Sequence[Mutant]) -> None:
    """Import what the tests import, once for all children, and forget what is ours, so that each imports its own."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--collect-only", *QUIET, *tests])
    if code:
        sys.exit(f"the tests cannot be collected:\n{said.getvalue()[-3000:]}")
    for module in loaded(*OURS):
        del sys.modules[module.__name__]
    assert not loaded(*OURS)
    gc.collect()
    gc.freeze()  # pytest collects garbage when a session ends: not the heap of all imports in every child


class Trial:
    """pytest on some tests with the package of another folder, in a child of this process, which has torch loaded."""

    def __init__(self, tests: Sequence[str], mutant: Mutant | None = None) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
        source = ROOT / "src" if mutant is None else _copy(mutant, self.scratch / "src")
        self.mutant, self.began = mutant, time.perf_counter()
        self.process = os.fork()
        if not self.process:
            code = 98  # whatever happens, the child must not go on as a second parent
            try:
                code = _child(tests, source, self.scratch)
            finally:
                os._exit(code)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.perf_counter() - self.began

    def ended(self, timeout: float) -> tuple[int | None, str] | None:
        """pytest's exit code (None: out of time) and what it said; nothing while it runs."""
        gone, status = os.waitpid(self.process, os.WNOHANG)
        if not gone and self.seconds < timeout:
            return None
        with contextlib.suppress(ProcessLookupError):  # also what the tests may have left running
            os.killpg(self.process, signal.SIGKILL)
        if not gone:
            os.waitpid(self.process, 0)
        said = (self.scratch / "said").read_text(errors="replace")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return os.waitstatus_to_exitcode(status) if gone else None, said


def _child(tests: Sequence[str], source: Path, scratch: Path) -> int:
    """What the child does: pytest, everything it says into a file, the other package first on the path."""
    os.setsid()
    said = os.open(scratch / "said", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(source), "HYPOTHESIS_STORAGE_DIRECTORY": str(scratch / "hypothesis")}
    sys.path.insert(0, str(source))
    words = ["-x", "-q", "--tb=line", "-rfE", f"--basetemp={scratch / 'pytest'}"]
    code = int(pytest.main([*words, *QUIET, *tests]))
    if strange := [one for one in loaded("fedgraft") if not Path(one.__file__ or source).is_relative_to(source)]:
        print(f"{strange} is not the package in {source}")
        code = 99
    sys.stdout.flush()
    return code


def _copy(mutant: Mutant, source: Path) -> Path:
    """A copy of the package with the bug in it, with the bytecode, which follows the files' times."""
    target = source / "fedgraft" / mutant.file
    shutil.copytree(PACKAGE, source / "fedgraft")
    target.write_text(mutant.mutated)
    for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        stale.unlink()
    return source


def judged(trial: Trial, timeout: float) -> Outcome | None:
    """What became of the mutant of this trial; nothing while it runs."""
    ended, seconds, mutant = trial.ended(timeout), trial.seconds, trial.mutant
    if ended is None or mutant is None:
        return None
    code, said = ended
    if code is None:
        return Outcome(f"a hang, ended after {timeout:.0f} s", seconds)
    if code not in (0, 1):
        sys.exit(f"mutant {mutant.name}: its tests could not run (pytest ended with {code}).\n{said[-2000:]}")
    first = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[|\s|$)", said, re.MULTILINE)
    return Outcome(first[1] if code and first else "", seconds)


def check_unmutated(mutants: Sequence[Mutant]) -> None:
    """The named tests must pass on the package as it is; else a failure would say nothing."""
    trial = Trial(sorted({test for mutant in mutants for test in mutant.tests}))
    while (ended := trial.ended(3600)) is None:
        time.sleep(0.2)
    if ended[0] != 0:
        sys.exit(f"the tests do not pass without any mutant, so nothing can be said:\n{ended[1][-3000:]}")


def page(mutants: Sequence[Mutant], outcomes: dict[str, Outcome]) -> str:
    """The table of all mutants as a page."""
    killed = sum(bool(outcomes[m.name].noticed) for m in mutants)
    lines = [
        "# Planted bugs and who notices them",
        "",
        f"{killed} of {len(mutants)} noticed. Made by `make mutants`: each bug is planted alone in a copy of the",
        "package and the tests that should notice are run until one fails.",
        "",
        "| mutant | where | what it means | noticed by | seconds |",
        "|---|---|---|---|---|",
    ]
    for m in mutants:
        found = outcomes[m.name]
        noticed = f"`{found.noticed.removeprefix('tests/')}`" if found.noticed else "**nobody**"
        lines.append(f"| {m.name} | `{m.file}` | {m.meaning} | {noticed} | {found.seconds:.0f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Plant the mutants that are not known to be noticed yet, or those named, and write the page when all are known."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose name begins with one of these, known or not")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="how many at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a mutant counts as hanging")
    parser.add_argument("--again", action="store_true", help="forget what is known")
    parser.add_argument("--unchecked", action="store_true", help="do not first run the tests without a mutant")
    asked = parser.parse_args()
    mutants = table()
    kept: dict[str, list] = json.loads(KEPT.read_text()) if KEPT.exists() and not asked.again else {}
    wanted = [m for m in mutants if m.name.startswith(tuple(asked.names))] if asked.names else mutants
    todo = wanted if asked.names else [m for m in wanted if not kept.get(m.identity, [""])[0]]
    print(f"{len(mutants)} mutants, {len(todo)} to plant", flush=True)
    if todo:
        warm_up(todo)
    if todo and not asked.unchecked:
        check_unmutated(todo)
    KEPT.parent.mkdir(exist_ok=True)

    running: list[Trial] = []
    waiting = list(todo)
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            mutant = waiting.pop(0)
            running.append(Trial(mutant.tests, mutant))
        time.sleep(0.1)
        for trial in list(running):
            if (found := judged(trial, asked.timeout)) is not None and trial.mutant is not None:
                running.remove(trial)
                kept[trial.mutant.identity] = [found.noticed, found.seconds]
                KEPT.write_text(json.dumps(kept))
                print(f"{trial.mutant.name:30} {found.noticed or 'SURVIVED':100} {found.seconds:6.1f} s", flush=True)
    known = {m.name: Outcome(*kept[m.identity]) for m in mutants if m.identity in kept}
    if len(known) == len(mutants):
        systematic = PAGE.read_text().partition(f"\n{SYSTEMATIC}")
        PAGE.write_text("".join([page(mutants, known), *systematic[1:]]))
    alive = [m.name for m in wanted if not known[m.name].noticed]
    sys.exit(f"survived: {', '.join(alive)}" if alive else 0)


if __name__ == "__main__":
    main()
