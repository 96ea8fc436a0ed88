"""The studio: how soon 2,000 runs are listed, what a page costs that follows a run, how soon 10,000 rounds are drawn.

    python -m benchmarks.bench_studio       # three minutes; needs playwright and Chromium

A `fedgraft studio` process serves folders of made-up runs, and a headless Chromium has its page open. Listing: the
first answer of a new process with the index of an earlier one, without it, and with a damaged one, and the page until
its table is drawn. Following: processor time of the studio's process and of Chromium's page process while a run adds a
round a second, as shares of a core. Drawing: in the page, from the moment that the view is asked for until the frame
after its curves are drawn, the server's reading included, for a run that was read before and for one that was not.
Writes runs/benchmarks/studio.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.page import spread
from fedgraft.config.load import load, to_toml

OUT = Path("runs") / "benchmarks" / "studio.json"
LIST_SECONDS, SHARE_PERCENT, DRAW_SECONDS = 1.0, 1.0, 0.3
RUNS, ROUNDS = 2000, 10_000
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRAWN = """async run => {
    const began = performance.now();
    location.hash = `#/run?run=${run}`;
    while (document.querySelectorAll('.chart polyline').length < 3) await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    return (performance.now() - began) / 1000;
}"""


def round_line(number: int) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    return {
        "round": number,
        "accuracy": 0.5 + 0.4 * number / (number + 50),
        "loss": 2.0 / (number + 1),
        "train_loss": 2.5 / (number + 1),
        "update_norm": 1.0 / (number + 1),
        "lr": 0.1,
        "bytes_up": 2_000_000,
        "bytes_down": 1_000_000,
        "clients": {"ids": [1, 2], "loss": [1.0, 3.0], "norm": [0.5, 0.7], "drift": [0.1, 0.2], "cosine": [0.9, 0.8]},
        "seconds": {"exchange": 0.5, "combine": 0.25},
        "dropped": [],
    }


def write_run(folder: Path, rounds: int, config: str, status: str = "finished") -> None:
    """A run folder with made-up numbers; one that is running has no result."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "run.json").write_text(json.dumps({"config_digest": "d", "status": status}))
    lines = [json.dumps(round_line(number)) + "\n" for number in range(1, rounds + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if status == "finished":
        summary = {"test": {"accuracy": 0.6, "count": 300}, "best_round": rounds}
        (folder / "summary.json").write_text(json.dumps(summary))


@contextmanager
def studio(folder: Path, cache: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `fedgraft studio` process and the address that it prints."""
    environment = {**os.environ, "FEDGRAFT_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "fedgraft", "studio", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                sys.exit("the studio printed no address")
            yield process, match[0]
        finally:
            process.terminate()


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def renderers(pid: int) -> list[int]:
    """The processes below `pid` that draw pages."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = (int(stat[1]), command)
    found = []
    for child, (parent, command) in parents.items():
        above = parent
        while above in parents and above != pid:
            above = parents[above][0]
        if above == pid and b"--type=renderer" in command:
            found.append(child)
    return found


def listing(browser: Any, root: Path, scratch: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds until 2,000 runs are listed, by what was there before."""
    cache = scratch / "index"
    kinds = ("without an index", "damaged index", "index")
    found: dict[str, list[float]] = {kind: [] for kind in (*kinds, "page")}
    spent: dict[str, list[float]] = {f"{kind}, processor": [] for kind in kinds}
    for _ in range(repeats):
        shutil.rmtree(cache, ignore_errors=True)
        for kind in kinds:
            if kind == "damaged index":
                for file in cache.rglob("*.json"):
                    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            with studio(root, cache) as (process, address):
                page = browser.new_page()
                page.goto(address.partition("?")[0])  # refused without the token, but browser and server are awake
                before = processor_seconds(process.pid)
                began = time.perf_counter()
                response = page.context.request.get(address)
                table = page.context.request.get(response.url + "api/runs").json()
                found[kind].append(time.perf_counter() - began)
                spent[f"{kind}, processor"].append(processor_seconds(process.pid) - before)
                if len(table["runs"]) != RUNS:
                    sys.exit(f"{len(table['runs'])} runs are listed")
                if kind == "index":
                    began = time.perf_counter()
                    page.goto(address)
                    page.wait_for_selector("tr[data-run]")
                    found["page"].append(time.perf_counter() - began)
                page.close()
    return found | spent


def following(browser: Any, browser_pid: int, scratch: Path, seconds: int) -> dict[str, float]:
    """Shares of a core, in percent, of the studio and of the page while a run adds a round a second, and at rest."""
    root = scratch / "live"
    write_run(root / "run", 300, 'name = "live"\nseed = 0\n[rounds]\ntotal = 1000\n', "running")
    shares = {}
    with (root / "run" / ".lock").open("w") as lock, studio(root, scratch / "index") as (process, address):
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = browser.new_page()
        page.goto(address)
        page.wait_for_selector("tr[data-run]")
        page.evaluate("location.hash = '#/run?run=run'")
        page.wait_for_selector(".chart polyline")
        for kind in ("at rest", "running"):
            time.sleep(5)
            pids = {"studio": [process.pid], "page": renderers(browser_pid)}
            before = {name: sum(map(processor_seconds, known)) for name, known in pids.items()}
            began = time.perf_counter()
            with (root / "run" / "metrics.jsonl").open("a") as file:
                for number in range(301, 301 + seconds):
                    if kind == "running":
                        file.write(json.dumps(round_line(number)) + "\n")
                        file.flush()
                    time.sleep(1)
            took = time.perf_counter() - began
            for name, known in pids.items():
                spent = sum(map(processor_seconds, known)) - before[name]
                shares[f"{name}, {kind}"] = 100 * spent / took
        page.close()
    return shares


def drawing(browser: Any, browser_pid: int, scratch: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds until the curves of 10,000 rounds are drawn: the first time, and when the run was read before.

    With the processor seconds of the studio and the page in it, which other work on the machine changes less.
    """
    root = scratch / "long"
    write_run(root / "short", 6, 'name = "short"\n')
    for number in range(repeats):
        write_run(root / f"long-{number}", ROUNDS, f'name = "long"\nseed = {number}\n')
    found: dict[str, list[float]] = {"first": [], "first, processor": [], "again": [], "again, processor": []}
    with studio(root, scratch / "index") as (process, address):
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(address)
        page.wait_for_selector("tr[data-run]")
        page.evaluate("location.hash = '#/run?run=short'")  # its module is loaded
        page.wait_for_selector(".chart polyline")
        for number in range(repeats):
            for kind in ("first", "again"):
                page.evaluate("location.hash = '#/runs'")
                page.wait_for_selector("tr[data-run]")
                page.wait_for_timeout(300)
                pids = [process.pid, *renderers(browser_pid)]
                before = sum(map(processor_seconds, pids))
                found[kind].append(page.evaluate(DRAWN, f"long-{number}"))
                found[f"{kind}, processor"].append(sum(map(processor_seconds, pids)) - before)
        page.close()
    return found


def main() -> None:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=60, help="how long a run is followed")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("this needs playwright and Chromium: pip install playwright")
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "load": [os.getloadavg()[0]]}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        scratch = Path(folder)
        whole = to_toml(load(None, ["name=r", "seed=7", "local.lr=0.123"]))  # every option, as runs store it
        for number in range(RUNS):
            config = whole.replace("seed = 7", f"seed = {number % 5}").replace("0.123", str((number % 7 + 1) / 100))
            write_run(scratch / "many" / f"sweep-{number % 10}" / f"run-{number:04d}", 20, config)
        server = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        found["list"] = listing(server, scratch / "many", scratch, given.repeats)
        found["draw"] = drawing(server, os.getpid(), scratch, given.repeats)
        found["follow"] = following(server, os.getpid(), scratch, given.seconds)
        server.close()
    found["load"].append(os.getloadavg()[0])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=2))
    print(section(given.out))


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown of the studio."""
    found = json.loads(path.read_text())
    rows = []
    for kind in ("without an index", "damaged index", "index", "page"):
        middle = spread(found["list"][kind]).middle
        rows.append(("studio", f"2,000 runs listed, {kind}, seconds (at most)", LIST_SECONDS, middle, middle <= 1))
    for kind in ("first", "again"):
        seconds = found["draw"][kind]
        middle = spread(seconds).middle
        kept = middle <= DRAW_SECONDS
        rows.append(("studio", f"10,000 rounds drawn, {kind}, seconds (at most)", DRAW_SECONDS, middle, kept))
    for kind, share in found["follow"].items():
        rows.append(("studio", f"a page, {kind}, % of a core (at most)", SHARE_PERCENT, share, share <= SHARE_PERCENT))
    return rows


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    least, most = sorted(found["load"])
    lines = [
        "## The studio",
        "",
        f"Command: `python -m benchmarks.bench_studio`, {found['date']}, load {least:.0f} to {most:.0f} on two cores: "
        "medians (least to most). Configs have every option; an index is read while the command starts.",
        "",
        "| what | measured | bar |",
        "|---|---|---|",
    ]
    for kind, seconds in found["list"].items():
        lines.append(f"| 2,000 runs listed, {kind} | {spread(seconds)} s | {LIST_SECONDS:g} s |")
    for kind, seconds in found["draw"].items():
        lines.append(f"| 10,000 rounds drawn, {kind} | {spread(seconds)} s | {DRAW_SECONDS:g} s |")
    for kind, share in found["follow"].items():
        lines.append(f"| a page that is open, {kind} | {share:.2f} % of a core | {SHARE_PERCENT:g} % |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
