"""Local training against bare forward and backward passes, ViT-S/16 and ViT-B/16 at 224 pixels, every trainable kind.

Both do the same passes: the same network with random weights, the same trained parameters, the same inputs at the
block where they enter (behind the frozen part, as from a feature cache). The bare loop computes loss and gradients and
nothing else: no optimizer, no clients, no messages. fedgraft carries out a training request: it binds the model's
vector, draws rows, steps the optimizer, and returns the encoded update. The two alternate on one thread; ratios are
those of medians of processor time, which a loaded machine changes less than the clock does.

What fedgraft adds to a step (the optimizer, and copies of as many values as train) does not grow with the batch, so the
ratio falls as batches grow; the default batch of a run is 64.

    python benchmarks/bench_overhead.py                     # both networks, all kinds: half an hour when idle
    python benchmarks/bench_overhead.py --networks vit-s --kinds lora,head --batch 4
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
from torch.nn.functional import cross_entropy

from fedgraft.algorithms import fedavg
from fedgraft.client.context import ClientContext
from fedgraft.core.messages import Request
from fedgraft.core.registry import TRAINABLES
from fedgraft.core.rng import torch_stream
from fedgraft.data.examples import FeatureExamples
from fedgraft.edit.sparse import Sparse
from fedgraft.engines.in_process import InProcess
from fedgraft.local.train import LocalTraining
from fedgraft.models.backbones import load_network

OUT = Path("runs") / "benchmarks" / "overhead.json"
NETWORKS = {"vit-s": (384, 6), "vit-b": (768, 12)}
"""Width and heads."""
CLASSES = 100


def trainable_of(kind: str) -> Any:
    """The trainable of a kind; a mask is drawn at random, because calibration is no part of a step."""
    if kind == "sparse":
        return Sparse(strategy="random")
    return TRAINABLES[kind]()


def measure(name: str, kind: str, batch: int, steps: int, rounds: int) -> dict[str, float]:
    """Median processor seconds of `steps` steps, bare and by fedgraft, and their ratio."""
    width, heads = NETWORKS[name]
    network = load_network(f"vit:size=224,patch=16,width={width},depth=12,heads={heads}", CLASSES)
    trainable = trainable_of(kind)
    opened = trainable.open(network, _Ask())
    entry = network.entry_for(opened.space.first_block(network))
    draw = torch_stream(0, "overhead")
    shape = (3, 224, 224)
    if entry == network.depth:
        shape = (width,)  # type: ignore[assignment]
    elif entry:
        shape = (197, width)  # type: ignore[assignment]
    inputs = torch.randn(batch, *shape, generator=draw)
    labels = torch.randint(0, CLASSES, (batch,), generator=draw)
    rows = torch.arange(batch)
    local = LocalTraining(steps=steps, batch_size=batch)
    algorithm = fedavg(local=local, trainable=trainable)
    context = ClientContext(network, opened.space, FeatureExamples(inputs, labels, entry), lambda client: rows, seed=0)
    vector = opened.space.gather(network)
    request = Request("b", 1, 0, "train", opened.space.digest, vector, {}, {"lr": 0.001})
    engine = InProcess(algorithm, context)

    def bare() -> None:
        for _ in range(steps):
            cross_entropy(network(inputs, entry), labels).backward()
            for parameter in network.parameters():
                parameter.grad = None

    def fedgraft() -> None:
        list(engine.exchange([request]))

    seconds: dict[str, list[float]] = {"bare": [], "fedgraft": []}
    for number in range(rounds + 1):
        for word, work in (("fedgraft", fedgraft), ("bare", bare)):  # fedgraft first: it binds what trains
            began = time.process_time()
            work()
            if number:
                seconds[word].append(time.process_time() - began)
    medians = {word: statistics.median(values) for word, values in seconds.items()}
    return medians | {"ratio": medians["fedgraft"] / medians["bare"]}


class _Ask:
    """Stands for clients where a random mask asks nobody."""

    seed = 0
    examples = 1
    clients = 1

    def cached(self, words: Sequence[str], make: Any) -> Any:
        return make()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a line for each network and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--kinds", default=",".join(TRAINABLES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for name in given.networks.split(","):
        for kind in given.kinds.split(","):
            found = measure(name, kind, given.batch, given.steps, given.rounds)
            results[f"{name} {kind}"] = found
            print(name, kind, {word: round(value, 3) for word, value in found.items()}, flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"load": os.getloadavg()[0], "batch": given.batch, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
