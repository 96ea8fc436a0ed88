"""A node paused for 45 seconds in a secure run of three: the run waits for it, and ends as without the pause."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.hospitals import federated, final, in_one_process, lines, missing, same, until

from fedgraft.config.load import load
from fedgraft.deploy import process as federation_process

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
VICTIM = 1
PAUSE = 45.0
SMALL = [
    "model.name=tiny",
    "model.head=random",
    "trainable.kind=everything",
    "data.limit=120",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.total=40",
    "rounds.evaluate_every=0",
    "rounds.test=false",
    "privacy.aggregation=secure",
    "local.steps=1",
    "local.batch_size=16",
    "local.lr=0.05",
    "engine=reference",
    "workers=1",
]


def signal_node(process_id: int, number: signal.Signals) -> None:
    """Send a signal to a node and all that it started, as a machine that sleeps stops all of them."""
    descendants = federation_process._descendants(process_id)
    os.kill(process_id, number)
    federation_process._signal_all(descendants, number)


def test_a_pause_costs_time_and_no_round(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    config = load(None, SMALL)
    with federated(tmp_path, config, 3) as hospitals:
        for client in range(3):
            hospitals.start(client)
        hospitals.online(3)
        folder = tmp_path / "run"
        run = hospitals.submit(config, folder)
        until(lambda: folder.exists() and len(lines(folder)) >= 2, "no round ends")
        process_id = hospitals.nodes[VICTIM][1].pid
        signal_node(process_id, signal.SIGSTOP)
        try:
            began = time.monotonic()
            time.sleep(5)  # a round under way may still end with an answer that was sent before
            rounds_before = len(lines(folder))
            time.sleep(PAUSE - (time.monotonic() - began))
            rounds_after = len(lines(folder))
        finally:
            signal_node(process_id, signal.SIGCONT)
        assert rounds_before < config.rounds.total, "the run was over before the pause"
        assert rounds_after == rounds_before, "rounds were spent while the node was paused"
        assert hospitals.over(run) == ("completed", ""), hospitals.logs()
        assert len(lines(folder)) == config.rounds.total and not missing(folder)
        assert same(in_one_process(config, tmp_path / "here"), final(folder))
