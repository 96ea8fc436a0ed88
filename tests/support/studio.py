"""A studio in this process, its page in Chromium, and folders of runs with made-up numbers."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.pages import line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_BROWSER = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")


@contextmanager
def served(studio: Any) -> Iterator[Any]:
    """The server of a studio, in a thread, until the block ends."""
    from fedgraft.studio.server import Server

    server = Server(studio)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the studio has started")
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def wait_until(condition: Callable[[], Any], subject: str, seconds: float = 60.0) -> None:
    """Wait for a condition; fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {subject}"
        time.sleep(0.05)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium; skip where playwright or Chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def complaints(page: Any) -> list[str]:
    """Everything that the page logs, throws or asks of another machine, from now on."""
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("dialog", lambda dialog: messages.append(f"a name was executed {dialog.dismiss()}"))

    def note(request: Any) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:", "blob:")):
            messages.append(request.url)

    page.on("request", note)
    return messages


def write_run(folder: Path, rounds: int = 6, config: str = "", status: str = "finished", **summary: Any) -> Path:
    """A run folder with made-up numbers, without the cost of making one; return it."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config or f'name = "{folder.name}"\nseed = 0\n[local]\nlr = 0.1\n')
    (folder / "run.json").write_text(json.dumps({"config_digest": "d", "status": status}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line(number)) + "\n" for number in range(1, rounds + 1)))
    numbers = {"test": {"accuracy": 0.6, "count": 300}, "best_round": rounds, **summary}
    (folder / "summary.json").write_text(json.dumps(numbers))
    (folder / "log.txt").write_text("2026-01-01 00:00:00,000 | WARNING | a warning\n")
    return folder


def write_setting(root: Path, name: str, seed: int, rate: float, accuracy: float) -> Path:
    """A finished run of one setting and seed with this test accuracy."""
    config = f'name = "{name}"\nseed = {seed}\n[local]\nlr = {rate}\n'
    return write_run(root / f"{name}-{seed}", config=config, test={"accuracy": accuracy, "count": 1000})
