"""Slow and broken links: a node behind 2 Mbit/s and 300 ms, and one whose line is cut in the middle of transfers."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.throttle import SlowLink

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from tests.unit.deploy.test_door import NODE, Node, Server, arrivals, transport

from fedgraft.deploy import node_loop, server_link
from fedgraft.deploy.door_link import describe_transfer
from fedgraft.deploy.keys import make_node_key
from fedgraft.deploy.server_link import Download, ServerLink
from fedgraft.engines.flower.transport import REQUEST, Outgoing, Part

pytestmark = pytest.mark.slow
RATE = 2e6 / 8
DELAY = 0.15  # each way


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.close()


def behind(link: SlowLink, server: Server, tmp_path: Path) -> Node:
    private, _ = make_node_key(tmp_path / "node", "north")
    node = Node(ServerLink(f"127.0.0.1:{link.port}", server.authority, private))
    node.loop.sleep = time.sleep
    node.loop.connect()
    return node


@pytest.mark.deploy
def test_a_slow_link_costs_its_own_time_and_shows_its_progress(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowLink(server.port, RATE, DELAY)
    node = behind(slow, server, tmp_path)
    carrier = transport(server)
    data = hashlib.shake_256(b"noise").digest(2_000_000)
    began = time.monotonic()
    ids = carrier.push([Outgoing(NODE, REQUEST, {"request": Part(data)}, {"becomes": 1})])
    seen: set[str] = set()
    threads: list[threading.Thread] = []
    done = threading.Event()

    def look() -> None:
        """As `deploy status` does, on a connection of its own."""
        watcher = transport(server)
        while not done.wait(0.5):
            for transfer in watcher.door.ask(do="transfers")["transfers"]:
                seen.add(describe_transfer(transfer))

    monkeypatch.setattr(node_loop, "HEARTBEAT", 0.4)
    for work in (look, lambda: node.loop.send_heartbeats(done)):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    node.step()
    (reply,) = arrivals(carrier, ids)
    took = time.monotonic() - began
    done.set()
    for thread in threads:
        thread.join()
    slow.close()
    ideal = 2 * len(data) / RATE + 4 * 2 * DELAY  # both ways, and a poll, a fetch and two steps of the answer
    print(f"{took:.1f} s, ideal {ideal:.1f} s, ratio {took / ideal:.2f}")
    assert reply.parts["response"] == data
    assert took < 1.1 * ideal
    assert sum("receives its request" in words for words in seen) > 5
    assert sum("sends its answer" in words for words in seen) > 5


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_is_cut_three_times_costs_no_byte_twice(server: Server, tmp_path: Path, way: str) -> None:
    fast = SlowLink(server.port, 4e6, 0.0)
    node = behind(fast, server, tmp_path)
    carrier = transport(server)
    data = hashlib.shake_256(b"noise").digest(4_000_000)
    ids = carrier.push([Outgoing(NODE, REQUEST, {"request": Part(data)}, {"becomes": 1})])

    def cut_thrice() -> None:
        for share in (0.25, 0.5, 0.75):
            while fast.passed[way] < share * len(data):
                time.sleep(0.005)
            fast.cut()

    cutting = threading.Thread(target=cut_thrice)
    cutting.start()
    node.step()
    (reply,) = arrivals(carrier, ids)
    cutting.join(10)
    fast.close()
    assert not cutting.is_alive(), "the line was not cut"
    assert reply.parts["response"] == data and len(node.asked) == 1
    assert max(fast.passed.values()) < 1.1 * len(data), fast.passed


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_a_killed_node_goes_on_with_what_its_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """A process that is killed writes nothing any more: what it wrote every few seconds is there, and no more."""
    monkeypatch.setattr(server_link, "SAVE_SECONDS", seconds)
    file = tmp_path / "part"
    killed = Download(file)
    for _ in range(3):
        killed.add(b"abc")
    again = Download(file)
    assert again.size == (9 if seconds == 0 else 0)
    again.add(b"d")
    again.flush()
    assert file.read_bytes() == again.whole() == (b"abcabcabcd" if seconds == 0 else b"d")
    assert again.digest == hashlib.sha256(again.whole()).hexdigest()
    assert Download(file).digest == again.digest
