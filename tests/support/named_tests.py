"""Tests that a page names in backticks, as FILE or FILE::TEST: which of them do not exist."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else ""


def exists(test: str) -> bool:
    """Return whether a test, or a whole file of tests, is there."""
    file, _, function = test.partition("::")
    text = _text(ROOT / file)
    return bool(text) and (not function or f"def {function}(" in text)


def missing(tests: Iterable[str]) -> list[str]:
    """Return those of the tests that do not exist."""
    return [test for test in tests if not exists(test)]
