"""pytest on chosen tests with one mutant planted, in a fork of a process that has imported everything but fedgraft.

The mutant lives in a tree of hard links to the package, so the tree is never edited and processes that tests start see
it too. Processor time and memory of a child are limited: a mutant that loops or grows without end is ended.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.mutants.__main__ import OURS, QUIET, loaded
from tests.mutants.systematic.mutate import Mutant

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "fedgraft"
GIGABYTE = 2**30


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `killed`, `timeout` or `survived`, the test that noticed, and after how many seconds."""

    status: str
    by: str
    seconds: float


class _FirstFailure:
    """Pytest plugin: write the first test that fails into a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.target.exists():
            self.target.write_text(report.nodeid)


def warm_up(files: Sequence[str]) -> None:
    """Import what the test files import, once for all children, and forget what is ours."""
    sys.dont_write_bytecode = False  # children read the bytecode of tests and package
    null = os.open(os.devnull, os.O_WRONLY)
    stdout = os.dup(1)
    os.dup2(null, 1)
    code = pytest.main(["--collect-only", *QUIET, *files])
    sys.stdout.flush()
    os.dup2(stdout, 1)
    if code:
        sys.exit(f"the tests cannot be collected: run pytest --collect-only {' '.join(files[:3])} ...")
    for module in loaded(*OURS):
        if not module.__name__.startswith("tests.mutants"):
            sys.modules.pop(module.__name__, None)
    compileall.compile_dir(PACKAGE, quiet=2)
    gc.collect()
    gc.freeze()  # pytest collects garbage at the end of a session: not the heap of all imports in every child


def attempt(tests: Sequence[str], expected: float, mutant: Mutant | None = None) -> Verdict:
    """Run the tests, which take `expected` seconds without a mutant, until one fails; return what became of them."""
    began = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="mutant-"))
    try:
        source = ROOT / "src" if mutant is None else _plant(mutant, scratch / "src")
        child = os.fork()
        if not child:
            code = 98  # whatever happens, the child must not go on as a second parent
            try:
                code = _child(tests, source, scratch, expected)
            finally:
                os._exit(code)
        status = _wait(child, 120 + 8 * expected)
        failure = scratch / "failed"
        by = failure.read_text() if failure.exists() else ""
        output = (scratch / "output").read_text(errors="replace")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return _verdict(status, by, output, time.perf_counter() - began)


def _verdict(status: int | None, by: str, output: str, seconds: float) -> Verdict:
    """Judge how a child ended: pytest's exit code, or the signal that ended it."""
    if status in (None, -signal.SIGXCPU, -signal.SIGKILL):
        return Verdict("timeout", by or "limit of time or memory", seconds)
    if status == 0:
        return Verdict("survived", "", seconds)
    if status == 1:
        return Verdict("killed", by, seconds)
    if status in (2, 3, 4) or status < 0:  # the package cannot be imported, the tests' cases differ, or Python crashed
        return Verdict("killed", by or "collection", seconds)
    sys.exit(f"a trial could not run (exit {status}):\n{output[-2000:]}")


def _wait(child: int, seconds: float) -> int | None:
    """Wait for a child and end what it left behind; None if it has to be ended itself."""
    end = time.perf_counter() + seconds
    ended, status = 0, 0
    while not ended and time.perf_counter() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def _child(tests: Sequence[str], source: Path, scratch: Path, expected: float) -> int:
    """Run pytest with the other package first on the path, everything it prints into a file."""
    os.setsid()
    output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    processor = int(20 + 4 * expected)
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor + 5))
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + 6 * GIGABYTE, virtual + 6 * GIGABYTE))
    os.chdir(ROOT)
    paths = [str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path and path != str(ROOT / "src"))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(scratch / "hypothesis")
    sys.path.insert(0, str(source))
    words = ["-x", "-q", "--tb=line", f"--basetemp={scratch / 'pytest'}", "-p", "no:xdist"]
    code = int(pytest.main([*words, *QUIET, *tests], plugins=[_FirstFailure(scratch / "failed")]))
    for module in loaded("fedgraft"):
        if not Path(module.__file__ or source).is_relative_to(source):
            print(f"{module} is not the package in {source}")
            return 99
    sys.stdout.flush()
    return code


def _plant(mutant: Mutant, source: Path) -> Path:
    """Return a copy of the package, made of links, with the mutant in it; bytecode follows the files' times."""
    target = source / "fedgraft" / mutant.file
    try:
        shutil.copytree(PACKAGE, source / "fedgraft", copy_function=os.link)
    except (OSError, shutil.Error):  # another file system
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(PACKAGE, source / "fedgraft")
    mutated = mutant.apply((PACKAGE / mutant.file).read_text())
    target.unlink()
    target.write_text(mutated)
    for stale in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        stale.unlink()
    return source
