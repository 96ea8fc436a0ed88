"""Every part and command on a pretend accelerator: the tests of `tests/devices`, in one process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = Path(__file__).parents[1] / "devices"


@pytest.mark.parametrize(
    "rows", [pytest.param("not deploy", marks=pytest.mark.slow), pytest.param("deploy", marks=pytest.mark.deploy)]
)
def test_what_runs_on_a_cpu_runs_on_a_device(rows: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", rows, "--basetemp", str(tmp_path / "devices"), str(DEVICES)]
    environment = os.environ | {"FEDGRAFT_TEST_DEVICES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=DEVICES.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
