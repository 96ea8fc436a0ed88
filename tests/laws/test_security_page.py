"""SECURITY.md is one page whose claims have tests: each names rows of the annex, each row tests that exist."""

from __future__ import annotations

import re

import pytest
from tests.support.named_tests import ROOT, missing

PAGE = ROOT / "SECURITY.md"
ANNEX = ROOT / "docs" / "security-annex.md"
MOST_LINES = 90
ROW = r"[A-Z]\d+"


def annex_rows(text: str) -> dict[str, list[str]]:
    """Return the tests of each row of the annex, as FILE or FILE::TEST."""
    rows = {}
    for name, tests in re.findall(rf"^\| ({ROW}) \|.*\| ([^|]*) \|$", text, re.MULTILINE):
        assert name not in rows, f"two rows are called {name}"
        rows[name] = re.findall(r"`([^`]+)`", tests)
    return rows


def missing_tests(rows: dict[str, list[str]]) -> list[str]:
    """Return the rows without tests, and the tests that do not exist."""
    without = [name for name, tests in rows.items() if not tests]
    return without + missing(test for tests in rows.values() for test in tests)


def named_rows(claim: str) -> set[str]:
    """Return the rows that a text names in brackets, with those of a range such as A1 to A5."""
    names: set[str] = set()
    for bracket in re.findall(r"\(([^()]*)\)", claim):
        for letter, first, last in re.findall(r"\b([A-Z])(\d+) to [A-Z](\d+)", bracket):
            names |= {f"{letter}{number}" for number in range(int(first), int(last) + 1)}
        names |= set(re.findall(rf"\b{ROW}\b", bracket))
    return names


def claims(page: str) -> list[str]:
    """Return the points and the rows of tables of the page, each as one text."""
    points = re.findall(r"^- .*(?:\n  .*)*", page, re.MULTILINE)
    table_rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("|---")]
    return points + table_rows


WITHOUT_ROW = (
    "| mode | the server",
    "| you are | set",
    "| a coordinator | `privacy.aggregation=secure`",  # says where to look above
    "- Not covered: side channels",  # says for what there is nothing, and F3
)


def test_every_row_of_the_annex_has_tests_that_exist() -> None:
    rows = annex_rows(ANNEX.read_text())
    assert len(rows) > 35
    assert not missing_tests(rows)


def test_the_page_is_one_page_and_every_claim_names_a_row() -> None:
    page = PAGE.read_text()
    assert len(page.splitlines()) <= MOST_LINES
    rows = annex_rows(ANNEX.read_text())
    named = set()
    for claim in claims(page):
        if not claim.startswith(WITHOUT_ROW):
            assert named_rows(claim), f"no row of the annex stands behind: {claim}"
        named |= named_rows(claim)
    assert named <= set(rows), f"rows that are not in the annex: {named - set(rows)}"
    assert page.count("**Contact:**") == 1


@pytest.mark.parametrize(
    "broken",
    [
        lambda text: text.replace("tests/unit/test_ledger.py::test_", "tests/unit/test_ledger.py::test_no_", 1),
        lambda text: text.replace("`tests/unit/test_hostile_node.py` |", " |", 1),
        lambda text: text.replace("tests/runs/test_round_log.py", "tests/runs/test_no_log.py", 1),
    ],
)
def test_a_row_without_its_test_is_noticed(broken: object) -> None:
    text = broken(ANNEX.read_text())  # type: ignore[operator]
    assert missing_tests(annex_rows(text))


def test_a_claim_without_a_row_is_noticed() -> None:
    assert not named_rows("- Nobody learns anything, ever.")
    assert named_rows("- It is refused (A1 to A3, S2).") == {"A1", "A2", "A3", "S2"}
