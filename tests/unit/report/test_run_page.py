"""The report of one run says what happened: result, protection, costs, curves from the start, classes, clients."""

from __future__ import annotations

import base64
import csv
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.pages import Page, finished

from fedgraft.core.errors import FedgraftError
from fedgraft.report.html import metrics_csv
from fedgraft.report.run_page import write_report
from fedgraft.runs.folder import RunFolder


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    run = finished(tmp_path / "talos", dropped=[{"client": 7, "reason": "norm over the bound"}])
    with run.writing(console=False):
        logging.getLogger("fedgraft.server.round").warning("one client per round is noisy")
        logging.getLogger("fedgraft.server.round").warning("one client per round is noisy")
        run.finish(run.summary())
    (run.figures / "accuracy.png").write_bytes(b"png")
    (run.figures / "accuracy.svg").write_bytes(b"svg")
    page = Page(write_report(run, partition=[[1, 0], [0, 2]], classes=["cat", "dog"]))
    wanted = ["Test accuracy 60 % 180 of 300 images, 95 % interval 54 to 65 %", "finished", "lr = 0.1"]
    wanted += ["Best validation accuracy 30.0 % round 6", "Protection None the server saw each client's update"]
    wanted += ["Sent 18.0 MB 12.0 MB up, 6.0 MB down", "Rounds 6 1 h 02 min in total", "Environment", "torch"]
    wanted += ["7 norm over the bound 6 1, 2, 3, 4, 5, 6", "test top-5 accuracy 90.00 %"]
    for text in wanted:
        assert text in page.shown
    assert page.shown.index("Test accuracy") < page.shown.index("Curves") < page.shown.index("Data by client")
    assert page.shown.count("one client per round is noisy") == 1
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert images == ["data:image/png;base64," + base64.b64encode(b"png").decode()]
    assert "client all cat dog 0 1 1 1 2 2 all 3 1 2" in page.shown  # names, sums, and nothing where there is nothing
    assert run.report.stat().st_size < 100_000


def test_no_key_of_a_file_is_shown_as_it_is(tmp_path: Path) -> None:
    """Words with an underscore are for programs; only the config keeps its own."""
    summary = {"edited": {"coordinates": 5, "of": 10}, "personal": {"mean": 0.5, "min": 0.4, "max": 0.6, "std": 0.1}}
    page = Page(write_report(finished(tmp_path / "a", summary=summary, update_norm=1.0), partition=[[1]]))
    shown = page.shown.partition("Config")[0] + json.dumps(page.data["charts"])
    names = [series["name"] for chart in page.data["charts"] for series in chart["series"]]
    assert not re.findall(r"[a-z]+_[a-z]+", shown) and "clients train and send" in names
    assert "Clients' own test images 50.0 % mean over clients; 40.0 % to 60.0 %" in page.shown


def test_the_start_is_the_first_point_where_a_run_has_it(tmp_path: Path) -> None:
    run = finished(tmp_path / "a")
    lines = [{"round": 0, "accuracy": 0.05, "loss": 3.0}, *run.metrics()]
    run.metrics_path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    page = Page(write_report(run))
    first = page.data["charts"][0]
    assert first["series"][0]["x"] == [0, 2, 4, 6] and first["series"][0]["y"][0] == 5.0 and first["best"] == 6
    assert "round 6; 5.0 % at the start" in page.shown and "Rounds 6 " in page.shown


def test_what_a_run_knows_of_classes_and_clients(tmp_path: Path) -> None:
    share = {"value": 13 / 19, "low": 0.46, "high": 0.846, "n": 19, "hits": 13, "unit": "%"}
    area = {"value": 0.912, "low": 0.88, "high": 0.94, "n": 300, "unit": ""}
    found = {
        "metrics": {"auroc": area, "sensitivity:rare": share},
        "clients": {"north": {"accuracy": share}},
        "select": "auroc",
    }
    page = Page(
        write_report(finished(tmp_path / "a", summary=found), partition=[[3, 1], [0, 2]], clients=["north", "s"])
    )
    assert "Test AUROC 0.912 300 images, 95 % interval 0.880 to 0.940" in page.shown
    assert "rare 68 % (13 of 19; 46 to 85 %)" in page.shown
    assert (
        "north 68 % (13 of 19; 46 to 85 %) 4 2 –" in page.shown and "s – 2 1 6 1.0000 0.500 0.100 0.900" in page.shown
    )


@pytest.mark.parametrize(
    ("config", "summary", "said"),
    [
        ('[privacy]\naggregation = "secure"\n', {}, "Secure aggregation the server saw sums, no client's update"),
        (
            "",
            {"privacy": {"epsilon": 7.125, "delta": 1e-5, "not_covered": ["the head"]}},
            "ε = 7.12 differential privacy",
        ),
        ("", {"protection": "INSECURE: for comparison"}, "Protection Insecure INSECURE: for comparison"),
    ],
)
def test_the_protection_is_told_as_it_was(tmp_path: Path, config: str, summary: Any, said: str) -> None:
    page = Page(write_report(finished(tmp_path / "a", config=config or "seed = 1\n", summary=summary)))
    assert said in page.shown and ("Not covered by the protection the head" in page.shown) == ("privacy" in summary)


def test_many_clients_are_cut_and_it_says_so(tmp_path: Path) -> None:
    page = Page(write_report(finished(tmp_path / "a"), partition=[[1, 2]] * 1000))
    assert page.shown.count("The first 200 of 1000 clients are shown.") == 2
    assert sum(tag == "td" and "--s" in (a.get("style") or "") for tag, a in page.tags) == 400
    assert "all 3000 1000 2000" in page.shown.replace(",", "")  # the sums are over everyone


def test_numbers_as_csv_are_all_there(tmp_path: Path) -> None:
    run = finished(tmp_path / "a", rounds=4)
    page = Page(write_report(run))
    link = next(a for tag, a in page.tags if tag == "a")
    assert link["download"] == "a.csv"
    text = base64.b64decode((link["href"] or "").split(",")[1]).decode()
    rows = list(csv.DictReader(text.splitlines()))
    assert (
        [row["round"] for row in rows] == ["1", "2", "3", "4"]
        and rows[1]["accuracy"] == "0.1"
        and rows[0]["accuracy"] == ""
    )
    assert (
        rows[0]["clients.loss.mean"] == "2.0"
        and rows[0]["clients.drift.mean"] == "0.1"
        and rows[0]["seconds.combine"] == "0.25"
    )
    assert metrics_csv([]) == "\n"


def test_a_run_without_rounds_and_one_that_failed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "empty", "", "d")
    with pytest.raises(FedgraftError), run.writing(console=False):
        raise FedgraftError("the disk is full; make room.")
    page = Page(write_report(run.path))
    assert "No round is finished yet." in page.shown and "failed" in page.shown and "the disk is full" in page.shown
