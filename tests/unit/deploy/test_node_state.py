"""A node's permanent state: a rollback resets nothing, a resumed server gets the same bytes, all is logged."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.errors import raises
from tests.support.hostile import as_plan
from tests.support.machines import Machines, refused_rule
from tests.support.tiny import without_pictures

from fedgraft.client.policy import policy_toml
from fedgraft.config.agreement import safe_policy
from fedgraft.config.build import build_algorithm
from fedgraft.config.load import Config, load, to_toml
from fedgraft.core.messages import Request
from fedgraft.deploy.deployed import run_deployed
from fedgraft.deploy.keys import announced_identity, make_node_key, node_identity, public_identity
from fedgraft.deploy.node import NodeRun
from fedgraft.deploy.node_state import FIRST_USE, NodeState
from fedgraft.runs.checkpoint import load_latest
from fedgraft.runs.loop import run

SMALL = [
    "model.name=tiny",
    "rounds.total=2",
    "rounds.fraction=1.0",
    "local.steps=1",
    "local.batch_size=8",
    "rounds.evaluate_every=0",
    "partition.clients=3",
    "trainable.kind=head",
    "engine=reference",
    "workers=1",
    "data.source=synthetic",
    "data.count=60",
    "data.classes=3",
    "model.head=ridge",
    "privacy.aggregation=secure",
    "rounds.checkpoint_every=1",
    "rounds.test=false",
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FEDGRAFT_CACHE", str(tmp_path / "cache"))

    def make(*overrides: str, folder: str = "there") -> tuple[Config, Machines]:
        config = load(None, [*SMALL, *overrides])
        return config, Machines(config, tmp_path / folder, tmp_path / "keys", monkeypatch)

    with without_pictures():
        yield make


def vector_of(folder: Path) -> torch.Tensor:
    checkpoint = load_latest(folder / "checkpoints")
    assert checkpoint is not None
    return checkpoint.tensors["vector"]


@pytest.mark.slow
def test_nodes_with_ledgers_give_the_bytes_of_one_process_and_a_rollback_resets_nothing(
    world: Any, tmp_path: Path
) -> None:
    config, machines = world()
    policy = safe_policy(config, build_algorithm(config))
    for k in range(3):
        (machines.home(k).parent / "policy.toml").write_text(policy_toml(policy))
    run_deployed(config, tmp_path / "there", machines)
    run(config, tmp_path / "here", console=False)
    assert torch.equal(vector_of(tmp_path / "here"), vector_of(tmp_path / "there"))
    lines = machines.log(1)
    assert not [line for line in lines if line["kind"] == "refused"]
    assert [line["action"] for line in lines].count("secure.masked") == 3  # statistics and two rounds
    assert [line["peer"] for line in lines if line["kind"] == FIRST_USE] == [0, 2]  # once each
    assert all(line["protection"] == "hidden" for line in lines if line["kind"] == "response")
    assert (machines.home(1) / "ledger").stat().st_mode & 0o077 == 0

    # a server that names step 0 and begins round 0 again over two clients; one that asks in the clear; another run
    before = len(lines)
    requests = {
        "repeat": ("secure.keys", config.digest),
        "secure": ("train", config.digest),
        "config": ("train", "other"),
    }
    for rule, (action, name) in requests.items():
        settings = {"sums": "train", "largest": 20, "lr": 0.01} if action == "secure.keys" else {"lr": 0.01}
        plan = as_plan(machines.nodes[1], name) if action == "secure.keys" else {}
        answer = machines.ask(1, machines.request(Request(name, 0, 1, action, auxiliary=plan, settings=settings), 0))
        assert not answer.response and refused_rule(answer.error) == rule, answer.error
    added = machines.log(1)[before:]
    assert [(line["kind"], line["bytes"]) for line in added] == [("refused", 0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("where", [("secure.masked", 1), ("secure.unmask", 1), ("secure.shares", 0)])
def test_a_server_killed_inside_a_secure_sum_is_resumed_to_the_same_bytes(
    where: tuple[str, int], world: Any, tmp_path: Path
) -> None:
    config, machines = world()
    machines.die_at = where
    with pytest.raises(KeyboardInterrupt):
        run_deployed(config, tmp_path / "there", machines)
    config, machines = world()  # the same keys and homes, a new server
    run_deployed(config, tmp_path / "there", machines)
    run(config, tmp_path / "here", console=False)
    assert torch.equal(vector_of(tmp_path / "here"), vector_of(tmp_path / "there"))


def test_a_config_that_the_owner_did_not_agree_to_gets_not_even_a_greeting(world: Any) -> None:
    config, machines = world()
    policy = safe_policy(config, build_algorithm(config))
    (machines.home(0).parent / "policy.toml").write_text(policy_toml(policy))
    other = load(None, [*SMALL, "privacy.aggregation=clear"])
    answer = machines.ask(0, replace(machines.requests[0], config=to_toml(other)))
    assert not answer.facts and not answer.response and refused_rule(answer.error) == "secure"
    assert [(line["kind"], line["bytes"]) for line in machines.log(0)] == [("refused", 0)]


@pytest.mark.parametrize("read", [True, False])
def test_a_stricter_policy_holds_from_the_next_request_on(
    read: bool, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner forbids training after the first round; a node that reads its policy only once continues."""
    config, machines = world("rounds.total=3", "model.head=random", "privacy.aggregation=clear")
    if not read:
        monkeypatch.setattr(NodeRun, "_refresh_policies", lambda self: None)
    deliver = machines.deliver

    def forbid_training(request: Request) -> Any:
        if (request.client, request.round) == (0, 1):
            (machines.home(1).parent / "policy.toml").write_text('actions = ["count"]\n')
        return deliver(request)

    monkeypatch.setattr(machines, "deliver", forbid_training)
    run_deployed(config, tmp_path / "there", machines)
    left = [(line["round"], line["bytes"] > 0) for line in machines.log(1) if line["action"] == "train"]
    assert left == [(0, True), (1, not read), (2, not read)]


HOSTILE: dict[str, Any] = {
    "no head": {},
    "a head of another size": {"head": torch.zeros(2, 2)},
    "words": {"head": torch.zeros(0)},
    "half a probe": {"head": "own", "probe/inputs": torch.zeros(2, 3)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_opening_that_does_not_fit_is_refused_by_name_and_noted(name: str, world: Any) -> None:
    config, machines = world("model.head=random", "privacy.aggregation=clear")
    machines.gather()
    (node_run,) = machines.nodes[1].runs.values()
    network = node_run.setup.task.network
    fitting = torch.zeros(network.classes, network.width + 1)
    tensors = {n: fitting if isinstance(t, str) else t for n, t in HOSTILE[name].items()}
    machines.open(config.digest, tensors)
    _, reason = machines.deliver(Request(config.digest, 0, 1, "train", settings={"lr": 0.01}))
    assert refused_rule(reason) == "request", reason
    assert machines.log(1)[-1]["kind"] == "refused" and machines.log(1)[-1]["bytes"] == 0


def test_a_request_that_breaks_a_node_is_in_its_log(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config, machines = world()
    machines.gather()
    monkeypatch.setattr(NodeRun, "answer", lambda *parts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        machines.deliver(Request(config.digest, 0, 1, "train"))
    assert machines.log(1)[-1]["why"] == "failed with ZeroDivisionError"


def test_a_key_stays_with_its_number_and_its_identity_follows_from_it(tmp_path: Path) -> None:
    private, public = make_node_key(tmp_path, "north")
    state = NodeState(tmp_path / "north.home")
    permanent = state.load(2)
    state.store(2, permanent, {})
    assert state.load(2).keys() == permanent.keys()
    with raises("E-DEPLOY-KEY-BOUND", client=1, bound_client=2):
        state.load(1)
    assert announced_identity(public) == ("north", public_identity(node_identity(private)))
    state.ledger.write_bytes(b"nonsense")
    with raises("E-DEPLOY-LEDGER-DAMAGED"):
        state.load(2)


def test_pinned_peers_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "peers.toml").write_text("[one]\nidentity = 'zz'\n")
    with raises("E-DEPLOY-PEERS-DAMAGED"):
        NodeState(tmp_path / "north.home").load(0)


@pytest.mark.parametrize("file", ["audit", "ledger"])
def test_what_a_full_disk_cannot_note_does_not_leave(
    file: str, world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedgraft.deploy import audit, node_state

    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    config, machines = world("model.head=random")
    owner, name = (audit, "append_entry") if file == "audit" else (node_state, "write_atomic")
    monkeypatch.setattr(owner, name, full)
    with raises("E-DEPLOY-NODE-DISK", reason=os.strerror(errno.ENOSPC)):
        run_deployed(config, tmp_path / "there", machines)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_node_that_wants_pinned_peers_sums_with_no_other(pinned: bool, world: Any, tmp_path: Path) -> None:
    """Its keys leave and nothing that depends on its images; without the rule peers are trusted on first use."""
    config, machines = world("rounds.total=1")
    (machines.home(1).parent / "policy.toml").write_text("pinned_peers = true\n" if pinned else "")
    if not pinned:
        run_deployed(config, tmp_path / "there", machines)
    else:
        with raises("E-SERVER-SUM-ABORTED"):
            run_deployed(config, tmp_path / "there", machines)
        refused = [line for line in machines.log(1) if line["kind"] == "refused"]
        assert refused_rule(refused[0]["why"]) == "secure sum" and refused[0]["bytes"] == 0
    left = {line["action"] for line in machines.log(1) if line["kind"] == "response"}
    assert ("secure.masked" in left) == (not pinned)
