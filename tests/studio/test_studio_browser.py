"""The studio's page in a real Chromium: tables, filters, overlays, a live run, the slider, hostile names, actions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.support.pages import HOSTILE, line
from tests.support.studio import (
    NEEDS_BROWSER,
    chromium,
    complaints,
    served,
    wait_until,
    write_run,
    write_setting,
)

pytest.importorskip("starlette", reason="the extra `studio` is not installed")
pytest.importorskip("uvicorn", reason="the extra `studio` is not installed")

from fedgraft.studio.views import studio_of

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def go(page: Any, view: str) -> None:
    """Show another view of the page that is open, and wait for its heading."""
    page.evaluate("view => { document.querySelector('main').replaceChildren(); location.hash = view; }", view)
    page.wait_for_selector("main h1")


def until(page: Any, expression: str) -> None:
    """Wait until an expression holds in the page; the page's policy forbids that it is evaluated there."""
    wait_until(lambda: page.evaluate(expression), expression, 30)


def matrix(folder: Path, number: int, values: np.ndarray) -> None:
    """Store a mixing matrix of a round, as a run does."""
    (folder / "figures").mkdir(exist_ok=True)
    tensors = {"mixing": values.astype(np.float32), "clients": np.arange(len(values))}
    safetensors.numpy.save_file(tensors, folder / "figures" / f"crsm-round-{number:06d}.safetensors")


def test_filter_sort_group_and_overlay(tmp_path: Path, browser: Any) -> None:
    for name, rate in (("slow", 0.01), ("quick", 0.1)):
        for seed in range(3):
            write_setting(tmp_path / "runs", name, seed, rate, 0.5 + rate + seed / 100)
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        names = "[...document.querySelectorAll('tr[data-run]')].map(row => row.dataset.run)"
        assert len(page.evaluate(names)) == 6
        page.click("th button:text-is('test')")
        assert page.evaluate(names)[0] == "quick-2" and page.evaluate(names)[-1] == "slow-0"
        page.click("th button:text-is('test')")
        assert page.evaluate(names)[0] == "slow-0"
        assert page.locator("th[aria-sort=ascending]").inner_text().strip().startswith("test")
        for text, expected in (
            ("lr=0.1", 3),
            ("local.lr<0.05", 3),
            ("quick seed=2", 1),
            ("test>=0.62", 1),
            ("seed!=0", 4),
            ("nothing", 0),
        ):
            page.fill("#filter", text)
            until(page, f"document.querySelectorAll('tr[data-run]').length === {expected}")
        page.fill("#filter", "")
        until(page, "document.querySelectorAll('tr[data-run]').length === 6")
        page.click("#group")
        page.wait_for_selector("th:text-is('setting')")
        assert page.locator("tbody tr").count() == 2 and "61.00 ± 1.00" in page.locator("tbody").inner_text()
        page.click("#group")
        page.wait_for_selector("tr[data-run]")
        for name in ("quick-0", "slow-0"):
            page.check(f"tr[data-run='{name}'] input")
        page.click("#compare")
        page.wait_for_selector(".chart polyline")
        first = page.locator(".chart").first
        assert first.locator("polyline").count() == 2
        assert "local.lr" in page.locator("main").inner_text()
        for axis, label in (("megabytes", "MB up and down"), ("seconds", "seconds"), ("round", "round")):
            page.click(f"[data-axis={axis}]")
            page.wait_for_selector(f".chart text:text-is('{label}')")
        assert messages == []
        page.close()


def test_a_run_is_followed_while_it_is_computed(tmp_path: Path, browser: Any) -> None:
    """A real run in a process of its own: the page shows its rounds as they end, and its result, without a reload."""
    folder = tmp_path / "runs" / "live"
    words = ["demo", "data.limit=200", "trainable.kind=head", "rounds.total=60", "rounds.evaluate_every=1", "workers=1"]
    command = [sys.executable, "-m", "fedgraft", "run", *words, "-o", str(folder), "--quiet"]
    (tmp_path / "runs").mkdir()
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector(".empty")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            page.wait_for_selector("tr[data-run=live]", timeout=90_000)
            go(page, "#/run?run=live")
            page.evaluate("window.sameP = true")
            page.wait_for_selector(".cards.with-result", timeout=90_000)
            assert page.evaluate("window.sameP"), "the page was loaded again"
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        page.wait_for_selector(".badge.finished")
        points = page.locator(".chart polyline").first.get_attribute("points")
        assert len(points.split()) == 61
        summary = json.loads((folder / "summary.json").read_text())
        assert f"{100 * summary['test']['accuracy']:.0f}" in page.locator(".card b").first.inner_text()
        for tab in ("clients", "classes", "holdings", "layers", "log", "config"):
            page.click(f"#tab-{tab}")
            page.wait_for_selector(f"#tab-{tab}[aria-selected=true]")
            until(page, "document.querySelector('#panel').children.length > 0")
        assert messages == []
        page.close()


def test_a_growing_run_is_drawn_in_place(tmp_path: Path, browser: Any) -> None:
    """Rounds that are appended appear in the same drawing; the broken variant would draw the charts anew."""
    import fcntl

    folder = write_run(tmp_path / "runs" / "grows", status="running")
    (folder / "summary.json").unlink()
    with (folder / ".lock").open("w") as lock, served(studio_of(tmp_path / "runs", cache=tmp_path / "i")) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = browser.new_page()
        page.goto(server.address + "#/")
        go(page, "#/run?run=grows")
        page.wait_for_selector(".badge.running")
        page.evaluate("document.querySelector('.chart').dataset.mine = 'yes'")
        with (folder / "metrics.jsonl").open("a") as file:
            for number in range(7, 21):
                file.write(json.dumps(line(number)) + "\n")
        until(page, "document.querySelector('.chart polyline').getAttribute('points').split(' ').length === 10")
        assert page.locator(".chart").first.get_attribute("data-mine") == "yes"
        page.close()


def test_the_slider_moves_through_the_rounds(tmp_path: Path, browser: Any) -> None:
    folder = write_run(tmp_path / "runs" / "mixed")
    for number in (1, 3, 6):
        values = np.full((4, 4), 0.01 * number)
        np.fill_diagonal(values, 1 - 0.03 * number)
        matrix(folder, number, values)
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/run?run=mixed&tab=similarity")
        page.wait_for_selector("#matrix td:text-is('0.82')")
        page.focus("#round")
        page.keyboard.press("ArrowLeft")
        page.wait_for_selector("#matrix td:text-is('0.91')")
        page.keyboard.press("Home")
        page.wait_for_selector("#matrix td:text-is('0.97')")
        assert page.locator("output").inner_text() == "round 1"
        assert not page.locator("#kind").is_visible(), "this run stored one kind of matrix"
        page.close()


def test_similarity_and_mixing_weights_are_both_shown(tmp_path: Path, browser: Any) -> None:
    folder = write_run(tmp_path / "runs" / "both")
    (folder / "figures").mkdir()
    for number in (1, 2):
        tensors = {"mixing": np.full((2, 2), 0.5, np.float32), "similarity": np.full((2, 2), number / 10, np.float32)}
        safetensors.numpy.save_file(
            {**tensors, "clients": np.arange(2)}, folder / "figures" / f"crsm-round-{number:06d}.safetensors"
        )
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/run?run=both&tab=similarity")
        page.wait_for_selector("#matrix td:text-is('0.20')")
        assert page.locator("#matrix td:text-is('0.20')").count() == 2, "a client's own similarity is left out"
        page.focus("#round")
        page.keyboard.press("Home")
        page.wait_for_selector("#matrix td:text-is('0.10')")
        page.select_option("#kind", "mixing")
        page.wait_for_selector("#matrix td:text-is('0.50')")
        page.close()


def hostile_run(root: Path) -> Path:
    """A run whose every field is hostile text."""
    folder = root / HOSTILE.replace("/", "_")
    text = json.dumps(HOSTILE)
    config = (
        f"name = {text}\nselect = {text}\n[algorithm]\nname = {text}\n[model]\nname = {text}\n[data]\nsource = {text}\n"
    )
    metric = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 10, "hits": 5, "unit": "%"}
    write_run(
        folder,
        config=config,
        metrics={"accuracy": metric, f"sensitivity:{HOSTILE}": metric},
        clients={HOSTILE: {"accuracy": metric}},
        confusion=[[1, 2], [3, 4]],
        class_names=[HOSTILE, "b"],
        note=HOSTILE,
        **{HOSTILE: HOSTILE},
    )
    lines = []
    for number in (1, 2):
        dropped = [{"client": HOSTILE, "reason": HOSTILE}]
        lines.append(json.dumps(line(number, seconds={HOSTILE: 1.0}, dropped=dropped)))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "log.txt").write_text(f"t | WARNING | {HOSTILE}\n")
    (folder / "run.json").write_text(json.dumps({"config_digest": HOSTILE, "status": "failed", "reason": HOSTILE}))
    (folder / "environment.json").write_text(json.dumps({"command": [HOSTILE], HOSTILE: HOSTILE}))
    holdings = {"counts": [[1, 2]], "classes": [HOSTILE, "b"], "clients": [HOSTILE]}
    (folder / "holdings.json").write_text(json.dumps(holdings))
    layers = [{"name": HOSTILE, "trained": 1, "of": 2}]
    (folder / "trained.json").write_text(json.dumps({"layers": layers}))
    entry = {"round": 1, "updates": {HOSTILE: HOSTILE}, "protection": HOSTILE, "model": HOSTILE}
    (folder / "rounds.log").write_text(json.dumps({"entry": entry}) + "\n")
    matrix(folder, 1, np.eye(2))
    (folder / "figures" / (HOSTILE.replace("/", "_") + ".svg")).write_text(
        "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9' onload='alert(3)'><script>alert(4)</script></svg>"
    )
    return folder


def test_hostile_names_stay_text_in_every_view(tmp_path: Path, browser: Any) -> None:
    root = tmp_path / "runs"
    folder = hostile_run(root)
    write_run(root / "other", config='name = "b"\nseed = 1\n[local]\nlr = 1.0\n')
    with served(studio_of(root, cache=tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        page.click("summary:text-is('Columns')")
        for box in page.locator(".options input").all():
            box.check()
        assert "alert(1)" in page.locator("main").inner_text()
        page.click("a:has-text('alert(1)')")
        page.wait_for_selector("[role=tab]")
        for tab in [tab.get_attribute("id") for tab in page.locator("[role=tab]").all()]:
            page.click(f"#{tab}")
            page.wait_for_selector(f"#{tab}[aria-selected=true]")
            until(page, "document.querySelector('#panel').children.length > 0")
            page.wait_for_timeout(100)
            assert page.evaluate(SIDEWAYS) is False, f"{tab} scrolls sideways"
        query = page.evaluate("name => '#/compare?run=other&run=' + encodeURIComponent(name)", folder.name)
        go(page, query)
        page.wait_for_selector(".chart polyline")
        go(page, "#/sweep")
        page.wait_for_selector(".parallel path")
        assert (
            page.evaluate("document.querySelectorAll('main script, main iframe, main [onerror], main [onload]').length")
            == 0
        )
        assert page.locator("img[src^='http://evil']").count() == 0
        page.close()
    assert messages == []


def test_the_check_sees_a_page_that_does_not_escape(tmp_path: Path, browser: Any, monkeypatch: Any) -> None:
    """The planted bug: with innerHTML in place of text, the same names become elements, and the check names them."""
    from fedgraft.studio import server as studio_server

    original = studio_server.page_file

    def careless(name: str) -> str:
        return original(name).replace("element.textContent = text", "element.innerHTML = text")

    monkeypatch.setattr(studio_server, "page_file", careless)
    hostile_run(tmp_path / "runs")
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        assert page.locator("main script").count() > 0
        page.close()


def test_a_second_user_without_the_token(tmp_path: Path, browser: Any) -> None:
    write_run(tmp_path / "runs" / "mine")
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        owner = browser.new_context()
        page = owner.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run=mine]")
        inside = page.url
        assert server.studio.own.token not in inside
        stranger = browser.new_context()
        other = stranger.new_page()
        for address in (f"http://127.0.0.1:{server.port}/", inside, f"{inside}api/runs"):
            assert other.goto(address).status == 403
            assert "mine" not in other.content()
        stranger.close()
        page.reload()
        page.wait_for_selector("tr[data-run=mine]")
        owner.close()


def test_exports_are_files(tmp_path: Path, browser: Any) -> None:
    write_run(tmp_path / "runs" / "one")
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/run?run=one")
        page.wait_for_selector(".tools button")
        chart = page.locator(".chart").first
        starts = {"SVG": b"<svg", "PNG": b"\x89PNG", "CSV": b"series,round,"}
        for name, start in starts.items():
            with page.expect_download() as waiting:
                chart.locator(f".tools button:text-is('{name}')").click()
            data = Path(waiting.value.path()).read_bytes()
            assert data.startswith(start) and b"var(--" not in data and len(data) > 60
        with page.expect_download() as waiting:
            page.click("a:text-is('Offline page')")
        offline = tmp_path / "offline.html"
        offline.write_bytes(Path(waiting.value.path()).read_bytes())
        server.stop()
        still = browser.new_page()
        messages = complaints(still)
        still.goto(offline.as_uri())
        assert still.locator(".chart polyline").count() >= 3 and messages == []
        still.close()
        page.close()


def test_a_form_starts_a_run(tmp_path: Path, browser: Any, monkeypatch: Any) -> None:
    """The form of declared options: its plan is that of --dry-run, a mistake is one sentence, the run is a real one."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    root = tmp_path / "runs"
    root.mkdir()
    with served(studio_of(root, True, tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address + "#")
        page.wait_for_selector("nav a")
        go(page, "#/new")
        page.select_option("#preset", "demo")
        page.fill("[name='rounds.total']", "2")
        page.fill("[name='data.limit']", "200")
        page.fill("[name=name]", "from-the-form")
        page.fill("[name='local.batch_size']", "-3")
        assert "rounds.total=2" in page.locator("#command").inner_text()
        page.click("#start")
        page.wait_for_selector(".notice:has-text('local.batch_size')")
        assert list(root.iterdir()) == []
        page.fill("[name='local.batch_size']", "16")
        page.fill("input[name='trainable.kind']", "head")
        page.click("#plan")
        page.wait_for_selector("#plan-text", timeout=90_000)
        assert "2 rounds" in page.locator("#plan-text").inner_text()
        assert list(root.iterdir()) == [], "a plan makes nothing"
        page.click("#start")
        page.wait_for_selector("#started a")
        page.click("#started a", no_wait_after=True)
        (folder,) = [wait_for_run(root)]
        wait_until(lambda: (folder / "summary.json").exists(), "the run has a result", 120)
        wait_until(lambda: json.loads((folder / "run.json").read_text())["status"] == "finished", "it is finished", 60)
        page.wait_for_selector(".badge.finished")
        assert 'name = "from-the-form"' in (folder / "config.toml").read_text()
        expected = [text for text in messages if "400" not in text]  # the refused mistake
        assert expected == []
        page.close()


def wait_for_run(root: Path) -> Path:
    """The folder of the only run below `root`, once it is there."""
    wait_until(lambda: list(root.glob("*/run.json")), "the run's folder", 90)
    (file,) = root.glob("*/run.json")
    return file.parent


def test_two_thousand_runs_are_listed_and_filtered(tmp_path: Path, browser: Any) -> None:
    root = tmp_path / "runs"
    template = write_run(tmp_path / "template")
    files = {name: (template / name).read_text() for name in ("run.json", "metrics.jsonl", "summary.json")}
    for number in range(2000):
        folder = root / f"sweep-{number % 10}" / f"run-{number:04d}"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "config.toml").write_text(f'name = "r"\nseed = {number % 5}\n[local]\nlr = {(number % 7) / 100}\n')
    with served(studio_of(root, cache=tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector("#count:has-text('2,000 of 2,000 runs')", timeout=60_000)
        assert page.locator("tr[data-run]").count() == 100
        page.click("button:text-is('Next')")
        page.wait_for_selector("span:text-is('page 2 of 20')")
        page.fill("#filter", "run-1234")
        page.wait_for_selector("#count:has-text('1 of 2,000 runs')")
        go(page, "#/sweep")
        page.wait_for_selector(".parallel path", state="attached")
        assert messages == []
        page.close()


def test_ten_thousand_rounds_are_drawn_with_their_extremes(tmp_path: Path, browser: Any) -> None:
    folder = write_run(tmp_path / "runs" / "long", rounds=1)
    lines = [line(number, accuracy=0.5, loss=1.0, dropped=[]) for number in range(1, 10_001)]
    lines[7777]["loss"] = 9.0
    lines[3333]["accuracy"] = 0.01
    (folder / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/run?run=long")
        page.wait_for_selector(".chart polyline")
        for index in (0, 1):
            points = page.locator(".chart").nth(index).locator("polyline").first.get_attribute("points").split()
            heights = [float(point.split(",")[1]) for point in points]
            assert len(points) <= 1600 and max(heights) - min(heights) > 100, "the one extreme round is lost"
        page.close()


@pytest.mark.parametrize("width", [400, 1600])
def test_keyboard_and_widths(tmp_path: Path, browser: Any, width: int) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", config='name = "b"\nseed = 1\n[local]\nlr = 0.2\n')
    with served(studio_of(tmp_path / "runs", True, tmp_path / "index")) as server:
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        for view in ("#/runs", "#/run?run=a", "#/compare?run=a&run=b", "#/sweep", "#/new"):
            go(page, view)
            page.wait_for_timeout(300)
            assert page.evaluate(SIDEWAYS) is False, f"{view} scrolls sideways at {width}"
            unnamed = page.evaluate(
                "[...document.querySelectorAll('input, select, button, a')].filter(e => !(e.textContent.trim() || "
                "e.getAttribute('aria-label') || e.labels?.length)).map(e => e.outerHTML)"
            )
            assert unnamed == [], "an element has no name for a screen reader"
        go(page, "#/run?run=a")
        page.focus("#tab-overview")
        page.keyboard.press("ArrowRight")
        page.wait_for_selector("#tab-clients[aria-selected=true]")
        with page.expect_response(lambda response: "tab=overview" in response.url):
            page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(300)  # until the tab is drawn, and the charts of the one before are gone
        page.focus(".chart svg")
        page.keyboard.press("ArrowRight")
        assert page.locator(".chart .tip").first.is_visible()
        page.close()


CONTRAST = """() => {
    const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$|transparent/.test(c)) return c; } return 'rgb(255,255,255)'; };
    const low = [];
    for (const e of document.querySelectorAll('main *, header *')) {
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) || e.disabled) continue;
        if (!e.getClientRects().length || e.closest('svg') || e.closest('.map')) continue;
        const a = light(getComputedStyle(e).color), b = light(ground(e));
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push([e.textContent.slice(0, 30), ratio]);
    }
    return low;
}"""


PALE_CURVES = """(() => {
    const probe = document.createElement('span'), low = [];
    document.querySelector('.card').append(probe);
    probe.textContent = 'x';
    for (const name of [...Array(7).keys()].map(i => `--c${i}`)) {
        probe.style.color = `var(${name})`;
        for (const [, ratio] of CONTRAST) if (ratio < 3) low.push(name);
    }
    probe.remove();
    return low;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(tmp_path: Path, browser: Any, scheme: Any) -> None:
    """Text 4.5 to 1 in every view, also in a chart's note and a running run's badge; curves 3 to 1 on their card."""
    import fcntl

    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", status="interrupted")
    live = write_run(tmp_path / "runs" / "live", status="running")
    with (live / ".lock").open("w") as lock, served(studio_of(tmp_path / "runs", True, tmp_path / "index")) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = browser.new_page(color_scheme=scheme)
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        for view in ("#/runs", "#/run?run=b", "#/run?run=live", "#/compare?run=a&run=b", "#/new"):
            go(page, view)
            page.wait_for_timeout(200)
            if page.locator(".chart svg[tabindex]").count():
                page.locator(".chart svg[tabindex]").first.focus()
                page.keyboard.press("ArrowRight")
                assert page.locator(".tip:not([hidden])").count() == 1
            assert page.evaluate(CONTRAST) == []
        go(page, "#/run?run=live")
        page.wait_for_selector(".badge.running")
        curves = PALE_CURVES.replace("CONTRAST", f"({CONTRAST})()")
        assert page.evaluate(curves) == []
        page.evaluate("document.documentElement.style.setProperty('--soft', 'var(--line)')")
        assert page.evaluate(CONTRAST) != [], "the check must see pale text"
        page.close()
