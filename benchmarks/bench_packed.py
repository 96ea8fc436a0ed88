"""Clients packed into one computation against clients one by one: time on CPU cores, and operations launched.

Ten clients of batch 32 train the same edit of a ViT for a few steps: the last block behind cached tokens, or low-rank
factors of all blocks from pixels. One by one is the engine that a CPU takes by itself (two worker processes, or one);
packed is `Packed` with as many threads. Rounds of the two alternate, so that whatever else uses the machine slows both;
the ratio is that of their medians. Operations are counted by a dispatch mode, as they would be launched on a device.

    python benchmarks/bench_packed.py FOLDER_OF_A_VIT
    python benchmarks/bench_packed.py vit:size=224,patch=16,width=192,depth=12,heads=3 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedgraft.algorithms import fedavg
from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.core.messages import Request, Response
from fedgraft.core.rng import torch_stream
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.dense import last_blocks
from fedgraft.edit.low_rank import LowRank
from fedgraft.engines.in_process import InProcess
from fedgraft.engines.packed import Packed
from fedgraft.engines.pool import Pool
from fedgraft.local.train import LocalTraining
from fedgraft.models.backbones import load_network

OUT = Path("runs") / "benchmarks" / "packed.json"
CLIENTS = 10
BATCH = 32
CLASSES = 100


class Launches(TorchDispatchMode):
    """Counts the operations that compute something: views and metadata launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation.is_view:
            self.count += 1
        return operation(*args, **(kwargs or {}))


def federation(model: str, kind: str, size: int, steps: int) -> tuple[Algorithm, ClientContext, list[Request]]:
    """The algorithm, the context of ten clients with random inputs, and a training request for each."""
    network = load_network(model, CLASSES, image_size=size)
    trainable: Any = last_blocks(1)
    entry = network.depth - 1
    if kind == "lora":
        trainable = LowRank()
        entry = 0
    local = LocalTraining(steps=steps, batch_size=BATCH, head_lr=0.5)
    algorithm = fedavg(local=local, trainable=trainable)
    opened = trainable.open(network, None)
    draw = torch_stream(0, "packed")
    with torch.no_grad():
        pixels = torch.randn(2 * BATCH, 3, network.image_size, network.image_size, generator=draw)
        inputs = network.features(pixels, 0, entry)
    labels = torch.randint(0, CLASSES, (len(inputs),), generator=draw)
    context = ClientContext(network, opened.space, FeatureExamples(inputs, labels, entry), rows_of, seed=0)
    vector = opened.space.gather(network)
    requests = []
    for client in range(CLIENTS):
        requests.append(Request("b", 1, client, "train", opened.space.digest, vector, {}, {"lr": 0.01}))
    return algorithm, context, requests


def rows_of(client: int) -> torch.Tensor:
    """A client's rows: half of the inputs, which ones depends on the client."""
    return torch.randperm(2 * BATCH, generator=torch_stream(client, "rows"))[:BATCH]


def largest_difference(ours: Sequence[Response], theirs: Sequence[Response]) -> float:
    """The largest difference of the clients' updates."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one.update is not None and other.update is not None
        difference = one.update.arrays["values"] - other.update.arrays["values"]
        largest = max(largest, float(difference.abs().max()))
    return largest


def compare(model: str, kind: str, size: int, steps: int, rounds: int, workers: int, pack: int) -> dict[str, float]:
    """Median seconds of a round of ten clients one by one and packed, their ratio, and the operations of each."""
    algorithm, context, requests = federation(model, kind, size, steps)
    alone = InProcess(algorithm, context)
    one_by_one: Any = alone if workers == 1 else Pool(algorithm, context, workers)
    packed = Packed(algorithm, context, pack, threads=workers)
    assert packed.reason is None, packed.reason
    theirs = list(one_by_one.exchange(requests))
    difference = largest_difference(packed.exchange(requests), theirs)
    seconds: dict[str, list[float]] = {"one by one": [], "packed": []}
    for _ in range(rounds):
        for name, engine in (("one by one", one_by_one), ("packed", packed)):
            began = time.perf_counter()
            list(engine.exchange(requests))
            seconds[name].append(time.perf_counter() - began)
    if workers > 1:
        one_by_one.close()
    with Launches() as single:
        list(alone.exchange(requests))
    all_together = Packed(algorithm, context, CLIENTS, threads=1)
    with Launches() as together:
        all_together.exchange(requests)
    one_by_one_seconds = statistics.median(seconds["one by one"])
    packed_seconds = statistics.median(seconds["packed"])
    return {
        "one by one": one_by_one_seconds,
        "packed": packed_seconds,
        "ratio": packed_seconds / one_by_one_seconds,
        "operations one by one": single.count,
        "operations packed": together.count,
        "fewer": single.count / together.count,
        "largest difference": difference,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both kinds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of a ViT, or the words of one with random weights")
    parser.add_argument("--size", type=int, default=112, help="pixels")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="processes, and threads of the packed engine")
    parser.add_argument("--pack", type=int, default=5, help="clients of a pack")
    parser.add_argument("--kinds", default="last_blocks,lora")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for kind in given.kinds.split(","):
        results[kind] = compare(given.model, kind, given.size, given.steps, given.rounds, given.workers, given.pack)
        print(kind, json.dumps({name: round(value, 7) for name, value in results[kind].items()}), flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"load": os.getloadavg()[0], "kinds": results}, indent=1))


if __name__ == "__main__":
    main()
