"""The self-test: it passes on a device that computes like the CPU, and says so of one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.pretend_device import NAME
from typer.testing import CliRunner

from fedgraft import algorithms as zoo
from fedgraft.cli.main import app
from fedgraft.core.device_choice import CHOICE
from fedgraft.core.space import Bound
from fedgraft.runs import selftest as module
from fedgraft.runs.selftest import ALGORITHMS, Check, rows, selftest


def test_a_device_with_the_cpus_kernels_has_the_cpus_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "cpu")
    words = ["selftest", "--device", NAME, "--only", "trainable head", "-o", str(tmp_path / "found")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found").read_text())
    (check,) = found["checks"]
    assert check["difference"] < 1e-3 and check["repeats"] and check["passed"]
    assert found["facts"]["device"] == NAME and found["speed"]["bare training"] > 0
    assert {"tf32", "torch", "peak_host_megabytes"} <= set(found["facts"])


@pytest.mark.deploy
def test_every_check_passes() -> None:
    result = selftest(NAME)
    assert result.passed and len(result.checks) == len(rows())
    assert all(check.difference < module.NEAR for check in result.checks if check.allowed == module.NEAR)


def test_a_device_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = Bound.gradient

    def wrong(self: Bound) -> torch.Tensor:
        found = gradient(self)
        return found.mul_(1.5) if self.values.device.type == NAME else found

    monkeypatch.setattr(Bound, "gradient", wrong)
    monkeypatch.setattr(module, "measured_speed", lambda place: {})
    result = selftest(NAME, ["trainable head"])
    assert not result.passed and result.checks[0].difference > 0.1
    assert not Check("unsteady", 0.0, 0.1, False, 1.0).passed


def test_results_are_stored_for_every_row_and_a_small_file_holds_them() -> None:
    stored = json.loads(module.STORED.read_text())["checks"]
    assert set(stored) == set(rows()), "run python -m fedgraft.runs.selftest"
    assert module.STORED.stat().st_size < 50_000
    assert all(len(sketch) == module.SKETCH and max(map(abs, sketch)) > 0 for sketch in stored.values())


def test_a_sketch_measures_distances() -> None:
    draw = torch.Generator().manual_seed(0)
    for length in (70, 5000):
        vector = torch.randn(length, generator=draw)
        assert 0.6 < float(module.sketch(vector).norm() / vector.norm()) < 1.4
        torch.testing.assert_close(module.sketch(2 * vector), 2 * module.sketch(vector))


def test_its_rows_are_parts_that_exist() -> None:
    assert set(ALGORITHMS) <= set(zoo.ALGORITHMS) and len(ALGORITHMS) == 12
    assert {"trainable lora", "trainable sparse", "batched heads", "float16"} <= set(rows())
