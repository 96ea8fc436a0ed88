"""The report page: complete, self-contained, safe with hostile names; its script runs in node and in Chromium."""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import logging
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedgraft.errors import FedgraftError
from fedgraft.report import html as report
from fedgraft.report.charts import compare_charts, run_charts
from fedgraft.report.html import clock, flatten, metrics_csv, show, write_comparison, write_report
from fedgraft.runs.run_folder import RunFolder

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>\"'&@@DATA@@"
NODE = shutil.which("node")
CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


def line(round: int, **more: Any) -> dict[str, Any]:
    return {
        "round": round, "accuracy": None if round % 2 else round / 20, "loss": None if round % 2 else 2.0 / round,
        "train_loss": 2.5 / round, "update_norm": 1.0 / round, "lr": 0.1, "bytes_up": 2_000_000, "bytes_down": 10**6,
        "clients": {"ids": [1, 2], "loss": [1.0, 3.0], "norm": [0.5, 0.7], "drift": [0.1, None], "cosine": [0.9, 0.8]},
        "seconds": {"exchange": 0.5, "combine": 0.25}, "dropped": [], **more,
    }  # fmt: skip


def finished(path: Path, rounds: int = 6, config: str = "", **more: Any) -> RunFolder:
    run = RunFolder.create(path, config or f'[algorithm]\nname = "{path.name}"\nlr = 0.1\n', path.name)
    with run.writing(console=False):
        for round in range(1, rounds + 1):
            run.append(line(round, **more))
        run.finish(
            {"test": {"accuracy": 0.6123, "top5": 0.9}, "best_round": 6, "bytes_up": 12_000_000, "seconds": 3725}
        )
    return run


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.overrides: list[str] = []
        self._inside = ""
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.overrides.append(data)

    @property
    def shown(self) -> str:
        return " ".join(" ".join(self.overrides).split())

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.scripts[0]))

    def violations(self) -> list[str]:
        """Everything that could send a request or run a script that is not the page's own."""
        found = []
        for tag, attributes in self.tags:
            if tag in {"link", "iframe", "object", "embed", "base", "form"}:
                found.append(tag)
            for key, value in attributes.items():
                if key.startswith("on"):
                    found.append(f"{tag} {key}")
                if key in {"src", "href", "action", "srcset", "data", "poster"} and not (value or "").startswith(
                    "data:"
                ):
                    found.append(f"{tag} {key}={value}")
        styles = re.findall(r"<style>(.*?)</style>", self.text, re.DOTALL)
        found += [rule for style in styles for rule in re.findall(r"url\(|@import", style)]
        return found + self.scripts[2:]


def test_a_report_says_what_happened(tmp_path: Path) -> None:
    run = finished(tmp_path / "talos", dropped=[{"client": 7, "reason": "norm over the bound"}])
    with run.writing(console=False):
        logging.getLogger("fedgraft.round").warning("one client per round is noisy")
        logging.getLogger("fedgraft.round").warning("one client per round is noisy")
        run.finish(run.summary())
    (run.figures / "accuracy.png").write_bytes(b"png")
    (run.figures / "accuracy.svg").write_bytes(b"svg")
    page = Page(write_report(run, partition=[[1, 0], [0, 2]], classes=["cat", "dog"]))
    wanted = ["61.23 %", "30.00 %", "18.00 MB", "1 h 02 min", "finished", "client 7", "norm over the bound", "lr = 0.1"]
    for overrides in [*wanted, "Environment", "torch", "test top5 90.00 %"]:
        assert overrides in page.shown
    assert page.shown.count("one client per round is noisy") == 1
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert images == ["data:image/png;base64," + base64.b64encode(b"png").decode()]
    assert page.data["maps"] == [{"values": [[1, 0], [0, 2]], "columns": ["cat", "dog"]}]
    assert run.report.stat().st_size < 100_000


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


def test_many_clients_are_cut_and_it_says_so(tmp_path: Path) -> None:
    page = Page(write_report(finished(tmp_path / "a"), partition=[[1, 2]] * 1000))
    assert len(page.data["maps"][0]["values"]) == 200 and "first 200 of 1000 clients" in page.shown


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


def test_comparison_shows_results_and_what_differs(tmp_path: Path) -> None:
    a = finished(tmp_path / "a", config="seed = 1\n[local]\nlr = 0.1\nsteps = 4\n")
    b = finished(tmp_path / "b", rounds=3, config="seed = 1\n[local]\nlr = 0.5\n")
    page = Page(write_comparison([a, b.path], tmp_path / "c.html"))
    assert "local.lr 0.1 0.5" in page.shown and "local.steps 4 null" in page.shown and "seed 1" not in page.shown
    assert "Over seeds" not in page.shown  # one seed each
    assert "final accuracy best rounds" in page.shown and "a finished 61.23 % 30.00 %" in page.shown  # of round 6
    accuracy = page.data["charts"][0]
    assert accuracy["title"] == "Validation accuracy" and [s["name"] for s in accuracy["series"]] == ["a", "b"]
    assert page.data["charts"][1]["xlabel"] == "MB up and down" and page.data["charts"][1]["series"][0]["x"] == [
        6,
        12,
        18,
    ]


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
    with pytest.raises(FedgraftError, match=r"config\.toml is damaged"):
        write_comparison(runs, tmp_path / "d.html")
    assert not (tmp_path / "d.html").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    page = Page(write_comparison([finished(tmp_path / x / "run") for x in ("s1", "s2")], tmp_path / "c.html"))
    assert "s1/run" in page.shown and "s2/run" in page.shown


def test_a_run_without_rounds_and_one_that_failed(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "empty", "", "d")
    with pytest.raises(FedgraftError), run.writing(console=False):
        raise FedgraftError("the disk is full; make room.")
    page = Page(write_report(run.path))
    assert "No round is finished yet." in page.shown and "failed" in page.shown and "the disk is full" in page.shown


def test_charts_of_sparse_and_long_metrics() -> None:
    assert run_charts([]) == [] and run_charts([{"round": 1}, {"round": 2, "accuracy": None, "seconds": 3.0}]) == []
    (only,) = run_charts([{"round": 3, "accuracy": 0.5}])
    assert only["series"] == [{"name": "validation", "x": [3], "y": [50.0]}]
    long = [line(round) for round in range(1, 5001)]
    charts = {chart["title"]: chart for chart in run_charts(long)}
    titles = ["Accuracy", "Loss", "Norm of the update", "Drift of the clients", "Cosine to the mean update"]
    assert list(charts) == [*titles, "Traffic so far", "Seconds per round", "Learning rate"]
    for chart in charts.values():
        for series in chart["series"]:
            assert (
                len(series["x"]) <= 1501
                and series["x"][-1] == 5000
                and len({len(v) for k, v in series.items() if k != "name"}) == 1
            )
    loss = charts["Loss"]["series"][2]
    assert (loss["low"][0], loss["y"][0], loss["high"][0]) == (1.0, 2.0, 3.0)
    assert charts["Traffic so far"]["series"][0]["y"][-1] == 10_000
    personal = run_charts([line(2, personal={"mean": 0.5, "min": 0.2, "max": 0.9})])[0]["series"][1]
    assert personal == {"name": "personal models", "x": [2], "y": [50.0], "low": [20.0], "high": [90.0]}
    assert compare_charts({"a": [], "b": []}) == []


def test_how_values_are_shown() -> None:
    assert [clock(s) for s in (4.21, 65, 7325)] == ["4.2 s", "1 min 05 s", "2 h 02 min"]
    assert (
        show("test.accuracy", 0.5) == "50.00 %" and show("bytes_up", 1_500_000) == "1.50 MB" and show("x", None) == "–"
    )
    assert show("rounds", 7) == "7" and show("loss", 0.123456789) == "0.12346" and show("flag", True) == "true"
    assert flatten({"a": {"b": 1, "c": {"d": [2]}}, "e": 3}) == {"a.b": 1, "a.c.d": [2], "e": 3}


# --- the page's script -------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).with_suffix(".js")  # a document just large enough for the script


def run_script(page: Path) -> dict[str, Any]:
    done = subprocess.run([str(NODE), str(DOCUMENT), str(page)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_script_draws_and_answers(tmp_path: Path) -> None:
    found = run_script(write_report(finished(tmp_path / "a"), partition=[[1, 0], [0, 2]], classes=["cat", HOSTILE]))
    assert found["theme"] == ["light", "dark", "light"] and found["charts"] == 8
    assert found["lines"] == [1, 3, 2, 1, 1, 2, 2, 1] and found["inside"]
    assert found["keys"] == ["validation", "training", "clients"]
    assert found["tip"] == "round 6|validation: 0.3333|training: 0.4167|clients: 2 (1 to 3)"
    assert found["tipShown"] and found["tipGone"] and found["keyTip"].startswith("round 2|")
    assert found["after"] == [2, "false"] and found["none"] == 0 and found["back"] == 3
    assert found["cells"] % 4 == 0 and found["cell"] == f"client 0, class {HOSTILE}: 0"


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
            chart.locator("svg").hover()
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
    assert (Path(report.__file__).parent / "template.html").is_file()
