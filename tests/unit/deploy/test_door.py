"""The front door's HTTP: what is reachable, how much of it is read, and a node's whole exchange with it.

The door is called as its web server calls it; the node's own connection class speaks to it over a real TLS socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.errors import raises

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from fedgraft.deploy import audit, door_link, node_loop, server_link
from fedgraft.deploy.door import Door
from fedgraft.deploy.door_link import DoorTransport
from fedgraft.deploy.door_paths import FLEET_BODY, FLEET_PATHS, KEY_IN_USE
from fedgraft.deploy.keys import make_certificates, make_node_key
from fedgraft.deploy.limits import request_too_large, response_limit
from fedgraft.deploy.mailbox import LEAST_RESPONSE_LIMIT, Mailbox
from fedgraft.deploy.node_loop import NodeLoop
from fedgraft.deploy.server_link import Download, KeyInUse, KeyRefused, NoSession, ServerLink, Unreachable
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse
from fedgraft.engines.flower.transport import HELLO, REQUEST, Outgoing, Part

NODE = 5


class FakeSuperLink:
    """Answers as a SuperLink: every key is known, unless it is told otherwise."""

    def __init__(self) -> None:
        self.status = 200
        self.seen: list[str] = []

    async def __call__(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        from flwr.proto.fleet_pb2 import ActivateNodeResponse

        self.seen.append(path)
        answer = b""
        if path.endswith("/activate-node"):
            answer = ActivateNodeResponse(node_id=NODE).SerializeToString()
        return self.status, "application/protobuf", answer


class Ask:
    """One request to the door, as its web server passes it on."""

    def __init__(self, door: Door, method: str, path: str, parts: list[bytes], **headers: str) -> None:
        self.status = 0
        self.body = b""
        self.read = 0
        self.parts = parts
        fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": fields}
        asyncio.run(door(scope, self.receive, self.send))

    async def receive(self) -> Any:
        if not self.parts:
            return {"type": "http.disconnect"}
        self.read += 1
        return {"type": "http.request", "body": self.parts.pop(0), "more_body": bool(self.parts)}

    async def send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(Mailbox(tmp_path), FakeSuperLink(), lambda: set())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/runtime/acquire-task"),
        ("GET", "/docs"),
        ("POST", "/v1/fleet"),
        ("POST", "/v1/fleet/get-fab"),
        ("POST", "/V1/FLEET/activate-node"),
        ("GET", "/v1/fleet/activate-node"),
    ],
)
def test_the_door_knows_no_other_path(door: Door, method: str, path: str) -> None:
    assert Ask(door, method, path, []).status == 403
    assert not door.forward.seen  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", FLEET_PATHS)
def test_a_request_that_is_too_long_is_not_read(door: Door, path: str) -> None:
    asked = Ask(door, "POST", path, [b"x" * FLEET_BODY, b"x"], content_length=str(FLEET_BODY + 1))
    assert (asked.status, asked.read) == (413, 0)
    asked = Ask(door, "POST", path, [b"x"], transfer_encoding="chunked")
    assert (asked.status, asked.read) == (413, 0)


@pytest.mark.parametrize(
    "headers", [{"content_length": "9999999999"}, {"content_length": "-1"}, {"content_length": ""}]
)
def test_the_settings_of_an_answer_are_bounded(door: Door, headers: dict[str, str]) -> None:
    token = delivered(door)
    asked = Ask(door, "POST", f"/v1/fedgraft/answers/{'0' * 32}", [b"x"], fedgraft_session=token, **headers)
    assert (asked.status, asked.read) == (413, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[]",
        b"3",
        b'{"settings": 3, "bytes": 1, "digest": ""}',
        b'{"settings": {}, "bytes": "1"}',
        b"[" * 9999,
        b'{"settings": {}, "bytes": -1, "digest": ""}',
        b'{"settings": {}, "bytes": true, "digest": ""}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_answer_is_refused(door: Door, body: bytes) -> None:
    token = delivered(door)
    path = f"/v1/fedgraft/answers/{'0' * 32}"
    asked = Ask(door, "POST", path, [body], fedgraft_session=token, content_length=str(len(body)))
    assert asked.status == 400
    assert door.mailbox.letters["0" * 32].answer is None


def delivered(door: Door) -> str:
    """Deliver a message to a node and return the token of its session."""
    from fedgraft.deploy.mailbox import Letter

    session = door.mailbox.admit(NODE, b"key")
    door.mailbox.post(Letter("0" * 32, NODE, REQUEST, {}, {}, None))
    asked = Ask(door, "POST", "/v1/fedgraft/next", [b""], fedgraft_session=session.token)
    assert asked.status == 200 and json.loads(asked.body)["id"] == "0" * 32
    return session.token


@pytest.mark.parametrize("length", ["3", "5", "400", "words"])
def test_an_upload_has_the_length_that_was_announced(door: Door, length: str) -> None:
    token = delivered(door)
    path = f"/v1/fedgraft/answers/{'0' * 32}"
    body = json.dumps({"settings": {}, "bytes": 4, "digest": hashlib.sha256(b"four").hexdigest()}).encode()
    assert Ask(door, "POST", path, [body], fedgraft_session=token, content_length=str(len(body))).status == 200
    asked = Ask(door, "PUT", path, [b"four"], fedgraft_session=token, content_length=length)
    assert asked.status == 409 and asked.read == 0
    asked = Ask(door, "PUT", path, [b"fo", b"ur"], fedgraft_session=token, content_length="4")
    assert asked.status == 200 and door.mailbox.letters["0" * 32].over


def test_an_honest_response_of_a_large_network_is_below_its_limit() -> None:
    parameters = 90_000_000
    width = 768
    classes = 1000
    vectors = 3 * 4 * parameters
    sums = 8 * (width + 1) * (width + 1 + classes)
    assert response_limit(parameters, width, classes) > vectors + sums
    assert response_limit(10, 2, 2) == LEAST_RESPONSE_LIMIT


# ---- over a socket ---------------------------------------------------------------------------------------------------


class Server:
    """A door that really listens, with a fake SuperLink behind it; the run's side is a `DoorTransport`."""

    def __init__(self, root: Path) -> None:
        import uvicorn

        make_certificates(root / "certificates", "127.0.0.1")
        self.superlink = FakeSuperLink()
        self.spool = root / "spool"
        self.spool.mkdir()
        self.keys: set[bytes] = set()
        self.door = Door(Mailbox(self.spool), self.superlink, lambda: self.keys)
        self.path = door_link.socket_path(root)
        self.authority = root / "certificates" / "ca.crt"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        config = uvicorn.Config(
            self.door,
            port=self.port,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            timeout_graceful_shutdown=1,
            ssl_certfile=root / "certificates" / "server.crt",
            ssl_keyfile=str(root / "certificates" / "server.key"),
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        while not self.server.started or not self.path.exists():
            assert self.thread.is_alive()
            time.sleep(0.01)

    async def _serve(self) -> None:
        runs = await asyncio.start_unix_server(self.door.serve_run, self.path)
        await self.server.serve()
        runs.close()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.close()


@pytest.fixture
def link(server: Server, tmp_path: Path) -> ServerLink:
    private, _ = make_node_key(tmp_path / "node", "north")
    return ServerLink(f"127.0.0.1:{server.port}", server.authority, private)


class Node:
    """A node whose worker echoes; its steps are taken one by one."""

    def __init__(self, link: ServerLink) -> None:
        home = link.key.with_suffix(".home")
        home.mkdir(exist_ok=True)
        self.asked: list[WorkerRequest] = []
        self.loop = NodeLoop(link, 3, "", "", home, self.carry_out)
        self.loop.sleep = lambda seconds: None

    def carry_out(self, request: WorkerRequest) -> WorkerResponse:
        self.asked.append(request)
        return WorkerResponse(request.request, request.becomes, facts={"client": 3})

    def step(self) -> None:
        delivery = self.loop.persist(self.loop.link.poll)
        assert delivery is not None
        self.loop.answer(delivery)


def transport(server: Server) -> DoorTransport:
    return DoorTransport(server.path, server.spool, {"config": "a config", "folder": "f", "task": "", "run": 9})


def arrivals(carrier: DoorTransport, ids: list[Any]) -> list[Any]:
    """Wait for all replies."""
    found: list[Any] = []
    until = time.monotonic() + 20
    while len(found) < len(ids) and time.monotonic() < until:
        found += carrier.pull(ids)
        time.sleep(0.01)
    return found


@pytest.mark.slow
def test_a_message_goes_to_its_node_and_the_answer_comes_back(server: Server, link: ServerLink) -> None:
    node = Node(link)
    node.loop.connect()
    carrier = transport(server)
    assert carrier.present() == {NODE}
    large = Part(bytes(range(256)) * 20_000)
    settings = {"after": 1, "becomes": 2, "digest": "d", "classes": ["a", "b"]}
    ids = carrier.push(
        [Outgoing(NODE, HELLO, {}, {"hello": True}), Outgoing(NODE, REQUEST, {"request": large}, settings)]
    )
    node.step()
    node.step()
    greeting, reply = arrivals(carrier, ids)
    assert greeting.settings["client"] == 3 and not greeting.failure
    assert reply.parts["response"] == large.data and reply.node == NODE and reply.settings["step"] == 2
    asked = node.asked[1]
    assert (asked.config, asked.client, asked.run, asked.after, asked.becomes) == ("a config", 3, 9, 1, 2)
    assert (asked.digest, asked.classes, asked.request) == ("d", ("a", "b"), large.data)
    assert not list(server.spool.iterdir())
    assert carrier.push([Outgoing(99, HELLO, {}, {})]) == [None]


@pytest.mark.slow
def test_a_run_that_hangs_up_withdraws_its_messages(server: Server, link: ServerLink) -> None:
    node = Node(link)
    node.loop.connect()
    carrier = transport(server)
    carrier.push([Outgoing(NODE, REQUEST, {"request": Part(b"x" * 1000)}, {})])
    delivery = link.poll()
    assert delivery is not None
    carrier.door.close()
    until = time.monotonic() + 10
    while server.door.mailbox.letters and time.monotonic() < until:
        time.sleep(0.01)
    node.loop.answer(delivery)  # nobody wants it, and the node goes on
    assert not server.door.mailbox.letters and not list(server.spool.iterdir()) and not node.asked


@pytest.mark.slow
def test_transfers_go_on_where_they_broke(server: Server, link: ServerLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection breaks after some blocks, three times down and three times up; all bytes travel about once."""
    node = Node(link)
    node.loop.connect()
    carrier = transport(server)
    data = hashlib.shake_256(b"noise").digest(8 << 20)
    (identity,) = carrier.push([Outgoing(NODE, REQUEST, {"request": Part(data)}, {"becomes": 1})])
    monkeypatch.setattr(server_link, "_BLOCK", 1 << 18)
    sent = [0]
    received = [0]
    cuts = {"up": 3, "down": 3}
    blocks = server_link._blocks

    def cut_blocks(data: bytes, start: int) -> Iterator[Any]:
        for number, block in enumerate(blocks(data, start)):
            if number == 4 and cuts["up"]:
                cuts["up"] -= 1
                raise ConnectionResetError("the line is cut")
            sent[0] += len(block)
            yield block

    save = ServerLink._save

    def cut_save(link: ServerLink, response: Any, size: int, download: Download) -> None:
        if cuts["down"]:
            cuts["down"] -= 1
            save(link, response, min(size, 1 << 20), download)
            download.flush()
            received[0] += min(size, 1 << 20)
            link.close()
            raise Unreachable("the line is cut")
        received[0] += size
        save(link, response, size, download)

    monkeypatch.setattr(server_link, "_blocks", cut_blocks)
    monkeypatch.setattr(ServerLink, "_save", cut_save)
    node.step()
    (reply,) = arrivals(carrier, [identity])
    assert reply.parts["response"] == data and len(node.asked) == 1
    assert cuts == {"up": 0, "down": 0}
    assert received[0] == len(data) and sent[0] < 1.1 * len(data)


@pytest.mark.slow
@pytest.mark.parametrize("too_large", [True, False])
def test_a_request_over_the_owners_limit_is_refused_recorded_and_not_fetched(
    server: Server, link: ServerLink, too_large: bool
) -> None:
    (link.key.parent / "policy.toml").write_text("request_megabytes = 1\n")
    node = Node(link)
    node.loop.connect()
    carrier = transport(server)
    size = (1 << 20) + too_large
    (identity,) = carrier.push([Outgoing(NODE, REQUEST, {"request": Part(bytes(size))}, {})])
    node.step()
    (reply,) = arrivals(carrier, [identity])
    assert len(node.asked) == (not too_large)
    if too_large:
        assert reply.settings["error"] == request_too_large(1 << 20)
        (line,) = audit.read_entries(node.loop.home / "audit.jsonl")
        assert (line["kind"], line["bytes"], line["why"]) == ("refused", 0, request_too_large(1 << 20))
        assert not node.loop.downloads.exists()


@pytest.mark.slow
def test_messages_of_another_kind_reach_no_worker(server: Server, link: ServerLink) -> None:
    node = Node(link)
    node.loop.connect()
    carrier = transport(server)
    messages = [Outgoing(NODE, "train", {}, {}), Outgoing(NODE, REQUEST, {}, {})]
    messages.append(Outgoing(NODE, HELLO, {"request": Part(b"x")}, {}))
    ids = carrier.push(messages)
    for _ in messages:
        node.step()
    assert all("fedgraft's messages only" in reply.settings["error"] for reply in arrivals(carrier, ids))
    assert not node.asked


@pytest.mark.parametrize(
    "table",
    [
        {"parts": {"request": [1, "../../x"]}},
        {"parts": {"code": [1, "0" * 64]}},
        {"parts": {"request": [-1, "0" * 64]}},
        {"parts": {"request": ["1", "0" * 64]}},
        {"parts": {"request": [True, "0" * 64]}},
        {"id": "../x"},
        {"id": 3},
        {"settings": []},
        {"kind": None},
    ],
)
def test_a_message_of_another_form_is_none(table: dict[str, Any]) -> None:
    """File names on the node come from a digest, and paths from an id: nothing else may be in them."""
    honest = {"id": "0" * 32, "kind": REQUEST, "settings": {}, "parts": {"request": [1, "0" * 64]}}
    assert server_link._parse_delivery(honest).size == 1
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        server_link._parse_delivery(honest | table)


# ---- who is admitted -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_that_the_superlink_refuses_gets_no_session(server: Server, link: ServerLink) -> None:
    server.superlink.status = 412
    with pytest.raises(KeyRefused):
        link.activate()
    server.keys.add(link.public)  # it is registered, so an earlier process must be the reason
    with pytest.raises(KeyInUse):
        link.activate()
    with pytest.raises(NoSession):
        link.poll()
    with raises("E-DEPLOY-NODE-KEY-REFUSED"):
        server.keys.clear()
        Node(link).loop.connect()


@pytest.mark.slow
def test_a_node_waits_while_an_earlier_process_counts_as_connected(
    server: Server, link: ServerLink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.superlink.status = 412
    server.keys.add(link.public)
    node = Node(link)
    tries = [0]

    def sleep(seconds: float) -> None:
        tries[0] += 1
        if tries[0] == 5:
            server.superlink.status = 200

    node.loop.sleep = sleep
    node.loop.connect()
    assert tries[0] == 5 and KEY_IN_USE in capsys.readouterr().out
    monkeypatch.setattr(node_loop, "KEY_IN_USE_SECONDS", 0.0)
    server.superlink.status = 412
    with raises("E-DEPLOY-NODE-KEY-IN-USE"):
        node.loop.connect()


@pytest.mark.slow
def test_nobody_ends_the_session_of_another(server: Server, link: ServerLink, tmp_path: Path) -> None:
    """A public key is no secret. Without the signature of its owner the SuperLink is not even asked."""
    link.activate()
    seen = len(server.superlink.seen)
    private, _ = make_node_key(tmp_path / "other", "other")
    forger = ServerLink(link.address, link.authority, private)
    forger.public = link.public
    server.superlink.status = 401
    forger.heartbeat(NODE)
    forger.deactivate(NODE)
    assert len(server.superlink.seen) == seen and server.door.mailbox.present() == {NODE}
    link.heartbeat(NODE)  # its owner's own, refused by the SuperLink: the key was revoked
    assert server.door.mailbox.present() == set()


@pytest.mark.slow
def test_a_server_of_another_version_is_refused(
    server: Server, link: ServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgraft.deploy.door.version", lambda name: "0.0.1")
    with raises("E-DEPLOY-NODE-VERSION", server="0.0.1"):
        link.activate()


def test_two_processes_of_one_node_exclude_each_other(tmp_path: Path) -> None:
    node_loop.lock_home(tmp_path, tmp_path / "north.key")
    with raises("E-DEPLOY-NODE-KEY-IN-USE"):
        node_loop.lock_home(tmp_path, tmp_path / "north.key")


def test_a_server_that_does_not_answer_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, _ = make_node_key(tmp_path / "node", "north")
    make_certificates(tmp_path / "c", "127.0.0.1")
    link = ServerLink("127.0.0.1:1", tmp_path / "c" / "ca.crt", private)
    node = Node(link)
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            raise KeyboardInterrupt

    node.loop.sleep = sleep
    with pytest.raises(KeyboardInterrupt):
        node.loop.connect()
    assert pauses[0] < 0.2 and pauses == sorted(pauses) and pauses[-1] == 5.0


def test_a_door_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with raises("E-DEPLOY-DOOR-GONE"):
        DoorTransport(tmp_path / "nothing", tmp_path, {})
    assert door_link.transfers(tmp_path) == []
