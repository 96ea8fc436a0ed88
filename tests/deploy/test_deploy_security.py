"""Who can connect: one real SuperLink, and real SuperNodes that should be admitted or refused."""

from __future__ import annotations

import http.client
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.errors import raises
from typer.testing import CliRunner

from fedgraft.cli.main import app
from fedgraft.config.load import load
from fedgraft.core.errors import FedgraftError
from fedgraft.deploy import coordinator
from fedgraft.deploy import folder as federation
from fedgraft.deploy import process as federation_process
from fedgraft.deploy.keys import make_certificates, make_node_key
from fedgraft.deploy.run_node import NodeOptions, node_failure
from fedgraft.runs.folder import RunFolder

pytestmark = pytest.mark.slow
SECONDS = 150.0  # a loaded machine starts five processes slowly; an idle one needs a tenth


@dataclass
class Attempt:
    """One node that tries to connect."""

    process: subprocess.Popen[bytes]
    options: NodeOptions

    @property
    def log(self) -> str:
        return self.options.log.read_text(errors="replace")

    def over(self) -> bool:
        return self.process.poll() is not None or "SuperNode ID:" in self.log


@dataclass
class Gate:
    """The federation under test and the nodes that tried to connect."""

    fed: federation.FederationFolder
    server: federation_process.ServerProcess
    attempts: dict[str, Attempt]


def without(command: list[str], flag: str) -> list[str]:
    """Return a command without a flag and its value."""
    at = command.index(flag)
    return command[:at] + command[at + 2 :]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    pytest.importorskip("flwr")
    root = tmp_path_factory.mktemp("gate")
    config = load(None, ["model.name=tiny", "partition.clients=1", "rounds.total=1"])
    fed = federation.create_federation(root / "fed", config, ["north"], "127.0.0.1")
    make_certificates(root / "others", "127.0.0.1")
    north, stranger = (make_node_key(root / name, name)[0] for name in ("north", "stranger"))
    fed.register("north", north.with_suffix(".pub"))
    attempts: dict[str, Attempt] = {}
    server = coordinator.start_server(fed, bound=True)
    try:
        foreign = root / "others" / "ca.crt"
        for name, options in {
            "registered": NodeOptions(server.address, fed.authority, north, 0),
            "unregistered": NodeOptions(server.address, fed.authority, stranger, 0),
            "wrong authority": NodeOptions(server.address, foreign, make_node_key(root / "w", "w")[0], 0),
            "no key": NodeOptions(server.address, fed.authority, make_node_key(root / "k", "k")[0], 0),
            "plaintext": NodeOptions(server.address, fed.authority, make_node_key(root / "p", "p")[0], 0),
        }.items():
            command = options.command()
            if name in {"no key", "plaintext"}:
                command = without(command, "--auth-supernode-private-key")
            if name == "plaintext":
                command = [*without(command, "--root-certificates"), "--insecure", "--max-retries", "1"]
            options.home.mkdir(mode=0o700)
            process = federation_process.spawn(command, options.home, options.log, bound=True)
            attempts[name] = Attempt(process, options)
        until = time.monotonic() + SECONDS
        while not all(attempt.over() for attempt in attempts.values()) and time.monotonic() < until:
            time.sleep(0.2)
        yield Gate(fed, server, attempts)
    finally:
        for attempt in attempts.values():
            federation_process.end_process(federation_process.process_id(attempt.process))
            attempt.process.wait()
        coordinator.stop_server(fed)
    assert not server.alive


def test_the_registered_node_is_admitted(gate: Gate) -> None:
    attempt = gate.attempts["registered"]
    assert "SuperNode ID:" in attempt.log
    assert attempt.process.poll() is None
    with coordinator.connect_control(gate.fed) as control:
        assert [(node.name, node.online) for node in control.nodes()] == [("north", True)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unregistered", "E-DEPLOY-NODE-KEY-REFUSED"),
        ("no key", "E-DEPLOY-NODE-KEY-REFUSED"),
        ("wrong authority", "E-DEPLOY-NODE-CERTIFICATE"),
        ("plaintext", None),  # the reason that Flower logs depends on the moment of the disconnection
    ],
)
def test_no_other_node_is(gate: Gate, name: str, code: str | None) -> None:
    attempt = gate.attempts[name]
    assert attempt.process.poll() not in {None, 0}, attempt.log[-500:]
    assert "SuperNode ID:" not in attempt.log
    if code is not None:
        assert node_failure(attempt.log, attempt.options).code == code


def post(gate: Gate, path: str, source: str) -> int:
    context = ssl.create_default_context(cafile=gate.fed.authority)
    connection = http.client.HTTPSConnection(
        "127.0.0.1", gate.server.port, context=context, timeout=20, source_address=(source, 0)
    )
    connection.request("POST", path, body=b"", headers={"content-type": "application/protobuf"})
    return connection.getresponse().status


@pytest.mark.parametrize("path", ["/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/acquire-task"])
def test_control_requests_come_from_the_servers_own_machine_only(gate: Gate, path: str) -> None:
    # Another loopback address stands for another machine.
    assert post(gate, path, "127.0.0.2") == 403
    assert post(gate, path, "127.0.0.1") != 403
    assert post(gate, "/v1/fleet/pull-messages", "127.0.0.2") == 401  # nodes may connect, and must authenticate


def test_a_second_server_is_refused(gate: Gate) -> None:
    with raises("E-DEPLOY-SERVER-RUNS", address=gate.server.address):
        coordinator.start_server(gate.fed)


@pytest.mark.deploy
def test_the_status_of_a_failed_run_names_the_reason(gate: Gate, tmp_path: Path) -> None:
    """The server's data is not what the config says: the app dies, and every process's exit code is zero."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("this is no run folder")
    run = coordinator.submit_run(gate.fed, tmp_path / "run")
    until = time.monotonic() + SECONDS
    state, reason = coordinator.run_state(gate.fed, run)
    while not state.over and time.monotonic() < until:
        time.sleep(0.5)
        state, reason = coordinator.run_state(gate.fed, run)
    assert state.status == "failed"
    with pytest.raises(FedgraftError) as caught:  # the same error in this process
        RunFolder.create(tmp_path / "run", "", "digest")
    assert reason == str(caught.value)
    with raises("E-DEPLOY-RUN-FAILED", run=run, reason=reason):
        coordinator.check_completed(state, reason)
    result = CliRunner().invoke(app, ["deploy", "status", str(gate.fed.path)])
    assert result.exit_code == 1
    assert f"run {run}: failed" in result.output
    assert f"the run died: {reason}" in result.output
