"""The Flower engine against a grid in this process: order, doubles, errors, silence, oversize, loss and return.

Nodes are the real ClientApp around the toy federation; only the network between is played, on a clock of its own.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy

from fedgraft import algorithms as zoo
from fedgraft.client.actions import action_named
from fedgraft.client.handle import handle
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import load
from fedgraft.core.messages import Request, Response, pack, unpack
from fedgraft.data.sources.class_map import check_names, odd_names
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse
from fedgraft.engines.in_process import InProcess
from fedgraft.local.optimizers import sgdm
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.protection import secure

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.app import Context, Error, Message, RecordDict

from fedgraft.deploy import flower_apps
from fedgraft.deploy.deployed import wait_for_clients
from fedgraft.deploy.process import NODE_STATE_VARIABLE
from fedgraft.deploy.slots import load_memory
from fedgraft.engines.flower.client import StateSlots, client_app
from fedgraft.engines.flower.grid import FlowerTransport
from fedgraft.engines.flower.registry import NodeRegistry
from fedgraft.engines.flower.response_store import ResponseStore
from fedgraft.engines.flower.server import FlowerEngine, Patience
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import expected_evaluation, valid_responses

LOCAL = LocalTraining(steps=2, batch_size=8, optimizer=sgdm(0.0))


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's messages want to know which task makes them."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeNode:
    """A node: the real ClientApp, with a state of its own, around a toy federation's workplace."""

    def __init__(self, toy: Toy, client: int) -> None:
        self.toy, self.client = toy, client
        self.digest = ""
        self.spoil: Callable[[WorkerResponse], WorkerResponse] = lambda answer: answer
        self.lost = False
        """Answers are made and never arrive."""
        self.silent = False
        self.delay = 0.0
        config: dict[str, Any] = {"partition-id": client}
        self.context = Context(1, 1, config, RecordDict(), {"config": "", "folder": "f"})
        self.app = client_app(self.serve)

    def serve(self, worker_request: WorkerRequest, slots: Any) -> WorkerResponse:
        if not worker_request.request:
            return self.spoil(WorkerResponse(facts={"client": self.client}))
        if worker_request.digest != self.digest:
            if not worker_request.opened:
                return WorkerResponse(need=True)
            self.digest = worker_request.digest
        request = replace(unpack(Request, worker_request.request), client=self.client)
        memory, slot = load_memory(slots, worker_request.after, self.client)
        response, kept = handle(request, self.toy.algorithm, self.toy.context, memory)
        step = worker_request.after
        if kept is not memory and kept:
            step = worker_request.becomes
            slots[slot] = pack(Request("toy", step, self.client, "memory", auxiliary=kept))
        return self.spoil(WorkerResponse(pack(response), step))

    def forget(self) -> None:
        """Lose everything, as a node does whose disk was replaced."""
        self.digest = ""
        for slot in list(self.context.state):
            del self.context.state[slot]


class FakeGrid:
    """Delivers messages and keeps replies until they are due; shuffles what it hands out."""

    def __init__(self, nodes: dict[int, FakeNode], clock: Clock, seed: int = 0) -> None:
        self.nodes, self.clock, self.random = nodes, clock, random.Random(seed)
        self.responses: dict[str, tuple[float, Message]] = {}
        self.count = 0
        self.pushed: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            self.pushed.append(message)
            identities.append(f"m{self.count}")
            node = self.nodes[message.metadata.dst_node_id]
            hello = message.metadata.message_type == "query.hello"
            if node.silent and not hello:
                continue
            try:
                response = node.app(message, node.context)
            except Exception as error:
                response = Message(Error(1, f"{error}"), reply_to=message)
            if not (node.lost and not hello):
                self.responses[f"m{self.count}"] = (self.clock() + node.delay, response)
        return identities

    def pull_messages(self, identities: Iterable[str]) -> Iterable[Message]:
        due = [i for i in identities if i in self.responses and self.responses[i][0] <= self.clock()]
        self.random.shuffle(due)
        return [self.responses.pop(i)[1] for i in due]


def deploy(toy: Toy, clients: int = 5, patience: Patience | None = None) -> tuple[FlowerEngine, FakeGrid]:
    clock = Clock()
    grid = FakeGrid({100 + 7 * k % 31: FakeNode(Toy(toy.algorithm), k) for k in range(clients)}, clock)
    engine = FlowerEngine(FlowerTransport(grid), clients, patience or Patience(), clock, clock.sleep)  # type: ignore[arg-type]
    engine.gather()
    engine.open("toy", {"head": torch.zeros(2)})
    toy.engine = engine  # type: ignore[assignment]
    return engine, grid


class Without(InProcess):
    """The reference engine with some clients that never answer, and remember nothing of being asked."""

    def __init__(self, toy: Toy, missing: Callable[[int, int], bool]) -> None:
        super().__init__(toy.algorithm, toy.context)
        self.missing = missing

    def exchange(self, requests: Sequence[Request]) -> Any:
        return super().exchange([o for o in requests if not self.missing(o.round, o.client)])


def algorithm(name: str) -> Any:
    return {"fedavg": zoo.fedavg, "scaffold": zoo.scaffold}[name](local=LOCAL)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_agrees_with_the_reference_whatever_arrives_first(name: str) -> None:
    here = Toy(algorithm(name)).run(4)
    there = Toy(algorithm(name))
    _, grid = deploy(there)
    for node in grid.nodes.values():
        node.delay = grid.random.random()
    there.run(4)
    assert torch.equal(here.vector, there.state.vector)
    assert all(torch.equal(here.rule[key], there.state.rule[key]) for key in here.rule)


@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_refused_answer_leaves_no_trace_in_a_nodes_memory(spoiled: int) -> None:
    """The next order names the step before, which the node still holds: as if it had not been asked."""
    toy = Toy(algorithm("scaffold"), per_round=5)
    engine, grid = deploy(toy)
    node = next(node for node in grid.nodes.values() if node.client == 2)

    def spoil(answer: WorkerResponse) -> WorkerResponse:
        response = unpack(Response, answer.response)
        wrong = {name: torch.full_like(t, float("nan")) for name, t in response.sums.items()}
        return replace(answer, response=pack(replace(response, sums=wrong)))

    for round in range(4):
        node.spoil = spoil if round == spoiled else lambda answer: answer
        toy.run(1)
        dropped = [one["client"] for one in toy.summary.record["dropped"]]
        assert dropped == ([2] if round == spoiled else [])
    reference = Toy(algorithm("scaffold"), per_round=5)
    reference.engine = Without(reference, lambda round, client: round == spoiled and client == 2)
    reference.run(4)
    assert torch.equal(toy.state.vector, reference.state.vector)
    assert torch.equal(toy.state.rule["control"], reference.state.rule["control"])
    assert int(engine.memory[2]["step"]) == 3


def in_client_order(engine: FlowerEngine, toy: Toy) -> bool:
    requests = [Request("toy", 0, k, "train", toy.space.digest, toy.state.vector, {}, {"lr": 0.1}) for k in range(5)]
    arrivals = [a[0] if isinstance(a, tuple) else a.client for a in engine.exchange(requests)]
    return arrivals == sorted(arrivals)


def test_arrivals_are_in_client_order_and_a_broken_engine_is_noticed() -> None:
    class ByArrival(FlowerEngine):
        def _read(self, message: Message, letter: Any) -> Any:
            arrival = super()._read(message, letter)
            self.seen = [*getattr(self, "seen", []), arrival]
            return arrival

        def exchange(self, requests: Sequence[Request]) -> Any:
            self.seen: list[Any] = []
            super().exchange(requests)
            return self.seen

    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    assert in_client_order(engine, toy)
    broken = ByArrival(FlowerTransport(grid), 5, Patience(), grid.clock, grid.clock.sleep)  # type: ignore[arg-type]
    broken.gather()
    broken.open("toy", {"head": torch.zeros(2)})
    assert not in_client_order(broken, toy)


def test_a_second_node_of_a_client_is_refused_by_name_until_the_first_is_gone() -> None:
    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    first = engine.registry.nodes[2]
    grid.nodes[999] = FakeNode(Toy(toy.algorithm), 2)
    engine.registry.refresh()
    engine.registry.refresh()
    assert engine.registry.nodes[2] == first and "client 2 is served by node" in engine.registry.refused[999]
    del grid.nodes[first]
    engine.registry.refresh()
    engine.registry.refresh()
    assert engine.registry.nodes[2] == 999

    class Careless(NodeRegistry):
        def _enter(self, node: int, client: int, facts: Any, error: str) -> None:
            self.nodes[client] = node

    careless = Careless(engine.transport, 5)
    grid.nodes[1000] = FakeNode(Toy(toy.algorithm), 2)
    careless.refresh()
    assert len(careless.nodes) == 5 and not careless.refused, "a stranger took a client's place"


def test_a_client_number_that_is_not_there_is_refused() -> None:
    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    grid.nodes[55] = FakeNode(Toy(toy.algorithm), 9)
    engine.registry.refresh()
    engine.registry.refresh()
    assert "clients 0 to 4" in engine.registry.refused[55]


def test_an_error_on_a_node_is_a_named_drop_with_its_sentence() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy)
    bad = grid.nodes[engine.registry.nodes[1]]
    bad.spoil = lambda answer: WorkerResponse(error="its data is gone") if answer.response else answer
    crash = grid.nodes[engine.registry.nodes[3]]

    def fail(answer: WorkerResponse) -> WorkerResponse:
        raise RuntimeError("no memory")

    crash.spoil = fail
    toy.run(2)
    rejections = {o.client: o.reason for o in toy.summary.rejections}
    assert rejections[1] == "its data is gone" and "no memory" in rejections[3]
    reference = Toy(algorithm("fedavg"), per_round=5)
    reference.engine = Without(reference, lambda round, client: client in (1, 3))
    assert torch.equal(reference.run(2).vector, toy.state.vector)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["silent", "lost", "late"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_thirty_percent_silent_nodes_end_the_round_at_its_deadline(name: str, how: str) -> None:
    """Ten clients, three of them silent in turn: the result is the one over the responders, memories included."""
    toy = Toy(algorithm(name), clients=10, per_round=10)
    engine, grid = deploy(toy, 10, Patience(deadline=30.0))

    def missing(round: int, client: int) -> bool:
        return (client + round) % 10 < 3

    for round in range(4):
        for client, node in engine.registry.nodes.items():
            away = missing(round, client)
            grid.nodes[node].silent = away and how == "silent"
            grid.nodes[node].lost = away and how == "lost"
            grid.nodes[node].delay = 31.0 if away and how == "late" else 0.5
        began = grid.clock()
        toy.run(1)
        assert 30 <= grid.clock() - began < 31
        assert {o.client for o in toy.summary.rejections} == {k for k in range(10) if missing(round, k)}
        assert all("30 s" in o.reason for o in toy.summary.rejections)
    reference = Toy(algorithm(name), clients=10, per_round=10)
    reference.engine = Without(reference, missing)
    assert torch.equal(reference.run(4).vector, toy.state.vector)


@pytest.mark.parametrize("reason", [True, False])
def test_without_a_deadline_a_node_that_never_answers_does_not_hold_up_the_run(
    reason: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected and says nothing; in the broken variant the round goes on waiting."""
    monkeypatch.setattr("fedgraft.engines.flower.server.SILENT", 1800.0 if reason else float("inf"))
    toy = Toy(algorithm("fedavg"), clients=3, per_round=3)
    engine, grid = deploy(toy, 3, Patience())
    grid.nodes[engine.registry.nodes[1]].silent = True
    calm, limit = engine.sleep, grid.clock() + 5000.0

    def sleep(seconds: float) -> None:
        if grid.clock() > limit:
            raise KeyboardInterrupt
        calm(60 * seconds)

    engine.sleep = sleep
    if not reason:
        with pytest.raises(KeyboardInterrupt):
            toy.run(1)
        return
    toy.run(1)
    (one,) = toy.summary.rejections
    assert one.client == 1 and one.reason == "no answer within 1800 s"


def test_what_a_node_says_begins_no_line_and_moves_no_cursor() -> None:
    from fedgraft.engines.flower.transport import name_list, text_setting

    said = "broken\n2026-11-17 round 3: client 0 dropped \x1b[2J\x1b[31m"
    assert (
        text_setting({"error": said}, "error").isprintable()
        and len(text_setting({"error": "x" * 9999}, "error")) == 500
    )
    assert name_list({"classes": ["a\x1b[2J", "b"]}, "classes") == ("a [2J", "b")


def test_a_node_with_a_key_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that says it is a simulation would have orders carried out where errors and memories are Flower's."""
    asked: list[Any] = []
    monkeypatch.setattr(flower_apps, "ask_worker", lambda request: asked.append(request) or WorkerResponse())
    request = WorkerRequest('engine = "flower-sim"', "", 0, 1)
    flower_apps._carry_out(request, {})
    assert not asked
    monkeypatch.setenv(NODE_STATE_VARIABLE, "/nowhere/node.home")
    flower_apps._carry_out(request, {})
    assert asked == [request]


@pytest.mark.parametrize(
    "lie",
    [
        {"classes": ("a", "a")},
        {"classes": ("a" * 201,)},
        {"classes": tuple(map(str, range(50_001)))},
        {"examples": -1},
        {"examples": 1 << 41},
        {"classes": ("",)},
    ],
)
def test_what_a_node_tells_when_it_is_greeted_must_be_possible(lie: dict[str, Any]) -> None:
    from fedgraft.engines.flower import registry

    assert registry._plausible({"classes": ("a", "b"), "examples": 7, "data": ""})
    assert not registry._plausible({"classes": ("a", "b"), "examples": 7, "data": "", **lie})


def test_a_memory_that_is_not_rolled_back_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that goes on from its newest memory, though that answer never arrived, ends in another model."""
    module = sys.modules[__name__]

    def newest(slots: Any, step: int, client: int) -> Any:
        found = [unpack(Request, slots[slot]) for slot in slots]
        best = max(found, key=lambda kept: kept.round, default=None)
        return (best.auxiliary if best else {}), "a"

    monkeypatch.setattr(module, "load_memory", newest)
    toy = Toy(algorithm("scaffold"), clients=3, per_round=3)
    engine, grid = deploy(toy, 3, Patience(deadline=10.0))
    grid.nodes[engine.registry.nodes[0]].lost = True
    toy.run(1)
    grid.nodes[engine.registry.nodes[0]].lost = False
    toy.run(2)
    reference = Toy(algorithm("scaffold"), clients=3, per_round=3)
    reference.engine = Without(reference, lambda round, client: round == 0 and client == 0)
    assert not torch.equal(reference.run(3).vector, toy.state.vector)


def test_oversized_and_malformed_replies_are_dropped_before_they_are_parsed() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy)
    grid.nodes[engine.registry.nodes[0]].spoil = lambda a: (
        replace(a, response=b"\x00" * 10_000_000) if a.response else a
    )
    grid.nodes[engine.registry.nodes[4]].spoil = lambda a: replace(a, response=b"nonsense") if a.response else a
    toy.run(1)
    reasons = {o.client: o.reason for o in toy.summary.rejections}
    assert "over the limit" in reasons[0] and "shorter than its header says" in reasons[4]
    requests = [Request("toy", 1, 0, "evaluate", toy.space.digest, toy.state.vector, {}, {"lr": 0.1})]
    assert (
        valid_responses(engine.exchange, requests, expected_evaluation(requests, ExampleCounts(), finetuned=False))
        == []
    )


def test_an_answer_to_another_order_or_with_another_step_is_refused() -> None:
    toy = Toy(algorithm("scaffold"), per_round=5)
    engine, grid = deploy(toy)
    grid.nodes[engine.registry.nodes[0]].spoil = lambda a: replace(a, step=7) if a.response else a
    stranger = pack(Response("other", 0, 2))
    grid.nodes[engine.registry.nodes[2]].spoil = lambda a: replace(a, response=stranger) if a.response else a
    toy.run(1)
    reasons = {o.client: o.reason for o in toy.summary.rejections}
    assert "step 7" in reasons[0] and 2 in reasons


def test_a_node_that_leaves_and_one_that_joins_late() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy)
    node = engine.registry.nodes[1]
    gone = grid.nodes.pop(node)
    toy.run(1)
    assert {o.client: o.reason for o in toy.summary.rejections} == {1: "no node serves it at present"}
    gone.forget()
    grid.nodes[777] = gone
    toy.run(1)
    toy.run(1)
    assert engine.registry.nodes[1] == 777 and not toy.summary.rejections


def test_a_node_that_lost_the_edit_space_is_told_again_at_once_and_only_then() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy)

    def told() -> int:
        found = sum("opened" in m.content for m in grid.pushed if m.metadata.message_type == "train.request")
        grid.pushed.clear()
        return found

    toy.run(1)
    assert told() == 5
    toy.run(1)
    assert told() == 0
    grid.nodes[engine.registry.nodes[3]].digest = ""
    toy.run(1)
    assert told() == 1 and not toy.summary.rejections


def test_the_engine_counts_what_it_sends_and_receives() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy)
    toy.run(2)
    sent = [m for m in grid.pushed if m.metadata.message_type == "train.request"]
    sizes = [len(record["bytes"].data) for m in sent for name, record in m.content.items() if name != "words"]
    assert len(sent) == 10 and len(sizes) == 15 and engine.sent == sum(sizes)  # five orders carried the opening too
    before = engine.sent, engine.received
    toy.run(1)
    down, up = toy.summary.record["bytes_down"], toy.summary.record["bytes_up"]
    assert (engine.sent - before[0], engine.received - before[1]) == (down, up)


def test_a_client_whose_memory_is_lost_is_refused_by_name() -> None:
    toy = Toy(algorithm("scaffold"), per_round=5)
    engine, grid = deploy(toy)
    toy.run(1)
    grid.nodes[engine.registry.nodes[3]].forget()
    toy.run(1)
    with raises("E-DEPLOY-MEMORY-STEP", client=3, step=1, latest_step=0):
        load_memory({}, 1, 3)
    assert toy.summary.rejections[0].reason == "E-DEPLOY-MEMORY-STEP; its log says more"


def test_a_resumed_server_goes_on_from_the_step_it_saved() -> None:
    """The server dies after a round that its checkpoint does not know; resumed, it ends in the same bytes."""
    whole = Toy(algorithm("scaffold")).run(4)
    toy = Toy(algorithm("scaffold"))
    engine, grid = deploy(toy)
    toy.run(2)
    saved, steps = toy.state, dict(engine.memory)
    toy.run(1)  # the checkpoint of this round is lost
    again = FlowerEngine(FlowerTransport(grid), 5, Patience(), grid.clock, grid.clock.sleep)  # type: ignore[arg-type]
    again.gather()
    again.open("toy", {"head": torch.zeros(2)})
    again.memory = steps
    toy.engine, toy.state = again, saved  # type: ignore[assignment]
    toy.run(2)
    assert torch.equal(whole.vector, toy.state.vector)


def test_orders_of_equal_content_share_one_array() -> None:
    toy = Toy(algorithm("fedavg"), per_round=5)
    _, grid = deploy(toy)
    grid.pushed.clear()
    toy.run(1)
    arrays = {id(message.content["request"]) for message in grid.pushed}
    assert len(grid.pushed) == 5 and len(arrays) == 1


def test_before_round_zero_a_node_that_comes_back_is_asked_again_and_one_that_does_not_is_left_out() -> None:
    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy, patience=Patience(deadline=5.0))
    requests = [Request("toy", -1, k, "statistics") for k in range(5)]
    whole = engine.exchange(requests)
    node = grid.nodes[engine.registry.nodes[3]]
    node.silent, pushed = True, len(grid.pushed)
    rest, grid.clock.sleep = (
        grid.clock.sleep,
        lambda s: (rest(s), setattr(node, "silent", len(grid.pushed) < pushed + 6)),
    )  # type: ignore[assignment, return-value, func-returns-value]
    engine.sleep = grid.clock.sleep
    assert engine.exchange(requests) == whole
    engine.sleep, node.silent = rest, True
    assert [isinstance(said, bytes) for _, said in engine.exchange(requests)] == [True, True, True, False, True]
    engine.patience = Patience(deadline=5.0, least=5)
    with raises("E-ENGINES-TOO-FEW-ANSWERS", answered=4, action="statistics"):
        engine.exchange(requests)


def test_a_node_that_was_restarted_with_the_greeting_in_its_hands_is_greeted_again() -> None:
    toy, clock = Toy(algorithm("fedavg"), clients=2), Clock()
    nodes = {1: FakeNode(toy, 0), 2: FakeNode(toy, 1)}
    nodes[2].delay = 1e9
    grid = FakeGrid(nodes, clock)
    registry = NodeRegistry(FlowerTransport(grid), 2, clock)  # type: ignore[arg-type]
    registry.refresh()
    assert set(registry.nodes) == {0}
    nodes[2].delay = 0.0  # the same key, so the same node: it never seemed gone
    for _ in range(61):
        clock.sleep(1.0)
        registry.refresh()
    assert set(registry.nodes) == {0, 1}


def test_a_node_that_comes_back_with_other_data_is_refused_by_name() -> None:
    toy, clock = Toy(algorithm("fedavg"), clients=2), Clock()
    nodes = {1: FakeNode(toy, 0), 2: FakeNode(toy, 1)}
    grid = FakeGrid(nodes, clock)
    registry = NodeRegistry(FlowerTransport(grid), 2, clock)  # type: ignore[arg-type]
    registry.refresh()
    nodes[3] = nodes.pop(2)
    nodes[3].spoil = lambda a: replace(a, facts={**a.facts, "examples": 1 << 39})
    registry.refresh()
    assert "client 1 has other data than when the run began" in registry.refused[3]


@pytest.mark.parametrize("asked", [True, False])
def test_where_most_nodes_have_images_one_without_is_left_out_by_name(asked: bool) -> None:
    toy, clock = Toy(algorithm("fedavg"), clients=3), Clock()
    nodes = {k + 1: FakeNode(toy, k) for k in range(3)}
    for k in (1, 2):
        nodes[k].spoil = lambda a: replace(a, facts={**a.facts, "classes": ["a", "b"]})
    registry = NodeRegistry(FlowerTransport(FakeGrid(nodes, clock)), 3, clock)  # type: ignore[arg-type]
    registry.refresh()
    if asked:
        registry.need_images()
    clock.now += 1000
    registry.refresh()  # it is asked again, and says the same
    assert sorted(registry.nodes) == sorted(registry.facts) == ([0, 1] if asked else [0, 1, 2])
    assert registry.refused == ({3: "it has no images of its own, and the others have"} if asked else {})


@pytest.mark.parametrize("judged", [True, False])
def test_a_node_whose_class_name_looks_like_that_of_others_is_left_out_by_name(judged: bool) -> None:
    """One bad node must not keep a run from starting; without the rule its name stops everybody."""
    toy, clock = Toy(algorithm("fedavg"), clients=3), Clock()
    nodes = {k + 1: FakeNode(toy, k) for k in range(3)}
    names = {1: ["cat", "dog"], 2: ["cat", "dog"], 3: ["Cat ", "dog"]}
    for number, node in nodes.items():
        node.spoil = lambda a, n=number: replace(a, facts={**a.facts, "classes": names[n]})
    registry = NodeRegistry(FlowerTransport(FakeGrid(nodes, clock)), 3, clock)  # type: ignore[arg-type]
    engine = SimpleNamespace(gather=registry.refresh, registry=registry, classes=())
    config = load(None, ["model.name=tiny", "partition.clients=3", "model.head=random"])
    if not judged:
        registry.leave_out = lambda rule: None  # type: ignore[method-assign]
        with raises("E-DATA-SIMILAR-CLASSES", client=2):
            wait_for_clients(config, engine)
        return
    assert wait_for_clients(config, engine).task.data.dataset.classes == ("cat", "dog")
    assert sorted(registry.nodes) == sorted(registry.facts) == [0, 1]
    assert "its class 'Cat ' looks like 'cat', as 2 others call it" in registry.refused[3]
    clock.now += 1000
    registry.refresh()  # asked again, it says the same
    assert sorted(registry.nodes) == [0, 1]
    names[3] = ["cat", "dog"]  # its owner has renamed the class
    clock.now += 1000
    registry.refresh()
    assert sorted(registry.nodes) == [0, 1, 2]


def test_one_against_one_nobody_is_left_out_and_many_names_are_quick() -> None:
    assert odd_names({0: ["cat"], 1: ["Cat"]}) == {} and odd_names({0: ["cat"], 1: ["cat"], 2: ["dog"]}) == {}
    assert list(odd_names({0: ["cat", "Cat"], 1: ["cat"], 2: ["cat"]})) == ["Cat"]
    many = [f"class {n}" for n in range(50_000)]
    check_names(many)  # pair by pair this would be 1,250 million looks
    with raises("E-DATA-SIMILAR-CLASSES"):
        check_names([*many, "Class-7"])


@pytest.mark.parametrize("bound", [True, False])
def test_a_claimed_client_number_must_be_that_of_the_nodes_key(bound: bool) -> None:
    """Node 2 has client 1's key and claims to be client 0; without the binding it would be believed."""
    toy, clock = Toy(algorithm("fedavg"), clients=2), Clock()
    keys = {2: 1}
    grid = FakeGrid({2: FakeNode(toy, 0)}, clock)
    registry = NodeRegistry(FlowerTransport(grid), 2, clock, (lambda: keys) if bound else None)  # type: ignore[arg-type]
    registry.refresh()
    assert registry.nodes == ({} if bound else {0: 2})
    if bound:
        assert registry.refused == {2: "it calls itself client 0, and its key is that of client 1"}
        keys[3] = 0  # registered since
        grid.nodes[3] = FakeNode(toy, 0)
        registry.refresh()
        assert registry.nodes == {0: 3}


class Refusing:
    """A transport to nodes that refuse their greeting with these reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = dict(enumerate(reasons))

    def present(self) -> set[int]:
        return set(self.reasons)

    def greet(self, nodes: Sequence[int]) -> dict[str, int]:
        return {str(node): node for node in nodes}

    def greetings(self, questions: Sequence[str]) -> dict[str, tuple[int, dict[str, Any], str]]:
        return {question: (int(question), {}, self.reasons[int(question)]) for question in questions}


@pytest.mark.parametrize(
    ("reasons", "waits"),
    [
        (["E-CONFIG-DP-NOT-COVERED; its log says more"] * 3, False),
        (["E-CONFIG-DP-NOT-COVERED; its log says more", ""], True),  # the third may still come
        (["refused by the rule 'config': it is another config"] * 3, True),  # the owner may agree to it meanwhile
    ],
)
def test_nobody_waits_for_nodes_that_cannot_work_on_the_config(reasons: list[str], waits: bool) -> None:
    clock = Clock()
    registry = NodeRegistry(Refusing(reasons), 3, clock)  # type: ignore[arg-type]
    began = clock()
    with raises("E-ENGINES-TOO-FEW-NODES"):
        registry.gather(2, 300.0, clock, clock.sleep)
    assert (clock() - began >= 300.0) == waits


def test_too_few_nodes_at_the_start_is_one_sentence() -> None:
    toy = Toy(algorithm("fedavg"))
    clock = Clock()
    grid = FakeGrid({1: FakeNode(toy, 0)}, clock)
    transport = FlowerTransport(grid)  # type: ignore[arg-type]
    engine = FlowerEngine(transport, 3, Patience(wait=20, least=2), clock, clock.sleep)
    with raises("E-ENGINES-TOO-FEW-NODES", nodes=1, needed=2):
        engine.gather()
    FlowerEngine(transport, 3, Patience(wait=20, least=1), clock, clock.sleep).gather()


def test_a_nodes_words_are_read_as_hostile() -> None:
    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    attacker = FakeNode(toy, 0)
    attacker.spoil = lambda a: WorkerResponse(facts={"client": "0", "examples": 1.5}) if not a.response else a
    grid.nodes[31] = attacker
    engine.registry.refresh()
    engine.registry.refresh()
    assert 31 in engine.registry.refused


def test_memory_slots_keep_the_present_and_the_one_before() -> None:
    slots = StateSlots(Context(1, 1, {}, RecordDict(), {}))
    assert load_memory(slots, 0, 1) == ({}, "a")
    for step in (1, 2, 3):
        _, slot = load_memory(slots, step - 1, 1)
        slots[slot] = pack(Request("r", step, 1, "memory", auxiliary={"x": torch.tensor([step])}))
    assert int(load_memory(slots, 3, 1)[0]["x"]) == 3 and int(load_memory(slots, 2, 1)[0]["x"]) == 2
    with raises("E-DEPLOY-MEMORY-STEP", client=1, step=1, latest_step=3):
        load_memory(slots, 1, 1)


def pretend_ray(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Let Ray look installed, or not."""
    real = importlib.util.find_spec
    found = object() if there else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: found if name == "ray" else real(name, *more))


class AppNode:
    """A node of a simulation: the app it was given, and a state of its own."""

    silent = lost = False
    delay = 0.0

    def __init__(self, app: Any, client: int) -> None:
        self.app = app
        self.context = Context(1, 1, {"partition-id": client}, RecordDict(), {})


@pytest.mark.slow
def test_flower_sim_runs_the_same_apps_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is played by a grid in this process; SCAFFOLD's memories lie in the nodes' Flower state."""
    from fedgraft.config.load import load
    from fedgraft.deploy import flower_apps
    from fedgraft.engines.flower import wire as flower_wire
    from fedgraft.runs.checkpoint import load_latest
    from fedgraft.runs.loop import run

    def play(server: Any, client: Any, nodes: int, gpus: float = 0.0) -> None:
        grid = FakeGrid({10 + k: AppNode(client, k) for k in range(nodes)}, Clock())  # type: ignore[misc]
        server(grid, Context(1, 0, {}, RecordDict(), {}))

    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(flower_wire, "run_flower_simulation", play)
    pretend_ray(monkeypatch, True)
    overrides = [
        "model.name=tiny",
        "data.limit=60",
        "partition.clients=2",
        "rounds.total=2",
        "rounds.fraction=1.0",
        "local.steps=1",
        "local.momentum=0",
        "algorithm.name=scaffold",
        "model.head=random",
        "trainable.kind=everything",
        "rounds.evaluate_every=0",
    ]
    flower_apps.run_simulation(load(None, [*overrides, "engine=flower-sim"]), tmp_path / "there")
    run(load(None, [*overrides, "engine=reference", "workers=1"]), tmp_path / "here", console=False)
    found = [load_latest(tmp_path / where / "checkpoints").tensors for where in ("here", "there")]  # type: ignore[union-attr]
    assert torch.equal(found[0]["vector"], found[1]["vector"])
    assert torch.equal(found[0]["rule/control"], found[1]["rule/control"])


def test_a_simulation_that_breaks_down_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.config.load import load
    from fedgraft.deploy import flower_apps
    from fedgraft.engines.flower import wire as flower_wire

    def broken(*overrides: Any) -> None:
        try:
            raise ValueError("the node timed out\n during startup")
        except ValueError as error:
            raise RuntimeError("Simulation crashed.") from error

    pretend_ray(monkeypatch, True)
    monkeypatch.setattr(flower_wire, "run_flower_simulation", broken)
    with raises("E-DEPLOY-SIMULATION"):
        flower_apps.run_simulation(load(None, ["engine=flower-sim", "model.name=tiny"]), tmp_path / "run")


def test_without_ray_flower_sim_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedgraft.config.load import load
    from fedgraft.deploy import flower_apps

    pretend_ray(monkeypatch, False)
    with raises("E-MISSING-EXTRA", extra="simulation"):
        flower_apps.run_simulation(load(None, ["engine=flower-sim"]), tmp_path)


@pytest.mark.parametrize("kind", ["clear", "secure"])
def test_a_node_with_malformed_sums_before_round_zero_is_left_out_by_name(kind: Any) -> None:
    from fedgraft.privacy.protection import Clear, Secure
    from fedgraft.server.secure_sum import Sums

    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    spoilt = {1: b"nonsense", 3: pack(Response("toy", -1, 3, sums={"gram": torch.ones(2)})), 4: bytes(10_000_000)}
    for client, data in spoilt.items() if kind == "clear" else [(1, b"nonsense")]:
        grid.nodes[engine.registry.nodes[client]].spoil = lambda a, data=data: (
            replace(a, response=data) if a.response else a
        )  # type: ignore[misc]
    sums = Sums(engine.exchange, "toy", range(5), toy.network, Secure() if kind == "secure" else Clear())
    found = sums.ask(action_named("statistics"))
    benign = Sums(InProcess(toy.algorithm, toy.context).exchange, "toy", [0, 2], toy.network, Clear())
    assert set(sums.lost) == (set(spoilt) if kind == "clear" else {1})
    if kind == "clear":
        assert torch.equal(found["gram"], benign.ask(action_named("statistics"))["gram"])


def test_answers_of_a_secure_sum_are_measured_by_its_plan_and_not_by_the_engine() -> None:
    toy = Toy(algorithm("fedavg"))
    engine, grid = deploy(toy)
    grid.nodes[engine.registry.nodes[0]].spoil = lambda a: replace(a, response=b"x" * 50) if a.response else a
    grid.nodes[engine.registry.nodes[1]].spoil = lambda a: replace(a, response=b"x" * 50) if a.response else a
    requests = [Request("toy", 0, 0, "train"), Request("toy", 0, 1, "train")]
    requests = [replace(o, space=toy.space.digest, vector=toy.state.vector, settings={"lr": 0.1}) for o in requests]
    assert engine.exchange(requests) == [(0, b"x" * 50), (1, b"x" * 50)]


def test_a_node_that_answers_two_greetings_at_once_is_entered_once() -> None:
    """A loaded node is greeted again before it answers, and then both answers lie in the same pull."""

    class Slow:
        def __init__(self) -> None:
            self.asked: list[str] = []

        def present(self) -> set[int]:
            return {7}

        def greet(self, nodes: list[int]) -> dict[str, int]:
            self.asked.append(f"question {len(self.asked)}")
            return {self.asked[-1]: 7}

        def greetings(self, questions: list[str]) -> dict[str, tuple[int, dict[str, object], str]]:
            return {one: (0, {"examples": 3}, "") for one in questions} if len(self.asked) == 2 else {}

    now = [0.0]
    slow = Slow()
    registry = NodeRegistry(slow, 1, lambda: now[0])  # type: ignore[arg-type]
    registry.refresh()
    now[0] = 1000.0
    registry.refresh()
    assert len(slow.asked) == 2 and registry.nodes == {0: 7}


# ---- a server that comes back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_that_comes_back_asks_for_what_is_missing(kept: bool, tmp_path: Path) -> None:
    """Two of five answers came before it was killed; the others are asked, and the result is the same."""
    store = ResponseStore(tmp_path / "answers") if kept else None
    toy = Toy(algorithm("scaffold"), per_round=5)
    engine, grid = deploy(toy)
    engine.store = store
    toy.run(1)
    memory = dict(engine.memory)
    requests = [
        Request("toy", 1, k, "train", toy.space.digest, toy.state.vector, dict(toy.state.rule), {"lr": 0.1})
        for k in range(5)
    ]
    whole = dict(engine._deliver(requests[:2]))
    again = FlowerEngine(FlowerTransport(grid), 5, Patience(), grid.clock, grid.clock.sleep, store=store)  # type: ignore[arg-type]
    again.gather()
    again.open("toy", {"head": torch.zeros(2)})
    again.memory = memory
    grid.pushed.clear()
    arrivals = again._deliver(requests)
    asked = [m for m in grid.pushed if m.metadata.message_type == "train.request"]
    assert len(asked) == (3 if kept else 5)
    assert {client: arrivals[client] for client in whole} == whole and len(arrivals) == 5
    assert all(isinstance(answer, bytes) for _, answer in arrivals.values())
    if store is not None:
        again._deliver([replace(request, round=2) for request in requests[:1]])
        assert len(list(store.folder.iterdir())) == 1  # of the new round
        store.remove()
        assert not store.folder.exists()


def test_a_round_ends_with_enough_answers_and_waits_no_longer_than_its_deadline() -> None:
    """Until three of five have answered, at most thirty seconds."""
    toy = Toy(algorithm("fedavg"), per_round=5)
    engine, grid = deploy(toy, 5, Patience(deadline=30.0, enough=3))
    for client in (3, 4):
        grid.nodes[engine.registry.nodes[client]].delay = 20.0
    began = grid.clock()
    toy.run(1)
    assert grid.clock() - began < 2
    rejections = {o.client: o.reason for o in toy.summary.rejections}
    assert set(rejections) == {3, 4} and all("ended with 3 answers" in reason for reason in rejections.values())
    for client in (1, 2):
        grid.nodes[engine.registry.nodes[client]].silent = True
    began = grid.clock()
    toy.run(1)
    assert 20 <= grid.clock() - began < 22  # client 0 and the two slow ones
    for client in (3, 4):
        grid.nodes[engine.registry.nodes[client]].delay = 50.0
    began = grid.clock()
    toy.run(1)
    assert 30 <= grid.clock() - began < 32


@pytest.mark.parametrize(("enough", "ids"), [(4, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 4])])
def test_a_secure_round_that_ends_early_has_the_answers_that_open_it(enough: int, ids: list[int]) -> None:
    """Four of five are more than two thirds. With three the server asks the others again; no config may ask for it."""
    toy = Toy(secure(algorithm("fedavg"), limit=8.0), per_round=5)
    engine, grid = deploy(toy, 5, Patience(deadline=30.0, enough=enough))
    for node in grid.nodes.values():
        node.delay = 1.0 if node.client < enough else 20.0
    assert engine.patience.enough == enough
    before = toy.state.vector
    toy.run(1)
    record = toy.summary.record
    assert "aborted" not in record and record["clients"]["ids"] == ids
    assert not torch.equal(toy.state.vector, before)
    words = ["privacy.aggregation=secure", "partition.clients=5", "rounds.fraction=1.0", f"rounds.enough={enough}"]
    if enough == 4:
        build_algorithm(load(None, words))
        return
    with raises("E-CONFIG-ENOUGH", needed=4):
        build_algorithm(load(None, words))


def paused(seconds: float, waits: float) -> tuple[Toy, FlowerEngine]:
    """A secure run of three nodes, one of which is away for so many seconds in the middle of the second sum."""
    toy = Toy(secure(algorithm("fedavg"), limit=2.0), clients=3, per_round=3)
    engine, grid = deploy(toy, 3, Patience(wait=waits))
    real = engine.exchange
    back: list[tuple[float, int, FakeNode]] = []
    rest = grid.clock.sleep

    def sleep(pause: float) -> None:
        rest(pause)
        for due, node, away in list(back):
            if grid.clock() >= due:
                grid.nodes[node] = away
                back.remove((due, node, away))

    def exchange(requests: Sequence[Request]) -> Any:
        first = requests[0]
        if seconds and first.round == 1 and first.action == "secure.masked" and len(grid.nodes) == 3 and not back:
            node = engine.registry.nodes[2]
            back.append((grid.clock() + seconds, 777, grid.nodes.pop(node)))
        return real(requests)

    engine.sleep = sleep
    engine.exchange = exchange  # type: ignore[method-assign]
    toy.run(4)
    return toy, engine


def test_a_secure_run_waits_for_a_node_that_is_paused_and_ends_as_without_the_pause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three nodes, all of which a sum needs; one is away for 45 seconds in the middle of a sum."""
    whole, _ = paused(0.0, 300.0)
    toy, _ = paused(45.0, 300.0)
    assert toy.state.round == 4 and torch.equal(toy.state.vector, whole.state.vector)
    assert "waits for the nodes of clients 2" in caplog.text
    impatient, _ = paused(45.0, 0.0)  # the broken variant: rounds are spent
    assert not torch.equal(impatient.state.vector, whole.state.vector)
