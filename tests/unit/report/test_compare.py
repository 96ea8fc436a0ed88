"""Several runs beside each other: results, what differs, seeds taken together, a word where data differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.pages import Page, finished

from fedgraft.report.compare import data_warnings, write_comparison
from fedgraft.runs.folder import RunFolder


def test_comparison_shows_results_and_what_differs(tmp_path: Path) -> None:
    a = finished(tmp_path / "a", config="seed = 1\n[local]\nlr = 0.1\nsteps = 4\n")
    b = finished(tmp_path / "b", rounds=3, config="seed = 1\n[local]\nlr = 0.5\n")
    page = Page(write_comparison([a, b.path], tmp_path / "c.html"))
    assert "local.lr 0.1 0.5" in page.shown and "local.steps 4 –" in page.shown and "seed 1" not in page.shown
    assert "Over seeds" not in page.shown  # one seed each
    assert (
        "last validation accuracy best validation accuracy rounds" in page.shown
        and "a finished 60.00 % 30.00 %" in page.shown
    )  # of round 6
    accuracy = page.data["charts"][0]
    assert accuracy["title"] == "Validation accuracy" and [s["name"] for s in accuracy["series"]] == ["a", "b"]
    assert page.data["charts"][1]["xlabel"] == "MB up and down" and page.data["charts"][1]["series"][0]["x"] == [
        6,
        12,
        18,
    ]


def test_comparison_warns_where_data_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = '[data]\nsource = "digits"\naugment = ["flip"]\n'
    other = same.replace("digits", "folder")
    runs = [finished(tmp_path / name, config=text) for name, text in (("a", same), ("b", other))]
    page = Page(write_comparison(runs, tmp_path / "c.html"))
    said = "These runs used different data (data.source: digits, folder); their results cannot be compared"
    assert said in page.shown and said in caplog.text
    configs: dict[str, Any] = {"a": {"data.augment": "flip", "partition.alpha": 1}, "b": {"partition.alpha": 1}}
    assert data_warnings(configs, {}) == []  # how images are used is no other data
    configs["b"]["partition.alpha"] = 2
    assert data_warnings(configs, {}) == ["The clients of these runs hold different data (partition.alpha: 1, 2)"]
    tested = {"a": {"test": {"count": 10}}, "b": {"test": {"count": 20}}, "c": {}}
    assert "tested on 10 and 20 images" in data_warnings({"a": {}, "b": {}}, tested)[0]


def test_comparison_takes_seeds_together(tmp_path: Path) -> None:
    runs = []
    for rate, scores in ((0.1, (0.5, 0.6)), (0.5, (0.7, 0.81))):
        for seed, score in enumerate(scores):
            config = f"seed = {seed}\n[local]\nlr = {rate}\n"
            run = RunFolder.create(tmp_path / f"{rate}-{seed}", config, f"{rate}-{seed}")
            with run.writing(console=False):
                run.finish({"test": {"accuracy": score}})
            runs.append(run)
    shown = Page(write_comparison(runs, tmp_path / "c.html")).shown
    assert "local.lr=0.1 2 55.00 ± 7.07" in shown and "local.lr=0.5 2 75.50 ± 7.78" in shown
    assert "+20.50 [" in shown and "[50.00, 60.00]" in shown  # paired; the bootstrap of two values
    (tmp_path / "0.1-0" / "config.toml").write_text("seed = [")
    with raises("E-REPORT-DAMAGED-CONFIG"):
        write_comparison(runs, tmp_path / "d.html")
    assert not (tmp_path / "d.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    page = Page(write_comparison([finished(tmp_path / x / "run") for x in ("s1", "s2")], tmp_path / "c.html"))
    assert "s1/run" in page.shown and "s2/run" in page.shown
