"""docs/images: the report and `fedgraft watch`, of a small run on digits, through Chromium.

Run it with `python recipes/screenshots.py` (needs the `dev` extra and Debian's chromium); the run takes seconds.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from fedgraft.report.watch import frame
from rich.console import Console

from fedgraft.config.load import validate
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

RUN = {
    "name": "digits",
    "model": {"name": "nano", "head": "random"},
    "trainable": {"kind": "head"},
    "partition": {"kind": "classes", "clients": 10, "classes_per_client": 5},
    "local": {"steps": 4, "lr": 0.03},
    "rounds": {"total": 40, "fraction": 0.5, "evaluate_every": 1, "checkpoint_every": 40},
}


def main() -> None:
    """Run, draw the frame, photograph both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs/screenshots"))
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    folder = options.runs / "digits"
    run(validate(RUN), folder, console=False)
    options.out.mkdir(parents=True, exist_ok=True)
    photograph(folder / "report.html", options.out / "report.png", (1000, 900))
    console = Console(record=True, width=96, file=io.StringIO())
    console.print(frame(RunFolder.open(folder), 96))
    svg = folder / "watch.svg"
    svg.write_text(console.export_svg(title="fedgraft watch"), encoding="utf-8")
    page = folder / "watch.html"
    page.write_text(f'<body style="margin:0"><img src="{svg.name}" width="1000">', encoding="utf-8")
    photograph(page, options.out / "watch.png", (1000, 560))


def photograph(page: Path, to: Path, size: tuple[int, int]) -> None:
    """A page as a picture of a palette of 64 colours, which keeps it small."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": size[0], "height": size[1]})
        view.goto(page.resolve().as_uri())
        view.wait_for_timeout(300)
        data = view.screenshot()
        browser.close()
    Image.open(io.BytesIO(data)).convert("RGB").quantize(64).save(to, optimize=True)


if __name__ == "__main__":
    main()
