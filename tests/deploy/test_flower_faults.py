"""Faults of real machines: nodes that come late or vanish, a killed server, owners with data of their own.

One SuperLink and three SuperNodes run as processes, over TLS with registered keys, as `fedgraft deploy` starts them;
the tests of this file share them and go through their lives in order.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.support.errors import raises
from tests.support.hospitals import Hospitals, federated, final, in_one_process, lines, missing, same, until
from tests.support.tiny import CNN
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import Config, load
from fedgraft.core.messages import Request
from fedgraft.data.sources import load_dataset
from fedgraft.deploy import coordinator
from fedgraft.deploy import folder as federation
from fedgraft.deploy.door_paths import KEY_IN_USE
from fedgraft.deploy.node_loop import CONNECTED
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.folder import RunFolder

pytestmark = pytest.mark.slow
DEADLINE = min(18, int(6 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))))
"""Seconds of a round; below the 20 after which a vanished node counts as gone."""
SMALL = [
    "model.name=tiny",
    "data.limit=120",
    "partition.clients=3",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "local.steps=2",
    "local.batch_size=16",
    "model.head=random",
    "trainable.kind=everything",
    "engine=reference",
    "workers=1",
    "algorithm.name=scaffold",
    "local.momentum=0",
]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hospitals]:
    pytest.importorskip("flwr", reason="needs the extra 'flower'")
    with federated(tmp_path_factory.mktemp("faults"), load(None, SMALL), 3) as started:
        yield started


@dataclass
class Story:
    """A run in which node 1 vanished and node 2 came late; then node 1 was started again, and the run stopped."""

    config: Config
    folder: Path
    output: str
    """The output of the command that stopped it."""
    killed: int
    """The last round on record when node 1 was killed."""


@pytest.fixture(scope="module")
def story(hospitals: Hospitals) -> Story:
    # Two answers are a deployment's own default, and the same run in one process must ask for as many.
    more = ["rounds.total=99", f"rounds.deadline={DEADLINE}", "rounds.minimum_answers=2"]
    config = load(None, [*SMALL, *more])
    folder = hospitals.root / "story"
    hospitals.start(0)
    hospitals.start(1)
    hospitals.online(2)
    number = hospitals.submit(config, folder, wait=1.0)
    until(lambda: lines(folder) or hospitals.ended(number), "there is no first round")
    assert lines(folder), (hospitals.over(number), hospitals.logs())
    hospitals.kill(1)  # from now on a round lasts until its deadline, until the server counts the node as gone
    killed = lines(folder)[-1]["round"]
    hospitals.start(2)

    def seen() -> bool:
        """Node 2 has taken part, and node 1 was missed by two rounds since."""
        dropped = [{drop["client"] for drop in line["dropped"]} for line in lines(folder)[killed:]]
        return any(2 not in clients for clients in dropped) and sum(1 in clients for clients in dropped) > 1

    until(lambda: seen() or hospitals.ended(number), "node 2 does not take part")
    assert seen(), (hospitals.over(number), hospitals.logs())
    hospitals.start(1)
    stopped = CliRunner().invoke(app, ["deploy", "stop", str(hospitals.fed.path), "--run"])
    assert stopped.exit_code == 0 and hospitals.over(number)[0] == "stopped"
    until(lambda: RunFolder.open(folder).status == "interrupted", "the run goes on")
    return Story(config, folder, stopped.output, killed)


@pytest.mark.deploy
def test_a_node_that_comes_late_takes_part_from_then_on(story: Story) -> None:
    absent = missing(story.folder)
    log = (story.folder / "log.txt").read_text()
    assert absent[0, 2] == "no node serves it at present"
    first = min(r for r in range(len(lines(story.folder))) if (r, 2) not in absent)
    assert all((r, 2) in absent for r in range(first))
    assert "client 2 is served by node" in log


@pytest.mark.deploy
def test_stopping_a_run_prints_how_to_continue_it(story: Story) -> None:
    assert f"--folder {story.folder} --resume" in story.output  # the command is the product


@pytest.mark.deploy
def test_a_node_that_vanishes_in_a_round_is_missing_by_name_and_the_run_goes_on(story: Story) -> None:
    """One of three nodes is silent: the round ends at its deadline, with the result over those who answered."""
    absent = {when: reason for when, reason in missing(story.folder).items() if when[1] == 1}
    gone = [when[0] for when in absent if when[0] >= story.killed]
    assert gone[0] <= story.killed + 1 and len(gone) > 1
    assert absent[gone[0], 1] == f"no answer within {DEADLINE} s"
    log = (story.folder / "log.txt").read_text()
    assert f"round {gone[0] + 1}: client 1 dropped: no answer within {DEADLINE} s" in log
    seconds = lines(story.folder)[gone[0]]["seconds"]["exchange"]
    assert seconds >= DEADLINE


@pytest.mark.deploy
def test_the_result_is_that_of_the_responders_bit_for_bit(story: Story, tmp_path: Path) -> None:
    absent = missing(story.folder)
    checkpoint = load_latest(story.folder / "checkpoints")
    assert checkpoint is not None and checkpoint.round > story.killed
    there = final(story.folder)

    def is_absent(request: Request) -> bool:
        return (request.round, request.client) in absent

    assert same(in_one_process(story.config, tmp_path / "here", is_absent, checkpoint.round), there)
    everyone = in_one_process(story.config, tmp_path / "everyone", rounds=checkpoint.round)
    assert not same(everyone, there), "the comparison does not notice who was missing"


@pytest.mark.deploy
def test_a_node_that_was_killed_and_is_restarted_at_once_need_not_wait(story: Story, hospitals: Hospitals) -> None:
    """The lock of its home shows that the process before is dead, and it is signed off by its id."""
    hospitals.online(3)
    hospitals.kill(1)
    hospitals.start(1)
    options, process = hospitals.nodes[1]
    until(lambda: options.log.read_text().count(CONNECTED) >= 3 or process.poll() is not None, "it is not admitted")
    assert process.poll() is None
    assert KEY_IN_USE not in options.log.read_text()


def status(fed: federation.FederationFolder) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["deploy", "status", str(fed.path)])
    return result.exit_code, result.output


@pytest.mark.deploy
def test_a_killed_server_is_started_again_and_the_run_resumed_to_the_same_bytes(
    hospitals: Hospitals, tmp_path: Path
) -> None:
    config = load(None, [*SMALL, "rounds.total=12", "seed=1"])
    folder = hospitals.root / "killed"
    for client in {0, 1, 2} - set(hospitals.nodes):
        hospitals.start(client)
    hospitals.online(3)
    first = hospitals.submit(config, folder)
    until(lambda: len(lines(folder)) >= 2 or hospitals.ended(first), "there are no two rounds")
    os.kill(hospitals.server.pid, signal.SIGKILL)
    os.waitpid(hospitals.server.pid, 0)
    until(lambda: RunFolder.open(folder).status == "interrupted", "the run outlives its server")
    code, text = status(hospitals.fed)
    assert "server: not running" in text and f"run {first}: interrupted, round" in text

    again = coordinator.start_server(hospitals.fed, hospitals.server.port, bound=True)
    assert again.address == hospitals.server.address
    hospitals.server = again
    hospitals.line = None
    code, text = status(hospitals.fed)
    # If it takes long, Flower notices first that the run sends no heartbeat, and reports it as failed.
    assert code == 1 and (f"run {first}: stopped" in text or f"run {first}: failed" in text), text
    assert (f"the run died: {coordinator.SERVER_LOST}" in text or "failed" in text) and "--resume" in text
    hospitals.online(3)  # by themselves
    command = ["deploy", "submit", str(hospitals.fed.path), "--folder", str(folder)]
    with raises("E-DEPLOY-RUN-UNFINISHED"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    resumed = CliRunner().invoke(app, [*command, "--resume"])
    assert resumed.exit_code == 0, resumed.output
    number = int(hospitals.fed.runs()[-1]["id"])
    assert number != first and hospitals.over(number) == ("completed", ""), hospitals.logs()
    assert [line["round"] for line in lines(folder)] == list(range(1, 13)) and not missing(folder)
    assert same(in_one_process(config, tmp_path / "here"), final(folder))
    assert RunFolder.open(folder).status == "finished" and (folder / "report.html").is_file()
    assert status(hospitals.fed)[0] == 0


def digits(part: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Some of the real digits, others for every owner."""
    store = load_dataset("digits").train
    rows = np.arange(part * count, (part + 1) * count)
    return np.array(store.images[rows]), np.array(store.labels[rows])


def png(image: np.ndarray) -> bytes:
    target = io.BytesIO()
    Image.fromarray(image).save(target, "png")
    return target.getvalue()


def write_folder(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (path / str(label)).mkdir(parents=True, exist_ok=True)
        (path / str(label) / f"{number}.png").write_bytes(png(image))
    return path


def owners(root: Path) -> dict[int, tuple[Path, str]]:
    """Three owners with digits of their own: a folder, a parquet file, an npz file."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (root / "ward").mkdir()
    images, labels = digits(1)
    table = pa.table({"image": [png(image) for image in images], "label": [str(label) for label in labels]})
    pq.write_table(table, root / "ward" / "digits.parquet")
    images, labels = digits(2)
    np.savez(root / "ward" / "digits.npz", x_train=images, y_train=labels)
    return {
        0: (write_folder(root / "ward" / "digits", *digits(0)), "folder"),
        1: (root / "ward" / "digits.parquet", "parquet"),
        2: (root / "ward" / "digits.npz", "npz"),
    }


@pytest.fixture(scope="module")
def wards(hospitals: Hospitals) -> Hospitals:
    """The same federation, with nodes that have data of their own."""
    hospitals.end()
    for client, (data, source) in owners(hospitals.root).items():
        hospitals.start(client, data, source)
    hospitals.online(3)
    return hospitals


def own(*overrides: str) -> Config:
    return load(None, [*SMALL, CNN, "data.source=folder", "rounds.total=1", "data.validation=0.2", *overrides])


def test_three_owners_and_a_server_without_data(wards: Hospitals) -> None:
    folder = wards.root / "wards"
    number = wards.submit(own("model.head=ridge"), folder)
    assert wards.over(number) == ("completed", ""), wards.logs()
    summary = RunFolder.open(folder).summary()
    assert summary["test"]["count"] > 20 and 0 <= summary["test"]["accuracy"] <= 1
    assert (folder / "report.html").is_file() and not missing(folder)
    for path in (p for p in folder.rglob("*") if p.is_file() and p.suffix in {".html", ".txt", ".json", ".jsonl"}):
        assert "ward/digits" not in path.read_text(), f"{path} tells where a node's data lies"
