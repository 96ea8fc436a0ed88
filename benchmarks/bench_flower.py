"""Seconds per round on a real Flower deployment: fedgraft's engine next to plain Flower FedAvg, same arrays, same run.

One SuperLink and `--clients` SuperNodes on this machine, plaintext, behind fedgraft's gate. Clients echo the array they
get, so that only the engine is measured: no training, no network beyond loopback. Three ways in turn on the same nodes:
`floor` is Flower's own messages (one flat array) collected with quick looks; `fedgraft` is `FlowerEngine.exchange`
with its packing, screening-ready bytes and memory steps; with `--plain` also `FedAvg`, Flower's strategy with the same
bytes in 150 arrays, which looks for answers every three seconds.

    python -m benchmarks.bench_flower

prints markdown tables and writes runs/benchmarks/flower.json. `--plain` takes Flower's own SuperNodes instead, which
look for orders every three seconds and start a Python per message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.flower_local import LocalFederation

OUT = Path("runs") / "benchmarks" / "flower.json"
PROJECT = """\
[project]
name = "bench-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedgraft"

[tool.flwr.app.components]
serverapp = "bench_app.server:app"
clientapp = "bench_app.client:app"

[tool.flwr.app.config]
out = ""
sizes = ""
rounds = ""
clients = ""
plain = ""
"""

CLIENT = '''\
"""Echoes: what comes in goes out, as Flower's FedAvg and as fedgraft's engine want it."""
import os, time
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def started():
    """When this process began, by the clock of the machine."""
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    boot = time.time() - float(open("/proc/uptime").read().split()[0])
    return boot + ticks / os.sysconf("SC_CLK_TCK")


@app.train()
def echo(message, context):
    metrics = MetricRecord({"num-examples": 1, "started": started(), "handled": time.time()})
    content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
    return Message(content, reply_to=message)


@app.query("hello")
def hello(message, context):
    words = ConfigRecord({"client": context.node_config["partition-id"], "step": 0, "need": False, "error": ""})
    return Message(RecordDict({"words": words}), reply_to=message)


@app.train("order")
def order(message, context):
    words = ConfigRecord({"step": 0, "need": False, "error": ""})
    return Message(RecordDict({"words": words, "reply": message.content["order"]}), reply_to=message)
'''

SERVER = '''\
"""Times rounds of the three ways and writes them to a file."""
import json, time
import numpy as np, torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from fedgraft.deploy.limits import publish_response_limit
from fedgraft.engines.flower.server import FlowerEngine, FlowerTransport, Patience
from fedgraft.core.messages import Request

app = ServerApp()


def quick(grid, record, nodes):
    messages = [Message(RecordDict({"arrays": record}), node, "train") for node in nodes]
    first = time.time()
    waiting, began = set(grid.push_messages(messages)), time.monotonic()
    parts = []
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            m = reply.content["metrics"]
            at = [first, m["started"], m["handled"], time.time()]
            parts.append([b - a for a, b in zip(at, at[1:])])
        time.sleep(min(0.5, max(0.02, 0.02 * (time.monotonic() - began))))
    return parts


@app.main()
def main(grid, context):
    c = context.run_config
    rounds, clients = int(c["rounds"]), int(c["clients"])
    # As a run does: the port refuses larger responses.
    publish_response_limit(4 * max(map(int, c["sizes"].split(","))))
    engine = FlowerEngine(FlowerTransport(grid), clients, Patience(wait=600, least=clients))
    engine.gather()
    nodes, found = sorted(engine.registry.nodes.values()), []

    def clock(size, name, go):
        began = time.perf_counter()
        parts = go()
        seconds = time.perf_counter() - began
        found.append({"size": size, "way": name, "seconds": seconds, "parts": parts or []})
        with open(c["out"], "w") as file:
            json.dump(found, file)

    def fedgraft(vector, r):
        orders = [Request("b", r, k, "train", vector=vector) for k in range(clients)]
        got = engine.exchange(orders)
        assert len(got) == clients and all(len(a[1]) > 4 * len(vector) for a in got), got

    def strategy(many):
        FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients).start(
            grid=grid, initial_arrays=many, num_rounds=1)

    payloads = {size: np.random.default_rng(0).standard_normal(size // 4).astype(np.float32)
                for size in map(int, c["sizes"].split(","))}
    for size, values in payloads.items():
        for r in range(rounds if size < 10_000_000 else max(1, rounds - 1)):
            vector = torch.from_numpy(values + r)  # Flower does not send again what it has seen
            data = (values - 1 - r).tobytes()
            flat = ArrayRecord({"flat": Array("uint8", (len(data),), "fedgraft", data)})
            clock(size, "floor", lambda: quick(grid, flat, nodes))
            clock(size, "fedgraft", lambda: fedgraft(vector, r))
    # Last, and once: it takes minutes. fedgraft's ports refuse a message of so many objects for its size.
    for size, values in payloads.items() if c["plain"] else ():
        many = ArrayRecord([piece.copy() for piece in np.array_split(values, 150)])
        clock(size, "FedAvg", lambda: strategy(many))
'''


GATE = "from fedgraft.deploy import gate; gate.same_app = lambda *words: True; gate.main()"


class Federation(LocalFederation):
    """Nodes behind the gate, which here takes the benchmark's app too; or Flower's own."""

    plain = False

    def spawn(self, name: str, *overrides: str) -> None:
        """Start one process."""
        command = [f"flower-{overrides[0]}"] if self.plain else [sys.executable, "-c", GATE, overrides[0]]
        if self.plain:
            self.environment.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", None)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, *overrides[1:]],
                env=self.environment | {"FEDGRAFT_LIVES_WITH": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def submit(federation: Any, settings: dict[str, str]) -> int:
    """Start the benchmark's app on a federation."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    files = {
        "pyproject.toml": PROJECT,
        "bench_app/__init__.py": '"""A benchmark."""\n',
        "bench_app/server.py": SERVER,
        "bench_app/client.py": CLIENT,
    }
    bundle, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
    fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
    request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings)))
    return int(federation.client.StartRun(request).run_id)


def table(found: list[dict[str, Any]]) -> str:
    """The result as markdown: medians, with the least and the most."""
    lines = [
        "| payload | way | rounds | seconds a round: median (least-most) | over the floor |",
        "|---|---|---|---|---|",
    ]
    for size in dict.fromkeys(line["size"] for line in found):
        floor = statistics.median(x["seconds"] for x in found if x["size"] == size and x["way"] == "floor")
        for way in dict.fromkeys(line["way"] for line in found):
            s = [x["seconds"] for x in found if x["size"] == size and x["way"] == way]
            if not s:
                continue
            m = statistics.median(s)
            span = f"{m:.2f} ({min(s):.2f}-{max(s):.2f})"
            lines.append(f"| {size / 1e6:.1f} MB | {way} | {len(s)} | {span} | {m / floor:.2f}x |")
    return "\n".join(lines)


STAGES = (
    "the server hands it to the SuperLink, the SuperNode sees it, the client's process starts",
    "that process fetches the order from the SuperNode",
    "it hands back the answer, the SuperNode passes it on, the server has it",
)


def where(found: list[dict[str, Any]]) -> str:
    """Where the time of a message goes, measured at the floor: medians over its messages."""
    lines = ["| payload | where the time of one message goes, at the floor | seconds (median) |", "|---|---|---|"]
    for size in dict.fromkeys(line["size"] for line in found):
        parts = [p for line in found if line["size"] == size for p in line["parts"]]
        for stage, values in zip(STAGES, zip(*parts, strict=True), strict=True):
            lines.append(f"| {size / 1e6:.1f} MB | {stage} | {statistics.median(values):.2f} |")
    return "\n".join(lines)


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    kept = json.loads(path.read_text())
    said = f"Command: `python -m benchmarks.bench_flower`. {kept['clients']} nodes on this machine, clients that echo."
    return "\n\n".join(["## A deployed round", said, table(kept["rounds"]), where(kept["rounds"]), ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown of a deployed round."""
    kept, rows = json.loads(path.read_text()), []
    for size in dict.fromkeys(line["size"] for line in kept["rounds"]):
        took = {
            way: statistics.median(x["seconds"] for x in kept["rounds"] if (x["size"], x["way"]) == (size, way))
            for way in ("floor", "fedgraft")
        }
        ratio = took["fedgraft"] / took["floor"]
        what = f"a round of {kept['clients']} nodes, {size / 1e6:.1f} MB each, times Flower's own messages (at most)"
        rows.append(("deployed", what, 1.1, ratio, ratio <= 1.1))
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="900000,86000000", help="payload bytes, by commas")
    parser.add_argument("--patience", type=float, default=3600)
    parser.add_argument("--plain", action="store_true", help="Flower's own SuperNodes")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    Federation.plain = args.plain
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        out = folder / "found.json"
        with Federation(folder, args.clients) as federation:
            overrides = {
                "sizes": args.sizes,
                "rounds": str(args.rounds),
                "clients": str(args.clients),
                "out": str(out),
                "plain": "yes" if args.plain else "",
            }
            number = submit(federation, overrides)
            began = time.monotonic()
            status = federation.wait(number, args.patience)
            if status != "completed" and not out.exists():
                raise SystemExit(f"the run is {status}: {federation.status(number)}\n{federation.logs()}")
            if status != "completed":
                print(f"not whole: the run is {status}\n")
            print(f"{args.clients} clients on this machine, {time.monotonic() - began:.0f} s in all\n")
        found = json.loads(out.read_text())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"clients": args.clients, "plain": args.plain, "rounds": found}, indent=1) + "\n")
    print(section(args.out))


if __name__ == "__main__":
    main()
