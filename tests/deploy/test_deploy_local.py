"""A whole federation on this machine, as a user starts it: the same bytes as in one process, no process left."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import CNN

from fedgraft.config.load import from_folder, load
from fedgraft.runs import checkpoint
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import run

pytestmark = pytest.mark.slow
# Nodes carry out requests one by one; the batched engine, the default in one process, is equal within 1e-6 only.
OVERRIDES = [CNN, "rounds.total=2", "rounds.fraction=1.0", "local.steps=2", "local.batch_size=16"]
OVERRIDES += ["engine=reference"]
COMMAND = [sys.executable, "-m", "fedgraft.cli.main"]


def final_vector(folder: Path) -> torch.Tensor:
    """The common model after the last round, from the run's newest checkpoint."""
    latest = checkpoint.load_latest(folder / "checkpoints", from_folder(folder).digest)
    assert latest is not None
    return latest.tensors["vector"]


def ours(root: Path) -> list[str]:
    """Return the processes that name a folder of this test in their command or environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            text = b""
            if entry.name.isdigit():
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if f"TMPDIR={root}".encode() in text and entry.name != str(os.getpid()):
            pids.append(entry.name)
    return pids


def start(root: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start `fedgraft` with its temporary files below `root`, by which its processes are recognised."""
    root.mkdir(exist_ok=True)
    prctl = ctypes.CDLL(None).prctl  # its option 1 sends this process a signal when its parent dies
    return subprocess.Popen(
        [*COMMAND, *overrides],
        cwd=root,
        env={**os.environ, "TMPDIR": str(root)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: prctl(1, signal.SIGTERM),
    )


def bytes_in_rounds(summary: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of a run's rounds in both directions."""
    sent = {}
    for direction in ("up", "down"):
        sent[direction] = summary[f"bytes_{direction}"] - summary.get(f"bytes_{direction}_outside_rounds", 0)
    return sent


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
    here = root / "here"
    there = root / "there"
    run(load(None, overrides), here, console=False)
    assert torch.equal(final_vector(here), final_vector(there))
    assert RunFolder.open(there).status == "finished"
    assert (there / "report.html").is_file()
    same = ("best_round", "rounds", "edited")
    summary_here = RunFolder.open(here).summary()
    summary_there = RunFolder.open(there).summary()
    assert {key: summary_here[key] for key in same} == {key: summary_there[key] for key in same}
    sent_here = bytes_in_rounds(summary_here)
    sent_there = bytes_in_rounds(summary_there)
    opened = sent_there["down"] - sent_here["down"]  # both nodes received the head once
    assert sent_there["up"] == sent_here["up"] and opened > 0 and opened % 2 == 0
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
    summary_here = RunFolder.open(root / "here").summary()
    summary_there = RunFolder.open(root / "there").summary()
    assert len(summary_here["clients"]) == 4
    for name in ("clients", "personal", "test", "metrics", "confusion"):
        assert summary_here[name] == summary_there[name], name


@pytest.mark.deploy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_federation_leaves_no_process(root: Path, number: signal.Signals) -> None:
    process = start(root, "deploy", "local", *OVERRIDES, "--nodes", "1", "--folder", "run")
    until = time.monotonic() + 120
    while len(ours(root)) < 4 and time.monotonic() < until:  # the command, the server, its helper, the node
        time.sleep(0.2)
    process.send_signal(number)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 130, text
    time.sleep(2)
    assert ours(root) == []
