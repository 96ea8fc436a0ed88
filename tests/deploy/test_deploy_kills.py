"""Nodes, servers and links killed at every stage of real runs: the run completes, to the same bytes if nobody is lost.

A node halts at the request of a stage (`deployed_stops`); then it, the SuperLink or the run's own process is killed as
in a power cut. Nothing here waits for a fixed time: each step waits for the effect of the previous one.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deployed_stops import GREETING
from tests.support.hospitals import Hospitals, federated, final, in_one_process, lines, missing, same, until
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import Config, load
from fedgraft.core.messages import Request
from fedgraft.deploy import coordinator
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.deploy]
ROOT = Path(__file__).parents[2]
VICTIM = 1
FIVE = [f"secure.{stage} train" for stage in ("keys", "shares", "masked", "consistency", "unmask")]
SMALL = [
    "model.name=tiny",
    "data.limit=160",
    "partition.clients=4",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "local.steps=1",
    "local.batch_size=16",
    "engine=reference",
    "workers=1",
    "rounds.test=false",
    "local.lr=0.05",
]
PREPARED = [*SMALL, "model.head=ridge", "trainable.kind=sparse", "trainable.sparse.samples=12", "rounds.total=2"]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    root = tmp_path_factory.mktemp("kills")
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    with federated(root, load(None, SMALL), 4, PYTHONPATH=path, STOPS=str(root)) as started:
        for client in range(4):
            started.start(client)
        started.online(4)
        yield started


def halt_at(hospitals: Hospitals, request: str) -> None:
    """From now on the victim halts at its next request of this kind."""
    (hospitals.root / "new").write_text(json.dumps([VICTIM, request]))
    (hospitals.root / "new").rename(hospitals.root / "stop")


def wait_for_halt(hospitals: Hospitals, run: int, request: str) -> None:
    """Wait until the victim has halted at this request."""
    until(lambda: (hospitals.root / "reached").exists() or hospitals.ended(run), f"the run never comes to {request}")
    assert (hospitals.root / "reached").exists(), (request, hospitals.over(run), hospitals.logs())


def resume_victim(hospitals: Hospitals) -> None:
    (hospitals.root / "reached").unlink()


def test_a_node_killed_before_the_first_round_or_at_the_end_is_asked_again(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    """Greeting, head initialisation, calibration, evaluation: nothing of the model is lost."""
    config = load(None, [*PREPARED, "personal.evaluate=end"])
    folder = hospitals.root / "node"
    stages = [GREETING, "statistics", "fisher_scores", "evaluate"]
    halt_at(hospitals, stages[0])
    run = hospitals.submit(config, folder)
    for number, stage in enumerate(stages):
        wait_for_halt(hospitals, run, stage)
        hospitals.kill(VICTIM)
        resume_victim(hospitals)
        if number + 1 < len(stages):
            halt_at(hospitals, stages[number + 1])
        hospitals.start(VICTIM)
    assert hospitals.over(run) == ("completed", ""), hospitals.logs()
    assert not missing(folder) and same(in_one_process(config, tmp_path / "here"), final(folder))
    hospitals.online(4)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_node_killed_at_each_stage_of_secure_rounds_goes_on_or_is_lost_there(
    hospitals: Hospitals, tmp_path: Path, comes_back: bool
) -> None:
    """Started again at once it answers, and the sums are those over all; else over who stayed, to the bit.

    To be killed at the next stage the node must be there again.
    """
    seed = 0 if comes_back else 1  # nodes give a sum of one config once
    more = ["model.head=random", "trainable.kind=everything", "privacy.aggregation=secure", "rounds.total=999"]
    config = load(None, [*SMALL, *more, f"seed={seed}"])
    folder = hospitals.root / f"stages{seed}"
    run = hospitals.submit(config, folder)
    for stage in FIVE:
        halt_at(hospitals, stage)
        wait_for_halt(hospitals, run, stage)
        hospitals.kill(VICTIM)
        resume_victim(hospitals)
        if not comes_back:
            known = len(missing(folder))
            until(lambda known=known: len(missing(folder)) > known, "nobody is lost")  # type: ignore[misc]
        hospitals.start(VICTIM)
    halt_at(hospitals, FIVE[0])  # it takes part once more
    wait_for_halt(hospitals, run, FIVE[0])
    resume_victim(hospitals)
    assert CliRunner().invoke(app, ["deploy", "stop", str(hospitals.fed.path), "--run"]).exit_code == 0
    until(lambda: interrupted(folder), "the run goes on")
    lost = {when: re.findall(r"lost at stage '(\w+)'", reason) for when, reason in missing(folder).items()}
    lost_stages = {stage for stages in lost.values() for stage in stages}
    if comes_back:
        checkpoint = load_latest(folder / "checkpoints")
        assert checkpoint is not None and checkpoint.round >= 4 and not lost
        assert same(in_one_process(config, tmp_path / "here", rounds=checkpoint.round), final(folder))
        return
    assert lost_stages == {request.split()[0].partition(".")[2] for request in FIVE}
    assert {client for _, client in lost} == {VICTIM}

    def absent(request: Request) -> bool:
        return request.action.partition(".")[2] in lost.get((request.round, request.client), ())

    checkpoint = load_latest(folder / "checkpoints")
    assert checkpoint is not None and checkpoint.round >= 5
    assert same(in_one_process(config, tmp_path / "here", absent, checkpoint.round), final(folder))
    assert not same(in_one_process(config, tmp_path / "all", rounds=checkpoint.round), final(folder))


def interrupted(folder: Path) -> bool:
    """Whether no process works on this run; one that is killed while nodes are greeted has not begun."""
    return not (folder / "run.json").exists() or RunFolder.open(folder).status == "interrupted"


def kill_link(hospitals: Hospitals) -> None:
    """The server's machine loses its power; it is started again on the same port."""
    os.kill(hospitals.server.pid, signal.SIGKILL)
    os.waitpid(hospitals.server.pid, 0)


def kill_run(hospitals: Hospitals, folder: Path) -> None:
    """The run's own process is killed, as for want of memory; the link stays."""
    os.kill(int((folder / ".lock").read_text()), signal.SIGKILL)


def test_a_server_killed_at_every_stage_is_resumed_to_the_same_bytes(hospitals: Hospitals, tmp_path: Path) -> None:
    config: Config = load(None, [*PREPARED, "privacy.aggregation=secure", "personal.evaluate=end"])
    folder = hospitals.root / "server"
    before = ["secure.masked statistics", "secure.unmask fisher_scores"]
    for number, stage in enumerate([GREETING, *before, *FIVE, "evaluate"]):
        halt_at(hospitals, stage)
        run = hospitals.submit(config, folder)
        wait_for_halt(hospitals, run, stage)
        if number % 2:
            kill_run(hospitals, folder)
            until(lambda run=run: hospitals.ended(run), "the link does not notice that the run is dead")  # type: ignore[misc]
        else:
            kill_link(hospitals)
            until(lambda: interrupted(folder), "the run outlives its server")
            hospitals.server = coordinator.start_server(hospitals.fed, hospitals.server.port, bound=True)
            hospitals.line = None
        resume_victim(hospitals)
        hospitals.online(4)
    run = hospitals.submit(config, folder)
    assert hospitals.over(run) == ("completed", ""), hospitals.logs()
    assert [line["round"] for line in lines(folder)] == [1, 2] and not missing(folder)
    assert same(in_one_process(config, tmp_path / "here"), final(folder))
