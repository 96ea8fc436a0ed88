"""Which tests reach which lines: a run of the tests under coverage.py, one context per test.

The map is a JSON file outside the tracked tree: `seconds` holds the duration of every test that passed, `lines` holds
for each source file and line the numbers of the tests (positions in `seconds`) that executed it. Lines executed only in
processes that tests start are not in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "src" / "fedgraft"
TESTS = ("tests/unit", "tests/laws", "tests/meaning", "tests/runs")
READS_SOURCES = ("tests/laws/test_mutants.py", "tests/laws/test_systematic.py", "tests/laws/test_architecture.py")
"""Tests of the tree's text or of the mutants themselves: they say nothing about behaviour."""


class Recorder:
    """Pytest plugin: switch coverage's context with every test, note durations and outcomes."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, source=[str(PACKAGE)], config_file=False)
        self.coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured"])
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        """Attribute everything a test does, its fixtures included, to the test."""
        self.coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up set-up, call and tear-down; a test that did not pass cannot notice anything."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)


def record(folder: Path, slow: bool, tests: Sequence[str] = ()) -> int:
    """Run the quick tests or the slow ones, or only `tests`, write a map into a folder, return pytest's exit code."""
    recorder = Recorder()
    recorder.coverage.start()
    ignored = [f"--deselect={file}" for file in READS_SOURCES]
    marks = "slow and not deploy" if slow else "not slow and not deploy"
    words = ["-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks, *ignored]
    code = int(pytest.main([*words, *(tests or TESTS)], plugins=[recorder]))
    recorder.coverage.stop()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "coverage.json"
    if tests:
        target = folder / "coverage-more.json"
    elif slow:
        target = folder / "coverage-slow.json"
    target.write_text(json.dumps(_as_json(recorder)))
    return code


def _as_json(recorder: Recorder) -> dict[str, object]:
    """Return the recorded lines with tests as numbers."""
    seconds = {test: round(spent, 4) for test, spent in recorder.seconds.items() if test not in recorder.failed}
    number = {test: position for position, test in enumerate(seconds)}
    data = recorder.coverage.get_data()
    lines: dict[str, dict[str, list[int]]] = {}
    for file in sorted(data.measured_files()):
        by_line: dict[str, list[int]] = {}
        for line, tests in sorted(data.contexts_by_lineno(file).items()):
            by_line[str(line)] = sorted(number[test] for test in tests if test in number)
        lines[str(Path(file).relative_to(PACKAGE))] = by_line
    return {"seconds": seconds, "lines": lines}


@dataclass(frozen=True)
class CoverageMap:
    """The recorded map: durations of tests, and the tests of each line."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, frozenset[str]]] = field(repr=False)

    @classmethod
    def load(cls, folder: Path) -> CoverageMap:
        """Read all maps that `record` wrote into a folder: of quick tests, of slow ones, of some more."""
        if not (folder / "coverage.json").is_file():
            sys.exit(f"{folder} has no map: run `python -m tests.mutants.systematic record` first.")
        seconds: dict[str, float] = {}
        lines: dict[str, dict[int, frozenset[str]]] = {}
        for path in sorted(folder.glob("coverage*.json")):
            stored = json.loads(path.read_text())
            names = list(stored["seconds"])
            seconds |= stored["seconds"]
            for file, by_line in stored["lines"].items():
                tests_by_line = lines.setdefault(file, {})
                for line, numbers in by_line.items():
                    tests = frozenset(names[number] for number in numbers)
                    tests_by_line[int(line)] = tests_by_line.get(int(line), frozenset()) | tests
        return cls(seconds, lines)

    def covering(self, file: str, first: int, last: int) -> frozenset[str]:
        """Return the tests that execute any of the lines `first` to `last` of a file."""
        by_line = self.lines.get(file, {})
        return frozenset().union(*(by_line.get(line, frozenset()) for line in range(first, last + 1)))

    def executed(self, file: str, first: int, last: int) -> bool:
        """Whether any of the lines `first` to `last` of a file is executed at all, by a test or by an import."""
        by_line = self.lines.get(file, {})
        return any(line in by_line for line in range(first, last + 1))

    def choose(self, tests: frozenset[str], most: int, seconds: float) -> list[str]:
        """Return at most `most` tests of `seconds` in all: one case of every function first, quickest first."""
        cases: dict[str, int] = {}
        ranked: list[tuple[int, float, str]] = []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = test.partition("[")[0]
            cases[function] = cases.get(function, 0) + 1
            ranked.append((cases[function], self.seconds[test], test))
        chosen: list[str] = []
        spent = 0.0
        for _, duration, test in sorted(ranked):
            if len(chosen) < most and (not chosen or spent + duration <= seconds):
                chosen.append(test)
                spent += duration
        return chosen
