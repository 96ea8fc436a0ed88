"""A real node that is killed five times inside one local training: it goes on where it was, to the same bytes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.support.hospitals import federated, final, in_one_process, lines, missing, same, until

from fedgraft.config.load import load
from fedgraft.deploy.work_store import CONTINUES

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
VICTIM = 1
KILLS = 5
INTERVAL = 0.3
CONFIG = [
    "model.name=tiny",
    "data.limit=120",
    "partition.clients=2",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "rounds.test=false",
    "rounds.total=1",
    "local.steps=2500",
    "local.batch_size=16",
    f"local.checkpoint_seconds={INTERVAL}",
    "model.head=random",
    "trainable.kind=everything",
    "engine=reference",
    "workers=1",
]


def test_a_node_killed_five_times_in_one_training_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    config = load(None, CONFIG)
    with federated(tmp_path, config, 2) as hospitals:
        for client in range(2):
            hospitals.start(client)
        hospitals.online(2)
        folder = tmp_path / "run"
        number = hospitals.submit(config, folder)
        home = hospitals.nodes[VICTIM][0].home
        progress = home / "work" / "progress-train"
        for _ in range(KILLS):
            until(lambda: progress.exists() or hospitals.ended(number), "it does not train")
            before = progress.stat().st_mtime_ns
            until(lambda before=before: progress.stat().st_mtime_ns > before, "it saves nothing")  # type: ignore[misc]
            time.sleep(INTERVAL / 2)
            hospitals.kill(VICTIM)
            hospitals.start(VICTIM)
        assert hospitals.over(number) == ("completed", ""), hospitals.logs()
        steps = [int(found) for found in re.findall(f"{CONTINUES} (\\d+) steps", (home / "node.log").read_text())]
    assert len(steps) == KILLS and steps == sorted(set(steps)) and steps[0] > 0, steps
    assert len(lines(folder)) == 1 and not missing(folder)
    assert same(in_one_process(config, tmp_path / "here"), final(folder))
