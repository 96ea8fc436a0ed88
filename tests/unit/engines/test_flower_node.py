"""Nodes with data of their own, a server with none, memories on disk, and the worker that stays warm.

No Flower here: requests go straight to the nodes, so that each of these can be seen by itself.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.errors import raises

from fedgraft.config.load import Config, load, to_toml
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.deploy.deployed import own_data, remote_data, run_deployed
from fedgraft.deploy.node import NodeWorker
from fedgraft.deploy.slots import DiskSlots
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, _alive, ask_worker, private_folder, serve
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.loop import run

SMALL = [
    "model.name=tiny",
    "rounds.total=2",
    "rounds.fraction=1.0",
    "local.steps=2",
    "local.batch_size=8",
    "rounds.evaluate_every=1",
    "partition.clients=3",
    "trainable.kind=everything",
    "engine=reference",
    "workers=1",
]


@pytest.fixture(autouse=True)
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDGRAFT_NODE_HOME", str(tmp_path / "home"))


class Direct:
    """An engine that hands requests to nodes in this process, as the Flower engine does over the network."""

    def __init__(self, config: Config, folder: Path, data: Sequence[str] = ()) -> None:
        self.memory: dict[int, Any] = {}
        self.limit, self.classes = 0, ()
        self.nodes = [NodeWorker() for _ in range(config.partition.clients)]
        text = to_toml(config)
        self.requests = [
            WorkerRequest(text, str(folder), k, 1, data=data[k] if data else "") for k in range(len(self.nodes))
        ]
        self.registry = SimpleNamespace(facts={}, need_images=lambda: None, leave_out=lambda rule: None)
        self.digest, self.opened, self.told = "", b"", set[int]()
        self.actions: list[str] = []
        self.sent = self.received = 0

    def limit_responses(self, most: int) -> None:
        self.limit = most

    def present_clients(self) -> list[int]:
        return list(range(len(self.nodes)))

    def gather(self) -> None:
        for k, request in enumerate(self.requests):
            found = self.nodes[k].carry_out(request).facts
            self.registry.facts[k] = {"classes": (), "examples": 0, "data": "", **found}

    def open(self, run: str, tensors: Any) -> None:
        self.opened = pack(Request(run, -1, 0, "open", auxiliary=tensors))
        self.digest = hashlib.blake2b(self.opened, digest_size=12).hexdigest()

    def exchange(self, requests: Sequence[Request]) -> list[Any]:
        return [self.deliver(request) for request in requests]

    def deliver(self, request: Request) -> Any:
        k, after = request.client, int(self.memory[request.client]["step"]) if request.client in self.memory else 0
        self.actions.append(request.action)
        worker_request = replace(
            self.requests[k],
            after=after,
            becomes=after + 1,
            digest=self.digest,
            classes=tuple(self.classes),
            request=pack(replace(request, client=0)),
        )
        answer = self.nodes[k].carry_out(worker_request)
        if answer.need:
            answer = self.nodes[k].carry_out(replace(worker_request, opened=self.opened))
            self.sent += len(self.opened)
        self.sent, self.received = self.sent + len(worker_request.request), self.received + len(answer.response)
        if answer.step:
            self.memory[k] = {"step": torch.tensor([answer.step])}
        return (k, answer.response) if request.action == "train" else unpack(Response, answer.response)


def paint(folder: Path, classes: Sequence[str], count: int = 12, seed: int = 0) -> str:
    """A folder of small images, one colour per class."""
    stream = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        base = np.frombuffer(hashlib.sha256(name.encode()).digest()[:3], np.uint8).astype(int)
        for i in range(count):
            train_images = (base + stream.integers(-20, 20, (16, 16, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(train_images).save(folder / name / f"{i}.png")
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [["trainable.kind=sparse", "trainable.sparse.samples=12", "model.head=ridge"], ["trainable.kind=lora"]]
)
def test_nodes_that_simulate_give_the_bytes_of_one_process(overrides: list[str], tmp_path: Path) -> None:
    config = load(None, [*SMALL, "data.limit=120", *overrides])
    run_deployed(config, tmp_path / "there", Direct(config, tmp_path / "there"))
    run(config, tmp_path / "here", console=False)
    vectors = [load_latest(tmp_path / where / "checkpoints").tensors["vector"] for where in ("here", "there")]  # type: ignore[union-attr]
    assert torch.equal(*vectors)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["random", "ridge"])
def test_everything_that_was_sent_is_counted(head: str, tmp_path: Path) -> None:
    """Openings in the round that sends them, step 0 and calibration outside the rounds, and all of it in the totals."""
    mask = ["trainable.kind=sparse", "trainable.sparse.samples=8", "trainable.sparse.calibration=oneshot"]
    config = load(None, [*SMALL, "data.limit=120", *mask, f"model.head={head}"])
    engine = Direct(config, tmp_path / "there")
    found = run_deployed(config, tmp_path / "there", engine)
    lines = read_metrics(tmp_path / "there")[1:]  # without the start
    assert (found["bytes_up"], found["bytes_down"]) == (engine.received, engine.sent)
    for key in ("bytes_up", "bytes_down"):
        assert found[f"{key}_outside_rounds"] == found[key] - sum(line[key] for line in lines) > 0
    first, second = (line["bytes_down"] for line in lines[:2])
    assert abs(first - second - config.partition.clients * len(engine.opened)) < 32  # a learning rate has other digits
    assert abs(lines[0]["bytes_up"] - lines[1]["bytes_up"]) < 64 * config.partition.clients
    alone = run(config, tmp_path / "here", console=False)
    assert ("bytes_up_outside_rounds" in alone) == (head == "ridge") and alone["bytes_up"] < found["bytes_up"]


def hospitals(tmp_path: Path) -> list[str]:
    """Three owners; the second has no image of class c."""
    held = [("a", "b", "c"), ("a", "b"), ("a", "b", "c")]
    return [paint(tmp_path / f"hospital{k}", names, seed=k) for k, names in enumerate(held)]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["ridge", "random", "ncm"])
def test_three_owners_and_a_server_without_any_image(head: str, tmp_path: Path) -> None:
    config = load(None, [*SMALL, f"model.head={head}", "data.validation=0.25"])
    engine = Direct(config, tmp_path / "run", hospitals(tmp_path))
    summary = run_deployed(config, tmp_path / "run", engine)
    assert engine.classes == ("a", "b", "c") and "count" in engine.actions
    assert summary["test"]["count"] == 19 and 0 <= summary["test"]["accuracy"] <= 1  # 7 of 36, 5 of 24, 7 of 36
    assert summary["validation"]["accuracy"] >= 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_the_model_of_a_run_whose_images_are_elsewhere_is_handed_on(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    from fedgraft.runs.deliver import export_run
    from fedgraft.runs.predict import evaluate_run

    config = load(None, [*SMALL, "data.source=folder", "data.validation=0.25", "trainable.kind=lora"])
    run_deployed(config, tmp_path / "run", Direct(config, tmp_path / "run", hospitals(tmp_path)))
    export_run(tmp_path / "run", tmp_path / "adapted")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "adapted")
    assert list(model.config.id2label.values()) == ["a", "b", "c"]
    with pytest.raises(FedgraftError, match="are on its nodes"):
        evaluate_run(tmp_path / "run")
    assert evaluate_run(tmp_path / "run", paint(tmp_path / "others", ["c", "a"])).count == 24


@pytest.mark.slow
def test_a_server_with_images_measures_by_itself(tmp_path: Path) -> None:
    config = load(None, [*SMALL, "model.head=ridge"])
    engine = Direct(config, tmp_path / "run", hospitals(tmp_path))
    own = paint(tmp_path / "server", ("a", "b", "c"), seed=9)
    summary = run_deployed(config, tmp_path / "run", engine, own, "folder")
    assert "count" not in engine.actions and summary["test"]["count"] > 0


def test_the_server_learns_only_size_classes_and_digest(tmp_path: Path) -> None:
    config = load(None, SMALL)
    path = paint(tmp_path / "secret place", ("a", "b"))
    facts = NodeWorker().carry_out(WorkerRequest(to_toml(config), "f", 0, 1, data=path)).facts
    assert set(facts) == {"client", "examples", "classes", "data"} and "secret" not in str(facts)


def test_a_class_that_the_federation_does_not_know_is_one_sentence(tmp_path: Path) -> None:
    path = paint(tmp_path / "d", ("a", "z"))
    with raises("E-DATA-UNKNOWN-CLASS", label="z"):
        own_data(load(None, SMALL), "folder", path, ("a", "b"))


def test_labels_follow_the_federations_classes_by_name(tmp_path: Path) -> None:
    path = paint(tmp_path / "d", ("b", "c"))
    federated = own_data(load(None, SMALL), "folder", path, ("a", "b", "c"))
    assert set(federated.dataset.train.labels.tolist()) == {1, 2} and federated.classes == 3
    assert torch.equal(federated.rows(0), federated.rows(2)) and not set(federated.rows(1).tolist()) & set(
        federated.validation_rows.tolist()
    )


@pytest.mark.slow
def test_a_greeting_makes_a_node_ready_for_its_first_order(tmp_path: Path) -> None:
    config = load(None, [*SMALL, "data.limit=120"])
    engine = Direct(config, tmp_path / "run")
    engine.gather()
    ready = [next(iter(worker.runs.values())) for worker in engine.nodes]
    run_deployed(config, tmp_path / "run", engine)
    assert [next(iter(worker.runs.values())) for worker in engine.nodes] == ready
    far = replace(engine.requests[0], client=9)
    with raises("E-DEPLOY-CLIENT-NUMBER", client=9):
        NodeWorker().carry_out(far)


def test_owners_and_simulated_nodes_do_not_mix(tmp_path: Path) -> None:
    config = load(None, SMALL)
    data = [paint(tmp_path / "d", ("a", "b")), "", ""]
    with raises("E-DEPLOY-MIXED-DATA", client=1):
        run_deployed(config, tmp_path / "run", Direct(config, tmp_path / "run", data))
    assert not (tmp_path / "run").exists()


def test_a_remote_deal_of_one_class_is_refused() -> None:
    facts = {0: {"classes": ("a",), "examples": 3, "data": "x"}}
    with raises("E-DEPLOY-CLASSES"):
        remote_data(load(None, SMALL), facts, "", "")


def test_the_error_about_similar_classes_names_a_client_only_where_it_is_alone_with_one() -> None:
    """Client 4 alone has a class of its own, which has nothing to do with it."""
    names = [("one", "two"), ("One", "two"), ("one", "two"), ("One", "two"), ("one", "zebra")]
    facts = {client: {"classes": classes, "examples": 3, "data": "x"} for client, classes in enumerate(names)}
    with raises("E-DATA-SIMILAR-CLASSES") as caught:
        remote_data(load(None, SMALL), facts, "", "")
    assert "client" not in caught.value.fields
    with raises("E-DATA-SIMILAR-CLASSES", client=1):
        remote_data(load(None, SMALL), {client: facts[client] for client in (0, 1, 2, 4)}, "", "")


@pytest.mark.slow
def test_a_killed_server_resumes_with_memories_on_the_nodes_disks(tmp_path: Path) -> None:
    """SCAFFOLD, killed in round 2 after the clients had answered; new processes on both sides end in the same bytes."""
    overrides = [*SMALL, "algorithm.name=scaffold", "local.momentum=0", "data.limit=120", "model.head=random"]
    config = load(None, [*overrides, "rounds.total=4", "rounds.evaluate_every=0"])

    class Dies(Direct):
        def exchange(self, requests: Sequence[Request]) -> list[Any]:
            found = super().exchange(requests)
            if requests[0].round == 2:
                raise RuntimeError("the server is gone")
            return found

    with pytest.raises(RuntimeError):
        run_deployed(config, tmp_path / "there", Dies(config, tmp_path / "there"))
    run_deployed(config, tmp_path / "there", Direct(config, tmp_path / "there"))
    run(config, tmp_path / "here", console=False)
    found = [load_latest(tmp_path / where / "checkpoints").tensors for where in ("here", "there")]  # type: ignore[union-attr]
    assert torch.equal(found[0]["vector"], found[1]["vector"])
    assert torch.equal(found[0]["rule/control"], found[1]["rule/control"])


def test_memories_are_files_that_only_this_user_can_read(tmp_path: Path) -> None:
    slots = DiskSlots(WorkerRequest("c", "f", 0, 1))
    slots["a"] = b"secret"
    (path,) = slots.folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0 and slots["a"] == b"secret" and list(slots) == ["a"]
    assert DiskSlots(WorkerRequest("c", "another run", 0, 1)).get("a") is None
    del slots["a"]
    assert not len(slots)


def test_a_nodes_error_does_not_tell_its_path(tmp_path: Path) -> None:
    address = private_folder() / f"t{os.getpid()}"
    secret = str(tmp_path / "ward-7")
    code = (
        "import sys; from pathlib import Path; from fedgraft.engines.flower.node_link import *\n"
        "from fedgraft.core.errors import FedgraftError\n"
        "def work(r):\n"
        "    if r.client: raise KeyError(r.data)\n"
        "    raise FedgraftError('E-DATA-FOLDER', f'the folder {r.data} does not exist')\n"
        f"serve(Path({str(address)!r}), {os.getpid()}, work, idle=20)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        from multiprocessing.connection import Client

        from fedgraft.engines.flower.node_link import receive, send

        end = time.monotonic() + 60
        answers: list[WorkerResponse] = []
        while len(answers) < 2 and time.monotonic() < end:
            client = len(answers)
            time.sleep(0.05)
            with suppress(FileNotFoundError, ConnectionError), Client(str(address), "AF_UNIX") as pipe:
                send(pipe, WorkerRequest("c", "f", client, 1, data=secret))
                answers.append(receive(pipe, WorkerResponse))
    finally:
        process.terminate()
        process.wait(20)
    assert answers[0].error == "E-DATA-FOLDER; its log says more"
    assert answers[1].error == "failed with KeyError; its log says more"


@pytest.mark.slow
def test_the_worker_stays_warm_and_ends_with_its_owner(tmp_path: Path) -> None:
    config = load(None, [*SMALL, "data.limit=120"])
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    data = paint(tmp_path / "d", ("a", "b"))
    request = WorkerRequest(to_toml(config), "f", 0, 1, data=data)
    try:
        first = ask_worker(request, owner.pid)
        began = time.monotonic()
        again = ask_worker(request, owner.pid)
        assert first.facts == again.facts and first.facts["examples"] > 0 and time.monotonic() - began < 30
        address = next(p for p in private_folder().iterdir() if not p.suffix and _belongs(p, owner.pid, request))
    finally:
        owner.kill()
        owner.wait()
    end = time.monotonic() + 30
    while address.exists() and time.monotonic() < end:
        time.sleep(0.2)
    assert not address.exists()


def _belongs(path: Path, owner: int, request: WorkerRequest) -> bool:
    name = hashlib.blake2b(f"{owner} {request.client} {request.data}".encode(), digest_size=8).hexdigest()
    return path.name == name


def test_a_process_that_ended_is_not_alive_even_before_it_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    end = time.monotonic() + 30
    while _alive(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(process.pid)
    process.wait()
    assert _alive(os.getpid())


def test_a_worker_without_work_ends(tmp_path: Path) -> None:
    address = private_folder() / f"i{os.getpid()}"
    serve(address, os.getpid(), lambda request: WorkerResponse(), idle=0.5)
    assert not address.exists()
