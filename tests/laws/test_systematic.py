"""Sixty mutants made by rule are noticed, each by the test known to notice it; and mutants are made as stated."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mutants.systematic.mutate import mutants_of
from tests.mutants.systematic.report import equivalents
from tests.mutants.systematic.sample import PACKAGE, rank, shares

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '''"""Say 1 + 1."""

def mean(values: list[float], limit: int = 3) -> float | None:
    """Return 2 * 2."""
    if not values or len(values) < limit:
        raise ValueError(f"{len(values) + 1} values, not {1 + 1}")
    total = sum(sorted(values)[1:])
    total /= len(values) - 1
    return total


def __repr__() -> str:
    return str(1 + 1)
'''


def write(folder: Path, source: str) -> Path:
    path = folder / "code.py"
    path.write_text(source)
    return path


def test_each_mutant_is_one_change_that_compiles(tmp_path: Path) -> None:
    mutants = mutants_of(write(tmp_path, SOURCE), tmp_path)
    changed = [mutant.apply(SOURCE) for mutant in mutants]
    assert len(set(changed)) == len(changed) and SOURCE not in changed
    for text in changed:
        ast.parse(text)
    operators = {mutant.operator for mutant in mutants}
    assert operators >= {"constant", "boolean", "compare", "drop-raise", "sort", "slice", "drop-assignment"}
    assert operators >= {"arithmetic", "return-none", "negate-if"}
    for mutant in mutants:  # neither docstrings nor texts of errors nor what makes texts
        assert mutant.line not in (1, 4, 13) and (mutant.line != 6 or mutant.operator == "drop-raise")


def test_an_edit_elsewhere_leaves_ids_and_draws_alone(tmp_path: Path) -> None:
    before = mutants_of(write(tmp_path, SOURCE), tmp_path)
    after = mutants_of(write(tmp_path, f"ZERO = 0\n\n{SOURCE}"), tmp_path)
    ids = {mutant.id for mutant in before}
    assert len(ids) == len(before) and ids < {mutant.id for mutant in after}
    assert [rank(0, mutant) for mutant in before] == [rank(0, mutant) for mutant in after if mutant.id in ids]


def test_shares_add_up_and_follow_the_weights() -> None:
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(1500, [5, 0, 10]) == [500, 0, 1000]


def test_equivalents_have_a_reason_and_a_file() -> None:
    for identity, reason in equivalents().items():
        assert (PACKAGE / identity.partition(":")[0]).is_file() and reason.strip(), identity


@pytest.mark.slow
def test_the_gates_mutants_are_noticed() -> None:
    command = [sys.executable, "-m", "tests.mutants.systematic", "gate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
