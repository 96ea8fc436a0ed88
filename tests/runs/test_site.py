"""The documentation site: every link holds, and a reader without a network has all of it, search included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert {"index.html", "tutorial.html", "config.html"} <= {page.name for page in pages}
    for page in pages:
        loaded = re.findall(r"<(?:script|img|link|iframe)[^>]*?(?:src|href)=\"(\w+:)?//", page.read_text("utf-8"))
        assert not loaded, f"{page.name} loads from another machine"
    assert (tmp_path / "search" / "search_index.js").exists()  # a page in a folder may load a script, not data
    assert "iframe-worker.js" in (tmp_path / "index.html").read_text("utf-8")
    assert not list(tmp_path.rglob("__pycache__"))
