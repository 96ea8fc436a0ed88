"""Bytes on the socket against bytes that a run reports: `python -m benchmarks.bench_socket`.

Between the nodes and the server of a local federation stands a proxy on loopback that holds the federation's own
certificate. It counts the bytes of the nodes' sockets, TLS included, and reads of the HTTP inside only the first line,
so that each byte is known by what it was for: messages, looks for messages that found none, signs of life, connecting.
A row compares the bytes of messages with the run's own `bytes_up` and `bytes_down` plus a constant per message. The
constant is measured in a run of its own, whose payload is a tiny head: it is no row, and it holds for all rows.
With `--idle SECONDS` the federation then waits, and processor time and bytes of server and nodes are told by hour.

Prints tables, and writes them as numbers to runs/benchmarks/socket.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import ssl
import tempfile
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import MARK, cpu, marked
from fedgraft.config.load import load, to_toml
from fedgraft.deploy.coordinator import check_completed, submit_run
from fedgraft.deploy.folder import FederationFolder
from fedgraft.deploy.local import follow_run, local_federation
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.loop import Silent

OUT = Path("runs") / "benchmarks" / "socket.json"
NODES, ROUNDS = 2, 3
MESSAGES = NODES * (ROUNDS + 1)  # an order and its answer; before the first round each node is asked who it is
BASE = [
    f"partition.clients={NODES}",
    f"rounds.total={ROUNDS}",
    "rounds.fraction=1.0",
    "rounds.evaluate_every=0",
    "local.steps=1",
    "local.batch_size=8",
    "model.head=random",
    "partition.kind=iid",
    "personal.evaluate=never",
]
MASK = ["trainable.kind=sparse", "trainable.sparse.strategy=random", "trainable.sparse.sparsity=0.9"]
TINY = ["trainable.kind=head", "model.name=tiny"]
CASES = {
    "dense": ["trainable.kind=everything"],
    "90 % sparse": MASK,
    "90 % sparse, int8": [*MASK, "compression.codec=int8"],
    "LoRA, rank 8": ["trainable.kind=lora"],
    "Fed-SB": ["algorithm.name=fedsb"],
}
KINDS = {
    "send-node-heartbeat": "signs of life",
    "next": "messages",
    "parts": "messages",
    "answers": "messages",
}
_PATH = re.compile(rb"(?:POST|GET|PUT) /v1/(?:fleet|fedgraft)/([a-z-]+)")
_EMPTY = b" 204 "  # status of a response that brings no message


class Line:
    """One connection of a node: its requests follow one another, so bytes are known by the request they belong to."""

    def __init__(self, proxy: CountingProxy, near: socket.socket) -> None:
        self.proxy, self.near, self.lock = proxy, near, threading.Lock()
        self.inward, self.outward = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = proxy.inside.wrap_bio(self.inward, self.outward, server_side=True)
        plain = socket.create_connection(proxy.target)
        self.far = proxy.outside.wrap_socket(plain, server_hostname=proxy.target[0])
        self.kind, self.looks, self.answered = "connecting", False, False
        self.counts = Counter[str](requests=1)

    def carry(self) -> None:
        """From the node to the server, until one of them is gone."""
        threading.Thread(target=self._back, daemon=True).start()
        with suppress(OSError, ssl.SSLError):
            while raw := self.near.recv(1 << 16):
                self.inward.write(raw)
                with self.lock:
                    text = self._read()
                    if text and (self.answered or self.kind == "connecting"):
                        self._begin(text)
                    self.counts["up"] += len(raw)
                    self._flush()
                if text:
                    self.far.sendall(text)
        for one in (self.near, self.far):
            one.close()

    def _read(self) -> bytes:
        found = bytearray()
        with suppress(ssl.SSLWantReadError):
            while piece := self.tls.read(1 << 16):
                found += piece
        return bytes(found)

    def _begin(self, text: bytes) -> None:
        """A request begins."""
        path = _PATH.match(text)
        name = path[1].decode() if path else ""
        self.looks, self.answered, self.kind = name == "next", False, KINDS.get(name, "connecting")
        self.counts["requests"] += 1

    def _back(self) -> None:
        with suppress(OSError, ssl.SSLError):
            while text := self.far.recv(1 << 16):
                with self.lock:
                    if not self.answered and self.looks:
                        self.kind = "looks for messages" if _EMPTY in text[:16] else "messages"
                    self.answered = True
                    self.tls.write(text)
                    self._flush()

    def _flush(self) -> None:
        if raw := self.outward.read():
            self.counts["down"] += len(raw)
            self.near.sendall(raw)
        if self.answered or not self.looks:  # only its answer tells what a look was for
            self.proxy.note(self.kind, self.counts)
            self.counts.clear()


class CountingProxy:
    """Passes requests between nodes and a server, and counts the bytes of the nodes' sockets by what they were for."""

    def __init__(self, server: str, fed: Path) -> None:
        host, _, port = server.rpartition(":")
        self.target, self.lock, self.counts = (host, int(port)), threading.Lock(), Counter[str]()
        self.inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.inside.load_cert_chain(fed / "server.crt", fed / "server.key")
        self.outside = ssl.create_default_context(cafile=fed / "ca.crt")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self.listener.accept()
            threading.Thread(target=Line(self, near).carry, daemon=True).start()

    def note(self, kind: str, counts: Counter[str]) -> None:
        """Add what was counted."""
        with self.lock:
            self.counts.update({f"{kind}: {what}": number for what, number in counts.items()})

    def since(self, before: Counter[str]) -> dict[str, int]:
        """What was counted since."""
        with self.lock:
            return {key: value - before[key] for key, value in self.counts.items() if value > before[key]}


def measure(fed: FederationFolder, proxy: CountingProxy, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Run one config on the federation behind the proxy: counted and reported."""
    (fed.path / "config.toml").write_text(to_toml(load(None, [*BASE, *overrides])))
    before = Counter(proxy.counts)
    check_completed(*follow_run(fed, submit_run(fed, folder), folder, ROUNDS, Silent()))
    summary = RunFolder.open(folder).summary()
    return {"reported": {"up": summary["bytes_up"], "down": summary["bytes_down"]}, "socket": proxy.since(before)}


def compare(found: dict[str, Any], constant: dict[str, float]) -> dict[str, dict[str, float]]:
    """Per way: bytes of messages on the socket, what the run reports plus the constants, and the difference."""
    rows = {}
    for way in ("up", "down"):
        counted, expected = found["socket"][f"messages: {way}"], found["reported"][way] + MESSAGES * constant[way]
        rows[way] = {"socket": counted, "expected": expected, "difference": counted / expected - 1}
    return rows


def table(results: dict[str, dict[str, Any]], constant: dict[str, float]) -> str:
    """The rows as markdown."""
    lines = [
        "Constant per message (an order and its answer): "
        f"{constant['up']:,.0f} bytes up, {constant['down']:,.0f} down.\n",
        "| run | way | messages on the socket | reported | reported + constants | difference |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        for way, row in found["rows"].items():
            lines.append(
                f"| {name} | {way} | {row['socket']:,} | {found['reported'][way]:,} | {row['expected']:,.0f} "
                f"| {100 * row['difference']:+.2f} % |"
            )
    return "\n".join(lines)


def beside(found: dict[str, Any]) -> str:
    """Where the bytes of one run went, by what they were for."""
    kinds = dict.fromkeys(key.partition(":")[0] for key in found["socket"])
    lines = ["| on the socket | requests | up | down |", "|---|---|---|---|"]
    for kind in kinds:
        numbers = (found["socket"].get(f"{kind}: {what}", 0) for what in ("requests", "up", "down"))
        lines.append(f"| {kind} | {' | '.join(f'{n:,}' for n in numbers)} |")
    return "\n".join(lines)


def idle(proxy: CountingProxy, seconds: float, mark: str) -> dict[str, float]:
    """Processor time and bytes of a federation that nobody asks anything, as shares of the time and by hour."""
    before, began, counted = {pid: cpu(pid) or 0.0 for pid in marked(mark)}, time.monotonic(), Counter(proxy.counts)
    time.sleep(seconds)
    took = time.monotonic() - began
    spent = {"node": 0.0, "server": 0.0}
    for pid, then in before.items():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != os.getpid():
                spent["node" if b"node" in words else "server"] += (cpu(pid) or then) - then
    moved = sum(number for key, number in proxy.since(counted).items() if not key.endswith("requests"))
    return {
        "seconds": took,
        "server": spent["server"] / took,
        "node": spent["node"] / NODES / took,
        "bytes an hour": moved / NODES / took * 3600,
    }


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    kept = json.loads(path.read_text())
    parts = [
        "## Bytes on the socket",
        f"Command: `python -m benchmarks.bench_socket --idle 600`. {NODES} nodes, {ROUNDS} rounds, {kept['messages']} "
        f"messages, seed 0, nano. Largest difference {100 * kept['largest difference']:.2f} %.",
    ]
    if quiet := kept["idle"]:
        parts.append(
            f"Idle for {quiet['seconds']:.0f} s: the server takes {100 * quiet['server']:.2f} % of a core, a node "
            f"{100 * quiet['node']:.2f} %; {quiet['bytes an hour']:,.0f} bytes an hour for each node."
        )
    parts += [table(kept["runs"], kept["constant"]), "All bytes of a run of a tiny head, by what they were for:"]
    return "\n\n".join([*parts, beside(kept["tiny"]), ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown of bytes on the socket."""
    worst = 100 * json.loads(path.read_text())["largest difference"]
    return [("deployed", "bytes on the socket against those reported, % apart (at most)", 3.0, worst, worst <= 3)]


def main() -> None:
    """Measure, print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--idle", type=float, default=0.0, help="seconds to watch the federation do nothing")
    args = parser.parse_args()
    os.environ[MARK] = mark = uuid.uuid4().hex
    proxies: list[CountingProxy] = []

    with tempfile.TemporaryDirectory() as scratch:

        def route(server: str, certificates: Path) -> str:
            proxies.append(CountingProxy(server, certificates))
            return proxies[0].address

        with local_federation(load(None, [*BASE, *TINY]), route) as local:
            local.wait_for_nodes()
            tiny = measure(local.folder, proxies[0], TINY, Path(scratch) / "tiny")
            excess = {way: tiny["socket"][f"messages: {way}"] - tiny["reported"][way] for way in ("up", "down")}
            constant = {way: value / MESSAGES for way, value in excess.items()}
            results: dict[str, dict[str, Any]] = {}
            for name, overrides in CASES.items():
                found = measure(local.folder, proxies[0], overrides, Path(scratch) / f"run-{len(results)}")
                results[name] = found | {"rows": compare(found, constant)}
            quiet = idle(proxies[0], args.idle, mark) if args.idle else {}
    worst = max(abs(row["difference"]) for found in results.values() for row in found["rows"].values())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"messages": MESSAGES, "constant": constant, "tiny": tiny, "runs": results, "largest difference": worst}
    kept["idle"] = quiet
    args.out.write_text(json.dumps(kept, indent=2) + "\n")
    print(section(args.out))
    if worst > 0.03:
        raise SystemExit("a row is more than 3 % off")


if __name__ == "__main__":
    main()
