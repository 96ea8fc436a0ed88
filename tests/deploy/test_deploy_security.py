"""Who can connect: one real server, and real nodes that should be admitted or refused."""

from __future__ import annotations

import base64
import datetime
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
from fedgraft.deploy.keys import flower_key_bytes, make_certificates, make_node_key
from fedgraft.deploy.node_loop import CONNECTED
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
        return self.process.poll() is not None or CONNECTED in self.log


@dataclass
class Gate:
    """The federation under test and the nodes that tried to connect."""

    fed: federation.FederationFolder
    server: federation_process.ServerProcess
    attempts: dict[str, Attempt]


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
        }.items():
            options.home.mkdir(mode=0o700)
            attempts[name] = Attempt(options.start(), options)
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
    assert CONNECTED in attempt.log
    assert attempt.process.poll() is None
    with coordinator.connect_control(gate.fed) as control:
        assert [(node.name, node.online) for node in control.nodes()] == [("north", True)]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unregistered", "E-DEPLOY-NODE-KEY-REFUSED"),
        ("wrong authority", "E-DEPLOY-NODE-CERTIFICATE"),
    ],
)
def test_no_other_node_is(gate: Gate, name: str, code: str) -> None:
    attempt = gate.attempts[name]
    assert attempt.process.poll() not in {None, 0}, attempt.log[-500:]
    assert CONNECTED not in attempt.log
    assert node_failure(attempt.log, attempt.options).code == code


def post(gate: Gate, path: str, method: str = "POST", body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=gate.fed.authority)
    connection = http.client.HTTPSConnection("127.0.0.1", gate.server.port, context=context, timeout=20)
    connection.request(method, path, body=body, headers={"content-type": "application/protobuf", **headers})
    response = connection.getresponse()
    return response.status, response.read()


CLOSED = ["/v1/control/list-runs", "/v1/control/register-node", "/v1/control/start-run", "/v1/runtime/acquire-task"]
CLOSED += ["/v1/fleet/register-node", "/v1/fleet/pull-messages", "/v1/fleet/get-fab", "/v1/fleet/push-object", "/docs"]
CLOSED += ["/v1/fleet/activate-node/../../control/list-runs", "//v1/control/list-runs", "/V1/CONTROL/list-runs"]


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_nothing_but_the_nodes_paths_is_reachable(gate: Gate, path: str, method: str) -> None:
    """Not from another machine, and not through a proxy on this one: the door knows no other path."""
    assert post(gate, path, method)[0] == 403


def test_the_superlink_itself_serves_only_its_own_machine(gate: Gate) -> None:
    """What the door refuses is there behind it, so that the check can fail; it listens on loopback alone."""
    context = ssl.create_default_context(cafile=gate.fed.authority)
    port = gate.server.control_port
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    connection.request("POST", "/v1/control/list-runs", headers={"content-type": "application/protobuf"})
    assert connection.getresponse().status == 200
    listening = Path("/proc/net/tcp").read_text()
    addresses = {line.split()[1] for line in listening.splitlines()[1:] if line.split()[3] == "0A"}
    assert f"0100007F:{port:04X}" in addresses and f"00000000:{port:04X}" not in addresses


@pytest.mark.parametrize("name", ["activate-node", "deactivate-node", "send-node-heartbeat"])
def test_a_node_must_authenticate(gate: Gate, name: str) -> None:
    """Without a key, and with the key of another: its public half is no secret, the signature is."""
    assert post(gate, f"/v1/fleet/{name}")[0] == 401
    public = base64.b64encode(flower_key_bytes(gate.fed.key("north"))).decode()
    now = datetime.datetime.now(datetime.UTC).isoformat()
    forged = {"flwr-public-key": public, "flwr-timestamp": now, "flwr-signature": base64.b64encode(b"x" * 96).decode()}
    assert post(gate, f"/v1/fleet/{name}", **forged)[0] == 401
    with coordinator.connect_control(gate.fed) as control:
        assert [node.online for node in control.nodes()] == [True]


@pytest.mark.parametrize("path", ["next", f"parts/{'0' * 32}/request", f"answers/{'0' * 32}"])
def test_messages_need_the_token_of_a_session(gate: Gate, path: str) -> None:
    for headers in ({}, {"fedgraft-session": ""}, {"fedgraft-session": "x" * 43}):
        assert post(gate, f"/v1/fedgraft/{path}", "GET" if "parts" in path else "POST", **headers)[0] == 401


def test_a_plaintext_connection_is_refused(gate: Gate) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", gate.server.port, timeout=20)
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.request("POST", "/v1/fleet/activate-node")
        connection.getresponse()


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
