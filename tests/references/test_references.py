"""Every algorithm of the public API against a plain float64 loop, written from the paper's formula.

The loops (`loops/`) see of fedgraft only what a run drew at random (`draws.py`). `table.py` names the rows, and
`python -m tests.references` writes the largest difference of each into docs/references.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.references.setting import largest_difference
from tests.references.table import DEVIATIONS, ROWS, Row

from fedgraft.algorithms import ALGORITHMS, TABLE

ROOT = Path(__file__).resolve().parents[2]
LOOPS = Path(__file__).parent / "loops"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_fedgraft_is_the_plain_loop(row: Row) -> None:
    outcome, problem = row.runs
    assert largest_difference(row.view(outcome), row.view(row.reference(problem))) < row.tolerance


@pytest.mark.parametrize("row", [row for row in ROWS if row.network == "layer norm"], ids=lambda row: row.name)
def test_the_comparison_can_fail(row: Row) -> None:
    """A loop with one argument wrong differs by far more than rounding."""
    outcome, problem = row.runs
    outcome = row.view(outcome)
    wrong = row.view(row.reference(problem, row.wrong))
    shared = outcome.keys() & wrong.keys()
    assert row.wrong and shared
    difference = 0.0
    for key in shared:
        if outcome[key].keys() == wrong[key].keys():
            difference = max(difference, largest_difference({key: outcome[key]}, {key: wrong[key]}))
    assert difference > 2 * row.tolerance


def test_every_algorithm_has_a_reference() -> None:
    """An algorithm without its reference is a failing row; plugins of other packages are theirs to check."""
    compared = {row.method for row in ROWS}
    own = {name for name, make in ALGORITHMS.items() if make.__module__.startswith("fedgraft.")}
    assert {make.__name__ for make in TABLE} <= own
    assert own - compared == set()
    assert DEVIATIONS.keys() <= compared


def test_rows_have_different_names() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


def test_loops_do_not_import_fedgraft() -> None:
    """What a loop computes is its own; `draws.py` alone reads the derived streams."""
    for path in LOOPS.glob("*.py"):
        assert not re.search(r"^\s*(from|import) fedgraft", path.read_text(), re.MULTILINE), path.name
    imports = re.findall(r"^from (fedgraft\S*)", (LOOPS.parent / "draws.py").read_text(), re.MULTILINE)
    assert imports == ["fedgraft.core.rng", "fedgraft.privacy.dp"]


def test_the_documentation_names_every_row() -> None:
    """docs/references.md is written by `python -m tests.references`; here only that it names the same rows."""
    text = (ROOT / "docs" / "references.md").read_text()
    documented = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 5 and cells[0].startswith("`"):
            documented.append(f"{cells[0].strip('`')} | {cells[1]} | {cells[2]}")
    assert documented == [row.name for row in ROWS]
