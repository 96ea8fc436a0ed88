"""What the hardware needs for the same work and nothing else: products, forward passes, forward and backward passes.

features: the products of a round at the rate of a large one on all cores. cnn and edit: forward and backward
passes over as many batches as a round has, gradients asked only of what may move, in one process of one thread per
core. frozen: forward passes of the frozen trunk, beside the same images through the feature cache, block by block.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import torch
from protocol import Clock, Workload, given_folder, read

if TYPE_CHECKING:
    from fedgraft.core.protocols import Examples, Network
    from fedgraft.runs.setup import RunSetup

SIDE, REPEATS, BLOCK, GROUP, IMAGES = 1024, 30, 32, 256, 768


def opened(folder: Path) -> RunSetup:
    """The run's parts, as fedgraft makes them."""
    from fedgraft.config.load import load
    from fedgraft.local.memory import keep_freed_memory
    from fedgraft.runs.setup import setup_of

    keep_freed_memory()  # the hardware does not need fresh pages either
    torch.set_num_threads(1)  # before any work, so that this process can be forked
    return setup_of(load(folder / "config.toml"))


def products(workload: Workload, width: int) -> list[float]:
    """Seconds that the products of a round would take at full speed."""
    torch.set_num_threads(workload.cores)
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(SIDE, SIDE, generator=draw), torch.randn(SIDE, SIDE, generator=draw)
    work = 4 * workload.per_round * workload.steps * workload.batch_size * width * workload.classes
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append((time.perf_counter() - began) * work / (2 * SIDE**3))
    return times


def extraction(job: RunSetup, images: int) -> dict[str, float]:
    """Seconds per image of bare forward passes over blocks and of fedgraft's extraction, in turn, the best of each.

    A run extracts groups of `GROUP` images at a time, each by one worker, block by block; so does this.
    """
    from fedgraft.data.feature_cache import CachedExamples

    network, train_images = job.task.network, job.task.eval_images
    kept = job.task.at_entry(train_images, network.depth)
    assert isinstance(kept, CachedExamples)
    bare, own = [], []
    size = min(GROUP, images // 3 // BLOCK * BLOCK)
    for start in range(0, images - size + 1, size):
        rows = torch.arange(start, start + size)
        blocks = [train_images.batch(block) for block in rows.split(BLOCK)]
        began = time.perf_counter()
        with torch.inference_mode():
            for block in blocks:
                network.features(block, 0)
        middle = time.perf_counter()
        kept.prepare(rows)
        bare.append((middle - began) / size)
        own.append((time.perf_counter() - middle) / size)
    return {"bare_image": min(bare), "extract_image": min(own)}


def passes(network: Network, images: Examples, size: int, count: int, entry: int) -> float:
    """Seconds of so many forward and backward passes over one batch of this size."""
    inputs, labels = images.batch(torch.arange(size)), images.labels[:size]
    network.train()
    if entry:
        with torch.no_grad():
            inputs = network.features(inputs, 0, entry)
    wanted = [p for p in network.parameters() if p.requires_grad]
    began = time.perf_counter()
    for _ in range(count):
        torch.autograd.grad(torch.nn.functional.cross_entropy(network(inputs, entry), labels), wanted)
    return time.perf_counter() - began


def _worker(work: Callable[[int], float], count: int, rounds: int, gate: object, found: object) -> None:
    work(1)
    for _ in range(rounds):
        gate.wait()  # type: ignore[attr-defined]
        found.put(work(count))  # type: ignore[attr-defined]


def training(workload: Workload, job: RunSetup) -> list[float]:
    """Seconds of a round's passes, shared by one process per core."""
    from fedgraft.runs.engines import Engines
    from fedgraft.runs.open_run import open_run

    opening, network, size = open_run(job, Engines(job)), job.task.network, job.config.local.batch_size
    moved = {part.name for part in opening.space.parts}
    for name, parameter in network.named_parameters():
        parameter.requires_grad = name in moved
    images, entry = job.task.eval_images, opening.context.examples.entry

    def work(count: int) -> float:
        return passes(network, images, size, count, entry)

    context = multiprocessing.get_context("fork")
    gate, found = context.Barrier(workload.cores), context.Queue()
    share, rounds = workload.per_round * workload.steps // workload.cores, max(3, workload.rounds)
    workers = [context.Process(target=_worker, args=(work, share, rounds, gate, found)) for _ in range(workload.cores)]
    for worker in workers:
        worker.start()
    times = [found.get() for _ in range(rounds * workload.cores)]
    for worker in workers:
        worker.join()
    return [max(times[i : i + workload.cores]) for i in range(0, len(times), workload.cores)]


def main() -> None:
    folder = given_folder()
    workload, arrays = read(folder)
    clock, more = Clock(workload), {}
    if workload.task == "head":
        clock.rounds = products(workload, arrays["train_x"].shape[1])
    elif workload.task == "frozen":
        more = extraction(opened(folder), min(IMAGES, len(arrays["train_x"])))
    else:
        clock.rounds = training(workload, opened(folder))
    clock.write(folder, "bare", ("torch", "transformers"), 0.0, **more)


if __name__ == "__main__":
    main()
