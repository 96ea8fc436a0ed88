"""The report's numbers by a second hand, and what its figures are drawn from."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from reproduction.report_figures import MOMENTUM, reach

from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining

ROOT = Path(__file__).parents[3]
CHECK = ROOT / "reproduction" / "checks" / "report.py"


def test_the_report_says_what_the_kept_numbers_say() -> None:
    check = runpy.run_path(str(CHECK))
    kept = check["Kept"](ROOT / "docs" / "results")
    report = (ROOT / "docs" / "report" / "README.md").read_text("utf-8")
    assert check["missing"](report, kept) == []
    statements = [line for section in check["SECTIONS"] for line in section(kept)]
    assert len(statements) >= 14
    text = " ".join(report.split())
    for statement in statements:
        broken = text.replace(statement, statement.translate(str.maketrans("0123456789", "1234567890")))
        assert check["missing"](broken, kept), statement


def test_a_report_with_another_number_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = (ROOT / "docs" / "report" / "README.md").read_text("utf-8")
    assert "1.37" in report
    (tmp_path / "README.md").write_text(report.replace("1.37", "3.08"))
    main = runpy.run_path(str(CHECK))["main"]
    monkeypatch.setattr(sys, "argv", ["report.py", str(ROOT / "docs" / "results"), str(tmp_path / "README.md")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1


@pytest.mark.parametrize("steps", [1, 4, 8, 16])
def test_reach_is_what_the_momentum_correction_divides_by(steps: int) -> None:
    """So a corrected run at a rate is a plain run at the rate over its reach, and the surface needs no second one."""
    corrected = LocalTraining(steps=steps, optimizer=sgdm(MOMENTUM), momentum_correction=True)
    assert corrected.rate(0.1, 500) == pytest.approx(0.1 / reach(steps))
    plain = LocalTraining(steps=steps, optimizer=sgdm(MOMENTUM))
    assert plain.rate(0.1, 500) == 0.1
