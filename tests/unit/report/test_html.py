"""The report page: complete, self-contained, safe with hostile names; its script runs in node and in Chromium."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.pages import HOSTILE, Page, finished, line

from fedgraft.report import html as report
from fedgraft.report.charts import compare_charts, run_charts, training_charts
from fedgraft.report.compare import write_comparison
from fedgraft.report.run_page import write_report

NODE = shutil.which("node")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


def test_the_page_needs_and_asks_nothing(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name) for name in ("a", "b")]
    for path in (write_report(runs[0], partition=[[1]]), write_comparison(runs, tmp_path / "out" / "compare.html")):
        page = Page(path)
        assert page.violations() == [] and "http" not in page.text.replace("http-equiv", "")
        policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy") or ""
        digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
        assert "default-src 'none'" in policy and f"script-src 'sha256-{digest}'" in policy
        assert len(page.scripts) == 2 and any(a.get("name") == "viewport" for _, a in page.tags)
        assert "prefers-color-scheme" in page.text and "@media print" in page.text


def hostile(tmp_path: Path) -> list[Path]:
    config = f"name = {json.dumps(HOSTILE)}\n"
    more: dict[str, Any] = {"seconds": {HOSTILE: 1.0}, "dropped": [{"client": HOSTILE, "reason": HOSTILE}]}
    run = finished(tmp_path / HOSTILE.replace("/", "_"), config=config, **more)
    with run.writing(console=False):
        logging.getLogger("fedgraft").warning("%s", HOSTILE)
        run.finish({HOSTILE: HOSTILE, "test": {"accuracy": 0.1}})
    (run.figures / (HOSTILE.replace("/", "_") + ".png")).write_bytes(b"")
    other = finished(tmp_path / "other", config="name = 1\n")
    (run.path / "environment.json").write_text(json.dumps({"command": [HOSTILE]}))
    first = write_report(run, partition=[[1]], classes=[HOSTILE])
    return [first, write_comparison([run, other], tmp_path / "compare.html", title=HOSTILE)]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    for path in hostile(tmp_path):
        page = Page(path)
        assert page.violations() == [] and len(page.scripts) == 2
        assert all(attributes.get("onerror") is None for _, attributes in page.tags)
        assert "alert(1)" in page.shown and json.loads(page.scripts[0])


def test_the_check_sees_a_page_that_does_not_escape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: with escaping off, the same names become elements and the check names them."""
    monkeypatch.setattr(html, "escape", lambda text, quote=True: text)
    assert all(Page(path).violations() for path in hostile(tmp_path))


def test_charts_of_sparse_and_long_metrics() -> None:
    assert run_charts([]) == [] and run_charts([{"round": 1}, {"round": 2, "accuracy": None, "seconds": 3.0}]) == []
    (only,) = run_charts([{"round": 3, "accuracy": 0.5}])
    assert only["series"] == [{"name": "validation", "x": [3], "y": [50.0]}]
    long = [line(round) for round in range(1, 5001)]
    charts = {chart["title"]: chart for chart in [*run_charts(long), *training_charts(long)]}
    more = ["Distance of the clients' updates from their mean", "Cosine of the clients' updates to their mean"]
    first = ["Accuracy", "Loss", "Sent so far"]
    assert list(charts) == [*first, "Norm of the update", *more, "Time per round"]  # a constant rate needs none
    assert [chart["title"] for chart in run_charts(long)] == first
    for chart in charts.values():
        for series in chart["series"]:
            assert (
                len(series["x"]) <= 1501
                and series["x"][-1] == 5000
                and len({len(v) for k, v in series.items() if k != "name"}) == 1
            )
    loss = charts["Loss"]["series"][1]
    assert (loss["low"][0], loss["y"][0], loss["high"][0]) == (1.0, 2.5, 3.0)
    assert charts["Sent so far"]["unit"] == " GB" and [s["y"][-1] for s in charts["Sent so far"]["series"]] == [10, 5]
    two = [line(round, bytes_down=2_000_000, lr=0.1 / round) for round in (1, 2)]
    assert [s["name"] for s in run_charts(two)[2]["series"]] == ["up, and as much down"]
    assert training_charts(two)[-1]["title"] == "Learning rate"
    personal = run_charts([line(2, personal={"mean": 0.5, "min": 0.2, "max": 0.9})])[0]["series"][1]
    assert personal == {"name": "personal models", "x": [2], "y": [50.0], "low": [20.0], "high": [90.0]}
    assert compare_charts({"a": [], "b": []}) == []


def test_a_number_stays_on_the_line_of_its_unit() -> None:
    assert report.safe("1.5 MB up, 3 min 05 s, 40 % of 7 seconds <b>") == (
        "1.5&nbsp;MB up, 3&nbsp;min 05&nbsp;s, 40&nbsp;%&nbsp;of&nbsp;7 seconds &lt;b&gt;"
    )
    assert report.safe("94.6 to 98.3 %, all of it") == "94.6&nbsp;to&nbsp;98.3&nbsp;%, all of it"


# --- the page's script -------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).with_suffix(".js")  # a document just large enough for the script


def run_script(page: Path) -> dict[str, Any]:
    done = subprocess.run([str(NODE), str(DOCUMENT), str(page)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_script_draws_and_answers(tmp_path: Path) -> None:
    found = run_script(write_report(finished(tmp_path / "a"), partition=[[1, 0], [0, 2]], classes=["cat", HOSTILE]))
    assert found["theme"] == ["light", "dark", "light"] and found["charts"] == 7
    assert found["lines"] == [1, 2, 2, 2, 1, 1, 2] and found["inside"]
    assert found["keys"] == ["validation", "training (min-max over clients)"]
    assert found["tip"] == "round 6|validation: 0.3333|training (min-max over clients): 0.4167 (1 to 3)"
    assert found["starts"] and found["units"] and found["dashes"] == 2, (
        "round 0, ticks with units, no line hides another"
    )
    assert found["tipShown"] and found["tipGone"] and found["keyTip"].startswith("round 2|")
    assert found["after"] == [1, "false"] and found["none"] == 0 and found["back"] == 2


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_script_survives_constant_and_single_values(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, rounds=2, update_norm=0.0, train_loss=3.0) for name in ("a", "b")]
    found = run_script(write_comparison(runs, tmp_path / "c.html"))
    assert found["inside"] and found["lines"] == [2] * 6


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_real_browser(tmp_path: Path, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path, compared = hostile(tmp_path)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"a name was executed {dialog.dismiss()}"))
        page.on("request", lambda request: said.extend({request.url} if request.url.startswith("http") else ()))
        for file in (path, compared):
            page.goto(file.as_uri())
            chart = page.locator(".chart").first
            assert chart.locator("polyline").count() >= 1
            chart.locator("svg").first.hover()
            assert chart.locator(".tip").is_visible()
            chart.locator(".keys button").first.click()
            assert chart.locator(".keys button").first.get_attribute("aria-pressed") == "false"
            before = page.evaluate("getComputedStyle(document.body).backgroundColor")
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert said == []


def test_template_is_part_of_the_package() -> None:
    assert (Path(report.__file__).parent / "page" / "template.html").is_file()
