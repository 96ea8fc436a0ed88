"""Commands that only read or list import no torch: that is most of their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedgraft.runs.run_folder import RunFolder

CODE = """
import sys
from fedgraft.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("heavy:", sorted({"torch", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    for name in "ab":
        run = RunFolder.create(tmp_path / name, f'name = "{name}"\n', "digest")
        run.metrics_path.write_text('{"round": 0, "accuracy": 0.5}\n{"round": 1, "accuracy": 0.6, "train_loss": 1.0}\n')
    return [str(tmp_path / name) for name in "ab"]


@pytest.mark.parametrize("command", ["list", "show", "watch", "options", "presets", "--help"])
def test_looking_needs_no_torch(command: str, runs: list[str], tmp_path: Path) -> None:
    words = {"list": [str(tmp_path)], "show": runs[:1], "watch": [runs[0], "--once"]}.get(command, [])
    found = subprocess.run([sys.executable, "-c", CODE, command, *words], capture_output=True, text=True, check=False)
    assert found.stdout.endswith("heavy: []\n"), found.stdout[-300:] + found.stderr[-300:]


@pytest.mark.slow
def test_comparing_needs_no_torch(runs: list[str], tmp_path: Path) -> None:
    words = ["compare", *runs, "--out", str(tmp_path / "page")]
    found = subprocess.run([sys.executable, "-c", CODE, *words], capture_output=True, text=True, check=False)
    assert found.stdout.endswith("heavy: []\n"), found.stdout[-300:] + found.stderr[-300:]
