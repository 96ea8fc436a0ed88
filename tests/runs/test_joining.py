"""Clients that come later and clients that go for good: who is in which round, and that nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.machines import Machines
from tests.support.tiny import same_bits, tensors_of, tiny, without_pictures

from fedgraft.config.load import Config, from_folder
from fedgraft.consortium.unlearn import plan_replay, unlearn_client
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request
from fedgraft.deploy.coordinator import with_clients
from fedgraft.deploy.deployed import run_deployed
from fedgraft.runs import loop as running
from fedgraft.runs.engines import Engines
from fedgraft.runs.loop import run
from fedgraft.runs.setup import setup_of

SMALL = ("rounds.total=4", "rounds.checkpoint_every=1", "engine=reference", 'metrics=["accuracy"]')
CHANGES = ("partition.joins={2=3}", "partition.leaves={1=2}")


def done(config: Config, folder: Path) -> Path:
    with without_pictures():
        run(config, folder, console=False)
    return folder


def in_rounds(folder: Path) -> list[list[int]]:
    """Whose updates are in each round."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["clients"]["ids"] for line in lines if line["round"]]


def test_a_late_client_is_in_its_rounds_and_in_nothing_before(tmp_path: Path) -> None:
    folder = done(tiny(*SMALL, *CHANGES, "personal.evaluate=end"), tmp_path / "run")
    assert in_rounds(folder) == [[0, 1], [0, 1], [0, 2], [0, 2]]
    never = done(tiny(*SMALL, 'partition.without=["2"]'), tmp_path / "never")
    everybody = done(tiny(*SMALL), tmp_path / "all")
    head, without, usual = (tensors_of(run_folder)["head"] for run_folder in (folder, never, everybody))
    assert torch.equal(head, without) and not torch.equal(head, usual)  # the ridge head is of those who were there
    assert set(json.loads((folder / "summary.json").read_text())["clients"]) == {"0", "2"}  # client 1 is gone


def test_the_others_meet_what_they_would_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as a run in which the absent ones are asked and silent, with a server that remembers."""
    options = (*SMALL, "algorithm.name=scaffold", "local.momentum=0", "model.head=random")
    planned = tensors_of(done(tiny(*options, *CHANGES), tmp_path / "planned"))

    class Partly(Engines):
        def training(self, *parts: Any) -> Any:
            engine = super().training(*parts)
            real = engine.exchange

            def exchange(requests: Sequence[Request]) -> Any:
                return real([o for o in requests if o.client != (2 if o.round < 2 else 1)])

            engine.exchange = exchange  # type: ignore[method-assign]
            return engine

    monkeypatch.setattr(running, "Engines", Partly)
    silent = tensors_of(done(tiny(*options), tmp_path / "silent"))
    assert torch.equal(planned["vector"], silent["vector"])
    assert not torch.equal(planned["vector"], tensors_of(done(tiny(*options, "seed=1"), tmp_path / "x"))["vector"])


def test_who_came_late_is_forgotten_from_there_on(tmp_path: Path) -> None:
    """Also with a ridge head, which was made without it: the rounds before need not be done again."""
    folder = done(tiny(*SMALL, *CHANGES), tmp_path / "run")
    replay = plan_replay(folder, "2")
    assert (replay.start, replay.rounds, replay.took_part) == (2, 4, 2)
    assert plan_replay(folder, "1").start == 0 and "ridge head" in plan_replay(folder, "1").why
    with without_pictures():
        unlearn_client(replay, folder, console=False)
    never = done(tiny(*SMALL, 'partition.without=["2"]', "partition.leaves={1=2}"), tmp_path / "never")
    assert same_bits(tensors_of(tmp_path / "run-without-2"), tensors_of(never))


@pytest.mark.parametrize("protection", ["clear", "secure"])
def test_nodes_that_come_and_go_give_the_model_of_the_planned_run(
    protection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deployed: node 2 is started during round 3, node 1 ends after round 2; nothing of it is in the config."""
    options = (*SMALL, "model.head=random", f"privacy.aggregation={protection}", "partition.clients=4")

    class Coming(Machines):
        def deliver(self, request: Request) -> Any:
            if request.client == (2 if request.round < 2 else 1):
                return request.client, "no node serves it at present"
            return super().deliver(request)

    engine = Coming(tiny(*options), tmp_path / "there", tmp_path / "keys", monkeypatch)
    with without_pictures():
        run_deployed(tiny(*options), tmp_path / "there", engine)
    assert in_rounds(tmp_path / "there") == [[0, 1, 3], [0, 1, 3], [0, 2, 3], [0, 2, 3]]
    here, there = (
        tensors_of(run_folder)["vector"]
        for run_folder in (done(tiny(*options, *CHANGES), tmp_path / "here"), tmp_path / "there")
    )
    if protection == "clear":
        assert torch.equal(here, there)
    assert torch.allclose(here, there, atol=1e-6)  # a hidden sum is rounded by how many were asked


def test_what_cannot_be_is_refused() -> None:
    for options, code in (
        (["partition.joins={0=1,1=2,2=2}"], "E-RUN-NOBODY-BEGINS"),
        (["partition.joins={0=3}", "partition.leaves={0=2}"], "E-RUN-LEAVES-BEFORE-JOINING"),
        (["partition.leaves={west=2}"], "E-RUN-UNKNOWN-CLIENT"),
    ):
        with raises(code):
            setup_of(tiny(*options))
    with pytest.raises(FedgraftError, match=r"partition\.joins"):
        tiny("partition.joins={0=0}")


def test_nodes_are_numbered_and_a_plain_run_keeps_its_identity(tmp_path: Path) -> None:
    config = tiny("partition.joins={west=3}", "partition.leaves={north=2}")
    renamed = with_clients(config, 3, ["north", "south", "west"]).partition
    assert renamed.joins == {"2": 3} and renamed.leaves == {"0": 2}
    assert tiny().digest == tiny("partition.joins={}").digest != config.digest
    folder = done(tiny(*SMALL, *CHANGES, "rounds.total=1"), tmp_path / "run")
    assert from_folder(folder).partition.joins == {"2": 3}
