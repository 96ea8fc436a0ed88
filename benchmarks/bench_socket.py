"""Bytes on the socket against bytes that a run reports: `python -m benchmarks.bench_socket`.

A proxy on loopback stands between the nodes and the server of a local federation (TLS passes through it unopened) and
counts both ways. A federation with no run first shows what idle nodes send (heartbeats, polls) per second. Each row
then compares what was counted during a run, less the idle traffic of that time, with the run's own bytes_up and
bytes_down plus a constant per message. The constant is measured, not assumed: it is what a message costs in the run
with the smallest payload (a head), and it holds for all rows.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from fedgraft.experiment.config import load
from fedgraft.experiment.federation_local import check_ended, follow, local_federation
from fedgraft.experiment.federation_server import submit
from fedgraft.experiment.record_files import read_metrics
from fedgraft.experiment.run import Silent

NODES, ROUNDS = 2, 3
BASE = [
    f"partition.clients={NODES}", f"rounds.total={ROUNDS}", "rounds.fraction=1.0", "rounds.evaluate_every=0",
    "local.steps=1", "local.batch_size=8", "model.head=random", "partition.kind=iid",
]  # fmt: skip
MASK = ["moves.kind=masked", "moves.mask.strategy=random", "moves.mask.sparsity=0.9"]
CASES = {
    "dense": ["moves.kind=everything"],
    "90 % sparse": MASK,
    "90 % sparse, int8": [*MASK, "sends.codec=int8"],
    "LoRA, rank 8": ["moves.kind=lora"],
}


class CountingProxy:
    """Passes bytes between nodes and a server, and counts them; it cannot read them."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self.target, self.up, self.down, self.lock = (host, int(port)), 0, 0, threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            far = socket.create_connection(self.target)
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        try:
            while piece := source.recv(1 << 16):
                with self.lock:
                    setattr(self, way, getattr(self, way) + len(piece))
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()

    def counts(self) -> tuple[int, int]:
        """Bytes so far: to the server, from the server."""
        with self.lock:
            return self.up, self.down


@dataclass(frozen=True)
class Measured:
    """One run: counted, and reported, per way."""

    counted: tuple[float, float]
    reported: tuple[int, int]
    messages: int


def measure(words: list[str]) -> Measured:
    """Run one config on a local federation behind the proxy."""
    config, proxies = load(None, [*BASE, *words]), []

    def through(server: str) -> str:
        proxies.append(CountingProxy(server))
        return proxies[0].address

    with tempfile.TemporaryDirectory() as root, local_federation(config, through) as local:
        local.wait()
        idle_from, since = proxies[0].counts(), time.monotonic()
        time.sleep(20)
        idle_to, spent = proxies[0].counts(), time.monotonic() - since
        idle = [(b - a) / spent for a, b in zip(idle_from, idle_to, strict=True)]
        before, began = proxies[0].counts(), time.monotonic()
        folder = Path(root) / "run"
        check_ended(*follow(local.fed, submit(local.fed, folder), folder, ROUNDS, Silent()))
        after, took = proxies[0].counts(), time.monotonic() - began
        lines = read_metrics(folder)
    up, down = (b - a - rate * took for a, b, rate in zip(before, after, idle, strict=True))
    return Measured((up, down), (_total(lines, "bytes_up"), _total(lines, "bytes_down")), NODES * ROUNDS)


def _total(lines: list[dict[str, int]], key: str) -> int:
    return sum(int(line[key]) for line in lines)


def main() -> None:
    """Print the table."""
    least = measure(["moves.kind=head", "model.name=tiny"])
    constant = [(c - r) / least.messages for c, r in zip(least.counted, least.reported, strict=True)]
    both = f"{constant[0]:,.0f} bytes up, {constant[1]:,.0f} bytes down"
    print(f"constant per message: {both} (measured on a head)\n", flush=True)
    print("| run | way | on the socket | reported | reported + constant | difference |")
    print("|---|---|---|---|---|---|")
    for name, words in CASES.items():
        found = measure(words)
        for way, i in (("up", 0), ("down", 1)):
            expected = found.reported[i] + constant[i] * found.messages
            gap = 100 * (found.counted[i] - expected) / expected
            print(
                f"| {name} | {way} | {found.counted[i]:,.0f} | {found.reported[i]:,} | {expected:,.0f} | {gap:+.2f} % |"
            )
    print(f"\n{NODES} nodes, {ROUNDS} rounds, seed 0, model nano")


if __name__ == "__main__":
    main()
