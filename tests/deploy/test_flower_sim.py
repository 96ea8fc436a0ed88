"""`fedgraft run engine=flower-sim` with Ray's real workers gives the bytes of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
pytest.importorskip("ray", reason="needs the extra 'simulation'")
OVERRIDES = [
    "model.name=tiny",
    "data.limit=120",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=2",
    "workers=1",
    "local.steps=2",
    "local.batch_size=16",
    "model.head=random",
    "trainable.kind=everything",
    "local.momentum=0",
    "algorithm.name=scaffold",
    "rounds.evaluate_every=0",
]


def vector(root: Path, engine: str, *more: str) -> torch.Tensor:
    """The common model after `fedgraft run`, as a user starts it."""
    overrides = ["run", *OVERRIDES, *more, f"engine={engine}", "--folder", str(root / engine), "--quiet"]
    settings = {**os.environ, "FEDGRAFT_CACHE": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "fedgraft.cli.main", *overrides], env=settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert RunFolder.open(root / engine).status == "finished"
    checkpoint = load_latest(root / engine / "checkpoints")
    assert checkpoint is not None
    return checkpoint.tensors["vector"]


def test_a_simulation_on_ray_ends_in_the_bytes_of_one_process(tmp_path: Path) -> None:
    """SCAFFOLD, so that clients' memories in Flower's state are part of it; other steps give another vector."""
    there = vector(tmp_path, "flower-sim")
    assert torch.equal(there, vector(tmp_path, "reference"))
    assert not torch.equal(there, vector(tmp_path / "other", "reference", "local.steps=3"))
