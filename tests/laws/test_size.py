"""No file of the package is longer than a page one can hold in mind, and one round stays on one page."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedgraft"
MOST, ROUND = 300, 150


def test_files_are_short() -> None:
    lines = {path.relative_to(SOURCE).as_posix(): path.read_text().count("\n") for path in SOURCE.rglob("*.py")}
    assert {name: n for name, n in lines.items() if n > (ROUND if name == "round.py" else MOST)} == {}
