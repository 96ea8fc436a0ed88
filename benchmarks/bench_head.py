"""A round of a linear head on given features : reference engine, batched engine, and the limit of products.

The limit is the time of the round's multiplications at the rate of a large matrix product on the same cores. All
take turns, so that a busy machine slows them alike; ratios are between the best times, medians stand beside them.
Writes runs/benchmarks/head.json.

    python benchmarks/bench_head.py --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fedgraft.algorithms import fedavg
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.messages import Request
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import select
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.dense import head
from fedgraft.engines.batched import Batched
from fedgraft.engines.in_process import InProcess
from fedgraft.local.train import LocalTraining
from fedgraft.server.collect import Engine

SIDE = 1024
OUT = Path("runs") / "benchmarks" / "head.json"


class Given(FeatureExamples):
    """Features in memory that go straight to where they are used."""

    def batch_into(self, rows: Tensor, generator: torch.Generator | None, out: Tensor) -> None:
        torch.index_select(self.features, 0, rows, out=out)


class Head(nn.Module):
    """A network that is only a head, for features that are given."""

    depth = 1

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)
        self.width, self.classes = width, classes

    def forward(self, inputs: Tensor, entry: int = 1) -> Tensor:
        return self.head(inputs)


def federation(given: argparse.Namespace) -> tuple[Algorithm, ClientContext]:
    """Clients with an equal share of random features each."""
    draw = torch_stream(0, "bench")
    network = Head(given.width, given.classes)
    count = given.clients * given.examples
    features = torch.randn(count, given.width, generator=draw)
    labels = torch.randint(0, given.classes, (count,), generator=draw)
    algorithm = fedavg(local=LocalTraining(steps=given.steps, batch_size=given.batch), trainable=head())
    context = ClientContext(
        network,  # type: ignore[arg-type]
        select(network, lambda name: True),  # type: ignore[arg-type]
        Given(features, labels, 1),
        lambda k: torch.arange(k * given.examples, (k + 1) * given.examples),
        0,
    )
    return algorithm, context


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def product(threads: int) -> Callable[[], object]:
    """A large matrix product on so many threads."""
    a, b, out = (torch.randn(SIDE, SIDE, generator=torch_stream(0, "product")) for _ in range(3))

    def work() -> None:
        torch.set_num_threads(threads)
        torch.mm(a, b, out=out)
        torch.set_num_threads(1)

    return work


def main() -> None:
    """Print seconds a round, and the ratios to the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"clients": 100, "examples": 450, "per-round": 10, "steps": 16, "batch": 64, "width": 384, "classes": 100}
    for name, default in {**sizes, "repeats": 3, "rounds": 5, "threads": os.cpu_count() or 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    algorithm, context = federation(given)
    vector = context.space.gather(context.network)
    cohort = range(given.per_round)
    requests = [Request("bench", 0, k, "train", context.space.digest, vector, {}, {"lr": 0.1}) for k in cohort]
    engines: dict[str, Engine] = {
        "reference, 1 thread": InProcess(algorithm, context),
        "batched, 1 thread": Batched(algorithm, context, 1),
        f"batched, {given.threads} threads": Batched(algorithm, context, given.threads),
    }
    limits = {n: product(n) for n in sorted({1, given.threads})}
    scale = 4 * given.per_round * given.steps * given.batch * given.width * given.classes / (2 * SIDE**3)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    least: dict[int, list[float]] = {n: [] for n in limits}
    for _ in range(given.repeats * given.rounds):
        for name, engine in engines.items():
            seconds[name].append(timed(lambda engine=engine: list(engine.exchange(requests))))  # type: ignore[misc]
        for n, large in limits.items():
            least[n].append(scale * timed(large))
    result = {"seconds": seconds, "least": {str(n): found for n, found in least.items()}, "load": os.getloadavg()[0]}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result))
    print(section(given.out))


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    limits = {int(n): min(times) for n, times in found["least"].items()}
    lines = [
        "## A round of a linear head",
        "",
        "Command: `python benchmarks/bench_head.py`. Ten clients of given features, engine only; ratios between the "
        f"best of {len(next(iter(found['seconds'].values())))}.",
        "",
        "| | best, ms | median, ms | " + " | ".join(f"times the limit of {n} threads" for n in limits) + " |",
        "|---|---|---|" + "---|" * len(limits),
    ]
    rows = {f"limit, {n} threads": found["least"][str(n)] for n in limits} | found["seconds"]
    for name, times in rows.items():
        ratios = " | ".join(f"{min(times) / limit:.2f}" for limit in limits.values())
        lines.append(f"| {name} | {1e3 * min(times):.2f} | {1e3 * statistics.median(times):.2f} | {ratios} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
