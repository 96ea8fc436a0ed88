"""Every benchmark of one process starts with today's objects, at its smallest size; no time is looked at."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

SMALLEST = {
    "bench_head": ["--repeats", "1", "--rounds", "1"],
    "bench_sparse": ["--model", "tiny", "--repeats", "1", "--sparsity", "0.9"],
    "bench_micro": ["--small"],
    "bench_fisher": ["--threads", "1", "--size", "32", "--samples", "2", "--batch", "2", "--repeats", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_starts_and_writes_its_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, out = importlib.import_module(f"benchmarks.{name}"), tmp_path / "numbers.json"
    monkeypatch.setattr("sys.argv", [name, *SMALLEST[name], "--out", str(out)])
    module.main()
    assert json.loads(out.read_text()) and module.section(out).startswith("## ")


@pytest.mark.parametrize("kind", ["head", "mixing", "edit", "secure"])
def test_every_point_of_the_scale_benchmark_can_be_measured(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import bench_scale

    monkeypatch.chdir(tmp_path)
    few = {"head": (100, 10, 8), "mixing": (20, 5, 100), "edit": (4, 2, 10_000), "secure": (8, 8, 100)}[kind]
    found = getattr(bench_scale, kind)(*few)
    assert found["seconds"] > 0 and found["megabytes"] > 0
