"""Seconds per round on a real Flower deployment: fedgraft's engine next to plain Flower FedAvg, same arrays, same run.

One SuperLink and `--clients` SuperNodes on this machine, plaintext. Clients echo the array they get, so that only the
engine is measured: no training, no network beyond loopback. Four ways, in turn, on the same nodes:
`floor` is Flower's own messages (one flat array) collected with quick looks; `fedgraft` is `FlowerEngine.exchange`
with its packing, screening-ready bytes and memory steps; `grid` is the same flat array through Flower's own
`send_and_receive`, which looks every three seconds; `FedAvg` is Flower's strategy with the same bytes in 150 arrays.

    python benchmarks/bench_flower.py --clients 10 --rounds 3

prints a markdown table. `python benchmarks/bench_flower.py --help` for the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

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
    boot = next(int(line.split()[1]) for line in open("/proc/stat") if line.startswith("btime"))
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
"""Times rounds of the four ways and writes them to a file."""
import json, time
import numpy as np, torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from fedgraft.engines.flower_server import FlowerEngine, FlowerPost, Patience
from fedgraft.messages import Order

app = ServerApp()


def quick(grid, record, nodes):
    messages = [Message(RecordDict({"arrays": record}), node, "train") for node in nodes]
    first = time.time()
    waiting, began = set(grid.push_messages(messages)), time.monotonic()
    pushed, parts = time.time(), []
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            m = reply.content["metrics"]
            at = [first, pushed, m["started"], m["handled"], time.time()]
            parts.append([b - a for a, b in zip(at, at[1:])])
        time.sleep(min(0.5, max(0.02, 0.02 * (time.monotonic() - began))))
    return parts


@app.main()
def main(grid, context):
    c = context.run_config
    rounds, clients = int(c["rounds"]), int(c["clients"])
    engine = FlowerEngine(FlowerPost(grid), clients, Patience(wait=600, least=clients))
    engine.gather()
    nodes, found = sorted(engine.roster.nodes.values()), []
    for size in map(int, c["sizes"].split(",")):
        values = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32)
        vector = torch.from_numpy(values)
        flat = ArrayRecord({"flat": Array("uint8", (size // 4 * 4,), "fedgraft", values.tobytes())})
        many = ArrayRecord([piece.copy() for piece in np.array_split(values, 150)])

        def fedgraft(r):
            orders = [Order("b", r, k, "train", vector=vector) for k in range(clients)]
            got = engine.exchange(orders)
            assert len(got) == clients and all(len(a[1]) > size // 4 * 4 for a in got), got

        def strategy(r):
            FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients).start(
                grid=grid, initial_arrays=many, num_rounds=1)

        def plain(r):
            sent = [Message(RecordDict({"arrays": flat}), node, "train") for node in nodes]
            assert len(list(grid.send_and_receive(sent))) == clients

        ways = {"floor": lambda r: quick(grid, flat, nodes), "fedgraft": fedgraft, "grid": plain, "FedAvg": strategy}
        for r in range(rounds):
            for name, go in ways.items():
                began = time.perf_counter()
                parts = go(r)
                seconds = time.perf_counter() - began
                found.append({"size": size, "way": name, "seconds": seconds, "parts": parts or []})
    with open(c["out"], "w") as file:
        json.dump(found, file)
'''


def submit(federation: Any, settings: dict[str, str]) -> int:
    """Start the benchmark's app on a federation."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    files = {
        "pyproject.toml": PROJECT, "bench_app/__init__.py": '"""A benchmark."""\n', "bench_app/server.py": SERVER,
        "bench_app/client.py": CLIENT,
    }  # fmt: skip
    bundle, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
    fab = fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {}))
    request = StartRunRequest(fab=fab, override_config=user_config_to_proto(dict(settings)))
    return int(federation.client.StartRun(request).run_id)


def table(found: list[dict[str, Any]], rounds: int) -> str:
    """The result as markdown: medians, with the least and the most."""
    lines = [
        f"| payload | way | seconds a round (median of {rounds}; least-most) | over the floor |",
        "|---|---|---|---|",
    ]
    for size in dict.fromkeys(line["size"] for line in found):
        floor = statistics.median(x["seconds"] for x in found if x["size"] == size and x["way"] == "floor")
        for way in dict.fromkeys(line["way"] for line in found):
            s = [x["seconds"] for x in found if x["size"] == size and x["way"] == way]
            m = statistics.median(s)
            lines.append(f"| {size / 1e6:.1f} MB | {way} | {m:.2f} ({min(s):.2f}-{max(s):.2f}) | {m / floor:.2f}x |")
    return "\n".join(lines)


STAGES = (
    "the server hands all orders to the SuperLink",
    "until the client's process starts (a SuperNode looks for orders every 3 s)",
    "that process starts, imports Flower, fetches the order",
    "it answers, the SuperNode passes the answer on, the server has it",
)


def where(found: list[dict[str, Any]]) -> str:
    """Where the time of a message goes, measured at the floor: medians over its messages."""
    lines = ["| payload | where the time of one message goes, at the floor | seconds (median) |", "|---|---|---|"]
    for size in dict.fromkeys(line["size"] for line in found):
        parts = [p for line in found if line["size"] == size for p in line["parts"]]
        for stage, values in zip(STAGES, zip(*parts, strict=True), strict=True):
            lines.append(f"| {size / 1e6:.1f} MB | {stage} | {statistics.median(values):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    from flower_local import LocalFederation

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="900000,86000000", help="payload bytes, by commas")
    parser.add_argument("--patience", type=float, default=3600)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        out = folder / "found.json"
        with LocalFederation(folder, args.clients) as federation:
            words = {"sizes": args.sizes, "rounds": str(args.rounds), "clients": str(args.clients), "out": str(out)}
            number = submit(federation, words)
            began = time.monotonic()
            status = federation.wait(number, args.patience)
            if status != "completed":
                raise SystemExit(f"the run is {status}: {federation.status(number)}\n{federation.logs()}")
            print(f"{args.clients} clients on this machine, {time.monotonic() - began:.0f} s in all\n")
        found = json.loads(out.read_text())
        print(f"{table(found, args.rounds)}\n\n{where(found)}")


if __name__ == "__main__":
    main()
