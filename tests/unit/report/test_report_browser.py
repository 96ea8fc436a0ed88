"""The pages in a real Chromium: a run, a comparison and a page of tables, wide and on a phone, dark and light."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedgraft.config.load import validate
from fedgraft.report.compare import compare_runs
from fedgraft.report.html import write_tables
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"),
]


BROKEN = """[...document.querySelectorAll('.card b, td.number')].filter(e => {
    const range = document.createRange(); range.selectNodeContents(e);
    return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1; }).map(e => e.textContent)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind, from real runs."""
    root = tmp_path_factory.mktemp("pages")
    table = {
        "data": {"source": "digits", "limit": 300, "image_size": 16, "validation": 0.3},
        "model": {"name": "tiny"},
        "rounds": {"total": 3, "evaluate_every": 1},
    }
    for seed in (0, 1):
        run(validate({**table, "seed": seed}), root / f"run-{seed}", console=False)
    compare_runs([root / "run-0", root / "run-1"], root / "both")
    lines = {name: RunFolder.open(root / name).metrics() for name in ("run-0", "run-1")}
    rows = [{"setting": name, "rounds": len(found), "note": "a longer text " * 9} for name, found in lines.items()]
    write_tables(root / "tables.html", "Tables", {"Runs": rows}, ["A note."])
    return {
        "run": root / "run-0" / "report.html",
        "comparison": root / "both" / "comparison.html",
        "tables": root / "tables.html",
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium, found by its path."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def complaints(page: Any) -> list[str]:
    """Everything the page says or asks for, from now on."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.extend({request.url} if request.url.startswith("http") else ()))
    return said


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", ["run", "comparison", "tables"])
def test_a_page_renders_and_answers(pages: dict[str, Path], browser: Any, kind: str, width: int, scheme: Any) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said = complaints(page)
    page.goto(pages[kind].as_uri())
    assert page.locator("h1").is_visible() and page.locator("table").count() >= 1
    if kind != "tables":
        chart = page.locator(".chart").first
        assert chart.locator("polyline").count() >= 1
        chart.locator("svg").first.hover()
        assert chart.locator(".tip").is_visible()
        key = chart.locator(".keys button").first
        key.click()
        assert key.get_attribute("aria-pressed") == "false"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    assert page.evaluate(BROKEN) == [], "a number is broken across lines"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert before != after
    assert all(page.evaluate("[...document.images].map(i => i.complete && i.naturalWidth > 0)"))
    with page.expect_download() as wait:
        page.click("a.button[download]")
    assert Path(wait.value.path()).read_text().count("\n") >= 2
    page.close()
    assert said == []


def test_the_check_sees_a_broken_number(tmp_path: Path, browser: Any) -> None:
    torn = tmp_path / "torn.html"
    torn.write_text("<div class=card style='width:4rem'><b>1,427.40 MB up</b></div>")
    page = browser.new_page()
    page.goto(torn.as_uri())
    assert page.evaluate(BROKEN) == ["1,427.40 MB up"]
    page.close()


def test_the_check_sees_errors_and_requests(tmp_path: Path, browser: Any) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text("<script>console.error('x'); fetch('http://127.0.0.1:9/').catch(() => 0); nothing()</script>")
    page = browser.new_page()
    said = complaints(page)
    page.goto(broken.as_uri())
    page.wait_for_timeout(300)
    page.close()
    assert {"x", "http://127.0.0.1:9/"} <= set(said) and any("nothing is not defined" in text for text in said)
