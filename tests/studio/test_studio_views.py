"""What the studio shows beside curves: tables taken out, filtered settings, who gains, nodes; its index and actions."""

from __future__ import annotations

import csv
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises
from tests.support.pages import HOSTILE
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

from fedgraft.config.describe import option_fields
from fedgraft.consortium.worth import Site, write_worth
from fedgraft.deploy.node_loop import ANSWERED, CONNECTED, WORKING
from fedgraft.metrics.metrics import Metric
from fedgraft.report.preflight_view import policy_differences, preflight_sections
from fedgraft.report.sections import Grid, Matrix, Section, Texts
from fedgraft.studio import actions as studio_actions
from fedgraft.studio.actions import Actions, FederationActions
from fedgraft.studio.library import RunLibrary
from fedgraft.studio.node import _doing
from fedgraft.studio.server import Studio
from fedgraft.studio.views import studio_of

SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def go(page: Any, view: str) -> None:
    """Show another view of the page that is open."""
    page.evaluate("view => { document.querySelector('main').replaceChildren(); location.hash = view; }", view)
    page.wait_for_selector("main h1")


def saved(page: Any, selector: str) -> bytes:
    """The file that a click saves."""
    with page.expect_download() as waiting:
        page.click(selector)
    return Path(waiting.value.path()).read_bytes()


def settings(root: Path) -> None:
    """Two settings of three seeds."""
    for name, rate in (("slow", 0.01), ("quick", 0.1)):
        for seed in range(3):
            write_setting(root, name, seed, rate, 0.5 + rate + seed / 100)


@pytest.mark.slow
@NEEDS_BROWSER
def test_settings_are_those_of_the_filtered_runs_and_tables_are_taken_out(tmp_path: Path, browser: Any) -> None:
    settings(tmp_path / "runs")
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        rows = list(csv.reader(saved(page, "button:text-is('CSV')").decode().splitlines()))
        assert rows[0][0] == "name" and len(rows) == 7 and "local.lr" in rows[0]
        page.click("#group")
        page.wait_for_selector("th:text-is('setting')")
        assert page.locator("tbody tr").count() == 2
        page.fill("#filter", "quick seed<2")
        page.wait_for_selector("td:has-text('60.50 ±')")
        assert page.locator("tbody tr").count() == 1, "the other setting does not pass the filter"
        rows = list(csv.reader(saved(page, ".tools button:text-is('CSV')").decode().splitlines()))
        assert rows[0][0] == "setting" and len(rows) == 2
        page.click("#group")
        page.fill("#filter", "")
        page.wait_for_selector("tr[data-run=slow-0]")
        go(page, "#/sweep")
        page.wait_for_selector(".parallel path", state="attached")
        assert page.locator(".parallel text title:text-is('local.lr')").count() == 1
        assert saved(page, ".tools button:text-is('SVG')").startswith(b"<svg")
        assert saved(page, ".tools button:text-is('PNG')").startswith(b"\x89PNG")
        rows = list(csv.reader(saved(page, ".tools button:text-is('CSV')").decode().splitlines()))
        assert rows[0] == ["run", "local.lr", "test accuracy"] and len(rows) == 7
        assert messages == []
        page.close()


def test_rows_of_an_older_table_are_not_grouped(tmp_path: Path) -> None:
    settings(tmp_path / "runs")
    library = RunLibrary(tmp_path / "runs", tmp_path / "index")
    table = library.table()
    names = [run["name"] for run in table["runs"]]
    chosen = tuple(row for row, name in enumerate(names) if name.startswith("quick"))
    groups = library.groups(table["version"], chosen)
    assert len(groups["rows"]) == 1 and groups["rows"][0][1] == "3"
    assert len(library.groups()["rows"]) == 2
    with raises("E-STUDIO-VERSION"):
        library.groups(table["version"] - 1, chosen)


@pytest.mark.slow
@NEEDS_BROWSER
def test_a_comparison_opens_offline(tmp_path: Path, browser: Any) -> None:
    settings(tmp_path / "runs")
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page()
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/compare?run=quick-0&run=slow-0")
        page.wait_for_selector(".chart polyline")
        page.click("[data-axis=megabytes]")
        page.wait_for_selector(".chart text:text-is('MB up and down')")
        offline = tmp_path / "offline.html"
        offline.write_bytes(saved(page, "#offline"))
        page.close()
    still = browser.new_page()
    messages = complaints(still)
    still.goto(offline.as_uri())
    still.wait_for_selector(".chart polyline")
    assert still.locator(".chart").first.locator("polyline").count() == 2 and messages == []
    assert "MB up and down" in still.locator("main").inner_text()
    still.close()


@pytest.mark.slow
@NEEDS_BROWSER
def test_who_gains_and_the_release_are_views_of_a_run(tmp_path: Path, browser: Any) -> None:
    """The page of `worth` and the studio draw the same sections; hostile names of sites stay text in both."""
    folder = write_run(tmp_path / "runs" / "one")
    gains = {"north": (0.1, 0.2), HOSTILE: (-0.2, -0.1)}
    sites = []
    for name, (low, high) in gains.items():
        models: dict[str, Metric | None] = {"alone": Metric(0.6, 0.5, 0.7, 40, "%"), "federated": None}
        sites.append(Site(name, 40, models, Metric((low + high) / 2, low, high, 40, "points")))
    static = write_worth(folder / "worth", {"balanced_accuracy": sites}, "one")
    check = {"rule": HOSTILE, "site": "all sites", "measured": "0.7", "required": "at most 0.6", "verdict": "fail"}
    release = {"verdict": "fail", "checks": [check], "notes": ["a note"]}
    (folder / "release").mkdir()
    (folder / "release" / "release.json").write_text(json.dumps(release))
    with served(studio_of(tmp_path / "runs", cache=tmp_path / "index")) as server:
        page = browser.new_page(viewport={"width": 400, "height": 800})
        messages = complaints(page)
        page.goto(server.address)
        page.wait_for_selector("tr[data-run]")
        go(page, "#/run?run=one")
        page.click("#tab-worth")
        page.wait_for_selector(".chart circle")
        shown = page.locator("#panel").inner_text()
        assert "gains: north" in shown and "alert(1)" in shown
        assert page.evaluate(SIDEWAYS) is False
        page.click("#tab-release")
        page.wait_for_selector("h2:text-is('Release: fail')")
        assert messages == []
        page.goto(static.as_uri())
        page.wait_for_selector(".chart circle")
        assert page.locator(".chart").count() == 2 and messages == []
        assert page.locator("main script, main img").count() == 0
        page.close()


def hostile_state() -> dict[str, Any]:
    """The state of a federation whose every text is hostile."""
    sites = []
    for number, rules in enumerate(({HOSTILE: HOSTILE}, {})):
        facts = {"site": HOSTILE if number else "north", "images": 3, "test_images": 1, "classes": {HOSTILE: 3}}
        facts |= {name: [] for name in ("width", "height", "channels", "bits", "modalities", "windows", "intensity")}
        facts |= {"contrast": 1.0, "disk_gb": 2.0, "policy": True, "versions": {"fedgraft": HOSTILE}, "rules": rules}
        sites.append(facts)
    found = [{"kind": HOSTILE, "site": HOSTILE, "text": HOSTILE, "stops": True}]
    sections = [
        *preflight_sections(sites, found),
        Section("Refusals by rule", [Grid([{"node": HOSTILE, "rule": HOSTILE}])]),
        Section("Rounds and nodes", [Texts([HOSTILE]), Matrix({HOSTILE: [1, 0]}, [HOSTILE, 2], corner="node")]),
    ]
    node = {"number": 0, "name": HOSTILE, "connection": HOSTILE, "contributed": HOSTILE, "now": HOSTILE}
    return {
        "problem": HOSTILE,
        "path": HOSTILE,
        "address": HOSTILE,
        "nodes": [{**node, "down": HOSTILE, "up": HOSTILE, "speed": HOSTILE}],
        "run": 1,
        "run_name": HOSTILE,
        "query": "",
        "run_status": HOSTILE,
        "reason": HOSTILE,
        "round": 1,
        "total": 2,
        "left": 1.0,
        "phases": [HOSTILE],
        "waits_for": [HOSTILE],
        "sent": [HOSTILE, HOSTILE],
        "sections": [section.as_json() for section in sections if section],
    }


@pytest.mark.slow
@NEEDS_BROWSER
@pytest.mark.parametrize("width", [400, 1440])
def test_hostile_nodes_stay_text(browser: Any, width: int) -> None:
    own = {"title": HOSTILE, "problem": HOSTILE, "now": {"connection": HOSTILE, "work": HOSTILE}}
    own |= {"cards": [(HOSTILE, HOSTILE, HOSTILE)], "sections": hostile_state()["sections"]}
    for studio in (Studio(federation=hostile_state), Studio(node=lambda: own)):
        with served(studio) as server:
            page = browser.new_page(viewport={"width": width, "height": 900})
            messages = complaints(page)
            page.goto(server.address)
            page.wait_for_selector("h2:text-is('Where the owners\\' policies differ')")
            assert page.locator("main script, main img, main [onerror]").count() == 0
            assert "alert(1)" in page.locator("main").inner_text()
            assert page.evaluate(SIDEWAYS) is False and messages == []
            page.close()


def test_policies_that_are_alike_are_no_difference() -> None:
    sites: list[dict[str, Any]] = [{"site": "a", "rules": {"rounds": "5"}}, {"site": "b", "rules": {"rounds": "5"}}]
    assert policy_differences(sites) == []
    sites[1]["rules"] = {"rounds": "6", "secure": "True"}
    assert policy_differences(sites) == [
        {"rule": "rounds", "a": "5", "b": "6"},
        {"rule": "secure", "a": "not set", "b": "True"},
    ]


def record_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From now on actions start a program that writes its arguments, one a line; return the file."""
    program = folder / "program"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {folder}/words\necho done\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(studio_actions.sys, "executable", str(program))
    return folder / "words"


def test_each_action_is_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = record_commands(tmp_path, monkeypatch)
    root = tmp_path / "runs"
    folder = write_run(root / "one")
    fed = ["-m", "fedgraft", "deploy"]
    expected: list[tuple[Any, list[str]]] = [
        (lambda: Actions(root).release(folder), ["-m", "fedgraft", "release", str(folder)]),
        (lambda: Actions(root).evaluate(folder), ["-m", "fedgraft", "evaluate", str(folder)]),
        (lambda: Actions(root).resume(folder), ["-m", "fedgraft", "resume", str(folder), "--quiet"]),
        (lambda: FederationActions(root).start({}), [*fed, "submit", str(root)]),
        (lambda: FederationActions(root).stop("one"), [*fed, "stop", str(root), "--run"]),
        (lambda: FederationActions(root).release(folder), [*fed, "release", str(root), str(folder)]),
        (lambda: FederationActions(root).evaluate(folder), [*fed, "evaluate", str(root), str(folder)]),
        (
            lambda: FederationActions(root).resume(folder),
            [*fed, "submit", str(root), "--folder", str(folder), "--resume"],
        ),
        (
            lambda: FederationActions(root).preflight({}),
            [*fed, "preflight", str(root), "--out", str(root / "preflight" / "page")],
        ),
    ]
    for act, command in expected:
        words.unlink(missing_ok=True)
        job = act()
        wait_until(lambda: words.exists() and words.read_text().endswith(command[-1] + "\n"), str(command))  # noqa: B023
        assert words.read_text().splitlines() == command and job["title"]


def test_an_action_on_a_run_is_not_begun_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(studio_actions.sys, "executable", str(program))
    folder = write_run(tmp_path / "runs" / "one")
    actions = Actions(tmp_path / "runs")
    actions.release(folder)
    with raises("E-STUDIO-BUSY"):
        actions.evaluate(folder)
    assert actions.stop("one")["run"] == "one"
    wait_until(lambda: actions.jobs()[0]["code"] is not None, "the command ends")


def test_runs_elsewhere_belong_to_the_list(tmp_path: Path) -> None:
    """`deploy submit --folder` writes where the coordinator says; the federation's folder lists it all the same."""
    fed = tmp_path / "fed"
    write_run(fed / "inside")
    write_run(tmp_path / "run")
    write_run(tmp_path / "stranger")
    named = [fed / "inside", tmp_path / "run", tmp_path / "not yet begun"]
    library = RunLibrary(fed, tmp_path / "index", lambda: named)
    assert [run["name"] for run in library.table()["runs"]] == ["../run", "inside"]
    assert library.record("../run").path.resolve() == tmp_path / "run"
    assert library.view("../run")["status"] == "finished"
    with raises("E-REPORT-NO-RUN"):
        library.record("../stranger")


def test_a_node_that_has_answered_works_on_nothing() -> None:
    log = f"{CONNECTED} 5\n{WORKING} train.request\n"
    assert _doing(log) == {"connection": "connected", "work": "train"}
    assert _doing(f"{log}{ANSWERED}\n")["work"] == ""


def test_the_form_suggests_the_names_that_it_knows() -> None:
    fields = {field["key"]: field for field in option_fields()}
    assert {"fedavg", "scaffold"} <= set(fields["algorithm.name"]["suggestions"])
    assert "cosine" in fields["schedule.kind"]["suggestions"] and fields["rounds.total"]["suggestions"] == []


@pytest.mark.parametrize("damage", ["missing", "cut", "other version", "no JSON", "a lie"])
def test_the_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    """A damaged index is never believed: the same table comes out, and the index is whole again."""
    settings(tmp_path / "runs")
    before = RunLibrary(tmp_path / "runs", tmp_path / "index").table()["runs"]
    (file,) = (path for path in (tmp_path / "index").rglob("*") if path.is_file())
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "other version":
        record = json.loads(whole)
        for run in record["runs"].values():
            run["row"]["test"] = 0.99  # as a later version might mean it
        file.write_bytes(json.dumps({**record, "version": -1}).encode())
    elif damage == "no JSON":
        file.write_bytes(os.urandom(1000))
    else:
        record = json.loads(whole)
        run = next(iter(record["runs"].values()))
        run["stamp"] = [[1, 1]]
        run["row"]["test"] = 0.99
        file.write_bytes(json.dumps(record).encode())
    assert RunLibrary(tmp_path / "runs", tmp_path / "index").table()["runs"] == before
    assert json.loads(file.read_bytes())["runs"].keys() == {run["name"] for run in before}


def test_a_run_is_read_again_only_if_its_files_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.report import run_index

    settings(tmp_path / "runs")
    RunLibrary(tmp_path / "runs", tmp_path / "index").table()
    read = []
    original = run_index._read_run
    monkeypatch.setattr(run_index, "_read_run", lambda *words: read.append(words[1]) or original(*words))
    assert len(RunLibrary(tmp_path / "runs", tmp_path / "index").table()["runs"]) == 6 and read == []
    later = time.time() + 5
    os.utime(tmp_path / "runs" / "slow-1" / "metrics.jsonl", (later, later))
    RunLibrary(tmp_path / "runs", tmp_path / "index").table()
    assert read == ["slow-1"]
