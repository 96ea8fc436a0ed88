"""Buffered rounds over real nodes, one of four ten times slower: sooner at the target, and repeated from the log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hospitals import Hospitals, federated, lines
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import Config, load
from fedgraft.runs.replay import replay_differences

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
ROOT = Path(__file__).parents[2]
SLOW = 3
TARGET = 0.6
FACTOR = 2.0
CONFIG = [
    "model.name=tiny",
    "model.head=random",
    "data.source=digits",
    "data.image_size=16",
    "trainable.kind=everything",
    "partition.clients=4",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=1",
    "rounds.test=false",
    "local.steps=8",
    "local.batch_size=16",
    "local.lr=0.03",
    "local.momentum=0.0",
    "engine=reference",
    "workers=1",
]
BUFFERED = ["rounds.kind=buffered", "rounds.buffer=3", "rounds.total=24"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    root = tmp_path_factory.mktemp("buffered")
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    with federated(root, load(None, CONFIG), 4, PYTHONPATH=path, SLOW="0.5,0.5,0.5,5") as started:
        for client in range(4):
            started.start(client)
        started.online(4)
        yield started


def finish(hospitals: Hospitals, config: Config, name: str) -> Path:
    folder = hospitals.root / name
    run = hospitals.submit(config, folder)
    assert hospitals.over(run) == ("completed", ""), hospitals.logs()
    return folder


def seconds_to_target(folder: Path) -> float:
    """Return the seconds of all rounds until the accuracy first reached the target."""
    spent = 0.0
    for line in lines(folder):
        spent += sum(line["seconds"].values())
        if line.get("accuracy", 0.0) >= TARGET:
            return spent
    raise AssertionError(f"{TARGET:.0%} was never reached")


def test_the_target_is_reached_twice_as_soon_and_the_log_repeats_the_run(hospitals: Hospitals) -> None:
    buffered = finish(hospitals, load(None, [*CONFIG, *BUFFERED]), "buffered")
    synchronous = finish(hospitals, load(None, [*CONFIG, "rounds.total=12"]), "synchronous")
    soon = seconds_to_target(buffered)
    late = seconds_to_target(synchronous)
    print(f"{TARGET:.0%}: buffered {soon:.1f} s, synchronous {late:.1f} s, {late / soon:.1f} times sooner")
    assert late >= FACTOR * soon
    arrivals = [line["arrivals"] for line in lines(buffered)]
    assert all(sum(used for _, _, used in buffer) == 3 for buffer in arrivals)
    staleness = [step - began for step, buffer in enumerate(arrivals) for client, began, _ in buffer if client == SLOW]
    assert staleness and min(staleness) >= 2
    assert not replay_differences(buffered)
    shown = CliRunner().invoke(app, ["verify", str(buffered), "--replay"])
    assert shown.exit_code == 0, shown.output


def test_the_secure_sum_of_each_buffer_waits_for_nobody_else(hospitals: Hospitals) -> None:
    config = load(None, [*CONFIG, *BUFFERED, "rounds.total=8", "privacy.aggregation=secure", "privacy.limit=8.0"])
    folder = finish(hospitals, config, "secure")
    buffers = [sorted(client for client, _, used in line["arrivals"] if used) for line in lines(folder)]
    assert all(len(buffer) == 3 for buffer in buffers)
    assert [0, 1, 2] in buffers
    assert not replay_differences(folder)
