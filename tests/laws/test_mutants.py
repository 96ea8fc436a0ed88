"""Every mutant of `make mutants` can still be planted: its snippet stands once in its file, and its tests exist."""

from __future__ import annotations

from pathlib import Path

from tests.mutants.__main__ import table

ROOT = Path(__file__).resolve().parents[2]


def test_mutants_can_be_planted_and_their_tests_exist() -> None:
    mutants = table()
    missing = []
    for test in sorted({test for mutant in mutants for test in mutant.tests}):
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        if f"def {name.partition('[')[0]}" not in f"def {text}":
            missing.append(test)
    assert len(mutants) >= 160 and not missing
