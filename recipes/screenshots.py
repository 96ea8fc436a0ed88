"""docs/images: the report, and two views of the studio, of small runs on digits, through Chromium.

Run it with `python recipes/screenshots.py` (needs the `dev` extra and Debian's chromium); the runs take minutes.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedgraft.config.load import validate
from fedgraft.runs.loop import run
from fedgraft.studio.server import Server
from fedgraft.studio.views import studio_of

RUN = {
    "name": "digits",
    "model": {"name": "nano", "head": "random"},
    "trainable": {"kind": "head"},
    "partition": {"kind": "classes", "clients": 10, "classes_per_client": 5},
    "local": {"steps": 4, "lr": 0.03},
    "rounds": {"total": 40, "fraction": 0.5, "evaluate_every": 1, "checkpoint_every": 40},
}
SHORT = ["demo", "data.limit=600", "rounds.total=10", "rounds.evaluate_every=1", "workers=1", "--quiet"]
COMPARED = {
    "fedavg-0": ["trainable.kind=head", "local.lr=0.05"],
    "fedprox-0": ["trainable.kind=head", "local.lr=0.05", "algorithm.name=fedprox"],
    "sparse-0": ["trainable.kind=sparse"],
}
SWEEP = ["demo", "trainable.kind=head", "data.limit=400", "rounds.total=4", "rounds.evaluate_every=1", "workers=1"]
SWEEP += ["--over", "local.lr=0.003,0.01,0.03,0.1", "--over", "local.batch_size=8,32", "--seeds", "0,1"]
COLOURS = 128


def main() -> None:
    """Run, and photograph the report and the studio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/screenshots"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    folder = options.runs / "digits"
    run(validate(RUN), folder, console=False)
    for name, words in COMPARED.items():
        fedgraft("run", *SHORT, *words, "-o", str(options.runs / "few" / name))
    fedgraft("sweep", *SWEEP, "--processes", "0", "-o", str(options.runs / "few" / "sweep"))
    options.out.mkdir(parents=True, exist_ok=True)
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1000, "height": 900})
        page.goto((folder / "report.html").resolve().as_uri())
        photograph(page, options.out / "report.png")
        server = Server(studio_of(options.runs / "few"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.1)
        runs = "&".join(f"run={name}" for name in COMPARED)
        show(chromium, server.address, f"#/compare?{runs}", "light", "", options.out / "studio-compare.png")
        show(chromium, server.address, "#/sweep", "dark", "sweep/", options.out / "studio-sweep.png")
        server.stop()
        thread.join(10)


def fedgraft(*words: str) -> None:
    """Run a command to its end."""
    subprocess.run([sys.executable, "-m", "fedgraft", *words], check=True)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


def show(chromium: Any, address: str, view: str, scheme: str, words: str, to: Path) -> None:
    """Photograph a view of the studio; `words` are put into the filter of the table first."""
    page = chromium.new_page(viewport={"width": 1440, "height": 960}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_selector("tr[data-run]")
    page.fill("#filter", words)
    page.wait_for_timeout(400)
    page.evaluate("view => { location.hash = view; }", view)
    page.wait_for_selector(".chart svg")
    photograph(page, to)


def photograph(page: Any, to: Path) -> None:
    """A page as a picture of a small palette, which keeps it small."""
    from PIL import Image

    page.wait_for_timeout(1000)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(to, optimize=True)


if __name__ == "__main__":
    main()
