"""A whole federation on this machine, as a user starts it: the same bytes as in one process, and nothing left over."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.tiny import CNN

from fedgraft.config.load import from_folder, load
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

pytestmark = pytest.mark.slow
# Nodes carry out orders one by one; the batched engine, which one process would choose here, is equal within 1e-6 only.
OVERRIDES = [CNN, "rounds.total=2", "rounds.fraction=1.0", "local.steps=2", "local.batch_size=16"]
OVERRIDES += ["engine=reference"]
COMMAND = [sys.executable, "-m", "fedgraft.cli.main"]


def final_vector(folder: Path) -> torch.Tensor:
    """The common model after the last round, from the run's newest checkpoint."""
    found = checkpoint.load_latest(folder / "checkpoints", from_folder(folder).digest)
    assert found is not None
    return found.tensors["vector"]


def ours(root: Path) -> list[str]:
    """Processes that name a folder of this test in their command or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            overrides = (
                (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            )
        except OSError:
            continue
        if f"TMPDIR={root}".encode() in overrides and entry.name != str(os.getpid()):
            found.append(entry.name)
    return found


def start(root: Path, *overrides: str) -> subprocess.Popen[str]:
    """`fedgraft WORDS` with its temporary files below `root`, by which its processes can be told from others."""
    root.mkdir(exist_ok=True)
    told = ctypes.CDLL(None).prctl  # the first word of it: send me a signal when my parent dies
    return subprocess.Popen(
        [*COMMAND, *overrides],
        cwd=root,
        env={**os.environ, "TMPDIR": str(root)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: told(1, signal.SIGTERM),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    pytest.importorskip("flwr")
    pytest.importorskip("fedgraft.deploy.flower_apps")
    return tmp_path / "t"


def test_a_local_federation_ends_in_the_bytes_of_one_process(root: Path) -> None:
    overrides = [*OVERRIDES, "partition.clients=2", "data.limit=200"]
    deployed = start(root, "deploy", "local", *overrides, "--nodes", "2", "--folder", "there")
    text, _ = deployed.communicate(timeout=400)
    assert deployed.returncode == 0, text
    assert "all 2 nodes are connected" in text
    here, there = root / "here", root / "there"
    run(load(None, overrides), here, console=False)
    assert torch.equal(final_vector(here), final_vector(there))
    assert RunFolder.open(there).status == "finished"
    assert (there / "report.html").is_file()
    same = ("best_round", "rounds", "edited")
    one, two = RunFolder.open(here).summary(), RunFolder.open(there).summary()
    assert {key: one[key] for key in same} == {key: two[key] for key in same}
    rounds = {way: two[f"bytes_{way}"] - two[f"bytes_{way}_outside_rounds"] for way in ("up", "down")}
    one |= {f"bytes_{way}": one[f"bytes_{way}"] - one.get(f"bytes_{way}_outside_rounds", 0) for way in ("up", "down")}
    opened = rounds["down"] - one["bytes_down"]  # both nodes were told the head once
    assert rounds["up"] == one["bytes_up"] and opened > 0 and opened % 2 == 0
    time.sleep(2)  # a node's worker sees within a second that its node is gone
    assert ours(root) == []
    assert not list(root.glob("fedgraft-local-*"))


@pytest.mark.deploy
def test_four_nodes_under_secure_aggregation_give_the_vector_and_the_metrics_of_the_simulation(root: Path) -> None:
    overrides = [*OVERRIDES, "partition.clients=4", "privacy.aggregation=secure", "personal.evaluate=end"]
    overrides += ['metrics=["balanced_accuracy","auroc","confusion"]', "trainable.kind=everything", "data.limit=200"]
    there = start(root, "deploy", "local", *overrides, "--nodes", "4", "--folder", "there")
    text, _ = there.communicate(timeout=900)
    assert there.returncode == 0, text
    assert start(root, "run", *overrides, "--folder", "here", "--quiet").wait(timeout=300) == 0
    assert torch.equal(final_vector(root / "here"), final_vector(root / "there"))
    one, two = (RunFolder.open(root / name).summary() for name in ("here", "there"))
    assert len(one["clients"]) == 4 and one["clients"] == two["clients"] and one["personal"] == two["personal"]
    assert (one["test"], one["metrics"], one["confusion"]) == (two["test"], two["metrics"], two["confusion"])


@pytest.mark.deploy
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_federation_leaves_no_process(root: Path, told: signal.Signals) -> None:
    process = start(root, "deploy", "local", *OVERRIDES, "--nodes", "1", "--folder", "run")
    until = time.monotonic() + 120
    while len(ours(root)) < 4 and time.monotonic() < until:  # the command, the server, its helper, the node
        time.sleep(0.2)
    process.send_signal(told)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert "everything is stopped" in text
    time.sleep(2)
    assert ours(root) == []
