"""Seconds per round of real processes: fedgraft's door and nodes next to Flower's own grid and nodes, in the same run.

Server and `--clients` nodes are on this machine. Clients echo what they get, so that only the transport is measured: no
training, no network beyond loopback. `fedgraft` is `FlowerEngine.exchange` through the door, over TLS with registered
keys, with its packing, hashing and the hop to the node's worker. `Flower` is a stock SuperLink with stock SuperNodes,
plaintext, the same bytes as one flat array, collected with the grid's own `send_and_receive`; `floor` is the same with
quick looks at the answers instead of one every three seconds. `secure` is a whole round of a real run under secure
aggregation, five stages, with a vector of as many bytes. At last the nodes wait, and their processor time is told.

    python -m benchmarks.bench_flower

prints a markdown table and writes runs/benchmarks/flower.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.flower_local import LocalFederation, StockFlower

OUT = Path("runs") / "benchmarks" / "flower.json"
ROOT = Path(__file__).resolve().parents[1]
BARS = {("fedgraft", 900_000): 1.0, ("fedgraft", 86_000_000): 10.0, ("secure", 900_000): 4.0}
"""Most seconds a round of ten nodes may take."""
IDLE_SHARE = 0.005
"""Most of a core that a node may take while it waits."""
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
"""Echoes: what comes in goes out."""
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def echo(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
'''

SERVER = '''\
"""Times rounds of Flower's own grid and writes them to a file."""
import json, os, time
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def quick(grid, messages):
    waiting, began, replies = set(grid.push_messages(messages)), time.monotonic(), []
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
        time.sleep(min(0.5, max(0.02, 0.02 * (time.monotonic() - began))))
    return replies


@app.main()
def main(grid, context):
    c = context.run_config
    rounds, clients = int(c["rounds"]), int(c["clients"])
    while len(list(grid.get_node_ids())) < clients:
        time.sleep(0.5)
    nodes, found = sorted(grid.get_node_ids()), []
    for size in map(int, c["sizes"].split(",")):
        for way, collect in (("Flower", grid.send_and_receive), ("floor", lambda sent: quick(grid, sent))):
            for _ in range(rounds if size < 10_000_000 else 1):
                flat = ArrayRecord({"flat": Array("uint8", (size,), "fedgraft", os.urandom(size))})
                messages = [Message(RecordDict({"arrays": flat}), node, "train") for node in nodes]
                began = time.perf_counter()
                replies = list(collect(messages))
                assert len(replies) == clients and all(reply.has_content() for reply in replies), replies
                found.append({"size": size, "way": way, "seconds": time.perf_counter() - began})
                with open(c["out"] + ".new", "w") as file:
                    json.dump(found, file)
    os.rename(c["out"] + ".new", c["out"])
'''


def flower_rounds(folder: Path, clients: int, rounds: int, sizes: str, patience: float) -> list[dict[str, Any]]:
    """Time rounds of a stock SuperLink and stock SuperNodes."""
    app = folder / "app"
    (app / "bench_app").mkdir(parents=True)
    files = {"pyproject.toml": PROJECT, "bench_app/__init__.py": "", "bench_app/server.py": SERVER}
    for name, text in {**files, "bench_app/client.py": CLIENT}.items():
        (app / name).write_text(text)
    out = folder / "found.json"
    with StockFlower(folder, clients) as stock:
        settings = f'sizes="{sizes}" rounds="{rounds}" clients="{clients}" out="{out}"'
        done = stock.run(app, "--run-config", settings)
        deadline = time.monotonic() + patience
        while not out.exists():
            if done.returncode or time.monotonic() > deadline:
                raise SystemExit(f"Flower's run does not end: {done.stdout}{done.stderr}\n{stock.logs()}")
            time.sleep(0.5)
    return list(json.loads(out.read_text()))


def timed(found: list[dict[str, Any]], size: int, way: str, work: Callable[[], Any]) -> None:
    """Time one round."""
    began = time.perf_counter()
    work()
    found.append({"size": size, "way": way, "seconds": time.perf_counter() - began})


def door_rounds(federation: LocalFederation, clients: int, rounds: int, sizes: str) -> list[dict[str, Any]]:
    """Time rounds through the door; this process is the run."""
    import torch

    from fedgraft.core.messages import Request
    from fedgraft.deploy.door_link import DoorTransport, socket_path
    from fedgraft.engines.flower.server import FlowerEngine, Patience

    fed = federation.fed
    settings = {"config": "", "folder": "", "task": "", "run": 1}
    transport = DoorTransport(socket_path(fed.path), fed.home / "spool", settings)
    engine = FlowerEngine(transport, clients, Patience(wait=600, least=clients))
    engine.gather()
    found: list[dict[str, Any]] = []
    for size in map(int, sizes.split(",")):
        transport.limit_responses(2 * size + (64 << 20))
        for round in range(rounds):
            vector = torch.rand(size // 4)
            requests = [Request("b", round, k, "train", vector=vector) for k in range(clients)]

            def exchange(requests: list[Request] = requests, size: int = size) -> None:
                answers = engine.exchange(requests)
                assert len(answers) == clients and all(len(answer[1]) > size for answer in answers), answers

            timed(found, size, "fedgraft", exchange)
    transport.door.close()
    return found


def secure_rounds(federation: LocalFederation, clients: int, rounds: int, size: int) -> list[dict[str, Any]]:
    """Time the rounds of a real run under secure aggregation whose vector has about so many bytes."""
    from fedgraft.config.load import load

    folder = federation.folder / "secure"
    overrides = [f"partition.clients={clients}", "rounds.fraction=1.0", f"rounds.total={rounds + 2}", "data.limit=400"]
    frozen = 1 - size / 4 / 2_712_010  # of nano's weights
    overrides += ["model.name=nano", "model.head=random", "trainable.kind=sparse", "trainable.sparse.strategy=random"]
    overrides += [f"trainable.sparse.sparsity={frozen:.4f}", "trainable.head_too=false", "local.steps=1"]
    overrides += ["local.batch_size=1", "rounds.evaluate_every=0", "rounds.test=false", "personal.evaluate=never"]
    overrides += ["privacy.aggregation=secure", "engine=reference", "partition.kind=iid"]
    run = federation.submit(load(None, overrides), folder)
    if federation.wait(run, 900) != "completed":
        raise SystemExit(f"the secure run is {federation.status(run)}\n{federation.logs()}")
    found = []
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if line["round"] > 1:  # in the first, nodes build their network
            seconds = sum(line["seconds"].values())
            found.append({"size": size, "way": "secure", "seconds": seconds, "bytes_up": line["bytes_up"]})
    return found


def idle_share(federation: LocalFederation, seconds: float) -> float:
    """Return the share of a core that a waiting node takes, its worker included."""
    from fedgraft.deploy.process import _descendants

    def ticks() -> int:
        total = 0
        for process in federation.processes.values():
            for pid in (process.pid, *(child.pid for child in _descendants(process.pid))):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds / len(federation.processes)


def table(found: list[dict[str, Any]]) -> str:
    """The result as markdown: medians, with the least and the most."""
    lines = ["| payload | way | rounds | seconds a round: median (least-most) | bar |", "|---|---|---|---|---|"]
    for size in dict.fromkeys(line["size"] for line in found):
        for way in dict.fromkeys(line["way"] for line in found):
            seconds = [x["seconds"] for x in found if x["size"] == size and x["way"] == way]
            if seconds:
                span = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
                lines.append(f"| {size / 1e6:.1f} MB | {way} | {len(seconds)} | {span} | {BARS.get((way, size), '')} |")
    return "\n".join(lines)


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    kept = json.loads(path.read_text())
    said = f"Command: `python -m benchmarks.bench_flower`. {kept['clients']} nodes on this machine, clients that echo."
    idle = f"A waiting node takes {100 * kept['idle']:.2f} % of a core (bar {100 * IDLE_SHARE:g} %)."
    return "\n\n".join(["## A deployed round", said, table(kept["rounds"]), idle, ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown of a deployed round."""
    kept, rows = json.loads(path.read_text()), []
    medians: dict[tuple[str, int], float] = {}
    for line in kept["rounds"]:
        key = (line["way"], line["size"])
        medians[key] = statistics.median(x["seconds"] for x in kept["rounds"] if (x["way"], x["size"]) == key)
    for (way, size), bar in BARS.items():
        if (way, size) in medians:
            what = f"a round of {kept['clients']} nodes, {size / 1e6:.1f} MB each, {way} (seconds, at most)"
            rows.append(("deployed", what, bar, medians[way, size], medians[way, size] <= bar))
        if way == "fedgraft" and ("Flower", size) in medians:
            ratio = medians["Flower", size] / medians[way, size]
            rows.append(
                ("deployed", f"times faster than Flower's own grid, {size / 1e6:.1f} MB", 5.0, ratio, ratio >= 5)
            )
    rows.append(
        (
            "deployed",
            "share of a core of a waiting node (at most)",
            IDLE_SHARE,
            kept["idle"],
            kept["idle"] <= IDLE_SHARE,
        )
    )
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="900000,86000000", help="payload bytes, by commas")
    parser.add_argument("--patience", type=float, default=3600)
    parser.add_argument("--idle", type=float, default=60, help="seconds that the nodes wait at the end")
    parser.add_argument("--no-flower", action="store_true", help="without Flower's own grid")
    parser.add_argument("--no-secure", action="store_true", help="without the secure run")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    path = os.pathsep.join([str(ROOT / "tests/support/hostile_site"), str(ROOT / "src"), str(ROOT)])
    with tempfile.TemporaryDirectory() as scratch:
        with LocalFederation(Path(scratch) / "echo", args.clients, PYTHONPATH=path, ECHO="1") as federation:
            found += door_rounds(federation, args.clients, args.rounds, args.sizes)
            idle = idle_share(federation, args.idle)
        print(table(found), f"\nidle {100 * idle:.2f} %", flush=True)
        if not args.no_secure:
            with LocalFederation(Path(scratch) / "secure", args.clients, PYTHONPATH=path) as federation:
                found += secure_rounds(federation, args.clients, args.rounds, 900_000)
        if not args.no_flower:
            found += flower_rounds(Path(scratch) / "flower", args.clients, args.rounds, args.sizes, args.patience)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"clients": args.clients, "idle": idle, "rounds": found}, indent=1) + "\n")
    print(section(args.out))


if __name__ == "__main__":
    main()
