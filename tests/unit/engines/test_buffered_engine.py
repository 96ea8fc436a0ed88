"""Buffered rounds over nodes: the engine returns the first answers and lets the others go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from tests.support.toy import Toy
from tests.unit.engines.test_flower_engine import LOCAL, FakeGrid, deploy, task  # noqa: F401 - a fixture for every test

import fedgraft as fg
from fedgraft import algorithms as zoo
from fedgraft.engines.flower.response_store import ResponseStore
from fedgraft.engines.flower.server import FlowerEngine, Patience

CLIENTS = 5


def slow_federation(secure: bool = False, patience: Patience | None = None) -> tuple[Toy, FlowerEngine, FakeGrid]:
    """Return a federation of which the last client is ten times slower."""
    algorithm = fg.buffered(zoo.fedavg(local=LOCAL), 3)
    if secure:
        algorithm = fg.secure(algorithm, limit=8.0)
    toy = Toy(algorithm, per_round=CLIENTS)
    engine, grid = deploy(toy, CLIENTS, patience)
    for node in grid.nodes.values():
        node.delay = 50.0 if node.client == CLIENTS - 1 else 5.0
    return toy, engine, grid


def trained(grid: FakeGrid) -> int:
    """Return how many training requests were sent."""
    return sum(message.metadata.message_type == "train.request" for message in grid.pushed)


def test_nobody_waits_for_the_slowest() -> None:
    toy, _, grid = slow_federation()
    began = grid.clock()
    arrivals = []
    for _ in range(12):
        toy.run(1)
        arrivals.append(toy.summary.record["arrivals"])
    assert all(len(buffer) == 3 for buffer in arrivals)
    slow = [entry for buffer in arrivals for entry in buffer if entry[0] == CLIENTS - 1]
    assert slow and slow[0][1] == 0  # it comes late, with the first model
    assert grid.clock() - began < 12 * 10  # synchronous rounds take 12 * 50
    assert trained(grid) == 12 * 3 + len(toy.state.in_flight)  # no request is sent twice


@pytest.mark.parametrize("secure", [False, True], ids=["clear", "secure"])
def test_the_recorded_order_gives_the_same_bits_in_one_process(secure: bool) -> None:
    there, _, _ = slow_federation(secure)
    recorded = []
    for _ in range(8):
        there.run(1)
        recorded.append([(client, bool(used)) for client, _, used in there.summary.record["arrivals"]])
    here = Toy(there.algorithm, per_round=CLIENTS)
    here.server_context = replace(here.server_context, arrivals=lambda round: recorded[round])
    here.run(8)
    assert any(work.version < 7 for work in here.state.in_flight.values())
    assert torch.equal(here.state.vector, there.state.vector)
    in_order = Toy(there.algorithm, per_round=CLIENTS).run(8)  # the broken variant: any other order
    assert not torch.equal(in_order.vector, there.state.vector)


def test_a_lost_node_is_named_and_the_buffer_is_filled_by_others() -> None:
    toy, _, grid = slow_federation(patience=Patience(deadline=20.0))
    fast = next(node for node in grid.nodes.values() if node.client == 0)
    honest = fast.app

    def failing(message: Any, context: Any) -> Any:
        if message.metadata.message_type == "query.hello":
            return honest(message, context)
        raise RuntimeError("no disk left")

    fast.app = failing  # type: ignore[method-assign]
    toy.run(1)
    record = toy.summary.record
    assert [entry["client"] for entry in record["dropped"]] == [0]
    assert sum(used for _, _, used in record["arrivals"]) == 3


def test_another_request_to_a_busy_client_waits_for_its_answer() -> None:
    """A node does one thing at a time, and its memory has one next step."""
    toy, engine, grid = slow_federation()
    toy.run(1)
    client = CLIENTS - 1
    request = fg.Request("toy", 0, client, "evaluate", settings={"split": "test"})
    asked_at = grid.clock()
    engine.exchange([request])
    assert grid.clock() - asked_at > 30
    toy.run(1)
    assert [client, 0, 1] in toy.summary.record["arrivals"]  # its answer was not lost


def test_a_server_that_comes_back_asks_again_for_what_is_missing_only(tmp_path: Path) -> None:
    """Which of the answers that came fill the first buffer may differ: that round was not in the log yet."""
    toy, engine, grid = slow_federation()
    engine.store = ResponseStore(tmp_path)
    toy.run(2)
    state = toy.state
    memory = dict(engine.memory)
    toy.run(1)
    again = FlowerEngine(
        engine.transport, CLIENTS, Patience(), engine.clock, engine.sleep, store=ResponseStore(tmp_path)
    )
    again.gather()
    again.open("toy", {"head": torch.zeros(2)})
    again.memory = dict(memory)
    toy.engine = again  # type: ignore[assignment]
    toy.state = state
    sent = trained(grid)
    toy.run(1)
    assert trained(grid) - sent == 1  # the slow client's; the answers of the others are on disk
    assert sum(used for _, _, used in toy.summary.record["arrivals"]) == 3
