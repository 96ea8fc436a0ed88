"""What sparsity saves on ViT-S/16 shapes: optimizer step, client reset, aggregation of ten, bytes up.

The dense version of each is the same code on the space of the whole trunk. Repeats of both alternate, and the ratio
is taken between medians of processor time, which other work on the machine disturbs least. A reset writes k scattered
numbers where the dense one copies a block: with one weight in ten chosen at random nearly every cache line is
touched, so at 90 % it costs about what the dense one does, and falls below it from there.

    python benchmarks/bench_sparse.py --repeats 7 --sparsity 0.9 0.99
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedgraft.combine.mean import weighted_mean
from fedgraft.edit.choose import choose, random_scores
from fedgraft.edit.space import EditSpace, masked, select
from fedgraft.exchange.codecs import VALUES
from fedgraft.local.optimizers import Optimizer, adamw, sgdm
from fedgraft.messages import Reply, wire_size
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.randomness import torch_stream

CLIENTS = 10
COSTS = ("SGDM step", "AdamW step", "client reset", f"mean of {CLIENTS}")
Work = Callable[[], object]


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
    changes, weights = vectors(space, CLIENTS), torch.arange(1.0, CLIENTS + 1)
    return lambda: weighted_mean(changes, weights)


def upload(space: EditSpace) -> int:
    """Bytes of one client's encoded answer."""
    change = VALUES.encode(torch.zeros(space.size), torch_stream(0, "encode"))
    return wire_size(Reply("0123456789abcdef", 7, 3, space.digest, 500, change, metrics={"loss": 1.0, "steps": 4.0}))


def rows(space: EditSpace, model: str) -> list[Work]:
    """The four costs on one space; it drives a network of its own, so that binding does not count."""
    network = load_network(model, 100)
    steps = [stepping(space, network, rule) for rule in (sgdm(0.9, 1e-4), adamw())]
    return [*steps, resetting(space, load_network(model, 100)), averaging(space)]


def main() -> None:
    """Print one table per sparsity: dense, sparse, and how many times less."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sparsity", type=float, nargs="+", default=[0.9, 0.99])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default="vit-s16", help="a network by name; tiny for a quick look")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    network = load_network(given.model, 100)
    dense = select(network, lambda name: name.startswith("backbone."), buffers=False)
    scores = random_scores({part.name: part.shape for part in dense.parts}, 0)
    whole = rows(dense, given.model)
    for sparsity in given.sparsity:
        sparse = masked(network, dict(choose(scores, 1 - sparsity)))
        print(f"{given.model}: {dense.size:,} weights, {sparse.size:,} of them move ({100 * sparsity:g} % sparse)")
        print(f"{'':14}{'dense':>14}{'sparse':>14}{'times less':>12}")
        for name, one, two in zip(COSTS, whole, rows(sparse, given.model), strict=True):
            slow, quick = compare(one, two, given.repeats)
            print(f"{name:14}{1e3 * slow:>11.2f} ms{1e3 * quick:>11.2f} ms{slow / max(quick, 1e-9):>12.1f}")
        big, small = upload(dense), upload(sparse)
        print(f"{'bytes up':14}{big:>14,}{small:>14,}{big / small:>12.2f}")


if __name__ == "__main__":
    main()
