"""What sparsity saves on ViT-S/16 shapes: optimizer step, client reset, aggregation of ten, bytes up.

The dense version of each is the same code on the space of the whole trunk. Repeats of both alternate, and the ratio
is taken between medians of processor time, which other work on the machine disturbs least. A reset writes k scattered
numbers, each into a cache line of 16: at one weight in a hundred nearly every number has a line to itself, at one in
ten four of five lines are touched, which is why a number then costs less but the whole about what a dense copy does.
Writes runs/benchmarks/sparse.json.

    python benchmarks/bench_sparse.py --repeats 5 --sparsity 0.9 0.97 0.99 0.997
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.aggregate.codecs import VALUES
from fedgraft.aggregate.mean import weighted_mean
from fedgraft.core.messages import Response, wire_size
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, masked, select
from fedgraft.edit.choose import choose, random_scores
from fedgraft.local.optimizers import Optimizer, adamw, sgdm
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork

CLIENTS = 10
COSTS = ("SGDM step", "AdamW step", "client reset", f"mean of {CLIENTS}")
Work = Callable[[], object]
OUT = Path("runs") / "benchmarks" / "sparse.json"
GROWTH = 1.25
"""How much more a coordinate may cost among ten times as many, for a cost in proportion to k."""


def timed(work: Work) -> float:
    """Seconds of processor time of one call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def compare(dense: Work, sparse: Work, repeats: int) -> tuple[float, float]:
    """Median seconds of both, their repeats alternating, after one call each that does not count."""
    dense(), sparse()
    runs = [(timed(dense), timed(sparse)) for _ in range(repeats)]
    first, second = (statistics.median(times) for times in zip(*runs, strict=True))
    return first, second


def vectors(space: EditSpace, count: int) -> list[Tensor]:
    """Small random changes of a space."""
    return [1e-3 * torch.randn(space.size, generator=torch_stream(0, "bench", k)) for k in range(count)]


def stepping(space: EditSpace, network: VisionNetwork, rule: Optimizer) -> Work:
    """One optimizer step on the space, carried into the network."""
    bound, state = space.bind(network), rule.init(space.trained)
    gradient = vectors(space, 1)[0]

    def work() -> None:
        rule.step(bound.values[: space.trained], gradient.clone(), state, 1e-3)
        bound.push()

    return work


def resetting(space: EditSpace, network: VisionNetwork) -> Work:
    """Put the server's vector into a client's network."""
    bound = space.bind(network)
    start = bound.values.clone()
    return lambda: bound.load(start)


def averaging(space: EditSpace) -> Work:
    """The weighted mean of ten clients' changes."""
    updates, weights = vectors(space, CLIENTS), torch.arange(1.0, CLIENTS + 1)
    return lambda: weighted_mean(updates, weights)


def upload(space: EditSpace) -> int:
    """Bytes of one client's encoded answer."""
    update = VALUES.encode(torch.zeros(space.size), torch_stream(0, "encode"))
    return wire_size(Response("0123456789abcdef", 7, 3, space.digest, 500, update, metrics={"loss": 1.0, "steps": 4.0}))


def rows(space: EditSpace, model: str) -> list[Work]:
    """The four costs on one space; it drives a network of its own, so that binding does not count."""
    network = load_network(model, 100)
    steps = [stepping(space, network, rule) for rule in (sgdm(0.9, 1e-4), adamw())]
    return [*steps, resetting(space, load_network(model, 100)), averaging(space)]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every cost, dense and sparse in turn, and bytes up, for every sparsity."""
    network = load_network(given.model, 100)
    dense = select(network, lambda name: name.startswith("backbone."), buffers=False)
    scores = random_scores({part.name: torch.empty(part.shape) for part in dense.parts}, 0)
    whole, found = rows(dense, given.model), []
    for sparsity in given.sparsity:
        sparse = masked(network, dict(choose(scores, 1 - sparsity)))
        pairs = zip(COSTS, whole, rows(sparse, given.model), strict=True)
        costs = {name: compare(one, two, given.repeats) for name, one, two in pairs}
        found.append({"sparsity": sparsity, "k": sparse.size, "costs": costs, "bytes": upload(sparse)})
    return {"model": given.model, "d": dense.size, "bytes": upload(dense), "repeats": given.repeats, "points": found}


def section(path: Path = OUT) -> str:
    """The result of the last run as Markdown."""
    found = json.loads(path.read_text())
    lines = [
        "## Sparse against dense on ViT-S/16 shapes",
        "",
        f"Command: `python benchmarks/bench_sparse.py`. {found['d']:,} weights, one thread, medians of "
        f"{found['repeats']}, dense and sparse in turn. In brackets: nanoseconds for each of the k coordinates.",
        "",
        "| sparse | k | " + " | ".join(f"{name}, ms | times less" for name in COSTS) + " | bytes up, times less |",
        "|---|---|" + "---|---|" * len(COSTS) + "---|",
    ]
    for point in found["points"]:
        cells = []
        for dense, sparse in point["costs"].values():
            cells += [f"{1e3 * sparse:.2f} ({1e9 * sparse / point['k']:.1f})", f"{dense / max(sparse, 1e-9):.1f}"]
        less = f"{found['bytes'] / point['bytes']:.2f}"
        lines.append(f"| {100 * point['sparsity']:g} % | {point['k']:,} | {' | '.join(cells)} | {less} |")
    return "\n".join([*lines, ""])


def bars(path: Path = OUT) -> list[tuple[str, str, float, float, bool]]:
    """What was to be shown: a coordinate costs no more among many than among few."""
    points = sorted(json.loads(path.read_text())["points"], key=lambda point: point["k"])
    few = min(points, key=lambda point: abs(point["sparsity"] - 0.99))
    many, lines = points[-1], []
    for name in COSTS:
        growth = (many["costs"][name][1] / many["k"]) / (few["costs"][name][1] / few["k"])
        shares = [100 * point["sparsity"] for point in (many, few)]
        text = f"{name}: a coordinate at {shares[0]:g} %, times one at {shares[1]:g} % (at most)"
        lines.append(("sparse", text, GROWTH, growth, growth <= GROWTH))
    return lines


def main() -> None:
    """Measure, keep the figures, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.97, 0.99, 0.997])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="vit-s16", help="a network by name; tiny for a quick look")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    result = measure(given)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result))
    print(section(given.out))


if __name__ == "__main__":
    main()
