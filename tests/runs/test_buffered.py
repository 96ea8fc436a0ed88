"""Buffered rounds in a simulation: degenerate cases, the virtual clock, resuming and repeating, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.toy import Toy
from typer.testing import CliRunner

import fedgraft as fg
from fedgraft import algorithms as zoo
from fedgraft.aggregate.slots import uniform
from fedgraft.cli.main import app
from fedgraft.client import policy
from fedgraft.client.actions import buffered as actions
from fedgraft.client.handle import handle
from fedgraft.client.history import ModelHistory, RunRates
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load
from fedgraft.core.client_memory import earlier_memory
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from fedgraft.core.messages import Request
from fedgraft.local.schedules import constant_rate
from fedgraft.local.train import LocalTraining
from fedgraft.privacy.dp import Mechanism
from fedgraft.runs import loop
from fedgraft.runs.loop import run
from fedgraft.runs.replay import replay_differences
from fedgraft.runs.round_log import NAME, read_entries

SPEED = (1.0, 1.0, 1.0, 1.0, 10.0)
LOCAL = LocalTraining(steps=2, batch_size=5, lr=0.05)
OPTIONS = [
    "model.name=tiny",
    "data.source=digits",
    "data.image_size=16",
    "data.limit=120",
    "partition.clients=4",
    "rounds.fraction=1.0",
    "rounds.total=8",
    "rounds.checkpoint_every=1",
    "rounds.evaluate_every=4",
    "model.head=random",
    "local.lr=0.05",
    "workers=1",
]
BUFFERED = [*OPTIONS, "rounds.kind=buffered", "rounds.buffer=2", "partition.speed=[1,1,1.5,5]"]


@pytest.mark.parametrize("protect", [lambda a: a, fg.secure], ids=["clear", "secure"])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam"])
def test_equal_speeds_and_a_full_buffer_are_synchronous_rounds(name: str, protect: Any) -> None:
    algorithm = protect(zoo.named(name, local=LOCAL))
    synchronous = Toy(algorithm, per_round=3).run(4)
    buffered = Toy(fg.buffered(algorithm, 3), per_round=3).run(4)
    assert torch.equal(synchronous.vector, buffered.vector)
    assert not torch.equal(Toy(fg.buffered(algorithm, 2), per_round=3).run(4).vector, synchronous.vector)


def test_the_clock_says_who_is_in_which_buffer() -> None:
    """Four clients of speed 1 and one of speed 10: it is in the first buffer after its time, with its old model."""
    toy = Toy(fg.buffered(zoo.fedavg(local=LOCAL), 4), per_round=5, durations=SPEED)
    buffers = []
    clocks = []
    for _ in range(12):
        toy.run(1)
        buffers.append(toy.summary.record["arrivals"])
        clocks.append(toy.summary.record["clock"])
    assert clocks == [float(step) for step in range(1, 13)]
    for step in range(10):
        assert buffers[step] == [[client, step, 1] for client in range(4)]
    assert buffers[10][0] == [4, 0, 1]


def test_a_stale_update_counts_less() -> None:
    whole = Toy(fg.buffered(zoo.fedavg(local=LOCAL), 2, exponent=0.0), per_round=5, durations=SPEED).run(8)
    discounted = Toy(fg.buffered(zoo.fedavg(local=LOCAL), 2), per_round=5, durations=SPEED).run(8)
    assert not torch.equal(whole.vector, discounted.vector)
    assert fg.BufferedRounds(2).discount(0) == 1.0
    assert fg.BufferedRounds(2).discount(3) == 0.5
    assert fg.BufferedRounds(2, 1.0).discount(3) == 0.25


def test_the_secure_sum_of_a_buffer_is_its_sum() -> None:
    """Versions differ within a buffer; each client discounts its own update."""
    clear = fg.buffered(zoo.fedavg(local=LOCAL), 3)
    open_state = Toy(clear, per_round=5, durations=(1, 1.5, 2.6, 1.2, 3)).run(8)
    hidden = Toy(fg.secure(clear, limit=8.0), per_round=5, durations=(1, 1.5, 2.6, 1.2, 3))
    hidden.run(8)
    assert torch.allclose(open_state.vector, hidden.state.vector, atol=1e-6)
    assert hidden.summary.record["clients"]["ids"]


@pytest.mark.parametrize("change", [{"without": frozenset({4})}, {"leaves": {4: 3}}])
def test_who_leaves_or_is_excluded_works_on_nothing(change: dict[str, Any]) -> None:
    """A run without somebody begins with a checkpoint in which that client is at work (`unlearn`)."""
    toy = Toy(fg.buffered(zoo.fedavg(local=LOCAL), 3), per_round=5, durations=SPEED)
    toy.run(3)
    assert 4 in toy.state.in_flight
    toy.federation = replace(toy.federation, **change)
    arrived = []
    for _ in range(12):
        toy.run(1)
        arrived += [client for client, _, _ in toy.summary.record["arrivals"]]
    assert 4 not in arrived and 4 not in toy.state.in_flight


# ---- what a client refuses under secure aggregation ---------------------------------------------------------------


class Client:
    """One client with a held update, as a lying server would find it."""

    def __init__(self) -> None:
        self.toy = Toy(fg.secure(fg.buffered(zoo.fedavg(local=LOCAL), 3)), per_round=5)
        self.memory: Any = {}

    def ask(self, action: str, round: int = 0, **fields: Any) -> Any:
        """Send one request and keep the new memory."""
        request = Request("toy", round, 1, action, self.toy.space.digest, **fields)
        response, self.memory = handle(request, self.toy.algorithm, self.toy.context, self.memory)
        return response

    def train(self, round: int = 0) -> Any:
        return self.ask("train_ahead", round, vector=self.toy.state.vector, settings={"lr": 0.05})

    def summand(self, number: int) -> Any:
        """Take the update into the sum of this number, without the protocol around it."""
        request = Request("toy", number, 1, "held_update", self.toy.space.digest, settings={"largest": 20.0})
        values, self.memory = actions.held_update(request, self.toy.algorithm, self.toy.context, self.memory)
        return values


def test_training_ahead_shows_nothing() -> None:
    response = Client().train()
    assert response.update is None
    assert response.examples == 0
    assert not (response.sums or response.scalars or response.evidence or response.metrics)


def test_training_ahead_is_on_models_that_follow_from_the_runs_history_only() -> None:
    """As in a synchronous round; the sum itself carries no model and is not asked for one."""
    client = Client()
    origin = client.toy.state.vector
    rates = RunRates(constant_rate(0.05), 10, 0.05, False, None, False)
    history = ModelHistory(origin.clone(), rates, 30.0, lambda memory: None)
    client.toy.context = replace(client.toy.context, history=history)
    client.train()
    assert client.summand(0)
    client.toy.state = replace(client.toy.state, vector=origin + 1e3)
    with raises("E-REFUSED-HISTORY"):
        client.train(1)
    client.toy.context = replace(client.toy.context, history=None)  # the broken variant trains on anything
    client.train(1)


def test_an_update_is_in_one_sum_only() -> None:
    """In two sums over different clients, the difference would show it; also if the server takes the memory back."""
    client = Client()
    client.train()
    with_the_update = dict(client.memory)
    client.summand(0)
    client.memory = earlier_memory(client.memory, with_the_update)
    with raises("E-REFUSED-SUMS"):
        client.summand(1)
    client.memory = with_the_update  # the broken variant: it goes back as well
    assert client.summand(1)


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("train", {"settings": {"lr": 0.05}}),
        ("held_update", {"settings": {"largest": 20.0, "buffer": 0}}),
        ("secure.keys", {"settings": {"sums": "train", "largest": 20.0, "lr": 0.05}}),
        ("secure.masked", {"settings": {"sums": "held_update", "largest": 20.0, "buffer": 1}}),
        ("secure.masked", {"settings": {"sums": "held_update", "largest": 20.0, "buffer": 0, "extra": 1}}),
    ],
)
def test_a_lying_server_gets_no_update_but_in_its_sum(action: str, fields: Any) -> None:
    client = Client()
    client.train()
    with pytest.raises(FedgraftError):
        client.ask(action, 0, **fields)


def test_training_ahead_belongs_to_buffered_secure_rounds() -> None:
    for algorithm in (zoo.fedavg(local=LOCAL), fg.secure(zoo.fedavg(local=LOCAL)), fg.buffered(zoo.fedavg(), 2)):
        toy = Toy(algorithm)
        request = Request("toy", 0, 1, "train_ahead", toy.space.digest, toy.state.vector, settings={"lr": 0.05})
        with raises("E-REFUSED-ACTIONS"):
            handle(request, toy.algorithm, toy.context, {})


def test_rounds_a_day_count_training_ahead() -> None:
    rules = policy.Policy(rounds_per_day=1)
    request = Request("toy", 0, 1, "train_ahead")
    ledger = policy.count_request(rules, request, b"")
    with raises("E-REFUSED-ROUNDS-PER-DAY"):
        policy.count_request(rules, request, ledger)


# ---- what cannot be combined --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scaffold", "feddyn", "fednova", "fedavg_crsm", "ifca", "local_only"])
def test_what_needs_the_present_model_is_refused(name: str) -> None:
    with raises("E-ALGORITHM-COMBINATION"):
        fg.buffered(zoo.named(name), 2)


def test_differential_privacy_is_refused() -> None:
    dp = fg.DifferentialPrivacy(Mechanism(1.0, 0.5, 10))
    algorithm = fg.buffered(fg.vary(zoo.fedavg(), weighting=uniform()), 2)
    with raises("E-ALGORITHM-COMBINATION"):
        fg.private(algorithm, dp)
    with raises("E-ALGORITHM-COMBINATION"):
        fg.private(fg.secure(algorithm), dp)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["rounds.kind=buffered"], "E-CONFIG-BUFFER"),
        (["rounds.kind=buffered", "rounds.buffer=6"], "E-CONFIG-BUFFER"),
        (["rounds.kind=buffered", "rounds.buffer=1", "privacy.aggregation=secure"], "E-CONFIG-BUFFER-SUM"),
        (["rounds.buffer=3"], "E-CONFIG-IDLE-OPTION"),
        (["rounds.staleness=1.0"], "E-CONFIG-IDLE-OPTION"),
    ],
)
def test_wrong_options_are_refused(options: list[str], code: str) -> None:
    with raises(code):
        build_algorithm(load(None, options))


# ---- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buffered") / "whole"
    run(load(None, BUFFERED), folder, console=False)
    return folder


def states(folder: Path) -> list[str]:
    return [entry["state"] for _, entry in sorted(read_entries(folder / NAME).items())]


class Killed(Exception):
    """The power goes off."""


@pytest.mark.parametrize("after", [1, 4])
@pytest.mark.parametrize("extra", [[], ["privacy.aggregation=secure"]], ids=["clear", "secure"])
def test_a_resumed_run_ends_in_the_same_bytes(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, extra: list[str]
) -> None:
    config = load(None, [*BUFFERED, *extra])
    whole = finished
    if extra:
        whole = tmp_path / "whole"
        run(config, whole, console=False)
    resumed = interrupted(config, tmp_path / "resumed", monkeypatch, after)
    assert states(resumed) == states(whole)
    assert read_arrivals(resumed) == read_arrivals(whole)


def interrupted(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> Path:
    """Kill the run in the round after so many, resume it, and return its folder."""
    honest = loop.run_round

    def dying(algorithm: Any, federation: Any, state: Any, *rest: Any) -> Any:
        if state.round == after:
            raise Killed
        return honest(algorithm, federation, state, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "run_round", dying)
        with pytest.raises(Killed):
            run(config, folder, console=False)
    run(config, folder, console=False)
    return folder


def read_arrivals(folder: Path) -> list[Any]:
    return [entry.get("arrivals") for _, entry in sorted(read_entries(folder / NAME).items())]


def test_what_is_under_way_is_part_of_a_checkpoint(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: a checkpoint without it begins other work, and the bytes differ."""
    honest = loop.from_tensors

    def forgetful(*arguments: Any) -> Any:
        state, memories = honest(*arguments)
        return replace(state, in_flight={}), memories

    monkeypatch.setattr(loop, "from_tensors", forgetful)
    resumed = interrupted(load(None, BUFFERED), tmp_path / "resumed", monkeypatch, 4)
    assert states(resumed) != states(finished)


def test_the_log_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["verify", str(finished), "--replay"])
    assert shown.exit_code == 0, shown.output
    assert "repeated" in shown.output
    assert [len(arrivals) for arrivals in read_arrivals(finished)[1:]] == [2] * 8


def test_another_order_of_arrival_is_another_run(finished: Path, tmp_path: Path) -> None:
    """The broken variant: the log's order changed, as if nobody had signed it."""
    copy = Path(shutil.copytree(finished, tmp_path / "copy"))
    lines = (copy / NAME).read_text().splitlines()
    first = json.loads(lines[2])
    assert first["entry"]["round"] == 1
    first["entry"]["arrivals"] = [[2, 0, 1], [0, 0, 1]]
    lines[2] = json.dumps(first)
    (copy / NAME).write_text("\n".join(lines) + "\n")
    assert replay_differences(copy)
    shown = CliRunner().invoke(app, ["verify", str(copy), "--replay"])
    assert shown.exit_code != 0


def test_synchronous_rounds_wait_for_the_slowest(tmp_path: Path) -> None:
    config = load(None, [*OPTIONS, "partition.speed=[1,1,1.5,5]", "rounds.total=2"])
    run(config, tmp_path / "run", console=False)
    assert [line.get("clock") for line in read_metrics(tmp_path / "run")] == [None, 5.0, 10.0]


def test_speed_is_for_every_client(tmp_path: Path) -> None:
    with raises("E-CONFIG-SPEED"):
        run(load(None, [*OPTIONS, "partition.speed=[1,2]"]), tmp_path / "run", console=False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with fg.one_thread():
        yield
